"""Findings of the step audit: what a training step does that is not declared, stage by stage in the order of the step."""

from utils.diagnostics.audit.verdict import STAGES
from utils.diagnostics.findings import Finding, Found
from utils.runs.record import RunRecord


def step_deviates(record: RunRecord) -> Found:
    audits = [(step, audit["checks"]) for step, audit in record.records("audit") if isinstance(audit.get("checks"), list)]
    failed = [(step, audit["failed"]) for step, audit in record.records("audit") if "failed" in audit]
    if failed:
        yield Finding("rule-failed", "info", f"the step audit: {failed[-1][1]}", failed[-1][0])
    for stage in STAGES:
        code = f"step-{stage.replace('_', '-')}"
        own = [(step, check) for step, checks in audits for check in checks if check.get("stage") == stage]
        if any(check.get("healthy") is not None for _, check in own):
            yield code
        wrong = [(step, check) for step, check in own if check.get("healthy") is False]
        if not wrong:
            continue
        step, check = wrong[-1]
        steps = sorted({step for step, _ in wrong})
        others = list(dict.fromkeys(c["name"] for _, c in wrong if c["name"] != check["name"]))
        evidence = f"{check['message']}; seen in {len(steps)} of {len(audits)} audits, first at update {steps[0]}"
        evidence += f"; also: {', '.join(others)}" if others else ""
        yield Finding(code, "critical", evidence, step, declared=check["declared"], observed=check["observed"])

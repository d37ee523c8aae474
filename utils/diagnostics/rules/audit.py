"""Findings of the step audit: what a training step does that is not declared, stage by stage in the order of the step."""

from utils.diagnostics.audit.verdict import STAGES
from utils.diagnostics.finding import SEVERITIES, Finding, Found
from utils.runs.record import RunRecord


def audited(record: RunRecord) -> list[dict]:
    """Returns what the step audit saw last of each quantity, or where it was wrong once, that: checks as in `audit.verdict`, in
    the order of a step, with "step" (the update) and "looks" (how often)."""
    newest: dict[tuple[str, str], dict] = {}
    for step, audit in record.records("audit"):
        for check in audit.get("checks", ()):
            key = check["stage"], check["name"]
            known = newest.get(key, {})
            looks = known.get("looks", 0) + (check["healthy"] is not None)
            keeps = known and (known["healthy"] is False or check["healthy"] is None) and check["healthy"] is not False
            newest[key] = (known if keeps else {**check, "step": step}) | {"looks": looks}
    return sorted(newest.values(), key=lambda check: STAGES.index(check["stage"]))


def step_deviates(record: RunRecord) -> Found:
    audits = [(step, audit["checks"]) for step, audit in record.records("audit") if isinstance(audit.get("checks"), list)]
    failed = [(step, audit["failed"]) for step, audit in record.records("audit") if "failed" in audit]
    if failed:
        yield Finding("rule-failed", "info", f"the step audit: {failed[-1][1]}", failed[-1][0])
    for stage in STAGES:
        own = [(step, check) for step, checks in audits for check in checks if check.get("stage") == stage]
        codes = dict.fromkeys((_code(stage), *(check.get("code") or _code(stage) for _, check in own)))
        for code in codes:
            part = [(step, check) for step, check in own if (check.get("code") or _code(stage)) == code]
            yield from _deviations(code, part, len(audits))


def _code(stage: str) -> str:
    return f"step-{stage.replace('_', '-')}"


def _deviations(code: str, seen: list[tuple[int, dict]], looks: int) -> Found:
    """The finding of the checks (update, check) that have its code."""
    if any(check.get("healthy") is not None for _, check in seen):
        yield code
    severities = [SEVERITIES.index(check.get("severity", "critical")) for _, check in seen if check.get("healthy") is False]
    if not severities:
        return
    severity = SEVERITIES[min(severities)]
    wrong = [one for one in seen if one[1].get("healthy") is False and one[1].get("severity", "critical") == severity]
    step, check = wrong[-1]
    steps = sorted({step for step, _ in wrong})
    others = list(dict.fromkeys(c["name"] for _, c in wrong if c["name"] != check["name"]))
    evidence = f"{check['message']}; seen in {len(steps)} of {looks} audits, first at update {steps[0]}"
    evidence += f"; also: {', '.join(others)}" if others else ""
    yield Finding(code, severity, evidence, step, declared=check["declared"], observed=check["observed"])

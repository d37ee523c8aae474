"""What the doctor of the training step found, as a run has recorded it."""

from utils.diagnostics.finding import Finding, Found
from utils.runs.record import RunRecord

TEXTS = ("declared", "observed", "stage", "title", "cause")


def looks(record: RunRecord) -> int:
    """Returns how many updates were looked at."""
    return len({step for step, audit in record.records("audit") if audit.get("measured")})


def measured(record: RunRecord) -> list[str]:
    """Returns the stages of which something was measured in any of them."""
    return list(dict.fromkeys(stage for _, audit in record.records("audit") for stage in audit.get("measured", ())))


def step_deviates(record: RunRecord) -> Found:
    newest: dict[str, dict] = {}
    failed: dict[str, int] = {}  # errors, and when each came last
    for step, audit in record.records("audit"):
        if "failed" in audit:
            failed[audit["failed"]] = step
        newest |= {one["code"]: one for one in audit.get("found", ())}
        for code in audit.get("withdrawn", ()):  # of an update that was made again
            newest.pop(code, None)
    for error, step in failed.items():
        yield Finding("rule-failed", "info", f"the look at the training step: {error}", step)
    for code, one in newest.items():
        texts = {name: one[name] for name in TEXTS}
        evidence = f"{one['observed']}; declared: {one['declared']}"
        yield Finding(code, one["severity"], evidence, one["step"], fixes=list(one["fixes"]), **texts)

"""What the step audit says of one quantity of a training step: what it is declared to be, and what was observed."""

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from steady_doctor.found import Found
from steady_doctor.words import finding

STAGES = (
    *("data", "noise", "timestep", "input", "condition", "network", "target", "weight"),
    *("gradient", "optimizer", "learning_rate", "ema", "state", "ranks", "export"),
)


@dataclass(frozen=True)
class Check:
    """One quantity. `declared` and `observed` are short texts for a table; `message` says in plain words what the step does
    instead, and is empty where nothing is wrong."""

    stage: str  # of STAGES
    name: str  # of the quantity
    declared: str
    observed: str
    healthy: bool | None  # None: not observed
    message: str = ""
    severity: str = "critical"  # of what is wrong; see `finding.SEVERITIES`
    code: str = ""  # of the finding; empty: that of the stage

    def __post_init__(self):
        if self.stage not in STAGES:
            raise ValueError(f"unknown stage {self.stage!r}")
        if self.healthy is not False:
            object.__setattr__(self, "message", "")

    def to_json(self) -> dict:
        return asdict(self)


def checks_of(found: Iterable[Found]) -> list[Check]:
    """What a law of the new doctor found, as a check."""
    checks = []
    for one in found:
        said = finding(one)
        text = f"{said.title}: {said.observed}"
        checks.append(Check(said.stage, one.code, said.declared, said.observed, False, text, said.severity))
    return checks


def not_observed(stage: str, name: str, declared: str, why: str) -> Check:
    return Check(stage, name, declared, f"not observed: {why}", None)


def step_summary(checks: list[dict]) -> str:
    """Returns how many of the checks found what is declared, in a line for the terminal."""
    fine, wrong, unknown = (sum(check["healthy"] is kind for check in checks) for kind in (True, False, None))
    text = f"the training step: {fine} of {len(checks)} quantities as declared" + f", {wrong} not" * bool(wrong)
    return text + f", {unknown} not observed" * bool(unknown)


def step_lines(checks: list[dict]) -> list[str]:
    """Checks as a table for the terminal: stage, quantity, declared | observed."""
    lines = ["the training step    declared | observed"]
    for check in checks:
        mark = {True: "OK", False: "FAIL", None: "-"}[check["healthy"]]
        if check["healthy"] is False:
            mark = {"warning": "WARN", "info": "INFO"}.get(check.get("severity", "critical"), mark)
        text = f"{check['stage']}: {check['name']}: {check['declared']} | {check['observed']}"
        lines += textwrap.wrap(text, 110, initial_indent=f"{mark:<6}", subsequent_indent=" " * 6, break_on_hyphens=False)
    return lines

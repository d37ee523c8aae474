"""What the doctor found in a run, and how it is shown."""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.core.files import write_json

# Of each code its title, cause, fixes and stage. Not by the reader of steady_doctor/, without which a run trains.
CATALOG: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "findings.toml").read_text())
SEVERITIES = ("critical", "warning", "info")
DIAGNOSIS = "diagnosis.json"


@dataclass
class Finding:
    """One thing that is wrong in a run: `evidence` has the numbers that say so, `step` the update at which they were seen."""

    code: str
    severity: str  # of SEVERITIES
    evidence: str
    step: int | None = None
    declared: str = ""  # what the stage should do, where it was measured
    observed: str = ""
    picture: str = ""  # its path in the folder of the run, where there is one
    source: str = ""  # the tool that found it, where that is not the doctor itself
    stage: str = ""  # of a training step; empty where it is none of them
    title: str = ""  # this and the next two: those of the catalog, where a finding brings none
    cause: str = ""
    fixes: list[str] = field(default_factory=list)

    def __post_init__(self):
        if self.title:
            return
        entry = CATALOG[self.code]
        self.title, self.cause, self.fixes = entry["title"], entry["cause"], list(entry["fixes"])
        self.stage = entry.get("stage", "")

    @property
    def line(self) -> str:
        return f"{self.severity}: {self.code}: {self.title} ({self.evidence}). Try: {self.fixes[0]}"


# What a rule gives: the code of each finding that there was enough recorded to judge, and the findings.
Found = Iterator[str | Finding]


def count_line(findings: Sequence[Finding]) -> str:
    """Returns how many there are of each severity: 1 critical, 0 warnings."""
    critical, warnings, info = (sum(f.severity == severity for f in findings) for severity in SEVERITIES)
    return f"{critical} critical, {warnings} warning{'s' * (warnings != 1)}" + f", {info} for information" * bool(info)


def printed_lines(findings: Sequence[Finding]) -> list[str]:
    """Returns the findings as the doctor prints them, in lines. The first one is their number."""
    nothing = ": nothing found" * (not findings)
    return [count_line(findings) + nothing, *(line for finding in findings for line in described(finding))]


def any_at_least(findings: Sequence[Finding], severity: str) -> bool:
    """Returns whether any of them is as severe as this."""
    return any(SEVERITIES.index(finding.severity) <= SEVERITIES.index(severity) for finding in findings)


def write_findings(path: Path, findings: Sequence[Finding]) -> None:
    """Writes them as JSON, complete or not at all; several processes may do so at once. Raises OSError."""
    write_json(path, [vars(finding) for finding in findings], shared=True)


def described(finding: Finding) -> list[str]:
    """The finding as the doctor prints it: what, the likely cause, what to try."""
    at = "" if finding.step is None else f" [update {finding.step}]"
    word = {"critical": "FAIL", "warning": "WARN", "info": "INFO"}[finding.severity]
    lines = [f"{word}  {finding.code}: {finding.title} ({finding.evidence}){at}", f"      likely cause: {finding.cause}"]
    return lines + [f"      try: {fix}" for fix in finding.fixes]

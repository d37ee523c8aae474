"""The sentences of what was found, from findings.toml; laws and figures have none."""

import string
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from steady_doctor.found import Found

SEVERITIES = ("critical", "warning", "info")
SENTENCES = ("title", "declared", "observed", "cause")  # of a table; figures fill their places
NO_FINDING = "not-identified"  # the table of sentences that are about no finding
SHOWN = 4  # numbers of a sequence


@dataclass(frozen=True)
class Finding:
    """What a law found, in words."""

    code: str
    stage: str
    severity: str  # of SEVERITIES
    title: str
    declared: str  # what an update should do there
    observed: str  # what it does
    cause: str
    fixes: tuple[str, ...]
    update: int  # in which it was first seen

    def to_json(self) -> dict[str, Any]:
        """As diagnosis.json has it; the update is "step" there, as in the findings about our runs."""
        known = asdict(self)
        return known | {"step": known.pop("update"), "fixes": list(self.fixes)}


@cache
def _sentences() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "findings.toml").read_text())


def table() -> dict[str, dict[str, Any]]:
    """Of each code its stage, severity, sentences and fixes."""
    return {code: entry for code, entry in _sentences().items() if code != NO_FINDING}


def stage(code: str) -> str:
    return table().get(code, {}).get("stage", code.split("-")[0])


def severity(code: str) -> str:
    return table().get(code, {}).get("severity", "warning")


def finding(found: Found) -> Finding:
    """Raises KeyError where the code has no table, or a sentence wants a figure that the law does not give."""
    entry = table()[found.code]
    figures = {name: shown(value) for name, value in found.figures.items()}
    texts = (*(entry[name] for name in SENTENCES), *entry["fixes"])
    if missing := {place for text in texts for place in places(text)} - figures.keys():
        raise KeyError(f"findings.toml: [{found.code}] names {', '.join(sorted(missing))}, which its law does not give")
    title, declared, observed, cause, *fixes = (text.format(**figures) for text in texts)
    own = stage(found.code), severity(found.code)
    return Finding(found.code, *own, title, declared, observed, cause, tuple(fixes), found.update)


def places(text: str) -> Iterator[str]:
    """The names of the figures that a sentence has places for."""
    return (name for _, name, _, _ in string.Formatter().parse(text) if name)


def shown(figure: Any) -> Any:
    """Returns sequences as words, their numbers with 3 digits; a single number as it is: its sentence formats it."""
    if isinstance(figure, str) or not isinstance(figure, Iterable):
        return figure
    parts = list(figure)
    if len(parts) > 1 and all(isinstance(part, int) for part in parts):
        return "x".join(map(str, parts))
    words = [f"{part:.3g}" if isinstance(part, int | float) else str(shown(part)) for part in parts[:SHOWN]]
    if any(not isinstance(part, str | int | float) for part in parts):
        return "; ".join(words)
    return " and ".join(words) if len(words) == 2 else ", ".join(words)


def not_identified(code: str) -> str:
    """Why no mixture of image and noise was found, in words."""
    return _sentences()[NO_FINDING].get(code, code)


def count_line(findings: Sequence[Finding]) -> str:
    """Returns how many there are of each severity: 1 critical, 0 warnings."""
    critical, warnings, info = (sum(one.severity == severity for one in findings) for severity in SEVERITIES)
    nothing = ": nothing found" * (not findings)
    return (
        f"{critical} critical, {warnings} warning{'s' * (warnings != 1)}" + f", {info} for information" * bool(info) + nothing
    )


def told(finding: Finding) -> list[str]:
    """A finding in lines for the terminal: what, the likely cause, what to try."""
    word = {"critical": "FAIL", "warning": "WARN", "info": "INFO"}[finding.severity]
    return [
        f"{word}  {finding.code}: {finding.title} [update {finding.update}]",
        f"      declared: {finding.declared}",
        f"      observed: {finding.observed}",
        f"      likely cause: {finding.cause}",
        *(f"      try: {fix}" for fix in finding.fixes),
    ]

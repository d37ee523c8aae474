"""The one place that knows the doctor: how it is asked, and where it leaves its findings.

Another doctor takes the place of this file. Faults, healthy runs and tables stay as they are.
"""

import json
import sys
from pathlib import Path

DIAGNOSIS = "diagnosis.json"
ANSWERED = (0, 1)  # exit status where nothing, or something, was found
ABOUT_DATA = ("data-", "class-")  # beginnings of the codes of findings about a data set


def watched(tree: Path, output: Path, script: list[str]) -> list[str]:
    """The words that train another's `script` (with its flags) under the doctor of the repository in `tree`."""
    return [str(tree / "diagnose.py"), "--watch_dir", str(output), "--watch", *script]


def about_run(tree: Path, output: Path) -> list[str]:
    """The words that ask about what a run has recorded in `output`."""
    return [sys.executable, str(tree / "diagnose.py"), str(output), "--no_report", "--json"]


def gave_up(output: Path, printed: str) -> bool:
    """Whether it had an error of its own: then it is silent, whatever the run is like."""
    found = findings(output, info=True) or []
    return "the doctor stopped" in printed or any(one["code"] == "rule-failed" for one in found)


def findings(output: Path, printed: str = "", info: bool = False) -> list[dict] | None:
    """Those above "info", or all, in their order, of what a run left in `output` or has `printed`; None where there is nothing.

    Each has a "code", a "severity", and a "stage", which is None where it has none.
    """
    try:
        if printed:
            found = json.loads(printed[printed.index("{") :])["findings"]
        else:
            found = json.loads((output / DIAGNOSIS).read_text())
    except (OSError, ValueError):
        return None
    return [
        {name: one.get(name) for name in ("code", "severity", "stage")}
        for one in found
        if info or one.get("severity") != "info"
    ]

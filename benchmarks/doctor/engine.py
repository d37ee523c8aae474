"""The one place that knows the doctor: how it is asked, and where it leaves its findings.

Another doctor takes the place of this file. Faults, healthy runs and tables stay as they are.
"""

import json
import sys
from pathlib import Path

DIAGNOSIS = "diagnosis.json"


def watched(tree: Path, output: Path, script: list[str]) -> list[str]:
    """The words that train another's `script` (with its flags) under the doctor of the repository in `tree`."""
    return [str(tree / "diagnose.py"), "--watch_dir", str(output), "--watch", *script]


def about_data(tree: Path, output: Path, flags: list[str]) -> list[str]:
    """The words that ask about a data set, which `flags` name."""
    return [sys.executable, str(tree / "diagnose.py"), "--report_dir", str(output), "--json", *flags]


def about_run(tree: Path, output: Path) -> list[str]:
    """The words that ask about what a run has recorded in `output`."""
    return [sys.executable, str(tree / "diagnose.py"), str(output), "--no_report", "--json"]


def findings(output: Path, printed: str = "") -> list[dict] | None:
    """Those above "info", the first first, of what a run left in `output`, or of what was printed; None where there is nothing.

    Each has a "code", a "stage" (None where it has none), and what was "declared" and "observed".
    """
    try:
        found = json.loads(printed)["findings"] if printed else json.loads((output / DIAGNOSIS).read_text())
    except (OSError, ValueError):
        return None
    names = ("code", "severity", "stage", "declared", "observed", "evidence", "step")
    return [{name: one.get(name) for name in names} for one in found if one.get("severity") != "info"]

"""What was seen of a script: diagnosis.json, report.html, and the table in the terminal."""

import contextlib
import json
import os
import sys
import textwrap
from pathlib import Path

from utils.core.files import whole_file
from utils.diagnostics.diagnose import judge
from utils.diagnostics.finding import Finding, described
from utils.diagnostics.report.report import write_report
from utils.diagnostics.rules.audit import audited
from utils.diagnostics.watching.description import describe
from utils.diagnostics.watching.watcher import Watcher
from utils.runs.record import RunRecord

DIAGNOSIS, REPORT = "diagnosis.json", "report.html"


class Result:
    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self.main = os.environ.get("RANK", "0") == "0"

    def write(self, watcher: Watcher, ended: bool = False) -> None:
        """Both files, at each look and in the end; a full disk is no reason to stop."""
        if not self.main:
            return
        findings = self.findings(watcher)
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self.folder / DIAGNOSIS) as draft:
                draft.write_text(json.dumps([vars(finding) for finding in findings], indent=2) + "\n")
            write_report(self._record(watcher), findings, self.folder / REPORT)

    def _record(self, watcher: Watcher) -> RunRecord:
        return RunRecord(self.folder, history=watcher.judge.history, command=" ".join(sys.argv))

    def findings(self, watcher: Watcher) -> list[Finding]:
        return judge(self._record(watcher))[0]

    def show(self, watcher: Watcher) -> None:
        """In the terminal, after all that the script printed."""
        if not self.main:
            return
        sys.stdout.flush()
        print(f"\nwatched: {describe(watcher)}", end="\n\n")
        for finding in self.findings(watcher):
            print("\n".join(described(finding)))
        for line in table(audited(self._record(watcher))):
            print(line)
        print(f"\n{self.folder / REPORT}", flush=True)


def table(checks: list[dict]) -> list[str]:
    """The step audit as a table: stage, quantity, declared | observed."""
    lines = ["the training step    declared | observed"]
    for check in checks:
        mark = {True: "OK", False: "FAIL", None: "-"}[check["healthy"]]
        if check["healthy"] is False and check.get("severity", "critical") != "critical":
            mark = {"warning": "WARN", "info": "INFO"}[check["severity"]]
        text = f"{check['stage']}: {check['name']}: {check['declared']} | {check['observed']}"
        lines += textwrap.wrap(text, 110, initial_indent=f"{mark:<6}", subsequent_indent=" " * 6, break_on_hyphens=False)
    return lines if len(lines) > 1 else []

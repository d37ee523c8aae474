"""What was seen of a script: diagnosis.json, report.html, and the table in the terminal."""

import contextlib
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from utils.diagnostics.audit.observer import failure_text
from utils.diagnostics.audit.verdict import step_lines
from utils.diagnostics.diagnose import judge
from utils.diagnostics.finding import DIAGNOSIS, Finding, described, write_findings
from utils.diagnostics.report.report import REPORT, write_report
from utils.diagnostics.rules.audit import audited
from utils.diagnostics.watching.description import describe
from utils.diagnostics.watching.watcher import Watcher
from utils.runs.record import RunRecord

SETTLING = 0.2  # seconds in which threads of gloo forget the tensors of their last work


class Result:
    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self.main = os.environ.get("RANK", "0") == "0"

    def write(self, watcher: Watcher) -> None:
        """Both files, at each look and in the end; a full disk is no reason to stop."""
        if not self.main:
            return
        findings = self.findings(watcher)
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_findings(self.folder / DIAGNOSIS, findings)
            write_report(self._record(watcher), findings, self.folder / REPORT)

    def _record(self, watcher: Watcher) -> RunRecord:
        history = [*watcher.judge.history, {"step": watcher.updates}]
        return RunRecord(self.folder, history=history, summary=describe(watcher), exit_status=watcher.exit_status)

    def findings(self, watcher: Watcher) -> list[Finding]:
        return judge(self._record(watcher))[0]

    def finish(self, watcher: Watcher, hooks: ExitStack, ended: bool) -> None:
        """When the script is over; `ended`: by itself. What goes wrong here is one line too."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Process groups go with the last reference to DDP, and wait for their threads, while these wait for Python.
            time.sleep(SETTLING)
        watcher.end(ended)
        hooks.close()
        if self.main and os.getpid() == watcher.process:
            try:
                self.write(watcher)
                self._show(watcher)
            except Exception as error:
                watcher.switch_off(failure_text(error))

    def _show(self, watcher: Watcher) -> None:
        """In the terminal, after all that the script printed."""
        sys.stdout.flush()
        print(f"\nwatched: {describe(watcher)}", end="\n\n")
        for finding in self.findings(watcher):
            print("\n".join(described(finding)))
        if checks := audited(self._record(watcher)):
            print(*step_lines(checks), sep="\n")
        print(f"\n{self.folder / REPORT}", flush=True)

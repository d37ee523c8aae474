"""What was seen of a script: diagnosis.json, report.html, and the table in the terminal."""

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from utils.core.files import make_folder
from utils.diagnostics.audit.observer import failure_text
from utils.diagnostics.audit.verdict import step_lines, step_summary
from utils.diagnostics.diagnose import judge
from utils.diagnostics.finding import DIAGNOSIS, Finding, any_at_least, told, write_findings
from utils.diagnostics.report.report import REPORT, write_report
from utils.diagnostics.rules.audit import audited
from utils.diagnostics.watching.description import describe
from utils.diagnostics.watching.watcher import Watcher
from utils.runs.record import RunRecord

SETTLING = 0.2  # seconds in which threads of gloo forget the tensors of their last work


OURS = ("watch_dir", "watch_updates", "fail_on")  # flags that hardly a script has


class Result:
    """On the main process alone; the methods do nothing on the others.

    Args:
        folder: for diagnosis.json and report.html.
        shows_all: whether the table is printed, too.
        fail_on: least severity of a finding that a script without an error fails for; None: no finding.
    """

    def __init__(self, folder: Path, *, shows_all: bool = False, fail_on: str | None = None):
        self._given, self.folder = folder, folder.absolute()  # the script may go to another folder
        self.main = os.environ.get("RANK", "0") == "0"
        self._shows_all, self._fail_on = shows_all, fail_on
        self._finished, self._unwritten, self._passed_on = False, "", ""

    def note_passed_on(self, arguments: list[str]) -> None:
        """Says which of our flags stand after the script's name: the script gets them, whatever it does with them."""
        names = [word.split("=")[0] for word in arguments]
        ours = [name for name in names if name.startswith("--") and name[2:].replace("-", "_") in OURS]
        if ours and self.main:
            words = ", ".join(dict.fromkeys(ours))
            self._passed_on = f"note: the script gets {words}, and diagnose.py does not: its own flags stand before --watch"
            print(self._passed_on, file=sys.stderr, flush=True)

    def begin(self, watcher: Watcher) -> None:
        """Takes the place of an earlier result, which would else be taken for this one after a kill. Raises UserError where the
        folder cannot be written."""
        if self.main:
            make_folder(self._given, "--watch_dir")
            self.write(watcher)

    def write(self, watcher: Watcher) -> None:
        """Both files, at each look and in the end; a full disk is no reason to stop."""
        if not self.main:
            return
        findings, self._unwritten = self.findings(watcher), ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_findings(self.folder / DIAGNOSIS, findings)
            write_report(self._record(watcher), findings, self.folder / REPORT)
        except OSError as error:
            self._unwritten = f"no report: cannot write {self.folder}: {error.strerror or error}"

    def _record(self, watcher: Watcher) -> RunRecord:
        judged = watcher.judge.history
        history = [*judged, {"step": watcher.updates}] if judged else []
        return RunRecord(self.folder, history=history, summary=describe(watcher), exit_status=watcher.exit_status)

    def findings(self, watcher: Watcher) -> list[Finding]:
        return judge(self._record(watcher))[0]

    def status(self, watcher: Watcher, status: int) -> int:
        """Returns the exit status to end with: that of the script where it failed, or nothing is asked for; else 1 for what was
        found, and 2 where nothing was found because not all was looked at."""
        if status or self._fail_on is None or not self.main:
            return status
        if any_at_least(self.findings(watcher), self._fail_on):
            return 1
        if watcher.judge.history and not watcher.failure:
            return 0
        why = f"the watcher stopped: {watcher.failure}" if watcher.failure else "nothing was judged"
        print(f"error: --fail_on {self._fail_on}: {why}", file=sys.stderr, flush=True)
        return 2

    def finish(self, watcher: Watcher, hooks: ExitStack, *, ended: bool, last_look: bool = True) -> None:
        """When the script is over; the first call counts. `ended`: by itself; `last_look`: see `Watcher.end`. What goes wrong
        here is one line too."""
        if self._finished:
            return
        self._finished = True
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Process groups go with the last reference to DDP, and wait for their threads, while these wait for Python.
            time.sleep(SETTLING)
        watcher.end(ended, last_look)
        hooks.close()
        if self.main and os.getpid() == watcher.process:
            try:
                self.write(watcher)
                self._show(watcher)
            except Exception as error:
                watcher.switch_off(failure_text(error))

    def _show(self, watcher: Watcher) -> None:
        """In the terminal, after all that the script printed; the findings last."""
        findings, checks = self.findings(watcher), audited(self._record(watcher))
        lines = ["", f"watched: {describe(watcher)}", self._unwritten or f"report: {self.folder / REPORT}"]
        if checks and self._shows_all:
            lines += ["", *step_lines(checks)]
        elif checks:
            lines += [step_summary(checks), "all of them: --all before --watch"]
        lines += ["", *told(findings)] if checks or findings else [self._passed_on] * bool(self._passed_on)
        sys.stdout.flush()
        print("\n".join(lines), flush=True)

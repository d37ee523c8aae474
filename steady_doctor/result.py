"""What was seen of a script: diagnosis.json, report.html, and the findings in the terminal."""

import contextlib
import json
import os
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import jinja2
from torch.optim import Optimizer

from steady_doctor.described import COLUMNS, described, figures
from steady_doctor.doctor import Doctor
from steady_doctor.files import write_whole
from steady_doctor.words import SEVERITIES, Finding, count_line, finding, told

DIAGNOSIS, REPORT = "diagnosis.json", "report.html"
SETTLING = 0.2  # seconds in which threads of gloo forget the tensors of their last work


class Result:
    """Watches from `begin` to `finish`. The main process alone writes and prints; the others only take part.

    Args:
        folder: for diagnosis.json and report.html.
        shows_all: whether the figures of each recorded update are printed, too.
        fail_on: least severity of a finding that a script without an error fails for; None: no finding.
        network, optimizer: as `Doctor` takes them.
    """

    is_watching = False  # any

    def __init__(
        self,
        folder: Path,
        *,
        shows_all: bool = False,
        fail_on: str | None = None,
        network: str = "",
        optimizer: Optimizer | None = None,
    ):
        self.folder = folder.absolute()  # the script may go to another folder
        self.findings: list[Finding] = []
        self.failure = ""  # of the doctor
        self.doctor = Doctor(self.look, self._stop, network, optimizer)
        self._main = os.environ.get("RANK", "0") == "0"
        self._shows_all, self._fail_on = shows_all, fail_on
        self._process, self._finished, self._unwritten, self._ended = os.getpid(), False, "", False
        self._hooks = ExitStack()
        self._page = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
        ).get_template("page.html")

    def begin(self) -> None:
        """The files take the place of earlier ones, which would else be taken for these after a kill."""
        Result.is_watching = True
        self._hooks = self.doctor.install()
        if self._main:
            self._write()

    def look(self) -> None:
        """Judges what was seen so far, and writes it."""
        if self._main:
            self.findings = [finding(found) for found in self.doctor.findings(self._ended)]
            self._write()

    def finish(self, ended: bool) -> None:
        """When the script is over; the first call counts. `ended`: it came to its own end."""
        if self._finished or os.getpid() != self._process:
            return
        self._finished, self._ended = True, ended
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Process groups go with the last reference to DDP, and wait for their threads, while these wait for Python.
            time.sleep(SETTLING)
        try:
            if not self.failure:
                self.look()
        except Exception as error:
            self._stop(error)
        try:
            if self.failure and self._main:  # what was found before
                self._write()
            self._show()
        except Exception as error:
            self._stop(error)

    def close(self) -> None:
        """Takes the hooks away; not within one of them."""
        Result.is_watching = False
        with contextlib.suppress(Exception):  # the script is over: nothing of it may be lost
            self._hooks.close()

    def status(self, own: int) -> int:
        """Returns the exit status to end with: the script's `own` where it failed, or nothing is asked for; else 1 for what was
        found, and 2 where nothing was found because nothing was judged."""
        if own or self._fail_on is None or not self._main:
            return own
        if any(SEVERITIES.index(one.severity) <= SEVERITIES.index(self._fail_on) for one in self.findings):
            return 1
        if self.doctor.told.mixed() and not self.failure:
            return 0
        why = f"the doctor stopped: {self.failure}" if self.failure else "no mixture of image and noise was identified"
        print(f"error: --fail_on {self._fail_on}: {why}", file=sys.stderr, flush=True)
        return 2

    def _stop(self, error: BaseException) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1:]
        place = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in where)
        self.failure = f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
        if self._main:
            print(f"note: the doctor stopped, the script goes on: {self.failure}", file=sys.stderr, flush=True)

    def _said(self) -> str:
        return described(self.doctor.told)

    def _counted(self) -> str:
        is_known = bool(self.doctor.told.mixed())
        return count_line(self.findings) + ("" if is_known else "; image, noise, target and the loss's weights were not judged")

    def _write(self) -> None:
        """Both files; a full disk is no reason to stop."""
        self._unwritten = ""
        page = self._page.render(
            script=Path(sys.argv[0]).name,
            said=self._said(),
            failure=self.failure,
            judged=bool(self.doctor.told.steps),
            counted=self._counted(),
            findings=self.findings,
            columns=COLUMNS,
            rows=list(figures(self.doctor.told)),
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / DIAGNOSIS, json.dumps([one.to_json() for one in self.findings], indent=2) + "\n")
            write_whole(self.folder / REPORT, page)
        except OSError as error:
            self._unwritten = f"no report: cannot write {self.folder}: {error.strerror or error}"

    def _show(self) -> None:
        """In the terminal, after all that the script printed; the findings last."""
        if not self._main:
            return
        seen = self.doctor.told
        lines = ["", f"watched: {self._said()}", self._unwritten or f"report: {self.folder / REPORT}"]
        if seen.steps and self._shows_all:
            lines += ["", *(" | ".join(row) for row in (COLUMNS, *figures(seen)))]
        elif seen.steps:
            lines.append("the figures of each recorded update: in the report, or with --all")
        if seen.steps or self.findings:
            lines += ["", self._counted(), *(line for one in self.findings for line in told(one))]
        sys.stdout.flush()
        print("\n".join(lines), flush=True)

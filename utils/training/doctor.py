"""The doctor in the loop: records what a run shows of itself, tells each finding once, keeps diagnosis.json up to date."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from utils.diagnostics.diagnose import diagnose
from utils.diagnostics.finding import DIAGNOSIS, SEVERITIES, Finding, described, write_findings
from utils.diagnostics.report.report import REPORT, write_report
from utils.runs.evaluations import read_evaluations
from utils.runs.history import History
from utils.runs.record import RunRecord

# That a run of any length records layer by layer, or its history would fill memory and disk; and examines, beside the first
# ones, in which most faults show, while looking costs little.
DETAILED_REPORTS, FIRST_REPORTS = 200, 200
LEVELS = {"warning": 1, "critical": 2}
TELLING = {"probe", "validation/loss", "evaluation", "audit"}  # rare records, made at a cost far above that of a look


class Doctor:
    """On the main process alone; the methods do nothing on the others (`enabled` False).

    Args:
        first_step: updates finished when the run was started or resumed.
        expected_reports: of the whole run, however it is resumed.
        print_line: prints a line for the user.
        log: takes figures and the step, for the trackers: diagnosis/<code> is 1 for a warning and 2 for what is critical.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        options: dict,
        resolved: dict,
        first_step: int,
        expected_reports: int,
        enabled: bool,
        print_line: Callable[[str], None],
        log: Callable[[dict, int], None] | None = None,
    ):
        self._enabled, self._print_line, self._log, self._first_step = enabled, print_line, log, first_step
        self._history = History(output_dir, first_step=first_step, enabled=enabled)
        self._record = RunRecord(output_dir, options=options, resolved=resolved, history=self._history.records)
        self._earlier = len(self._history.records)  # of before this start
        self._every = max(1, expected_reports // DETAILED_REPORTS)
        self._reports = sum("train/loss" in record for record in self._history.records)
        self._told: dict[str, str] = {}  # code -> severity
        self._critical = False
        self.findings: list[Finding] = []
        if enabled and self._earlier:
            self.findings = diagnose(self._record)
            # What was told before the resume is not told again; a damaged file, or one of somebody else, says nothing.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                found = [each for each in json.loads((output_dir / DIAGNOSIS).read_text()) if not each.get("source")]
                self._told = {each["code"]: each["severity"] for each in found if each["severity"] in SEVERITIES}

    def record(self, step: int, values: dict) -> None:
        """Records them, and examines the run where they say much of it."""
        self._history.add(step, values)
        if not TELLING.isdisjoint(values):
            self.look()

    def record_report(self, step: int, report: dict, layers: dict) -> bool:
        """Records a report's figures, in long runs the `layers` (see `Dynamics.report`) of some alone, and examines the run
        after those and the first ones. Returns whether anything is critical."""
        detailed = self._reports % self._every == 0
        self._reports += 1
        self.record(step, report | ({"layers": layers} if detailed else {}))
        if detailed or self._reports <= FIRST_REPORTS:
            self.look()
        return self._critical

    def knows(self, key: str) -> bool:
        """Returns whether a record of this kind was made, now or before a resume."""
        return any(key in record for record in self._history.records)

    def look(self) -> None:
        """Looks at all that is recorded, says what is new or more severe, but nothing that is for information alone. What is
        critical after a resume is so by what was recorded since: the cause may have been mended. What another tool found was
        told by that tool."""
        if not self._enabled:
            return
        self._record.evaluations = read_evaluations(self._record.output_dir)
        self.findings = diagnose(self._record)
        own = [finding for finding in self.findings if not finding.source]
        for finding in own:
            rank, told = SEVERITIES.index(finding.severity), SEVERITIES.index(self._told.get(finding.code, "info"))
            if rank < told:
                self._told[finding.code] = finding.severity
                self._print_line(finding.line)
                if self._log is not None:
                    self._log({f"diagnosis/{finding.code}": LEVELS[finding.severity]}, self._record.history[-1]["step"])
        with contextlib.suppress(OSError):  # a full disk is no reason to stop
            write_findings(self._record.output_dir / DIAGNOSIS, self.findings)
        self._critical = any(finding.severity == "critical" for finding in own) and self._still_critical()

    def _still_critical(self) -> bool:
        if not self._first_step:
            return True
        # What was found out once, about the data and the schedule, stays known, but is no evidence of now.
        history, skipped, before = [], "train/skipped_updates", 0.0  # that is counted from the beginning of the run
        for place, record in enumerate(self._record.history):
            if record["step"] <= self._first_step:
                before = record.get(skipped) or before
                resumed = "audit" in record and place >= self._earlier  # the checkpoint beside what was loaded of it
                history += [record] if "data" in record or "schedule" in record or resumed else []
            else:
                history.append(record | {skipped: record[skipped] - before} if skipped in record else record)
        findings = diagnose(replace(self._record, history=history, evaluations=[]))
        since = [f for f in findings if f.step is not None and f.step >= self._first_step + (not f.declared)]
        return any(f.severity == "critical" for f in since)

    def report(self) -> None:
        """A look at the run, and report.html from what its folder holds now. What fails here fails no run."""
        if self._enabled:
            path = self._record.output_dir / REPORT
            try:
                self.look()
                write_report(RunRecord.read(self._record.output_dir), self.findings, path)
            except Exception as error:
                self._print_line(f"{path} was not written: {type(error).__name__}: {error}")


def foretold(options: dict, facts: dict, schedule: dict | None) -> list[str]:
    """What can be said of a run before its images are read, in lines to print."""
    history = [{"step": 0, "schedule": schedule}] if schedule else []
    found = diagnose(RunRecord(Path(), options=options, resolved=facts, history=history))
    return [line for finding in found for line in described(finding)] or ["options: nothing found (the images were not read)"]

"""The doctor in the loop: records what a run shows of itself, tells each finding once, keeps diagnosis.json up to date."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from utils.diagnostics import diagnose
from utils.findings import SEVERITIES, Finding
from utils.history import History
from utils.report import write_report
from utils.run_record import RunRecord

DIAGNOSIS, REPORT = "diagnosis.json", "report.html"
DETAILED_REPORTS = (
    200  # that a run of any length records layer by layer and examines, or its history would fill memory and disk
)


class Doctor:
    """On the main process alone; the methods do nothing on the others (`enabled` False).

    Args:
        first_step: updates finished when the run was started or resumed.
        expected_reports: of the whole run, however it is resumed.
        say: prints a line for the user.
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
        say: Callable[[str], None],
    ):
        self._enabled, self._say = enabled, say
        self._history = History(output_dir, first_step=first_step, enabled=enabled)
        self._record = RunRecord(output_dir, options=options, resolved=resolved, history=self._history.records)
        self._every = max(1, expected_reports // DETAILED_REPORTS)
        self._reports = sum("train/loss" in record for record in self._history.records)
        self._told: dict[str, str] = {}  # code -> severity
        self.findings: list[Finding] = []
        if enabled:
            self.findings = diagnose(self._record)  # what was told before the resume is not told again
            self._told = {finding.code: finding.severity for finding in self.findings}

    def record(self, step: int, values: dict) -> None:
        self._history.add(step, values)

    def record_report(self, step: int, report: dict, layers: dict) -> bool:
        """Records a report's figures, in long runs the `layers` (see `Dynamics.report`) of some alone; then examines the run.

        Whether anything is critical.
        """
        detailed = self._reports % self._every == 0
        self._reports += 1
        self.record(step, report | ({"layers": layers} if detailed else {}))
        return self.examine() if detailed else False

    def knows(self, key: str) -> bool:
        """Whether a record of this kind was made, now or before a resume."""
        return any(key in record for record in self._history.records)

    def examine(self) -> bool:
        """Looks at all that is recorded, says what is new or has become more severe, but nothing that is for information alone.

        Whether anything is critical.
        """
        if not self._enabled:
            return False
        self.findings = diagnose(self._record)
        for finding in self.findings:
            rank, told = SEVERITIES.index(finding.severity), SEVERITIES.index(self._told.get(finding.code, "info"))
            if rank < told:
                self._told[finding.code] = finding.severity
                self._say(finding.line)
        write_diagnosis(self._record.output_dir / DIAGNOSIS, self.findings)
        return any(finding.severity == "critical" for finding in self.findings)

    def finish(self) -> None:
        """A last look at the run, and report.html from what its folder holds now; what fails here fails no finished run."""
        if self._enabled:
            self.examine()
            path = self._record.output_dir / REPORT
            try:
                write_report(RunRecord.read(self._record.output_dir), self.findings, path)
            except Exception as error:
                self._say(f"{path} was not written: {type(error).__name__}: {error}")


def write_diagnosis(path: Path, findings: list[Finding]) -> None:
    """The findings as JSON, complete or not at all; a full disk is no reason to stop."""
    try:
        draft = path.with_name(f".{path.name}.tmp")
        draft.write_text(json.dumps([vars(finding) for finding in findings], indent=2) + "\n")
        os.replace(draft, path)
    except OSError:
        pass

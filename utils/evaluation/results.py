"""The files of an evaluation: its figures, and what the record of the run that was evaluated says of them."""

import json
from pathlib import Path

from PIL import Image

from utils.core.files import whole_file
from utils.core.images import save_png
from utils.diagnostics.diagnose import diagnose
from utils.diagnostics.finding import DIAGNOSIS, write_findings
from utils.diagnostics.report.report import REPORT, updates_done, write_report
from utils.runs.evaluations import write_evaluation
from utils.runs.record import RunRecord


def write_figures(folder: Path, results: list[dict], sheet: Image.Image | None) -> None:
    """Writes evaluation.json, and the sheet of closest pairs of the last of the results. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / "evaluation.json", shared=True) as draft:
        draft.write_text(json.dumps({"results": results}, indent=2) + "\n")
    if sheet is not None:
        save_png(sheet, folder / ("nearest.png" if len(results) == 1 else f"nearest-{len(results) - 1}.png"))


def add_to_record(run: Path, state: str, result: dict) -> None:
    """Adds a result of evaluate.py to the record of a run, to its diagnosis.json and to its report.html.

    `state`: the checkpoint that was evaluated, or "" for the exported pipeline. Raises OSError, and UserError where the record
    is damaged.
    """
    record, number = RunRecord.read(run), state.removeprefix("checkpoint-")
    step = int(number) if number.isdigit() else None
    if not state and record.exit_status == 0:  # any other may have exported an earlier state
        step = updates_done(record)
    write_evaluation(run, state, step, result)
    record = RunRecord.read(run)
    findings = diagnose(record)
    write_findings(run / DIAGNOSIS, findings)
    write_report(record, findings, run / REPORT)

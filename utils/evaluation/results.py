"""The files of an evaluation: its figures, and what the record of the run that was evaluated says of them."""

import sys
from pathlib import Path

from PIL import Image

from utils.core.errors import UserError, one_line
from utils.core.files import write_json
from utils.core.images import save_png
from utils.diagnostics.diagnose import diagnose
from utils.diagnostics.finding import DIAGNOSIS, write_findings
from utils.diagnostics.report.report import REPORT, updates_done, write_report
from utils.runs.evaluations import run_of, write_evaluation
from utils.runs.record import RunRecord


def folder_of(name: str, output_dir: Path | None) -> Path | None:
    """Returns where a result of this name goes: --output_dir, or evaluation/ of the run that was evaluated; None for what is
    neither."""
    run = Path(name)
    return output_dir or (run / "evaluation" if (run / "options.json").is_file() else None)


def save_result(output_dir: Path | None, results: list[dict], sheet: Image.Image | None) -> None:
    """Writes the last of the results, and the sheet of its closest pairs, beside those before it of the same folder; and what
    was found, in the record of the run. A run that cannot be written is no reason to lose the figures, and is told on stderr.
    Raises UserError where --output_dir does not take them."""
    name = results[-1]["name"]
    folder, owner = folder_of(name, output_dir), run_of(name)
    try:
        if folder is not None:
            write_figures(folder, [each for each in results if folder_of(each["name"], output_dir) == folder], sheet)
    except OSError as error:
        if output_dir:
            raise UserError(f"cannot write {folder}: {error.strerror or error}\nchoose another --output_dir") from None
        _tell(f"the figures are not saved: cannot write {folder}: {error.strerror or error}; set --output_dir to save them")
    if owner is not None:
        try:
            add_to_record(*owner, results[-1])
        except (OSError, UserError) as error:
            _tell(f"what was found is not in the record of {owner[0]}: {one_line(error)}")


def is_saved(name: str, output_dir: Path | None) -> bool:
    return folder_of(name, output_dir) is not None or run_of(name) is not None


def _tell(note: str) -> None:
    print(f"note: {note}", file=sys.stderr, flush=True)


def write_figures(folder: Path, results: list[dict], sheet: Image.Image | None) -> None:
    """Writes evaluation.json, and the sheet of closest pairs of the last of the results. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "evaluation.json", {"results": results}, shared=True)
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

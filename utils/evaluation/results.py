"""The results of an evaluation: which may stand side by side, the table of them, their files, and the record of the run."""

import json
import sys
from pathlib import Path
from statistics import mean

from PIL import Image

from utils.core.errors import UserError, one_line
from utils.core.files import write_json
from utils.core.images import save_png
from utils.diagnostics.diagnose import diagnose
from utils.diagnostics.finding import DIAGNOSIS, Finding, described, write_findings
from utils.diagnostics.report.figures import FIGURES
from utils.diagnostics.report.report import REPORT, updates_done, write_report
from utils.diagnostics.rules.samples import MIN_VARIED
from utils.evaluation.evaluator import metric_name
from utils.evaluation.quality import DISTANCES, NEIGHBORS
from utils.runs.evaluations import run_of, write_evaluation
from utils.runs.record import RunRecord

# What figures must share to be compared, and what to call it.
COMPARABLE = {
    "features": "extractor",
    "extractor_sha256": "extractor's weights",
    "resize": "resize",
    "reference_fingerprint": "reference images",
    "reference_images": "number of reference images",
    "images": "number of images",
    "image_shape": "image size",
}
_OF_NEIGHBORS = {"precision", "recall", "density", "coverage"}


def refuse_to_compare(first: dict, second: dict) -> None:
    """Raises UserError where two results (as evaluate.py writes them) differ in what makes their figures comparable."""
    for key, name in COMPARABLE.items():
        if first.get(key) != second.get(key):
            raise UserError(
                f"{first['name']} and {second['name']} cannot be compared: another {name} "
                f"({shown(first.get(key))}, {shown(second.get(key))})\n"
                "evaluate both with the same flags"
            )


def shown(value: object) -> str:
    """Returns a fact of a result as a message shows it: of a hash its beginning."""
    text = str(value)
    return text[:12] if len(text) == 64 else text


def read_results(path: Path) -> list[dict]:
    """Returns the results of an evaluation.json. Raises UserError where it holds none."""
    try:
        results = json.loads(path.read_text())["results"]
        if not all(isinstance(result["figures"], dict) and isinstance(result["name"], str) for result in results):
            raise KeyError("figures")
        return results
    except FileNotFoundError:
        raise UserError(f"--compare {path}: no such file\ncheck the path") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--compare {path} is not a results file of evaluate.py: {error}\nuse a file that evaluate.py wrote"
        ) from None


def printed_lines(results: list[dict], earlier: list[dict], output_dir: Path | None) -> list[str]:
    """Returns what evaluate.py prints of new results and of those before them, in lines."""
    notes = [text for result in results for text in result["figures"]["warnings"]]
    notes += [
        f"{result['name']}: unknown split: copies are searched among all images, also those that were held out of its training"
        for result in results
        if result.get("validation_split") == "unknown"
    ]
    notes += [
        f"{result['name']}: the figures are not saved; set --output_dir to save them"
        for result in results
        if not is_saved(result["name"], output_dir)
    ]
    everything = [*results, *earlier]
    found = [*header(results[0]), *(f"note: {note}" for note in dict.fromkeys(notes))]
    found += ["", *lines(everything), "", *sentences(everything)]
    for result in results:
        findings = [Finding(each["code"], each["severity"], each["evidence"]) for each in result["figures"]["findings"]]
        few = f" (with fewer than {MIN_VARIED} images, variety is not judged)" * (result["figures"]["rows"] < MIN_VARIED)
        found += ["", f"{_title(result)}:" + f" nothing found that looks like a collapse{few}" * (not findings)]
        for finding in findings:
            found += ["", *described(finding)]
    return found


def header(result: dict) -> list[str]:
    """Returns what all figures of the table share."""
    height, width = result["image_shape"][1:]
    dimensions, fingerprint = result["dimensions"], result["reference_fingerprint"][:12]
    return [
        f"reference  {result['reference']} (N {result['reference_images']:,}, fingerprint {fingerprint})",
        f"features   {result['features']}, {dimensions} dimensions, SHA-256 {result['extractor_sha256'][:16]}, "
        f"resize: {result['resize']}",
        f"images     {result['images']:,} of {height}x{width} each",
    ]


def lines(results: list[dict]) -> list[str]:
    """Returns the table of results that may be compared, with the real/real floor as the last column."""
    samples = [result["figures"] for result in results]
    floor = samples[0]["floor"]
    columns = [*samples, floor]
    rows = [["", *(_title(result) for result in results), f"real/real floor (N {floor['images']:,})"]]
    rows.append(["samples", *(_made(result) for result in results), ""])
    rows += [[metric_name(kind, results[0]), *(f"{figures[kind]:.4g}" for figures in columns)] for kind in DISTANCES]
    for key, name in FIGURES.items():
        if key not in DISTANCES:
            name += f" (k {NEIGHBORS})" * (key in _OF_NEIGHBORS)
            rows.append([name, *(f"{figures[key]:.3g}" for figures in columns)])
    if all(figures["regions"] for figures in columns):
        for key, name in (("missing", "real images without samples near"), ("crowded", "samples without real images near")):
            rows.append([name, *(f"{figures['regions'][key]['share']:.1%}" for figures in columns)])
    modes = [figures["modes"] for figures in columns]
    rows.append(["modes hit", *map(_hit, modes)])
    rows.append(["modes of another share", *(f"{found['different']} of {found['number']}" for found in modes)])
    largest = (f"{found['largest_share']:.1%} / {found['largest_real_share']:.1%}" for found in modes)
    rows.append(["most enlarged mode / real", *largest])
    if all(classes := [figures.get("classes") for figures in samples]):
        rows.append(["classes hit", *map(_hit, classes), f"judge right {classes[0]['accuracy']:.0%}"])
    if all(copies := [figures.get("memorisation") for figures in samples]):
        against = copies[0]["compared_with"]
        real = f"{copies[0]['near_duplicates_real']:.2%} ({against})"
        rows.append(["near-duplicates of training images", *(f"{found['near_duplicates']:.2%}" for found in copies), real])
        rows.append(["distance of the nearest one", *(f"{found['pixel_ratio']:.2f}" for found in copies), f"1 ({against})"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _hit(bins: dict) -> str:
    return f"{bins['hit']:.0%} of {bins['number']}"


def _title(result: dict) -> str:
    return result["name"] if result.get("seed") is None else f"{result['name']} seed {result['seed']}"


def _made(result: dict) -> str:
    if not result.get("sampler"):
        return "files"
    precision = {"no": "fp32"}.get(result["mixed_precision"], result["mixed_precision"])
    return f"{result['sampler']} {result['num_inference_steps']} steps {precision}"


def sentences(results: list[dict]) -> list[str]:
    """Such as fd_randconv = 3.41 (real/real floor 0.12; N 10000 against 50000), for each result and over its seeds."""
    found = []
    for kind in DISTANCES:
        by_name: dict[str, list[float]] = {}
        for result in results:
            figures, floor = result["figures"], result["figures"]["floor"]
            name = metric_name(kind, result)
            by_name.setdefault(result["name"], []).append(figures[kind])
            counts = f"N {result['images']} against {result['reference_images']}"
            found.append(f"{_title(result)}: {name} = {figures[kind]:.4g} (real/real floor {floor[kind]:.4g}; {counts})")
        for source, values in by_name.items():
            if len(values) > 1:
                found.append(f"{source}: {name} over {len(values)} seeds: mean {mean(values):.4g}, minimum {min(values):.4g}")
    if any(figures["kd"] < 0 for result in results for figures in (result["figures"], result["figures"]["floor"])):
        found.append("a kernel distance (kd) below 0 is one of 0: it is an estimate, and chance takes it to either side")
    return found


def folder_of(name: str, output_dir: Path | None) -> Path | None:
    """Returns where a result of this name goes: --output_dir, or evaluation/ of the run that was evaluated; None for what is
    neither."""
    run = Path(name)
    return output_dir or (run / "evaluation" if (run / "options.json").is_file() else None)


def save_result(output_dir: Path | None, results: list[dict], sheet: Image.Image | None) -> None:
    """Writes the last of the results, and the sheet of its closest pairs, beside those before it of the same folder; and what
    was found, in the record of the run. A folder that cannot be written is no reason to lose the figures, and is told on
    stderr."""
    name = results[-1]["name"]
    folder, owner = folder_of(name, output_dir), run_of(name)
    try:
        if folder is not None:
            write_figures(folder, [each for each in results if folder_of(each["name"], output_dir) == folder], sheet)
    except OSError as error:
        _tell(f"the figures are not saved: cannot write {folder}: {error.strerror or error}; another --output_dir saves them")
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

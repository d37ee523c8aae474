"""report.html: one file that shows a run - what is wrong with it, its curves, its samples, its options.

It stands alone (no network, no libraries), so that it can be mailed, put beside a model on the Hub, or opened from a backup.
"""

import math
import shlex
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from utils.core.bars import duration
from utils.core.signals import EXIT_DIVERGED, EXIT_STOPPED
from utils.core.size import Size
from utils.diagnostics.finding import count_line
from utils.diagnostics.report.figures import (
    PROBED,
    Curves,
    covered,
    evaluation_rows,
    grids_of,
    layer_figure,
    newest_figures,
    picture,
    sample_rows,
    strip,
)
from utils.diagnostics.report.page import TEMPLATES, cell, figure_name, flatten, number, write_page
from utils.diagnostics.report.plots import bars, plot
from utils.options.presets import FLAGS
from utils.runs.record import RunRecord

REPORT = "report.html"
SYMBOLS = {"critical": "✖", "warning": "▲", "info": "●"}  # severity is told by more than color
SECTIONS = {
    "Findings": "findings_section",
    "Loss": "loss",
    "Gradients and learning rate": "gradients",
    "Layers": "layers",
    "EMA": "ema",
    "Speed": "speed",
    "Samples": "samples",
    "Evaluation": "evaluation",
    "Checks of the network": "probes",
    "Data": "data",
    "Options": "options",
}  # title -> macro of sections.html


def write_report(record: RunRecord, findings: list, path: Path) -> None:
    """Writes the page about `record` and `findings` (as of utils/diagnostics/diagnose.py) to `path`, complete or not at all.

    Raises OSError where the disk does not take it.
    """
    functions = (plot, bars, picture, strip, covered, evaluation_rows, figure_rows, probe_rows, sample_rows)
    marked = [finding for finding in findings if finding.step is not None]
    given = {
        **{function.__name__: function for function in functions},
        "curves": Curves(record),
        "layer_figure": partial(layer_figure, record),
        "record": record,
        "findings": findings,
        "symbols": SYMBOLS,
        "marks": [(finding.step, f"{finding.code}, update {finding.step}") for finding in marked],
        "decays": record.series("train/ema_decay")[1],
        "grids": grids_of(record),
        "evaluated": newest_figures(record),
    }
    shown: Any = TEMPLATES.get_template("sections.html").make_module(given | _header(record, findings) | _options(record))
    name = record.output_dir.resolve().name
    write_page(
        path,
        title=f"{name} - training report",
        header=shown.header(),
        sections=[(title, getattr(shown, macro)().strip()) for title, macro in SECTIONS.items()],
        source=str(record.output_dir),
    )


def _header(record: RunRecord, findings: list) -> dict[str, Any]:
    """How the run stands, and its main figures."""
    resolved, options = record.resolved, record.options
    done = updates_done(record)
    total = resolved.get("max_train_steps") or options.get("max_train_steps") or 0
    data = options.get("dataset_name") or options.get("train_data_dir")
    if data and resolved.get("training_images"):
        data = f"{data}, {resolved['training_images']:,} images"
        if options.get("resolution"):
            data += ", {}×{}".format(*Size.of(options["resolution"]))
    device, processes = resolved.get("device"), resolved.get("num_processes", 1)
    seconds = seconds_spent(record)
    memory = [value for value in record.series("perf/peak_memory_gib")[1] if math.isfinite(value)]
    skipped = max(record.finite("train/skipped_updates")[1], default=0)  # counted from the beginning
    facts = {
        "Time spent": duration(seconds) if seconds is not None else None,
        "Data": data,
        "Network": f"{number(resolved['parameters'])} parameters" if resolved.get("parameters") else None,
        "Global batch": resolved.get("global_batch_size"),
        "Device": device and (f"{device}, {processes} processes" if processes > 1 else device),
        "Precision": {"no": "fp32"}.get(str(resolved.get("mixed_precision")), resolved.get("mixed_precision")),
        "Peak memory": f"{max(memory):.2f} GiB" if memory else None,
        "Skipped updates": f"{skipped:.0f}" if skipped else None,
        "Started": record.starts[0].replace("T", " ").replace("+00:00", " UTC") if record.starts else None,
        "Resumed": "once" if len(record.starts) == 2 else f"{len(record.starts) - 1} times" if record.starts[2:] else None,
    }
    state, kind = run_state(record, done, total)
    worst = next((severity for severity in ("critical", "warning") if any(f.severity == severity for f in findings)), "good")
    return {
        "name": record.output_dir.resolve().name,
        "state": state,
        "state_kind": "info" if kind == "good" and worst != "good" else kind,  # green: nothing is known to be wrong
        "worst": worst,
        "counted": count_line(findings),
        "updates": f"{done:,} of {total:,} updates" if total else f"{done:,} updates",
        "done": done,
        "total": total,
        "facts": facts,
    }


def updates_done(record: RunRecord) -> int:
    return max((entry["step"] for entry in record.history), default=0)


def run_state(record: RunRecord, done: int, total: int) -> tuple[str, str]:
    """(words, class) for how the run stands. A crash leaves no exit status, as does a run that goes on."""
    if record.exit_status == EXIT_DIVERGED:
        return "Stopped: gradients not finite", "critical"
    if (total and done >= total) or (not total and record.exit_status == 0):
        return "Finished", "good"
    if record.exit_status == 0:
        return "Finished early", "good"
    if record.exit_status == EXIT_STOPPED:
        return "Stopped, can be resumed", "warning"
    if record.exit_status is not None:
        return f"Ended with exit status {record.exit_status}", "critical"
    return "Not finished", "info"


def seconds_spent(record: RunRecord) -> float | None:
    """Time from each start to the last record before the next one: the hours in which nothing ran are not counted."""
    times = sorted(entry["time"] for entry in record.history if isinstance(entry.get("time"), (int, float)))
    if not times:
        return None
    starts = sorted(datetime.fromisoformat(start).timestamp() for start in record.starts)
    spent, previous = 0.0, None
    for time in times:
        began = [moment for moment in (*starts, previous) if moment is not None and moment <= time]
        spent += time - max(began, default=time)
        previous = time
    return spent


# ---- tables


def probe_rows(first: dict, newest: dict, several: bool) -> list[list[str]]:
    """What was measured and is not plotted; of `several` times that the network was asked the first one, too."""
    rest, before = (flatten({k: v for k, v in probe.items() if k not in PROBED}) for probe in (newest, first))
    return [[figure_name(key), *([cell(before.get(key))] if several else []), cell(value)] for key, value in rest.items()]


def figure_rows(figures: dict) -> list[list[str]]:
    return [[figure_name(key), cell(value)] for key, value in flatten(figures).items()]


def _options(record: RunRecord) -> dict[str, Any]:
    """What was set, by whom, and what was left alone."""
    words = [word.split("=")[0] for word in _split(record.command) if word.startswith("--")]
    given = {word.removeprefix("--").removeprefix("no-") for word in words}
    preset = record.options.get("model_preset")
    by_preset = FLAGS.get(preset, {}).keys() if isinstance(preset, str) else ()
    chosen: list[list[str]] = []
    untouched: list[list[str]] = []
    for name, value in sorted(record.options.items()):
        source = "command line" if name in given else f"preset {preset}" if name in by_preset else ""
        text = "not set" if value is None or value == [] else str(value)
        (chosen if source else untouched).append([f"--{name}", text, *([source] if source else [])])
    facts = {"git commit": record.git_commit, **record.versions}
    return {
        "chosen": chosen,
        "untouched": untouched,
        "followed": [[key.replace("_", " "), cell(value)] for key, value in record.resolved.items()],
        "versions": ", ".join(f"{name} {value}" for name, value in facts.items() if value),
    }


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a secret that was cut out took a quotation mark along
        return command.split()

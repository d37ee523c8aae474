"""report.html: one file that shows a run - what is wrong with it, its curves, its samples, its options.

It stands alone (no network, no libraries), so that it can be mailed, put beside a model on the Hub, or opened from a backup.
"""

import math
import shlex
from datetime import datetime
from html import escape
from pathlib import Path

from utils.core.signals import EXIT_DIVERGED, EXIT_STOPPED
from utils.core.size import Size
from utils.diagnostics.finding import count_line
from utils.diagnostics.report.curves import (
    PROBED,
    columns,
    data_plot,
    ema_plots,
    gradient_plots,
    layer_plots,
    loss_plots,
    probe_plots,
    speed_plots,
)
from utils.diagnostics.report.evaluation import evaluation_section
from utils.diagnostics.report.page import write_page
from utils.diagnostics.report.plots import number, prose
from utils.diagnostics.report.samples import LARGE, picture, samples_section
from utils.diagnostics.report.tables import cell, figure_name, flatten, table
from utils.options.presets import FLAGS
from utils.runs.record import RunRecord

REPORT = "report.html"
SYMBOLS = {"critical": "✖", "warning": "▲", "info": "●"}  # severity is told by more than color


def write_report(record: RunRecord, findings: list, path: Path) -> None:
    """Writes the page about `record` and `findings` (as of utils/diagnostics/diagnose.py) to `path`, complete or not at all.

    Raises OSError where the disk does not take it.
    """
    name = record.output_dir.resolve().name
    write_page(
        path,
        title=f"{name} - training report",
        header=_header(record, findings, name),
        sections=_sections(record, findings),
        source=str(record.output_dir),
    )


def _sections(record: RunRecord, findings: list) -> list[tuple[str, str]]:
    """(title, HTML) in the order of the page; what was not recorded gives an empty string."""
    return [
        ("Findings", _findings(findings, record)),
        ("Loss", loss_plots(record, findings)),
        ("Gradients and learning rate", gradient_plots(record)),
        ("Layers", layer_plots(record)),
        ("EMA", ema_plots(record)),
        ("Speed", speed_plots(record) + _profile(record)),
        ("Samples", samples_section(record)),
        ("Evaluation", evaluation_section(record)),
        ("Checks of the network", _probes(record)),
        ("Data", _data(record)),
        ("Options", _options(record)),
    ]


def _profile(record: RunRecord) -> str:
    """The operations that the newest profile found to take longest."""
    for step, profile in record.records("profile")[-1:]:
        rows = [[row["name"], f"{row['calls']:,}", f"{row['seconds']:.3g}", f"{row['share']:.1%}"] for row in profile["rows"]]
        reading = (
            f"{profile['updates']} updates up to update {step:,}, without what an operation calls in turn. On a GPU, its time; "
            "else that of the processor. The whole trace is in profile/: open it with https://ui.perfetto.dev."
        )
        return table("The longest operations", reading, ["operation", "calls", "seconds", "share"], rows)
    return ""


def _header(record: RunRecord, findings: list, name: str) -> str:
    resolved, options = record.resolved, record.options
    done = updates_done(record)
    total = resolved.get("max_train_steps") or options.get("max_train_steps") or 0
    share = f'<progress value="{min(done, total)}" max="{total}">{done}</progress>' if total else ""
    updates = f"{done:,} of {total:,} updates" if total else f"{done:,} updates"
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
        "Time spent": _duration(seconds) if seconds is not None else None,
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
    entries = "".join(f"<div><dt>{key}</dt><dd>{escape(str(value))}</dd></div>" for key, value in facts.items() if value)
    state, kind = run_state(record, done, total)
    worst = next((severity for severity in ("critical", "warning") if any(f.severity == severity for f in findings)), "good")
    kind = "info" if kind == "good" and worst != "good" else kind  # green means that nothing is known to be wrong
    found = f'<a href="#findings"><b class="{worst}">{count_line(findings)}</b></a>' if findings or record.history else ""
    return (
        f'<header><h1>{escape(name)}</h1><p class="state"><b class="{kind}">{escape(state)}</b> {found} {updates}</p>{share}'
        f"<dl>{entries}</dl></header>"
    )


def updates_done(record: RunRecord) -> int:
    """From the history; of a run that kept none, from what it saved."""
    saved = (
        path.stem.removeprefix("checkpoint-")
        for pattern in ("checkpoint-*", "samples/*")
        for path in record.output_dir.glob(pattern)
    )
    steps = [entry["step"] for entry in record.history] or [int(name) for name in saved if name.isdigit()]
    return max(steps, default=0)


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


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next((i for i, (amount, _) in enumerate(parts) if amount), len(parts) - 1)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2])


# ---- findings


def _findings(findings: list, record: RunRecord) -> str:
    if not findings and not record.history:
        return '<p class="nothing">Nothing was recorded that could be checked.</p>'
    if not findings:
        return '<p class="nothing"><b>✔ Nothing found.</b> No check of the doctor found anything wrong with this run.</p>'
    cards = []
    for finding in findings:
        severity = finding.severity if finding.severity in SYMBOLS else "info"
        step = "" if finding.step is None else f" · update {finding.step:,}"
        rows = [("Evidence", finding.evidence), ("Cause", finding.cause)]
        paragraphs = "".join(f"<p><b>{label}</b> {prose(text)}</p>" for label, text in rows if text)
        fixes = "".join(f"<li>{prose(fix)}</li>" for fix in finding.fixes)
        shown = picture(record.output_dir / finding.picture, finding.title, LARGE) if finding.picture else ""
        cards.append(
            f'<article class="finding {severity}"><p class="severity">{SYMBOLS[severity]} {severity}'
            f"<code>{escape(finding.code)}</code>{step}</p><h3>{prose(finding.title)}</h3>{paragraphs}{shown}"
            + (f"<p><b>What to do</b></p><ul>{fixes}</ul>" if fixes else "")
            + "</article>"
        )
    return "".join(cards)


# ---- probes, data, options

PROBE_READINGS = {
    "errors_as": "Errors are listed as 'timestep: error', over the size of what was to be predicted. Healthy: mostly lowest "
    "where the output is read as what it was trained for.",
    "timestep_response": "Another timestep changes the output; the rest of the batch does not.",
    "ideal_denoiser_gap_held_out": "The ideal denoiser knows the training images alone. So a good network beats it by far on "
    "held-out images with little noise, and a gap far below 0 is healthy there.",
}


def _probes(record: RunRecord) -> str:
    """Plots of what was measured by timestep, and the first and newest of the other numbers."""
    records = record.records("probe")
    if not records:
        return ""
    (first_step, first), (step, newest) = records[0], records[-1]
    rest, before = (flatten({k: v for k, v in probe.items() if k not in PROBED}) for probe in (newest, first))
    several = len(records) > 1
    rows = [[figure_name(key), *([cell(before.get(key))] if several else []), cell(value)] for key, value in rest.items()]
    head = ["", *([f"update {first_step:,}"] if several else []), f"update {step:,}"]
    readings = [text for key, text in PROBE_READINGS.items() if key in newest]
    reading = " ".join([*readings, *(["The first and the newest time they were made."] if several else [])])
    return columns(*probe_plots(records)) + table("Checks on a real batch", reading, head, rows)


def _data(record: RunRecord) -> str:
    records = record.records("data")
    rows = [[figure_name(key), cell(value)] for key, value in flatten(records[-1][1]).items()] if records else []
    reading = "Shares are of the images, sizes in pixels, values as the network sees them, in [-1, 1]."
    return table("Check of the data at the start", reading, ["", ""], rows) + columns(data_plot(record))


def _options(record: RunRecord) -> str:
    """What was set, by whom, and in a fold all that was left alone."""
    if not record.options:
        return ""
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
    command = f"<pre><code>{escape(record.command)}</code></pre>" if record.command else ""
    facts = {"git commit": record.git_commit, **record.versions}
    versions = ", ".join(f"{name} {value}" for name, value in facts.items() if value)
    return (
        command
        + table("Set for this run", "", ["flag", "value", "set by"], chosen)
        + f"<details><summary>All other flags ({len(untouched)}), at their defaults</summary>"
        + table("", "", ["flag", "value"], untouched)
        + "</details>"
        + table(
            "What followed from them", "", ["", ""], [[key.replace("_", " "), cell(v)] for key, v in record.resolved.items()]
        )
        + (f'<p class="note">{escape(versions)}</p>' if versions else "")
    )


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a secret that was cut out took a quotation mark along
        return command.split()

"""report.html: one file that shows a run - what is wrong with it, its curves, its samples, its options.

It stands alone (no network, no libraries), so that it can be mailed, put beside a model on the Hub, or opened from a backup.
"""

import base64
import io
import math
import shlex
from datetime import datetime
from html import escape
from pathlib import Path

from PIL import Image

from utils.interrupts import EXIT_DIVERGED, EXIT_STOPPED
from utils.page import write_page
from utils.plots import number, prose
from utils.presets import FLAGS
from utils.report_plots import (
    by_timestep,
    columns,
    data_plots,
    ema_plots,
    gradient_plots,
    layer_plots,
    loss_plots,
    probe_plots,
    speed_plots,
)
from utils.run_record import RunRecord

STRIP = 6  # earlier sample grids shown
# A PNG of more bytes becomes a JPEG of at most so many pixels a side: what a page shows on a dense screen.
LARGE, SMALL = (900_000, 1600), (150_000, 800)
LONG = 40  # entries of a dict, such as classes, beyond which they are not listed
SHORT_CELL = 10  # characters: such a cell of a table is not broken into lines
SYMBOLS = {"critical": "✖", "warning": "▲", "info": "●"}  # severity is told by more than colour


def write_report(record: RunRecord, findings: list, path: Path) -> None:
    """Writes the page about `record` and `findings` (as of utils/diagnostics.py) to `path`, complete or not at all.

    Raises OSError where the disk does not take it.
    """
    name = record.output_dir.resolve().name
    write_page(
        path,
        title=f"{name} - training report",
        header=_header(record, name),
        sections=_sections(record, findings),
        source=str(record.output_dir),
    )


def _sections(record: RunRecord, findings: list) -> list[tuple[str, str]]:
    """(title, HTML) in the order of the page; what was not recorded gives an empty string."""
    return [
        ("Findings", _findings(findings, record.history)),
        ("Loss", loss_plots(record, findings)),
        ("Gradients and learning rate", gradient_plots(record)),
        ("Layers", layer_plots(record)),
        ("EMA", ema_plots(record)),
        ("Speed", speed_plots(record)),
        ("Samples", _samples(record)),
        ("Checks of the network", _probes(record)),
        ("Data", _data(record)),
        ("Options", _options(record)),
    ]


def _header(record: RunRecord, name: str) -> str:
    resolved, options = record.resolved, record.options
    done = updates_done(record)
    total = resolved.get("max_train_steps") or options.get("max_train_steps") or 0
    share = f'<progress value="{min(done, total)}" max="{total}">{done}</progress>' if total else ""
    updates = f"{done:,} of {total:,} updates" if total else f"{done:,} updates"
    data = options.get("dataset_name") or options.get("train_data_dir")
    if data and resolved.get("training_images"):
        data = f"{data}, {resolved['training_images']:,} images"
        if options.get("resolution"):
            data += f", {options['resolution']}×{options['resolution']}"
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
        "Precision": {"no": "fp32"}.get(resolved.get("mixed_precision"), resolved.get("mixed_precision")),
        "Peak memory": f"{max(memory):.2f} GiB" if memory else None,
        "Skipped updates": f"{skipped:.0f}" if skipped else None,
        "Started": record.starts[0].replace("T", " ").replace("+00:00", " UTC") if record.starts else None,
        "Resumed": f"{len(record.starts) - 1} times" if len(record.starts) > 1 else None,
    }
    entries = "".join(f"<div><dt>{key}</dt><dd>{escape(str(value))}</dd></div>" for key, value in facts.items() if value)
    state, kind = run_state(record, done, total)
    return (
        f'<header><h1>{escape(name)}</h1><p class="state"><b class="{kind}">{escape(state)}</b> {updates}</p>{share}'
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
    if total and done >= total:
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


def _findings(findings: list, history: list) -> str:
    if not findings and not history:
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
        cards.append(
            f'<article class="finding {severity}"><p class="severity">{SYMBOLS[severity]} {severity}'
            f"<code>{escape(finding.code)}</code>{step}</p><h3>{prose(finding.title)}</h3>{paragraphs}"
            + (f"<p><b>What to do</b></p><ul>{fixes}</ul>" if fixes else "")
            + "</article>"
        )
    return "".join(cards)


# ---- samples


def _samples(record: RunRecord) -> str:
    folder = record.output_dir / "samples"
    grids = {int(path.stem): path for path in folder.glob("*.png") if path.stem.isdigit()}
    steps = sorted(grids)
    if not steps:
        return _sample_figures(record)
    newest, strip = steps[-1], ""
    chosen = [steps[i] for i in sorted({i * (len(steps) - 1) // (STRIP - 1) for i in range(STRIP)})]
    for step in chosen if len(chosen) > 1 else ():
        picture = _picture(grids[step], f"samples after {step:,} updates", SMALL)
        strip += f"<figure>{picture}<figcaption>update {step:,}</figcaption></figure>" if picture else ""
    path = folder / f"{grids[newest].stem}-path.png"
    sides = (
        "Left raw, right EMA weights, from the same noise. Healthy: both alike, EMA the cleaner; good raw beside grey or "
        "blurred EMA: the average is too long."
    )
    if record.options.get("use_ema") is False:
        sides = "The raw weights, on both sides. Healthy: varied, without grain and without colour casts."
    return (
        _card(f"After {newest:,} updates", sides, _picture(grids[newest], f"samples after {newest:,} updates", LARGE))
        + _card(
            "Over time",
            "The same noise every time. Healthy: shapes settle early, details later, and places keep their image.",
            strip and f'<div class="strip">{strip}</div>',
        )
        + columns(
            _card(
                "From noise to image",
                "Timesteps of the newest sampling, left to right. Healthy: large shapes at high timesteps, details at low "
                "ones; noise that stays to the end means a schedule or a prediction type that does not fit.",
                _picture(path, "from noise to image", LARGE) if path.exists() else "",
            ),
            _sample_figures(record),
        )
    )


def _card(title: str, reading: str, body: str) -> str:
    """A titled figure around `body`; "" without one."""
    caption = (f"<h3>{escape(title)}</h3>" if title else "") + (f"<p>{prose(reading)}</p>" if reading else "")
    return f'<figure class="plot"><figcaption>{caption}</figcaption>{body}</figure>' if body else ""


def _picture(path: Path, text: str, limits: tuple[int, int]) -> str:
    """The image as it is, or as a JPEG within `limits` (bytes, pixels); "" where the file is no image."""
    max_bytes, max_side = limits
    try:
        content, kind = path.read_bytes(), "png"
        with Image.open(io.BytesIO(content)) as image:
            size = image.size
            small = image.convert("RGB") if len(content) > max_bytes else None
    except (OSError, SyntaxError, Image.DecompressionBombError):  # Pillow reports a broken PNG chunk as a SyntaxError
        return ""
    if small is not None:
        kind = "jpeg"
        small.thumbnail((max_side, max_side))
        while True:
            buffer = io.BytesIO()
            small.save(buffer, "JPEG", quality=85)
            if len(buffer.getvalue()) <= max_bytes:
                break
            small = small.resize([max(1, side * 7 // 10) for side in small.size])
        content = buffer.getvalue()
    source = base64.b64encode(content).decode()
    return f'<img alt="{escape(text)}" width="{size[0]}" height="{size[1]}" src="data:image/{kind};base64,{source}">'


def _sample_figures(record: RunRecord) -> str:
    """The table of what was measured on the newest samples, beside the same of the data."""
    records = record.records("samples")
    if not records:
        return ""
    step, newest = records[-1]
    kinds = [kind for kind in ("raw", "ema", "data") if isinstance(newest.get(kind), dict)]
    names = list(dict.fromkeys(name for kind in kinds for name in newest[kind]))
    rows = [[name.replace("_", " "), *(cell(newest[kind].get(name)) for kind in kinds)] for name in names]
    titles = {"raw": "raw", "ema": "EMA", "data": "training data"}
    reading = "Healthy: samples close to the data in every row; less spread than the data means too little variety."
    return _table(f"Figures of the samples after {step:,} updates", reading, ["", *(titles[kind] for kind in kinds)], rows)


# ---- probes, data, options


def cell(value) -> str:
    """A figure as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ": ".join(cell(item) for item in value.values())
    if not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def _table(title: str, reading: str, head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    header = f"<thead><tr>{cells}</tr></thead>" if any(head) else ""
    body = "".join("<tr>" + "".join(map(_table_cell, row)) + "</tr>" for row in rows)
    return _card(title, reading, f"<table>{header}<tbody>{body}</tbody></table>" if rows else "")


def _table_cell(text: str) -> str:
    return f"<td{' class=short' if len(text) <= SHORT_CELL else ''}>{prose(text)}</td>"


def flatten(values: dict, prefix: str = "") -> dict:
    """Nested dicts as one, keys joined by a slash; lists as text, of long ones the beginning, and of long dicts the length."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and len(value) > LONG:
            flat[f"{prefix}{key}"] = f"{len(value)} of them"
        elif isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            flat[f"{prefix}{key}"] = ", ".join(cell(item) for item in value[:6]) + (" ..." if len(value) > 6 else "")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _probes(record: RunRecord) -> str:
    """Plots of what was measured by timestep, and the first and newest of the other numbers."""
    records = record.records("probe")
    if not records:
        return ""
    (first_step, first), (step, newest) = records[0], records[-1]
    rest, before = (flatten({k: v for k, v in probe.items() if not by_timestep(v)}) for probe in (newest, first))
    several = len(records) > 1
    rows = [[key.replace("_", " "), *([cell(before.get(key))] if several else []), cell(value)] for key, value in rest.items()]
    head = ["", *([f"update {first_step:,}"] if several else []), f"update {step:,}"]
    reading = "The first and the newest time they were made." if several else ""
    return columns(*probe_plots(records)) + _table("Checks on a real batch", reading, head, rows)


def _data(record: RunRecord) -> str:
    records = record.records("data")
    rows = [[key.replace("_", " "), cell(value)] for key, value in flatten(records[-1][1]).items()] if records else []
    table = _table("Check of the data at the start", "Numbers of images unless named otherwise.", ["", ""], rows)
    return table + columns(*data_plots(record))


def _options(record: RunRecord) -> str:
    """What was set, by whom, and in a fold all that was left alone."""
    if not record.options:
        return ""
    words = [word.split("=")[0] for word in _split(record.command) if word.startswith("--")]
    given = {word.removeprefix("--").removeprefix("no-") for word in words}
    preset = record.options.get("model_preset")
    by_preset = FLAGS.get(preset, {}).keys() if isinstance(preset, str) else ()
    chosen, untouched = [], []
    for name, value in sorted(record.options.items()):
        source = "command line" if name in given else f"preset {preset}" if name in by_preset else ""
        text = "not set" if value is None or value == [] else str(value)
        (chosen if source else untouched).append([f"--{name}", text, *([source] if source else [])])
    command = f"<pre><code>{escape(record.command)}</code></pre>" if record.command else ""
    facts = {"git commit": record.git_commit, **record.versions}
    versions = ", ".join(f"{name} {value}" for name, value in facts.items() if value)
    return (
        command
        + _table("Set for this run", "", ["flag", "value", "set by"], chosen)
        + f"<details><summary>All other flags ({len(untouched)}), at their defaults</summary>"
        + _table("", "", ["flag", "value"], untouched)
        + "</details>"
        + _table(
            "What followed from them", "", ["", ""], [[key.replace("_", " "), cell(v)] for key, v in record.resolved.items()]
        )
        + (f'<p class="note">{escape(versions)}</p>' if versions else "")
    )


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a secret that was cut out took a quotation mark along
        return command.split()

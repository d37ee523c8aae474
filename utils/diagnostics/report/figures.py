"""What a report shows: curves of a run's history, its network and its layers; its samples, their figures, and evaluations."""

import base64
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from PIL import Image

from utils.diagnostics.report.page import by_timestep, cell, number
from utils.diagnostics.report.plots import Curve, plot, smooth
from utils.runs.record import RunRecord

SMOOTHING = 30  # the smoothed curves average over about a thirtieth of the reports
MAX_LAYER_RECORDS = 240  # of longer runs as many, evenly spread
# A constant added to all keys changes no softmax: this bias has a gradient of zero, whatever is trained.
WITHOUT_EFFECT = "to_k.bias"
PROBED = ("error", "held_out_error", "linear_error")  # plotted


class Curves:
    """Of a run; sections.html asks for them by the names of their figures in the history."""

    def __init__(self, record: RunRecord):
        self._record = record

    def curve(self, tag: str, label: str, style: int | str = 1, factor: float = 1) -> Curve:
        steps, values = self._record.series(tag)
        return Curve(label, steps, [factor * value for value in values], style)

    def smoothed(self, tag: str, label: str, style: int) -> Curve:
        steps, values = self._record.series(tag)
        return Curve(label, steps, smooth(values, len(values) / SMOOTHING), style)

    def with_smoothed(self, tag: str, label: str) -> list[Curve]:
        raw = self.curve(tag, label, "raw")
        return [raw, self.smoothed(tag, "smoothed", 1)] if len(raw.steps) > 2 else [raw]

    def clipped_to(self, label: str, style: str) -> Curve:
        clips = [(step, value) for step, value in zip(*self._record.series("train/clip_value")) if value > 0]  # 0: no clipping
        return Curve(label, [step for step, _ in clips], [value for _, value in clips], style)

    def averaged_over(self, label: str) -> Curve:
        """Updates, by the decay of the average."""
        steps, decays = self._record.series("train/ema_decay")
        return Curve(label, steps, [1 / (1 - decay) if decay < 1 else math.inf for decay in decays])

    def distances(self, kind: str) -> list[Curve]:
        """Of the samples of each evaluation, and that of real images. All of the training's own evaluations: those of
        evaluate.py may be of another extractor and number."""
        evaluations = self._record.records("evaluation")
        tags = sorted({tag for entry in self._record.history for tag in entry if tag.startswith(f"eval/{kind}_")})
        drawn = [self.curve(tag, tag.removeprefix("eval/"), style) for style, tag in enumerate(tags[:4], start=1)]
        if drawn and evaluations:
            steps, floor = drawn[0].steps, evaluations[-1][1]["floor"][kind]
            drawn.append(Curve("real/real floor", [steps[0], steps[-1]], [floor] * 2, "limit"))
        return drawn

    def probed(self, probe: dict, key: str, label: str, style: int | str) -> Curve:
        """What the network did with real images, over the timesteps."""
        points: Any = probe.get(key) if by_timestep(probe.get(key)) else {}
        timesteps = sorted(points, key=int)
        return Curve(label, [int(t) for t in timesteps], [points[t] for t in timesteps], style)

    def first_and_newest(self, key: str) -> list[Curve]:
        """Of the times the network was asked, the newest first."""
        records = self._record.records("probe")
        shown = [records[-1], *records[:1]] if len(records) > 1 else records
        return [self.probed(probe, key, f"update {step:,}", style) for style, (step, probe) in enumerate(shown, start=1)]


# ---- layers


def layer_figure(record: RunRecord, kind: str, title: str, unit: str, reading: str) -> str:
    """The spread of one magnitude over the layers, with those that are the highest and the lowest at the end."""
    records = record.records("layers")
    if len(records) > MAX_LAYER_RECORDS:
        records = [records[i] for i in np.linspace(0, len(records) - 1, MAX_LAYER_RECORDS).round().astype(int)]
    names = list(dict.fromkeys(name for _, layers in records for name, row in layers.items() if kind in row))
    if not names:
        return ""
    missing = {kind: math.nan}
    values = np.array([[layers.get(name, missing).get(kind, math.nan) for name in names] for _, layers in records], dtype=float)
    recorded = np.array([[kind in layers.get(name, ()) for name in names] for _, layers in records])
    positive = np.where(np.isfinite(values) & (values > 0), values, np.nan)
    rows = ~np.isnan(positive).all(axis=1)  # np.nanpercentile warns of empty rows
    steps = np.array([step for step, _ in records])
    edges = np.full((3, len(records)), np.nan)
    if rows.any():
        edges[:, rows] = np.nanpercentile(positive[rows], (20, 50, 80), axis=1)
    few = len(names) <= 4
    newest = {i: value for i, value in enumerate(positive[-1]) if np.isfinite(value) and not names[i].endswith(WITHOUT_EFFECT)}
    ends = sorted({max(newest, key=newest.__getitem__), min(newest, key=newest.__getitem__)}) if newest else []
    chosen = range(len(names)) if few else ends
    curves = [
        Curve(names[i], steps[recorded[:, i]], values[recorded[:, i], i], style) for style, i in enumerate(chosen, start=1)
    ]
    broken = [name for name, value, known in zip(names, values[-1], recorded[-1]) if known and not math.isfinite(value)]
    more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
    note = f"{len(broken)} of {len(names)} layers are not finite in the newest record: {', '.join(broken[:3])}{more}."
    styles = {"80 % of the layers are above": "raw", f"median of {len(names)} layers": "median", "80 % are below": "raw"}
    spread = [Curve(label, steps, edge, style) for (label, style), edge in zip(styles.items(), edges)]
    curves = curves if few else spread + curves
    return plot(title, curves, unit=unit, scale="log", reading=reading, note=note if broken else "")


MAX_BARS = 40
FIGURES = {
    "fd": "Fréchet distance",
    "kd": "kernel distance",
    "precision": "precision",
    "recall": "recall",
    "density": "density",
    "coverage": "coverage",
    "variance_ratio": "variance / real",
    "distance_ratio": "pairwise distance / real",
    "vendi": "Vendi score",
}
STRIP = 6  # earlier sample grids shown
# A PNG of more bytes becomes a JPEG of at most so many pixels a side: what a page shows on a dense screen.
LARGE, SMALL = (900_000, 1600), (150_000, 800)


def grids_of(record: RunRecord) -> dict[int, Path]:
    """Update -> the picture of its samples."""
    return {int(path.stem): path for path in (record.output_dir / "samples").glob("*.png") if path.stem.isdigit()}


def strip(grids: dict[int, Path]) -> list[tuple[int, str]]:
    """(update, image) of a few grids that are spread over the run; empty where there is but one."""
    steps = sorted(grids)
    chosen = [steps[i] for i in sorted({i * (len(steps) - 1) // (STRIP - 1) for i in range(STRIP)})] if len(steps) > 1 else []
    images = [(step, picture(grids[step], f"samples after {step:,} updates", SMALL)) for step in chosen]
    return [(step, image) for step, image in images if image]


def picture(path: Path, text: str, limits: tuple[int, int] = LARGE) -> Markup:
    """Returns the image as it is, or as a JPEG within `limits` (bytes, pixels); "" where the file is no image."""
    max_bytes, max_side = limits
    try:
        content, kind = path.read_bytes(), "png"
        with Image.open(io.BytesIO(content)) as image:
            size = image.size
            small = image.convert("RGB") if len(content) > max_bytes else None
    except (OSError, SyntaxError, Image.DecompressionBombError):  # Pillow reports a broken PNG chunk as a SyntaxError
        return Markup()
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
    alt, (width, height) = escape(text), size
    return Markup(f'<img alt="{alt}" width="{width}" height="{height}" src="data:image/{kind};base64,{source}">')


def sample_rows(newest: dict) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of the table of what was measured on the `newest` samples, beside the same of as many training images."""
    titles = {"raw": "raw", "ema": "EMA", "data": "training data"}
    kinds = [kind for kind in titles if isinstance(newest.get(kind), dict)]
    names = list(dict.fromkeys(name for kind in kinds for name in newest[kind]))
    rows = [[name.replace("_", " "), *(cell(newest[kind].get(name)) for kind in kinds)] for name in names]
    return ["", *(titles[kind] for kind in kinds)], rows


def newest_figures(record: RunRecord) -> tuple[str, dict] | None:
    """(what they are of, the figures as of `Evaluation.measure`): those of evaluate.py or of the training itself, whichever are
    newer."""
    trained = next((entry for entry in reversed(record.history) if isinstance(entry.get("evaluation"), dict)), None)
    if record.evaluations and (trained is None or record.evaluations[-1]["time"] > trained.get("time", 0)):
        result = record.evaluations[-1]
        on, made = f" on {result['state']}" * bool(result.get("state")), f"{result['sampler']} {result['num_inference_steps']}"
        return f"evaluate.py{on}: {result['images']:,} samples, {result['features']}, {made} steps", result["figures"]
    return trained and (f"update {trained['step']:,}: {trained['evaluation']['images']:,} samples", trained["evaluation"])


def evaluation_rows(figures: dict) -> list[list[str]]:
    """Figure, samples, real images beside other real ones."""
    rows = [[name, number(figures[key]), number(figures["floor"][key])] for key, name in FIGURES.items() if key in figures]
    copies = figures.get("memorisation")
    if copies is not None:
        shares = (100 * copies["near_duplicates"], 100 * copies["near_duplicates_real"])
        rows.append(["near-duplicates of training images", *(f"{number(share)} %" for share in shares)])
    return rows


def covered(bins: dict) -> tuple[list[tuple[str, float]], int]:
    """(name of each class or mode, how often it is generated, in % of its share of the real images; how many are left out). The
    rarest first where there are too many to show."""
    total, real_total = sum(bins["generated"]), sum(bins["real"])
    names = bins.get("names") or [f"mode {number}" for number in range(bins["number"])]
    ratios = [
        (str(name), 100 * (count / total) / (real / real_total))
        for name, count, real in zip(names, bins["generated"], bins["real"])
        if real
    ]
    left_out = len(ratios) - MAX_BARS
    return (sorted(ratios, key=lambda pair: pair[1])[:MAX_BARS], left_out) if left_out > 0 else (ratios, 0)

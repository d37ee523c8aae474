"""Which curves a report shows, and what healthy ones look like. All functions give HTML, "" for what was not recorded."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from utils.diagnostics.report.plots import Band, Curve, heat_map, plot, smooth
from utils.runs.record import RunRecord

SMOOTHING = 30  # the smoothed curves average over about a thirtieth of the reports
MAX_LAYER_RECORDS = 240  # of longer runs as many, evenly spread
RESTING = 1e-3  # of the run's largest learning rate: below it most updates are lost in rounding, as they should be
# A constant added to all keys changes no softmax: this bias has a gradient of zero, whatever is trained.
WITHOUT_EFFECT = "to_k.bias"


PROBED = ("error", "held_out_error", "linear_error", "output_std", "target_std", "ideal_denoiser_gap")  # plotted


def columns(*figures: str) -> str:
    figures = [figure for figure in figures if figure]
    return f'<div class="columns">{"".join(figures)}</div>' if figures else ""


def _curve(record: RunRecord, tag: str, label: str, style: int | str = 1, change: Callable | None = None) -> Curve:
    steps, values = record.series(tag)
    return Curve(label, steps, [change(value) for value in values] if change else values, style)


def _smoothed(record: RunRecord, tag: str, label: str, style: int) -> Curve:
    steps, values = record.series(tag)
    return Curve(label, steps, smooth(values, len(values) / SMOOTHING), style)


def loss_plots(record: RunRecord, findings: list) -> str:
    raw = _curve(record, "train/loss", "each report", "raw")
    curves = [raw, _smoothed(record, "train/loss", "smoothed", 1)] if len(raw.steps) > 2 else [raw]
    marks = [(finding.step, f"{finding.code}, update {finding.step}") for finding in findings if finding.step is not None]
    loss = plot(
        "Training and validation loss",
        [*curves, _curve(record, "validation/loss", "validation (EMA weights)", 2)],
        unit="loss per sample",
        reading="Healthy: the loss falls fast at first, then slowly, and the validation loss falls with it. If "
        "the validation loss rises while the training loss falls, the network memorizes the images. If "
        "the smoothed line rises, the learning rate is too high.",
        marks=marks,
        note="Upright lines mark the updates that findings name." if marks else "",
    )
    quartiles = plot(
        "Loss by timestep",
        [
            _smoothed(
                record,
                f"train/loss_timestep_quartile_{i}",
                f"quartile {i}" + {1: ", least noise", 4: ", most noise"}.get(i, ""),
                i,
            )
            for i in (1, 2, 3, 4)
        ],
        unit="loss per sample, smoothed",
        reading="Healthy: four lines that fall or stay level. If only one of them rises, the training has a "
        "problem at these noise levels.",
    )
    return loss + quartiles


def gradient_plots(record: RunRecord) -> str:
    clips = [(step, value) for step, value in zip(*record.series("train/clip_value")) if value > 0]  # 0 is no clipping
    clip = Curve("clipped to", [step for step, _ in clips], [value for _, value in clips], "limit")
    norm = _curve(record, "train/grad_norm", "before clipping, each report", "raw")
    smoothed = [_smoothed(record, "train/grad_norm", "smoothed", 1)] if len(norm.steps) > 2 else []
    return columns(
        plot(
            "Gradient norm",
            [norm, *smoothed, clip],
            unit="L2 norm of the gradient",
            scale="log",
            reading="Healthy: high at first, then level within a factor of ten, and mostly below the limit. If the "
            "norm is always above the limit, the clipping decides the step size. If there are spikes, or the "
            "norm rises slowly, try a lower learning rate.",
        ),
        plot(
            "Learning rate",
            [_curve(record, "train/lr", "learning rate")],
            unit="learning rate per update",
            scale="zero",
            reading="Healthy: the warm-up and the schedule that you chose, without jumps where the run was resumed.",
        ),
        plot(
            "Loss scale (fp16)",
            [_curve(record, "train/loss_scale", "loss scale")],
            unit="factor on the loss",
            scale="log",
            reading="Healthy: level after the first thousand updates. If it is halved again and again, the gradients overflow.",
        ),
    )


def ema_plots(record: RunRecord) -> str:
    def updates_averaged(decay: float) -> float:
        return 1 / (1 - decay) if decay < 1 else math.inf

    decays = record.series("train/ema_decay")[1]
    return columns(
        plot(
            "Distance from raw to EMA weights",
            [_curve(record, "train/ema_distance", "distance")],
            unit="norm of the difference / norm of the EMA weights",
            scale="zero",
            reading="Healthy: the distance rises at first, and falls when the learning rate falls. If it rises all "
            "the time, the samples of the raw weights and of the EMA will differ.",
        ),
        plot(
            "EMA decay",
            [_curve(record, "train/ema_decay", "1 / (1 − decay)", 1, updates_averaged)],
            unit="updates averaged over, 1 / (1 − decay)",
            scale="log",
            reading="Healthy: the number grows with the run and stays well below the number of updates. If it is "
            "larger than that, the average still contains the first, bad weights.",
            note=f"The newest decay is {decays[-1]:.6g}." if decays else "",
        ),
    )


def speed_plots(record: RunRecord) -> str:
    return columns(
        plot(
            "Images per second",
            [_curve(record, "perf/images_per_second", "images/s")],
            unit="images per second, all processes",
            scale="zero",
            reading="Healthy: level. If the speed falls slowly, the machine may be shared, hot or short of memory.",
        ),
        plot(
            "Waiting for data",
            [_curve(record, "perf/data_wait", "waiting", 1, lambda share: 100 * share)],
            unit="% of the time of an update",
            scale="zero",
            reading="Healthy: below 5 %. If it is more, the device waits for data: use more "
            "--dataloader_num_workers, or leave --cache_images on.",
        ),
        plot(
            "Use of the device",
            [_curve(record, "perf/mfu", "MFU", 1, lambda share: 100 * share)],
            unit="% of the device's peak (MFU)",
            scale="zero",
            reading="The arithmetic of the network (forward and backward pass), compared with what the device can "
            "do. A small network or batch uses only a part of a GPU. Try a larger --train_batch_size, "
            "--mixed_precision bf16 or --compile.",
        ),
    )


# ---- layers

# kind in the history: (title, unit, how to read it)
LAYER_KINDS = {
    "activation": (
        "Activations",
        "root mean square of the layer's output",
        "Healthy: level after the first tenth of the run. Activations that rise without end will overflow in fp16.",
    ),
    "weight": (
        "Weights",
        "root mean square of the weights",
        "Healthy: slow growth that becomes level. If one layer grows differently from the others, look at its gradient.",
    ),
    "gradient": (
        "Gradients",
        "root mean square of the gradient",
        "Healthy: all layers are within a few powers of ten and change together. A layer with a gradient of 0 learns nothing.",
    ),
    "update": (
        "Updates",
        "change per update / weight, root mean squares",
        "Healthy: around 1e-4 to 1e-2, and falling with the learning rate. Above 1e-2, a layer changes "
        "too fast. Below 1e-6, it hardly learns.",
    ),
}


def layer_plots(record: RunRecord) -> str:
    records = record.records("layers")
    if len(records) > MAX_LAYER_RECORDS:
        records = [records[i] for i in np.linspace(0, len(records) - 1, MAX_LAYER_RECORDS).round().astype(int)]
    rates = record.finite("train/lr")[1]
    resting = bool(rates) and rates[-1] < RESTING * max(rates)
    return columns(*(_layer_figure(records, kind, resting, *words) for kind, words in LAYER_KINDS.items()))


def _layer_figure(records: list[tuple[int, dict]], kind: str, resting: bool, title: str, unit: str, reading: str) -> str:
    """The spread of one magnitude over the layers, with the layers that stand out, and every layer in a folded heat map.
    `resting`: whether the learning rate has come to its end, at which updates of zero are healthy."""
    names = list(dict.fromkeys(name for _, layers in records for name, row in layers.items() if kind in row))
    if not names:
        return ""
    missing = {kind: math.nan}
    values = np.array([[layers.get(name, missing).get(kind, math.nan) for name in names] for _, layers in records], dtype=float)
    recorded = np.array([[kind in layers.get(name, ()) for name in names] for _, layers in records])
    broken = recorded & ~np.isfinite(values)
    positive = np.where(np.isfinite(values) & (values > 0), values, np.nan)
    rows = ~np.isnan(positive).all(axis=1)  # np.nanpercentile warns of empty rows
    steps = np.array([step for step, _ in records])
    edges = np.full((3, len(records)), np.nan)
    if rows.any():
        edges[:, rows] = np.nanpercentile(positive[rows], (10, 50, 90), axis=1)
    telling = np.array([not name.endswith(WITHOUT_EFFECT) for name in names])
    few = len(names) <= 4
    chosen = list(range(len(names))) if few else _outstanding(np.where(telling, positive, np.nan), edges[1])
    curves = [
        Curve(names[i], steps, np.where(recorded[:, i], values[:, i], np.nan), style) for style, i in enumerate(chosen, start=1)
    ]
    curves = [
        Curve(c.label, np.asarray(c.steps)[recorded[:, i]], np.asarray(c.values)[recorded[:, i]], c.style)
        for c, i in zip(curves, chosen)
    ]
    notes = []
    at_zero = recorded & (values == 0) & telling & (kind != "update" or not resting)
    for words, hit in (("not finite", broken), ("at zero", at_zero)):
        layers = [name for name, is_hit in zip(names, hit[-1]) if is_hit]
        if layers:
            more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
            notes.append(
                f"{len(layers)} of {len(names)} layers are {words} in the newest record: {', '.join(layers[:3])}{more}."
            )
    figure = plot(
        title,
        curves if few else [Curve(f"median of {len(names)} layers", steps, edges[1], "median"), *curves],
        unit=unit,
        scale="log",
        reading=reading,
        band=None if few else Band("80 % of the layers", steps, edges[0], edges[2]),
        note=" ".join(notes),
    )
    heat = heat_map(steps, names, np.where(broken, np.inf, positive), unit=unit)
    if not heat:
        return figure
    return figure.removesuffix("</figure>") + f"<details><summary>All {len(names)} layers</summary>{heat}</details></figure>"


def _outstanding(positive: np.ndarray, median: np.ndarray) -> list[int]:
    """Up to four layers: at the end the highest and the lowest, and those that rose and fell most against the median."""
    with np.errstate(all="ignore"):
        distance = np.log(positive / median[:, None])
    last_row = next((row for row in distance[::-1] if np.isfinite(row).any()), None)
    if last_row is None:
        return []
    candidates = [np.nanargmax(last_row), np.nanargmin(last_row)]
    change = last_row - distance[len(distance) // 10]
    if np.isfinite(change).any():
        candidates += [np.nanargmax(change), np.nanargmin(change)]
    return list(dict.fromkeys(int(i) for i in candidates))


def by_timestep(values: object) -> bool:
    """Returns whether a value of a probe is a dict of numbers whose keys are timesteps."""
    if not isinstance(values, dict) or len(values) < 2:
        return False
    return all(str(key).isdigit() and isinstance(value, (int, float)) for key, value in values.items())


def probe_plots(records: list[tuple[int, dict]]) -> list[str]:
    """Returns what the network did with real images, over the timesteps: the newest time it was asked, and the first."""
    (first_step, first), (step, newest) = records[0], records[-1]
    now, then = f"update {step:,}", f"update {first_step:,}"

    def curve(probe: dict, key: str, label: str, style: int | str) -> Curve:
        points: Any = probe.get(key) if by_timestep(probe.get(key)) else {}
        timesteps = sorted(points, key=int)
        return Curve(label, [int(t) for t in timesteps], [points[t] for t in timesteps], style)

    def both(key: str) -> list[Curve]:
        return [curve(newest, key, now, 1)] + ([curve(first, key, then, 2)] if len(records) > 1 else [])

    errors = plot(
        "Error by timestep",
        [
            *both("error"),
            curve(newest, "held_out_error", f"{now}, held-out images", 3),
            curve(newest, "linear_error", "the best that only scales its input", "limit"),
        ],
        unit="mean squared error",
        reading="Healthy: the newest line is below the first one, and later also below the dotted one. The line "
        "of the held-out images is close to it.",
        x_label="timestep",
    )
    sizes = plot(
        "Size of the prediction",
        [curve(newest, "output_std", now, 1), curve(newest, "target_std", "what is to be predicted", "limit")],
        unit="standard deviation",
        reading="Healthy: at or below the dotted line, and closer to it at timesteps where the prediction is easy.",
        scale="linear",
        x_label="timestep",
    )
    gaps = plot(
        "Gap to the ideal denoiser",
        both("ideal_denoiser_gap"),
        unit="loss above that of the ideal denoiser",
        reading="Healthy: the newest line is below the first one at every timestep, and near zero where there is much noise.",
        scale="zero",
        x_label="timestep",
    )
    return [errors, sizes, gaps]


def data_plot(record: RunRecord) -> str:
    names = {"max": "largest", "mean": "mean", "std": "standard deviation", "min": "smallest"}
    return plot(
        "Pixels that the network is trained on",
        [_curve(record, f"data/{key}", label, style) for style, (key, label) in enumerate(names.items(), start=1)],
        unit="pixel value after scaling to [-1, 1]",
        scale="linear",
        reading="Healthy: the smallest and largest values are near -1 and 1, the mean and the standard deviation "
        "are level. If a line jumps, the data has changed.",
    )

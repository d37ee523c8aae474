"""Curves and bars as HTML fragments: an inline SVG that stretches with the page, its labels ordinary text beside it.

Text in an SVG shrinks with it and would be unreadable on a phone; here only the curves stretch, and strokes and labels keep
their size. Colors are CSS classes (report.css), so that light and dark mode are the style sheet's concern.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from utils.diagnostics.report.page import number, part

Numbers = Sequence[float] | np.ndarray

MAX_BUCKETS = 500  # of which each keeps its lowest and its highest point: as fine as the pixels of a plot
SPIKE = 1e3  # a value so many times beyond 98 % of the others does not stretch the axis over the rest
DOTS_UP_TO = 24  # a curve of so few points shows them
DENSE_FROM = 400  # the raw points of a longer curve cover an area, which must not hide the smoothed line
HUGE = 1e300  # beyond this the axis arithmetic would overflow
SIZE = 1000  # of the SVG's own coordinates, which the page stretches to the plot's width and height


@dataclass(frozen=True)
class Curve:
    """One line of a plot. `style`: 1 to 4 (color and dash differ), "raw" (thin), "median" (heavy), "limit" (dotted)."""

    label: str
    steps: Numbers
    values: Numbers
    style: int | str = 1


@dataclass(frozen=True)
class Axis:
    """The range [low, high], low < high, on a linear or a logarithmic scale (then low > 0)."""

    low: float
    high: float
    log: bool = False

    def position(self, values: ArrayLike) -> np.ndarray:
        """0 at `low`, 1 at `high`; NaN where a value has no place on the axis."""
        values = np.asarray(values, dtype=float)
        if not self.log:
            return (values - self.low) / (self.high - self.low)
        with np.errstate(divide="ignore", invalid="ignore"):
            exponents = np.log10(np.where(values > 0, values, np.nan))
        return (exponents - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))

    def ticks(self) -> list[tuple[float, str]]:
        """(value, label) at round values, about five of them."""
        if self.log:
            return [(value, number(value)) for value in _log_ticks(self.low, self.high)]
        step = _round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        count = math.floor(self.high / step + 1e-9) - first + 1
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        values = [(first + i) * step for i in range(count)]
        if decimals > 4 or step >= 1000:
            digits = math.ceil(math.log10(max(abs(self.low), abs(self.high)) / step)) + 1  # neighbors get different labels
            return [(value, number(value, max(3, digits)) if abs(value) > step / 2 else "0") for value in values]
        return [(value, f"{value:.{decimals}f}" if abs(value) > step / 2 else "0") for value in values]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        stride = math.ceil((last - first + 1) / 6)
        return [10.0**exponent for exponent in range(first, last + 1) if exponent % stride == 0]
    decades = [10.0**exponent for exponent in range(first - 1, last + 2)]
    for factors in ((1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [f * decade for decade in decades for f in factors if low <= f * decade * 1.000001 and f * decade <= high]
        if len(ticks) >= 3:
            return ticks
    return [low, math.sqrt(low * high), high]


def spike_limit(values: np.ndarray) -> float:
    """Where rare values (under 2 %) tower above all others, a limit between the two; else infinity. `values` are finite."""
    common = float(np.quantile(values, 0.98))
    return 10 * common if 0 < common * SPIKE < float(values.max()) else math.inf


def smooth(values: Numbers, window: float) -> np.ndarray:
    """Weighted mean over about `window` reports around each one, so that it does not lag behind; values that are not finite
    stay what they are, and like spikes they have no weight."""
    values = np.asarray(values, dtype=float)
    if not len(values):
        return values
    half = min(max(1, round(window)), max(1, len(values) - 1))
    kernel = np.hanning(2 * half + 3)[1:-1]
    good = np.isfinite(values) & (np.abs(values) < HUGE)
    if good.any():
        good &= values <= spike_limit(values[good])
    center = slice(half, half + len(values))  # "same" would give the kernel's length where that is the longer one
    total = np.convolve(np.where(good, values, 0.0), kernel)[center]
    weight = np.convolve(good.astype(float), kernel)[center]
    mean = np.divide(total, weight, out=np.full(len(values), np.nan), where=weight > 1e-9)
    return np.where(np.isfinite(values), mean, values)


def thin(steps: Numbers, values: Numbers, buckets: int = MAX_BUCKETS) -> tuple[np.ndarray, np.ndarray]:
    """At most 3 x buckets + 2 of the points: first, last, and of each bucket the lowest, the highest and one that is not
    finite. No spike and no gap is lost."""
    steps, values = np.asarray(steps, dtype=float), np.array(values, dtype=float)
    values[np.abs(values) >= HUGE] = np.inf
    if len(values) <= 2 * buckets:
        return steps, values
    kept = {0, len(values) - 1}
    for bucket in np.array_split(np.arange(len(values)), buckets):
        finite = np.isfinite(values[bucket])
        if finite.any():
            inside = bucket[finite]
            kept |= {int(inside[np.argmin(values[inside])]), int(inside[np.argmax(values[inside])])}
        if not finite.all():
            kept.add(int(bucket[np.argmin(finite)]))
    order = sorted(kept)
    return steps[order], values[order]


def value_axis(values: np.ndarray, scale: str) -> Axis:
    """An axis for `values` (finite, at least one). `scale`: "linear", "zero" (linear from 0), "log", or "auto": logarithmic
    where the values are positive and span more than a factor of 20. Rare values beyond `SPIKE` are left outside."""
    low, high = float(values.min()), float(values.max())
    high = min(high, spike_limit(values))
    if scale == "auto":
        scale = "log" if low > 0 and high / low > 20 else "linear"
    if scale == "log":
        positive = values[values > 0]
        if len(positive):
            low, high = float(positive.min()), float(positive.max())
            margin = max((high / low) ** 0.06, 1.15)
            return Axis(max(low / margin, 1e-305), high * margin, log=True)
    if scale == "zero":
        low = min(low, 0.0)
    room = (high - low) * 0.06
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-4 * largest, 1e-300):  # as good as constant
        room = 0.1 * largest if largest > 1e-300 else 1.0
    return Axis(low if scale == "zero" else low - room, high + room)


def plot(
    title: str,
    curves: Sequence[Curve],
    *,
    unit: str,
    reading: str,
    scale: str = "auto",
    marks: Sequence[tuple[float, str]] = (),
    x_label: str = "update",
    note: str = "",
) -> str:
    """A figure of the curves that have points; "" where none has. `unit` labels the value axis, `reading` says in a sentence
    what a healthy one looks like, `marks` are (step, text) for vertical lines, `note` is one more sentence."""
    curves = [curve for curve in curves if len(curve.steps)]
    if not any(curve.style != "limit" for curve in curves):
        return ""
    lines = [(curve, *thin(curve.steps, curve.values)) for curve in curves]
    drawn = np.concatenate([values for _, _, values in lines])
    finite = drawn[np.isfinite(drawn)]
    axis = value_axis(finite if len(finite) else np.array([0.0, 1.0]), scale if len(finite) else "linear")
    all_steps = np.concatenate([steps for _, steps, _ in lines])
    first, last = float(all_steps.min()), float(all_steps.max())
    time_axis = Axis(first, last) if last > first else Axis(first - 1, first + 1)

    paths: list[dict[str, Any]] = [{"kind": "grid", "d": _grid(axis)}]
    for step, text in marks:
        if time_axis.low <= step <= time_axis.high:
            x = _coordinate(time_axis.position(step))
            paths.append({"kind": "mark", "d": f"M{x} 0V{SIZE}", "title": text})
    legend: list[dict[str, str]] = []
    for curve, steps, values in lines:
        height = axis.position(np.where(np.isfinite(values), values, np.nan))
        line, dots = _line_path(time_axis.position(steps), 1 - np.minimum(height, 1.0))
        kind = f"s{curve.style}" if isinstance(curve.style, int) else str(curve.style)
        dense = " dense" if len(steps) > DENSE_FROM else ""
        label = "" if kind == "limit" else curve.label
        paths += [{"kind": f"dots {kind}", "d": dots}] if dots else []
        paths += [{"kind": f"line {kind}{dense}", "label": label, "d": line}] if line else []
        legend.append({"kind": kind, "label": curve.label, "value": number(float(curve.values[-1]))})
    levels = [_tick("tick y", "top", 1 - float(axis.position(value)), text) for value, text in axis.ticks()]
    marked, explained = _outside(lines, axis, time_axis)
    return part(
        "plot",
        title=title,
        reading=reading,
        note=note,
        legend=legend + explained,
        unit=unit,
        x_label=x_label,
        axis=axis,
        time_axis=time_axis,
        paths=paths,
        ticks=levels + _time_ticks(time_axis, None if last > first else first) + marked,
    )


def _outside(lines: list[tuple[Curve, np.ndarray, np.ndarray]], axis: Axis, time_axis: Axis) -> tuple[list[dict], list[dict]]:
    """Marks at the edge of the plot, and their legend, for the values that have no place inside."""
    tests = (
        ("bad", "×", "not finite", lambda values: ~np.isfinite(values)),
        ("high", "▴", "beyond this axis, up to", lambda values: np.isfinite(values) & (values > axis.high)),
        ("low", "▾", "zero or less", lambda values: np.isfinite(values) & (values <= 0) & axis.log),
    )
    marks, legend = [], []
    for kind, symbol, words, test in tests:
        steps = np.unique(np.concatenate([steps[test(values)] for _, steps, values in lines]))
        if not len(steps):
            continue
        places = np.unique(np.round(time_axis.position(steps), 2))  # a hundred at most, however many there are
        marks += [{"tag": "b", "kind": kind, "side": "left", "place": f"{100 * x:g}", "text": symbol} for x in places]
        counts = {
            float(step)
            for curve, _, _ in lines
            for step in np.asarray(curve.steps)[test(np.asarray(curve.values, dtype=float))]
        }
        largest = max(float(values[np.isfinite(values)].max(initial=-math.inf)) for _, _, values in lines)
        value = number(largest) if kind == "high" else f"at {len(counts):,} points"
        legend.append({"kind": kind, "label": words, "value": value, "symbol": symbol})
    return marks, legend


def _coordinate(position: float | np.ndarray) -> str:
    return f"{SIZE * float(position):.1f}".removesuffix(".0")


def _grid(axis: Axis) -> str:
    return "".join(f"M0 {_coordinate(1 - axis.position(value))}H{SIZE}" for value, _ in axis.ticks())


def _tick(kind: str, side: str, position: float, text: str) -> dict[str, str]:
    return {"tag": "span", "kind": kind, "side": side, "place": f"{100 * position:.2f}", "text": text}


def _time_ticks(time_axis: Axis, only: float | None = None) -> list[dict[str, str]]:
    """`only`: the one step that there is."""
    ticks = [tick for tick in time_axis.ticks() if tick[0] == round(tick[0])] if only is None else [(only, number(only))]
    labels = []
    for value, text in ticks:
        position = float(time_axis.position(value))
        edge = " first" if position < 0.02 else " last" if position > 0.97 else ""  # such a label would stick out of the page
        labels.append(_tick(f"tick x{edge}", "left", position, text))
    return labels


def _line_path(x: np.ndarray, y: np.ndarray) -> tuple[str, str]:
    """SVG paths of a line that breaks where y is NaN, and of its dots: all where they are few, else those without neighbor."""
    pieces: list[list[str]] = [[]]
    for column, row in zip(x, y):
        if math.isfinite(row):
            pieces[-1].append(f"{_coordinate(column)} {_coordinate(row)}")
        elif pieces[-1]:
            pieces.append([])
    few = sum(map(len, pieces)) <= DOTS_UP_TO
    line = "".join(f"M{piece[0]}" + (f"L{' '.join(piece[1:])}" if piece[1:] else "") for piece in pieces if piece)
    dots = "".join(f"M{point}h0" for piece in pieces if few or len(piece) == 1 for point in piece)
    return line, dots


def bars(title: str, rows: Sequence[tuple[str, float]], *, unit: str, reading: str) -> str:
    """Horizontal bars from zero, with their values to one decimal; "" where there are none. What is not finite has no bar."""
    largest = max((value for _, value in rows if math.isfinite(value)), default=0.0) or 1.0
    drawn = [(name, value, max(100 * value / largest, 0.0) if math.isfinite(value) else 0.0) for name, value in rows]
    return part("bars", title=title, reading=reading, unit=unit, rows=drawn)

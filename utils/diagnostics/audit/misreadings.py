"""How image files get misread: names for what a network sees instead of the images that it is declared to see.

First whole readings of the file (`readings`); then changes with numbers of their own, fitted to the images that were misread
(_FITS); else how far the images are from their files.
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from utils.diagnostics.audit.files import EXACT, JITTER_TOLERANCE, LEVEL, DeclaredImages, DecodedFile, Match, compare, cut, find
from utils.diagnostics.audit.readings import alternatives

_LOOKED_AT = 3  # misread images that every name is tried on


@dataclass(frozen=True)
class Seen:
    """An image that a network was shown, beside its file."""

    number: int  # in the batch
    shown: np.ndarray  # [C, H, W]
    file: DecodedFile
    planes: np.ndarray  # what the file should give, before a random crop
    match: Match  # the best of what is declared
    tolerance: float


def _fits(match: Match, seen: Seen, gain: float) -> bool:
    """Whether another reading explains what the declared one does not. What lies within an old cache's rounding is only
    called a fault where another reading fits exactly."""
    rounding = EXACT * max(1.0, float(np.abs(seen.shown).max()))
    loose = max(rounding, seen.tolerance * gain) if seen.match.error > seen.tolerance else rounding
    return match.error <= loose and match.error < seen.match.error / 4


def describe(misread: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    """What the network sees instead of the images `misread` of a batch; empty where they differ by rounding alone."""
    broken = [seen for seen in misread if not np.isfinite(seen.shown).all()]
    if broken:
        return f"values that are not finite, in {len(broken)} images"
    errors: dict[str, list[float]] = {}
    worst = sorted(misread, key=lambda seen: -seen.planes.std() * (seen.match.error > seen.tolerance))[:_LOOKED_AT]
    for seen in worst:
        tried: dict[str, float] = {}
        for name, planes, change in alternatives(seen.file, seen.planes, declared):
            if errors and name not in errors:
                continue  # the first image that any reading fits chooses among them
            result = planes if change is None else change(planes)
            same = result.shape == seen.planes.shape and np.allclose(result, seen.planes, atol=EXACT)
            if same or result.std() == 0:
                continue
            gain = result.std() / max(seen.planes.std(), 1e-6)
            match = find(seen.shown, planes, declared, change, thorough=False)
            if _fits(match, seen, gain):
                tried[name] = min(tried.get(name, np.inf), max(EXACT, match.error / max(gain, 1e-9)))
        for name, error in tried.items():
            errors.setdefault(name, []).append(error)
    if errors:
        name = min(errors, key=lambda name: (-len(errors[name]), max(errors[name])))
        if len(errors[name]) >= 0.75 * len(worst):
            return name
    worst = [seen for seen in worst if seen.match.error > seen.tolerance]
    if not worst:
        return ""
    for fit in _FITS:
        if name := fit(worst, batch, declared):
            return name
    return _figures(worst)


def _pair(seen: Seen) -> tuple[np.ndarray, np.ndarray]:
    """(the image shown, the part of its file that is most like it); negatives are alike too."""
    best: Any = None
    for mirrored in (False, True)[: 1 + seen.file.declared.random_flip]:
        shown = seen.shown[..., ::-1] if mirrored else seen.shown
        _, correlation = compare(shown, seen.planes)
        top, left = place = np.unravel_index(np.abs(correlation).argmax(), correlation.shape)
        if best is None or abs(correlation[place]) > best[0] + 1e-6:
            best = abs(correlation[place]), shown, cut(seen.planes, int(top), int(left), shown.shape[1:])
    return best[1:]


def _pooled(seen: list[Seen]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [C, N] of all images: shown, and as they should be."""
    pairs = [[part.reshape(len(part), -1) for part in _pair(one)] for one in seen]
    shown, expected = (np.concatenate(parts, axis=1) for parts in zip(*pairs))
    return shown, expected


def _rms(values: npt.ArrayLike) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _close(y: np.ndarray, predicted: np.ndarray, x: np.ndarray) -> bool:
    """Whether a fit is right up to a rounding of 8 bits, which a gain makes larger or smaller."""
    gain = min(100.0, y.std() / max(x.std(), 1e-6))
    return _rms(y - predicted) <= max(2 * LEVEL * gain, EXACT * np.abs(y).max()) and _rms(y - predicted) < 0.1 * y.std()


def _line(y: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    """Gain and offset, found where nothing is clamped."""
    for free in ((y > y.min() + 1e-6) & (y < y.max() - 1e-6), np.ones(y.shape, bool)):
        if x[free].size and np.ptp(x[free]) > 1e-6:
            gain, offset = map(float, np.polyfit(x[free], y[free], 1))
            return gain, offset
    return 1.0, float(y.mean() - x.mean())


def _apply(line: tuple[float, float], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (line[0] * x + line[1]).clip(y.min(), y.max())


def _same(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    values = [seen.shown.ravel() for seen in batch]
    if all(np.ptp(value) < EXACT for value in values):
        return f"images of a single value ({values[0][0]:.3g})"
    if len(values) > 1 and all(np.array_equal(value, values[0]) for value in values):
        return "the same image in all places of the batch"
    return ""


def _neighbor(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    """Images of other rows. Shown beside the wrong file, an image is not one of those that fit."""
    steps = []
    for seen in worst:
        for other in batch:
            match = find(seen.shown, other.planes, declared, thorough=False) if other is not seen else Match(np.inf)
            if match.error <= max(other.tolerance, JITTER_TOLERANCE if declared.color_jitter else 0):
                steps.append((other.number - seen.number) % len(batch))
                break
    if len(steps) < 0.5 * len(worst):
        return ""
    by = f": shifted by {min(steps[0], len(batch) - steps[0])} places" if len(set(steps)) == 1 else ""
    return f"images of other rows of the batch{by}"


def _gain(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    y, x = _pooled(worst)
    line = _line(y.ravel(), x.ravel())
    if not _close(y, _apply(line, x, y), x):
        return ""
    gain, offset = line
    word = "inverted colors and " if gain < 0 else ""
    if abs(gain) < 0.98:
        word += "less contrast"
    elif abs(gain) > 1.02:
        word += "more contrast"
    else:
        word += "brighter images" if offset > 0 else "darker images"
    return f"{word}: each value x as {gain:.4g} x {'+' if offset >= 0 else '-'} {abs(round(offset, 6)):.4g}"


def _channel_gains(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    y, x = _pooled(worst)
    lines = [_line(a, b) for a, b in zip(y, x)]
    if not _close(y, np.stack([_apply(line, b, a) for line, a, b in zip(lines, y, x)]), x):
        return ""
    gains, offsets = zip(*lines)
    # In [0, 1] they would be (v - mean) / deviation.
    deviations = [0.5 / gain if gain else np.inf for gain in gains]
    means = [0.5 - offset * deviation for offset, deviation in zip(offsets, deviations)]
    figures = f"gains {_list(gains)}, offsets {_list(offsets)}"
    return f"channels with gains of their own: {figures}, as if scaled by means {_list(means)}, deviations {_list(deviations)}"


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{round(float(value), 6) + 0:.3g}" for value in values)


def _matrix(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    y, x = _pooled(worst)
    design = np.concatenate([x, np.ones((1, x.shape[1]))])
    matrix = np.linalg.lstsq(design.T, y.T, rcond=None)[0].T
    if len(y) != 3 or not _close(y, matrix @ design, x):
        return ""
    rows = "; ".join(f"{name} = {_list(row[:3])} of red, green, blue" for name, row in zip(("red", "green", "blue"), matrix))
    return f"mixed colors: {rows}"


def _curve(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    y, x = _pooled(worst)
    levels, group, counts = np.unique(np.rint(x / LEVEL * 2), return_inverse=True, return_counts=True)
    if x.size < 4 * len(levels):
        return ""
    means = np.bincount(group.ravel(), y.ravel()) / counts
    if not _close(y, means[group].reshape(y.shape), x):
        return ""
    v, u = (levels * LEVEL / 2 + 1) / 2, (means + 1) / 2
    inner = (v > 0.05) & (v < 0.95) & (u > 0.01)
    if inner.any():
        gamma = float((np.log(u[inner]) * np.log(v[inner])).sum() / np.square(np.log(v[inner])).sum())
        if _rms(u - v.clip(0, 1) ** gamma) < LEVEL:
            return f"{'darker' if gamma > 1 else 'brighter'} images: a gamma of {gamma:.3g}"
    points = [(levels[place] * LEVEL / 2, means[place]) for place in np.linspace(0, len(levels) - 1, 5).round().astype(int)]
    return "values through a curve: " + ", ".join(f"{a:.2f} as {b:.2f}" for a, b in points)


def _own_gains(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    pairs = [_pair(seen) for seen in worst]
    lines = [_line(y.ravel(), x.ravel()) for y, x in pairs]
    if len(pairs) < 2 or not all(_close(y, _apply(line, x, y), x) for line, (y, x) in zip(lines, pairs)):
        return ""
    if all(abs(y.mean()) < 0.01 and abs(y.std() - 1) < 0.01 for y, _ in pairs):
        return "each image scaled to mean 0 and deviation 1 of its own"
    if len({(round(y.min(), 3), round(y.max(), 3)) for y, _ in pairs}) == 1:
        return f"each image stretched to the range {_list([pairs[0][0].min(), pairs[0][0].max()])}"
    gains = [gain for gain, _ in lines]
    return f"brightness and contrast that change from image to image (gains from {min(gains):.3g} to {max(gains):.3g})"


def _jitter(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    anything = replace(declared, color_jitter=max(0.99, declared.color_jitter))
    if all(find(seen.shown, seen.planes, anything).error < LEVEL for seen in worst):
        return "a color jitter " + ("stronger than declared" if declared.color_jitter else "that is not declared")
    return ""


def _patch(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    pairs = [_pair(seen) for seen in worst]
    differing = [(np.abs(y - x) > 4 * LEVEL).any(0) for y, x in pairs]
    shares = [mask.mean() for mask in differing]
    if max(shares) > 0.6 or min(shares) == 0:
        return ""
    spans = [[np.flatnonzero(mask.any(axis)) for axis in (1, 0)] for mask in differing]
    boxes = [[span[-1] - span[0] + 1 for span in both] for both in spans]
    if all(height * width < 2 * mask.sum() for (height, width), mask in zip(boxes, differing)):
        return f"images with another content in a part of them (rows x columns: {boxes[0][0]} x {boxes[0][1]} pixels)"
    return f"images of which {np.mean(shares):.1%} of the pixels are others"


def _shift(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    moves = []
    for seen in worst:
        y, x = _pair(seen)
        gray = [part.mean(0) - part.mean() for part in (y, x)]
        product = np.fft.irfft2(np.fft.rfft2(gray[0]) * np.conj(np.fft.rfft2(gray[1])), gray[0].shape)
        move = np.unravel_index(product.argmax(), product.shape)
        down, right = (int(m) - side if m > side / 2 else int(m) for m, side in zip(move, product.shape))
        both = tuple(slice(max(0, m), side + min(0, m)) for m, side in zip((down, right), product.shape))
        moved = np.roll(x, (down, right), (1, 2))
        if (down, right) == (0, 0) or _rms((y - moved)[:, *both]) > 2 * LEVEL:
            return ""
        moves.append(f"{down} down and {right} right")
    return f"images shifted by a few pixels, such as {moves[0]}"


def _jpeg(image: Image.Image, quality: int) -> Image.Image:
    image.save(file := io.BytesIO(), "JPEG", quality=quality)
    return Image.open(file)


def _blurred(image: Image.Image, radius: float) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(radius))


def _changed(x: np.ndarray, change: Callable[[Image.Image], Image.Image]) -> np.ndarray:
    """Planes after a change of the image that they make."""
    bands = [Image.fromarray(np.rint((band + 1) * 127.5).clip(0, 255).astype(np.uint8)) for band in x]
    image = change(bands[0] if len(bands) == 1 else Image.merge("RGB", bands))
    return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1) / 127.5 - 1


_SOFTENED = {
    **{f"images blurred by about {r:g} pixels": partial(_blurred, radius=r) for r in (0.5, 1, 1.5, 2, 3, 5, 8)},
    **{
        f"images compressed as JPEG of a quality of about {q}": partial(_jpeg, quality=q)
        for q in (95, 90, 85, 75, 60, 50, 40, 30, 20, 10)
    },
}


def _softened(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    """The stored image after JPEG or a blur: the strength that leaves least, where it explains most of the difference."""
    if declared.channels not in (1, 3):
        return ""
    pairs = [_pair(seen) for seen in worst]
    left = {name: _rms([_rms(y - _changed(x, change)) for y, x in pairs]) for name, change in _SOFTENED.items()}
    best = min(left, key=lambda name: left[name])
    return best if left[best] < 0.5 * _rms([_rms(y - x) for y, x in pairs]) else ""


def _noise(worst: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    pairs = [_pair(seen) for seen in worst]
    rests = [y - x for y, x in pairs]
    deviation = _rms([rest.std() for rest in rests])
    neighbors = np.mean([(rest[..., 1:] * rest[..., :-1]).mean() for rest in rests]) / deviation**2
    image = np.mean([(rest * x).mean() - rest.mean() * x.mean() for rest, (_, x) in zip(rests, pairs)])
    spread = deviation * _rms([x.std() for _, x in pairs])
    if abs(neighbors) > 0.2 or abs(image) > 0.1 * spread or _rms([rest.mean() for rest in rests]) > 0.1 * deviation:
        return ""
    return f"images with noise added (standard deviation {deviation:.2g})"


_FITS = (_same, _neighbor, _gain, _channel_gains, _own_gains, _matrix, _jitter, _curve, _patch, _shift, _softened, _noise)


def _figures(worst: list[Seen]) -> str:
    pairs = [_pair(seen) for seen in worst]
    alike = np.mean([abs(float(compare(y, x)[1][0, 0])) for y, x in pairs])
    difference = _rms([_rms(y - x) for y, x in pairs])
    if alike < 0.5:
        return f"other images than those of the files (correlation {alike:.2f}): of other rows, or another part of them"
    gain, offset = _line(*(part.ravel() for part in _pooled(worst)))
    return (
        f"images that differ from the files by {difference:.2g} (correlation {alike:.3f}, gain {gain:.3g}, offset {offset:.3g})"
    )

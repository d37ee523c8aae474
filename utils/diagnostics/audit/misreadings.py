"""How image files get misread: names for what a network sees in place of the images that it is declared to see.

First whole readings of the file, which fit to rounding or do not (_READINGS, _TURNS, _COLORS); then changes with numbers of
their own, fitted to the images that were misread (_FITS); else how far the images are from their files.
"""

import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from utils.diagnostics.audit.files import (
    EXACT,
    JITTER_TOLERANCE,
    LEVEL,
    LUMA,
    DeclaredImages,
    DecodedFile,
    Match,
    compare,
    cut,
    find,
    shorter_side,
)

_FILTERS = Image.Resampling
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


def _without_antialias(band, resolution):
    size = shorter_side(band, resolution).size
    scale = [before / after for before, after in zip(band.size, size)]
    return band.transform(size, Image.Transform.AFFINE, (scale[0], 0, 0, 0, scale[1], 0), _FILTERS.BILINEAR)


def _by_filter(how):
    return {"resize": lambda band, resolution: shorter_side(band, resolution, how)}


def _by_way_of(share, how):
    def resize(band, resolution):
        small = shorter_side(band, max(1, resolution // share))
        return small.resize(shorter_side(band, resolution).size, how)

    return {"resize": resize}


# What the network sees: how `DecodedFile.planes` reads the file like that.
_READINGS = {
    "images as they are stored, not turned upright as their EXIF orientation asks": {"upright": False},
    "the colors that are hidden under transparent pixels": {"background": None},
    **{f"transparent images on {color}": {"background": color} for color in ("black", "white", "gray")},
    "16-bit images cut off at the value 255": {"cut_off": True},
    **{f"{mode} values in place of RGB": {"mode": mode} for mode in ("HSV", "YCbCr")},
    "images cut elsewhere than at the center": {"center_crop": False},
    **{f"images resized by the filter {how.name.lower()}": _by_filter(how) for how in _FILTERS if how != _FILTERS.BILINEAR},
    "images resized without antialiasing": {"resize": _without_antialias},
    **{f"images resized to 1/{n} of the resolution and enlarged again": _by_way_of(n, _FILTERS.BILINEAR) for n in (2, 4)},
    **{f"images made of blocks of {n} x {n} pixels": _by_way_of(n, _FILTERS.NEAREST) for n in (2, 4)},
    "images squeezed to a square": {"resize": lambda band, side: band.resize((side, side), _FILTERS.BILINEAR)},
    "images with a border that makes them square": {"resize": lambda band, side: ImageOps.pad(band, (side, side), 2)},
    "pieces of images that were not resized": {"resize": lambda band, side: band, "center_crop": False},
}
_TURNS = {
    "mirrored images, though no flip is declared": lambda x: x[..., ::-1],
    "images upside down": lambda x: x[:, ::-1],
    "images turned by 180 degrees": lambda x: x[:, ::-1, ::-1],
    "images turned by 90 degrees to the left": lambda x: np.rot90(x, 1, (1, 2)),
    "images turned by 90 degrees to the right": lambda x: np.rot90(x, -1, (1, 2)),
    "images with rows and columns exchanged": lambda x: x.transpose(0, 2, 1),
    "images whose colors and places are mixed up (reshaped where axes should be permuted)": lambda x: np.ascontiguousarray(
        x.transpose(1, 2, 0)
    ).reshape(x.shape),
}
_STATISTICS = {
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CLIP": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "CIFAR-10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR-10 (0.2023)": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "MNIST": ((0.1307,), (0.3081,)),
}


def _standardized(mean, deviation):
    mean, deviation = (np.array(part)[:, None] for part in (mean, deviation))
    return lambda x: (((x.reshape(len(x), -1) + 1) / 2 - mean) / deviation).reshape(x.shape)


def _mixed(*rows):
    return lambda x: np.tensordot(np.array(rows, np.float64), x, 1)


# Functions of one pixel's colors in [-1, 1].
_COLORS = {
    "values in [0, 1], not in [-1, 1]": lambda x: (x + 1) / 2,
    "values in [0, 255], not in [-1, 1]": lambda x: (x + 1) * 127.5,
    "values in [0, 65535], not in [-1, 1]": lambda x: (x + 1) * 32767.5,
    "values in [-0.5, 0.5], not in [-1, 1]": lambda x: x / 2,
    "values that are scaled twice (to [-1, 1] as if they were still in [0, 255])": lambda x: x / 127.5 - 1,
    "values that are scaled twice (to [-1, 1] as if they were still in [0, 1])": lambda x: 2 * x - 1,
    "values that are divided by 255 twice": lambda x: (x + 1) / 510,
    "values that are divided by 255 twice, then shifted to -1": lambda x: (x + 1) / 255 - 1,
    "values that are divided by 255 once more": lambda x: x / 255,
    "values in [0, 255] that are taken for [0, 1]": lambda x: (x + 1) * 255 - 1,
    "values that are divided by 128, not by 127.5": lambda x: (x + 1) * (127.5 / 128) - 1,
    "16-bit values that are scaled as if they had 8 bits": lambda x: (x + 1) * 257 - 1,
    "8-bit values that are scaled as if they had 16 bits": lambda x: (x + 1) / 257 - 1,
    "inverted colors (negatives)": lambda x: -x,
    "values cut off below 0": lambda x: x.clip(0),
    "values rounded to whole numbers": np.rint,
    "values cut down to whole numbers": np.trunc,
    "black and white (values rounded in [0, 1])": lambda x: 2 * np.rint((x + 1) / 2) - 1,
}
_RGB = {
    "red and blue exchanged (BGR)": _mixed((0, 0, 1), (0, 1, 0), (1, 0, 0)),
    "red and green exchanged": _mixed((0, 1, 0), (1, 0, 0), (0, 0, 1)),
    "green and blue exchanged": _mixed((1, 0, 0), (0, 0, 1), (0, 1, 0)),
    "channels in the order green, blue, red": _mixed((0, 1, 0), (0, 0, 1), (1, 0, 0)),
    "channels in the order blue, red, green": _mixed((0, 0, 1), (1, 0, 0), (0, 1, 0)),
    "gray images in place of colors": _mixed(LUMA, LUMA, LUMA),
    "gray images (mean of the channels) in place of colors": _mixed(*[(1 / 3, 1 / 3, 1 / 3)] * 3),
}
for _place, _name in enumerate(("red", "green", "blue")):
    _only = np.arange(3) == _place
    _RGB[f"the {_name} channel three times"] = _mixed(*[_only] * 3)
    for _value, _word in ((-1, "black"), (0, "0")):
        _RGB[f"images whose {_name} channel is all {_word}"] = lambda x, only=_only, value=_value: np.where(
            only.reshape(-1, *[1] * (x.ndim - 1)), value, x
        )


def _alternatives(seen: Seen, declared: DeclaredImages):
    """(what the network sees, planes, change of colors after the jitter)"""
    for name, reading in _READINGS.items():
        yield name, seen.file.planes(**reading), None
    for name, turn in _TURNS.items():
        yield name, turn(seen.planes), None
    colors: dict[str, Any] = _COLORS | (_RGB if declared.channels == 3 else {})
    colors |= {
        f"values scaled by the mean and the deviation of {name}": _standardized(*known)
        for name, known in _STATISTICS.items()
        if len(known[0]) == declared.channels
    }
    for name, change in colors.items():
        yield name, seen.planes, change
        if declared.color_jitter:
            yield name, change(seen.planes), None


def _fits(match: Match, seen: Seen, gain: float) -> bool:
    """Whether another reading explains what the declared one does not. What lies within an old cache's rounding is only
    called a fault where another reading fits exactly."""
    rounding = EXACT * max(1.0, float(np.abs(seen.shown).max()))
    loose = max(rounding, seen.tolerance * gain) if seen.match.error > seen.tolerance else rounding
    return match.error <= loose and match.error < seen.match.error / 4


def describe(misread: list[Seen], batch: list[Seen], declared: DeclaredImages) -> str:
    """What the network sees in place of the images `misread` of a batch; empty where they differ by rounding alone."""
    broken = [seen for seen in misread if not np.isfinite(seen.shown).all()]
    if broken:
        return f"values that are no finite numbers, in {len(broken)} images"
    errors: dict[str, list[float]] = {}
    worst = sorted(misread, key=lambda seen: -seen.planes.std() * (seen.match.error > seen.tolerance))[:_LOOKED_AT]
    for seen in worst:
        tried: dict[str, float] = {}
        for name, planes, change in _alternatives(seen, declared):
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
            best = abs(correlation[place]), shown, cut(seen.planes, int(top), int(left), shown.shape[-1])
    return best[1:]


def _pooled(seen: list[Seen]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [C, N] of all images: shown, and as they should be."""
    pairs = [[part.reshape(len(part), -1) for part in _pair(one)] for one in seen]
    shown, expected = (np.concatenate(parts, axis=1) for parts in zip(*pairs))
    return shown, expected


def _rms(values) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _close(y, predicted, x) -> bool:
    """Whether a fit is right up to a rounding of 8 bits, which a gain makes larger or smaller."""
    gain = min(100.0, y.std() / max(x.std(), 1e-6))
    return _rms(y - predicted) <= max(2 * LEVEL * gain, EXACT * np.abs(y).max()) and _rms(y - predicted) < 0.1 * y.std()


def _line(y, x) -> tuple[float, float]:
    """Gain and offset, found where nothing is clamped."""
    for free in ((y > y.min() + 1e-6) & (y < y.max() - 1e-6), np.ones(y.shape, bool)):
        if x[free].size and np.ptp(x[free]) > 1e-6:
            gain, offset = map(float, np.polyfit(x[free], y[free], 1))
            return gain, offset
    return 1.0, float(y.mean() - x.mean())


def _apply(line, x, y):
    return (line[0] * x + line[1]).clip(y.min(), y.max())


def _same(worst, batch, declared) -> str:
    values = [seen.shown.ravel() for seen in batch]
    if all(np.ptp(value) < EXACT for value in values):
        return f"images of a single value ({values[0][0]:.3g})"
    if len(values) > 1 and all(np.array_equal(value, values[0]) for value in values):
        return "the same image in all places of the batch"
    return ""


def _neighbor(worst, batch, declared) -> str:
    """Images of other rows. Shown beside the wrong file, an image is not one of those that fit."""
    steps = []
    for seen in worst:
        for other in batch:
            match = find(seen.shown, other.planes, declared, thorough=False) if other is not seen else Match(np.inf)
            if match.error <= max(other.tolerance, JITTER_TOLERANCE if match.jittered else 0):
                steps.append((other.number - seen.number) % len(batch))
                break
    if len(steps) < 0.5 * len(worst):
        return ""
    by = f": shifted by {min(steps[0], len(batch) - steps[0])} places" if len(set(steps)) == 1 else ""
    return f"images of other rows of the batch{by}"


def _gain(worst, batch, declared) -> str:
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


def _channel_gains(worst, batch, declared) -> str:
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


def _list(values) -> str:
    return ", ".join(f"{round(float(value), 6) + 0:.3g}" for value in values)


def _matrix(worst, batch, declared) -> str:
    y, x = _pooled(worst)
    design = np.concatenate([x, np.ones((1, x.shape[1]))])
    matrix = np.linalg.lstsq(design.T, y.T, rcond=None)[0].T
    if len(y) == 1 or not _close(y, matrix @ design, x):
        return ""
    rows = "; ".join(f"{name} = {_list(row[:3])} of red, green, blue" for name, row in zip(("red", "green", "blue"), matrix))
    return f"mixed colors: {rows}"


def _curve(worst, batch, declared) -> str:
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


def _own_gains(worst, batch, declared) -> str:
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


def _jitter(worst, batch, declared) -> str:
    anything = replace(declared, color_jitter=max(0.99, declared.color_jitter))
    if all(find(seen.shown, seen.planes, anything).error < LEVEL for seen in worst):
        return "a color jitter " + ("stronger than declared" if declared.color_jitter else "that is not declared")
    return ""


def _patch(worst, batch, declared) -> str:
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


def _shift(worst, batch, declared) -> str:
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


def _softened(worst, batch, declared) -> str:
    """The stored image after JPEG or a blur: the strength that leaves least, where it explains most of the difference."""

    def again(change):
        def applied(x):
            bands = [Image.fromarray(np.rint((band + 1) * 127.5).clip(0, 255).astype(np.uint8)) for band in x]
            image = change(bands[0] if len(bands) == 1 else Image.merge("RGB", bands))
            return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1) / 127.5 - 1

        return applied

    def jpeg(quality):
        def compress(image):
            image.save(file := io.BytesIO(), "JPEG", quality=quality)
            return Image.open(file)

        return again(compress)

    def blur(radius):
        return again(lambda image: image.filter(ImageFilter.GaussianBlur(radius)))

    changes = {f"images blurred by about {radius:g} pixels": blur(radius) for radius in (0.5, 1, 1.5, 2, 3, 5, 8)}
    changes |= {
        f"images compressed as JPEG of a quality of about {q}": jpeg(q) for q in (95, 90, 85, 75, 60, 50, 40, 30, 20, 10)
    }
    pairs = [_pair(seen) for seen in worst]
    left = {name: _rms([_rms(y - change(x)) for y, x in pairs]) for name, change in changes.items()}
    best = min(left, key=left.get)
    return best if left[best] < 0.5 * _rms([_rms(y - x) for y, x in pairs]) else ""


def _noise(worst, batch, declared) -> str:
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


def _figures(worst) -> str:
    pairs = [_pair(seen) for seen in worst]
    alike = np.mean([abs(float(compare(y, x)[1][0, 0])) for y, x in pairs])
    difference = _rms([_rms(y - x) for y, x in pairs])
    if alike < 0.5:
        return f"other images than those of the files (correlation {alike:.2f}): of other rows, or another part of them"
    gain, offset = _line(*(part.ravel() for part in _pooled(worst)))
    return (
        f"images that differ from the files by {difference:.2g} (correlation {alike:.3f}, gain {gain:.3g}, offset {offset:.3g})"
    )

"""Pixels that tell what was done to an image: channels, bars and a watermark at the same place, enlargement, compression."""

from collections.abc import Iterator
from functools import cache

import numpy as np
from PIL import Image

from utils.diagnostics.data_checks.sample import Sample, Seen, large

_NAMES = ("red", "green", "blue")


def channels(sample: Sample) -> Iterator[Seen]:
    """Channels without content, equal channels, gray images that are stored in three channels."""
    if sample.images.shape[-1] != 3 or sample.plain.all():
        return
    kept = np.flatnonzero(~sample.plain)
    images = sample.images[kept].reshape(len(kept), -1, 3).astype(np.int16)
    spread, lowest = np.ptp(images, 1), images.min(1)
    # Of a constant channel: 0 or 255, as no photograph has throughout, while another channel varies.
    dead = (spread <= 1) & (spread.max(1, keepdims=True) >= 12) & ((lowest == 0) | (lowest >= 254))
    equal = [np.abs(images[..., a] - images[..., b]).max(1) <= 2 for a, b in ((0, 1), (1, 2), (0, 2))]
    is_gray = equal[0] & equal[1]
    shares = dead.mean(0)
    worst = int(shares.argmax())
    # Strong colors leave a channel empty in a few per cent of the crops of photographs.
    if shares[worst] > 0.08:
        value = int(np.median(lowest[dead[:, worst], worst]))
        what = f"{_NAMES[worst]} is {value} throughout {shares[worst]:.0%} of the images"
        yield Seen("data-channels", "warning", what, sample.shown(kept[dead[:, worst]], f"without {_NAMES[worst]}"))
    for (a, b), same in zip(((0, 1), (1, 2), (0, 2)), equal):
        doubled = same & ~is_gray & ~dead[:, a] & ~dead[:, b]
        if doubled.mean() > 0.08:
            what = f"{_NAMES[a]} and {_NAMES[b]} are equal in {doubled.mean():.0%} of the images"
            yield Seen("data-channels", "warning", what, sample.shown(kept[doubled], f"{_NAMES[a]} equals {_NAMES[b]}"))
    if is_gray.mean() > 0.5:
        what = f"{is_gray.mean():.1%} of the images are gray, stored as color: --image_channels 1 is enough for gray alone"
        yield Seen("data-channels", "info", what, sample.shown(kept[is_gray], "gray"))


def bars(sample: Sample) -> Iterator[Seen]:
    """Bars of one color beside the content, equally thick in many images; images whose lower end is missing."""
    kept = np.flatnonzero(~sample.plain)
    if len(kept) < 20 or min(sample.images.shape[1:3]) < 12:
        return
    images = sample.images[kept].astype(np.int16)
    turned = images.transpose(0, 2, 1, 3)
    sides = {"top": images, "bottom": images[:, ::-1], "left": turned, "right": turned[:, ::-1]}
    thick, colors = (np.stack(part, 1) for part in zip(*(_strips(side) for side in sides.values())))
    clear = np.stack([_clear_edge(side, thick, n) for n, side in enumerate(sides.values())], 1)
    alone = (thick[:, (0, 2, 3)] == 0).all(1)  # of what lies on a plain background, other sides are of one color, too
    thick = np.where(clear, thick, 0)  # [N, 4]
    # One key for each combination of sides, thickness and color.
    keys = np.concatenate([thick, np.where(thick[..., None] > 0, colors // 12, 0).reshape(len(thick), -1)], 1)
    found, counts = np.unique(keys[(thick > 0).any(1)], axis=0, return_counts=True)
    share = counts.max() / len(kept) if len(counts) else 0.0
    key = found[counts.argmax()] if len(counts) else keys[0]
    # Of an icon with a margin all four sides end alike by chance, of a photograph hardly ever a single one.
    if share >= max(0.08, 0.04 * (key[:4] > 0).sum()) and len(counts) and counts.max() >= 8:
        members = (keys == key).all(1)
        where = ", ".join(f"{k} {name}" for k, name in zip(key[:4], sides) if k)
        what = f"{share:.0%} of the images have bars of equal thickness ({where}, in pixels)"
        yield Seen("data-bars", "warning", what, sample.shown(kept[members], "with bars"))
        return
    cut = (thick[:, 1] > 1) & alone
    found, counts = np.unique(colors[cut, 1] // 12, axis=0, return_counts=True)
    if len(counts) and counts.max() >= max(8, 0.015 * len(kept)):
        members = cut & (colors[:, 1] // 12 == found[counts.argmax()]).all(1)
        what = f"the lower part of {members.mean():.1%} of the images is filled with one color, the same in all of them"
        yield Seen("data-bars", "warning", what, sample.shown(kept[members], "with bars"))


def _strips(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows [N] at the top that are of one color, that color [N, C]) of images [N, H, W, C]."""
    first = images[:, :1, :1]
    alike = (np.abs(images - first) <= 4).all((2, 3))  # [N, H]
    rows = np.where(alike.all(1), 0, alike.argmin(1))
    return np.where(rows <= 0.75 * images.shape[1], rows, 0), first[:, 0, 0]


def _clear_edge(side: np.ndarray, thick: np.ndarray, number: int) -> np.ndarray:
    """bool [N]: whether the content begins across the whole width where the strip ends; natural edges are not that straight."""
    rows = thick[:, number]
    beginning = side[np.arange(len(side)), np.minimum(rows, side.shape[1] - 1)]  # [N, W, C]
    differs = (np.abs(beginning - side[:, 0]) > 12).any(-1)
    low, high = (2, 3) if number < 2 else (0, 1)  # the strips that end the row
    place = np.arange(side.shape[2])
    inner = (place >= thick[:, low, None]) & (place < side.shape[2] - thick[:, high, None])
    return (rows > 0) & ((differs & inner).sum(1) >= 0.8 * inner.sum(1)) & (inner.sum(1) >= 0.6 * side.shape[2])


def sharpness_of_mean(images: np.ndarray) -> np.ndarray:
    """Returns [H - 2, W - 2] in [0, 1]: how much of each pixel's contrast to its neighbors is common to all images.

    About 1 / sqrt(N) where images differ, even where they show the same thing, as no two photographs put it on the same
    pixels; near 1 where a pattern was drawn over them.
    """
    x = images.astype(np.float32)
    middle = x[:, 1:-1, 1:-1]
    contrast = middle - (x[:, :-2, 1:-1] + x[:, 2:, 1:-1] + x[:, 1:-1, :-2] + x[:, 1:-1, 2:]) / 4
    contrast = np.clip(contrast, -24, 24)  # a few images of strong texture count no more than the rest
    mean = contrast.mean(0)
    # What all pixels have in common is none of a pattern: the cut above gives stars on black such an offset.
    shared = np.minimum(np.abs(mean), np.abs(mean - np.median(mean, (0, 1))))
    return (shared / np.sqrt((contrast**2).mean(0) + 0.25)).max(-1)  # 0.25: rounding


def pattern(sample: Sample) -> Iterator[Seen]:
    """A pattern that all images, or many, have at the same pixels."""
    images = sample.images[~sample.plain]
    if len(images) < 50 or min(images.shape[1:3]) < 12:
        return
    common = sharpness_of_mean(images)
    marked = common > 0.5
    # What is drawn over images stands alone: its pixels are near 1, and the others far below, as images differ there. Things
    # that all lie in the same place, such as letters or bones, give all values between, and leave pixels that hardly vary.
    between = ((common > 0.2) & (common < 0.4)).mean()
    pixels = images[:, 1:-1, 1:-1][:, ~_widened(marked)].reshape(len(images), -1).astype(np.float32)
    variety = np.sqrt(pixels.var(0).mean() / max(pixels.var(), 1e-6)) if pixels.size else 0.0
    if marked.sum() < 4 or common.max() < max(0.55, 6 / np.sqrt(len(images))):
        return
    severity = "warning" if between < 0.02 or (between < 0.25 and variety > 0.85) else "info"
    if severity == "info" and common.max() < 0.9:
        return
    rows, columns = np.flatnonzero(marked.any(1)) + 1, np.flatnonzero(marked.any(0)) + 1
    what = f"{marked.mean():.1%} of the pixels have a contrast that images share, up to {common.max():.0%} of it, "
    what += f"in rows {rows[0]} to {rows[-1]} and columns {columns[0]} to {columns[-1]}"
    yield Seen("data-pattern", severity, what, _mean_and_spread(images, common))


def _widened(marked: np.ndarray) -> np.ndarray:
    return np.asarray(np.lib.stride_tricks.sliding_window_view(np.pad(marked, 1), (3, 3)).any((2, 3)))


def _mean_and_spread(images: np.ndarray, common: np.ndarray) -> Image.Image:
    """The mean of the images, their standard deviation by pixel, and what they share."""
    spread = images.std(0)
    shared = np.repeat(np.pad(common, 1)[..., None], images.shape[-1], 2)
    captions = ("mean of all images", "how much each pixel varies", "what images share")
    return large(np.stack([images.mean(0), spread / max(spread.max(), 1) * 255, shared * 255]), captions)


def repeated_pixels(sample: Sample) -> Iterator[Seen]:
    """Images that were enlarged by repeating pixels. Pixel art is spared: its few colors come again and again."""
    factors = np.array([_repetition(image) for image in sample.images])
    repeated = factors > 0
    share = repeated.mean()
    if repeated.sum() >= 8 and share >= 0.02:
        factor = np.median(factors[repeated])
        severity = "warning" if share > 0.15 or factor > 2.2 else "info"  # a few of them doubled are part of some scans
        what = f"{share:.1%} of the images repeat their rows and columns, each of them {factor:.1f} times on average"
        yield Seen("data-resampled", severity, what, sample.shown(np.flatnonzero(repeated), "rows and columns repeated"))


def _repetition(image: np.ndarray) -> float:
    """How many times each row stands there where rows and columns are repeated, otherwise 0."""
    rows, columns = (_runs((np.diff(image.astype(np.int16), axis=axis) != 0).any((1 - axis, 2))) for axis in (0, 1))
    if rows is None or columns is None:
        return 0.0
    blocks = image[rows][:, columns].reshape(-1, image.shape[-1])
    various = len(np.unique(blocks, axis=0)) >= 0.3 * min(len(blocks), 256 if image.shape[-1] == 1 else len(blocks))
    return float(np.diff(rows).mean()) if various else 0.0


def _runs(new: np.ndarray) -> np.ndarray | None:
    """The first of each run of equal rows; None where the runs are not equally long, as repeated pixels make them."""
    first = np.flatnonzero(new) + 1
    lengths = np.diff(first)
    return first if len(first) > 4 and lengths.mean() >= 1.2 and np.ptp(lengths) <= 1 else None


@cache
def _enlargement(small: int, side: int, filter: Image.Resampling, shift: float) -> np.ndarray:
    """I - P [side, side]: what is left of a row when all that `small` values enlarged by `filter` can give is taken away."""
    source = Image.fromarray(np.eye(small + 1 if shift else small, dtype=np.float32))  # each row one value set to 1
    box = (shift, 0.0, shift + small, float(source.height))
    rows = np.asarray(source.resize((side, source.height), filter, box), np.float64)
    return np.eye(side) - np.linalg.pinv(rows) @ rows


def smooth_enlargement(sample: Sample) -> Iterator[Seen]:
    """Images that a usual filter enlarged on disk: they are all but exactly what it makes of fewer pixels, on its grid alone.

    That soft images are not: moved by half a pixel, the grid fits them as well.
    """
    height, width = sample.images.shape[1:3]
    if min(height, width) < 16 or (sample.sizes is not None and (sample.sizes < (height, width)).any(1).mean() > 0.5):
        return  # the loading enlarges them, which data-enlarged tells
    rows = sample.gray.reshape(-1, width).astype(np.float64)[:: max(1, len(sample.gray) * height // 60_000)]
    rows = rows - rows.mean(1, keepdims=True)
    moments = rows.T @ rows / rows.size
    if width <= 64:
        smaller = range(max(6, width // 8), int(0.9 * width) + 1)
    else:
        smaller = sorted({round(width / factor) for factor in (1.125, 1.25, 4 / 3, 1.5, 1.6, 2, 2.5, 3, 4, 6, 8)})
    best = (0.0, 0, "", 0.0, 0.0)
    for filter in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS):
        for small in smaller:
            left, moved = (
                np.sqrt(max(0, np.einsum("ij,jk,ik->", rest, moments, rest)))
                for rest in (_enlargement(small, width, filter, 0.0), _enlargement(small, width, filter, 0.5))
            )
            best = max(best, (moved / max(left, 0.05), small, filter.name, left, moved))
    ratio, small, name, left, moved = best
    if ratio > 2.5 and left < 0.8 and moved > 0.6:
        what = f"they are, but for {left:.2f} of 255 levels, what {name.lower()} enlargement makes of {small} pixels a row"
        yield Seen("data-resampled", "warning", what, sample.shown(np.flatnonzero(~sample.plain), "enlarged on disk"))


def blocks(sample: Sample) -> Iterator[Seen]:
    """The 8x8 blocks of strong JPEG compression."""
    height, width = sample.images.shape[1:3]
    if min(height, width) < 24:
        return
    strong = []  # bool [N] for each place of the grid: whether steps in brightness are largest on it, in both directions
    for phase in range(8):
        medians = []
        for axis in (1, 2):
            steps = np.abs(np.diff(sample.gray, axis=axis)).mean(3 - axis)  # [N, side - 1]
            edges = np.arange(phase if phase > 1 else phase + 8, steps.shape[1] - 2, 8)
            beside = sum(steps[:, edges + k] for k in (-2, -1, 1, 2)) / 4
            ratios = np.sort(steps[:, edges] / (beside + 0.5), 1)
            medians.append(ratios[:, (len(edges) - 1) // 2])  # the lower one of two
        strong.append(np.minimum(*medians) > 1.4)
    shares = np.array([part.mean() for part in strong])
    place = int(shares.argmax())
    excess = shares[place] - np.sort(shares)[-2]  # the other places say how often chance and content give that
    if excess > 0.1:
        what = f"steps in brightness lie on a grid of 8 pixels in {excess:.0%} of the images"
        severity = "warning" if excess > 0.15 else "info"
        yield Seen("data-compressed", severity, what, sample.shown(np.flatnonzero(strong[place]), "in blocks of 8 pixels"))

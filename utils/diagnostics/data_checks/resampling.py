"""What became of the pixels before: enlargement and compression."""

from collections.abc import Iterator
from functools import cache

import numpy as np
from PIL import Image

from utils.diagnostics.data_checks.sample import Sample, Seen


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

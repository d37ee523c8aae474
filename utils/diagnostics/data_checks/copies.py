"""Copies that were changed: mirrored, brighter, moved or cut; in the training images, and of them among those held out."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import interpolate

from utils.diagnostics.data_checks.sample import NEARLY_PLAIN, Sample, Seen, color_codes, compared, gray

QUERIES, REFERENCES = 256, 2048
SIDE = 12  # pixels of the descriptor of an image's part
SCALES, PLACES = (0.64, 0.72, 0.8, 0.9, 1.0), (0, 0.25, 0.5, 0.75, 1)  # of the part, and where it lies
FAR = 128  # among so many neighbors the distances jump from copies to images that are none; more copies hide each other
# Two images agree when the parts in common differ by at most this share of their own contrast; a copy that was cut at half a
# pixel differs by 0.1 to 0.3, the nearest of other photographs by 0.5 and more.
COPY_DISTANCE = 0.4
COLORS = 48  # an image of fewer is a drawing, of which many show the same shape


def copies(sample: Sample) -> Iterator[Seen]:
    """Sets that were made larger by changed copies."""
    usable = np.flatnonzero(~sample.plain)
    if min(sample.images.shape[1:3]) < 16 or len(usable) < 40:
        return
    asked = usable[:: max(1, len(usable) // QUERIES)][:QUERIES]
    found, place = _copies(sample.images[asked], sample.images[usable[:REFERENCES]], np.searchsorted(usable, asked))
    if found.mean() > 0.1:
        severity = "warning" if found.mean() > 0.2 else "info"
        what = f"{found.mean():.0%} of the images are another one that was mirrored, moved, cut or made brighter"
        yield Seen("data-copies", severity, what, _pairs(sample.images[asked[found]], sample.images[usable[place[found]]]))


def leak(sample: Sample) -> Iterator[Seen]:
    """Held-out images that are copies of training images."""
    held, usable = sample.held_out, np.flatnonzero(~sample.plain)
    if len(held) < 10 or len(usable) < 40:
        return
    held = held[:QUERIES]
    flat = {image.tobytes(): number for number, image in enumerate(sample.images)}
    exact = np.array([flat.get(image.tobytes(), -1) for image in held])
    exact[gray(held).std((1, 2)) < NEARLY_PLAIN] = -1  # of nearly blank images many are equal
    found, place = exact >= 0, exact
    if min(held.shape[1:3]) >= 16:
        changed, nearest = _copies(held, sample.images[usable[:REFERENCES]])
        found, place = found | changed, np.where(exact >= 0, exact, usable[nearest])
    if found.sum() >= 3 and found.mean() > 0.05:
        severity = "warning" if found.mean() > 0.2 or (exact >= 0).mean() > 0.05 else "info"
        what = f"{found.mean():.0%} of the held-out images are copies of training images"
        what += f" ({(exact >= 0).mean():.0%} exact ones), in the part that was looked at" if len(usable) > 2000 else ""
        yield Seen("data-leak", severity, what, _pairs(held[found], sample.images[place[found]], "held out", "in the training"))


def _copies(images: np.ndarray, references: np.ndarray, own: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(bool [N] whether an image has a copy among the references, int [N] which); `own` are the places of the images."""
    found, place = moved(images, references, own)
    queries, others = np.flatnonzero(_rich(images)), np.flatnonzero(_rich(references))
    if len(queries) and len(others) >= 40 and len(queries) >= 0.3 * len(images):
        places = None
        if own is not None:
            places = np.where(np.isin(own[queries], others), np.searchsorted(others, own[queries]), len(others))
        is_near, nearest = near(images[queries], references[others], places)
        is_near &= ~found[queries]
        found[queries[is_near]], place[queries[is_near]] = True, others[nearest[is_near]]
    return found, place


def moved(images: np.ndarray, references: np.ndarray, own: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """As `_copies`, of copies that were mirrored and moved alone: the middle is found again, the same in each pixel.

    Of drawings and of things on a plain background, too, of which many are alike without being copies.
    """
    height, width = images.shape[1:3]
    size, top, left = (round(0.7 * height), round(0.7 * width)), round(0.15 * height), round(0.15 * width)
    known = _hashes(references, size).reshape(len(references), -1)
    owner = np.repeat(np.arange(len(references)), known.shape[1])
    order = np.argsort(known, axis=None, kind="stable")
    known, owner = known.reshape(-1)[order], owner[order]
    found, place = np.zeros(len(images), bool), np.zeros(len(images), np.int64)
    itself = np.full(len(images), -1) if own is None else own
    for turned in (images, images[:, :, ::-1]):
        middle = turned[:, top : top + size[0], left : left + size[1]]
        asked = _hashes(middle, size)[:, 0, 0]
        low, high = np.searchsorted(known, asked), np.searchsorted(known, asked, "right")
        first, last = owner[np.minimum(low, len(owner) - 1)], owner[high - 1]
        other = np.where(first != itself, first, last)
        hit = (high > low) & (other != itself) & _eventful(middle) & (high - low < 0.1 * len(references))
        place[hit & ~found] = other[hit & ~found]
        found |= hit
    return found, place


def _eventful(parts: np.ndarray) -> np.ndarray:
    """bool [N]: parts with so many edges that the same ones twice are no accident, as in a plain sky or a single line."""
    codes = color_codes(parts)
    corners = (codes[:, 1:, 1:] != codes[:, :-1, 1:]) & (codes[:, 1:, 1:] != codes[:, 1:, :-1])
    return corners.mean((1, 2)) > 0.02


def _hashes(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint64 [N, H - h + 1, W - w + 1] of each window of `size` h, w: sums of colors times powers, modulo 2^64."""
    height, width = images.shape[1:3]
    values = (color_codes(images) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values ^= values >> np.uint64(29)
    (rows, up), (columns, back) = _powers(0xBF58476D1CE4E5B9, height), _powers(0x94D049BB133111EB, width)
    sums = np.zeros((len(images), height + 1, width + 1), np.uint64)
    sums[:, 1:, 1:] = (values * rows[:, None] * columns).cumsum(1, dtype=np.uint64).cumsum(2, dtype=np.uint64)
    (h, w), last = size, (height - size[0] + 1, width - size[1] + 1)
    windows = sums[:, h:, w:] - sums[:, : last[0], w:] - sums[:, h:, : last[1]] + sums[:, : last[0], : last[1]]
    return windows * up[: last[0], None] * back[: last[1]]  # each window's powers count from its own corner


def _powers(base: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """uint64 [count] twice: the powers of an odd number, and what takes each of them back to 1."""
    up, back = (np.array([pow(base, sign * k, 2**64) for k in range(count)], np.uint64) for sign in (1, -1))
    return up, back


def _rich(images: np.ndarray) -> np.ndarray:
    """bool [N]: which of the images have many colors and no plain background: there the same shape twice is no accident."""
    codes = np.sort(color_codes(images).reshape(len(images), -1), 1)
    plain = (codes == np.median(codes, 1, keepdims=True)).mean(1) > 0.4
    return ~plain & ((np.diff(codes, axis=1) > 0).sum(1) >= COLORS - 1)


def _pairs(left: np.ndarray, right: np.ndarray, first: str = "images", second: str = "their copies"):
    return compared(left[:12], right[:12], (first, second))


def near(images: np.ndarray, references: np.ndarray, own: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """As `_copies`, of images whose middle some part of another image shows, mirrored or not.

    A copy is near, and some neighbor up to number `FAR` is far farther: shapes that have little to tell them apart, such as
    letters, are near to all of their kind.
    """
    middles, describable = _descriptors(_cut(references, 0.8, 0.1, 0.1))
    best, usable = torch.full((len(images), len(middles)), -1.0), torch.ones(len(images), dtype=torch.bool)
    for scale in SCALES:
        for top, left in sorted({(a * (1 - scale), b * (1 - scale)) for a in PLACES for b in PLACES}):
            part = _cut(images, scale, top, left)
            for turned in (part, part.flip(-1)):
                described, has = _descriptors(turned)
                usable &= has
                best = torch.maximum(best, described @ middles.T)
    best[:, ~describable] = -1.0
    if own is not None:
        inside = np.flatnonzero(own < len(middles))  # of a large set some images are not among the references
        best[torch.from_numpy(inside), torch.from_numpy(own[inside])] = -1.0
    top = best.topk(min(FAR, best.shape[1]), 1)
    distances = (2 - 2 * top.values.clamp(-1, 1)).sqrt()
    jump = (distances[:, :-1] / distances[:, 1:].clamp(min=1e-6) < 0.6) & (distances[:, :-1] < COPY_DISTANCE)
    return (jump.any(1) & usable).numpy(), top.indices[:, 0].numpy()


def _cut(images: np.ndarray, scale: float, top: float, left: float) -> torch.Tensor:
    """Gray parts [N, 1, SIDE, SIDE] of `scale` of the side, at shares of it."""
    height, width = images.shape[1:3]
    size = (max(4, round(scale * height)), max(4, round(scale * width)))
    y, x = min(round(top * height), height - size[0]), min(round(left * width), width - size[1])
    part = torch.from_numpy(gray(images[:, y : y + size[0], x : x + size[1]]))[:, None]
    return interpolate(part, (SIDE, SIDE), mode="bilinear", antialias=True)


def _descriptors(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(unit vectors [N, SIDE^2] without brightness, contrast and gradient, whether there is something left to compare)."""
    line = torch.linspace(-1, 1, SIDE)
    basis = torch.stack([torch.ones(SIDE, SIDE), line[:, None].expand(-1, SIDE), line.expand(SIDE, -1)]).flatten(1)
    basis = torch.linalg.qr(basis.T)[0]
    flat = parts.flatten(1)
    left = flat - (flat @ basis) @ basis.T
    norm = left.norm(dim=1, keepdim=True)
    return left / norm.clamp(min=1e-6), norm[:, 0] > 3 * SIDE  # 3 levels in root mean square

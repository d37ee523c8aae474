"""Copies that were changed: mirrored, brighter, moved or cut; in the training images, and of them among those held out."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import interpolate

from utils.diagnostics.data_checks.sample import Sample, Seen, gray, picture

QUERIES, REFERENCES = 256, 2048
SIDE = 12  # pixels of the descriptor of an image's part
SCALES, PLACES = (0.64, 0.72, 0.8, 0.9, 1.0), (0, 0.25, 0.5, 0.75, 1)  # of the part, and where it lies
FAR = 32  # the neighbor whose distance says how far images are that are no copies
# Two images agree when the parts in common differ by at most this share of their own contrast; a copy that was cut at half a
# pixel differs by 0.1 to 0.3, the nearest of other photographs by 0.5 and more.
COPY_DISTANCE = 0.4
COLORS = 48  # an image of fewer is a drawing, of which many show the same shape


def copies(sample: Sample) -> Iterator[Seen]:
    """Sets that were made larger by changed copies."""
    if min(sample.images.shape[1:3]) < 16:
        return
    usable = np.flatnonzero(_rich(sample.images))
    if len(usable) < 40 or len(usable) < 0.3 * len(sample.images):
        return
    asked = usable[:: max(1, len(usable) // QUERIES)][:QUERIES]
    references = usable[:REFERENCES]
    near = Nearest(sample.images[references])
    found, place = near.copies(sample.images[asked], np.searchsorted(references, asked))
    if found.mean() > 0.1:
        severity = "warning" if found.mean() > 0.2 else "info"
        what = f"{found.mean():.0%} of the images are another one that was mirrored, moved, cut or made brighter"
        pairs = (sample.images[asked[found]], sample.images[references[place[found]]])
        yield Seen("data-copies", severity, what, _pairs(*pairs))


def leak(sample: Sample) -> Iterator[Seen]:
    """Held-out images that are copies of training images."""
    held, usable = sample.held_out, np.flatnonzero(~sample.plain)
    if len(held) < 10 or len(usable) < 40:
        return
    held = held[:QUERIES]
    flat = {image.tobytes(): number for number, image in enumerate(sample.images)}
    exact = np.array([flat.get(image.tobytes(), -1) for image in held])
    exact[held.reshape(len(held), -1).min(1) == held.reshape(len(held), -1).max(1)] = -1  # blank images are no copies
    found, place = exact >= 0, exact
    if min(held.shape[1:3]) >= 16 and _rich(held).mean() > 0.3:
        changed, nearest = Nearest(sample.images[usable[:REFERENCES]]).copies(held)
        found, place = found | (changed & _rich(held)), np.where(exact >= 0, exact, usable[nearest])
    if found.sum() >= 3 and found.mean() > 0.05:
        severity = "warning" if found.mean() > 0.2 or (exact >= 0).mean() > 0.05 else "info"
        what = f"{found.mean():.0%} of the held-out images are copies of training images"
        what += f" ({(exact >= 0).mean():.0%} exact ones), in the part that was looked at" if len(usable) > 2000 else ""
        yield Seen("data-leak", severity, what, _pairs(held[found], sample.images[place[found]]))


def _rich(images: np.ndarray) -> np.ndarray:
    """bool [N]: which of the images have many colors and no plain background: there the same shape twice is no accident."""
    weights = np.array((1, 256, 65536))[: images.shape[-1]]
    codes = np.sort((images.reshape(len(images), -1, images.shape[-1]) * weights).sum(-1), 1)
    plain = (codes == np.median(codes, 1, keepdims=True)).mean(1) > 0.4
    return ~plain & ((np.diff(codes, axis=1) > 0).sum(1) >= COLORS - 1)


def _pairs(left: np.ndarray, right: np.ndarray):
    both = np.stack([left[:12], right[:12]], 1)
    return picture(both.reshape(-1, *both.shape[2:]), 6)


class Nearest:
    """Looks for images whose middle some part of another image shows, mirrored or not."""

    def __init__(self, references: np.ndarray):
        self._middles, self._usable = _descriptors(_cut(references, 0.8, 0.1, 0.1))

    def copies(self, images: np.ndarray, own: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(bool [N] whether an image has a copy, int [N] which reference is nearest); `own` are the places of the images.

        A copy is near, and far nearer than the neighbor number `FAR`: shapes that have little to tell them apart, such as
        letters, are near to all of their kind.
        """
        best = torch.full((len(images), len(self._middles)), -1.0)
        usable = torch.ones(len(images), dtype=torch.bool)
        for scale in SCALES:
            room = 1 - scale
            for top, left in sorted({(a * room, b * room) for a in PLACES for b in PLACES}):
                parts = _cut(images, scale, top, left)
                for part in (parts, parts.flip(-1)):
                    described, has = _descriptors(part)
                    usable &= has
                    best = torch.maximum(best, described @ self._middles.T)
        best[:, ~self._usable] = -1.0
        if own is not None:
            inside = np.flatnonzero(own < len(self._middles))  # of a large set some images are not among the references
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

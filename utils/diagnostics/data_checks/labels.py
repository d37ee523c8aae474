"""Labels beside the images, and images beside their mirror images."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

from utils.diagnostics.data_checks.sample import Sample, Seen, compared

NEIGHBORS = 8
FLOOR = 0.025  # neighbors contradict this share of the labels of healthy sets, at most


def _thumbnails(images: np.ndarray) -> torch.Tensor:
    """float32 [N, D], of 16x16 pixels at most."""
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))).float()
    return adaptive_avg_pool2d(pixels, (min(pixels.shape[-2], 16), min(pixels.shape[-1], 16))).flatten(1)


def _squared_distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.square().sum(1, keepdim=True) - 2 * a @ b.T + b.square().sum(1)


def contradicted(sample: Sample) -> Iterator[Seen]:
    """Labels that nearly all of the nearest images contradict, where neighbors can tell the classes."""
    if sample.labels is None or len(sample.labels) < 200 or len(np.unique(sample.labels)) < 2:
        return
    kept = np.flatnonzero(~sample.plain & (sample.labels >= 0))[:3000]
    if len(kept) < 200:
        return
    labels = torch.from_numpy(sample.labels[kept])
    thumbnails = _thumbnails(sample.images[kept])
    distances = _squared_distances(thumbnails, thumbnails).fill_diagonal_(torch.inf)
    nearest = distances.topk(NEIGHBORS, 1, largest=False).indices
    near = labels[nearest]  # [N, NEIGHBORS]
    votes = torch.nn.functional.one_hot(near - labels.min()).sum(1) if labels.max() - labels.min() < 10_000 else None
    if votes is None:
        return
    most, winner = votes.max(1)
    purity = (most.float() / NEIGHBORS).mean()  # how much the neighbors agree with each other
    right = winner + labels.min() == labels
    # Of each class neighbors must know most: images of low contrast are near to those of all classes.
    known = [float(right[labels == label].float().mean()) for label in labels.unique() if (labels == label).sum() >= 5]
    wrong = (most >= 0.75 * NEIGHBORS) & ~right
    share = float(wrong.float().mean())
    if purity > 0.6 and known and np.quantile(known, 0.25) >= 0.5 and share > FLOOR:
        severity = "warning" if share > 1.4 * FLOOR else "info"
        what = f"75% of the nearest images contradict {share:.1%} of the labels; below {FLOOR:.1%} nothing can be said"
        chosen = np.flatnonzero(wrong.numpy())[:16]
        pair = (sample.images[kept[chosen]], sample.images[kept[nearest[chosen, 0].numpy()]])
        yield Seen("class-mislabeled", severity, what, compared(*pair, ("labels contradicted", "nearest images")))


def mirror(sample: Sample) -> Iterator[Seen]:
    """Whether mirrored images are unlike all images of the set, as text is."""
    kept = np.flatnonzero(~sample.plain)[:2000]
    if sample.random_flip is False or len(kept) < 100:
        return
    images = sample.images[kept]
    originals, mirrored = _thumbnails(images), _thumbnails(images[:, :, ::-1])
    # The fifth nearest, so that copies of an image do not stand for its kind.
    to_others = _squared_distances(originals, originals).fill_diagonal_(torch.inf).kthvalue(5, 1).values
    between = _squared_distances(mirrored, originals).fill_diagonal_(torch.inf).kthvalue(5, 1).values
    farther, nearer = _shares(to_others, between)
    of_what = "images"
    if not (farther > 0.5 and farther > 4 * nearer) and min(images.shape[1:3]) >= 16:
        to_parts, mirrored_to_parts = _distances_of_parts(sample.gray[kept])
        farther, nearer = _shares(to_parts, mirrored_to_parts)
        of_what = "small parts of the images"
        # In faces, bones and things lit from the left 53 to 63 % of the parts are farther, in lines of text 73 % and more.
        if float((mirrored_to_parts > to_parts).float().mean()) < 0.68:
            return
    if farther > (0.5 if of_what == "images" else 0.15) and farther > 4 * nearer:
        severity = "warning" if sample.random_flip else "info"
        what = f"{farther:.0%} of the {of_what} are farther from the others once they are mirrored, {nearer:.0%} nearer"
        chosen = images[(between > to_others).numpy()][:16]
        yield Seen("data-mirror", severity, what, compared(chosen, chosen[:, :, ::-1], ("as stored", "mirrored")))


def _shares(plain: torch.Tensor, mirrored: torch.Tensor) -> tuple[float, float]:
    """The shares of those that are clearly farther once they are mirrored, and clearly nearer."""
    return float((mirrored > 1.1 * plain).float().mean()), float((plain > 1.1 * mirrored).float().mean())


def _distances_of_parts(images: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances [N] of parts to the third nearest part of other images, as they are and mirrored: lines of text are unlike
    all others as a whole, and alike in their letters. `images`: float32 [N, H, W]."""
    rng, half, side = np.random.default_rng(0), len(images) // 2, 12 if min(images.shape[1:]) >= 24 else 8
    places = np.lib.stride_tricks.sliding_window_view(images, (side, side), (1, 2))

    def some(start: int, stop: int, count: int) -> torch.Tensor:
        n, y, x = (rng.integers(low, high, count) for low, high in ((start, stop), *((0, k) for k in places.shape[1:3])))
        return torch.from_numpy(places[n, y, x])

    def unit(parts: torch.Tensor) -> torch.Tensor:
        flat = parts.flatten(1) - parts.flatten(1).mean(1, keepdim=True)
        return flat / flat.norm(dim=1, keepdim=True).clamp(min=1)

    asked = some(half, len(images), 1500)
    spread = asked.flatten(1).std(1)
    asked = asked[spread >= spread.median()]
    known = unit(some(0, half, 20_000)).T
    both = [(unit(parts) @ known).topk(3, 1).values[:, 2] for parts in (asked, asked.flip(-1))]
    to_others, mirrored = ((2 - 2 * near).clamp(min=0).sqrt() for near in both)
    return to_others, mirrored

"""Labels beside the images, and images beside their mirror images."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

from utils.diagnostics.data_checks.sample import Sample, Seen

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
    kept = np.flatnonzero(~sample.plain)[:3000]
    labels = torch.from_numpy(sample.labels[kept])
    thumbnails = _thumbnails(sample.images[kept])
    distances = _squared_distances(thumbnails, thumbnails).fill_diagonal_(torch.inf)
    near = labels[distances.topk(NEIGHBORS, 1, largest=False).indices]  # [N, NEIGHBORS]
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
        what = f"nearly all of the nearest images contradict {share:.1%} of the labels; below {FLOOR:.1%} nothing can be said"
        yield Seen("class-mislabeled", severity, what, sample.grid(kept[wrong.numpy()]))


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
    farther = float((between > 1.1 * to_others).float().mean())
    nearer = float((to_others > 1.1 * between).float().mean())
    if farther > 0.5 and farther > 4 * nearer:
        severity = "warning" if sample.random_flip else "info"
        what = f"{farther:.0%} of the images are farther from the others once they are mirrored, {nearer:.0%} nearer"
        yield Seen("data-mirror", severity, what, sample.grid(kept[(between > 1.1 * to_others).numpy()]))

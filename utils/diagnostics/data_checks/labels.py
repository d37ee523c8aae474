"""Labels beside the images, and images beside their mirror images."""

from collections.abc import Iterator

import numpy as np
import torch

from utils.data.augmentation import averaged_down
from utils.diagnostics.data_checks.recognition import Contradictions, blended, contradictions, describe, held_out_scores
from utils.diagnostics.data_checks.sample import Sample, Seen, compared

MOST, LEAST = 2000, 8  # images that are asked about, and of a class
EXPECTED = 0.02  # of the labels: data sets that are used everywhere have 0.5 to 6 % of wrong ones (Northcutt et al. 2021)


def _thumbnails(images: np.ndarray) -> torch.Tensor:
    """float32 [N, D], of 16x16 pixels at most."""
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))).float()
    return averaged_down(pixels, 16).flatten(1)


def contradicted(sample: Sample) -> Iterator[Seen]:
    """Labels of another class than the one that a classifier, which has not seen the image, is sure of."""
    if sample.labels is None:
        return
    kept = np.flatnonzero(~sample.plain & (sample.labels >= 0))
    if len(kept) == 0 or min(sample.images.shape[1:3]) < 8:
        return
    kept = kept[np.linspace(0, len(kept) - 1, min(MOST, len(kept))).astype(int)]
    names, counts = np.unique(sample.labels[kept], return_counts=True)
    names = names[counts >= LEAST]
    kept = kept[np.isin(sample.labels[kept], names)]
    if len(kept) < 100 or len(names) < 2:
        return
    labels = np.searchsorted(names, sample.labels[kept])
    scores = held_out_scores(blended([describe(sample.images[kept])], 500), torch.from_numpy(labels))
    rows = np.arange(len(kept))
    others = scores.copy()
    others[rows, labels] = -np.inf
    rival = others.argmax(1)
    margins = scores[rows, labels] - others[rows, rival]
    found, where, part = contradictions(margins, len(names), EXPECTED), "", rows
    if not found.sure and len(names) > 2:
        found, pair, part = _of_two(scores, labels, rival)
        where = f" of the classes {names[pair[0]]} and {names[pair[1]]}"
    if not found.sure:
        return
    what = f"about {found.share:.0%} of the labels{where} are wrong, at least {found.least:.1%}, or these images look like "
    what += f"those of another class; below {EXPECTED:.0%} nothing is said"
    doubted = part[np.argsort(margins[part])][: max(1, int(found.share * len(part)))][:16]
    near = [part[(labels[part] == rival[i]) & (margins[part] > 0)] for i in doubted]
    shown = [of_class[np.argmax(margins[of_class])] if len(of_class) else i for i, of_class in zip(doubted, near)]
    captions = ("labels contradicted", "of the class they look like")
    picture = compared(sample.images[kept[doubted]], sample.images[kept[shown]], captions)
    yield Seen("class-mislabeled", "warning", what, picture)


def _of_two(scores: np.ndarray, labels: np.ndarray, rival: np.ndarray) -> tuple[Contradictions, tuple[int, int], np.ndarray]:
    """What the surest two classes contradict, which classes, and which images: two that are confused say little of all.

    Each class is asked about with the one that it is confused with most.
    """
    asked = {tuple(sorted((k, int(np.bincount(rival[labels == k]).argmax())))) for k in range(scores.shape[1])}
    found = []
    for a, b in sorted(asked):
        part = np.flatnonzero(np.isin(labels, (a, b)) & np.isin(scores.argmax(1), (a, b)))
        margins = (scores[part, a] - scores[part, b]) * np.where(labels[part] == a, 1, -1)
        if len(part):
            found.append((contradictions(margins, 2, EXPECTED, len(asked)), (a, b), part))
    return max(found, key=lambda one: (one[0].sure, one[0].evidence))


def mirror(sample: Sample) -> Iterator[Seen]:
    """Whether mirrored images are unlike all images of the set, as text is."""
    kept = np.flatnonzero(~sample.plain)[:2000]
    if sample.random_flip is False or len(kept) < 100:
        return
    images = sample.images[kept]
    originals, mirrored = _thumbnails(images), _thumbnails(images[:, :, ::-1])
    # The fifth nearest, so that copies of an image do not stand for its kind.
    to_others, between = (
        torch.cdist(asked, originals).fill_diagonal_(torch.inf).kthvalue(5, 1).values.square()
        for asked in (originals, mirrored)
    )
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

"""Tells kinds of images apart, and finds images that have the name of another kind than their own, or no mirror image.

scores = held_out_scores(blended([describe(images)]), kinds)    # of each image, by a classifier that has not seen it
found = contradictions(margins, kinds=10, expected=0.02)         # found.sure: more than the overlap of the kinds explains

Kinds that overlap give many doubtful predictions and few sure ones; wrong names give sure ones. This is the idea of confident
learning (Northcutt et al. 2021). What is a doubtful prediction, the same set says: see `contradictions`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from utils.data.augmentation import averaged_down
from utils.diagnostics.data_checks.sample import Sample, Seen, compared, gray

LARGEST = 48  # pixels: larger images are reduced before their content is described; their fine structure is not
_FILTERS, _CELLS, _SCALES = 10, 3, 3
# A finding needs this much evidence: a ratio of likelihoods of e^7, which chance gives with a probability of 1e-4 (Wilks 1938),
# or a probability below e^-7 = 1e-3 by Chernoff's inequality. Each of several questions about a set needs ln(questions) more.
EVIDENCE = 7.0


def describe(images: np.ndarray) -> list[torch.Tensor]:
    """Returns figures of uint8 images [N, H, W, C] as blocks float32 [N, D]: what is where, its texture, its fine structure."""
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))).float() / 127.5 - 1
    if max(pixels.shape[-2:]) > LARGEST:
        pixels = functional.interpolate(pixels, tuple(min(side, LARGEST) for side in pixels.shape[-2:]), mode="area")
    rng = np.random.default_rng(0)
    blocks = [functional.adaptive_avg_pool2d(pixels, (8, 8)).flatten(1), torch.from_numpy(fine_structure(images))]
    for _ in range(_SCALES):
        filters = torch.from_numpy(rng.standard_normal((_FILTERS, pixels.shape[1], 3, 3), np.float32))
        filters = filters - filters.mean((2, 3), keepdim=True)
        filters /= filters.flatten(1).norm(dim=1)[:, None, None, None]
        if min(pixels.shape[-2:]) >= 3:
            seen = functional.conv2d(pixels, filters).abs_()
            blocks.append(functional.adaptive_avg_pool2d(seen, (_CELLS, _CELLS)).flatten(1).sqrt_())
        if min(pixels.shape[-2:]) >= 4:
            pixels = functional.avg_pool2d(pixels, 2)
    return blocks


def fine_structure(images: np.ndarray) -> np.ndarray:
    """Returns float32 [N, D]: levels, colors, and of differences of three orders the mean, the extremes and their grids.

    Enlarging leaves differences that depend on the place modulo 2, JPEG on that modulo 8, torn files one line that is unlike
    all others, wrong bits single pixels. All are logarithms or shares, which spread about evenly in one kind of images.
    """
    light = gray(images)
    count = len(light)
    levels = np.sort(light.reshape(count, -1), 1)
    levels = levels[:, [int(q * (levels.shape[1] - 1)) for q in (0, 0.02, 0.1, 0.5, 0.9, 0.98, 1)]] / 255
    found = [2 * levels, 0.3 * np.log(np.diff(levels, axis=1) + 0.01)]
    for axis in (1, 2):
        steps = light
        for order in (1, 2, 3):
            steps = np.diff(steps, axis=axis)
            sizes = np.abs(steps)
            lines = sizes.mean(3 - axis)  # [N, lines]
            mean = lines.mean(1, keepdims=True)
            found += [0.5 * np.log(mean + 0.3), _on_grid(lines, 2)]
            found += [_on_grid(lines, 8)] if order == 1 and lines.shape[1] >= 15 else []
            found.append(0.5 * np.log((lines.max(1, keepdims=True) + 0.5) / (np.median(lines, 1, keepdims=True) + 0.5)))
            found.append(0.5 * np.log((sizes.max((1, 2))[:, None] + 1) / (mean + 1)))
    inner, above, below = light[:, 1:-1, 1:-1], light[:, :-2, 1:-1], light[:, 2:, 1:-1]
    left, right = light[:, 1:-1, :-2], light[:, 1:-1, 2:]
    # How far a pixel lies beyond all of its neighbors.
    high = np.maximum(np.maximum(above, below), np.maximum(left, right))
    low = np.minimum(np.minimum(above, below), np.minimum(left, right))
    alone = np.maximum(np.maximum(inner - high, low - inner), 0).reshape(count, -1)
    found.append(0.4 * np.log(np.stack([alone.mean(1), np.sqrt((alone**2).mean(1)), alone.max(1)], 1) + 0.5))
    if images.shape[-1] == 3:
        colors = images.reshape(count, -1, 3).mean(1, dtype=np.float32) / 255
        strength = np.ptp(images.reshape(count, -1, 3), 2).mean(1, dtype=np.float32)
        others = np.roll(colors, -1, 1)
        found += [2 * colors, 3 * (colors - others) / (colors + others + 0.1), 0.4 * np.log(strength + 2)[:, None]]
    return np.concatenate(found, 1).astype(np.float32)


def _on_grid(lines: np.ndarray, period: int) -> np.ndarray:
    """[N, period]: logarithms of the means at each place modulo `period` over that of all."""
    whole = lines[:, : lines.shape[1] // period * period].reshape(len(lines), -1, period).mean(1) + 0.3
    return np.log(whole / whole.mean(1, keepdims=True))


def blended(parts: list[list[torch.Tensor]], width: int) -> torch.Tensor:
    """Returns random ReLU features [N, width + 1] of the descriptions of parts, one below the other; blocks count the same."""
    blocks = [torch.cat(same) for same in zip(*parts)]
    centered = [block - block.mean(0) for block in blocks]
    joined = torch.cat([block / block.square().sum(1).mean().sqrt().clamp(min=1e-6) for block in centered], 1)
    rng = np.random.default_rng(1)
    weights, offsets = (torch.from_numpy(rng.standard_normal(s, np.float32)) for s in ((joined.shape[1], width), (width,)))
    hidden = (joined @ weights * (1.5 / len(blocks) ** 0.5) + 0.7 * offsets).relu_()
    return torch.cat([hidden - hidden.mean(0), torch.ones(len(hidden), 1)], 1)


def held_out_scores(features: torch.Tensor, kinds: torch.Tensor, pairs: bool = False) -> np.ndarray:
    """Returns float64 [N, K]: how much each image is of each kind, told by all other images.

    Ridge regression, whose predictions without an image have a closed form; they also choose how much it is regularized. All
    kinds weigh the same, so that a kind is preferred for what images show, and not for being frequent.

    Args:
        features: float32 [N, D].
        kinds: int64 [N], in [0, K).
        pairs: image i and image i + N / 2 are one, and are left out together.
    """
    y = functional.one_hot(kinds).double()
    weights = (1 / y.sum(0))[kinds].sqrt()[:, None]
    x, y = features.double() * weights, (y - 1 / y.shape[1]) * weights
    strengths, axes = torch.linalg.eigh(x.T @ x)
    strengths, turned = strengths.clamp(min=0), x @ axes
    target = turned.T @ y
    best, scores = np.inf, y
    for ridge in strengths.mean() * 10.0 ** torch.arange(-3, 2):
        left = y - turned @ (target / (strengths + ridge)[:, None])
        scaled = turned / (strengths + ridge).sqrt()
        own = scaled.square().sum(1)
        if pairs:
            (a, b), (first, second) = own.chunk(2), left.chunk(2)
            common = (scaled[: len(a)] * scaled[len(a) :]).sum(1)
            determinant = ((1 - a) * (1 - b) - common**2)[:, None]
            left = torch.cat(
                [
                    ((1 - b)[:, None] * first + common[:, None] * second) / determinant,
                    ((1 - a)[:, None] * second + common[:, None] * first) / determinant,
                ]
            )
        else:
            left = left / (1 - own)[:, None]
        if (error := float(left.square().mean())) < best:
            best, scores = error, (y - left) / weights
    return scores.numpy()


@dataclass
class Contradictions:
    """`share` in [0, 1] of the images that have a wrong name, at least `least`; the evidence as a natural logarithm; `sure`
    where that is enough."""

    share: float
    least: float
    evidence: float
    sure: bool = False


def contradictions(margins: np.ndarray, kinds: int, expected: float, questions: int = 1) -> Contradictions:
    """Returns what share of the names is wrong, and whether more than the overlap of the kinds explains.

    Args:
        margins: [N], by how much the score of an image's own name is above that of the best other one; negative where
            another is preferred.
        kinds: their number.
        expected: the share of wrong names, in [0, 1], that is no finding.
        questions: how many are asked about one set.
    """
    found = max((_floor(margins, kinds, expected), _second_peak(margins)), key=lambda one: one.evidence)
    found.sure = bool(found.evidence > EVIDENCE + np.log(questions) and found.share > expected)
    return found


_SHARES = np.array([*np.arange(0, 0.1, 0.005), *np.arange(0.1, 0.52, 0.02)])
_SLOPES = np.array([0, *np.geomspace(0.3, 300, 40)])
_BINS = 50


def _floor(margins: np.ndarray, kinds: int, expected: float) -> Contradictions:
    """The share of wrong names among predictions however sure, by likelihood.

    Sorted by how sure they are, predictions for kinds that overlap are wrong at a rate that falls from that of a guess to 0,
    here as a logistic function of the rank; wrong names add a constant. Where nothing can be told apart, the rate does not
    fall, and both explain it: then there is no evidence.
    """
    wrong = margins[np.argsort(np.abs(margins), kind="stable")] < 0
    ranks = (np.arange(len(wrong)) + 0.5) / len(wrong)
    bins = np.minimum((ranks * min(_BINS, len(wrong))).astype(int), _BINS - 1)
    total, bad = np.bincount(bins), np.bincount(bins, wrong)
    falling = 2 / (1 + np.exp(np.minimum(np.outer(_SLOPES, np.bincount(bins, ranks) / total), 60)))  # [slopes, bins]
    guesses = np.linspace(0.5, max(0.5, 1 - 1 / kinds), 5 if kinds > 2 else 1)[:, None, None]
    likelihoods = np.empty(len(_SHARES))
    for number, share in enumerate(_SHARES):
        rates = np.clip(share + np.maximum(guesses - share, 0) * falling, 1e-4, 1 - 1e-4)
        likelihoods[number] = (bad * np.log(rates) + (total - bad) * np.log1p(-rates)).sum(-1).max()
    best = int(likelihoods.argmax())
    evidence = likelihoods[best] - likelihoods[expected >= _SHARES].max()
    least = _SHARES[likelihoods > likelihoods[best] - EVIDENCE].min()
    return Contradictions(float(_SHARES[best]), float(least), float(evidence))


def _second_peak(margins: np.ndarray) -> Contradictions:
    """A part of the images whose names are contradicted with about the same margin, with a valley between them and the rest.

    The margins of one kind, however wide, thin out from their peak on: an interval that lies farther has fewer of them than one
    of the same length that is nearer. The interval around 0 must have fewer than the one around the median of the contradicted
    images, and than the one on the other side, by more than a coin gives.
    """
    contradicted = -margins[margins < 0]
    if len(contradicted) == 0:
        return Contradictions(0.0, 0.0, 0.0)
    third = np.median(contradicted) / 3
    peak, valley = (np.abs(contradicted - 3 * third) < third).sum(), (np.abs(margins) < third).sum()
    rest = (margins > third).sum() / 2
    evidence = min(_of_a_coin(peak, valley), _of_a_coin(rest, valley))
    return Contradictions(len(contradicted) / len(margins), max(int(peak) - int(valley), 0) / len(margins), evidence)


def _of_a_coin(heads: float, tails: float) -> float:
    """Chernoff's bound of the probability of as many heads, as a negative natural logarithm; 0 for fewer than half."""
    both = heads + tails
    if heads <= tails:
        return 0.0
    return float(both * np.log(2) + heads * np.log(heads / both) + (tails * np.log(tails / both) if tails else 0))


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

"""Which images were drawn, and which labels the network was told of them. Rows are those of the data set."""

from collections.abc import Callable, Iterator
from itertools import chain, islice

import numpy as np

from steady_doctor.data.chance import IMPOSSIBLE, agrees, at_least
from steady_doctor.found import Found


def check_rows(
    update: int, rows: np.ndarray, numbers: np.ndarray, length: int, held_out: np.ndarray, balanced: bool, window: int | None
) -> Iterator[Found]:
    """Whether samples show the images that they are declared to show: every pass in a random order of its own.

    Args:
        rows: int64 [N], that each sample showed; one at least.
        numbers: int64 [N], of the samples, counted through the run: k belongs to pass k // length. One may come twice.
        length: number of training images. They and the held-out ones are all rows of the data set.
        balanced: classes are drawn equally often, so that an image may come twice in a pass.
        window: the order is random only among about so many samples that follow each other; None: in the whole pass.
    """
    numbers, rows, _ = _distinct(numbers, rows)
    kept = np.sort(held_out)
    found = _wrong_rows(update, rows, numbers, kept, length + len(kept))
    if not balanced:
        ranks = rows - np.searchsorted(kept, rows)  # place among the training images
        found = chain(found, _repeated(update, rows, numbers, length), _in_order(update, ranks, numbers, length, window))
    yield from islice(found, 1)


def _distinct(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first, second, how often they come) of each pair of numbers, sorted."""
    low, span = second.min(), np.ptp(second) + 1
    keys, counts = np.unique(first * span + second - low, return_counts=True)
    return keys // span, keys % span + low, counts


def _wrong_rows(update: int, rows: np.ndarray, numbers: np.ndarray, held_out: np.ndarray, total: int) -> Iterator[Found]:
    if len(trained := np.intersect1d(rows, held_out)):
        yield Found("data-held-out", update, {"count": len(trained), "row": int(trained[0])})
    if len(outside := rows[(rows < 0) | (rows >= total)]):
        yield Found("data-beyond", update, {"row": int(outside[0]), "total": total})
    if len(same := np.flatnonzero(numbers[1:] == numbers[:-1])):
        sample, first, second = (int(values[same[0]]) for values in (numbers, rows, rows[1:]))
        yield Found("data-sample-changes", update, {"sample": sample, "first": first, "second": second})


def _repeated(update: int, rows: np.ndarray, numbers: np.ndarray, length: int) -> Iterator[Found]:
    _, shown, counts = _distinct(numbers // length, rows)
    if (counts > 1).any():
        again, row, times = int((counts - 1).sum()), int(shown[counts.argmax()]), int(counts.max())
        yield Found("data-repeated", update, {"again": again, "of": int(counts.sum()), "row": row, "times": times})


def _in_order(update: int, ranks: np.ndarray, numbers: np.ndarray, length: int, window: int | None) -> Iterator[Found]:
    # A permutation of L keeps m given neighbors with a probability of (L - m)! / L!, which is at most (e / L)^m.
    chance = min(1.0, np.e / min(window or length, length))
    follows = (np.diff(numbers) == 1) & (numbers[1:] % length != 0)
    steps, counts = np.unique(np.diff(ranks)[follows], return_counts=True)
    if len(steps) and 2 * length * at_least(int(counts.max()), int(counts.sum()), chance) < IMPOSSIBLE:
        yield Found("data-in-order", update, {"by": int(steps[counts.argmax()]), "share": counts.max() / counts.sum()})
    place = np.lexsort([numbers, numbers % length])
    twice = np.diff((numbers % length)[place]) == 0
    same, count = int((np.diff(ranks[place])[twice] == 0).sum()), int(twice.sum())
    if at_least(same, count, chance) < IMPOSSIBLE:
        yield Found("data-same-order", update, {"same": same, "count": count})
    seen = int(ranks.max() - ranks.min()) + 1
    if window is None and len(ranks) * (seen / length) ** (len(ranks) - 1) < IMPOSSIBLE:
        yield Found("data-part", update, {"seen": seen, "of": length})


def check_split(update: int, training: np.ndarray, held_out: np.ndarray, total: int, declared: int) -> Iterator[Found]:
    """Whether each of `total` rows is either trained on or held out, as many as `declared`."""
    both = np.concatenate([training, held_out])
    counts = np.bincount(both[(both >= 0) & (both < total)], minlength=total)
    if len(shared := np.intersect1d(training, held_out)):
        yield Found("data-held-out", update, {"count": len(shared), "row": int(shared[0])})
    elif len(outside := both[(both < 0) | (both >= total)]):
        yield Found("data-beyond", update, {"row": int(outside[0]), "total": total})
    elif (counts != 1).any() or len(held_out) != declared:
        sizes = {"training": len(training), "held_out": len(held_out), "declared": declared, "total": total}
        yield Found("data-split", update, {**sizes, "lost": int((counts == 0).sum()), "twice": int((counts > 1).sum())})


def check_balance(update: int, rows: np.ndarray, labels: np.ndarray, training: np.ndarray) -> Iterator[Found]:
    """Whether balanced samples show every class once in as many samples as there are classes, and each class's images in turn.
    `rows`: those of the first samples. `labels`: the class of each row of the data set."""
    classes, sizes = np.unique(labels[training], return_counts=True)
    shown = labels[rows[: len(rows) // len(classes) * len(classes)]].reshape(-1, len(classes))
    wrong, early = int((np.sort(shown, 1) != classes).any(1).sum()), 0
    for label, size in zip(classes, sizes):
        own = rows[labels[rows] == label][:size]
        early += len(own) - len(np.unique(own))
    if wrong or early:
        yield Found("data-balance", update, {"wrong": wrong, "blocks": len(shown), "classes": len(classes), "early": early})


def check_stand_ins(
    update: int, drawn: np.ndarray, shown: np.ndarray, held_out: np.ndarray, readable: Callable[[int], bool], most: int = 4
) -> Iterator[Found]:
    """Whether the rows that are shown are those drawn, or training rows in the place of ones that are not `readable`, which is
    asked for `most` rows."""
    if len(strange := np.intersect1d(shown, held_out)):
        yield Found("data-held-out", update, {"count": len(strange), "row": int(strange[0])})
    elif needless := [row for row in np.unique(drawn[drawn != shown])[:most].tolist() if readable(row)]:
        yield Found("data-stand-in", update, {"row": needless[0]})


def check_labels(update: int, told: np.ndarray, expected: np.ndarray, dropout: float) -> Iterator[Found]:
    """Whether they are the same, but for those that are dropped at random.

    Args:
        told: int64 [N], the labels that the network was given, in the order of their batches; -1 where it was told none.
        expected: int64 [N], those of the data set.
        dropout: share of samples whose label is declared to be dropped.
    """
    told, expected = told[expected >= 0], expected[expected >= 0]
    kept = told >= 0
    count, dropped, others = len(told), int((~kept).sum()), kept & (told != expected)
    if others.any():
        labels, instead, times = _distinct(expected[others], told[others])
        told_as = [f"{labels[place]} as {instead[place]}" for place in np.argsort(-times, kind="stable")]
        yield Found("condition-labels", update, {"wrong": int(others.sum()), "of": int(kept.sum()), "pairs": told_as})
    pairs = ~kept[: count // 2 * 2].reshape(-1, 2)  # neighbors of a batch
    of_class = [(int(label), ~kept[expected == label]) for label in np.unique(expected)]
    uneven = [(label, gone.mean()) for label, gone in of_class if not agrees(int(gone.sum()), len(gone), dropout)]
    if not agrees(dropped, count, dropout):
        yield Found("condition-rate", update, {"dropped": dropped, "of": count, "rate": dropout})
    elif not agrees(int(pairs.all(1).sum()), len(pairs), dropout**2):
        yield Found("condition-together", update, {"share": pairs.all(1).mean(), "rate": dropout**2})
    elif uneven:
        yield Found("condition-uneven", update, {"label": uneven[0][0], "share": uneven[0][1], "rate": dropout})

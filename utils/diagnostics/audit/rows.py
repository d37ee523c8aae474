"""Stages "data" and "condition" of the step audit: which images were drawn, and which labels the network was told."""

import math
from collections.abc import Callable, Collection

import numpy as np

from utils.diagnostics.audit.chance import IMPOSSIBLE, agrees, at_least
from utils.diagnostics.audit.verdict import Check, not_observed

_STRIDES = range(2, 65)  # of which every k-th row alone may be drawn, as by one of k processes


def check_rows(
    rows: np.ndarray,
    sample_numbers: np.ndarray,
    length: int,
    held_out_rows: Collection[int],
    balanced: bool,
    window: int | None = None,
) -> list[Check]:
    """Whether the samples of a run are the images that they are declared to be: each training image once in each pass over
    them, every pass in a random order of its own, none of those held out.

    Args:
        rows: int64 [N], the dataset's row that each sample showed.
        sample_numbers: int64 [N], counted through the run: number k belongs to pass k // length. A number may come twice.
        length: number of training images. They and the held-out ones are all rows of the dataset.
        balanced: classes are drawn equally often, so that an image may come twice in a pass.
        window: the order is random only among about so many samples that follow each other; None: in the whole pass.
    """
    declared = "images drawn at random" if balanced else "each image once in a pass, in a random order"
    numbers, rows = _distinct(np.asarray(sample_numbers, np.int64), np.asarray(rows, np.int64))[:2]
    if len(rows) == 0:
        return [not_observed("data", "order", declared, "no samples")]
    held_out = np.sort(np.fromiter(held_out_rows, np.int64))
    total = length + len(held_out)
    ranks = rows - np.searchsorted(held_out, rows)  # place among the training images
    message = _wrong_row(numbers, rows, held_out, total) or _alike(rows, length)
    if not message and not balanced:
        message = _repeated(numbers, rows, length) or _in_order(numbers, ranks, length, window or length)
        message = message or ("" if window else _part(ranks, length))
    observed = f"{len(np.unique(rows))} rows in {len(rows)} samples of {len(np.unique(numbers // length))} passes"
    return [Check("data", "order", declared, observed, not message, message)]


def _distinct(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first, second, how often they come) of each pair of numbers, sorted."""
    order = np.lexsort([second, first])
    first, second = first[order], second[order]
    begins = np.flatnonzero(np.r_[True, (np.diff(first) != 0) | (np.diff(second) != 0)][: len(first)])
    return first[begins], second[begins], np.diff(np.r_[begins, len(first)])


def _wrong_row(numbers, rows, held_out, total) -> str:
    if trained := np.intersect1d(rows, held_out).tolist():
        return f"{len(trained)} held-out images are trained on, such as row {trained[0]}: they are not held out"
    if len(outside := rows[(rows < 0) | (rows >= total)]):
        return f"row {outside[0]} is drawn, but the dataset has {total} rows"
    same = np.flatnonzero(numbers[1:] == numbers[:-1])
    if len(same):
        first, second = rows[same[0]], rows[same[0] + 1]
        again = f"sample {numbers[same[0]]} showed row {first} and, when it came again, row {second}"
        return f"{again}: does the order depend on more than the sample's number?"
    return ""


def _alike(rows, length) -> str:
    if length > 1 and len(rows) > 30 and len(np.unique(rows)) == 1:  # one of two classes, each time: 2^-30
        return f"all {len(rows)} samples looked at are the same image, row {rows[0]}"
    return ""


def _repeated(numbers, rows, length) -> str:
    passes, shown, counts = _distinct(numbers // length, rows)
    if not (counts > 1).any():
        return ""
    again, number, row = int((counts - 1).sum()), passes[counts.argmax()], shown[counts.argmax()]
    if len(counts) == 1:
        return f"all {counts[0]} samples looked at are the same image, row {row}"
    example = f"row {row} came {counts.max()} times in pass {number}"
    return (
        f"{again} of {counts.sum()} samples repeat an image of the same pass ({example}): "
        "are images drawn with replacement, or does the order start again?"
    )


def _in_order(numbers, ranks, length, among) -> str:
    # A permutation of L keeps m given neighbors with a probability of (L - m)! / L!, which is at most (e / L)^m.
    chance = min(1.0, np.e / min(among, length))
    follows = (np.diff(numbers) == 1) & (numbers[1:] % length != 0)
    steps, counts = np.unique(np.diff(ranks)[follows], return_counts=True)
    if len(steps) and 2 * length * at_least(int(counts.max()), int(counts.sum()), chance) < IMPOSSIBLE:
        step, share = int(steps[counts.argmax()]), counts.max() / counts.sum()
        order = {1: "the order in which they are stored", -1: "the reverse of the order in which they are stored"}
        return f"images come in {order.get(step, f'steps of {step} rows')} ({share:.0%} of the samples): they are not shuffled"
    place = np.lexsort([numbers, numbers % length])
    twice = np.diff((numbers % length)[place]) == 0
    same, count = int((np.diff(ranks[place])[twice] == 0).sum()), int(twice.sum())
    if at_least(same, count, chance) < IMPOSSIBLE:
        return f"two passes have the same order ({same} of {count} rows are those of an earlier pass): it is not shuffled anew"
    return ""


def _part(ranks, length) -> str:
    low, high, count = int(ranks.min()), int(ranks.max()), len(ranks)
    if count * ((high - low + 1) / length) ** (count - 1) < IMPOSSIBLE:
        return f"{count} samples all lie among the images {low} to {high} of {length}: the others are never drawn"
    for stride in _STRIDES:
        few, first = ranks[: _STRIDES.stop], ranks[0] % stride  # which tell for almost all of them
        if stride < length and (few % stride == first).all() and (ranks % stride == first).all():
            largest = -(-length // stride) / length  # share of a residue class
            if len(_STRIDES) * stride * largest**count < IMPOSSIBLE:
                return f"{count} samples all show images {stride} k + {ranks[0] % stride}: the others are never drawn"
    return ""


def check_split(training: np.ndarray, held_out: np.ndarray, total: int, declared: int, *, blocks: bool = False) -> list[Check]:
    """Whether each row is either trained on or held out, as many as declared, and those held out are chosen at random.

    Args:
        training: int64 [N], the rows to train on; held_out: int64 [M], the others.
        total: number of rows of the files that are declared to be used; declared: of those held out.
        blocks: they come from a few blocks of rows, and may lie close together.
    """
    wanted = f"each of {total} rows once, {declared} held out"
    known = np.zeros(total, bool)
    both = np.concatenate([training, held_out])
    inside = both[(both >= 0) & (both < total)]
    known[inside] = True
    message, shared = "", np.intersect1d(training, held_out)
    if len(outside := both[(both < 0) | (both >= total)]):
        message = f"row {outside[0]} is used, but the dataset has only {total} rows"
    elif len(shared):
        message = f"{len(shared)} rows are trained on and held out, such as row {shared[0]}: they are not held out"
    elif len(both) > known.sum():
        message = f"{len(both) - known.sum()} rows come more than once among those trained on or held out"
    elif len(lost := np.flatnonzero(~known)):
        message = f"{len(lost)} of {total} rows are neither trained on nor held out, such as row {lost[0]}"
    elif len(held_out) != declared:
        message = f"{len(held_out)} images are held out, not the declared {declared}"
    elif len(held_out) > 1 and not blocks:
        message = _chosen(np.sort(held_out), total)
    observed = f"{len(training)} trained on, {len(held_out)} held out"
    return [Check("data", "rows", wanted, observed, not message, message)]


def _chosen(held_out, total) -> str:
    count, step = len(held_out), int(held_out[1] - held_out[0])
    share = (held_out[-1] - held_out[0] + 1) / total
    if count * share ** (count - 1) < IMPOSSIBLE:
        return f"the held-out images all lie among the rows {held_out[0]} to {held_out[-1]} of {total}: not chosen at random"
    # Few of the sets of as many rows are a sequence of equal steps: at most total^2 of them.
    sets = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
    if (np.diff(held_out) == step).all() and 2 * math.log(total) - sets < math.log(IMPOSSIBLE):
        return f"the held-out images are every {step}th row from row {held_out[0]} on: not chosen at random"
    return ""


def check_pass(rows: np.ndarray, training: np.ndarray) -> list[Check]:
    """Whether the first samples, as many as there are `training` images, show each of them once. `rows`: int64 [N]."""
    wanted, message = f"each of {len(training)} training images once", ""
    missing, other = np.setdiff1d(training, rows), np.setdiff1d(rows, training)
    if len(other):
        message = f"a pass shows {len(other)} rows that should not be trained on, such as row {other[0]}"
    elif len(missing):
        message = f"a pass leaves out {len(missing)} of {len(training)} training images, such as row {missing[0]}"
    found = f"{len(training) - len(missing)} of them"
    return [Check("data", "a whole pass", wanted, found, not message, message)]


def check_balance(rows: np.ndarray, labels: np.ndarray, training: np.ndarray) -> list[Check]:
    """Whether balanced samples show every class once in as many samples as there are classes, and each class's images in turn.

    Args:
        rows: int64 [N], those of the first samples; labels: int64, the class of each row of the data set.
    """
    classes, sizes = np.unique(labels[training], return_counts=True)
    shown = labels[rows[: len(rows) // len(classes) * len(classes)]].reshape(-1, len(classes))
    wrong, message = np.flatnonzero((np.sort(shown, 1) != classes).any(1)), ""
    if len(wrong):
        message = (
            f"{len(wrong)} of {len(shown)} blocks of {len(classes)} samples do not show each of {len(classes)} classes once"
        )
    else:
        for label, size in zip(classes, sizes):
            own = rows[labels[rows] == label][:size]
            if len(np.unique(own)) < len(own):
                message = f"images of class {label} come again before all {size} of them were shown"
                break
    declared = f"each of {len(classes)} classes once in {len(classes)} samples"
    return [Check("data", "balance", declared, f"{len(shown) - len(wrong)} of {len(shown)} blocks", not message, message)]


def check_stand_ins(
    drawn: np.ndarray, shown: np.ndarray, held_out: Collection[int], readable: Callable[[int], bool], most: int = 4
) -> list[Check]:
    """Whether the rows that are shown are those drawn, or training rows in the place of ones that cannot be decoded.

    Args:
        readable: whether the image of a row can be decoded; asked for `most` rows.
    """
    others, message = np.unique(drawn[drawn != shown]), ""
    strange = np.intersect1d(shown, np.fromiter(held_out, np.int64))
    if len(strange):
        message = f"row {strange[0]} is trained on in the place of another, and is held out"
    elif needless := [row for row in others[:most].tolist() if readable(row)]:
        message = f"row {needless[0]} is replaced by another image, though it can be decoded"
    said = f"{len(others)} rows are replaced"
    return [Check("data", "rows shown", "those drawn, or the next for one that cannot be decoded", said, not message, message)]


def check_labels(told: np.ndarray, expected: np.ndarray, dropout: float) -> list[Check]:
    """Whether the network gets the labels of the images that it sees.

    Args:
        told: int64 [N], the labels that the network was given, in the order of their batches; -1 where it was told none.
        expected: int64 [N], those of the dataset.
        dropout: share of samples whose label is declared to be dropped.
    """
    told, expected = np.asarray(told, np.int64), np.asarray(expected, np.int64)
    told, expected = told[expected >= 0], expected[expected >= 0]
    kept = told >= 0
    count, dropped, right = len(told), int((~kept).sum()), int((told == expected)[kept].sum())
    declared = "the labels of the images", f"{dropout:.3g} of the labels"
    if count == 0:
        return [not_observed("condition", name, what, "no labels") for name, what in zip(("label", "dropped"), declared)]
    wrong = "" if right == kept.sum() else _wrong_labels(told, expected, kept)
    label = Check(
        "condition", "label", declared[0], f"{right} of {kept.sum()} labels that the network gets are right", not wrong, wrong
    )
    if not kept.any():
        label = not_observed("condition", "label", declared[0], "all labels looked at were dropped")
    message = ""
    pairs = ~kept[: count // 2 * 2].reshape(-1, 2)  # neighbors of a batch
    of_class = [(label, ~kept[expected == label]) for label in np.unique(expected)]
    uneven = [label for label, gone in of_class if not agrees(int(gone.sum()), len(gone), dropout)]
    if not agrees(dropped, count, dropout):
        often = {0: "never", count: "always"}.get(dropped, f"in {dropped / count:.1%} of the samples")
        message = f"labels are dropped {often}; the declared share is {dropout:.3g}"
    elif not agrees(int(pairs.all(1).sum()), len(pairs), dropout**2):
        message = f"labels of neighbors are dropped together ({pairs.all(1).mean():.0%} of the pairs), not each at random"
    elif uneven:
        message = f"labels of class {uneven[0]} are dropped more or less often than declared, a share of {dropout:.3g} of each"
    return [label, Check("condition", "dropped", declared[1], f"{dropped} of {count}", not message, message)]


def _wrong_labels(told, expected, kept) -> str:
    for shift in (1, -1, 2, -2):
        other = np.roll(expected, shift)
        varied = kept & (other != expected)
        if varied.sum() > 3 and (told == other)[varied].mean() > 0.8:
            return f"the labels are another image's: shifted by {abs(shift)} in the batch"
    told, expected = told[kept], expected[kept]
    share = (told != expected).mean()
    if len(np.unique(told)) == 1 and len(told) > 3:
        return f"the network gets label {told[0]} for every image"
    steps = np.unique(told - expected)
    if len(steps) == 1 and len(told) > 1:
        return f"the network gets label + {steps[0]} instead of the label"
    classes, used = np.unique(expected), np.unique(np.stack([expected, told]), axis=1)
    if len(used[0]) == len(classes) and len(told) > len(classes) + 3:  # a function of the class, for more than three again
        swaps = ", ".join(f"{a} becomes {b}" for a, b in used.T[:3])
        return (
            f"the classes are exchanged ({swaps})"
            if len(np.unique(used[1])) == len(classes)
            else f"classes are merged ({swaps})"
        )
    if np.array_equal(np.sort(told), np.sort(expected)):
        return f"the labels belong to other images of the batch ({share:.0%} of them are wrong): shuffled apart from the images"
    return f"{share:.0%} of the labels that the network gets are not those of the images: are they random?"

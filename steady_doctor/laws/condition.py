"""Whether the network is told of each image what belongs to it, of most images, and whether it listens."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor

from steady_doctor.found import Found
from steady_doctor.identify.conditions import Condition
from steady_doctor.record.guidance import Part
from steady_doctor.seen import Seen

LOOKS = 3  # passes, before what is alike in all of them is said
ENOUGH = 4  # images of a batch
MOST_DROPPED = 0.5  # of the labels: classifier-free guidance is trained with 0.05 to 0.3
ERRORS = 4.0  # standard errors
SEVERAL = 3  # different labels, for their order to say something
LONG = 8  # images, for a sorted batch to be no chance
FAINT = 0.02  # of an image whose values are from -1 to 1 or from 0 to 1
LATE = 8  # the update from which on a layer that begins with zeros is none any more
GUIDED = 4  # steps of a sampler
AWAY = -0.05  # of the answers together, that the one which knows the condition is


def _places(seen: Seen) -> dict[tuple, list[tuple[int, Condition]]]:
    """Each condition over all passes: the same one by its place among those of its shape."""
    places = defaultdict(list)
    for update, one in seen.passes():
        counts: dict[tuple, int] = defaultdict(int)
        for condition in one.conditions.given:
            kind = (condition.shape[1:], condition.floating, condition.joined, condition.by_layer)
            places[*kind, counts[kind]].append((update, condition))
            counts[kind] += 1
    return places


def _always(seen: Seen) -> list[list[tuple[int, Condition]]]:
    """Those that the network is given in each pass: what takes the place of its own answer, in self-conditioning, is not."""
    return [looks for looks in _places(seen).values() if len(looks) == len(seen.mixed())]


def _alike(condition: Condition) -> bool:
    return bool((condition.rows == condition.rows[:1]).all())


def other_rows(seen: Seen) -> Iterator[Found]:
    """Row by row the condition comes from where the image comes from."""
    for update, one in seen.passes():
        for condition in one.conditions.given:
            known = _known_rows(condition)
            if known is None:
                continue
            own, images = known
            if len(images) >= ENOUGH and bool((own == own[0]).all()) and not bool((images == images[0]).all()):
                yield Found("condition-one-row", update, {"row": int(own[0]), "size": len(images)})
            elif int((own != images).sum()) > len(own) / 2 and len(own) >= ENOUGH:
                pairs = list(zip(images.tolist(), own.tolist()))[:4]
                yield Found("condition-other-rows", update, {"pairs": pairs, "size": len(images)})


def _known_rows(condition: Condition) -> tuple[Tensor, Tensor] | None:
    if condition.own is None or condition.images is None or condition.own.shape != condition.images.shape:
        return None
    known = (condition.own >= 0) & (condition.images >= 0)
    return (condition.own[known], condition.images[known]) if bool(known.any()) else None


def alike(seen: Seen) -> Iterator[Found]:
    """One value for all images in all batches, made of values that differ."""
    for looks in _always(seen):
        known = [one for _, one in looks if one.by_layer and len(one.rows) >= ENOUGH]
        if len(known) < LOOKS or not all(one.varies and one.dropped is not None and bool(one.dropped.all()) for one in known):
            continue
        firsts = torch.stack([one.rows[0] for one in known])
        if all(map(_alike, known)) and bool((firsts == firsts[:1]).all()):
            yield Found("condition-always-same", looks[0][0], {"passes": len(known)})


def dropped(seen: Seen) -> Iterator[Found]:
    for looks in _always(seen):
        rows = [one.dropped for _, one in looks if one.dropped is not None]
        if not rows:
            continue
        count, share = sum(map(len, rows)), float(torch.cat(rows).double().mean())
        error = ERRORS * ((share * (1 - share) + 1 / count) / count) ** 0.5
        asked = (x for name, x in seen.options.items() if "drop" in name and isinstance(x, (int, float)))
        if share - error > MOST_DROPPED and not any(abs(share - x) < error for x in asked):
            yield Found("condition-dropped", looks[0][0], {"share": share, "count": count})


def null(seen: Seen) -> Iterator[Found]:
    """Labels that are dropped become one that no image has."""
    for looks in _places(seen).values():
        kept: set[int] = set()
        nulls: set[int] = set()
        for _, one in looks:
            if one.dropped is not None and one.labels is not None and len(one.shape) == 1:
                kept |= set(one.labels[~one.dropped].tolist())
                nulls |= set(one.labels[one.dropped].tolist())
        if len(nulls) == 1 and nulls < kept and max(nulls) < max(kept):
            yield Found("condition-null", looks[0][0], {"label": nulls.pop()})


def in_vain(seen: Seen) -> Iterator[Found]:
    """Labels are dropped in a tensor that nothing reads."""
    looks = [(update, one.conditions.dropped_in_vain) for update, one in seen.mixed()]
    if len(looks) >= LOOKS and all(count for _, count in looks):
        yield Found("condition-dropped-in-vain", looks[0][0], {"size": looks[0][1]})


def in_order(seen: Seen) -> Iterator[Found]:
    """Labels of each batch sorted, though they are others in each batch."""
    for looks in _places(seen).values():
        labels = [one.labels for _, one in looks if one.labels is not None and len(one.labels) >= LONG]
        if len(labels) < LOOKS or len(labels) < len(looks):
            continue
        alike = all(one.shape == labels[0].shape and torch.equal(one, labels[0]) for one in labels)
        if not alike and all(_sorted(one) for one in labels):
            yield Found("condition-sorted", looks[0][0], {"batches": len(labels)})


def one_class(seen: Seen) -> Iterator[Found]:
    """Each batch has one label or text, and the batches have different ones; what stands for none is left out."""
    for looks in _places(seen).values():
        batches = [Counter(map(tuple, one.rows.tolist())) for _, one in looks if one.by_layer]
        mixed = [set(batch) for batch in batches if len(batch) > 1]
        empty = set.intersection(*mixed) if len(mixed) > 1 else set()
        kept = [{row: n for row, n in batch.items() if row not in empty} for batch in batches]
        kept = [batch for batch in kept if sum(batch.values()) >= ENOUGH]
        alone = len(kept) > LOOKS and all(len(batch) == 1 for batch in kept) and len(empty) <= 1
        if alone and len({row for batch in kept for row in batch}) > 1:
            yield Found("condition-one-class", looks[0][0], {"batches": len(kept)})


def _sorted(labels: Tensor) -> bool:
    for empty in (None, *labels.unique().tolist()):
        kept = labels if empty is None else labels[labels != empty]
        tells = len(kept) >= LONG // 2 + 1 and len(kept.unique()) >= SEVERAL
        if tells and bool((kept.diff() >= 0).all() or (kept.diff() <= 0).all()):
            return True
    return False


def ignored(seen: Seen) -> Iterator[Found]:
    """The parameters that read a condition get no gradient at all, though it is not all zeros."""
    cleared = {step.update.number for step in seen.steps if step.update.gradient.cleared_at_step}
    for looks in _places(seen).values():
        says = [(update, one) for update, one in looks if one.largest > 0 or not one.floating]
        late = [(update, one) for update, one in says if update >= LATE and update not in cleared]
        if len(late) >= LOOKS - 1 and all(one.ignored for _, one in late):
            yield Found("condition-ignored", late[0][0], {"shape": late[0][1].shape, "updates": len(late)})


def image(seen: Seen) -> Iterator[Found]:
    """What is joined to the noised image is neither the image itself, nor next to nothing."""
    for update, one in seen.passes():
        for condition in one.conditions.given:
            if condition.joined and condition.is_clean:
                yield Found("condition-clean", update)
    for looks in _places(seen).values():
        images = [
            (update, one)
            for update, one in looks
            if len(one.shape) == 4 and one.shape[1] <= 4 and one.floating and one.by_layer
        ]
        if len(images) >= LOOKS and all(0 < one.largest < FAINT for _, one in images):
            yield Found("condition-faint", images[0][0], {"largest": max(one.largest for _, one in images)})


def guided(seen: Seen) -> Iterator[Found]:
    """Guidance leads to the answer that knows the condition, and away from the other one."""
    trained: dict[str, set[float]] = defaultdict(set)
    for _, one in seen.mixed():
        for name, numbers in one.called.told.items() if one.called is not None else ():
            trained[name] |= set(numbers.tolist())
    nulls = {
        float(label)
        for _, one in seen.passes()
        for each in one.conditions.given
        if each.labels is not None and each.dropped is not None
        for label in each.labels[each.dropped].tolist()
    }
    shares = []
    for step in seen.sampled:
        for one, other in (step.parts, step.parts[::-1]) if step.parts else ():
            whole = one.weight + other.weight
            less, more = (_says_less(*pair, step.name, trained, nulls) for pair in ((other, one), (one, other)))
            if less and not more and whole:
                shares.append(one.weight / whole)
    if len(shares) >= GUIDED and median(shares) < AWAY:
        yield Found("condition-guided-away", seen.updates, {"steps": len(shares), "share": median(shares)})


def _says_less(one: Part, other: Part, level: str, trained: dict[str, set[float]], nulls: set[float]) -> bool:
    """Whether a condition was left out, or is one label for samples of several, or one that images do not have. `level`: the
    argument of the noise level, which guidance may change, too."""
    for name, known in one.known.items():
        if name == level:
            continue
        labels, than = known.labels, other.known[name]
        # One label of images for all samples may be the wish, and others what the samples were, or labels by chance.
        is_empty = known.alike and not than.alike and (labels <= nulls or labels.isdisjoint(trained[name]))
        if than.given and (not known.given or is_empty):
            return True
        if labels and than.labels and labels.isdisjoint(trained[name]) and than.labels <= trained[name]:
            return True
    return False


LAWS = (guided, other_rows, alike, one_class, dropped, null, in_vain, in_order, ignored, image)

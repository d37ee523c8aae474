"""Whether averages of the weights follow the weights after each step: all of them, with shares that are 1 together."""

from collections.abc import Iterator
from itertools import pairwise

from steady_doctor.found import Found
from steady_doctor.identify.averages import ALMOST_ALL, COPY, Average
from steady_doctor.seen import Seen

LEAST = 3  # recorded updates that agree
NEW = 0.75  # of an average that one update gives: a decay of 0.9 that is exchanged gives 0.9
SETTLED = 13  # updates after which a decay is no longer one of a warm-up's begin
RISES = 0.05  # of a decay
FALLS = 0.1
NOTHING = 1e-6  # of an average, that a copy keeps
PATIENCE = 20  # updates after which an average has begun
BEGUN = 2000  # updates after which published averages that begin late have done so
BEGINS = 5  # updates, in which no weights become others
ALIKE = 0.5  # the cosine of a network and what it was some updates before is far above it
BEYOND = 2e-3  # of 0 and 1, by rounding


def _each(seen: Seen) -> Iterator[tuple[int, Average]]:
    for update in seen.recorded():
        for average in update.averages:
            yield update.number, average


def _keeps(seen: Seen, of_teachers: bool = False) -> list[tuple[int, float, float]]:
    """Of each recorded update with averages: the smallest and the largest share that one of them keeps."""
    found = []
    for update in seen.recorded():
        averages = update.teachers if of_teachers else update.averages
        keeps = [average.keep for average in averages if average.sum == 1 and not average.still]
        if keeps:
            found.append((update.number, min(keeps), max(keeps)))
    return found


def shares(seen: Seen) -> Iterator[Found]:
    for update, average in _each(seen):
        if average.sum != 1:
            yield Found("ema-sum", update, {"keep": average.keep, "new": average.sum - average.keep})
        elif not average.still and not -BEYOND <= average.keep <= 1 + BEYOND:
            yield Found("ema-share", update, {"keep": average.keep})


def exchanged(seen: Seen) -> Iterator[Found]:
    """Averages that forget almost all in each update, or more and more of it, from when they are no copies any more. A teacher
    may be a copy, and is an average where there is no other."""
    keeps = [each for each in _keeps(seen) or _keeps(seen, of_teachers=True) if each[2] > NOTHING]
    late = [(update, most) for update, _, most in keeps if update >= SETTLED]
    if len(late) > 1 and all(most < 1 - NEW for _, most in late) and keeps[-1][2] - keeps[0][2] < RISES:
        yield Found("ema-exchanged", late[0][0], {"keep": late[0][1]})
    both = list(zip(*keeps))[1:]
    if len(keeps) >= LEAST and all(x[-1] < x[0] - FALLS and all(b < a for a, b in pairwise(x)) for x in both):
        yield Found("ema-falling", keeps[-1][0], {"first": both[1][0], "last": both[1][-1]})


def late(seen: Seen) -> Iterator[Found]:
    """Averages are made once in an update, after the step."""
    for update in seen.recorded():
        if any(average.times > 1 for average in update.averages):
            yield Found("ema-each-pass", update.number, {"times": max(average.times for average in update.averages)})
        elif any(average.when == "before the step" for average in update.averages):
            yield Found("ema-before-step", update.number)


def copies(seen: Seen) -> Iterator[Found]:
    """Averages that are copies in each update to the end."""
    keeps = _keeps(seen)
    if seen.ended and seen.updates > BEGUN and len(keeps) >= LEAST and all(abs(most) < NOTHING for _, _, most in keeps):
        yield Found("ema-copies", keeps[0][0])


def of_others(seen: Seen) -> Iterator[Found]:
    """An average begins as the network, or as nothing, and not as weights that have nothing to do with these."""
    first = next((update for update in seen.recorded() if update.averages), None)
    if first is None or first.number > BEGINS:
        return
    kept = [average.beside for average in first.averages if average.keep > NEW]
    old, own, both = (sum(part) for part in zip(*kept)) if kept else (0.0, 0.0, 0.0)
    if old * own > 0 and (cosine := both / (old * own) ** 0.5) < ALIKE:
        yield Found("ema-of-others", first.number, {"cosine": cosine})


def itself(seen: Seen) -> Iterator[Found]:
    """The average lies where the weights lie; where weights are only copied, in each update: they may be loaded once."""
    known = seen.recorded()
    is_copied = len(known) >= LEAST and all(update.by_itself for update in known[1:])
    for update in known:
        if update.by_itself and not update.normalized and (is_copied or set(update.by_itself) != {COPY}):
            yield Found("ema-is-the-network", update.number, {"by": update.by_itself})
            return


def part(seen: Seen) -> Iterator[Found]:
    """Of a copy of the network, some tensors follow and others do not, though all parameters train."""
    found = seen.copies
    if found is None or len(seen.recorded()) < LEAST:
        return
    free = [copy for copy in found.all if copy.alive and not copy.in_loss and copy.parameter in found.changed]
    moving, standing = found.of(copy for copy in free if copy.moved), found.of(copy for copy in free if not copy.moved)
    left = standing - moving - {average.parameter for _, average in _each(seen)}
    if moving and left:
        yield Found("ema-part", seen.updates, {"count": len(left), "of": len(moving | standing)})


def never(seen: Seen) -> Iterator[Found]:
    """A copy of the network that was made before training, that no loss depends on, and that is what it was to the end. Not of
    a second training, which may begin as the average of the first; and within a network of which most rests, it is what the
    trained layers were copied from."""
    found = seen.copies
    if found is None or not seen.ended or seen.updates < PATIENCE or any(_each(seen)) or seen.is_later:
        return
    free = [copy for copy in found.all if copy.alive and not copy.in_loss and copy.parameter in found.changed]
    bases = {key for step in seen.steps for one in step.network.called if one.frozen > one.trained for key in one.rests}
    free = [copy for copy in free if copy.key not in bases]
    covered = found.of(free)
    is_whole = len(covered) >= ALMOST_ALL * len(found.changed & found.eligible)
    if free and is_whole and not any(copy.moved or copy.moved_late for copy in free):
        yield Found("ema-never-updated", seen.updates, {"count": len(covered)})


def empty(seen: Seen) -> Iterator[Found]:
    if seen.copies is not None and seen.copies.empty_average:
        yield Found("ema-empty", 1)


def statistics(seen: Seen) -> Iterator[Found]:
    """Of batch normalization, which are no parameters."""
    if seen.copies is not None and seen.copies.left_behind and any(_each(seen)) and seen.updates >= PATIENCE:
        yield Found("ema-statistics", seen.updates)


LAWS = (empty, of_others, itself, shares, exchanged, late, copies, part, never, statistics)

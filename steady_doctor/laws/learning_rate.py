"""Whether the learning rate is one of use for its optimizer, and its schedule fits the run."""

from collections.abc import Iterator
from itertools import pairwise, takewhile

from steady_doctor.found import Found
from steady_doctor.seen import Seen

ADAMS = ("Adam", "AdamW", "NAdam", "RAdam")
HIGH = 0.02  # of Adam's kind; 0.01 is that of networks whose weights are normalized
LOW = 1e-8
STEP = 0.5  # of the size of a typical layer's weights, in one update
NO_STEP = 0.05  # of it: a high rate that moves large weights by less is none, as of networks that normalize them in each pass
ENOUGH = 8  # updates, before a schedule is judged by what it did
NOTHING = 1e-5  # of the highest rate: where it stays below that, nothing is learned any more
AT_END = 0.25  # of the run
RISES = 0.02  # of a rate, within the last quarter of the run
FACTOR = 0.02  # of the rate that the optimizer was given, which a schedule multiplies
SHORT, LONG = 0.5, 1.5  # of a schedule's length, made in the whole run
EACH = 64  # updates, of which each has its rate kept
FACTORS = 3  # that grow or fall by the same
FALLEN = 0.1  # of a rate, where the factors of a usual schedule are no line any more
OFF = 1.3  # by which steps of a schedule are more or fewer than updates


class Rates:
    """Of one group, in the order of the updates."""

    def __init__(self, seen: Seen, group: int):
        known = [(update, rates[group]) for update, rates in seen.history.rates if group < len(rates)]
        self.updates = [update for update, _ in known]
        self.values = [rate for _, rate in known]
        self.known = bool(known) and all(rate == rate for rate in self.values)  # not NaN
        self.highest = max(self.values, default=0.0)

    @property
    def moves(self) -> bool:
        return len(set(self.values)) > 1

    @property
    def rises_to_the_end(self) -> bool:
        pairs = list(zip(self.values, self.values[1:]))
        late = self.values[-max(2, len(self.values) // 4) :]
        return self.moves and all(b >= a for a, b in pairs) and late[-1] > late[-2] and late[-1] > (1 + RISES) * late[0]


def _groups(seen: Seen) -> list[Rates]:
    count = max((len(rates) for _, rates in seen.history.rates), default=0)
    found = [Rates(seen, group) for group in range(count)]
    return [rates for rates in found if rates.known]


def size(seen: Seen) -> Iterator[Found]:
    groups, known = _groups(seen), [(update, update.optimized) for update in seen.recorded()]
    steps = [(update.number, optimized) for update, optimized in known if optimized is not None]
    if not groups or not steps:
        return
    (first, optimized), highest = steps[0], max(rates.highest for rates in groups)
    kind = optimized.kind
    is_normalized = any(update.normalized for update, _ in known)
    rates_then = [max((group["lr"] for group in one.settings if "lr" in group), default=0.0) for _, one in steps]
    moves = max((one.size * highest / rate for rate, (_, one) in zip(rates_then, steps) if rate > 0), default=0.0)
    if kind in ADAMS and highest >= HIGH and not is_normalized and moves > NO_STEP:
        yield Found("rate-high", first, {"rate": highest, "optimizer": kind})
    number, largest = max(steps, key=lambda step: step[1].size)
    if largest.size > STEP:
        yield Found("rate-large-steps", number, {"size": largest.size, "rate": highest})
    if kind in ADAMS and 0 < highest < LOW:
        yield Found("rate-low", first, {"rate": highest})


def compounded(seen: Seen) -> Iterator[Found]:
    """The factors from update to update are those of a line, which multiplies what it left before."""
    for rates in _groups(seen):
        values = [rate for update, rate in zip(rates.updates, rates.values) if update < EACH]
        values = values[values[:1] == values[1:2] :]  # the first factor may be 1
        factors = [b / a for a, b in pairwise(values) if a > 0]
        below = list(takewhile(lambda factor: factor < 1, factors))
        steps = [b - a for a, b in pairwise(below)]
        is_line = len(steps) >= FACTORS and max(steps) - min(steps) < 1e-3 * abs(steps[0])
        if is_line and (below[0] < 0.5 if steps[0] > 0 else values[len(below)] < FALLEN * values[0]):
            figures = {"first": values[0], "last": rates.values[-1], "from": below[0], "to": below[-1]}
            yield Found("rate-compounds", rates.updates[0], figures)
            return


def nothing(seen: Seen) -> Iterator[Found]:
    """From some update on, a rate of zero or next to it."""
    if seen.updates < 2 * ENOUGH or not (groups := _groups(seen)):
        return
    if (highest := max(rates.highest for rates in groups)) < 0:
        return
    last = [rates.values[-max(2, int(AT_END * len(rates.values))) :] for rates in groups]
    gone = [max(values) <= NOTHING * highest for values in last]
    never = [rates.highest <= NOTHING * highest for rates in groups]  # one that is frozen later is so on purpose
    if all(gone):
        yield Found("rate-zero", seen.updates, {"rate": last[0][-1], "highest": highest})
    elif any(never):
        yield Found("rate-zero-group", seen.updates, {"group": never.index(True), "groups": len(never)})


def factor(seen: Seen) -> Iterator[Found]:
    """A schedule of torch's multiplies the rate that the optimizer was given."""
    groups, base = _groups(seen), seen.history.base
    if seen.updates < ENOUGH or len(groups) != len(base) or not groups or any(seen.history.remade):
        return
    shares = [rates.highest / given for rates, given in zip(groups, base) if given > 0]
    if shares and 0 < max(shares) <= FACTOR and not any(rates.rises_to_the_end for rates in groups):
        yield Found("rate-factor", seen.updates, {"given": max(base), "highest": max(rates.highest for rates in groups)})


def stepped(seen: Seen) -> Iterator[Found]:
    """A schedule is stepped, in the rhythm that its length is meant for. What is long over need not wait for the end."""
    if seen.updates < ENOUGH:
        return
    for schedule in seen.history.schedules:
        figures = {"kind": schedule.kind, "steps": schedule.steps, "length": schedule.length, "updates": seen.updates}
        if not seen.ended and schedule.steps <= LONG * (schedule.length or schedule.steps):
            continue
        if not schedule.own:
            yield Found("rate-other-optimizer", seen.updates, figures)
        elif schedule.steps == 0:
            by_epochs = seen.history.batches > 0 and seen.history.epochs < 2  # it may be meant to be stepped in each
            if not by_epochs or (schedule.length or 0) > seen.updates / 2:
                yield Found("rate-not-stepped", seen.updates, figures)
        elif schedule.length:
            done = schedule.steps / schedule.length
            figures["share"] = done
            often, seldom = schedule.steps > OFF * seen.updates, schedule.steps * OFF < seen.updates
            if done > LONG:
                yield Found("rate-stepped-often" if often else "rate-schedule-short", seen.updates, figures)
            elif done < SHORT:
                yield Found("rate-stepped-seldom" if seldom else "rate-schedule-long", seen.updates, figures)


def warm_up(seen: Seen) -> Iterator[Found]:
    """A rate that rises from the first update to the last has not been reached."""
    groups = _groups(seen)
    moving = [rates for rates in groups if rates.moves]
    if seen.ended and seen.updates >= ENOUGH and moving and all(rates.rises_to_the_end for rates in moving):
        highest = max(rates.highest for rates in moving)
        yield Found("rate-still-rising", seen.updates, {"highest": highest, "first": moving[0].values[0]})


def alone(seen: Seen) -> Iterator[Found]:
    """Groups that the script itself moves move together; one that it freezes does not move. A schedule of torch's knows all."""
    groups = [] if any(schedule.steps for schedule in seen.history.schedules) else _groups(seen)
    moving = [len({*rates.values} - {0.0}) > 1 for rates in groups]
    if seen.updates >= ENOUGH and any(moving) and not all(moving):
        yield Found("rate-one-group", seen.updates, {"moving": sum(moving), "groups": len(moving)})


LAWS = (size, compounded, nothing, factor, stepped, warm_up, alone)

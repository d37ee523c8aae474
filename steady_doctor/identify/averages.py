"""Averages of the weights, by what is written to tensors of their shapes. Figures alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steady_doctor.record.ops import Op, Write
from steady_doctor.record.recorded import Recorded
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.samples import Samples, sample
from steady_doctor.record.tape import Tape

EXACT = 1e-3  # of the distance, that may remain of a straight line between two float32 tensors
ROUNDING = 1e-6  # of a tensor's size
FLOAT32 = 2.0**-24  # of a number
MOVED = 2 * FLOAT32 / EXACT  # of a tensor's size: a smaller distance is not known to EXACT, and so is no share of it
FEWEST = 4  # numbers that tell two shares
ALMOST_ALL = 0.9  # of the weights
COPY = "copy to where it lies"
SHOWS = {"detach", "alias", "view"}  # what gives the same numbers at the same place
MIXES = {"lerp", "add", "_foreach_lerp", "_foreach_add"}
OTHER_SUM = 1e-3  # of two shares, by which they are not 1 together


@dataclass
class Average:
    """A tensor follows a parameter: after = keep x before + (1 - keep) x parameter."""

    parameter: int
    keep: float
    when: str  # "after the step" (of the update before), "before the backward pass" or "before the step"
    sum: float = 1.0  # of the two shares
    still: bool = False  # it is written and stays what it was, though the parameter is another
    times: int = 1  # between how many backward passes of the update it was written
    in_loss: bool = False  # a loss depends on it: a teacher's
    # Of a matrix: sums over some numbers of before^2, parameter^2, and the product of both, for the parameter nearest to it.
    beside: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass
class Named:
    """An average that the loop tells, all its tensors together: after = keep x before + (1 - keep) x weights after the step."""

    name: str
    keep: float
    rest: float  # the size of what is left of that
    gap: float  # the distance of the average before from the weights
    rounding: float  # of float32, in such a distance
    missing: tuple[str, ...]  # parameters that it has not

    def off(self, decay: float) -> float:
        """How far it is from where this decay would have left it."""
        return float((((self.keep - decay) * self.gap) ** 2 + self.rest**2) ** 0.5)


def identify_named(recorded: Recorded) -> list[Named]:
    """Those that the loop tells."""
    if recorded.told is None or recorded.at_end is None:
        return []
    found = []
    for name, (before, after) in recorded.averages.items():
        have = before.there & after.there
        missing = tuple(n for n, has, wanted in zip(recorded.names, have.tolist(), recorded.averaged) if wanted and not has)
        if not bool(have.any()):
            found.append(Named(name, 1.0, 0.0, 0.0, 0.0, missing))
            continue
        old, new, weights = (one.rows[have].flatten() for one in (before, after, recorded.at_end))
        far = old - weights
        keep = float((new - weights) @ far / (far @ far).clamp(min=1e-300))
        rest = float((new - weights - keep * far).norm())
        rounding = 2 * FLOAT32 * float(torch.maximum(old.abs(), weights.abs()).norm())
        found.append(Named(name, keep, rest, float(far.norm()), rounding, missing))
    return found


def identify_averages(recorded: Recorded, loss: set[int]) -> list[Average]:
    """`loss`: the indices of operations that a loss depends on."""
    last: dict[tuple, Write] = {}
    intervals: dict[tuple, set[int]] = {}
    stepped = next((at for at, what in recorded.events if what == "stepped"), len(recorded.tape.ops))
    for write in recorded.tape.writes:
        if write.op.index < stepped:  # what comes later has a name
            place = write.place, write.shape
            last[place] = write
            intervals.setdefault(place, set()).add(_interval(recorded, write.op.index))
    found = _averages_of(recorded, list(last.values()))
    for average, (place, _), passes in zip(found, last, intervals.values()):
        if average is not None:
            average.times, average.in_loss = len(passes), place in loss
    return [average for average in found if average is not None]


def _averages_of(recorded: Recorded, writes: list[Write]) -> list[Average | None]:
    """Of each write, by all parameters of its shape that it was made with, at once."""
    shapes = list(enumerate(parameter.shape for parameter in recorded.parameters))
    pairs = [
        (number, k)
        for number, write in enumerate(writes)
        for k, shape in shapes
        if shape == write.shape and write.op.uses >> k & 1
    ]
    if not pairs:
        return [None] * len(writes)
    numbers, places = (torch.tensor(one) for one in zip(*pairs))
    olds, news = (Samples([getattr(write, which) for write in writes]).rows for which in ("before", "after"))
    enough = [len(write.after) >= FEWEST for write in writes]
    before, after, parameter = olds[numbers], news[numbers], recorded.at_start.rows[places]
    nearest: dict[int, tuple[float, float, float]] = {}
    for (number, _), (old, own, both) in zip(
        pairs, torch.stack([before**2, parameter**2, before * parameter]).sum(2).T.tolist()
    ):
        if len(writes[number].shape) > 1 and _cosine(old, own, both) >= _cosine(*nearest.get(number, (1.0, 1.0, -1.0))):
            nearest[number] = old, own, both
    found: list[Average | None] = [None] * len(writes)
    for (number, k), keep in zip(pairs, _keeps(before, after, parameter).tolist()):
        best = found[number]  # what did not change fits each parameter of its shape
        if keep == keep and (best is None or _distance(keep) < _distance(best.keep)):
            still = torch.equal(olds[number], news[number])
            beside = nearest.get(number, (0.0, 0.0, 0.0))
            found[number] = Average(k, keep, _when(recorded, writes[number].op.index), still=still, beside=beside)
    left = [place for place, (number, _) in enumerate(pairs) if found[number] is None and enough[number]]
    for place, (keep, new) in zip(left, _shares(before[left], after[left], parameter[left]).tolist() if left else ()):
        number, k = pairs[place]
        if keep == keep and found[number] is None:
            found[number] = Average(k, keep, _when(recorded, writes[number].op.index), keep + new)
    return found


def _cosine(old: float, own: float, both: float) -> float:
    return both / max((old * own) ** 0.5, 1e-300)


def _distance(keep: float) -> float:
    return abs(keep) if keep != 1 else 2


def _keeps(before: Tensor, after: Tensor, parameter: Tensor) -> Tensor:
    """[pairs]; NaN where it is not between the two. Arguments are [pairs, N]."""
    far, now = before - parameter, after - parameter
    size = far.norm(dim=1)
    keep = (now * far).sum(1) / far.square().sum(1)
    fits = (size > MOVED * parameter.norm(dim=1)) & ((now - keep[:, None] * far).norm(dim=1) <= EXACT * size)
    return keep.where(fits, torch.nan)


def _shares(before: Tensor, after: Tensor, parameter: Tensor) -> Tensor:
    """[pairs, 2]: the shares of what stood there and of the parameter; NaN where these are not all, or are 1 together."""
    sides = torch.stack([before, parameter], 2)
    known = torch.isfinite(sides).all(2).all(1) & sides.any(2).any(1)
    sides = sides.where(known[:, None, None], 0.0)
    shares = torch.linalg.pinv(sides, rtol=1e-6) @ after[..., None]
    rest = (sides @ shares - after[..., None]).norm(dim=(1, 2))
    keep, new = shares[..., 0].unbind(1)
    is_other = ((keep + new - 1).abs() > OTHER_SUM) & ((new - 1).abs() > OTHER_SUM)  # a sum of all weights is divided later
    is_mixture = (keep >= 0) & (new > 0)  # a difference is on the way to an average
    fits = known & is_other & is_mixture & (rest <= ROUNDING * after.norm(dim=1))
    return shares[..., 0].where(fits[:, None], torch.nan)


def _interval(recorded: Recorded, index: int) -> int:
    """The number of backward passes before it."""
    return sum(at <= index for at, what in recorded.events if what == "backward")


def _when(recorded: Recorded, index: int) -> str:
    backward = [at for at, what in recorded.events if what == "backward"]
    if backward and index >= backward[-1]:
        return "before the step"
    return "after the step" if not backward or index < backward[0] else "before the backward pass"


def written_by_itself(recorded: Recorded) -> tuple[str, ...]:
    """Operations outside of the step that mix a weight with itself, or copy almost all of them to where they lie: an average
    that is the network."""
    tape = recorded.tape
    step = next((at for at, what in recorded.events if what == "step"), len(tape.ops))
    found, copied = {}, set()
    lie_there = {op for parameter in recorded.parameters if (op := tape.op_of(parameter)) is not None}
    for op in tape.ops[:step]:
        writes, name = "trained" in op.changes, op.name.rstrip("_")
        is_new = op in lie_there and name in MIXES and tape.is_of_averages(op)  # other ones are the network's
        if not is_new and not (writes and name in {*MIXES, "copy"}):
            continue
        upstream = tape.upstream(op)
        sources = [one for one in upstream if one.is_source]
        mixes = name in MIXES or any(one.name in MIXES for one in upstream)
        twice = sum(last.uses != 0 for _, last in op.reads) > 1
        if mixes and twice and all(one.kind == "trained" or torch.Size(one.shape).numel() == 1 for one in sources):
            if writes or _is_its_weight(tape, op, sources):
                found[op.name] = None
        elif (
            writes and twice and len(sources) == 1 and all(one.is_source or one is op or one.name in SHOWS for one in upstream)
        ):
            copied.add(sources[0])
    is_whole = len(copied) >= ALMOST_ALL * len(recorded.parameters)
    return (*found, *([COPY] if is_whole else []))


def _is_its_weight(tape: Tape, op: Op, sources: list[Op]) -> bool:
    """Whether a new tensor is what the one weight is that it was made of: both shares of an average are its own."""
    weights = [one for one in sources if one.kind == "trained"]
    if len(weights) != 1 or weights[0].shape != op.shape:
        return False
    try:
        made, weight = sample(tape.value(op)), sample(tape.value(weights[0]))
    except NotRecorded:
        return False
    return bool(weight.any()) and bool((made - weight).norm() <= ROUNDING * weight.norm())

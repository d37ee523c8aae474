"""Averages of the weights, by what is written to tensors of their shapes. Figures alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steady_doctor.record.recorded import Recorded
from steady_doctor.record.tape import Write

MOVED = 1e-6  # of a tensor's size: a smaller distance tells no direction
EXACT = 1e-3  # of the distance, that may remain of a straight line between two float32 tensors
ROUNDING = 1e-6  # of a tensor's size
FLOAT32 = 2.0**-24  # of a number
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
        have = [k for k, one in enumerate(before) if one is not None and after[k] is not None]
        missing = tuple(recorded.names[k] for k in range(len(before)) if k not in have and recorded.averaged[k])
        if not have:
            found.append(Named(name, 1.0, 0.0, 0.0, 0.0, missing))
            continue
        vectors = ([one[k] for k in have] for one in (before, after, recorded.at_end))
        old, new, weights = (torch.cat(parts) for parts in vectors)  # type: ignore[arg-type]
        far = old - weights
        keep = float((new - weights) @ far / (far @ far).clamp(min=1e-300))
        rest = float((new - weights - keep * far).norm())
        rounding = 2 * FLOAT32 * float(torch.maximum(old.abs(), weights.abs()).norm())
        found.append(Named(name, keep, rest, float(far.norm()), rounding, missing))
    return found


def identify_averages(recorded: Recorded, loss: set[int]) -> list[Average]:
    """`loss`: the indices of operations that a loss depends on; what is written there is no average, but the network's."""
    last: dict[tuple, Write] = {}
    intervals: dict[tuple, set[int]] = {}
    stepped = next((at for at, what in recorded.events if what == "stepped"), len(recorded.tape.ops))
    for write in recorded.tape.writes:
        if write.place not in loss and write.op.index < stepped:  # what comes later has a name
            place = write.place, write.shape
            last[place] = write
            intervals.setdefault(place, set()).add(_interval(recorded, write.op.index))
    found = []
    for place, write in last.items():
        if (average := _average(recorded, write)) is not None:
            average.times = len(intervals[place])
            found.append(average)
    return found


def _average(recorded: Recorded, write: Write) -> Average | None:
    when = _when(recorded, write.op.index)
    fits = [(k, keep) for k in range(len(recorded.parameters)) if (keep := _keep(recorded, write, k)) is not None]
    if fits:  # what did not change fits each parameter of its shape
        k, keep = min(fits, key=lambda fit: abs(fit[1]) if fit[1] != 1 else 2)
        return Average(k, keep, when, still=torch.equal(write.before, write.after))
    sums = [(k, *both) for k in range(len(recorded.parameters)) if (both := _shares(recorded, write, k)) is not None]
    if sums:
        k, keep, new = sums[0]
        return Average(k, keep, when, keep + new)
    return None


def _keep(recorded: Recorded, write: Write, k: int) -> float | None:
    if recorded.parameters[k].shape != write.shape:
        return None
    parameter = recorded.at_start[k]
    far, now = write.before - parameter, write.after - parameter
    if float(far.norm()) <= MOVED * float(parameter.norm()):
        return None
    keep = float((now @ far) / (far @ far))
    return keep if float((now - keep * far).norm()) <= EXACT * float(far.norm()) else None


def _shares(recorded: Recorded, write: Write, k: int) -> tuple[float, float] | None:
    """The shares of what stood there and of the parameter, where these are all, and not 1 together."""
    if recorded.parameters[k].shape != write.shape or len(write.after) < 4:
        return None
    sides = torch.stack([write.before, recorded.at_start[k]], 1)
    if not bool(torch.isfinite(sides).all()) or not bool(sides.any()):
        return None
    shares = torch.linalg.pinv(sides, rtol=1e-6) @ write.after
    rest = float((sides @ shares - write.after).norm())
    keep, new = shares.tolist()
    is_other = abs(keep + new - 1) > OTHER_SUM and abs(new - 1) > OTHER_SUM  # a sum of all weights is divided later
    is_mixture = keep >= 0 and new > 0  # a difference is on the way to an average
    return (keep, new) if is_other and is_mixture and rest <= ROUNDING * float(write.after.norm()) else None


def _interval(recorded: Recorded, index: int) -> int:
    """The number of backward passes before it."""
    return sum(at <= index for at, what in recorded.events if what == "backward")


def _when(recorded: Recorded, index: int) -> str:
    backward = [at for at, what in recorded.events if what == "backward"]
    if backward and index >= backward[-1]:
        return "before the step"
    return "after the step" if not backward or index < backward[0] else "before the backward pass"


def written_by_itself(recorded: Recorded) -> tuple[str, ...]:
    """Operations outside of the step that mix a weight with itself: an average that is the network."""
    tape = recorded.tape
    step = next((at for at, what in recorded.events if what == "step"), len(tape.ops))
    found = {}
    for op in tape.ops[:step]:
        if "trained" in op.changes and op.name in ("lerp_", "add_", "_foreach_lerp_", "_foreach_add_", "copy_"):
            upstream = tape.upstream(op)
            mixes = op.name != "copy_" or any(one.name in ("lerp", "add", "_foreach_lerp") for one in upstream)
            sources = [one for one in upstream if one.is_source]
            twice = sum(last.uses != 0 for _, last in op.reads) > 1
            if mixes and twice and all(one.kind == "trained" or torch.Size(one.shape).numel() == 1 for one in sources):
                found[op.name] = None
    return tuple(found)


def far(now: Tensor, old: Tensor) -> float:
    return float((now - old).norm() / old.norm().clamp(min=1e-12))

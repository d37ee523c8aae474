"""What one update does around its passes: gradients, the order of events, averages, writes to the weights. Figures alone."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from steady_doctor.record.session import Recorded
from steady_doctor.record.tape import Write

MOVED = 1e-6  # of a tensor's size: a smaller distance tells no direction
EXACT = 1e-3  # of the distance, that may remain of a straight line between two float32 tensors


@dataclass
class Gradient:
    """Of all parameters together, by some numbers of each."""

    passes: int  # backward passes
    left_over: bool = False  # not cleared when the first one began
    cleared_between: bool = False  # what an earlier pass gave was gone before the last one
    ratio: float | None = None  # what the optimizer got = ratio x what the passes gave
    rest: float | None = None  # the share of it that is no multiple
    changed_after_step: tuple[str, ...] = ()  # operations that change it between the step before and the first pass
    without: tuple[int, ...] = ()  # parameters that the losses depend on, and that get none
    unread: tuple[int, ...] = ()  # parameters of the optimizer that no loss depends on
    unowned: int = 0  # parameters that the losses depend on and that want a gradient, which no optimizer has


@dataclass
class Average:
    """A tensor follows a parameter: after = keep x before + (1 - keep) x parameter."""

    parameter: int
    keep: float
    when: str  # "after the step" (of the update before), "before the backward pass" or "before the step"


@dataclass
class Update:
    number: int
    gradient: Gradient
    averages: list[Average] = field(default_factory=list)
    weights_moved: float = 0.0  # outside of the optimizer's step: the distance over the size, of the parameter that moved most
    weights_written_by: tuple[str, ...] = ()


def identify_update(recorded: Recorded) -> Update:
    update = Update(recorded.update, _gradient(recorded), _averages(recorded))
    _weights(recorded, update)
    return update


def _gradient(recorded: Recorded) -> Gradient:
    found = Gradient(len(recorded.before))
    if not recorded.before:
        return found
    found.left_over = any(_is_some(one) for one in recorded.before[0])
    found.cleared_between = any(map(_is_cleared, recorded.after, recorded.before[1:]))
    given = _given(recorded)
    both = [(got, gave) for got, gave in zip(recorded.at_step, given) if got is not None and gave is not None]
    if both:
        got, gave = (torch.cat(one) for one in zip(*both))
        if bool(gave.any()):
            found.ratio = float((got @ gave) / (gave @ gave))
            found.rest = float((got - found.ratio * gave).norm() / got.norm().clamp(min=1e-30))
    first = next(at for at, what in recorded.events if what == "backward")
    changing = (op.name for op in recorded.tape.ops[:first] if "gradient" in op.changes)
    found.changed_after_step = tuple(name for name in changing if name not in ("zero_", "_foreach_zero_"))
    roots = [root for root in recorded.tape.roots if root is not None]
    used = [any(root.uses >> k & 1 for root in roots) for k in range(len(given))]
    wanted = [parameter.requires_grad for parameter in recorded.parameters]
    found.without = tuple(k for k, one in enumerate(given) if used[k] and wanted[k] and not _is_some(one))
    found.unread = tuple(k for k, reads in enumerate(used) if not reads)
    found.unowned = len({op for root in roots for op in recorded.tape.upstream(root) if op.kind == "unowned"})
    return found


def _given(recorded: Recorded) -> list[Tensor | None]:
    """What the backward passes have added to each gradient, in all."""
    given: list[Tensor | None] = [None] * len(recorded.parameters)
    for before, after in zip(recorded.before, recorded.after):
        for k, (old, new) in enumerate(zip(before, after)):
            if new is not None:
                change, so_far = new if old is None else new - old, given[k]
                given[k] = change if so_far is None else so_far + change
    return given


def _is_some(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def _is_cleared(earlier: list[Tensor | None], later: list[Tensor | None]) -> bool:
    """Whether nothing is left of the gradients after one pass when the next one begins."""
    return any(map(_is_some, earlier)) and not any(_is_some(new) for old, new in zip(earlier, later) if _is_some(old))


def _averages(recorded: Recorded) -> list[Average]:
    found = []
    last = {(write.place, write.shape): write for write in recorded.tape.writes}
    for write in last.values():
        fits = [(k, keep) for k in range(len(recorded.parameters)) if (keep := _keep(recorded, write, k)) is not None]
        if fits:  # what did not change fits each parameter of its shape
            found.append(
                Average(*min(fits, key=lambda fit: abs(fit[1]) if fit[1] != 1 else 2), _when(recorded, write.op.index))
            )
    return found


def _keep(recorded: Recorded, write: Write, k: int) -> float | None:
    if recorded.parameters[k].shape != write.shape:
        return None
    parameter = recorded.at_start[k]
    far, now = write.before - parameter, write.after - parameter
    if float(far.norm()) <= MOVED * float(parameter.norm()):
        return None
    keep = float((now @ far) / (far @ far))
    return keep if float((now - keep * far).norm()) <= EXACT * float(far.norm()) else None


def _when(recorded: Recorded, index: int) -> str:
    backward = [at for at, what in recorded.events if what == "backward"]
    if backward and index >= backward[-1]:
        return "before the step"
    return "after the step" if not backward or index < backward[0] else "before the backward pass"


def _weights(recorded: Recorded, update: Update) -> None:
    """What changed the weights outside of the step."""
    step = next((at for at, what in recorded.events if what == "step"), len(recorded.tape.ops))
    at_step = recorded.weights[-2] if len(recorded.weights) > 1 else recorded.at_start
    moved = [float((now - old).norm() / old.norm().clamp(min=1e-12)) for old, now in zip(recorded.at_start, at_step)]
    update.weights_moved = max(moved, default=0.0)
    writers = (op.name for op in recorded.tape.ops[:step] if "trained" in op.changes)
    update.weights_written_by = tuple(dict.fromkeys(writers))

"""What became of the gradients between the first backward pass of an update and the first one of the next. Figures alone."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steady_doctor.record.ops import REPLACES, Op
from steady_doctor.record.recorded import Recorded
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.samples import Samples

SCALES = {"mul_", "div_", "_foreach_mul_", "_foreach_div_", "clamp_", "clamp_min_", "clamp_max_"}
SCALES |= {"_foreach_clamp_min_", "_foreach_clamp_max_"}
UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
TINY = 1e-9  # of a gradient: a part of it that is no more is rounding
SEEN = 1e-3  # of a gradient: smaller parts are sums that cancel, such as those of biases before a normalization
LAYERS = 4  # whose gradients are never all of one sign
SAME = 1e-4  # of a gradient, that rounding may change


@dataclass
class Gradient:
    """Of all parameters together, by some numbers of each. Tuples of numbers are parameters, by their place."""

    passes: int  # backward passes
    at_one_place: bool = True  # the weights were the same in all of them
    left_over: bool = False  # what the optimizer got has that of the update before in it
    cleared_between: bool = False  # what an earlier pass gave was gone before the last one
    cleared_at_step: bool = False  # nothing that the passes gave was left
    cleared_parts: tuple[int, ...] = ()  # nothing was left of these, and of others all
    ratio: float | None = None  # what the optimizer got = ratio x what the passes gave
    rest: float | None = None  # the share of it that is no multiple
    uneven: float = 0.0  # the largest such share of one parameter
    changed_between: tuple[str, ...] = ()  # operations that scale it between two passes
    changed_scaled: tuple[str, ...] = ()  # and before a loss scale is taken off
    changed_after_step: tuple[str, ...] = ()  # operations that change it between the step before and the first pass
    unscaled: bool = False  # a loss scale was taken off
    without: tuple[int, ...] = ()  # parameters that the losses depend on, and that get none
    zero: tuple[int, ...] = ()  # those of which each number is zero at the step, or that have none
    unread: tuple[int, ...] = ()  # parameters of the optimizer that no loss depends on
    unused: tuple[int, ...] = ()  # those of them that no operation meets data with, as of a head that is switched off
    copies: int = 0  # of these, those that get a gradient from elsewhere
    parameters: int = 0  # of the optimizer
    wanted: int = 0  # of these, those that want a gradient; one of one number, or none, may tell a module's code of its device
    unowned: int = 0  # parameters that get a gradient, which no optimizer has
    by_hand: bool = False  # what the optimizer got is not from the passes
    off_slope: float | None = None  # by how much of its own a parameter's gradient is not the slope of the loss
    norm: float = 0.0  # at the step
    finite: bool = True
    left_to_optimizer: bool = False  # which leaves out a step by itself where they are not finite, as a GradScaler told it
    small: float | None = None  # the share of its numbers, other than 0, that are below Adam's epsilon
    cut: tuple[float, float] | None = None  # (the end that many numbers have, the other end)
    missed: bool = False  # the script clips gradients of parameters that have none, and no others


def identify_gradient(recorded: Recorded) -> Gradient:
    whole = recorded.gradients
    found = Gradient(len(recorded.before), norm=whole.norm, finite=whole.finite, unowned=recorded.unowned)
    found.left_to_optimizer = recorded.left_to_optimizer
    found.parameters = len(recorded.parameters)
    degrading = _degrading(recorded)
    wants = [
        parameter.requires_grad and parameter.numel() > 1 and not degrading >> k & 1
        for k, parameter in enumerate(recorded.computing)
    ]
    found.wanted = sum(wants)
    found.missed = bool(recorded.clips) and not any(recorded.clips)
    found.cut = _cut(recorded)
    found.small = _small(recorded)
    if not recorded.before:
        return found
    given, was_given = _given(recorded)
    gave_some = given.any(1)
    found.left_over = bool((gave_some & torch.stack([one.some for one in recorded.before]).all(0)).any())
    _at_step(recorded, given, was_given, found)
    found.left_over |= _holds_what_stood(recorded, given)
    found.at_one_place = all(torch.equal(one.rows, recorded.weights[0].rows) for one in recorded.weights[: found.passes])
    has_all = found.rest is not None and found.rest < SAME  # added up elsewhere, and laid beside the weights again
    found.cleared_between = found.at_one_place and not has_all and (_cleared_between(recorded) or _last_alone(recorded, found))
    _operations(recorded, found)
    is_whole = all(recorded.roots)  # of many micro steps the first ones alone are recorded
    if recorded.kept and is_whole and not (dist.is_available() and dist.is_initialized()):
        found.off_slope = _off_slope(recorded, given, was_given)
    _by_parameter(recorded, found, wants, was_given, gave_some)
    found.by_hand = whole.norm > 0 and not bool(gave_some.any())
    return found


def _by_parameter(recorded: Recorded, found: Gradient, wants: list[bool], was_given: Tensor, gave_some: Tensor) -> None:
    """Which parameters have no gradient, or none but 0, and which of them no loss depends on."""
    roots = [root for roots in recorded.roots for root in roots]
    used = [any(root.uses >> k & 1 for root in roots) for k in range(len(wants))]
    trains = [reads and wanted for reads, wanted in zip(used, wants)]
    missing = (~recorded.at_step.there & ~was_given).tolist()
    found.without = tuple(k for k, is_missing in enumerate(missing) if trains[k] and is_missing)
    may_be_chosen, in_layers = _in_the_place_of_others(recorded), _in_layers(recorded)
    found.zero = tuple(
        k
        for k, some in enumerate(gave_some.tolist())
        if recorded.gradients.zero[k] and trains[k] and not some and in_layers & ~may_be_chosen & 1 << k
    )
    found.unread = tuple(k for k, reads in enumerate(used) if not reads and wants[k])
    found.unused = _unused(recorded, found.unread, max((root.index for root in roots), default=0))
    found.copies = sum(bool(recorded.at_step.some[k]) for k in found.unread)


def _degrading(recorded: Recorded) -> int:
    """Bits of the parameters that only change images, to others of as many channels, before anything is differentiated: those
    of a blur that the network is to undo."""
    degrading = otherwise = 0
    for op in recorded.tape.ops:
        if op.meets and op.kind == "op":
            own = [last for _, last in op.reads if last.kind == "trained"]
            images = [last for _, last in op.reads if last.content and not last.uses & ~degrading]
            changes = not op.with_grad and len(op.shape) > 2 and any(last.shape[:2] == op.shape[:2] for last in images)
            for last in own:
                degrading, otherwise = (degrading | last.uses, otherwise) if changes else (degrading, otherwise | last.uses)
    return degrading & ~otherwise


def _in_layers(recorded: Recorded) -> int:
    """Bits of the parameters that meet data; others may be in a loss alone, times 0, so that each process has a gradient."""
    bits = 0
    for op in recorded.tape.ops:
        bits |= op.uses if op.content and op.shape else 0
    return bits


def _in_the_place_of_others(recorded: Recorded) -> int:
    """Bits of the parameters that only take the place of chosen values, as of a condition that is dropped: they get a gradient
    where that happens."""
    replacing = otherwise = 0
    for op in recorded.tape.ops:
        if op.meets:
            alone = [last.uses for _, last in op.reads if not last.content]
            for uses in alone:
                replacing, otherwise = (replacing | uses, otherwise) if op.name in REPLACES else (replacing, otherwise | uses)
    return replacing & ~otherwise


def _unused(recorded: Recorded, unread: tuple[int, ...], last: int) -> tuple[int, ...]:
    """Those of the parameters that no operation before the `last` loss meets data with, or only for what the network gives and
    the script leaves: a second head."""
    tape, used = recorded.tape, 0
    for op in tape.ops[:last] if unread else ():
        if op.uses and op.content and not tape.is_of_averages(op):
            used |= op.uses
    used &= ~recorded.returned
    return tuple(k for k in unread if not used >> k & 1)


def _off_slope(recorded: Recorded, given: Tensor, was_given: Tensor) -> float | None:
    """The losses are computed once more from the weights as they were, and differentiated: also through what the script has
    taken the gradient off, and without anything that changes it on its way."""
    tape = recorded.tape
    leaves = [weight.requires_grad_(parameter.requires_grad) for weight, parameter in zip(recorded.kept, recorded.parameters)]
    roots = [root for roots in recorded.roots for root in roots]
    known = {op.index: op for root in roots for op in tape.upstream(root) if op.kind == "trained"}.values()
    try:
        with torch.enable_grad():
            instead = {op: leaves[op.uses.bit_length() - 1] * 1 for op in known}
            losses = [tape.value(root, instead, grad=True, anew=True, through=True).sum() for root in roots]
            used = [leaf for leaf in leaves if leaf.requires_grad]
            slopes = iter(torch.autograd.grad(torch.stack(losses).sum(), used, allow_unused=True))
    except (NotRecorded, RuntimeError, MemoryError):  # dropout, or an operation without a derivative
        return None
    slope = Samples([next(slopes) if leaf.requires_grad else None for leaf in leaves])
    size = SEEN * float(slope.flat.norm())
    off = (given - slope.rows).norm(dim=1) / slope.rows.norm(dim=1).clamp(min=max(size, 1e-30))
    return float(off[slope.there].max()) if bool(slope.there.any()) else None


def _at_step(recorded: Recorded, given: Tensor, was_given: Tensor, found: Gradient) -> None:
    """What the optimizer got beside what the passes gave."""
    some = given.any(1)
    gone = some & ~recorded.at_step.some
    is_zero = all(zero for zero, is_gone in zip(recorded.gradients.zero, gone.tolist()) if is_gone)
    found.cleared_at_step = bool(some.any()) and torch.equal(gone, some) and is_zero
    both = recorded.at_step.there & was_given & ~gone
    got, gave = recorded.at_step.rows[both], given[both]
    if bool(gave.any()) and bool(torch.isfinite(got).all()) and bool(torch.isfinite(gave).all()):
        found.ratio = float((got * gave).sum() / gave.square().sum())
        found.rest = float((got - found.ratio * gave).norm() / got.norm().clamp(min=1e-30))
        clear = gave.norm(dim=1) > TINY * float(gave.norm())
        parts = found.ratio * gave[clear]
        uneven = (got[clear] - parts).norm(dim=1) / parts.norm(dim=1)
        found.uneven = float(uneven.max()) if found.ratio and len(uneven) else 0.0
        if found.rest < SAME and is_zero:
            found.cleared_parts = tuple(torch.nonzero(gone).flatten().tolist())


def _holds_what_stood(recorded: Recorded, given: Tensor) -> bool:
    """Whether the optimizer got the sum of what the passes gave, and of what stood at the parameters before; not where it may
    as well have got a multiple of the former alone."""
    got, stood = recorded.at_step.rows, recorded.stood.rows
    share = (got * given).sum() / given.square().sum().clamp(min=1e-30)
    is_its_own = bool((got - share * given).norm() < SEEN * got.norm())
    return not is_its_own and bool((got - given - stood).norm() < SAME * got.norm())


def _last_alone(recorded: Recorded, found: Gradient) -> bool:
    """Whether the optimizer got what the last one of several passes gave, and not what all did."""
    got, last = recorded.at_step.rows, recorded.after[-1].rows - recorded.before[-1].rows
    if found.passes < 2 or found.rest is None or found.rest < SEEN or not bool(last.any()) or not bool(got.any()):
        return False
    share = (got * last).sum() / last.square().sum()
    return bool((got - share * last).norm() < SAME * got.norm())


def _cleared_between(recorded: Recorded) -> bool:
    """Whether a later pass of the same kind began when nothing was left of an earlier one, of some parameter."""
    kinds = [_kind(recorded, roots) for roots in recorded.roots]
    if not all(bool(torch.isfinite(after.flat).all()) for after in recorded.after):
        return False  # a pass that a GradScaler leaves out
    for i, after in enumerate(recorded.after[:-1]):
        later = [before.some for before, kind in zip(recorded.before[i + 1 :], kinds[i + 1 :]) if kind == kinds[i]]
        if later and bool((after.some & ~torch.stack(later).any(0)).any()):
            return True
    return False


def _kind(recorded: Recorded, roots: list[Op]) -> tuple[int, int]:
    """Which parameters the losses depend on: the watched ones, and how many others."""
    uses = 0
    for root in roots:
        uses |= root.uses
    return uses, len({op for root in roots for op in recorded.tape.upstream(root) if op.kind == "unowned"})


def _operations(recorded: Recorded, found: Gradient) -> None:
    """Which operations change the gradients, and when."""
    passes = [at for at, what in recorded.events if what == "backward"]
    ops = recorded.tape.ops
    changing = [op for op in ops if "gradient" in op.changes and op.name in SCALES]
    unscaling = [op.index for op in ops if op.name == UNSCALES]
    found.unscaled = bool(unscaling)
    found.changed_after_step = _names(changing, 0, passes[0])
    found.changed_between = _names(changing, passes[0], passes[-1])
    if unscaling:
        found.changed_scaled = _names(changing, passes[-1], unscaling[0])


def _names(ops: list[Op], begin: int, end: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(op.name for op in ops if begin <= op.index < end))


def _cut(recorded: Recorded) -> tuple[float, float] | None:
    """Whether many numbers of the gradient are the very largest one, or the smallest."""
    whole = recorded.gradients
    layers = sum(not is_zero for is_zero in whole.zero)
    if layers >= LAYERS and (whole.ends[0] >= 0) != (whole.ends[1] <= 0):  # none is of the other sign
        return whole.ends if whole.ends[0] >= 0 else whole.ends[::-1]
    many = [bool(end) and at >= max(16, 1e-3 * whole.count) for end, at in zip(whole.ends, whole.at_ends)]
    if many[0] == many[1]:
        return None
    at, other = whole.ends if many[0] else whole.ends[::-1]
    return (at, other) if abs(other) > 1.01 * abs(at) else None


def _small(recorded: Recorded) -> float | None:
    epsilons: list[Any] = [group.get("eps") for group in recorded.optimizer.param_groups if "betas" in group]
    if not epsilons or not all(isinstance(epsilon, (float, int)) for epsilon in epsilons):
        return None
    numbers = recorded.at_step.flat.abs()
    numbers = numbers[numbers > 0]
    return float((numbers < min(epsilons)).double().mean()) if len(numbers) else None


def _given(recorded: Recorded) -> tuple[Tensor, Tensor]:
    """Returns what the backward passes have added to each gradient, in all, [P, N]; and whether any pass did, bool [P]."""
    given, was_given = torch.zeros_like(recorded.at_start.rows), torch.zeros(len(recorded.parameters), dtype=torch.bool)
    for before, after in zip(recorded.before, recorded.after):
        is_new = after.there & (~before.there | (before.rows != after.rows).any(1))
        given = torch.where(is_new[:, None], given + (after.rows - before.rows), given)
        was_given |= is_new
    return given, was_given

"""Whether the optimizer gets what the backward passes of its update gave: all of it, nothing else, at most clipped."""

from collections.abc import Iterator

from steady_doctor.found import Found
from steady_doctor.identify.update import Update
from steady_doctor.laws.learning_rate import STEP
from steady_doctor.seen import Seen

SETTLED = 8  # updates after which layers that begin at zero have let gradients through
MOSTLY = 0.9  # of the gradient's numbers
LEAST = 3  # recorded updates that agree, where one may be chance
HALVED = 24  # steps in a row that are left out: the usual first scale of a loss is 2^16
TINY = 0.01  # of the gradient, and its norm, that clipping leaves
SAME = 1e-3  # of a gradient
FEW = 0.1  # of the parameters
USUAL = 1e-6  # epsilons of Adam are below it


def left_over(seen: Seen) -> Iterator[Found]:
    for update in seen.recorded():
        if update.gradient.left_over:
            yield Found("gradient-left-over", update.number)


def cleared(seen: Seen) -> Iterator[Found]:
    """Gradients are cleared once in each update: after the step, or before the first pass."""
    for update in seen.recorded():
        gradient = update.gradient
        if gradient.cleared_at_step:
            yield Found("gradient-cleared-before-step", update.number)
        elif gradient.cleared_between and gradient.passes > 1:
            yield Found("gradient-cleared-between", update.number, {"passes": gradient.passes})
        if gradient.cleared_parts:
            yield Found("gradient-partly-cleared", update.number, _of(gradient.cleared_parts, gradient.parameters))


def clipped(seen: Seen) -> Iterator[Found]:
    """Clipping comes between the last pass and the step, after a loss scale was taken off."""
    for update in seen.recorded():
        gradient = update.gradient
        if gradient.changed_between and gradient.passes > 1:
            yield Found("gradient-clipped-early", update.number, {"passes": gradient.passes, "by": gradient.changed_between})
        if gradient.changed_scaled:
            yield Found("gradient-clipped-scaled", update.number, {"by": gradient.changed_scaled})
        if gradient.changed_after_step:
            yield Found("gradient-clipped-late", update.number, {"by": gradient.changed_after_step})
        if gradient.missed and gradient.norm > 0:
            yield Found("gradient-clipped-others", update.number)
        if gradient.cut is not None and (gradient.cut[0] or _always_cut(seen)):
            yield Found("gradient-cut-on-one-side", update.number, {"at": gradient.cut[0], "other": gradient.cut[1]})


def _always_cut(seen: Seen) -> bool:
    """Cut at 0, which may be chance in one update."""
    cuts = [update.gradient.cut for update in seen.recorded()]
    return len(cuts) >= LEAST and all(cut is not None and not cut[0] for cut in cuts)


def sign(seen: Seen) -> Iterator[Found]:
    for update in seen.recorded():
        gradient = update.gradient
        if gradient.ratio is not None and gradient.ratio < 0 and gradient.rest is not None and gradient.rest < SAME:
            yield Found("gradient-reversed", update.number, {"ratio": gradient.ratio})


def small(seen: Seen) -> Iterator[Found]:
    """So small that Adam's epsilon decides, or almost nothing of what was given."""
    default = [update for update in seen.recorded(3) if update.gradient.small is not None and _epsilon(update) < USUAL]
    if len(default) > 1 and all((update.gradient.small or 0.0) > MOSTLY for update in default):
        yield Found("gradient-below-epsilon", default[0].number, _small(default[0]))
    left = [u for u in seen.recorded() if u.gradient.ratio is not None and not u.gradient.unscaled]
    if len(left) >= LEAST and all(0 < (u.gradient.ratio or 0.0) < TINY and u.gradient.norm < TINY for u in left):
        yield Found("gradient-clipped-away", left[0].number, {"ratio": left[0].gradient.ratio, "norm": left[0].gradient.norm})


def _epsilon(update: Update) -> float:
    settings = [] if update.optimized is None else update.optimized.settings
    found = [group["eps"] for group in settings if isinstance(group.get("eps"), (float, int))]
    return min(found, default=1.0)


def _small(update: Update) -> dict[str, float | None]:
    return {"share": update.gradient.small, "epsilon": _epsilon(update)}


def missing(seen: Seen) -> Iterator[Found]:
    """Parameters that the losses depend on and that get no gradient."""
    known = seen.recorded(3)
    if len(known) < 2 or any(update.gradient.by_hand for update in known):
        return
    gradients = [update.gradient for update in known]
    if all(one.passes and one.wanted and len(one.zero) == one.wanted and not one.cleared_at_step for one in gradients):
        yield Found("gradient-zero", known[0].number)
        return
    if not any(gradient.norm > 0 for gradient in gradients):
        return
    never = set.intersection(*(set(gradient.without) for gradient in gradients))
    late = [update.gradient for update in seen.recorded(SETTLED)]
    zero = set.intersection(*(set(gradient.zero) for gradient in late)) if len(late) > 1 else set()
    if len(zero) < FEW * gradients[0].parameters:  # what these give may be cut off, as the text's part of the last block is
        zero = set()
    if never | zero:
        yield Found("gradient-missing", known[0].number, _of(tuple(sorted(never | zero)), gradients[0].parameters))


def unread(seen: Seen) -> Iterator[Found]:
    """Parameters of the optimizer that none of the losses depends on."""
    known = [update.gradient for update in seen.recorded()]
    if len(known) < LEAST or any(gradient.by_hand or not gradient.passes for gradient in known):
        return
    read = set.intersection(*({*one.unread} - {*one.unused} for one in known))
    unused = set.intersection(*({*one.unused} for one in known))
    if len(read) < FEW * known[0].parameters:  # the last of equal blocks may have a branch that nothing follows
        read, unused = set(), unused | read
    if read and len(read) < known[0].parameters:
        yield Found("gradient-unread", seen.recorded()[0].number, _of(tuple(sorted(read)), known[0].parameters))
    if unused and len(unused) < known[0].parameters:
        yield Found("gradient-unused", seen.recorded()[0].number, _of(tuple(sorted(unused)), known[0].parameters))


def finite(seen: Seen) -> Iterator[Found]:
    for update in seen.recorded():
        if update.optimized is not None and update.optimized.size > STEP:
            return  # steps that are too large come first
        if not update.gradient.finite and not update.gradient.left_to_optimizer:
            yield Found("gradient-not-finite", update.number)


def left_out(seen: Seen) -> Iterator[Found]:
    """Steps that a GradScaler leaves out, until its scale no longer explains it; also where none was made at all."""
    steps, broken = seen.history.left_out
    if broken >= LEAST:
        yield Found("network-not-finite", seen.updates + 1, {"updates": broken, "of": steps})
    elif steps >= HALVED:
        yield Found("gradient-not-finite", seen.updates + 1)


def none(seen: Seen) -> Iterator[Found]:
    """No pass gives a gradient to anything that an optimizer has, or could have."""
    known = seen.recorded()
    nothing = [u.gradient.passes > 0 and u.gradient.norm == 0 and u.gradient.unowned == 0 for u in known]
    if len(known) > 1 and all(nothing) and all(len(u.gradient.unread) == u.gradient.wanted for u in known):
        yield Found("gradient-none", known[0].number)


def micro_steps(seen: Seen) -> Iterator[Found]:
    """What Accelerate was told beside the passes of each update."""
    told, known = seen.history.accumulation, [u.gradient.passes for u in seen.recorded()]
    if told is not None and told > 1 and len(known) >= LEAST and max(known) == 1:
        yield Found("gradient-not-accumulated", seen.recorded()[0].number, {"told": told})


def _of(which: tuple[int, ...], of: int) -> dict[str, int]:
    return {"count": len(which), "of": of, "first": which[0]}


LAWS = (finite, left_out, left_over, cleared, clipped, sign, small, none, missing, unread, micro_steps)

"""Of a script that declares what its updates are: gradients, the optimizer, averages and the network beside that."""

from collections.abc import Iterator

import torch

from steady_doctor.declare.declaration import Declaration
from steady_doctor.found import Found
from steady_doctor.identify.step import Step
from steady_doctor.identify.update import ToldUpdate
from steady_doctor.seen import Seen

SMALL = 1e-3  # of what no training would feel
ROUNDED = 1e-6  # of a number that float32 keeps
OF_PASSES = 1e-4  # of a gradient, that rounding may change
OF_PARAMETER = 2e-3  # of that of one parameter, which may be small beside what it is added to
UNIT = 1e-3  # of the root mean square of a row
IN_ROWS = 1e-4  # of the size of weights, that making rows longer leaves by rounding


def _told(seen: Seen) -> Iterator[tuple[Step, ToldUpdate, Declaration]]:
    if seen.declared is not None:
        for step in seen.steps:
            if step.update.told is not None:
                yield step, step.update.told, seen.declared


def passes(seen: Seen) -> Iterator[Found]:
    for step, _, declared in _told(seen):
        if step.update.gradient.passes != declared.micro_steps:
            figures = {"passes": step.update.gradient.passes, "declared": declared.micro_steps}
            yield Found("gradient-passes", step.update.number, figures)


def clipped(seen: Seen) -> Iterator[Found]:
    """One factor for the whole gradient: the limit over its norm, at most 1."""
    for step, told, _ in _told(seen):
        gradient, update = step.update.gradient, step.update.number
        taken, limit = told.limit_taken, told.limit
        if taken is not None and limit is not None and not abs(taken - limit) <= SMALL * limit:
            yield Found("gradient-limit", update, {"taken": taken, "limit": limit})
        if gradient.ratio is None or not gradient.finite or gradient.norm == 0:
            continue
        ratio = gradient.ratio * step.loss_scale
        if gradient.rest is not None and (gradient.rest > OF_PASSES or gradient.uneven > OF_PARAMETER):
            yield Found("gradient-not-of-passes", update, {"rest": max(gradient.rest, gradient.uneven)})
            continue
        before = gradient.norm / abs(ratio) if ratio else 0.0
        expected = min(1.0, told.limit / (before + 1e-6)) if told.limit else 1.0
        if told.limit is not None and abs(ratio / expected - 1) > SMALL:
            yield Found("gradient-not-clipped-so", update, {"ratio": ratio, "norm": before, "limit": told.limit})
        elif told.norm is not None and before and abs(told.norm / before - 1) > SMALL:
            yield Found("gradient-norm", update, {"told": told.norm, "norm": before})


def slope(seen: Seen) -> Iterator[Found]:
    """The gradient is the slope of the loss."""
    for step, _, _ in _told(seen):
        layers = [dtype for one in step.passes if one.drawn is not None for dtype in one.drawn.layers]
        half = max((float(torch.finfo(dtype).eps) for dtype in layers), default=0.0)
        off = step.update.gradient.off_slope
        if off is not None and off > max(OF_PARAMETER, 16 * half):
            yield Found("gradient-not-slope", step.update.number, {"off": off})


def penalty(seen: Seen) -> Iterator[Found]:
    """What the loss depends on beside the network's output: an L1 penalty of matrices and kernels, where it is declared."""
    for step, _, declared in _told(seen):
        slopes = [one.drawn.penalty for one in step.passes if one.drawn is not None and one.drawn.penalty is not None]
        for found in slopes:
            got = {k for k, slope in found.items() if bool(slope.any())}
            wanted = {k for k, is_matrix in enumerate(step.matrices) if is_matrix and declared.l1_weight}
            size = declared.l1_weight / declared.micro_steps
            others = sorted(got ^ wanted)
            off = [k for k in got & wanted if abs(float(found[k].abs().max()) / size - 1) > SMALL]
            if others or off:
                yield Found("gradient-penalty", step.update.number, {"count": len(others) + len(off), "factor": size})


def optimizer(seen: Seen) -> Iterator[Found]:
    """torch's class, its settings, and one step of its formula."""
    for step, told, declared in _told(seen):
        optimized, update, wanted = step.update.optimized, step.update.number, declared.optimizer
        missing = [name for name, group in zip(told.trained, told.in_groups) if group < 0]
        if missing:
            figures = {"count": len(missing), "of": len(told.trained), "first": missing[0]}
            yield Found("optimizer-parameters", update, figures)
        if wanted is None or optimized is None:
            continue
        if optimized.kind != wanted.kind:
            yield Found("optimizer-kind", update, {"kind": optimized.kind, "declared": wanted.kind})
            continue
        for group in optimized.settings:
            for name, value in wanted.settings.items():
                if name in group and not _same(group[name], value):
                    yield Found("optimizer-setting", update, {"name": name, "found": group[name], "declared": value})
        for name, place, is_matrix in zip(told.trained, told.in_groups, told.matrices):
            expected = wanted.weight_decay if is_matrix else 0.0
            if place >= 0 and (decay := optimized.settings[place].get("weight_decay", 0.0)) != expected:
                yield Found("optimizer-weight-decay", update, {"found": decay, "declared": expected, "first": name})
                break
        if optimized.off is not None and optimized.off > SMALL:
            yield Found("optimizer-formula", update, {"off": optimized.off, "kind": optimized.kind})


def _same(one: object, other: object) -> bool:
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)) and not isinstance(one, bool):
        return abs(one - other) <= ROUNDED * abs(other)
    return one == other


def counted(seen: Seen) -> Iterator[Found]:
    """One step in each update, which the optimizer counts; none is counted where an update was turned down."""
    before: tuple[int, int, int] | None = None
    for step, _, _ in _told(seen):
        optimized, number = step.update.optimized, step.update.number
        if optimized is None or not optimized.counted:
            continue
        counts = optimized.counted[0], optimized.counted[-1]
        made = number - 1 - step.turned_down
        if counts[0] != counts[1] or counts[1] > made or (before and counts[1] - before[1] != made - before[2]):
            yield Found("optimizer-count", number, {"low": counts[0], "high": counts[1], "made": made})
            return
        before = number, counts[1], made


def rate(seen: Seen) -> Iterator[Found]:
    """Of every update."""
    if seen.declared is None:
        return
    for update, rates in seen.history.rates:
        wanted = seen.declared.learning_rate(update)
        off = [one for one in rates if not abs(one - wanted) <= ROUNDED * abs(wanted) + 1e-15]
        if off:
            yield Found("rate-not-declared", update, {"rate": off[0], "declared": wanted, "groups": len(off), "of": len(rates)})
            return


def averages(seen: Seen) -> Iterator[Found]:
    for step, _, declared in _told(seen):
        known = {average.name: average for average in step.update.named}
        for name, decay_at in declared.averages.items():
            average, decay = known.get(name), decay_at(step.update.number)
            if average is None:
                yield Found("ema-none", step.update.number, {"name": name})
                continue
            if average.missing:
                figures = {"name": name, "count": len(average.missing), "first": average.missing[0]}
                yield Found("ema-lacks", step.update.number, figures)
            moves = (1 - decay) * average.gap
            if moves >= 4 * average.rounding and average.off(decay) > 2 * average.rounding + SMALL * moves:
                figures = {"name": name, "keep": average.keep, "decay": decay, "rest": average.rest / max(average.gap, 1e-30)}
                yield Found("ema-not-declared", step.update.number, figures)


def followed(seen: Seen) -> Iterator[Found]:
    """A few numbers of weights and averages, in every update."""
    if seen.followed is None:
        return
    for updates, changed in seen.followed.changed:
        if changed:
            yield Found("state-changed-between", seen.updates, {"count": changed, "of": updates})
            break
    if seen.followed.off:
        name, updates, off = seen.followed.off[0]
        yield Found("ema-not-followed", seen.updates, {"name": name, "updates": updates, "off": off})
    if seen.followed.moved:
        name, off = seen.followed.moved[0]
        yield Found("ema-changed-between", seen.updates, {"name": name, "off": off})


def weights(seen: Seen) -> Iterator[Found]:
    """Changed by the step alone, and by the lengths of rows where these are declared."""
    for step, told, declared in _told(seen):
        update = step.update.number
        after = told.after_step_in_rows if declared.normalized else told.after_step
        parts = ("before the first backward pass", "between the backward pass and the step", "after the step")
        for when, moved, by in zip(parts, (told.before_pass, told.before_step, after), told.written):
            is_normalized = declared.normalized and when == parts[-1]  # which writes to all matrices
            if moved > (IN_ROWS if is_normalized else 0.0) or (by and not is_normalized):
                figures = {"when": when, "moved": moved, "by": by or ("no operation that was seen",)}
                yield Found("state-changed-in-update", update, figures)
        if declared.normalized and told.rows > UNIT:
            yield Found("optimizer-not-normalized", update, {"off": told.rows})


def network(seen: Seen) -> Iterator[Found]:
    for step, told, declared in _told(seen):
        update = step.update.number
        frozen = [name for name in told.frozen if declared.trained(name)]
        others = [name for name in told.trained if not declared.trained(name)]
        if frozen or others:
            figures = {"frozen": len(frozen), "others": len(others), "first": (frozen or others)[0]}
            yield Found("network-trained", update, figures)
        if declared.dropout is not None and told.dropout != declared.dropout:
            yield Found("network-dropout", update, {"found": told.dropout, "declared": declared.dropout})
        if not told.training:
            yield Found("network-mode", update)
        if any(dtype != torch.float32 for dtype in told.dtypes):
            yield Found("network-weights-precision", update, {"found": str(told.dtypes[0])})
        drawn = [one.drawn for one in step.passes if one.drawn is not None]
        off = {("convolutions", dtype) for one in drawn for dtype in one.layers if dtype != declared.layers}
        off |= {("matrix products", dtype) for one in drawn for dtype in one.products if _is_coarser(dtype, declared.layers)}
        if off:
            what, dtype = min(off, key=str)
            yield Found(
                "network-layers-precision", update, {"what": what, "found": str(dtype), "declared": str(declared.layers)}
            )


def _is_coarser(dtype: torch.dtype, declared: torch.dtype) -> bool:
    """Linear layers and attention may be kept in a finer precision than convolutions on purpose, and in no other one."""
    return dtype != declared and dtype.is_floating_point and dtype.itemsize <= declared.itemsize


def dropout(seen: Seen) -> Iterator[Found]:
    """Drawn anew in each pass."""
    if seen.declared is None or not seen.declared.dropout:
        return
    states = [one.drawn.generator for _, one in seen.passes() if one.drawn is not None]
    if len(states) > 1 and len(set(states)) < len(states):
        yield Found("network-same-dropout", seen.updates, {"different": len(set(states)), "count": len(states)})


LAWS = (network, dropout, passes, slope, clipped, penalty, optimizer, counted, rate, weights, averages, followed)

"""What the networks are given beside the noised image and its level: labels, texts, hints, masks."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steady_doctor.identify.mixed import Mixture
from steady_doctor.identify.rows import alike, differ, is_value, origins, with_a_row_each, without
from steady_doctor.record.ops import REPLACES, Op
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.tape import Tape

MOST_CLASSES = 4096


@dataclass
class Condition:
    """One value with a row for each image. Tensors have B rows."""

    shape: tuple[int, ...]
    by_layer: bool  # it meets parameters, and not what a layer made
    rows: Tensor  # float64 [B, 2]: two sums of each row, by which rows are told apart
    largest: float  # of its absolute values
    floating: bool
    varies: bool  # it is made of values that differ between the images of this batch
    labels: Tensor | None = None  # int64: of whole numbers, or of rows of 0 and one other number (-1: of 0 alone)
    dropped: Tensor | None = None  # bool: rows that do not depend on what they are made of, and are one and the same
    own: Tensor | None = None  # the row of the batch that each row comes from; negative: not known
    images: Tensor | None = None  # the row that its image comes from, counted alike
    ignored: bool = False  # the parameters that read it get a gradient of exactly 0
    joined: bool = False  # it is joined to the noised image as further channels
    is_clean: bool = False  # it is the image that the noise is added to


@dataclass
class Conditions:
    given: list[Condition] = field(default_factory=list)
    not_recorded: int = 0  # values beside these that cannot be computed again
    level_ignored: bool = False  # all parameters that read the noise level alone get a gradient of exactly 0
    dropped_in_vain: int = 0  # labels of which a part was replaced by chance in a tensor that nothing reads


def find_conditions(tape: Tape, root: Op, mixture: Mixture, output: Op | None, without_gradient: int) -> Conditions:
    """`without_gradient`: the bits of the trained parameters whose gradient is exactly 0."""
    found, made_of = Conditions(), []
    barred = mixture.noise.content
    for source in mixture.levels:
        barred |= 1 << source.index
    of_image = set(tape.upstream(mixture.input))
    values: dict[Op, tuple[list[Op], bool]] = {}  # what reads each, and whether it is joined to the mixture
    end = output if output is not None else root
    before = _own_answer(tape, end, mixture)
    for at, value in _met(tape, end, by_layers_alone=output is None):
        if at.index <= before:
            continue
        value = with_a_row_each(value, {mixture.size})
        if value not in of_image:
            values.setdefault(value, ([], False))[0].append(at)
    for value in [] if before else _joined(tape, mixture):
        values.setdefault(value, ([], True))
    for value, (readers, joined) in values.items():
        if (value.content | value.choice) & barred or value.shape[:1] != (mixture.size,) or not _of_data(tape, value):
            continue
        try:
            condition = _condition(tape, value, mixture)
            if _are_others(condition) and not _keeps_rows(tape, value, end):
                condition.own = condition.images = None
        except NotRecorded:
            found.not_recorded += 1
            continue
        condition.joined = joined
        condition.by_layer = joined or any(at.meets for at in readers)
        condition.ignored = bool(readers) and all(_gets_none(tape, at, without_gradient) for at in readers)
        found.given.append(condition)
        made_of.append(value.content)
    _keep_least_dropped(found.given, made_of)
    for value in _unused(tape, root, end, mixture):
        with suppress(NotRecorded):
            found.given.append(_condition(tape, value, mixture, unused=True))
    levels = sum(1 << source.index for source in mixture.levels)
    met = _met(tape, end, by_layers_alone=True)
    readers = [at for at, value in met if (value.content | value.choice) & levels and not value.content & mixture.noise.content]
    found.level_ignored = bool(readers) and all(_gets_none(tape, at, without_gradient) for at in readers)
    found.dropped_in_vain = _dropped_in_vain(tape, root, mixture)
    return found


def _are_others(condition: Condition) -> bool:
    """Whether some rows seem to be those of other images."""
    own, images = condition.own, condition.images
    return own is not None and images is not None and not torch.equal(own, images)


def _keeps_rows(tape: Tape, value: Op, end: Op) -> bool:
    """Whether its rows are those of the answer: a network over sequences may have put the steps of all samples in one axis. So
    it is believed where that cannot be computed, or changes nothing."""
    with suppress(NotRecorded, RuntimeError):
        here, given = tape.value(end, anew=True), tape.value(value)
        for row in {1, len(given) // 3} if here.shape[:1] == given.shape[:1] else ():
            other = given.clone()
            other[row] = given[row - 1]
            changed = differ(here, tape.value(end, {value: other}, anew=True))
            if bool(changed.any()) and not bool(changed[row]):
                return False
    return True


def _own_answer(tape: Tape, end: Op, mixture: Mixture) -> int:
    """The end of a call of the network without gradients, whose answer the same network then gets, as in self-conditioning; 0
    where there is none."""
    way = tape.upstream(end)
    first = next((op for op in way if any(last is mixture.given for _, last in op.reads)), None)
    weights = {last for _, last in first.reads if last.kind == "trained"} if first is not None else set()
    again = next((op.index for op in way if op is not first and any(last in weights for _, last in op.reads)), 0)
    return max((op.index for op in way if op.index < again and op.trained and op.kind == "op" and not op.with_grad), default=0)


def _gets_none(tape: Tape, at: Op, without_gradient: int) -> bool:
    """Whether all that wants a gradient of the parameters that are read there gets one of exactly 0. What stands in the place
    of a condition gets one where it is chosen alone."""
    return (
        at.meets
        and at.name not in REPLACES
        and bool(at.uses & without_gradient)
        and not at.uses & tape.wanted & ~without_gradient
    )


def _met(tape: Tape, output: Op, by_layers_alone: bool) -> Iterator[tuple[Op, Op]]:
    """(where, what): values that meet a layer, or what a layer made, and have nothing of trained layers in them."""
    for at in tape.upstream(output):
        if at.kind != "op" or not (at.meets or (at.fronts and not by_layers_alone)):
            continue
        for number, last in at.reads:
            first = not last.fronts and not last.meets
            if is_value(number, last) and last.content and (first or (at.trained and not last.trained and last.kind == "op")):
                yield at, last


def _joined(tape: Tape, mixture: Mixture) -> Iterator[Op]:
    """What stands in further channels beside the mixture."""
    if mixture.given is None or mixture.given is mixture.input:
        return
    noise = mixture.noise.content
    for op in tape.upstream(mixture.given, [mixture.input]):
        if op.name == "cat" and op.index > mixture.input.index and op.content & noise:
            beside = (last for number, last in op.reads if is_value(number, last) and last.floating)
            yield from (last for last in beside if last.content and not last.content & noise)


def _of_data(tape: Tape, value: Op) -> bool:
    return any(source.kind in ("data", "outside") for source in tape.sources(value.content | value.choice))


def _unused(tape: Tape, root: Op, end: Op, mixture: Mixture) -> list[Op]:
    """What meets trained parameters within the network's pass, and is of sources of which nothing reaches the loss."""
    way, known = set(tape.upstream(root)), root.content | root.choice | mixture.image
    values = (
        last
        for at in tape.ops[mixture.input.index : end.index]
        if at.kind == "op" and at.meets and at.trained and at.with_grad and at not in way
        for number, last in at.reads
        if is_value(number, last) and not (last.trained or last.fronts or last.content & known)
    )
    return list(dict.fromkeys(each for each in values if each.shape[:1] == (mixture.size,) and _of_data(tape, each)))


def _condition(tape: Tape, op: Op, mixture: Mixture, unused: bool = False) -> Condition:
    value = tape.value(op)
    largest = float(value.double().abs().max()) if value.numel() else 0.0
    found = Condition(op.shape, unused, sums_of_rows(value), largest, op.floating, False, as_labels(value), ignored=unused)
    if unused:
        return found
    before = _before_draws(tape, op)
    found.varies = before is not None
    if before is not None and before is not op:
        dropped = without(tape, op, before)
        if dropped is not None and alike(value[dropped.to(value.device)]):
            found.dropped = dropped
    if mixture.clean is not None and mixture.clean_value is not None:
        found.is_clean = _is_answer(value, mixture.clean_value, mixture.where)
        found.own, found.images = _rows(tape, op, mixture.clean)
    return found


def sums_of_rows(value: Tensor) -> Tensor:
    """Two sums of each row, by which rows are told apart, float64 [B, 2]."""
    flat = value.detach().reshape(len(value), -1).double()
    weights = torch.linspace(1, 2, flat.shape[1], dtype=torch.float64, device=flat.device)
    return torch.stack([flat.sum(1), flat @ weights], 1).cpu()


def _is_answer(value: Tensor, clean: Tensor, where: Tensor) -> bool:
    """Whether it is the clean image wherever noise is added to that."""
    if value.numel() != clean.numel():
        return False
    ours, theirs = (each.flatten()[where.flatten() > 0] for each in (value, clean))
    return torch.equal(ours, theirs.to(ours)) and bool(ours.any())


def as_labels(value: Tensor) -> Tensor | None:
    """int64 [B] of whole numbers, or of rows with a single 1, or another number, and of 0 alone, which are -1."""
    if value.dtype in (torch.int64, torch.int32) and value.numel() == len(value):
        return value.reshape(-1).long().cpu()
    if value.ndim != 2 or not 0 < value.shape[1] <= MOST_CLASSES or not bool(((value == 0) | (value == value.max())).all()):
        return None
    ones = (value > 0).sum(1)
    labels = torch.where(ones > 0, (value > 0).long().argmax(1), -1).cpu()
    return labels if bool((ones <= 1).all() and (ones > 0).any()) else None


def _before_draws(tape: Tape, op: Op) -> Op | None:
    """The last value that `op` is made of in which nothing is drawn but which rows there are, and whose rows differ."""
    ends = set(tape.ends(op))
    for each in reversed(tape.upstream(op, ends)):
        drawn = any(source.kind == "drawn" for source in tape.sources(each.content))
        fits = each.content and not drawn and len(each.outs) < 2 and each.shape[:1] == op.shape[:1] and _of_data(tape, each)
        if fits and not alike(tape.value(each)):
            return each
    return None


def _rows(tape: Tape, op: Op, clean: Op) -> tuple[Tensor | None, Tensor | None]:
    """The rows that both come from, of a source that both have, or of two that came together."""
    for ours, theirs in _pairs(tape, op, clean):
        own = origins(tape, op, ours)
        if own is None or not bool((own >= 0).any()):
            continue
        images = origins(tape, clean, theirs)
        if images is not None and bool((images >= 0).any()):
            return own, images
    return None, None


def _pairs(tape: Tape, op: Op, clean: Op) -> list[tuple[Op, Op]]:
    ours, theirs = ([s for s in tape.sources(each.content | each.choice) if len(s.shape) > 0] for each in (op, clean))
    ours, theirs = ([s for s in sources if s.shape[0] > 1] for sources in (ours, theirs))
    common = [source for source in ours if source in theirs]
    if common:
        return [(source, source) for source in sorted(common, key=lambda source: torch.Size(source.shape).numel())]
    return [
        (one, other)
        for one in ours
        for other in theirs
        if one.kind == other.kind != "drawn" and one.shape[0] == other.shape[0] and one.load == other.load
    ]


def _keep_least_dropped(conditions: list[Condition], made_of: list[int]) -> None:
    """A value that says nothing of the labels is no dropped one where the network is given them otherwise."""
    for one, sources in zip(conditions, made_of):
        if one.dropped is None:
            continue
        for other, others in zip(conditions, made_of):
            kept = other.varies if other.dropped is None else int(other.dropped.sum()) < int(one.dropped.sum())
            if others & sources and kept:
                one.dropped = None
                break


def _dropped_in_vain(tape: Tape, root: Op, mixture: Mixture) -> int:
    used = set(tape.upstream(root))
    read = {last for op in tape.ops for _, last in op.reads} | {need for op in tape.ops for need in op.needs}
    known = root.content | root.choice
    for op in tape.ops:
        if op.name not in REPLACES or op in used or op in read or op.shape[:1] != (mixture.size,) or op.fronts:
            continue
        sources = list(tape.sources(op.content | op.choice))
        drawn = [source for source in sources if source.kind == "drawn" and not 1 << source.index & known]
        small = drawn and all(torch.Size(source.shape).numel() <= mixture.size for source in drawn)
        if small and _of_data(tape, op) and op.index < root.index:
            return op.shape[0]
    return 0

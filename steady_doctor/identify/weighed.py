"""Who decides what an error counts: another network, the image itself, or other samples of the batch."""

from collections.abc import Callable

import torch
from torch import Tensor

from steady_doctor.identify.mixed import Mixture, numel
from steady_doctor.identify.rows import differ
from steady_doctor.identify.target import SAME_WEIGHT, Target, gradient_of, step_of, with_variance
from steady_doctor.record.ops import Op
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.tape import Tape

FEWEST, EXCHANGED = 4, 6  # samples of a batch, and how many of them are tried


def by_network(tape: Tape, root: Op, target: Target) -> bool:
    """Whether the target follows another network's output, which is in the loss; else that is in a term of its own."""
    others = [front for front in root.fronts if front.content and front not in target.layers]
    if not others:
        return False
    try:
        value = tape.value(target.output).double()
        here = gradient_of(tape, root, target.output, value)
        moved = gradient_of(tape, root, target.output, value, {one: 1 - tape.value(one) for one in others})
    except (NotRecorded, RuntimeError):
        return True
    return here is None or moved is None or bool((here - moved).norm() > SAME_WEIGHT * here.norm())


def by_image(tape: Tape, root: Op, mixture: Mixture, target: Target) -> bool:
    """Whether it is the image itself that decides which of its errors count: another image's would."""
    if mixture.clean is None:
        return False
    slopes = [_slopes(tape, root, mixture, target, instead) for instead in ({}, _rolled(tape, [mixture.clean]))]
    known = [slope for slope in slopes if slope is not None]
    return len(known) == 2 and bool((known[0] - known[1]).abs().max() > 0.5 * known[0].abs().max())


def by_others(tape: Tape, root: Op, mixture: Mixture, target: Target) -> bool:
    """Whether errors are weighed by the noise level of another sample, or by a number that is drawn for the weight alone."""

    def weights(instead: dict[Op, Tensor]) -> Tensor | None:
        slopes = _slopes(tape, root, mixture, target, instead)
        return None if slopes is None or len(slopes) != mixture.size else slopes.flatten(1).amax(1)

    slopes = _slopes(tape, root, mixture, target, {})
    if slopes is None or len(slopes) != mixture.size or not bool(slopes.any()):
        return False
    counts, plain = slopes.flatten(1) > 0, slopes.flatten(1).amax(1)
    is_masked = bool((counts.any(1) & ~counts.all(1)).any())
    there = plain[plain > 0] if is_masked else plain  # a mask may leave nothing of a sample
    if float(there.max()) <= float(there.min()) * (1 + SAME_WEIGHT):
        return False
    own = [source for source in mixture.levels if source.shape[:1] == (mixture.size,)]
    told = mixture.input.made_of | target.output.made_of  # a second level that the network is told may count, too
    drawn = [source for source in tape.sources(root.content) if source.kind == "drawn" and not told >> source.index & 1]
    others = [source for source in drawn if source.shape[:1] == (mixture.size,) and numel(source) == mixture.size]
    if others and (moved := weights(_rolled(tape, others))) is not None and not _are(moved, plain):
        return True
    return mixture.size >= FEWEST and bool(own) and _is_by_another(tape, mixture, own, plain, weights)


def _is_by_another(tape: Tape, mixture: Mixture, own: list[Op], plain: Tensor, weights: Callable) -> bool:
    """Whether, where one sample gets the level of another, the weight of just one other sample changes, whose input does not. A
    figure of the whole batch, by which all weights are divided, changes all of them or none."""
    found = 0
    for place in range(0, mixture.size, -(-mixture.size // EXCHANGED)):
        instead = {source: tape.value(source).clone() for source in own}
        for value in instead.values():
            value[place] = value[place - mixture.size // 2]
        moved = weights(instead)
        try:
            given = tape.value(mixture.input, instead)
        except NotRecorded:
            return False
        if moved is None or given.shape != mixture.value.shape:
            return False
        changed, stays = ~_same(moved, plain).cpu(), ~differ(mixture.value, given)
        changed[place] = False
        if int(changed.sum()) > 1 or bool((changed & ~stays).any()):
            return False
        found += int(changed.sum())
    return found > 1


def _are(x: Tensor, y: Tensor) -> bool:
    return bool(_same(x, y).all())


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).abs() <= SAME_WEIGHT * y.abs()


def _rolled(tape: Tape, values: list[Op]) -> dict[Op, Tensor]:
    """Each sample with the values of the one before."""
    return {value: tape.value(value).roll(1, 0) for value in values}


def _slopes(tape: Tape, root: Op, mixture: Mixture, target: Target, instead: dict[Op, Tensor]) -> Tensor | None:
    """The second derivative of the loss by each number of the output but for a variance; None where there is none."""
    if target.slope is None:
        return None
    value = tape.value(target.output).double()
    step = step_of(value)
    if with_variance(value, mixture):
        step[:, mixture.value.shape[1] :] = 0
    try:
        here, above = (gradient_of(tape, root, target.output, v, instead) for v in (value, value + step))
    except NotRecorded:
        return None
    return None if here is None or above is None else torch.where(step == 0, 0.0, (above - here) / step).abs()

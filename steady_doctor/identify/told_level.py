"""What the network is told of the noise level of each sample."""

from contextlib import suppress

import torch
from torch import Tensor

from steady_doctor.identify.mixed import LINEAR, Given, Mixture, beside, numel
from steady_doctor.record.ops import PARAMETERS, Op
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.tape import Tape

FEWEST = 4  # samples whose levels tell that they are exchanged


def find_told(tape: Tape, mixture: Mixture, given: list[Given]) -> None:
    """Notes what the network is told: the values of one number a sample through which all passes that it gets of the level."""
    given = [part for each in _of_the_pass_that_learns(mixture, given) for part in _parts(each, mixture.noise.content)]
    levels = sum(1 << source.index for source in mixture.levels)
    found: list[tuple[Op, tuple[Tensor, ...]]] = []
    of_each: set[Op] = set()  # those of which the last number is one for each sample
    rounded: dict[Op, bool] = {}
    for each in beside(mixture, given):
        if not each.value.made_of & levels or any(each.value is value for value, _ in found):
            continue
        way = [op for op in tape.upstream(each.value) if op.made_of & levels]
        narrow = [op for op in _passed_by_all(way) if numel(op) in (1, mixture.size)]
        values = [tape.value(op).double().flatten() for op in reversed(narrow)]
        of_each |= {each.value} if narrow and numel(narrow[-1]) == mixture.size else set()
        rounded[each.value] = any(op.dtype in (torch.float16, torch.bfloat16) for op in narrow)
        found.append((each.value, tuple(value.expand(mixture.size) if value.numel() == 1 else value for value in values)))
    if not found:
        mixture.told_within = _may_be_told(tape, mixture, given) or _is_told_by_value(tape, mixture, given)
        return
    # A network that is told two times, as those that go from one to the other, is told the level by one of them.
    follow = ((value, told) for value, told in found if told and _follows(told[0], mixture, value in of_each))
    first = next(follow, found[0])
    exchanged = (each for each in found if each[1] and first[1] and _are_of_others(each[1][0], first[1][0]))
    value, mixture.told = next(exchanged, first)
    mixture.told_rounded = rounded[value]
    if not any(op.kind in PARAMETERS for op in tape.upstream(value)):  # else it is what a frozen network made of it
        mixture.embedding = tape.value(value)


def _of_the_pass_that_learns(mixture: Mixture, given: list[Given]) -> list[Given]:
    """Without what the network got for an answer of its own that it gets, too."""
    own = [each.at for each in given if each.value in (mixture.input, mixture.given)]
    if len({at.with_grad for at in own}) < 2:
        return given
    learns = min(at.index for at in own if at.with_grad)
    answered = max((each.at.index for each in given if not each.at.with_grad and each.at.index < learns), default=0)
    return [each for each in given if each.at.index > answered]


def _parts(given: Given, noise: int) -> list[Given]:
    """What stands side by side in it, where noise is in it: the level may stand beside that."""
    if given.value.name != "cat" or not given.value.content & noise:
        return [given]
    return [part for _, last in given.value.reads for part in _parts(Given(given.at, last), noise)]


def _may_be_told(tape: Tape, mixture: Mixture, given: list[Given]) -> bool:
    """Whether a level goes into a value of the network beside the mixture, or numbers of each sample come from elsewhere."""
    noised = [op for op in tape.upstream(mixture.input) if op.content & mixture.noise.content]
    mixed = [each.value for each in given if each.value.content & mixture.noise.content and each.value not in noised]
    within = {op for value in mixed for op in tape.upstream(value, noised)}
    sources = {op for each in beside(mixture, given) for op in tape.sources(each.value.made_of)}
    by_numpy = bool(mixture.levels) and all(source.kind == "outside" and source.floating for source in mixture.levels)
    known = [op for op in sources if op.kind == "outside" and (op.floating or by_numpy)]
    elsewhere = [op for op in known if numel(op) == mixture.size > 1]
    return bool(elsewhere) or not within.isdisjoint(mixture.levels)


def _is_told_by_value(tape: Tape, mixture: Mixture, given: list[Given]) -> bool:
    """Whether the network gets a number of each sample in the order of the levels, which are no operation's: it may be what
    these were looked up by."""
    if mixture.a is None or not mixture.levels or any(source.kind != "outside" for source in mixture.levels):
        return False
    ways = ([op for op in tape.upstream(each.value) if numel(op) == mixture.size > 1] for each in beside(mixture, given))
    with suppress(NotRecorded):
        values = [tape.value(way[-1]).double().flatten() for way in ways if way]
        return any(bool(value.diff().any()) and _follows(value, mixture, of_each=True) for value in values)
    return False


def _follows(told: Tensor, mixture: Mixture, of_each: bool) -> bool:
    """Whether it is in the order of the noise's share, or in the opposite one.

    `of_each`: it has a number for each sample; one number for all follows levels that are all the same.
    """
    if mixture.a is None:
        return True
    sigma = (mixture.b / mixture.a.clamp(min=1e-12)).to(told.device)
    steps = told[torch.argsort(sigma)].diff()
    is_same = not bool(steps.any()) and float(sigma.max() - sigma.min()) > LINEAR * float(sigma.abs().max())
    return (of_each or not is_same) and bool((steps >= 0).all() or (steps <= 0).all())


def _are_of_others(told: Tensor, others: Tensor) -> bool:
    """Whether these are the same numbers, but for a scale, in another order of the samples, and not turned around."""
    if len(told) < FEWEST:
        return False
    one, other = ((x - x.mean()) / x.std().clamp(min=1e-30) for x in (told, others))
    is_own = any(torch.allclose(one, way * other, atol=0.1) for way in (1, -1))
    return torch.allclose(one.sort().values, other.sort().values, atol=LINEAR) and not is_own


def _passed_by_all(way: list[Op]) -> list[Op]:
    """Those of the operations, which are in order, that each path from the first ones to the last goes through."""
    last_use: dict[Op, int] = {}
    for op in way:
        for need in op.needs:
            last_use[need] = op.index
    found, open_until = [], -1
    for op in way:
        if open_until <= op.index:
            found.append(op)
        open_until = max(open_until, last_use.get(op, -1))
    return found


def told_otherwise(tape: Tape, root: Op, mixture: Mixture, given: list[Given]) -> bool:
    size = mixture.size
    drawn = {source for each in beside(mixture, given) for source in tape.sources(each.value.content) if source.kind == "drawn"}
    if any(numel(source) == size and source not in mixture.levels for source in drawn):
        return True
    for op in tape.upstream(root):
        if op.kind == "op" and op.meets and not op.made_of and op.shape[:1] == (size,):
            others = [last for _, last in op.reads if not last.trained and last.kind not in PARAMETERS]
            if any(last.shape[:1] == (size,) for last in others):
                return True
    return False

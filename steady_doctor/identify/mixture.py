"""What the network is given: x = a clean + b noise, for each sample, read off the tape.

Nothing is searched for among values that happen to be alike. The noise is the last value of draws alone that the input is
linear in; the image is the last value with neither noise nor level in it that the rest is a multiple of.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from steady_doctor.identify.fit import fit
from steady_doctor.identify.mixed import LINEAR, Given, Mixture, Nothing, beside, given_to_network, multiple, numel
from steady_doctor.identify.noise import broadcasts, noise_sources
from steady_doctor.identify.rows import differ, with_a_row_each
from steady_doctor.identify.shares import find_growth, find_table, shares_at, something
from steady_doctor.identify.told_level import find_told, told_otherwise
from steady_doctor.record.ops import PARAMETERS, PICKS, Op
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.tape import Tape

ADDS = {"add", "add_", "sub", "sub_", "rsub", "addcmul", "lerp"}
LEAST_PART = 0.02  # of the elements that noise reaches: a mask may leave out the others
FEWEST = 8  # numbers of a sample, of which two are fitted: points in the plane would fit whatever they are


def find_mixture(tape: Tape, root: Op) -> Mixture:
    """The one that the loss asks about; there may be others, such as a noised hint. Raises Nothing."""
    given = _with_samples(tape, given_to_network(tape, [op for op in tape.upstream(root) if op.kind == "op"]))
    if not given:
        raise Nothing("nothing-given")
    noises, asked = noise_sources(tape, given), _asked_about(tape, root)
    first = _best(tape, given, noises, asked)
    if first is None and (more := noise_sources(tape, given, math.inf)) != noises:  # the largest draw is of a code, say
        first = _best(tape, given, more, asked)
    if first is None:
        raise Nothing("no-noise" if not noises else "noise-not-linear")
    find_told(tape, first, given)
    first.told_otherwise = told_otherwise(tape, root, first, given)
    find_table(tape, first)
    find_growth(tape, first)
    return first


def _best(tape: Tape, given: list[Given], noises: int, asked: set[Op]) -> Mixture | None:
    first = None
    for mixture in _mixtures(tape, given, noises):
        is_asked = not asked or mixture.clean in asked or any(source in asked for source in mixture.draws)
        is_same = first is not None and mixture.draws == first.draws  # else noise of its own, as an encoder's latents have
        is_better = is_same and first is not None and first.clean is None and mixture.clean is not None
        if first is None or is_better or (is_asked and not is_same):
            first = mixture
        if first is mixture and mixture.clean is not None and is_asked:
            break
    return first


def _mixtures(tape: Tape, given: list[Given], noises: int) -> Iterator[Mixture]:
    """All that the network is given, and what this was made of, as far as they are mixtures of noise and something."""
    whole: dict[Op, int] = {}
    # Noise that is added to what a network made of data, such as a mean: the image is in that, and not in what is read here.
    added = {
        each.value
        for each in given
        if each.at.name in ADDS and any(last.trained and last.content for _, last in each.at.reads if last is not each.value)
    }
    for got, candidate in _inputs(tape, given, noises):
        mixture = _mixture(tape, candidate, noises, _told_rows(tape, given, noises))
        if mixture is None or _is_changed_later(tape, candidate, got, noises) or not _keeps_rows(tape, candidate, got):
            continue
        mixture.given = got
        mixture.behind_frozen = any(op.kind in PARAMETERS for op in tape.upstream(got, [candidate]))
        _find_clean(tape, mixture, given)
        if _is_joined(tape, candidate, got, whole.get(got, 0)):
            continue
        whole[got] = whole.get(got, 0) | sum(1 << source.index for source in mixture.levels)
        # Noise alone may be multiplied by a mask before it is added; and normal numbers that nobody drew here may be images.
        is_drawn = any(source.kind == "drawn" for source in mixture.draws)
        if mixture.only_noise and got in added:
            continue
        if not mixture.only_noise or (is_drawn and not got.content & ~candidate.content):
            yield mixture


def _asked_about(tape: Tape, root: Op) -> set[Op]:
    """All that is compared with what a network gave."""
    beside = {last for op in tape.upstream(root, root.fronts) if op.trained for _, last in op.reads if not last.trained}
    return beside | {op for last in beside for op in tape.upstream(last)}


def _is_changed_later(tape: Tape, mixture: Op, given: Op, noises: int) -> bool:
    """Whether other noise is added to it on its way to the network, or a class is picked by it."""
    after = {mixture}
    for op in tape.upstream(given, [mixture]):
        if op.kind == "op" and any(need in after for need in op.needs):  # what is drawn in its shape is not made of it
            if not op.floating:
                return True
            others = [last for _, last in op.reads if last not in after]
            if op.name in ADDS and any(last.content & noises & ~mixture.content for last in others):
                return True
            after.add(op)
    return False


def _is_joined(tape: Tape, mixture: Op, given: Op, levels: int) -> bool:
    """Whether an image is added to it on its way to the network, by the level: then it is one end of the path."""
    after = {mixture}
    for op in tape.upstream(given, [mixture]):
        if op.kind == "op" and any(need in after for need in op.needs):
            others = [last for _, last in op.reads if last not in after]
            if op.name in ADDS and any(last.made_of & levels and last.content & ~levels for last in others):
                return True
            after.add(op)
    return False


def _keeps_rows(tape: Tape, mixture: Op, given: Op) -> bool:
    """Whether each sample of it is that sample of what is given: a part of a batch may be cut off, and joined to another."""
    if given is mixture or given.shape[:1] != mixture.shape[:1]:
        return True
    value, here = tape.value(mixture), tape.value(given)
    for row in {0, len(value) - 1}:
        moved = value.clone()
        moved[row] += 1
        try:
            changed = differ(here, tape.value(given, {mixture: moved}))
        except NotRecorded:
            return True
        changed[row] = False
        if bool(changed.any()):
            return False
    return True


def _with_samples(tape: Tape, given: list[Given]) -> list[Given]:
    """The same, with samples along the first axis, as what they are made of has."""
    sources = [source for each in given for source in tape.sources(each.value.content) if len(source.shape) > 1]
    sizes = {source.shape[0] for source in sources if source.floating}
    return [Given(each.at, with_a_row_each(each.value, sizes)) for each in given]


def _inputs(tape: Tape, given: list[Given], noises: int) -> Iterator[tuple[Op, Op]]:
    """What is given to the network, the best first, each with what may be the mixture: itself, then what it was made of."""

    def rank(op: Op) -> tuple[int, int]:
        return bool(op.content & noises) + bool(op.content & ~noises), numel(op)

    seen: set[Op] = set()
    in_order = dict.fromkeys(each.value for each in given if each.value.floating)  # a target is met after the input
    for each in sorted(in_order, key=rank, reverse=True)[:8]:
        if not each.content & noises:
            break
        upstream = [op for op in reversed(tape.upstream(each)) if op.kind == "op" and op.floating]
        for op in [each, *(op for op in upstream if op.content & noises and op.content & ~noises)][:60]:
            if op not in seen and len(op.shape) > 1:
                seen.add(op)
                yield each, op


def _told_rows(tape: Tape, given: list[Given], noises: int) -> int:
    """The bits of rows with a number for each sample that the network is told: levels, and no constants."""
    rows = 0
    for each in given:
        rows |= 0 if each.value.content & noises else each.value.rows
    size = max((each.value.shape[0] for each in given if each.value.content & noises and each.value.shape), default=0)
    return sum(1 << source.index for source in tape.sources(rows) if numel(source) == size > 1)


def _mixture(tape: Tape, op: Op, noises: int, levels: int) -> Mixture | None:
    """The mixture that this value is, if it is one."""
    try:
        value = tape.value(op)
    except NotRecorded:
        return None
    upstream = tape.upstream(op)
    single = sum(1 << source.index for source in tape.sources(op.content) if source.kind == "drawn" and numel(source) == 1)
    pure = [
        each
        for each in upstream
        if each.content & noises
        and not (each.content & ~(noises | single) or each.rows & levels)
        and each.floating
        and (not each.content & single or _is_sum(tape, each, noises))
    ]
    pure = [each for each in pure if each is not op and len(each.outs) == 1] or pure
    for noise in reversed(pure):
        if numel(noise) not in (value.numel(), 1) and not broadcasts(noise.shape, value.shape):
            continue
        drawn = tape.value(noise)
        share = value - tape.value(op, {noise: torch.zeros_like(drawn)})
        if not bool(share.any()) or not bool(torch.isfinite(share).all()):
            continue
        spread = drawn.reshape(value.shape) if drawn.numel() == value.numel() else drawn.expand_as(value)
        where = (share.abs() > 1e-9 * share.abs().max()).to(value)
        if float(where.mean()) < LEAST_PART or not _reaches_all(where, noise.shape):
            continue
        some = where.flatten(1).any(1)
        if bool(where[some].all()):  # else a mask may leave nothing of a sample; here its level has no noise
            where = torch.ones_like(where)
        b, rest = multiple(share * where, spread * where)
        if float(rest.max()) < LINEAR:
            draws = list(tape.sources(noise.content))
            if (before := _before_levels(tape, noise, spread, draws)) is not None:
                noise, spread, factors = before
                b = b * factors
            return Mixture(op, value, noise, spread, draws, b, where)
    return None


def _is_sum(tape: Tape, op: Op, noises: int) -> bool:
    """Whether noise of a strength that was drawn once for the batch is added to noise as it was drawn."""
    return any(
        each.name in ADDS and any(last.content and not last.content & ~noises for _, last in each.reads)
        for each in [op, *tape.upstream(op)]
    )


def _before_levels(tape: Tape, op: Op, value: Tensor, choices: list[Op]) -> tuple[Op, Tensor, Tensor] | None:
    """One of these values, itself and the factors [B], where `value` is it times a number of each sample, which differ: the
    noise levels, where they come from elsewhere."""
    for each in choices:
        if each is op or numel(each) != value.numel() or len(value) < 2:
            continue
        earlier = tape.value(each).reshape(value.shape)
        factors, rest = multiple(value, earlier)
        differ = float(factors.max() - factors.min()) > 10 * LINEAR * float(factors.abs().max())
        if differ and float(rest.max()) < LINEAR:
            return each, earlier, factors
    return None


def _reaches_all(where: Tensor, shape: tuple) -> bool:
    """Whether noise of this shape is on the whole of each axis that it is spread along; else it stands beside something."""
    spread = [axis for axis, size in enumerate(where.shape) if len(shape) == where.ndim and shape[axis] == 1 < size]
    return all(bool(where.transpose(0, axis).flatten(1).any(1).all()) for axis in spread)


def _find_clean(tape: Tape, mixture: Mixture, given: list[Given]) -> None:
    rest = tape.value(mixture.input, {mixture.noise: torch.zeros_like(tape.value(mixture.noise))}) * mixture.where
    if float(rest.abs().max()) < 1e-6:
        mixture.only_noise = True
        return
    noise = mixture.noise.content
    mixture.levels = tuple(_levels(tape, mixture, given))
    levels = sum(1 << source.index for source in mixture.levels)
    upstream = tape.upstream(mixture.input)
    for op in reversed(upstream):
        is_free = op.content and not op.content & noise and not op.made_of & levels
        fits = is_free and op.floating and numel(op) == mixture.value.numel()
        if not fits or op.shape[0] != mixture.size or op.kind in ("trained", "frozen"):
            continue
        value = tape.value(op).reshape(mixture.value.shape)
        if not bool(value.any()):
            continue
        a, left = multiple(rest, value * mixture.where)
        offset = None
        if float(left.max()) > LINEAR and value[0].numel() >= FEWEST:
            a, offset, left = _multiple_and_constant(rest, value, mixture.where)
        if float(left.max()) < LINEAR and float(a.abs().max()) > 0:
            mixture.clean, mixture.clean_value, mixture.a, mixture.offset = op, value, a, offset
            if not mixture.levels and (before := _before_levels(tape, op, value, _free_of(tape, op))) is not None:
                shares = a * before[2]
                if any(float(total.max() - total.min()) < LINEAR for total in (shares**2 + mixture.b**2, shares + mixture.b)):
                    mixture.clean, mixture.clean_value, mixture.a = before[0], before[1], shares
            _share_of_nothing(tape, mixture)
            break
    extra = mixture.input.content & ~noise & ~levels & ~mixture.image
    mixture.extra = tuple(source for source in tape.sources(extra) if source.kind == "drawn")


def _free_of(tape: Tape, op: Op) -> list[Op]:
    """What it is made of, the last first."""
    return [each for each in reversed(tape.upstream(op)) if each.floating and each.content and len(each.outs) < 2]


def _share_of_nothing(tape: Tape, mixture: Mixture) -> None:
    """Of images that are 0 wherever noise reaches them, the share is that of another image in their place."""
    if mixture.clean_value is not None and mixture.a is not None and something(mixture, mixture.clean_value):
        is_nothing = ~(mixture.clean_value * mixture.where).flatten(1).any(1)
        mixture.a = torch.where(is_nothing, shares_at(tape, mixture, {})[0], mixture.a)


def _multiple_and_constant(y: Tensor, x: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a, c and the remaining share, all [B], where y = a x + c for each sample."""
    y, x, where = (v.detach().flatten(1) for v in (y, x, where))
    found, left = fit(y, x * where, where)
    return found[:, 0], found[:, 1], left


def _levels(tape: Tape, mixture: Mixture, given: list[Given]) -> list[Op]:
    """Small sources that decide how much noise is in the mixture and that the network is given besides; or else small draws."""
    small = [
        source
        for source in tape.sources((mixture.input.content | mixture.input.rows) & ~mixture.noise.content)
        if source.kind in ("drawn", "data", "outside") and (numel(source) <= mixture.size or _is_for_many(source, mixture.size))
    ]
    if len(small) > 1:  # an augmentation's numbers are small, too
        small = [source for source in small if _decides(tape, mixture, source)] or small
    told = 0
    for each in beside(mixture, given):
        told |= each.value.made_of
    known = [source for source in small if 1 << source.index & told]
    picking, drawn = list(_picking(tape, mixture)), [source for source in small if source.kind == "drawn"]
    if not (known or drawn or picking) and mixture.size > 1:  # shares that were computed outside of torch
        rows = [source for source in tape.sources(mixture.input.rows) if numel(source) == mixture.size]
        return rows if any(_decides(tape, mixture, source) for source in rows) else []
    return list(dict.fromkeys([*(known or drawn), *picking]))


def _decides(tape: Tape, mixture: Mixture, source: Op) -> bool:
    """Whether the noise's share is another one where the samples have this source's numbers of each other."""
    drawn, value = tape.value(mixture.noise), tape.value(source)
    if value.numel() < 2 or bool((value == value.flatten()[0]).all()):
        return True
    rolled = value.flatten().roll(1).reshape(value.shape)
    try:
        with_noise, without = (
            tape.value(mixture.input, {source: rolled, mixture.noise: noise}) for noise in (drawn, torch.zeros_like(drawn))
        )
    except NotRecorded:
        return True
    share = multiple((with_noise - without) * mixture.where, mixture.noise_value * mixture.where)[0]
    return bool(((share - mixture.b).abs() > LINEAR * mixture.b.abs().max()).any())


def _is_for_many(source: Op, size: int) -> bool:
    """Whether it may hold a level for each sample of several passes, which take their parts of it; or two of each sample."""
    is_row = numel(source) == max((1, *source.shape)) and numel(source) % size == 0
    return source.kind == "drawn" and (is_row or numel(source) == 2 * size)


def _picking(tape: Tape, mixture: Mixture) -> Iterator[Op]:
    """What decides which number of a row, such as a schedule, is in the mixture: draws, and numbers drawn outside of torch."""
    for op in tape.upstream(mixture.input):
        if op.name in PICKS and op.reads and not op.reads[0][1].content:
            which = 0
            for _, last in op.reads[1:]:
                which |= last.choice | (last.content if numel(op) <= mixture.size and not last.floating else 0)
            yield from (
                source
                for source in tape.sources(which)
                if (source.kind == "drawn" and (numel(source) <= mixture.size or _is_for_many(source, mixture.size)))
                or (source.kind == "outside" and numel(source) == mixture.size > 1)
            )

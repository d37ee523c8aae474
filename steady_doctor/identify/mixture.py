"""What the network is given: x = a clean + b noise, for each sample, read off the tape.

Nothing is searched for among values that happen to be alike. The noise is the last value of draws alone that the input is
linear in; the image is the last value with neither noise nor level in it that the rest is a multiple of.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from steady_doctor.identify.fit import fit
from steady_doctor.identify.rows import with_a_row_each
from steady_doctor.record.ops import PARAMETERS, PICKS, Op
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.tape import Tape

ADDS = {"add", "add_", "sub", "sub_", "rsub", "addcmul", "lerp"}
LINEAR = 1e-3  # of the values: what may remain of a linear relation in float32, after a dozen operations
LEAST_PART = 0.02  # of the elements that noise reaches: a mask may leave out the others
FEWEST = 8  # numbers of a sample, of which two are fitted: points in the plane would fit whatever they are
LOOKED_AT = 33  # rows of a table of noise levels
PART = 4  # of the numbers of one sample that a draw has at the least, to be noise: a quarter
LEAST = 64  # numbers of noise
NEAR = 1e-3  # of a level, by which it is moved


@dataclass
class Given:
    """One value that meets parameters and does not depend on them."""

    at: Op  # the operation where they meet
    value: Op


@dataclass
class Mixture:
    """Tensors are [B, ...] or [B]; a and b in float64."""

    input: Op  # the value that the network gets, or the part of it that is the mixture
    value: Tensor
    noise: Op
    noise_value: Tensor
    draws: list[Op]  # the sources of the noise
    b: Tensor
    where: Tensor  # 1 where there is noise, else 0
    clean: Op | None = None
    clean_value: Tensor | None = None
    a: Tensor | None = None
    offset: Tensor | None = None  # a constant beside the two, of each sample
    levels: tuple[Op, ...] = ()  # the sources that decide a and b
    told: tuple[Tensor, ...] = ()  # [B] each: numbers on the way from the level to the network, the last first
    told_rounded: bool = False  # they were in half precision
    embedding: Tensor | None = None  # [B, ...]: the value that meets parameters there
    extra: tuple[Op, ...] = ()  # other draws that are in the input
    only_noise: bool = False
    index_range: tuple[int, int] | None = None  # of the draw that it is
    index: Tensor | None = None  # [B]: the row of a table that the shares come from
    table: Tensor | None = None  # [3, rows looked at]: row, a, b
    growth: Tensor | None = None  # [B]: of the logarithm of (a / b)^2, with a level that is drawn as a number of its own
    told_within: bool = False  # the network may get the level in one value with the mixture, or in numbers from elsewhere
    told_otherwise: bool = False  # a layer gets rows that are made of nothing, or of a draw that decides nothing of the mixture
    behind_frozen: bool = False  # a frozen layer stands between the mixture and the first trained one
    given: Op | None = None  # what the network gets: the mixture itself, or what was made of it

    @property
    def image(self) -> int:
        """The sources of the clean image, as bits."""
        return 0 if self.clean is None else self.clean.content

    @property
    def size(self) -> int:
        return self.value.shape[0]


class Nothing(Exception):
    """No mixture: the text is a code."""


def given_to_network(tape: Tape, forward: list[Op]) -> list[Given]:
    """All values that meet trained parameters, or what was made with them, and have nothing of these themselves.

    Before the last layer: what meets the output is of the loss.
    """
    inside: set[Op] = set()
    for op in reversed(forward):
        if op in inside or _is_layer(op):
            inside.add(op)
            inside.update(op.needs)
    found = []
    for op in forward:
        if op.trained and op in inside:
            some = [last for _, last in op.reads if last.content or last.rows]
            found += [Given(op, last) for last in some if not last.trained and last.kind != "frozen"]
    return found


def _is_layer(op: Op) -> bool:
    """Whether it reads parameters, or what was made of them alone, beside other values."""
    own = [last for _, last in op.reads if last.kind in PARAMETERS or (last.meets and not last.content)]
    return bool(own) and any(last.content for _, last in op.reads)


def find_mixture(tape: Tape, root: Op) -> Mixture:
    """The one that the loss asks about; there may be others, such as a noised hint. Raises Nothing."""
    given = _with_samples(tape, given_to_network(tape, [op for op in tape.upstream(root) if op.kind == "op"]))
    if not given:
        raise Nothing("nothing-given")
    noises, first, asked = noise_sources(tape, given), None, _asked_about(tape, root)
    for mixture in _mixtures(tape, given, noises):
        is_asked = not asked or mixture.clean in asked or any(source in asked for source in mixture.draws)
        is_same = first is not None and mixture.draws == first.draws  # else noise of its own, as an encoder's latents have
        is_better = is_same and first is not None and first.clean is None and mixture.clean is not None
        if first is None or is_better or (is_asked and not is_same):
            first = mixture
        if first is mixture and mixture.clean is not None and is_asked:
            break
    if first is None:
        raise Nothing("no-noise" if not noises else "noise-not-linear")
    find_told(tape, first, given)
    first.told_otherwise = _told_otherwise(tape, root, first, given)
    _find_table(tape, first)
    _find_growth(tape, first)
    return first


def _told_otherwise(tape: Tape, root: Op, mixture: Mixture, given: list[Given]) -> bool:
    size = mixture.size
    drawn = {
        source for each in _beside(mixture, given) for source in tape.sources(each.value.content) if source.kind == "drawn"
    }
    if any(numel(source) == size and source not in mixture.levels for source in drawn):
        return True
    for op in tape.upstream(root):
        if op.kind == "op" and op.meets and not op.made_of and op.shape[:1] == (size,):
            beside = [last for _, last in op.reads if not last.trained and last.kind not in PARAMETERS]
            if any(last.shape[:1] == (size,) for last in beside):
                return True
    return False


def _mixtures(tape: Tape, given: list[Given], noises: int) -> Iterator[Mixture]:
    """All that the network is given, and what this was made of, as far as they are mixtures of noise and something."""
    for got, candidate in _inputs(tape, given, noises):
        mixture = _mixture(tape, candidate, noises, _told_rows(tape, given, noises))
        if mixture is None or _is_changed_later(tape, candidate, got, noises):
            continue
        mixture.given = got
        mixture.behind_frozen = any(op.kind in PARAMETERS for op in tape.upstream(got, [candidate]))
        _find_clean(tape, mixture, given)
        # Noise alone may be multiplied by a mask before it is added; and normal numbers that nobody drew here may be images.
        is_drawn = any(source.kind == "drawn" for source in mixture.draws)
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


def _with_samples(tape: Tape, given: list[Given]) -> list[Given]:
    """The same, with samples along the first axis, as what they are made of has."""
    sources = [source for each in given for source in tape.sources(each.value.content) if len(source.shape) > 1]
    sizes = {source.shape[0] for source in sources if source.floating}
    return [Given(each.at, with_a_row_each(each.value, sizes)) for each in given]


def noise_sources(tape: Tape, given: list[Given]) -> int:
    """The bits of what may be noise: draws of image size, and normal numbers of image size from outside torch."""
    sources = {source for each in given for source in tape.sources(each.value.content)}
    may_be = {source for source in sources if _may_be_noise(source, tape)}
    size = max((each.value.shape[0] for each in given if each.value.floating and each.value.shape), default=1)
    most = max(map(numel, may_be), default=0)
    each_has = {source: numel(source) // (source.shape[0] if len(source.shape) > 1 else 1) for source in may_be}
    least = max(each_has.values(), default=0) / PART
    of_samples = {source for source in may_be if each_has[source] >= least and numel(source) > LEAST}
    of_samples = {source for source in of_samples if numel(source) != size or most == size}  # else it is a level
    drawn = {source for source in of_samples if source.kind == "drawn"}  # normal numbers beside it are data
    bits = sum(1 << source.index for source in drawn or of_samples)
    told = 0
    for each in given:
        if not each.value.content & bits:
            told |= each.value.content | each.value.choice
    small = [
        source
        for source in sources
        if source.kind == "drawn"
        and source.floating
        and numel(source) > size
        and not 1 << source.index & (bits | told)
        and any(_broadcasts(source.shape, noise.shape) for noise in of_samples)
    ]  # more than one number of each sample: no level
    return bits | sum(1 << source.index for source in small if told)  # an offset of each sample


def _may_be_noise(source: Op, tape: Tape) -> bool:
    """Dropout's draws are none."""
    if not source.floating or source.name.startswith("bernoulli") or "dropout" in source.name:
        return False
    return source.kind == "drawn" or _is_standard_normal(tape.values.get(source.index))


def numel(op: Op) -> int:
    return int(torch.Size(op.shape).numel())


def _is_standard_normal(value: Tensor | None) -> bool:
    """For noise that numpy drew: mean 0, spread 1 and the fourth moment of a normal distribution, by 6 standard errors."""
    if value is None or not value.is_floating_point() or value.numel() < 512:
        return False
    x, n = value.double().flatten(), value.numel()
    moments = [(x.mean(), 0, 1), (x.square().mean(), 1, 2), (x.pow(4).mean(), 3, 96)]
    return all(abs(float(moment) - expected) < 6 * (variance / n) ** 0.5 for moment, expected, variance in moments)


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
    pure = [each for each in upstream if each.content and not (each.content & ~noises or each.rows & levels) and each.floating]
    pure = [each for each in pure if each is not op and len(each.outs) == 1] or pure
    for noise in reversed(pure):
        if numel(noise) not in (value.numel(), 1) and not _broadcasts(noise.shape, value.shape):
            continue
        drawn = tape.value(noise)
        share = value - tape.value(op, {noise: torch.zeros_like(drawn)})
        if not bool(share.any()) or not bool(torch.isfinite(share).all()):
            continue
        spread = drawn.reshape(value.shape) if drawn.numel() == value.numel() else drawn.expand_as(value)
        where = (share.abs() > 1e-9 * share.abs().max()).to(value)
        if float(where.mean()) < LEAST_PART or not _reaches_all(where, noise.shape):
            continue
        b, rest = multiple(share * where, spread * where)
        if float(rest.max()) < LINEAR:
            draws = list(tape.sources(noise.content))
            if (before := _before_levels(tape, noise, spread, draws)) is not None:
                noise, spread, factors = before
                b = b * factors
            return Mixture(op, value, noise, spread, draws, b, where)
    return None


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


def _broadcasts(shape: tuple, to: tuple) -> bool:
    return len(shape) == len(to) and all(one in (1, other) for one, other in zip(shape, to)) and shape != (1,) * len(to)


def _reaches_all(where: Tensor, shape: tuple) -> bool:
    """Whether noise of this shape is on the whole of each axis that it is spread along; else it stands beside something."""
    spread = [axis for axis, size in enumerate(where.shape) if len(shape) == where.ndim and shape[axis] == 1 < size]
    return all(bool(where.transpose(0, axis).flatten(1).any(1).all()) for axis in spread)


def multiple(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns k [B] and the share [B] of y that remains, where y = k x for each sample."""
    y, x = (v.detach().double().flatten(1) for v in (y, x))
    k = (y * x).sum(1) / (x * x).sum(1).clamp(min=1e-30)
    return k, (y - k[:, None] * x).norm(dim=1) / y.norm(dim=1).clamp(min=1e-12)


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
    if mixture.clean_value is not None and mixture.a is not None and _something(mixture, mixture.clean_value):
        is_nothing = ~(mixture.clean_value * mixture.where).flatten(1).any(1)
        mixture.a = torch.where(is_nothing, _shares_at(tape, mixture, {})[0], mixture.a)


def _something(mixture: Mixture, image: Tensor) -> dict[Op, Tensor]:
    """The images with 1 in place of those that are 0 wherever noise reaches them, if there are any."""
    is_nothing = ~(image * mixture.where).flatten(1).any(1)
    if mixture.clean is None or len(mixture.clean.outs) > 1 or not bool(is_nothing.any()):
        return {}
    other = image.masked_fill(is_nothing.reshape(-1, *[1] * (image.ndim - 1)), 1.0)
    return {mixture.clean: other.reshape(mixture.clean.shape)}


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
    for each in _beside(mixture, given):
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


def _beside(mixture: Mixture, given: list[Given]) -> list[Given]:
    """What the network is given besides the mixture."""
    noise = mixture.noise.content
    return [each for each in given if not each.value.content & noise and each.value is not mixture.input]


def find_told(tape: Tape, mixture: Mixture, given: list[Given]) -> None:
    """Notes what the network is told: the values of one number a sample through which all passes that it gets of the level."""
    own = [each.at for each in given if each.value in (mixture.input, mixture.given)]
    if len({at.with_grad for at in own}) > 1:  # it gets its own answer, too: what counts is told in the pass that learns
        learns = min(at.index for at in own if at.with_grad)
        answered = max((each.at.index for each in given if not each.at.with_grad and each.at.index < learns), default=0)
        given = [each for each in given if each.at.index > answered]
    levels = sum(1 << source.index for source in mixture.levels)
    found: list[tuple[Op, tuple[Tensor, ...]]] = []
    of_each: set[Op] = set()  # those of which the last number is one for each sample
    rounded: dict[Op, bool] = {}
    for each in _beside(mixture, given):
        if not each.value.made_of & levels or any(each.value is value for value, _ in found):
            continue
        way = [op for op in tape.upstream(each.value) if op.made_of & levels]
        narrow = [op for op in _passed_by_all(way) if numel(op) in (1, mixture.size)]
        values = [tape.value(op).double().flatten() for op in reversed(narrow)]
        of_each |= {each.value} if narrow and numel(narrow[-1]) == mixture.size else set()
        rounded[each.value] = any(op.dtype in (torch.float16, torch.bfloat16) for op in narrow)
        found.append((each.value, tuple(value.expand(mixture.size) if value.numel() == 1 else value for value in values)))
    if not found:
        mixture.told_within = _may_be_told(tape, mixture, given)
        return
    # A network that is told two times, as those that go from one to the other, is told the level by one of them.
    follow = ((value, told) for value, told in found if told and _follows(told[0], mixture, value in of_each))
    value, mixture.told = next(follow, found[0])
    mixture.told_rounded = rounded[value]
    if not any(op.kind in PARAMETERS for op in tape.upstream(value)):  # else it is what a frozen network made of it
        mixture.embedding = tape.value(value)


def _may_be_told(tape: Tape, mixture: Mixture, given: list[Given]) -> bool:
    """Whether a level goes into a value of the network beside the mixture, or numbers of each sample come from elsewhere."""
    noised = [op for op in tape.upstream(mixture.input) if op.content & mixture.noise.content]
    mixed = [each.value for each in given if each.value.content & mixture.noise.content and each.value not in noised]
    within = {op for value in mixed for op in tape.upstream(value, noised)}
    beside = {op for each in _beside(mixture, given) for op in tape.sources(each.value.made_of)}
    by_numpy = bool(mixture.levels) and all(source.kind == "outside" and source.floating for source in mixture.levels)
    known = [op for op in beside if op.kind == "outside" and (op.floating or by_numpy)]
    elsewhere = [op for op in known if numel(op) == mixture.size > 1]
    return bool(elsewhere) or not within.isdisjoint(mixture.levels)


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


def _find_table(tape: Tape, mixture: Mixture) -> None:
    """Where the shares are picked from a table of the script's by a whole number: that number, and the shares of all rows."""
    levels = sum(1 << source.index for source in mixture.levels)
    for op in tape.upstream(mixture.input):
        if op.name not in PICKS or (op.floating and op.reads[0][1].content):
            continue
        which = [last for _, last in op.reads[1:] if not last.floating and last.content & levels]
        if len(which) != 1 or numel(which[0]) != mixture.size or not op.reads[0][1].shape:
            continue
        index = tape.value(which[0])
        rows = max(op.reads[0][1].shape)
        mixture.index, mixture.index_range = index.flatten(), _range_of(which[0], tape)
        chosen = torch.linspace(0, rows - 1, LOOKED_AT).round().to(index)
        shares = []
        try:
            for some in chosen.split(mixture.size):
                instead = torch.cat([some, some[-1:].expand(mixture.size - len(some))]).reshape(index.shape)
                shares.append([share[: len(some)] for share in _shares_at(tape, mixture, {which[0]: instead})])
        except NotRecorded:  # the row after it is picked, too
            return
        a, b = (torch.cat(list(one)) for one in zip(*shares))
        mixture.table = torch.stack([chosen.double().to(a.device), a, b])
        return


def _find_growth(tape: Tape, mixture: Mixture) -> None:
    """From the shares at levels that are a little higher and lower."""
    if mixture.clean_value is None or len(mixture.levels) != 1:
        return
    level = mixture.levels[0]
    if not level.floating or level.kind != "drawn" or numel(level) != mixture.size:
        return
    value = tape.value(level)
    step = NEAR * value.abs().clamp(min=NEAR)
    ends = [_shares_at(tape, mixture, {level: moved}, exact=True) for moved in (value.double() + step, value.double() - step)]
    (a, b), (other_a, other_b) = ends
    mixture.growth = 2 * (a * other_b / (b * other_a)).abs().log() / (2 * step.double().flatten().to(a.device))


def _range_of(op: Op, tape: Tape) -> tuple[int, int] | None:
    """The numbers from which a whole number was drawn, where nothing but its shape was changed since."""
    ways = [
        each for each in tape.upstream(op) if each.kind != "op" or each.name not in {"view", "_to_copy", "squeeze", "unsqueeze"}
    ]
    if len(ways) != 1 or ways[0].name != "randint":
        return None
    low_or_high, *more = (number for number in ways[0].args if isinstance(number, int))
    return (low_or_high, more[0]) if more else (0, low_or_high)


def _shares_at(tape: Tape, mixture: Mixture, instead: dict[Op, Tensor], exact: bool = False) -> tuple[Tensor, Tensor]:
    """The shares of image and noise with other values instead; `exact`: in float64."""
    image = mixture.clean_value
    if image is not None and mixture.clean is not None:
        instead = _something(mixture, image) | instead
        image = instead.get(mixture.clean, image).reshape(image.shape)
    zero = {mixture.noise: torch.zeros_like(tape.value(mixture.noise))}
    rest = tape.value(mixture.input, instead | zero, exact=exact) * mixture.where
    share = tape.value(mixture.input, instead, exact=exact) * mixture.where - rest
    b = multiple(share, mixture.noise_value * mixture.where)[0]
    if image is None:
        return torch.zeros_like(b), b
    return multiple(rest, image * mixture.where)[0], b

"""What the network is given: x = a clean + b noise, for each sample, read off the tape.

Nothing is searched for among values that happen to be alike. The noise is the last value of draws alone that the input is
linear in; the image is the last value with neither noise nor level in it that the rest is a multiple of.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from steady_doctor.record.tape import NotRecorded, Op, Tape

LINEAR = 1e-3  # of the values: what may remain of a linear relation in float32, after a dozen operations
LEAST_PART = 0.02  # of the elements that noise reaches: a mask may leave out the others
LARGE = 64  # times smaller than the largest source: not of image size


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
    told: Tensor | None = None  # [B]: the number of the noise level that the network is given
    embedding: Tensor | None = None  # [B, ...]: the value that meets parameters there
    extra: tuple[Op, ...] = ()  # other draws that are in the input

    @property
    def size(self) -> int:
        return self.value.shape[0]


class Nothing(Exception):
    """No mixture: the text is a code."""


def given_to_network(tape: Tape, forward: list[Op]) -> list[Given]:
    """All values that meet trained parameters, or what was made with them, and have nothing of these themselves."""
    found = []
    for op in forward:
        if op.trained:
            found += [Given(op, last) for _, last in op.reads if not last.trained and last.content and last.kind != "frozen"]
    return found


def find_mixture(tape: Tape, forward: list[Op]) -> Mixture:
    """Raises Nothing."""
    given = given_to_network(tape, forward)
    if not given:
        raise Nothing("nothing-given")
    noises = noise_sources(tape, given)
    for candidate in _inputs(tape, given, noises):
        if (mixture := _mixture(tape, candidate, noises)) is not None:
            _find_clean(tape, mixture, given)
            _find_told(tape, mixture, given)
            return mixture
    raise Nothing("no-noise" if not noises else "noise-not-linear")


def noise_sources(tape: Tape, given: list[Given]) -> int:
    """The bits of what may be noise: draws of image size, and normal numbers of image size from outside torch."""
    sources = {source for each in given for source in tape.sources(each.value.content)}
    largest = max((_count(source) for source in sources), default=0)
    bits = 0
    for source in sources:
        is_large = _count(source) * LARGE > largest and _count(source) > LARGE
        if is_large and (source.kind == "drawn" or _is_standard_normal(tape.values.get(source.index))):
            bits |= 1 << source.index
    return bits


def _count(op: Op) -> int:
    return int(torch.Size(op.shape).numel())


def _is_standard_normal(value: Tensor | None) -> bool:
    """For noise that numpy drew: mean 0, spread 1 and the fourth moment of a normal distribution, by 6 standard errors."""
    if value is None or not value.is_floating_point() or value.numel() < 512:
        return False
    x, n = value.double().flatten(), value.numel()
    moments = [(x.mean(), 0, 1), (x.square().mean(), 1, 2), (x.pow(4).mean(), 3, 96)]
    return all(abs(float(moment) - expected) < 6 * (variance / n) ** 0.5 for moment, expected, variance in moments)


def _inputs(tape: Tape, given: list[Given], noises: int) -> Iterator[Op]:
    """Values that may be the mixture, the best first: what is given to the network, then what that was made of."""

    def rank(op: Op) -> tuple[int, int]:
        return bool(op.content & noises) + bool(op.content & ~noises), _count(op)

    seen: set[Op] = set()
    in_order = dict.fromkeys(each.value for each in given if each.value.floating)  # a target is met after the input
    for each in sorted(in_order, key=rank, reverse=True)[:3]:
        if not each.content & noises:
            break
        upstream = [op for op in reversed(tape.upstream(each)) if op.kind == "op" and op.floating]
        for op in [each, *(op for op in upstream if op.content & noises and op.content & ~noises)][:60]:
            if op not in seen and len(op.shape) > 1:
                seen.add(op)
                yield op


def _mixture(tape: Tape, op: Op, noises: int) -> Mixture | None:
    """The mixture that this value is, if it is one."""
    try:
        value = tape.value(op)
    except NotRecorded:
        return None
    upstream = tape.upstream(op)
    pure = [each for each in upstream if each.content and not each.content & ~noises and each.floating and each is not op]
    for noise in reversed(pure):
        if _count(noise) not in (value.numel(), 1) and not _broadcasts(noise.shape, value.shape):
            continue
        drawn = tape.value(noise)
        share = value - tape.value(op, {noise: torch.zeros_like(drawn)})
        if not bool(share.any()) or not bool(torch.isfinite(share).all()):
            continue
        spread = drawn.reshape(value.shape) if drawn.numel() == value.numel() else drawn.expand_as(value)
        where = (share.abs() > 1e-9 * share.abs().max()).to(value)
        if float(where.mean()) < LEAST_PART:
            continue
        b, rest = multiple(share * where, spread * where)
        if float(rest.max()) < LINEAR:
            return Mixture(op, value, noise, spread, list(tape.sources(noise.content)), b, where)
    return None


def _broadcasts(shape: tuple, to: tuple) -> bool:
    return len(shape) == len(to) and all(one in (1, other) for one, other in zip(shape, to)) and shape != (1,) * len(to)


def multiple(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns k [B] and the share [B] of y that remains, where y = k x for each sample."""
    y, x = (v.detach().double().flatten(1) for v in (y, x))
    k = (y * x).sum(1) / (x * x).sum(1).clamp(min=1e-30)
    return k, (y - k[:, None] * x).norm(dim=1) / y.norm(dim=1).clamp(min=1e-12)


def _find_clean(tape: Tape, mixture: Mixture, given: list[Given]) -> None:
    rest = tape.value(mixture.input, {mixture.noise: torch.zeros_like(tape.value(mixture.noise))}) * mixture.where
    if float(rest.abs().max()) < 1e-6:
        return
    noise = mixture.noise.content
    mixture.levels = tuple(_levels(tape, mixture, given))
    levels = sum(1 << source.index for source in mixture.levels)
    upstream = tape.upstream(mixture.input)
    for op in reversed(upstream):
        fits = op.floating and op.content and not op.content & (noise | levels) and _count(op) == mixture.value.numel()
        if not fits or op.shape[0] != mixture.size or op.kind in ("trained", "frozen"):
            continue
        value = tape.value(op).reshape(mixture.value.shape)
        if not bool(value.any()):
            continue
        a, left = multiple(rest, value * mixture.where)
        offset = None
        if float(left.max()) > LINEAR:
            a, offset, left = _multiple_and_constant(rest, value, mixture.where)
        if float(left.max()) < LINEAR and float(a.abs().min()) > 0:
            mixture.clean, mixture.clean_value, mixture.a, mixture.offset = op, value, a, offset
            break
    extra = mixture.input.content & ~noise & ~levels & ~(mixture.clean.content if mixture.clean else 0)
    mixture.extra = tuple(source for source in tape.sources(extra) if source.kind == "drawn")


def _multiple_and_constant(y: Tensor, x: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a, c and the remaining share, all [B], where y = a x + c for each sample."""
    y, x, where = (v.detach().double().flatten(1) for v in (y, x, where))
    sides = torch.stack([x * where, where], -1)
    solution = torch.linalg.lstsq(sides, y.unsqueeze(-1)).solution
    left = ((sides @ solution).squeeze(-1) - y).norm(dim=1) / y.norm(dim=1).clamp(min=1e-12)
    return solution[:, 0, 0], solution[:, 1, 0], left


def _levels(tape: Tape, mixture: Mixture, given: list[Given]) -> list[Op]:
    """Small sources that the mixture is made with, and that the network is given besides; or else small draws."""
    small = [
        source
        for source in tape.sources(mixture.input.content & ~mixture.noise.content)
        if _count(source) <= mixture.size and source.kind in ("drawn", "data", "outside")
    ]
    told = 0
    for each in _beside(mixture, given):
        told |= each.value.content | each.value.choice
    known = [source for source in small if 1 << source.index & told]
    return known or [source for source in small if source.kind == "drawn"]


def _beside(mixture: Mixture, given: list[Given]) -> list[Given]:
    """What the network is given besides the mixture."""
    noise = mixture.noise.content
    return [each for each in given if not each.value.content & noise and each.value is not mixture.input]


def _find_told(tape: Tape, mixture: Mixture, given: list[Given]) -> None:
    levels = sum(1 << source.index for source in mixture.levels)
    for each in _beside(mixture, given):
        if not (each.value.content | each.value.choice) & levels:
            continue
        chain = [
            op for op in tape.upstream(each.value) if (op.content | op.choice) & levels and _count(op) in (1, mixture.size)
        ]
        if chain:
            told = tape.value(chain[-1]).double().flatten()
            mixture.told = told.expand(mixture.size) if told.numel() == 1 else told
        mixture.embedding = tape.value(each.value)
        return

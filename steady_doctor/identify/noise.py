"""Which of the values that the network is given may be noise."""

from torch import Tensor

from steady_doctor.identify.mixed import Given, numel
from steady_doctor.record.ops import Op
from steady_doctor.record.tape import Tape

NORMAL = {"randn", "randn_like", "normal", "normal_", "normal_functional"}
PART = 4  # of the numbers of one sample that a draw has at the least, to be noise: a quarter
LEAST = 8  # numbers of noise
LEAST_OF_DATA = 512  # of a batch that a loader gave: so many normal numbers are no chance


def noise_sources(tape: Tape, given: list[Given], part: float = PART) -> int:
    """The bits of what may be noise: draws of image size, and normal numbers of image size from outside torch. `part`: how much
    smaller than the largest it may be."""
    sources = {source for each in given for source in tape.sources(each.value.content)}
    may_be = {source for source in sources if _may_be_noise(source, tape)}
    size = max((each.value.shape[0] for each in given if each.value.floating and each.value.shape), default=1)
    most = max(map(numel, may_be), default=0)
    may_be = {source for source in may_be if numel(source) != size or most == size}  # else it is a level
    each_has = {source: numel(source) // max(1, source.shape[0] if len(source.shape) > 1 else 1) for source in may_be}
    least = max(each_has.values(), default=0) / part
    of_samples = {source for source in may_be if each_has[source] >= least and numel(source) > LEAST}
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
        and any(broadcasts((*source.shape, 1, 1, 1)[: len(noise.shape)], noise.shape) for noise in of_samples)
    ]  # more than one number of each sample: no level
    return bits | sum(1 << source.index for source in small if told)  # an offset of each sample


def _may_be_noise(source: Op, tape: Tape) -> bool:
    """Dropout's draws are none."""
    if not source.floating or source.name.startswith("bernoulli") or "dropout" in source.name:
        return False
    least = LEAST_OF_DATA if source.kind == "data" else LEAST
    return source.kind == "drawn" or is_standard_normal(tape.values.get(source.index), least)


def is_standard_normal(value: Tensor | None, least: int) -> bool:
    """For noise that numpy drew: mean 0, spread 1 and the fourth moment of a normal distribution, by 6 standard errors."""
    if value is None or not value.is_floating_point() or value.numel() < least:
        return False
    x, n = value.double().flatten(), value.numel()
    moments = [(x.mean(), 0, 1), (x.square().mean(), 1, 2), (x.pow(4).mean(), 3, 96)]
    return all(abs(float(moment) - expected) < 6 * (variance / n) ** 0.5 for moment, expected, variance in moments)


def broadcasts(shape: tuple, to: tuple) -> bool:
    return len(shape) == len(to) and all(one in (1, other) for one, other in zip(shape, to)) and shape != (1,) * len(to)

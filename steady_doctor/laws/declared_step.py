"""Of a script that declares what its step is: what the network gets, is told and is trained on, beside the formulas."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from steady_doctor.declare.declaration import Declaration
from steady_doctor.found import Found
from steady_doctor.identify.levels import Levels
from steady_doctor.identify.step import Asked, Pass
from steady_doctor.seen import Seen

EXACT = 2e-5  # of float32 arithmetic, which leaves 1e-7, and far below bf16's 4e-3
SMALL = 1e-3  # of what no training would feel
EVEN = 0.9  # the least slope of a number of a sample over the largest
SIGMAS = 7.0  # beyond which chance does not lie in the looks of any run
ROOM = 2e-3  # of what the arithmetic of random numbers leaves beside chance
IMPOSSIBLE = 12  # minus the decimal logarithm of a chance
LEARNED = 1 - math.exp(-1)  # how much of exp(-u) goes when u grows by 1


def _drawn(seen: Seen) -> Iterator[tuple[int, Pass, Declaration]]:
    if seen.declared is not None:
        for update, one in seen.passes():
            if one.drawn is not None:
                yield update, one, seen.declared


def _far(found: Tensor, wanted: Tensor, room: Tensor | float) -> int | None:
    """The sample that is furthest off, by more than it may be; a number that is not one is off."""
    over = torch.nan_to_num((found - wanted).abs() / room, nan=math.inf)
    place = int(over.argmax())
    return place if float(over[place]) > 1 else None


def input_(seen: Seen) -> Iterator[Found]:
    """The shares of image and noise at each level, and nothing else."""
    for update, one, declared in _drawn(seen):
        drawn, mixture = one.drawn, one.mixture
        if mixture is None or mixture.a is None or mixture.clean is None:
            if not one.not_recorded:
                yield Found("input-not-declared", update)
            continue
        a, b = declared.process.input(drawn.levels)
        room = _precision(one) * (1 + a.abs() + b.abs())
        clear = mixture.clean.stds > 1e-3  # an image without contrast says nothing of its share
        # By so much rounding changes the share of an image with little contrast: each number is rounded by its own size.
        blur = max(1e-6, _rounding(one)) * b * mixture.noise.stds / mixture.clean.stds.clamp(min=1e-12)
        if (place := _far(torch.where(clear, mixture.a, a), a, room + blur)) is None:
            place = _far(mixture.b, b, room)
        if place is None:
            place = _far(drawn.rest, torch.zeros_like(drawn.rest), _precision(one))
        if place is not None:
            figures = {"level": drawn.levels[place], "a": a[place], "b": b[place]}
            figures |= {"found_a": mixture.a[place], "found_b": mixture.b[place], "rest": drawn.rest[place]}
            yield Found("input-not-declared-shares", update, {name: float(value) for name, value in figures.items()})


def _precision(one: Pass) -> float:
    return max(EXACT, _rounding(one))


def _rounding(one: Pass) -> float:
    """Of what the network gets, relative to each number."""
    dtype = one.mixture.input.dtype if one.mixture is not None else torch.float32
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def told(seen: Seen) -> Iterator[Found]:
    for update, one, declared in _drawn(seen):
        if one.mixture is None:
            continue
        wanted = declared.process.told(one.drawn.levels)
        numbers = one.mixture.told[0].cpu() if one.mixture.told else torch.full_like(wanted, torch.nan)
        if len(numbers) != len(wanted):
            continue
        place = _far(numbers, wanted, EXACT * max(1.0, float(wanted.abs().max())))
        if place is not None:
            yield Found("timestep-not-declared", update, {"told": float(numbers[place]), "wanted": float(wanted[place])})


def target(seen: Seen) -> Iterator[Found]:
    for update, one, declared in _drawn(seen):
        asked = one.target
        if one.mixture is None or not _loss_is_finite(one) or (asked is None and one.not_recorded):
            continue
        if asked is None or asked.p is None or asked.rest is None or asked.kind != "squared":
            yield from _not_compared(update, asked)
            continue
        p, q = declared.process.target(one.drawn.levels)
        size = torch.maximum(p.abs(), q.abs())
        room = max(10 * EXACT, 4 * _output_precision(one)) * size
        known = asked.seen.cpu() if asked.seen is not None else torch.ones(len(p), dtype=torch.bool)
        place = _far(torch.where(known, asked.p.cpu(), p), p, room)
        if place is None:
            place = _far(torch.where(known, asked.q.cpu(), q), q, room)
        if place is None:
            rest = torch.where(known, asked.rest.cpu(), 0.0)
            place = _far(rest, torch.zeros_like(rest), room / size)
        if place is not None:
            figures = {"level": one.drawn.levels[place], "p": p[place], "q": q[place], "rest": asked.rest[place]}
            figures |= {"found_p": asked.p[place], "found_q": asked.q[place]}
            yield Found("target-not-declared", update, {name: float(value) for name, value in figures.items()})


def _not_compared(update: int, asked: Asked | None) -> Iterator[Found]:
    """Why there is no target; nothing where it could not be measured."""
    if asked is None:
        yield Found("target-without-output", update)
    elif asked.kind == "flat":
        yield Found("weight-flat", update)
    elif asked.kind == "squared":
        yield Found("target-of-another-shape", update)
    elif asked.kind != "unknown":
        yield Found("target-not-squared", update)


def _loss_is_finite(one: Pass) -> bool:
    return one.target is None or one.target.slope is None or bool(torch.isfinite(one.target.slope).all())


def _output_precision(one: Pass) -> float:
    return max((float(torch.finfo(dtype).eps) for dtype in one.drawn.layers), default=1e-7)


def weight(seen: Seen) -> Iterator[Found]:
    """What the mean squared error of each sample counts, in the mean over the samples of an update."""
    for update, one, declared in _drawn(seen):
        asked, drawn = one.target, one.drawn
        if asked is None or asked.kind != "squared" or asked.slope is None or one.mixture is None:
            continue
        wanted = declared.process.weight(drawn.levels)
        if declared.process.learned:
            if drawn.learned is None:
                if not one.not_recorded:
                    yield Found("weight-not-learned", update)
                continue
            wanted = wanted / drawn.learned.value.exp()
        found = asked.slope.cpu() / drawn.loss_scale * asked.each * one.mixture.size * declared.micro_steps / 2
        place = _far(found / wanted, torch.ones_like(wanted), max(SMALL, 4 * _output_precision(one)))
        if place is not None:
            figures = {"level": drawn.levels[place], "found": found[place], "wanted": wanted[place]}
            yield Found("weight-not-declared", update, {name: float(value) for name, value in figures.items()})
        elif asked.even is not None and asked.even < EVEN:
            yield Found("weight-uneven", update, {"even": asked.even})


def learned(seen: Seen) -> Iterator[Found]:
    """The gradient that u gets is 1 - error / exp(u) for each sample: by so much less goes the second part where u is greater
    by 1."""
    for update, one, declared in _drawn(seen):
        if not declared.process.learned or one.drawn.learned is None or one.mixture is None:
            continue
        u = one.drawn.learned
        factor = one.mixture.size * declared.micro_steps / one.drawn.loss_scale
        here, beyond = u.slope * factor, u.slope_beyond * factor
        share = 1 - here  # error / exp(u)
        place = _far(beyond - here, share * LEARNED, SMALL * (1 + share.abs()))
        if place is None and (not u.own or bool((share.abs() < EXACT).all())):  # no error is 0
            place = 0
        if place is not None:
            yield Found("weight-learned", update, {"here": float(here[place]), "beyond": float(beyond[place])})


def noise(seen: Seen) -> Iterator[Found]:
    """White, normal, of mean 0 and variance 1; independent of the images."""
    sums: dict[str, tuple[float, int]] = {}
    for _, one, _ in _drawn(seen):
        for name, (total, count) in one.drawn.noise.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = before[0] + total, before[1] + count
    if not sums or sums["values"][1] < 200:
        return
    means = {name: total / count for name, (total, count) in sums.items() if count}
    for name, value, wanted, spread in _figures(means, {name: count for name, (_, count) in sums.items()}):
        is_off = not abs(value - wanted) <= SIGMAS * spread * (1.5 if spread > 0.1 else 1.0) + ROOM
        if is_off or (wanted == 1.0 and _too_small(value, spread)):
            yield Found("noise-not-declared", seen.updates, {"what": name, "value": value, "wanted": wanted})
            return


def _figures(means: dict[str, float], counts: dict[str, int]) -> Iterator[tuple[str, float, float, float]]:
    """(name, value, what it is by chance, the spread of that)."""
    count, variance = counts["values"], means["squares"]
    scale = variance or 1.0
    yield "mean", means["values"], 0.0, count**-0.5
    yield "variance", variance, 1.0, (2 / count) ** 0.5
    yield "kurtosis", means["fourth powers"] / variance**2 if variance else math.nan, 3.0, (96 / count) ** 0.5
    for name in ("rows", "columns", "channels"):
        if counts[name]:
            yield f"correlation of neighboring {name}", means[name] / scale, 0.0, counts[name] ** -0.5
    parts = {"sum of images": scale, "means of images": scale, "variances of images": 1.0, "shares of the image": 1.0}
    for name, unit in parts.items():
        if counts[name] >= 64:
            yield f"variance of the {name}, over that of chance", means[name] / unit, 1.0, (2 / counts[name]) ** 0.5


def _too_small(value: float, spread: float) -> bool:
    """Whether chance leaves a mean of 2 / spread^2 squares of normal numbers so far below 1 (Chernoff's bound). Few of them are
    often as far above it."""
    value = max(value, 0.0) + ROOM
    return value < 1 and (value - 1 - math.log(value)) / spread**2 > SIGMAS**2 / 2


def again(seen: Seen) -> Iterator[Found]:
    """Noise that an earlier sample had, also of another sign or in another order."""
    known: set[int] = set()
    for update, one, _ in _drawn(seen):
        marks = one.drawn.marks
        if one.mixture is not None and one.mixture.noise.each >= 16:
            repeated = len(marks) - len(set(marks) - known)
            if repeated:
                yield Found("noise-repeated", update, {"count": repeated, "of": len(marks)})
                return
            known.update(marks)


def shared(seen: Seen) -> Iterator[Found]:
    """Each sample of a pass has a level of its own."""
    passes = [(update, one.drawn.levels) for update, one, _ in _drawn(seen)]
    if not passes or any(bool((one != one[0]).any()) for _, one in passes):
        return
    possible = seen.declared.process.possible or 1 << 20
    if sum(len(one) - 1 for _, one in passes) * math.log10(possible) > IMPOSSIBLE:
        yield Found("timestep-shared", passes[0][0], {"size": len(passes[0][1])})


def levels(seen: Seen) -> Iterator[Found]:
    """Drawn as declared: their distribution, their number, and each by itself."""
    known = seen.levels
    if seen.declared is None or known is None or known.count < 64:
        return
    possible, count = seen.declared.process.possible, known.count
    step = 1 / possible if possible else 0.0
    limit = math.sqrt(math.log(2e12) / 2 / count)  # of the distance of two distributions, by chance 1e-12
    is_off = known.distance > limit + step or abs(known.center) > SIGMAS / math.sqrt(12 * count) + step
    is_off |= abs(known.spread) > SIGMAS * math.sqrt(0.8 / count) + 2 * step + ROOM
    if is_off:
        figures = {"low": known.low, "high": known.high, "distance": known.distance, "count": count}
        yield Found("timestep-distribution", seen.updates, figures)
    elif known.different < _fewest(count, possible or 1 << 20):
        yield Found("timestep-repeated", seen.updates, {"different": known.different, "count": count})
    elif known.batches >= 64 and (how := _dependence(known)):
        yield Found("timestep-dependent", seen.updates, {"how": how[0], "value": how[1]})


def _fewest(count: int, possible: int) -> float:
    """Different ones of `count` independent numbers of so many `possible` ones, each as likely."""
    absent = math.exp(count * math.log1p(-1 / possible))  # chance of each that it does not come
    return possible * (1 - absent) - SIGMAS * math.sqrt(possible * absent * (1 - absent)) - 1


def _dependence(known: Levels) -> tuple[str, float] | None:
    """How levels depend on each other, where chance does not explain it."""
    if known.means is not None and abs(math.log(max(known.means, 1e-30))) > 1.5 * SIGMAS * math.sqrt(2 / known.batches):
        return "variance of the batches' means, over that of chance", known.means
    for name, correlation, pairs in known.correlations:
        if abs(correlation) > SIGMAS / math.sqrt(pairs):
            return f"correlation of {name}", correlation
    return None


def labels(seen: Seen) -> Iterator[Found]:
    """The network is told the labels that were drawn, and for none what stands for none."""
    for update, one, declared in _drawn(seen):
        if one.drawn.labels is None or not declared.classes or one.mixture is None:
            continue
        wanted = torch.where(one.drawn.labels < 0, declared.no_class, one.drawn.labels)
        given = [known.labels.cpu() for known in one.conditions.given if known.labels is not None]
        if all(len(known) != len(wanted) or not torch.equal(known, wanted) for known in given):
            is_told = any(known.labels is None for known in one.conditions.given)  # in a form that is not known
            if one.conditions.not_recorded or one.not_recorded:
                continue
            if not given and (is_told or bool((wanted == declared.no_class).all())):
                continue
            same = given[0] == wanted if given and len(given[0]) == len(wanted) else torch.zeros(len(wanted), dtype=torch.bool)
            yield Found("condition-not-drawn", update, {"what": "labels", "others": int((~same).sum()), "of": len(wanted)})


def numbers(seen: Seen) -> Iterator[Found]:
    """The network is told the numbers of each image. What is told nothing is told zeros."""
    for update, one, declared in _drawn(seen):
        if not declared.numbers or one.mixture is None or one.conditions.not_recorded or one.not_recorded:
            continue
        count, wanted = one.mixture.size, one.drawn.numbers
        given = [known.rows for known in one.conditions.given if known.shape == (count, declared.numbers)]
        others = count
        if wanted is not None:
            room = max(EXACT, 4 * _output_precision(one)) * (1 + wanted.abs().amax())
            others = min(int(((rows - wanted).abs() > room).any(1).sum()) for rows in [*given, torch.zeros_like(wanted)])
        if others:
            figures = {"what": f"{declared.numbers} numbers", "others": others, "of": count}
            yield Found("condition-not-drawn", update, figures)


LAWS = (noise, again, shared, levels, told, input_, labels, numbers, target, weight, learned)

"""Whether the network is told the noise level of each image, and whether the levels cover the path."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from steady_doctor.found import Found
from steady_doctor.identify.figures import Figures
from steady_doctor.identify.step import Mixed
from steady_doctor.laws.paths import levels
from steady_doctor.seen import Seen

ERRORS = 6.0  # standard errors
CHANCE = 1e-6  # that a healthy script is accused by chance
LEFT_OUT = 0.25  # of a path at one end, that a script may leave out on purpose
SHIFTED, CUT = 0.35, 0.15  # of a line; the latter where the levels end at once
ENOUGH, DENSE = 64, 0.06  # levels, and the share of them in the outer tenths of their range
FEW_CHANGE, SOME_CHANGE = 0.2, 0.5  # of an embedding's numbers; the latter where none of them rises and falls
UNCHANGED = 0.1  # of its range, by which a number of the embedding does not count as changed
SAME = 1e-6  # of the range of the numbers that are told, and of the largest share of noise
MOVED = 2e-3  # of the logarithm of the signal-to-noise ratio, by which a level is another one


def _log_ratio(mixture: Mixed) -> Tensor:
    assert mixture.a is not None  # noqa: S101
    return (mixture.a.clamp(min=1e-9) / mixture.b.clamp(min=1e-9)).log()


def _known(seen: Seen) -> list[tuple[int, Mixed]]:
    return [(update, one.mixture) for update, one in seen.mixed() if one.mixture.a is not None]


def told(seen: Seen) -> Iterator[Found]:
    """The number that a denoiser gets follows the noise level: one of those on the way does, the same one in all passes."""
    if not any(one.target is not None and one.target.p is not None for _, one in seen.passes()):
        return  # what is asked is not known: it may be a discriminator
    known = _known(seen)
    ratios = torch.cat([_log_ratio(mixture) for _, mixture in known]) if known else torch.zeros(0)
    if len(ratios) < 4 or float(ratios.max() - ratios.min()) < 10 * MOVED:
        return
    if not any(mixture.told for _, mixture in known):
        # A network that has nothing for the level may be made so. Else what reads it is left out, or gets something else.
        gradients = [update.gradient for update in seen.recorded()]
        has_place = any(one.unread or one.without or one.zero for one in gradients) or any(
            one.told_otherwise for _, one in known
        )
        if has_place and all(one.has_source and not one.behind_frozen for _, one in known):  # else it may have come in there
            yield Found("timestep-not-told", known[0][0])
        return
    known = [(update, mixture) for update, mixture in known if mixture.told]
    ratios = torch.cat([_log_ratio(mixture) for _, mixture in known])
    rounded = any(mixture.told_rounded for _, mixture in known)
    mixed = torch.cat([mixture.a.abs() + mixture.b.abs() > 0 for _, mixture in known])  # of the others nothing is known
    told, ratios = torch.cat([mixture.told[0] for _, mixture in known])[mixed], ratios[mixed]
    if len(ratios) > 1 and float(ratios.max() - ratios.min()) > 10 * MOVED and not _follows(told, ratios, rounded):
        pairs = list(zip(known[0][1].told[0].tolist(), ratios.tolist()))[:4]
        yield Found("timestep-other", known[0][0], {"pairs": pairs})


def _follows(told: Tensor, ratios: Tensor, rounded: bool) -> bool:
    """Whether the one is a strictly monotone function of the other; of numbers that are `rounded`, several may be the same. Of
    samples of one level, such as those beyond a clamp, nothing is known of their order."""
    order = torch.argsort(ratios)
    told, ratios = told[order], ratios[order]
    range_ = float(told.max() - told.min())
    if range_ <= 0 or not bool(torch.isfinite(told).all()):
        return False
    kept, last = [0], float(ratios[0])
    for place, ratio in enumerate(ratios.tolist()):
        if ratio - last > MOVED * (1 + abs(ratio)):
            kept.append(place)
            last = ratio
    steps = told[kept].diff()
    up, down = bool((steps >= -SAME * range_).all()), bool((steps <= SAME * range_).all())
    return (up or down) and (rounded or not bool((steps.abs() <= SAME * range_).any()))


def counted(seen: Seen) -> Iterator[Found]:
    """Where a whole number picks the level from a table, that number, or a multiple of it, is what the network is told."""
    for update, mixture in _known(seen):
        if mixture.index is None or not mixture.told or mixture.table is None:
            continue
        index = mixture.index.double()
        if len(index.unique()) < 3:
            continue
        lines = [_line(index, way) for way in mixture.told]
        straight = [line for line in lines if line is not None]
        if lines[0] is None:  # it is told something else than the number of a row
            continue
        if straight[0][0] < 0 and float(mixture.table[2, -1]) > float(mixture.table[2, 0]):  # else the table begins with noise
            yield Found("timestep-reversed", update)
        counts = [shift for slope, shift in straight if abs(slope - 1) < 1e-6]
        first_is_a_level = float(mixture.table[2, 0]) > 1e-6
        if counts and abs(counts[0]) > 0.5 and first_is_a_level:
            yield Found("timestep-shifted", update, {"by": counts[0]})
        rows = float(mixture.table[0, -1]) + 1
        is_wide = float(index.max() - index.min()) > 0.5 * rows
        changing = _changing_if_slow(mixture.embedding, index) if straight[0][0] * rows <= 2 and is_wide else None
        if changing is not None:
            yield Found("timestep-scale", update, {"range": straight[0][0] * rows, "changing": changing})


def _changing_if_slow(embedding: Figures | None, index: Tensor) -> float | None:
    """The share of an embedding's numbers that change with the level, where few do; None of others."""
    if embedding is None or embedding.each < 8:
        return None
    spread = embedding.head.amax(0) - embedding.head.amin(0)
    changing = float((spread > UNCHANGED * max(1e-9, embedding.high - embedding.low)).double().mean())
    steps = embedding.head[index[: len(embedding.head)].argsort()].diff(dim=0)
    turns = bool(((steps > 0).any(0) & (steps < 0).any(0)).any())  # as a wave does that goes through more than half a period
    return changing if changing < (FEW_CHANGE if turns else SOME_CHANGE) else None


def _line(x: Tensor, y: Tensor) -> tuple[float, float] | None:
    """(slope, shift) where y is a line of x."""
    dx = x - x.mean()
    slope = float((dx * (y - y.mean())).sum() / (dx * dx).sum())
    shift = float(y.mean() - slope * x.mean())
    exact = float((slope * x + shift - y).abs().max()) <= 1e-4 * max(1e-12, float(y.abs().max()))
    return (slope, shift) if exact and slope != 0 else None


def alone(seen: Seen) -> Iterator[Found]:
    """Each image has a level of its own."""
    known = [(update, mixture) for update, mixture in _known(seen) if mixture.size > 1]
    path = levels(seen)
    is_meant = path is not None and path.single and all(mixture.index is None for _, mixture in known)
    are_one = [float(mixture.b.max() - mixture.b.min()) <= SAME * float(mixture.b.abs().max()) for _, mixture in known]
    if not is_meant and len(known) > 1 and all(are_one):
        yield Found("timestep-shared", known[0][0], {"size": known[0][1].size})


def again(seen: Seen) -> Iterator[Found]:
    """The levels of a batch are drawn anew in each pass."""
    known = [(update, one.levels, one.mixture.size) for update, one in seen.mixed() if one.mixture.a is not None]
    known = [each for each in known if each[1] is not None and each[1].shape == (each[2],) and len(each[1].unique()) > 3]
    for (_, before, _), (update, now, size) in pairwise(known):
        if torch.equal(before, now):
            yield Found("timestep-again", update, {"size": size})


def covered(seen: Seen) -> Iterator[Found]:
    """The levels reach both ends of a path that has ends."""
    known = _known(seen)
    found = levels(seen)
    if found is None:
        return
    if all(mixture.index is not None and mixture.table is not None for _, mixture in known):
        place = torch.cat([mixture.index.double() / float(mixture.table[0, -1]) for _, mixture in known])
    elif found.kind == "flow":
        place = found.b
    else:
        return
    low, high = float(place.min()), float(place.max())
    drawn = {mixture.index_range for _, mixture in known}
    if len(drawn) == 1 and (range_ := drawn.pop()) is not None and found.kind == "vp":
        rows = int(known[0][1].table[0, -1]) + 1
        left, end = max((range_[0] / rows, "low"), (1 - range_[1] / rows, "high"))
        if left > LEFT_OUT:
            yield Found("timestep-left-out", known[0][0], {"share": left, "end": end, "samples": len(place)})
        return
    if low < -1e-6 or high > 1 + 1e-6:
        yield Found("timestep-outside", known[0][0], {"low": low, "high": high})
    by_chance = len(place) if not any(alone(seen)) else len(place.unique())
    shifted = CUT if _has_edges(place, low, high) else SHIFTED
    ends = ((low, "low"), (1 - high, "high")) if found.kind != "flow" else ((low + 1 - high - shifted, "low"),)
    for left, end in ends:  # of a line, times may be shifted to much noise, and need not reach the other end
        if left > LEFT_OUT and (1 - left) ** by_chance < CHANCE:
            yield Found("timestep-left-out", known[0][0], {"share": left, "end": end, "samples": by_chance})
    if found.kind == "flow" and len(place) >= 16 and (share := _piled(place, low, high)) is not None:
        yield Found("timestep-piled", known[0][0], {"share": share})


def _has_edges(place: Tensor, low: float, high: float) -> bool:
    """Whether levels are as dense at both ends of their range as within it, as those that are drawn from a part of a line; a
    distribution that is shifted along the whole line grows thin."""
    tenth = (high - low) / 10
    ends = min(int((place < low + tenth).sum()), int((place > high - tenth).sum()))
    return len(place) >= ENOUGH and ends > DENSE * len(place)


def _piled(place: Tensor, low: float, high: float) -> float | None:
    """The share of the levels that stand at one end, where it is far more than at any other level: a student may have few."""
    inner = place[(place > low + 1e-9) & (place < high - 1e-9)]
    most = float((inner * 1e4).round().unique(return_counts=True)[1].max()) / len(place) if len(inner) else 1.0
    share = max(float((place <= low + 1e-9).double().mean()), float((place >= high - 1e-9).double().mean()))
    return share if share > max(0.15, 3 * most) else None


def lognormal(seen: Seen) -> Iterator[Found]:
    """Noise levels that the user asked for under the names of EDM: ln sigma of this mean and spread."""
    found = levels(seen)
    mean, spread = (seen.options.get(name) for name in ("P_mean", "P_std"))
    if found is None or found.kind not in ("edm", "ve") or not all(isinstance(x, (int, float)) for x in (mean, spread)):
        return
    logs = found.sigma.clamp(min=1e-12).log()
    count = len(logs)
    off_mean = abs(float(logs.mean()) - mean) > ERRORS * abs(spread) / count**0.5 + 0.05
    off_spread = abs(float(logs.std()) - abs(spread)) > ERRORS * abs(spread) / (2 * count) ** 0.5 + 0.05
    if count >= 16 and (off_mean or off_spread):
        figures = {"mean": float(logs.mean()), "spread": float(logs.std()), "asked_mean": mean, "asked_spread": spread}
        yield Found("timestep-lognormal", seen.mixed()[0][0], figures)


LAWS = (lognormal, told, counted, alone, again, covered)

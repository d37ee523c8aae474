"""Whether all processes train one network, each with images and noise of its own."""

import math
from collections.abc import Iterator

import torch

from steady_doctor.found import Found
from steady_doctor.seen import Seen

LOOKS = 3  # updates
IMPOSSIBLE = 12  # minus the decimal logarithm of a chance


def gradient(seen: Seen) -> Iterator[Found]:
    looks = _parted(seen, "gradient")
    if looks:
        update, told = looks[0]
        yield Found("ranks-gradient", update, {"different": len(set(told)), "processes": len(told)})


def weights(seen: Seen) -> Iterator[Found]:
    looks = _parted(seen, "weights")
    if looks:
        update, told = looks[0]
        yield Found("ranks-weights", update, {"different": len(set(told)), "processes": len(told)})


def images(seen: Seen) -> Iterator[Found]:
    looks = _looks(seen, "images")
    if len(looks) >= LOOKS and all(len(set(told)) == 1 for _, told in looks):
        yield Found("ranks-images", looks[0][0], {"processes": len(looks[0][1])})


def noise(seen: Seen) -> Iterator[Found]:
    looks = _looks(seen, "noise")
    if len(looks) >= LOOKS and all(len(set(told)) == 1 for _, told in looks):
        yield Found("ranks-noise", looks[0][0], {"processes": len(looks[0][1])})


def averages(seen: Seen) -> Iterator[Found]:
    looks = _parted(seen, "averages")
    if looks:
        update, told = looks[0]
        yield Found("ranks-averages", update, {"different": len(set(told)), "processes": len(told)})


def levels(seen: Seen) -> Iterator[Found]:
    """The same ones in all processes, though each has noise of its own: where no chance makes so many levels equal."""
    looks = _looks(seen, "levels")
    own = [one.levels for _, one in seen.mixed() if one.levels is not None]
    if len(looks) < LOOKS or not own or any(noise(seen)) or any(len(set(told)) > 1 for _, told in looks):
        return
    # A level is equal to another one by chance at most as often as the most frequent one comes. Where nothing is declared,
    # those of a batch may follow from one draw.
    counts = torch.cat(own).unique(return_counts=True)[1]
    draws = len(looks) * (1 if seen.declared is None else min(len(levels.unique()) for levels in own))
    if draws * -math.log10(float(counts.max() / counts.sum())) > IMPOSSIBLE:
        yield Found("ranks-levels", looks[0][0], {"processes": len(looks[0][1]), "updates": len(looks)})


def _parted(seen: Seen, name: str) -> list[tuple[int, list[str]]]:
    """Those at which the processes differ: in a script that says nothing of itself, all of them, or none."""
    looks = _looks(seen, name)
    parted = [look for look in looks if len(set(look[1])) > 1]
    return parted if seen.declared is not None or (len(looks) >= LOOKS and len(parted) == len(looks)) else []


def _looks(seen: Seen, name: str) -> list[tuple[int, list[str]]]:
    """What each process told, at the updates at which all did."""
    return [
        (u, [one[name] for one in everyone]) for u, everyone in sorted(seen.ranks.items()) if all(name in x for x in everyone)
    ]


LAWS = (gradient, weights, averages, images, noise, levels)

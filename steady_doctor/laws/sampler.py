"""Whether the script's own sampler takes the network's answer for what the loss asks for.

A step of any sampler on a path a x_0 + b noise leads from a point of the path to another one: of the answer that a perfect
network would give, p x_0 + q noise, it makes the share a of the next level, and the share b or, beside fresh noise, less of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steady_doctor.found import Found
from steady_doctor.identify.noise import is_standard_normal
from steady_doctor.seen import Seen

FEWEST, FEWEST_COUNTED = 32, 8  # levels of training of which a, b, p and q are known; of whole numbers
ENOUGH = 64  # numbers that tell noise
STEPS = 4  # of the sampler
SAME = 1e-4  # of an angle: levels that are one and the same
LEAST = 1e-4  # by which a share is to change in a step
FEW, MANY = 1 / 3, 3  # times the step that the levels ask for
TOO_MUCH = 1.75  # times the loss of noise that they ask for: twice, where fresh noise is left out
MOST = 0.75  # of the steps
MOST_OF_IT = 0.3  # of the image's share
CLOSE = 0.3  # of the change of a share, by which a sampler that is right differs from what the levels ask for
FAINT = 0.1  # of the changes of both shares


def read(seen: Seen) -> Iterator[Found]:
    tables = trained_levels(seen)
    sampled = [one for one in seen.sampled if one.name in tables]
    known = [(at(tables[one.name], one.told), at(tables[one.name], one.then), one) for one in sampled]
    known = [(now, then, one) for now, then, one in known if now is not None and then is not None]
    if len(known) < STEPS:
        return
    update, (now, then, ones) = seen.mixed()[-1][0], zip(*known)
    made = [(one.image, one.noise) for one in ones]
    steps = Steps(np.array(now), np.array(then), np.array(made), np.array([one.fresh for one in ones]))
    gains = steps.then[:, 0] - steps.now[:, 0]
    gains = gains[np.abs(gains) > LEAST]
    images = [one.mixture.clean.head for _, one in seen.mixed() if one.mixture.clean is not None]  # latents may look like noise
    from_noise = all(is_standard_normal(one.start, ENOUGH) for one in sampled)  # else images are encoded, or changed
    from_noise = from_noise and not all(is_standard_normal(one, ENOUGH) for one in images)
    if len(gains) >= STEPS and gains.max() < 0 and -gains.sum() > MOST_OF_IT and from_noise:
        yield Found("export-sampled-backwards", update, {"steps": len(gains), "fall": -float(gains.sum())})
    elif (found := _off(steps)) is not None:
        is_answer, figures = found
        if not is_answer:
            yield Found("export-other-schedule", update, figures)
        elif reads := _read_as(steps):
            yield Found("target-other-sampler", update, figures | {"reads": reads})
        else:
            yield Found("export-other-step", update, figures)


@dataclass
class Steps:
    """a, b, p and q at the level that the network was told, and at the next one, [N, 4]; the shares of image and noise that
    were made, [N, 2]; and whether there was fresh noise, [N]."""

    now: np.ndarray
    then: np.ndarray
    made: np.ndarray
    fresh: np.ndarray


def _off(steps: Steps) -> tuple[bool, dict[str, Any]] | None:
    """(whether it is the answer that is taken for something else, figures), where most steps do not lead to the next level."""
    asked, done = steps.then[:, :2] - steps.now[:, :2], steps.made - steps.now[:, :2]
    moves = np.abs(asked[:, 0]) > LEAST
    if moves.sum() >= STEPS:
        wanted, made = asked[moves, 0], done[moves, 0]
        times, figures = made / wanted, _figures("image", wanted, made)
        if ((times < 0) | (times > MANY)).mean() > MOST:
            return True, figures
        if (times < FEW).mean() > MOST:
            return False, figures
    # Of the noise a step takes something off, and not more than twice what is there; fresh noise is not counted.
    falls = -asked[:, 1] > LEAST * steps.now[:, 1].max()
    if falls.sum() >= STEPS:
        wanted, made, still = asked[falls, 1], done[falls, 1], ~steps.fresh[falls]
        if ((made > 0) | (-made > 2 * steps.now[falls, 1])).mean() > MOST:
            return True, _figures("noise", wanted, made)
        if still.sum() >= STEPS and made[still].sum() < TOO_MUCH * wanted[still].sum():
            return False, _figures("noise", wanted[still], made[still])
    return None


def _figures(share: str, wanted: np.ndarray, made: np.ndarray) -> dict[str, Any]:
    return {"share": share, "steps": len(wanted), "wanted": float(wanted.sum()), "made": float(made.sum())}


def _read_as(steps: Steps) -> str:
    """What the answer is to be, for these steps to lead to the next level; "" where nothing usual is.

    A step is a share of what the network got and a share of its answer, which follow from what the answer made of it.
    """
    a, b, p, q = steps.now.T
    both = np.stack([np.stack([a, p], 1), np.stack([b, q], 1)], 1)
    solid = np.abs(np.linalg.det(both)) > LEAST
    if solid.sum() < STEPS:
        return ""
    a, b, p, q = steps.now[solid].T
    got, answer = np.linalg.solve(both[solid], steps.made[solid][..., None])[..., 0].T
    usual = {"an image": (1, 0), "noise": (0, 1), "v": (-b, a), "a velocity": (-1, 1), "a score": (0, -1 / np.maximum(b, SAME))}
    usual["what it is"] = p, q
    then, changes = steps.then[solid], np.abs(steps.then[solid, :2] - steps.now[solid, :2]).sum(0)
    asked = np.maximum(changes, FAINT * changes.sum())  # one of the shares may stay
    least = np.where(steps.fresh[solid], 0.0, then[:, 1])  # of noise, the rest of which is fresh
    best, closest = "", CLOSE
    for sign, word in ((1, ""), (-1, " with the other sign")):
        for name, (of_image, of_noise) in usual.items():
            image, rest = got * a + sign * answer * of_image, got * b + sign * answer * of_noise
            off = max(np.stack([np.abs(image - then[:, 0]), np.abs(rest - np.clip(rest, least, then[:, 1]))]).sum(1) / asked)
            best, closest = (name + word, off) if off < closest - SAME else (best, closest)
    return best


def trained_levels(seen: Seen) -> dict[str, np.ndarray]:
    """Of each argument of the network that follows the noise level: [5, N], sorted: it, and a, b, p and q."""
    rows: dict[str, list[Tensor]] = {}
    for _, one in seen.mixed():
        if (called := one.called) is not None:
            for name, numbers in called.told.items():
                rows.setdefault(name, []).append(torch.stack([numbers, called.a, called.b, called.p, called.q]))
    found = {}
    for name, parts in rows.items():
        table = torch.cat(parts, 1).numpy()
        table = table[:, np.argsort(table[0], kind="stable")]
        moves = np.diff(np.arctan2(table[2], table[1]))
        moved = np.diff(table[0]) > 0
        is_same, one_way = np.abs(moves[~moved]) < SAME, (moves[moved] > -SAME, moves[moved] < SAME)
        is_level = bool(is_same.all()) and any(bool(way.all()) for way in one_way)
        fewest = FEWEST if bool((table[0] % 1).any()) else FEWEST_COUNTED
        if is_level and len(np.unique(table[0])) >= fewest and np.isfinite(table).all():
            found[name] = table
    return found


def at(table: np.ndarray, number: float) -> tuple[float, float, float, float] | None:
    """a, b, p and q where the network is told this; None beyond the levels of training."""
    if not table[0, 0] <= number <= table[0, -1]:
        return None
    a, b, p, q = (float(np.interp(number, table[0], row)) for row in table[1:])
    return a, b, p, q

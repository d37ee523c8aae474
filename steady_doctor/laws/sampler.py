"""Whether the script's own sampler takes the network's answer for what the loss asks for.

A step of any sampler on a path a x_0 + b noise leads from a point of the path to another one: of the answer that a perfect
network would give, p x_0 + q noise, it makes the share a of the next level, and the share b or, beside fresh noise, less of it.
"""

from collections.abc import Iterator

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


def read(seen: Seen) -> Iterator[Found]:
    tables = trained_levels(seen)
    steps = [one for one in seen.sampled if one.name in tables]
    known = [(at(tables[one.name], one.told), at(tables[one.name], one.then), one) for one in steps]
    known = [(now, then, one) for now, then, one in known if now is not None and then is not None]
    update = seen.mixed()[-1][0] if known else 0
    gains = [(then[0] - now[0], one.image - now[0]) for now, then, one in known]
    gains = [(wanted, made) for wanted, made in gains if abs(wanted) > LEAST]
    if len(gains) >= STEPS:
        wanted, made = np.array(gains).T
        figures, times = _figures("image", wanted, made), made / wanted
        from_noise = all(is_standard_normal(one.start, ENOUGH) for one in steps)  # else images are encoded, or changed
        if wanted.max() < 0 and -wanted.sum() > MOST_OF_IT and from_noise:
            yield Found("target-sampled-backwards", update, {"steps": len(wanted), "fall": -float(wanted.sum())})
            return
        if float(((times < 0) | (times > MANY)).mean()) > MOST:
            yield Found("target-other-sampler", update, figures)
            return
        if float((times < FEW).mean()) > MOST:
            yield Found("export-other-schedule", update, figures)
            return
    # Of the noise a step takes something off, and not more than twice what is there; fresh noise is not counted.
    largest = max((now[1] for now, _, _ in known), default=0.0)
    losses = [
        (now[1] - then[1], now[1] - one.noise, 2 * now[1]) for now, then, one in known if now[1] - then[1] > LEAST * largest
    ]
    if len(losses) >= STEPS:
        wanted, made, most = np.array(losses).T
        if float(((made < 0) | (made > most)).mean()) > MOST:
            yield Found("target-other-sampler", update, _figures("noise", -wanted, -made))
            return
        still = np.array([not one.fresh for now, then, one in known if now[1] - then[1] > LEAST * largest])
        if still.sum() >= STEPS and made[still].sum() > TOO_MUCH * wanted[still].sum():
            yield Found("export-other-schedule", update, _figures("noise", -wanted[still], -made[still]))


def _figures(share: str, wanted: np.ndarray, made: np.ndarray) -> dict[str, str | float]:
    return {"share": share, "steps": len(wanted), "wanted": float(wanted.sum()), "made": float(made.sum())}


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

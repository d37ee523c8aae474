"""Whether the script's own sampler takes the network's answer for what the loss asks for.

A step of any sampler on a path a x_0 + b noise, with fresh noise or without, leads from a point of the path to another one: of
the answer that a perfect network would give, p x_0 + q noise, it makes the share a of the next level.
"""

from collections.abc import Iterator

import numpy as np

from steady_doctor.found import Found
from steady_doctor.identify.noise import is_standard_normal
from steady_doctor.seen import Seen

FEWEST = 32  # levels of training of which a, b, p and q are known
ENOUGH = 64  # numbers that tell noise
STEPS = 4  # of the sampler
SAME = 1e-4  # of an angle: levels that are one and the same
LEAST = 1e-4  # by which the image's share is to change in a step
FEW, MANY = 1 / 3, 3  # times the step that the levels ask for
MOST = 0.75  # of the steps
MOST_OF_IT = 0.3  # of the image's share


def read(seen: Seen) -> Iterator[Found]:
    tables = trained_levels(seen)
    steps = [one for one in seen.sampled if one.name in tables]
    known = [(at(tables[one.name], one.told), at(tables[one.name], one.then), one.image) for one in steps]
    moves = [(then[0] - now[0], image - now[0]) for now, then, image in known if now is not None and then is not None]
    moves = [(wanted, made) for wanted, made in moves if abs(wanted) > LEAST]
    if len(moves) < STEPS:
        return
    wanted, made = np.array(moves).T
    update, figures = seen.mixed()[-1][0], {"steps": len(wanted), "wanted": float(wanted.sum()), "made": float(made.sum())}
    times = made / wanted
    from_noise = all(is_standard_normal(one.start, ENOUGH) for one in steps)  # else images are encoded, or changed
    if wanted.max() < 0 and -wanted.sum() > MOST_OF_IT and from_noise:
        yield Found("target-sampled-backwards", update, {"steps": len(wanted), "fall": -float(wanted.sum())})
    elif float(((times < 0) | (times > MANY)).mean()) > MOST:
        yield Found("target-other-sampler", update, figures)
    elif float((times < FEW).mean()) > MOST:
        yield Found("export-other-schedule", update, figures)


def trained_levels(seen: Seen) -> dict[str, np.ndarray]:
    """Of each argument of the network that follows the noise level: [5, N], sorted: it, and a, b, p and q."""
    rows: dict[str, list[np.ndarray]] = {}
    for _, one in seen.mixed():
        mixture, target = one.mixture, one.target
        if mixture is None or mixture.a is None or target is None or target.p is None or target.q is None:
            continue
        counts = np.ones(mixture.size, bool) if target.seen is None else target.seen.numpy()
        known = [part.double().numpy() for part in (mixture.a, mixture.b, target.p, target.q)]
        for name, numbers in mixture.called.items():
            if len(numbers) == mixture.size == len(known[2]):
                rows.setdefault(name, []).append(np.stack([numbers.double().numpy(), *known])[:, counts])
    found = {}
    for name, parts in rows.items():
        table = np.concatenate(parts, 1)
        table = table[:, np.argsort(table[0], kind="stable")]
        moves = np.diff(np.arctan2(table[2], table[1]))
        moved = np.diff(table[0]) > 0
        is_same, one_way = np.abs(moves[~moved]) < SAME, (moves[moved] > -SAME, moves[moved] < SAME)
        is_level = bool(is_same.all()) and any(bool(way.all()) for way in one_way)
        if is_level and len(np.unique(table[0])) >= FEWEST and np.isfinite(table).all():
            found[name] = table
    return found


def at(table: np.ndarray, number: float) -> tuple[float, float, float, float] | None:
    """a, b, p and q where the network is told this; None beyond the levels of training."""
    if not table[0, 0] <= number <= table[0, -1]:
        return None
    a, b, p, q = (float(np.interp(number, table[0], row)) for row in table[1:])
    return a, b, p, q

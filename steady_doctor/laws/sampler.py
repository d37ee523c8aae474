"""Whether the script's own sampler takes the network's answer for what the loss asks for.

A step of any sampler of a path a x_0 + b noise, deterministic or not, leads from a point of the path to another one: what it
makes of x, and of the answer that a perfect network would give there, p x_0 + q noise, has the share a of the next level.
"""

from collections.abc import Iterator

import numpy as np

from steady_doctor.found import Found
from steady_doctor.record.calls import SamplerStep
from steady_doctor.seen import Seen

FEWEST = 32  # levels of training of which a, b, p and q are known
STEPS = 8  # of the sampler
NEAR = 0.5  # of an image of -1 to 1: beyond, samplers cut off what is predicted of it
ENOUGH = 64  # numbers
RELATED = 0.7  # of what the network gets next: what may have nothing to do with what it got and gave
SAME = 1e-4  # of an angle: levels that are one and the same
LEAST = 0.05  # of the image's share, over all steps
MOST_OF_IT = 0.5  # of the image's share
FEW, MANY = 1 / 3, 3  # times the step that the levels ask for
ERRORS = 6.0  # standard errors


def read(seen: Seen) -> Iterator[Found]:
    for name, trained in _trained(seen).items():
        steps = [one for step in seen.sampled if (one := _drift(step, name, trained)) is not None]
        if len(steps) < STEPS:
            continue
        wanted, made, variance = np.array(steps).sum(0)
        if wanted < -MOST_OF_IT and max(step[0] for step in steps) <= 0:
            yield Found("target-sampled-backwards", seen.mixed()[-1][0], {"steps": len(steps), "fall": -float(wanted)})
            return
        way, error = np.sign(wanted), ERRORS * variance**0.5
        if abs(wanted) < LEAST or (made * way + error > FEW * abs(wanted) and made * way - error < MANY * abs(wanted)):
            continue
        figures = {"steps": len(steps), "wanted": float(wanted), "made": float(made)}
        is_other = made * way < 0 or made * way > abs(wanted)
        yield Found("target-other-sampler" if is_other else "export-other-schedule", seen.mixed()[-1][0], figures)
        return


def _trained(seen: Seen) -> dict[str, np.ndarray]:
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


def _drift(step: SamplerStep, name: str, trained: np.ndarray) -> tuple[float, float, float] | None:
    """How much the image's share is to grow in this step, how much it does, and the variance of that; None: it is not known."""
    now, then = step.told.get(name), step.then.get(name)
    numbers = trained[0]
    if now is None or then is None or not all(numbers[0] <= one <= numbers[-1] for one in (now, then)):
        return None
    a, b, p, q = (float(np.interp(now, numbers, row)) for row in trained[1:])
    wanted = float(np.interp(then, numbers, trained[1])) - a
    x, answer, after = (one.double().numpy() for one in (step.x, step.answer, step.after))
    det = a * q - b * p
    if abs(det) < 1e-3 * max(abs(p), abs(q)) or not all(np.isfinite(one).all() for one in (x, answer, after)):
        return None
    image, noise = (q * x - b * answer) / det, (a * answer - p * x) / det
    near = np.abs(image) < NEAR
    if near.sum() < ENOUGH:
        return None
    sides, y = np.stack([image, noise], 1)[near], after[near]
    gram = sides.T @ sides
    if np.linalg.cond(gram) > 1e6:
        return None
    shares = np.linalg.solve(gram, sides.T @ y)
    left = float(((y - sides @ shares) ** 2).sum())
    if left > (RELATED**2) * float((y**2).sum()):
        return None
    return wanted, float(shares[0]) - a, left / len(y) * float(np.linalg.inv(gram)[0, 0])

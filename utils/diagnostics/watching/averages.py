"""Averaged weights that a script keeps, or seems to keep: e' = d e + (1 - d) w, after the optimizer's step."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from utils.diagnostics.audit.fitting import ROUNDING
from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.facts import Average

SMALL = 2e-2
MOST_NEW = 0.75  # of an average, that one update gives: a decay of 0.9 that is exchanged gives 0.9
STILL = "no change"
WANTED = "d e + (1 - d) w, with w after the step"
ONE_WAY = 0.99  # cosine of two directions that are one
SIGMAS = 7.0  # that a share is beyond it, to be no chance
WAY = 0.2  # cosine of two directions, which chance gives to few numbers alone
FALL = 0.1  # of a decay, that is no rounding
RISEN = 0.1  # a decay by then, of a warm-up
SETTLED = 13  # updates after which a decay is no longer one of a warm-up's begin
PATIENCE = 20  # updates after which an average that never moved is called frozen


@dataclass(frozen=True)
class First:
    """An average when it was first looked at."""

    values: torch.Tensor  # sampled, [n]
    update: int
    count: int  # of its own updates; 0 where it does not count them
    decays: list[float] = field(default_factory=list)  # that were seen


def check_average(
    average: Average, old: torch.Tensor, new: torch.Tensor, first: First, update: Update, observer: Observer
) -> list[Check]:
    """`old`, `new`: before and after the update; sampled, [n].

    Of tensors that nothing calls an average, only what behaves as one is told.
    """
    checks = _checked(average, old, new, first, update, observer)
    return [check for check in checks if average.is_average or check.healthy is not False]


def _checked(
    average: Average, old: torch.Tensor, new: torch.Tensor, first: First, update: Update, observer: Observer
) -> list[Check]:
    name, wanted = average.name, WANTED
    mask = observer.averaged(name)
    step, weights = update.optimizer_step, update.weights
    if weights is None or step is None:
        return [not_observed("ema", name, wanted, "no step was seen")]
    if not average.is_average and torch.equal(new, first.values):
        return []
    e, after, w, before = (v.double()[mask] for v in (old, new, weights, step.before))
    rounding = 2 * ROUNDING * float(torch.maximum(e.abs(), w.abs()).norm())
    begun = first.values.double()[mask]
    wandered = (4 + update.step + 1 - first.update) * rounding  # by the rounding of so many updates
    way, gone = w - begun, after - begun  # rounding goes no way
    by_rounding = float(gone.norm()) <= wandered < 1e-2 * float(way.norm()) and not _same_way(gone, way)
    if torch.equal(e, after):
        return [_still(average, by_rounding or torch.equal(new, first.values), update, torch.equal(e, w))]
    if not torch.isfinite(e + after + w + before).all():
        return [not_observed("ema", name, wanted, "weights or averages are not finite")]
    if by_rounding and update.step + 1 >= PATIENCE:
        return [_still(average, True, update, False)]
    moved = after - e
    slope = _slope(w - e, moved)
    if slope is None:
        return [not_observed("ema", name, wanted, "average and weights are the same")]
    left = float((moved - slope * (w - e)).norm())
    size = float(moved.norm())
    observed = f"decay {1 - slope:.6g}"
    stale = _slope(before - e, moved)
    if stale is not None and _is_stale(moved, w - e, before - w):
        text = f"{name} takes the weights before the optimizer's step, not after it"
        return [Check("ema", name, wanted, f"decay {1 - stale:.6g}", False, text, "warning")]
    if size < 4 * rounding:
        return [not_observed("ema", name, wanted, "its change is smaller than its rounding error")]
    if left <= 2 * rounding + SMALL * size:
        return [_decay(average, slope, first, update, rounding / max(float((w - e).norm()), 1e-300))]
    twice = _two(e, after, before, w)
    if twice is not None and twice <= 2 * rounding + SMALL * size:
        text = f"{name} is updated more than once in an update: with the weights before the step and with those after it"
        return [Check("ema", name, wanted, observed, False, text)]
    text = f"{name} moves towards weights that are not those of the network ({left / size:.0%} of its change is something else)"
    return [Check("ema", name, wanted, observed, False, text)]


def _is_stale(moved: torch.Tensor, way: torch.Tensor, back: torch.Tensor) -> bool:
    """Whether an average has moved towards the weights before the step, `way` + `back`, and not those after it, `way`: by least
    squares over many numbers, whose rounding is larger than the difference of each and goes no way."""
    columns = torch.stack([way, back], 1)
    sizes = columns.norm(dim=0).clamp(min=1e-300)
    scaled = columns / sizes
    gram = scaled.mT @ scaled
    if abs(float(gram[0, 1])) > ONE_WAY:  # in the first updates both go one way, and cannot be told apart
        return False
    inverse = torch.linalg.pinv(gram)
    shares = inverse @ (scaled.mT @ moved)
    spread = float((moved - scaled @ shares).norm()) / max(len(moved) - 2, 1) ** 0.5 * max(float(inverse[1, 1]), 0.0) ** 0.5
    way_share, back_share = (shares / sizes).tolist()
    certain = abs(float(shares[1])) > SIGMAS * spread
    return certain and way_share > 0 and abs(back_share / way_share - 1) < 0.25


def _same_way(gone: torch.Tensor, way: torch.Tensor) -> bool:
    """Whether an average that hardly moved has moved the way of the weights."""
    return float((gone * way).sum()) > WAY * float(gone.norm() * way.norm())


def _two(e: torch.Tensor, after: torch.Tensor, before: torch.Tensor, w: torch.Tensor) -> float | None:
    columns = torch.stack([before - e, w - e], 1)
    sizes = columns.norm(dim=0).clamp(min=1e-300)
    solution = torch.linalg.lstsq(columns / sizes, (after - e)[:, None]).solution
    shares = solution[:, 0] / sizes
    if not bool(((shares > 0) & (shares < 1)).all()):
        return None
    return float((columns / sizes @ solution - (after - e)[:, None]).norm())


def _slope(x: torch.Tensor, y: torch.Tensor) -> float | None:
    size = float((x * x).sum())
    return float((x * y).sum()) / size if size else None


def _still(average: Average, always: bool, update: Update, equal: bool) -> Check:
    name, wanted = average.name, WANTED
    settings = average.settings
    if settings is not None:
        count = average.updates
        if count and settings.at(count) >= 1:
            text = f"{name} does not move: its decay is {settings.at(count):g}"
            return Check("ema", name, wanted, "a decay of 1", False, text)
    if always and update.step + 1 >= PATIENCE and not equal:
        text = f"{name} has not moved in {update.step + 1} updates: does it begin later?"
        if average.begins > update.step + 1:
            return not_observed("ema", name, wanted, f"it begins after {average.begins} updates")
        return Check("ema", name, wanted, STILL, False, text, "info")
    return not_observed("ema", name, wanted, "it was not updated in this update")


def _decay(average: Average, slope: float, first: First, update: Update, blur: float) -> Check:
    """`blur`: of the slope, by rounding."""
    name, wanted = average.name, "a decay from 0 to 1"
    decay = 1 - slope
    observed = f"decay {decay:.6g}"
    settings = average.settings
    if slope < 0:
        text = f"{name} moves away from the weights (decay {decay:.4g}): a wrong sign"
        return Check("ema", name, wanted, observed, False, text)
    if slope > 1 + 1e-3 + blur:
        return Check("ema", name, wanted, observed, False, f"{name} overshoots the weights (decay {decay:.4g})")
    first.decays.append(decay)
    if settings is None:
        rises = decay > max(first.decays[0] + 1e-3, RISEN)  # a decay that begins low: a warm-up
        if MOST_NEW < slope < 1 - 1e-6 and update.step + 1 >= SETTLED and not rises:
            text = f"{name} forgets {1 - decay:.0%} in each update (decay {decay:.4g}): are decay and 1 - decay exchanged?"
            return Check("ema", name, wanted, observed, False, text, "warning")
        if len(first.decays) > 2 and all(b < a for a, b in pairwise(first.decays)) and decay < first.decays[0] - FALL:
            text = f"the decay of {name} falls, from {first.decays[0]:.3g} to {decay:.3g}: are decay and 1 - decay exchanged?"
            return Check("ema", name, "a decay that stays or rises", observed, False, text, "warning")
        return Check("ema", name, wanted, "copies, so far" if slope > 1 - 1e-6 else observed, True)
    count = average.updates
    declared = settings.at(count)
    wanted = f"decay {declared:.6g}, by its settings"
    tolerance = 2e-3 * (1 - declared) + 2 * blur + 1e-7
    if abs(decay - declared) <= tolerance:
        made, updates = count - first.count, update.step + 1 - first.update
        text = f"{name} has been updated {made} times in {updates} updates: it is updated in each micro step"
        if not made and updates:
            text = f"{name} counts no more updates than {updates} updates ago: it begins anew each time"
        anew = 0 < 2 * made < updates and len(first.decays) > 3  # it moved in all looks, so it is not one of each tenth update
        if anew:
            text = f"{name} counts {made} updates more than {updates} updates ago, and moves in each: was it made anew?"
        return Check(
            "ema", name, f"{wanted}, once per update", observed, (0 < made <= updates and not anew) or not updates, text
        )
    text = f"{name} has the decay {decay:.6g}, by its settings it should be {declared:.6g}"
    for times in (2, 3, 4, 8):
        expected = 1.0
        for number in range(count - times + 1, count + 1):
            expected *= settings.at(number)
        if abs(decay - expected) <= tolerance * times:
            text = f"{name} is updated {times} times in an update: in each micro step?"
    return Check("ema", name, wanted, observed, False, text)

"""Averages of the weights: e' = d e + (1 - d) w with the weights after the step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from utils.diagnostics.audit.declared import Declared
from utils.diagnostics.audit.fitting import ROUNDING, SMALL, named, slope
from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check, not_observed


@dataclass(frozen=True)
class Seen:
    """An average around an update, sampled, float64 [n]."""

    old: torch.Tensor
    new: torch.Tensor
    weights: torch.Tensor  # after the optimizer's step
    weights_before: torch.Tensor | None  # before it

    @property
    def rounding(self) -> float:
        return 2 * ROUNDING * float(torch.maximum(self.old.abs(), self.weights.abs()).norm()) + 1e-30


def check_averages(update: Update, declared: Declared, observer: Observer, skipped: bool = False) -> list[Check]:
    """Whether each average has all parameters of the module that is averaged, and moved as declared."""
    checks = []
    wanted = {id(p) for p in observer.averaged_module.parameters()}
    names = [name for name, p in observer.parameters.items() if id(p) in wanted]
    for name, decay_at in declared.averages.items():
        if name not in observer.averages:
            found = ", ".join(observer.averages) or "none"
            text = f"{name} is declared, and the run has no such average of the weights ({found})"
            checks.append(Check("ema", f"{name}: parameters", f"all {len(names)}", "no such average", False, text))
            continue
        old, new = update.averages_before.get(name), update.averages.get(name)
        if old is None or new is None or update.weights is None or skipped:
            checks.append(not_observed("ema", name, "e' = d e + (1 - d) w", "no update of it was seen"))
            continue
        missing = [parameter for parameter in names if parameter not in observer.averages[name]]
        text = f"{name} lacks {len(missing)} of {len(names)} parameters, such as {missing[0]}" if missing else ""
        found = f"{len(names) - len(missing)} of {len(names)}"
        checks.append(Check("ema", f"{name}: parameters", f"all {len(names)}", found, not missing, text))
        step = update.optimizer_step
        vectors = (old, new, update.weights, None if step is None else step.before)
        some = observer.averaged(name) if missing or len(names) < len(observer.parameters) else slice(None)
        seen = Seen(*(None if vector is None else vector.double()[some] for vector in vectors))
        checks.append(_average(name, seen, decay_at, update.step + 1, declared.micro_steps))
    return checks


def _average(name: str, seen: Seen, decay_at: Callable[[int], float], number: int, micro_steps: int) -> Check:
    """`number`: of the update."""
    decay = decay_at(number)
    wanted, gap = f"decay {decay:.6g} at update {number}", float((seen.weights - seen.old).norm())
    if (1 - decay) * gap < 4 * seen.rounding:
        return not_observed("ema", name, wanted, "its change is smaller than its rounding error")
    distance = float((seen.new - decay * seen.old - (1 - decay) * seen.weights).norm())
    moved, _ = slope(seen.weights - seen.old, seen.new - seen.old)
    fine = distance <= 2 * seen.rounding + SMALL * (1 - decay) * gap
    text = "" if fine else f"{name}: {_explain(seen, decay_at, number, micro_steps)}"
    return Check("ema", name, wanted, f"decay {1 - moved:.6g}", fine, text)


def _explain(seen: Seen, decay_at: Callable[[int], float], number: int, micro_steps: int) -> str:
    decay, change = decay_at(number), seen.new - seen.old
    if not change.any():
        return f"it does not move in this update; its declared decay is {decay:.6g}"
    moved, left = slope(seen.weights - seen.old, change)
    observed = 1 - moved
    if moved < 0 and left < 0.05:
        return f"it moves away from the weights (decay {observed:.4g}): a wrong sign"
    if left < 0.02 + 4 * seen.rounding / float(change.norm()):
        if abs(observed) < 1e-6:
            return f"it is a copy of the weights; its declared decay is {decay:.6g}"
        known = {f"it is updated {k} times in this update": decay**k for k in (2, 3, 4, 8)}
        known |= {"the weights and the average are exchanged: decay and 1 - decay": 1 - decay}
        numbers = (number - 1, number + 1, 2 * number, max(number // 2, 1))
        known |= {f"it has the decay of update {n}": decay_at(n) for n in numbers if n > 0}
        known |= {"it is updated in each micro step": decay**micro_steps}
        known = {text: value for text, value in known.items() if value != decay}
        if text := named(observed, known, max(2e-3 * (1 - decay), 1e-7)):
            return f"{text} (decay {observed:.6g}, declared {decay:.6g})"
        return f"its decay is {observed:.6g}, declared {decay:.6g}"
    if (before := seen.weights_before) is not None:
        stale = float((seen.new - decay * seen.old - (1 - decay) * before).norm())
        if stale <= 2 * seen.rounding + 0.02 * (1 - decay) * float((before - seen.old).norm()):
            return "it takes the weights before the optimizer's step, not after it"
    untouched = float(((change == 0) & (seen.weights != seen.old)).double().mean())
    if 0.001 < untouched < 0.999:
        return f"{untouched:.0%} of it does not move: some parameters or buffers are left out"
    return f"it moves towards weights that are not those of this network ({left:.0%} of its change is something else)"

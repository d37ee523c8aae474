"""Whether all processes train one network on different samples: digests of an update, compared."""

import math

import torch

from utils.diagnostics.audit.elements import digest, fingerprint
from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check

_ALIKE = {
    "weights": "the weights differ between processes: each trains a network of its own",
    "gradient at the step": "the gradients at the step differ between processes: they are not averaged",
    "averages": "the averaged weights differ between processes",
}
_DIFFERENT = {
    "samples": "processes train on the same samples",
    "noise": "processes add the same noise",
    "noise levels": "processes draw the same noise levels",
}


def digests_of(update: Update, observer: Observer, num_levels: float) -> dict[str, torch.Tensor]:
    """int64, 0-dim each, by what they are of; in the same order on each process. `num_levels`: from how many they are drawn."""
    first = update.micro_steps[0].batch if update.micro_steps else {}
    zero = torch.zeros((), dtype=torch.int64, device=observer.sample.device)
    averages = [tensor for average in observer.averages.values() for tensor in average.values()]
    seen = {"samples": first.get("sample_numbers"), "noise": first.get("noise")}
    levels = first.get("timesteps", first.get("sigmas"))
    many = levels is not None and levels.numel() * math.log10(num_levels) > 12  # fewer may be equal by chance
    seen["noise levels"] = levels if many else None
    step = update.optimizer_step
    return {
        "weights": update.digest_last if update.digest_last is not None else zero,
        "gradient at the step": digest([step.gradient]) if step is not None else zero,
        "averages": digest(averages) if averages else zero,
        **{name: fingerprint(value.reshape(1, -1))[0] if value is not None else zero for name, value in seen.items()},
    }


def check_ranks(names: list[str], digests: torch.Tensor) -> list[Check]:
    """`digests` int64 [processes, names]."""
    checks = []
    for place, name in enumerate(names):
        values = digests[:, place].tolist()
        if not any(values):
            continue
        distinct = len(set(values))
        if name in _ALIKE:
            fine, wanted, text = distinct == 1, "the same on all processes", _ALIKE[name]
        else:
            fine, wanted, text = distinct == len(values), "different on each process", _DIFFERENT[name]
        found = f"{distinct} of {len(values)} different"
        checks.append(Check("ranks", name, wanted, found, fine, text))
    return checks

"""What the script's noise schedulers, as diffusers has them, say of themselves."""

import gc
import sys

import torch
from torch import Tensor


def declared() -> tuple[set[str], list[Tensor]]:
    """Returns the prediction types of all noise schedulers that exist, and their different tables of cumulated alphas."""
    if (of_diffusers := sys.modules.get("diffusers.schedulers.scheduling_utils")) is None:
        return set(), []
    predictions: set[str] = set()
    tables: list[Tensor] = []
    for thing in gc.get_objects():
        if not issubclass(type(thing), of_diffusers.SchedulerMixin) or not hasattr(thing, "add_noise"):
            continue
        prediction = getattr(thing.config, "prediction_type", None)
        is_default = "prediction_type" in thing.config.get("_use_default_values", ())
        samples = getattr(thing, "num_inference_steps", None) is not None
        if prediction is not None and (samples or not is_default):  # else it adds noise alone, whatever is predicted
            predictions.add(prediction)
        table = getattr(thing, "alphas_cumprod", None)
        if isinstance(table, Tensor) and not any(
            table.shape == other.shape and torch.allclose(table.double(), other) for other in tables
        ):
            tables.append(table.detach().double().cpu())
    return predictions, tables

"""The micro steps of an update: what went into the network, and of what it was mixed."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from utils.diagnostics.audit.fitting import flat
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.watching.facts import Facts
from utils.diagnostics.watching.inputs import (
    images_in,
)
from utils.diagnostics.watching.levels import Look
from utils.diagnostics.watching.mixture import Mixture, find
from utils.diagnostics.watching.places import number_told
from utils.diagnostics.watching.seen import Seen, Times

MOST_OTHERS = 24  # tensors of an update that the loss may be made of


def looks_of(update: Update, loss_scale: float) -> list[Look]:
    found = []
    for step in update.micro_steps:
        call = step.calls.get("network")
        if call is None or not call.outputs or not call.inputs or not isinstance(call.inputs[0], torch.Tensor):
            continue
        seen, noisings = step.batch.get("seen") or Seen(), step.batch.get("noising") or []
        mixture = None
        for x in images_in(call.inputs[0], call.outputs[0].shape[1]):
            noising = next((n for n in reversed(noisings) if n.clean.shape == x.shape), None)
            if (mixture := find(x, seen, noising)) is not None:
                break
        if mixture is None:
            continue
        levels = mixture.of_noise / mixture.of_clean.clamp(min=1e-12)
        step.batch |= {"noise": mixture.noise_tensor, "sample_numbers": mixture.clean_tensor, "noise_levels": levels}
        gradient, told = call.gradients.get(0), number_told(call.inputs, step)
        gradient = gradient / loss_scale if gradient is not None else None
        used = noising.timesteps.reshape(-1).to(x.device).double().expand(len(x)) if noising is not None else None
        moments = [t.double().reshape(-1) for t in (*seen.moments, *(d.tensor for d in seen.draws)) if t.numel() == len(x)]
        silent = any(tensor.shape == x.shape and not tensor.any() for tensor in seen.tensors.values())
        times = _times(seen, told, len(x))
        others = [t for t in list(seen.tensors.values())[:MOST_OTHERS] if t.shape == x.shape and t.device == x.device]
        beside = [
            t for t in tree_leaves(call.inputs) if isinstance(t, torch.Tensor) and t.shape[2:] == x.shape[2:] and t.ndim > 2
        ]
        joined = any(t.shape[1] > x.shape[1] or bool(((t == 0) | (t == 1)).all()) for t in beside)  # or a mask of its own
        to_layer = told is not None and any(v.shape == (len(x), 1) and _are(v, told) for v in step.batch.get("vectors") or [])
        about = (times, used, moments, len(x), silent, others, to_layer, joined)
        found.append(Look(x, told, call.outputs[0], gradient, mixture, *about))
    return found


def _are(vector: torch.Tensor, told: torch.Tensor) -> bool:
    """Whether a layer's input [B, 1] is what the network is told, [B], to rounding."""
    return torch.allclose(vector[:, 0].double().to(told.device), told, 1e-2, 1e-6)


def without_silence(looks: list[Look]) -> list[Look]:
    """Without the images that are 0 everywhere: how much of them an input holds cannot be known."""
    found = []
    for one in looks:
        kept, mixture = one.mixture.clean.norm(dim=1) > 0, one.mixture
        if bool(kept.all()):
            found.append(one)
        if bool(kept.all()) or not bool(kept.any()):
            continue
        names = ("clean", "noise", "of_clean", "of_noise", "residual", "clean_tensor", "noise_tensor")
        mixture = replace(mixture, **{name: getattr(mixture, name)[kept] for name in names})
        whole = {name: getattr(one, name) for name in ("x", "told", "output", "gradient", "noised_with")}
        parts: dict[str, Any] = {name: None if value is None else value[kept.to(value.device)] for name, value in whole.items()}
        times = one.times and replace(one.times, values=one.times.values.reshape(-1)[kept.to(one.times.values.device)])
        parts |= {name: [value[kept.to(value.device)] for value in getattr(one, name)] for name in ("moments", "others")}
        found.append(replace(one, mixture=mixture, times=times, **parts))
    return found


def _times(seen: Seen, told: torch.Tensor | None, batch: int) -> Times | None:
    """Of the whole numbers drawn for the batch: those that the network gets, else those of the widest range."""
    drawn = [times for times in seen.times if times.values.numel() == batch]
    for times in drawn:
        if told is not None and torch.equal(times.values.double().cpu(), told.cpu()):
            return times
    return max(drawn, key=lambda times: times.highest, default=None)


def whole_noise(mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
    """The noise that the input has, where it has more than one."""
    values = flat(x) - mixture.of_clean[:, None] * mixture.clean
    return (values / mixture.of_noise.clamp(min=1e-12)[:, None]).reshape(x.shape)


def is_whole(told: torch.Tensor | None) -> bool:
    return told is not None and bool((told == told.round()).all()) and float(told.max()) > 1


def scheduler_of(update: Update, facts: Facts) -> Any:
    """The noise scheduler that the script calls, or has told."""
    for step in update.micro_steps:
        for noising in step.batch.get("noising") or []:
            return noising.scheduler
    return facts.noise_schedulers[0] if len(facts.noise_schedulers) == 1 else None

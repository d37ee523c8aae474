"""Which of a network's inputs is the noise level, and which are conditions: labels, texts, hints."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from utils.diagnostics.audit.seen import MicroStep
from utils.diagnostics.watching.seen import Seen, Times

CLASSES = 32  # numbers that are drawn from more than these are no labels


def drawn_steps(step: MicroStep) -> list[Times]:
    """The whole numbers that were drawn, and before them what `add_noise` got."""
    noised = [Times(noising.timesteps, highest=sys.maxsize) for noising in step.batch.get("noising") or []]
    return noised + (step.batch.get("seen") or Seen()).times


def conditions_of(inputs: Sequence[Any], step: MicroStep) -> list[torch.Tensor]:
    """What a network gets for each image beside the noised image and the noise level, in dicts and lists too."""
    told, batch = place_of_told(inputs, step), _batch(step)
    given = tensors_within(value for place, value in enumerate(inputs) if place not in (0, told))
    return [value for value in given if value.numel() and value.ndim and len(value) == batch]


def tensors_within(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value.detach())
        elif isinstance(value, (dict, list, tuple)):
            found += tensors_within(value.values() if isinstance(value, dict) else value)
    return found


def begins_alike(beside: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether a network beside another gets the same image."""
    both = (*beside[:1], *inputs[:1])
    return all(isinstance(value, torch.Tensor) for value in both) and both[0].shape == both[-1].shape


def number_told(inputs: Sequence[Any], step: MicroStep) -> torch.Tensor | None:
    """The noise level that the network gets beside the images, float64 [B]."""
    if (place := place_of_told(inputs, step)) is None:
        return None
    image = step.calls["network"].inputs[0]  # which may be elsewhere than a number of the script's
    return torch.as_tensor(inputs[place]).detach().to(image.device).double().reshape(-1).expand(_batch(step))


def place_of_told(inputs: Sequence[Any], step: MicroStep) -> int | None:
    """Of the numbers for each image, or for all, that a network gets, the noise level: the one that rises or falls with the
    noise in the images. Of several, or none: what was drawn from many numbers, then fractions, then the larger numbers."""
    batch, drawn, noise = _batch(step), drawn_steps(step), step.batch.get("noise_levels")

    def rank(place: int) -> tuple:
        value = torch.as_tensor(inputs[place]).detach()
        widest = max((times.highest for times in drawn if same(times.values, value)), default=0)
        largest = max(widest, int(value.max())) if value.dtype == torch.int64 else 0
        return _follows(value, noise), widest > CLASSES, value.is_floating_point(), largest, -place

    places = []
    for place, value in enumerate(inputs):
        one = isinstance(value, torch.Tensor) and value.numel() in (1, batch) and value.dtype != torch.bool
        if place and (one or (isinstance(value, (int, float)) and not isinstance(value, bool))):
            places.append(place)
    return max(places, key=rank, default=None)


def _batch(step: MicroStep) -> int:
    return len(step.calls["network"].inputs[0])


def _follows(value: torch.Tensor, noise: torch.Tensor | None) -> bool:
    if noise is None or value.numel() != len(noise) or len(noise) < 4:
        return False
    rises = value.reshape(-1).to(noise)[noise.argsort()].diff()
    return bool(rises.any()) and bool((rises >= 0).all() or (rises <= 0).all())


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they have the same values, in any shape."""
    return one.numel() == other.numel() and bool((one.reshape(-1) == other.reshape(-1).to(one.device)).all())

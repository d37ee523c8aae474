"""Exponential moving average of a model's weights, in fp32, with a warm-up that suits runs of any length."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from utils.core.errors import UserError

UNIT_VECTORS = ("._u", "._v")  # buffers of torch's spectral_norm


def ema_decay(step: int, max_decay: float = 0.9999, inv_gamma: float = 1.0, power: float = 0.75) -> float:
    """Decay in [0, max_decay] used by the `step`-th update (1 for the first): 1 - (1 + t / inv_gamma)^-power, t = step - 1.

    The warm-up of diffusers' EMAModel (after Katherine Crowson): the average always spans a fixed share of the updates so
    far, so that the initial weights do not linger in a short run. power 2/3 suits runs of a million updates or more
    (0.999 at 31.6 k, 0.9999 at 1 M), 3/4 shorter ones (0.999 at 10 k, 0.9999 at 215 k).
    """
    if step <= 1:
        return 0.0
    return min(max_decay, 1.0 - (1.0 + (step - 1) / inv_gamma) ** -power)


class EMA:
    """Shadow copies of all parameters and floating buffers of `model`, on its device.

    Parameters that training casts (fp16, bf16) are averaged in fp32; integer buffers (counters) and the singular vectors of
    spectral normalization, whose mean is none, are copied.
    `update` launches a handful of fused kernels and never synchronizes with the device.
    """

    def __init__(self, model: nn.Module):
        self._tensors = dict((*model.named_parameters(), *model.named_buffers()))
        self.model = model
        self.shadow = {name: _as_shadow(tensor) for name, tensor in self._tensors.items()}
        averaged = [n for n, t in self._tensors.items() if t.is_floating_point() and not n.endswith(UNIT_VECTORS)]
        self._averages, self._weights = [self.shadow[n] for n in averaged], [self._tensors[n] for n in averaged]
        self._moved = self._averages  # by `update`: of each tensor one for each of its `_rates`
        self._copied = [(self.shadow[n], self._tensors[n]) for n in self._tensors.keys() - set(averaged)]

    @torch.no_grad()
    def update(self, decay: float, finite: torch.Tensor) -> None:
        """shadow += (1 - decay) * (weights - shadow), or nothing where `finite` (0-dim bool on the device) is false.

        A skipped update leaves the weights finite, so multiplying by zero is exact; no host sync is needed.
        """
        rates = self._rates(decay)
        weights = [tensor for tensor in self._floating()[1] for _ in rates]
        if finite.device.type == "cpu":  # the flag is at hand, and one pass over the memory is quicker than three
            if finite:
                torch._foreach_lerp_(self._moved, weights, rates * len(self._weights))
        else:
            difference = torch._foreach_sub(weights, self._moved)
            for number, rate in enumerate(rates):
                torch._foreach_mul_(difference[number :: len(rates)], finite * rate)
            torch._foreach_add_(self._moved, difference)
        for copy, tensor in self._copied:
            copy.copy_(tensor)

    def _rates(self, decay: float) -> list[float]:
        return [1.0 - decay]

    def _floating(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(averages, weights) of what is averaged, both in fp32. Call it without gradients."""
        return self._averages, [t if t.dtype == torch.float32 else t.float() for t in self._weights]

    @contextmanager
    def swapped_into_model(self) -> Iterator[nn.Module]:
        """Inside, the model holds the averaged weights; outside, the raw ones, bit for bit: pointers are swapped."""
        self._swap()
        try:
            yield self.model
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, tensor in self._tensors.items():
            average = self.shadow[name]
            tensor.data, average.data = average.data, tensor.data

    @torch.no_grad()
    def distance(self) -> torch.Tensor:
        """Returns the relative distance ||weights - average|| / ||average||, a 0-dim tensor on the device."""
        averages, weights = self._floating()
        return get_total_norm(torch._foreach_sub(weights, averages)) / self.norm()

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """L2 norm of the averages, a 0-dim tensor on the device."""
        return get_total_norm(self._averages)

    def report(self) -> dict[str, Any]:
        """Returns figures to log, 0-dim tensors on the device."""
        return {"train/ema_distance": self.distance()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begins anew from the model's weights."""
        for name, tensor in self._tensors.items():
            self.shadow[name].copy_(tensor)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.shadow

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copies `state` in. Raises UserError when its names are not those of the model."""
        if state.keys() != self.shadow.keys():
            different = sorted(state.keys() ^ self.shadow.keys())
            raise UserError(
                f"the EMA weights do not fit this network: {len(different)} names differ, for example {different[0]}\n"
                "use the network of the checkpoint"
            )
        for name, tensor in state.items():
            self.shadow[name].copy_(tensor)


def _as_shadow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().float() if tensor.is_floating_point() else tensor.detach().clone()

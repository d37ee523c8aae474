"""Exponential moving average of a model's weights, in fp32, with a warm-up that suits runs of any length."""

from contextlib import contextmanager

import torch
from torch import nn

from utils.errors import UserError


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

    Parameters that training casts (fp16, bf16) are averaged in fp32; integer buffers (counters) are copied.
    `update` launches a handful of fused kernels and never synchronises with the device.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.shadow = {name: _as_shadow(tensor) for name, tensor in _tensors(model)}

    @torch.no_grad()
    def update(self, decay: float, finite: torch.Tensor) -> None:
        """shadow += (1 - decay) * (weights - shadow), or nothing where `finite` (0-dim bool on the device) is false.

        A skipped update leaves the weights finite, so multiplying by zero is exact; no host sync is needed.
        """
        names, tensors = zip(*_tensors(self.model))
        shadows = [self.shadow[name] for name in names]
        averaged = [(s, t) for s, t in zip(shadows, tensors) if s.is_floating_point()]
        shadows_averaged = [s for s, _ in averaged]
        difference = torch._foreach_sub([t.to(s.dtype) for s, t in averaged], shadows_averaged)
        torch._foreach_mul_(difference, finite.to(torch.float32) * (1.0 - decay))
        torch._foreach_add_(shadows_averaged, difference)
        for shadow, tensor in zip(shadows, tensors):
            if not shadow.is_floating_point():
                shadow.copy_(tensor)

    @contextmanager
    def swapped_into_model(self):
        """Inside, the model holds the averaged weights; outside, the raw ones, bit for bit: pointers are swapped."""
        self._swap()
        try:
            yield self.model
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, tensor in _tensors(self.model):
            tensor.data, self.shadow[name] = self.shadow[name], tensor.data

    @torch.no_grad()
    def distance(self) -> torch.Tensor:
        """Relative distance ||weights - average|| / ||average||, a 0-dim tensor on the device."""
        pairs = [(t.detach().to(self.shadow[n].dtype), self.shadow[n]) for n, t in _tensors(self.model)]
        pairs = [(t, s) for t, s in pairs if s.is_floating_point()]
        difference = torch._foreach_norm(torch._foreach_sub([t for t, _ in pairs], [s for _, s in pairs]))
        reference = torch._foreach_norm([s for _, s in pairs])
        return torch.linalg.vector_norm(torch.stack(difference)) / torch.linalg.vector_norm(torch.stack(reference))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.shadow

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copies `state` in. Raises UserError when its names are not those of the model."""
        if state.keys() != self.shadow.keys():
            different = sorted(state.keys() ^ self.shadow.keys())
            raise UserError(f"EMA weights are of another model: {len(different)} names differ, such as {different[0]}")
        for name, tensor in state.items():
            self.shadow[name].copy_(tensor)


def _tensors(model: nn.Module):
    yield from model.named_parameters()
    yield from model.named_buffers()


def _as_shadow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().float() if tensor.is_floating_point() else tensor.detach().clone()

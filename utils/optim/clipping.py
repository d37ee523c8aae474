"""Gradient norms, clipping, and whether an update may be made at all."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import nn


class Gradients(NamedTuple):
    """What one update's gradients were, before clipping; tensors on the device, so that nothing waits for it."""

    norm: torch.Tensor  # joint L2 norm, 0-dim
    finite: torch.Tensor  # whether it is a number, 0-dim bool
    norms: torch.Tensor  # of each parameter that requires gradients, [P]; 0 where there is no gradient
    loss_scale: torch.Tensor | None  # GradScaler's, 0-dim; None without one


class Limit:
    """How far gradients are clipped; `value` is the limit of the newest update, 0 for none."""

    value: float | torch.Tensor

    def limit(self) -> float | torch.Tensor:
        """Of the next update, on the device."""
        raise NotImplementedError

    def add(self, gradients: Gradients) -> None:
        """Learns from an update's gradients."""

    def clip(self, accelerator: Accelerator, parameters: Sequence[nn.Parameter]) -> Gradients:
        """`clip_gradients` to the limit of this update, from which that of the next one may follow."""
        self.value = self.limit()
        gradients = clip_gradients(accelerator, parameters, self.value)
        self.add(gradients)
        return gradients


class AdaptiveLimit(Limit):
    """A clipping limit that follows the run: twice the running mean of the gradient norm, within [0.1, 10].

    The mean moves by a hundredth per update, from the first norm on. A norm that is not finite never enters it, and none
    enters as more than 10, so that one spike does not open the limit for the hundred updates after it.
    """

    FACTOR, RATE, LOWEST, HIGHEST = 2.0, 0.01, 0.1, 10.0

    def __init__(self, device: torch.device, mean: float | None = None):
        """`mean` continues that of a resumed run; None begins anew."""
        self._mean = torch.tensor(float("nan") if mean is None else mean, device=device)

    def limit(self) -> torch.Tensor:
        """0-dim, on the device. The highest limit before the first update."""
        return (self.FACTOR * self._mean).nan_to_num(nan=self.HIGHEST).clamp(self.LOWEST, self.HIGHEST)

    def add(self, gradients: Gradients) -> None:
        norm = gradients.norm.clamp(max=self.HIGHEST)
        moved = torch.where(self._mean.isnan(), norm, self._mean + self.RATE * (norm - self._mean))
        self._mean = torch.where(gradients.finite, moved, self._mean)

    @property
    def mean(self) -> float | None:
        """For the checkpoint; exact. The host waits for the device."""
        mean = self._mean.item()
        return None if mean != mean else mean


class FixedLimit(Limit):
    """A clipping limit that stays as it is; as `AdaptiveLimit` to its caller."""

    mean = None

    def __init__(self, limit: float):
        """0 for no clipping."""
        self._limit = limit

    def limit(self) -> float:
        return self._limit


def clip_gradients(accelerator: Accelerator, parameters: Sequence[nn.Parameter], max_norm: float | torch.Tensor) -> Gradients:
    """Clips the joint L2 norm of the gradients of `parameters`, all that require them, to `max_norm` (0 = no clipping), in
    place (Pascanu et al. 2013, alg. 1).

    DDP has averaged the gradients by now, so that a value that is not finite on one rank is seen on all.
    """
    accelerator.unscale_gradients()
    scaler = accelerator.scaler
    # A copy of torch's own tensor, which the optimizer's step changes; get_scale() would make the host wait.
    loss_scale = None if scaler is None or scaler._scale is None else scaler._scale.clone()
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack(torch._foreach_norm(gradients))
    norm = torch.linalg.vector_norm(norms)
    clips = isinstance(max_norm, torch.Tensor) or max_norm > 0
    if clips and norm.device.type == "cpu":  # the norm is at hand: saves a pass over all gradients that multiplies them by 1
        clips = bool(norm + 1e-6 > max_norm)  # else torch's factor max_norm / (norm + 1e-6) is at least 1
    if clips:
        # As torch's clip_grads_with_norm_ to the last bit, but that it takes a limit on the device by float(), which waits.
        torch._foreach_mul_(gradients, ((norm + 1e-6).reciprocal() * max_norm).clamp(max=1.0))
    if len(gradients) < len(parameters):
        known, none = iter(norms), norms.new_zeros(())  # an index would be copied to the device, and waited for
        norms = torch.stack([none if p.grad is None else next(known) for p in parameters])
    return Gradients(norm, torch.isfinite(norm), norms, loss_scale)

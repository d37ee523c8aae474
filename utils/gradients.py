"""Gradient norms and clipping."""

import torch
from accelerate import Accelerator
from torch import nn


def clip_gradients(accelerator: Accelerator, model: nn.Module, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips the joint L2 norm of all gradients to `max_norm` (0 = no clipping), in place.

    Returns (norm before clipping, whether it is finite) as 0-dim tensors on the device: nothing here waits for it. DDP has
    averaged the gradients by now, so that a value that is not finite on one rank is seen on all.
    """
    accelerator.unscale_gradients()
    # torch's own: Accelerate's looks at every parameter for sharded tensors, which costs as much as the clipping.
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
    return norm, torch.isfinite(norm)

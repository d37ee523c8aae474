"""Whether the latents that the noise is added to are the autoencoder's, shifted and scaled as its config says."""

from typing import Any

import torch

from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.seen import Seen

SMALL = 1e-4


def check_latents(clean: torch.Tensor, seen: Seen, config: Any) -> Check:
    """`seen`: tensors of the update before the forward pass, the oldest first."""
    scale, shift = config.get("scaling_factor"), config.get("shift_factor") or 0.0
    name = "scale of the latents"
    if not scale:
        return not_observed("data", name, "that of the autoencoder", "its config has no scaling_factor")
    wanted = f"(z - {shift:.4g}) * {scale:.4g}" if shift else f"{scale:.4g} z"
    relatives = [found for tensor in seen.tensors.values() if (found := _line(clean, tensor)) is not None]
    if not relatives:
        return not_observed("data", name, wanted, "the autoencoder's output was not seen")
    gain, offset = relatives[0]  # what was seen first came from the autoencoder
    spread = float(clean.detach().double().std())
    observed = f"{gain:.4g} z {'+' if offset >= 0 else '-'} {abs(offset):.4g}; standard deviation {spread:.3g}"
    fine = any(abs(g / scale - 1) < 1e-3 and abs(o + shift * scale) < 1e-3 * max(1.0, abs(shift * scale)) for g, o in relatives)
    text = f"the latents are {gain:.4g} times the autoencoder's {offset:+.4g}, by its config they should be {wanted}"
    return Check("data", name, wanted, observed, fine, text)


def _line(clean: torch.Tensor, tensor: torch.Tensor) -> tuple[float, float] | None:
    """(gain, offset) with which `tensor` becomes `clean`; None where it does not."""
    if tensor.shape != clean.shape or tensor.device != clean.device:
        return None
    x, y = tensor.detach().double().reshape(-1), clean.detach().double().reshape(-1)
    centered = x - x.mean()
    size = float(centered.square().sum())
    if not size:
        return None
    gain = float((centered * (y - y.mean())).sum()) / size
    offset = float(y.mean()) - gain * float(x.mean())
    left = float((gain * x + offset - y).norm()) / max(float(y.norm()), 1e-30)
    return (gain, offset) if left < SMALL else None

"""Whether the images that the noise is added to are from -1 to 1, or latents as the autoencoder's config says."""

from typing import Any

import torch

from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.seen import Seen

FAR = 1.2  # beyond the range of images
NARROW = 0.1  # between the darkest and the brightest value of a batch of images, which no photographs have
SMALL = 1e-4  # of what a straight line leaves


def check_range(images: torch.Tensor) -> Check:
    values = images.detach().float()
    low, high = float(values.min()), float(values.max())
    name, wanted = "range of the clean images", "-1 to 1"
    observed = f"{low:.3g} to {high:.3g}, standard deviation {float(values.std()):.3g}"
    if values.ndim != 4 or values.shape[1] not in (1, 3):
        return not_observed("data", name, wanted, f"tensors of shape {tuple(values.shape[1:])} are no images; {observed}")
    told = f"the images that the noise is added to reach from {low:.3g} to {high:.3g}"
    if low > -2.0 and high > 20:
        return Check("data", name, wanted, observed, False, f"{told}: they were not scaled to [-1, 1]", code="data-range")
    if len(values) > 1 and high - low < NARROW:
        text = f"{told}: they are nearly one gray. Were they divided twice?"
        return Check("data", name, wanted, observed, False, text, code="data-range")
    if low >= -1e-3 and 0.5 < high <= 1 + 1e-3:
        return Check("data", name, wanted, observed, False, f"{told}: [0, 1], not [-1, 1]", "warning", "data-range")
    text = f"{told}, not from -1 to 1"
    return Check("data", name, wanted, observed, max(high, -low) <= FAR, text, "warning", "data-range")


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
    fits = [abs(g / scale - 1) < 1e-3 and abs(o + shift * scale) < 1e-3 * max(1.0, abs(shift * scale)) for g, o in relatives]
    fine = fits[0] or (any(fits) and abs(gain / scale**2 - 1) > 1e-3)  # scaled twice, they are once what they should be
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

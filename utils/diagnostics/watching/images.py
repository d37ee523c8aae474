"""Whether the images that the noise is added to are from -1 to 1, or latents as the autoencoder's config says."""

import math
from typing import Any

import torch

from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.seen import Seen

FAR = 1.2  # beyond the range of images
HALF = 0.42, 0.52  # what images of a batch reach on both sides when their bytes are divided by 255 and 0.5 is taken off
NARROW = 0.1  # between the darkest and the brightest value of a batch of images, which no photographs have
WHOLE, FAINT = 100, 1e-3  # signals of whole numbers up to that were not scaled; those with less spread hold nothing
MIXED = 0.8  # of the difference of neighbors
WIDE = 0.25, 4.0  # between these the spread of latents may be
RAW = 10.0  # of signals, sequences or coordinates in units of their own
SMALL, ROUNDED = 1e-4, 1e-2  # of what a straight line leaves, in full and in half precision


def check_range(images: torch.Tensor, unit: float = 1.0) -> Check:
    """`unit`: the spread that the process asks for, sigma_data times that of the noise."""
    values = images.detach().float()
    low, high = float(values.min()), float(values.max())
    name, wanted = "range of the clean images", "-1 to 1"
    observed = f"{low:.3g} to {high:.3g}, standard deviation {float(values.std()):.3g}"
    if values.ndim < 4 and bool((images == images.round()).all()) and max(high, -low) > WHOLE:
        text = f"the signals that the noise is added to are whole numbers from {low:.5g} to {high:.5g}: they were not scaled"
        return Check("data", name, wanted, observed, False, text, code="data-range")
    if values.ndim < 4 and len(values) > 1 and float(values.std()) < FAINT:
        text = f"the signals that the noise is added to are nearly 0 (standard deviation {float(values.std()):.3g})"
        return Check("data", name, wanted, observed, False, f"{text}: divided twice?", "warning", "data-range")
    if values.ndim == 4 and values.shape[1] not in (1, 3) and not WIDE[0] < (spread := float(values.std()) / unit) < WIDE[1]:
        text = f"the tensors that the noise is added to have {spread:.3g} times the standard deviation that goes with it: "
        text += "latents that were not scaled?"
        severity = "warning" if spread > 1 else "info"
        return Check("data", "spread of the latents", "near 1", observed, False, text, severity)
    if values.ndim < 4 and float(values.std()) > RAW * unit:
        text = f"the noise, of {unit:.3g}, is added to values with a standard deviation of {float(values.std()):.3g}: "
        text += "were they not scaled?"
        return Check("data", name, "near 1", observed, False, text, "warning", "data-range")
    if values.ndim < 4 or values.shape[1] not in (1, 3):
        return not_observed("data", name, wanted, f"tensors of shape {tuple(values.shape[1:])} are no images; {observed}")
    told = f"the images that the noise is added to reach from {low:.3g} to {high:.3g}"
    if low > -2.0 and high > 20:
        return Check("data", name, wanted, observed, False, f"{told}: they were not scaled to [-1, 1]", code="data-range")
    if len(values) > 1 and high - low < NARROW:
        text = f"{told}: they are nearly one gray. Were they divided twice?"
        return Check("data", name, wanted, observed, False, text, code="data-range")
    if low >= -1e-3 and 0.5 < high <= 1 + 1e-3:
        return Check("data", name, wanted, observed, False, f"{told}: [0, 1], not [-1, 1]", "warning", "data-range")
    if len(values) > 1 and HALF[0] < -low < HALF[1] and HALF[0] < high < HALF[1]:
        text = f"{told}: [-0.5, 0.5], not [-1, 1]?"
        return Check("data", name, wanted, observed, False, text, "warning", "data-range")
    if values.shape[1] == 3 and values.shape[-1] > 6 and (ratio := _apart(values)) < MIXED:
        text = f"pixels that are three apart are more alike than neighbors ({ratio:.2f}): are colors and places mixed up?"
        return Check("data", "neighboring pixels", "more alike than others", f"{ratio:.2f}", False, text, "warning")
    text = f"{told}, not from -1 to 1"
    return Check("data", name, wanted, observed, max(high, -low) <= FAR, text, "warning", "data-range")


def rounding_of(images: torch.Tensor) -> float:
    """Standard deviation of the rounding of images, [B, N], that were bytes and are from 0 to 1 or from -1 to 1; else 0."""
    low, high = float(images.min()), float(images.max())
    scale, begins = (255, 0) if low >= -1e-3 else (127.5, 1)
    whole = (images + begins) * scale
    rounded = max(high, -low) < 1 + 1e-3 and bool(((whole - whole.round()).abs() < 1e-2).all())
    return 1 / scale / 12**0.5 if rounded else 0.0


def _apart(values: torch.Tensor) -> float:
    """How much pixels differ that are three apart in a row, over neighbors. In images it is above 1."""
    near, far = ((values[..., n:] - values[..., :-n]).abs().mean() for n in (1, 3))
    return float(far / near.clamp(min=1e-12))


def check_spread(clean: torch.Tensor, config: Any) -> Check:
    """Of latents that an autoencoder of that config made earlier."""
    spread, scale = float(clean.detach().double().std()), config.get("scaling_factor")
    name, wanted, observed = "spread of the latents", "near 1", f"standard deviation {spread:.3g}"
    if clean.ndim != 4 or clean.shape[1] in (1, 3):
        return not_observed("data", name, wanted, f"the autoencoder made them before this update; {observed}")
    text = f"the latents have a standard deviation of {spread:.3g}; the noise has 1"
    if scale and abs(scale - 1) > 0.2 and _off(spread) > 2 * _off(spread * scale):
        text += f". Times the autoencoder's scaling_factor {scale:.4g} it would be {spread * scale:.3g}: were they not scaled?"
        return Check("data", name, wanted, observed, False, text, "warning")
    if scale and abs(scale - 1) > 0.2 and _off(spread) > 2 * _off(spread / scale):
        text += f". Without one scaling_factor of {scale:.4g} it would be {spread / scale:.3g}: were they scaled twice?"
        return Check("data", name, wanted, observed, False, text, "warning")
    return Check("data", name, wanted, observed, WIDE[0] < spread < WIDE[1], text, "info")


def _off(spread: float) -> float:
    """How far from 1, in powers of e, and 0.25 where that is nearly nothing."""
    return max(abs(math.log(max(spread, 1e-9))), 0.25)


def is_signed(low: float, high: float) -> bool:
    """Whether images have negative values, or are too dark to say that they should."""
    return low < -1e-3 or high < 0.5


def check_encoded(low: float, high: float) -> Check:
    """Of images from `low` to `high` that an autoencoder gets; those of Stable Diffusion were trained on -1 to 1."""
    observed = f"{low:.3g} to {high:.3g}"
    text = f"the autoencoder encodes images from {observed}, without negative values: it was trained on -1 to 1"
    return Check("data", "range of the images that are encoded", "-1 to 1", observed, False, text, "warning", "data-range")


def check_latents(clean: torch.Tensor, seen: Seen, config: Any) -> Check:
    """`seen`: tensors of the update before the forward pass, the oldest first."""
    scale, shift = config.get("scaling_factor"), config.get("shift_factor") or 0.0
    name = "scale of the latents"
    if not scale:
        return not_observed("data", name, "that of the autoencoder", "its config has no scaling_factor")
    wanted = f"(z - {shift:.4g}) * {scale:.4g}" if shift else f"{scale:.4g} z"
    kept = [tensor for tensor in seen.tensors.values() if tensor.data_ptr() not in seen.changed]  # and not scaled in place
    relatives = [found for tensor in kept if (found := _line(clean, tensor)) is not None]
    if not relatives:
        return check_spread(clean, config)
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
    half = min(tensor.dtype.itemsize, clean.dtype.itemsize) < 4
    return (gain, offset) if left < (ROUNDED if half else SMALL) else None

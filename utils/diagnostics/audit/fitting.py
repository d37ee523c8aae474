"""Least squares for each sample, in float64; which of some named values were observed; and how figures are said."""

import math
from collections.abc import Iterable, Mapping

import torch

TOLERANCE = 2e-5  # of fp32 arithmetic, which leaves 1e-7, far above its rounding and far below bf16's 4e-3
ROUNDING = 2.0**-24  # of fp32, relative
SMALL = 1e-3  # of what no training would feel
Values = torch.Tensor | float
MOST_ELEMENTS = 1 << 18  # of a batch that are looked at: every n-th pixel of larger ones


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """[B, N] float64 of [B, ...]. Large images are thinned out, all alike."""
    tensor = tensor.detach()
    stride = -(-tensor.numel() // MOST_ELEMENTS) | 1  # odd, so that it does not fall in step with rows of pixels
    return tensor.reshape(len(tensor), -1)[:, ::stride].double()


def gather(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """[B, N] of all micro steps together, as `flat` gives them."""
    return torch.cat([flat(part) for part in parts])


def fit(target: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(coefficients [B, K] of the `parts` [B, N] whose sum comes nearest to `target` [B, N]; the residual's norm over the
    target's, [B], 0 for a target of zeros)."""
    columns = torch.stack(parts, 1)  # [B, K, N]
    sizes = columns.norm(dim=2, keepdim=True).clamp(min=1e-300)
    scaled = columns / sizes
    gram = scaled @ scaled.mT
    moments = scaled @ target[:, :, None]
    coefficients = torch.linalg.pinv(gram, rtol=1e-12, hermitian=True) @ moments
    residual = target - (coefficients * scaled).sum(1)
    size = target.norm(dim=1)
    relative = torch.where(size > 0, residual.norm(dim=1) / size.clamp(min=1e-300), 0.0)
    return (coefficients / sizes)[:, :, 0], relative


def slope(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """(the factor with which y [N] follows x [N], the norm of what is left of y over its own)."""
    factor = float((x * y).sum() / (x * x).sum().clamp(min=1e-300))
    return factor, float((y - factor * x).norm() / y.norm().clamp(min=1e-300))


def worst(values: torch.Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    return float(values.abs().max()) if values.numel() else 0.0


def middle(values: torch.Tensor) -> float:
    return float(values.double().quantile(0.5)) if values.numel() else float("nan")


def span(values: torch.Tensor) -> str:
    """The middle of the values, and how far they spread where they do."""
    if not values.numel():
        return "-"
    values = values.double()
    low, high = float(values.min()), float(values.max())
    if abs(high - low) <= 1e-3 * max(abs(low), abs(high), 1e-12):
        return f"{middle(values):.4g}"
    return f"{middle(values):.4g} ({low:.3g} to {high:.3g})"


def constant(values: torch.Tensor, tolerance: float = 1e-3) -> float | None:
    """The number that all values are, within a share of it; None where they differ."""
    if not torch.isfinite(values).all():
        return None
    center = middle(values)
    return center if center and worst(values / center - 1) <= tolerance else None


def named(observed: Values, known: Mapping[str, Values], tolerance: Values, share: float = 0.0) -> str | None:
    """The name of the first `known` values that are those observed, to `tolerance` plus a `share` of their own size."""
    for name, values in known.items():
        off, size = torch.as_tensor(observed - values).abs(), torch.as_tensor(values).abs()
        if bool((off <= tolerance + share * size).all()):
            return name
    return None


def named_multiple(observed: torch.Tensor, known: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the `known` values that are proportional to those observed, and the factor where it is not 1."""
    factors = {name: constant(observed / values) for name, values in known.items()}
    factors = {name: factor for name, factor in factors.items() if factor is not None}
    if not factors:
        return None
    name = min(factors, key=lambda name: abs(math.log(abs(factors[name]))))
    return name if abs(factors[name] - 1) < SMALL else f"{name}, times {simple(factors[name])}"


def neighbors(what: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values [B, ...] that the images beside each one have, by what they are called."""
    return {f"{what} of the next image": values.roll(-1, 0), f"{what} of the image before": values.roll(1, 0)}


def simple(value: float, tolerance: float = 2e-3) -> str:
    """A factor in words that a reader recognizes: 1/2, 4, -1."""
    for whole in (*range(1, 65), 100, 128, 256, 512, 1000, 1024):
        for sign in (1, -1):
            if abs(value * sign / whole - 1) < tolerance:
                return f"{sign * whole}"
            if abs(value * sign * whole - 1) < tolerance:
                return f"{'-' if sign < 0 else ''}1/{whole}"
    return f"{value:.4g}"

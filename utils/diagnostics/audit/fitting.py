"""Least squares for each sample, in float64, and how figures are said."""

import torch

MOST_ELEMENTS = 1 << 18  # of a batch that are looked at: every n-th pixel of larger ones


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """[B, N] float64 of [B, ...]. Large images are thinned out, all alike."""
    tensor = tensor.detach()
    stride = -(-tensor.numel() // MOST_ELEMENTS) | 1  # odd, so that it does not fall in step with rows of pixels
    return tensor.reshape(len(tensor), -1)[:, ::stride].double()


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


def worst(values: torch.Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    return float(values.abs().max()) if values.numel() else 0.0


def middle(values: torch.Tensor) -> float:
    return float(values.double().quantile(0.5)) if values.numel() else float("nan")


def span(values: torch.Tensor) -> str:
    """The middle of the values, and how far they spread where they do."""
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


def simple(value: float, tolerance: float = 2e-3) -> str:
    """A factor in words that a reader recognizes: 1/2, 4, -1."""
    for whole in (*range(1, 65), 100, 128, 256, 512, 1000, 1024):
        for sign in (1, -1):
            if abs(value * sign / whole - 1) < tolerance:
                return f"{sign * whole}"
            if abs(value * sign * whole - 1) < tolerance:
                return f"{'-' if sign < 0 else ''}1/{whole}"
    return f"{value:.4g}"

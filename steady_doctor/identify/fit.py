"""Least squares for each sample, also where columns are zero or alike: torch's own needs independent ones on a GPU."""

import torch
from torch import Tensor


def fit(wanted: Tensor, *columns: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the coefficients [B, K] of K `columns` [B, N] whose sum comes nearest to `wanted` [B, N], and the share of it
    that is left, [B]; float64."""
    sides, wanted = torch.stack([column.double() for column in columns], -1), wanted.double().unsqueeze(-1)
    sizes = sides.norm(dim=1, keepdim=True).clamp(min=1e-30)
    sides = sides / sizes
    solution = torch.linalg.pinv(sides.mT @ sides, rtol=1e-12, hermitian=True) @ (sides.mT @ wanted)
    left = (sides @ solution - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2)).clamp(min=1e-12)
    return solution.squeeze(-1) / sizes.squeeze(1), left

"""The noise levels of flow matching, and how they weigh. What is predicted, and the samplers, are in models/flow_scheduler.py.

Notation: a noisy image is x = (1 - sigma) y + sigma n. Over 1 - sigma that is y + s n with s = sigma / (1 - sigma), EDM's
noise level. --P_mean and --P_std mean what they mean there: ln s is normal, sigma logit-normal (Esser et al. 2024, 3.1).
"""

import torch

from utils.core import randomness
from utils.diffusion import edm2

LEVELS = 1000  # timesteps reach to it; in the validation, bins are below it
LEAST_SIGMA = 0.05  # below which an error of the clean image weighs no more (Li & He 2025, algorithm 1)


def training_sigmas(seed: int, sample_numbers: torch.Tensor, mean: float | None, std: float) -> torch.Tensor:
    """Returns float32 [B] in [0, 1), a function of (seed, sample number): uniform where `mean` is None."""
    if mean is None:
        return randomness.uniform(seed, "timesteps", sample_numbers)[:, 0]
    return _of_edm(edm2.training_noise_levels(seed, sample_numbers, mean, std))


def sigmas_at(quantiles: torch.Tensor, mean: float | None, std: float) -> torch.Tensor:
    """Returns sigma, float64 [B], below which a share of `quantiles` (float64 [B] in (0, 1)) of the training's lies."""
    return quantiles if mean is None else _of_edm(edm2.noise_levels_at(quantiles, mean, std))


def bins(sigma: torch.Tensor, mean: float | None, std: float) -> torch.Tensor:
    """Returns where in the training's distribution sigma [B] lies, int64 [B] in [0, LEVELS), each equally likely."""
    if mean is None:
        return (sigma * LEVELS).long().clamp(0, LEVELS - 1)
    return edm2.noise_bins(sigma / (1 - sigma), mean, std)


def weights(prediction_type: str, sigma: torch.Tensor) -> torch.Tensor:
    """Returns what the squared error of the prediction counts, [B]: 1 for the velocity; for the clean image as much as the
    error of the velocity (x - y) / sigma that follows from it."""
    return sigma.clamp(min=LEAST_SIGMA) ** -2 if prediction_type == "sample" else torch.ones_like(sigma)


def _of_edm(level: torch.Tensor) -> torch.Tensor:
    return level / (1 + level)

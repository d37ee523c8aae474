"""How well an EDM2 network denoises at each noise level, and where the way from noise to image is looked at."""

import math

import torch
from torch import nn

from utils.core import randomness
from utils.data.training_data import TrainingSamples
from utils.diagnostics.probe import PROBE_IMAGES
from utils.diffusion.edm2 import EDM2Denoiser, denoise, losses_per_sample
from utils.diffusion.sampling import FINISHED_EDM

PATH_SIGMAS = (80.0, 10.0, 3.0, 1.0, 0.5, 0.2)
PROBE_SIGMAS = (0.05, 0.2, 0.5, 1.0, 3.0, 10.0, 40.0)


def path_timesteps() -> list[float]:
    """c_noise of PATH_SIGMAS, and of the finished image."""
    return [*(math.log(sigma) / 4.0 for sigma in PATH_SIGMAS), FINISHED_EDM]


def sigma_caption(timestep: float) -> str:
    return f"sigma {math.exp(4.0 * timestep):.2g}" if timestep > FINISHED_EDM else "finished"


def examine_denoiser(denoiser: EDM2Denoiser, samples: TrainingSamples) -> dict:
    """How well F is predicted at some noise levels, on the run's first images, beside u(sigma) (raw weights); and whether the
    network sees the noise level."""
    batch = samples.on_device(next(samples.batches(0, 1)))
    clean_images, labels = batch.clean_images[:PROBE_IMAGES], batch.classes()[:PROBE_IMAGES]
    numbers = torch.arange(len(clean_images), device=clean_images.device)
    found: dict = {"weighted_loss": {}, "exp_u": {}}
    for place, level in enumerate(PROBE_SIGMAS):
        sigma = torch.full((len(numbers),), level, device=clean_images.device)
        noise = randomness.normal(samples.seed, f"probe/{place}", numbers, tuple(clean_images.shape[1:]))
        noisy_images = clean_images + level * noise
        # Not by the denoiser's own forward, which autocasts as in training.
        denoised = denoise(denoiser.unet, noisy_images, sigma, denoiser.sigma_data, labels)
        u = denoiser.uncertainty(sigma)
        weighted = losses_per_sample(denoised, clean_images, sigma, u, denoiser.sigma_data).shown
        found["weighted_loss"][f"{level:g}"] = weighted.mean().item()
        found["exp_u"][f"{level:g}"] = u.exp().mean().item()
        if level == 1.0:
            found["timestep_response"] = _response(denoiser.unet, noisy_images, labels)
    return found


def _response(unet: nn.Module, noisy_images: torch.Tensor, labels: torch.Tensor) -> float | None:
    """Change of F from one noise level to others over its size; None for a network whose output is zero."""
    scaled = noisy_images / noisy_images.std()
    first, *others = (unet(scaled, math.log(sigma) / 4.0, labels).sample.float() for sigma in (1.0, 0.1, 10.0))
    scale = first.square().mean().sqrt()
    change = torch.stack([other - first for other in others]).square().mean().sqrt()
    return (change / scale).item() if scale > 0 else None

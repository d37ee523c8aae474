"""Whether an EDM2 network sees the noise level, and where the way from noise to image is looked at."""

import math

import torch

from utils.core import randomness
from utils.data.training_data import TrainingSamples
from utils.diagnostics.probe import PROBE_IMAGES
from utils.diffusion.edm2 import EDM2Denoiser
from utils.diffusion.sampling import FINISHED_EDM

PATH_SIGMAS = (80.0, 10.0, 3.0, 1.0, 0.5, 0.2)


def path_timesteps() -> list[float]:
    """c_noise of PATH_SIGMAS, and of the finished image."""
    return [*(math.log(sigma) / 4.0 for sigma in PATH_SIGMAS), FINISHED_EDM]


def sigma_caption(timestep: float) -> str:
    return f"sigma {math.exp(4.0 * timestep):.2g}" if timestep > FINISHED_EDM else "finished"


def examine_denoiser(denoiser: EDM2Denoiser, samples: TrainingSamples) -> dict:
    """Returns {"timestep_response"}: change of F of the run's first images under noise of sigma 1, when another noise level is
    told, over its size; None for a network whose output is zero."""
    batch = samples.on_device(next(samples.batches(0, 1)), as_they_are=True)
    clean_images, labels = batch.clean_images[:PROBE_IMAGES], batch.classes()[:PROBE_IMAGES]
    numbers = torch.arange(len(clean_images), device=clean_images.device)
    noisy_images = clean_images + randomness.normal(samples.seed, "probe", numbers, tuple(clean_images.shape[1:]))
    scaled = noisy_images / noisy_images.std()
    first, *others = (denoiser.unet(scaled, math.log(sigma) / 4.0, labels).sample.float() for sigma in (1.0, 0.1, 10.0))
    scale = first.square().mean().sqrt()
    change = torch.stack([other - first for other in others]).square().mean().sqrt()
    return {"timestep_response": (change / scale).item() if scale > 0 else None}

"""What an EDM2 run shows of itself: samples by class, the way from noise to image, and how well it denoises at each level."""

import math

import torch
from torch import nn

from models.edm2_pipeline import guided
from utils import randomness
from utils.edm import EDM2Denoiser, denoise, losses_per_sample
from utils.previews import Previews
from utils.probe import PROBE_IMAGES
from utils.sampling import FINISHED_EDM

PATH_SIGMAS = (80.0, 10.0, 3.0, 1.0, 0.5, 0.2)
PROBE_SIGMAS = (0.05, 0.2, 0.5, 1.0, 3.0, 10.0, 40.0)


def class_of_samples(sample_numbers: torch.Tensor, num_classes: int) -> torch.Tensor | None:
    """Every class in turn, int64 [B]; None where there are no classes."""
    return sample_numbers % num_classes if num_classes else None


class EDM2Previews(Previews):
    """As `Previews`, of the network of `denoiser`, unwrapped; image i is of class i modulo their number, without guidance."""

    def __init__(self, accelerator, denoiser: EDM2Denoiser, *arguments, **options):
        super().__init__(accelerator, denoiser.unet, *arguments, **options)
        self._denoiser = denoiser

    def predict(self, scaled: torch.Tensor, timestep: torch.Tensor, sample_numbers: torch.Tensor) -> torch.Tensor:
        return guided(self._unet, scaled, timestep, class_of_samples(sample_numbers, self._unet.config.num_class_embeds))

    def _path_timesteps(self) -> list[float]:
        return [*(math.log(sigma) / 4.0 for sigma in PATH_SIGMAS), FINISHED_EDM]

    def _caption(self, timestep: float) -> str:
        return f"sigma {math.exp(4.0 * timestep):.2g}" if timestep > FINISHED_EDM else "finished"

    def _examine(self) -> dict:
        """How well F is predicted at some noise levels, on the run's first images, beside u(sigma) (raw weights); and whether
        the network sees the noise level."""
        batch = next(self._samples.batches(0, 1))
        clean_images = self._samples.on_device(batch)[1][:PROBE_IMAGES]
        numbers = torch.arange(len(clean_images), device=clean_images.device)
        labels = self._samples.labels(batch)[: len(numbers)]
        found: dict = {"weighted_loss": {}, "exp_u": {}}
        for place, level in enumerate(PROBE_SIGMAS):
            sigma = torch.full((len(numbers),), level, device=clean_images.device)
            noise = randomness.normal(self._samples.seed, f"probe/{place}", numbers, tuple(clean_images.shape[1:]))
            noisy_images = clean_images + level * noise
            # Not by the denoiser's own forward, which autocasts as in training.
            denoised = denoise(self._unet, noisy_images, sigma, self._denoiser.sigma_data, labels)
            u = self._denoiser.uncertainty(sigma)
            weighted = losses_per_sample(denoised, clean_images, sigma, u, self._denoiser.sigma_data).weighted
            found["weighted_loss"][f"{level:g}"] = weighted.mean().item()
            found["exp_u"][f"{level:g}"] = u.exp().mean().item()
            if level == 1.0:
                found["timestep_response"] = _response(self._unet, noisy_images, labels)
        return found


def _response(unet: nn.Module, noisy_images: torch.Tensor, labels: torch.Tensor) -> float | None:
    """Change of F from one noise level to others over its size; None for a network whose output is zero."""
    scaled = noisy_images / noisy_images.std()
    first, *others = (unet(scaled, math.log(sigma) / 4.0, labels).sample.float() for sigma in (1.0, 0.1, 10.0))
    scale = first.square().mean().sqrt()
    change = torch.stack([other - first for other in others]).square().mean().sqrt()
    return (change / scale).item() if scale > 0 else None

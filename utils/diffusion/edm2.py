"""EDM2's training: noise levels that belong to samples, the network with its preconditioning, and the weighted loss.

The preconditioning's formula is in models/edm_heun.py, which exported pipelines carry.

Notation: a noisy image is x = y + sigma n, n being unit noise; D(x; sigma) is the denoised image (Karras et al. 2022, 2024).
"""

from contextlib import nullcontext

import torch
from torch import nn

from models.edm2_unet import EDM2UNet, MPFourier, MPLinear
from models.edm_heun import preconditioning
from utils.core import randomness
from utils.diffusion.objective import Losses
from utils.diffusion.transforms import TransformEmbedding

UNCERTAINTY_CHANNELS = 128
NOISE_BINS = 1000


def training_noise_levels(seed: int, sample_numbers: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    """sigma, float32 [B]: exp of a normal number with P_mean `mean` and P_std `std`, a function of (seed, sample number)."""
    return (mean + std * randomness.normal(seed, "sigma", sample_numbers, (1,))[:, 0]).exp()


def noise_levels_at(quantiles: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    """sigma, float64 [B], below which a share of `quantiles` (float64 [B] in (0, 1)) of the training's distribution lies."""
    return (mean + std * torch.special.ndtri(quantiles)).exp()


def noise_bins(sigma: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    """Returns where in the training's distribution sigma [B] lies, int64 [B] in [0, NOISE_BINS), each equally likely."""
    return (torch.special.ndtr((sigma.log() - mean) / std) * NOISE_BINS).long().clamp(0, NOISE_BINS - 1)


class Uncertainty(nn.Module):
    """u(sigma): one linear layer on Fourier features of c_noise, [B] -> [B]. Trained with the network and thrown away after."""

    def __init__(self):
        super().__init__()
        self.features = MPFourier(UNCERTAINTY_CHANNELS)
        self.linear = MPLinear(UNCERTAINTY_CHANNELS, 1)

    def forward(self, sigma: torch.Tensor) -> torch.Tensor:
        with torch.autocast(sigma.device.type, enabled=False):
            return self.linear(self.features(sigma.log() / 4.0))[:, 0]


class EDM2Denoiser(nn.Module):
    """What is trained: `unet`, which computes F and is exported, u(sigma), and what tells `unet` of `transforms`, where there
    are any. The first weights of the latter two are of `seed`."""

    def __init__(self, unet: EDM2UNet, sigma_data: float, seed: int = 0, transforms: bool = False):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(randomness.derive_seed(seed, "uncertainty"))
            self.uncertainty = Uncertainty()
            self.transforms = TransformEmbedding(unet) if transforms else None
        self.unet, self.sigma_data = unet, sigma_data

    def forward(
        self,
        noisy_images: torch.Tensor,
        sigma: torch.Tensor,
        class_labels: torch.Tensor | None = None,
        transforms: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(D(x; sigma) [B, C, H, W], u(sigma) [B]), both float32, of x [B, C, H, W] and sigma [B]."""
        with nullcontext() if self.transforms is None else self.transforms.given(transforms):
            denoised = denoise(self.unet, noisy_images, sigma, self.sigma_data, class_labels)
        return denoised, self.uncertainty(sigma)


def denoise(
    unet: nn.Module,
    noisy_images: torch.Tensor,
    sigma: torch.Tensor,
    sigma_data: float,
    class_labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """D(x; sigma), float32 [B, C, H, W], of x [B, C, H, W] and sigma [B]."""
    c_skip, c_out, c_in, c_noise = preconditioning(sigma, sigma_data)
    c_skip, c_out, c_in = (c[:, None, None, None] for c in (c_skip, c_out, c_in))
    return c_skip * noisy_images + c_out * unet(c_in * noisy_images, c_noise, class_labels).sample.float()


def losses_per_sample(
    denoised: torch.Tensor, clean_images: torch.Tensor, sigma: torch.Tensor, uncertainty: torch.Tensor, sigma_data: float
) -> Losses:
    """Shown is lambda(sigma) times the mean squared error of the denoised image, with the lambda that makes F's error count the
    same at each noise level, (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 (Karras et al. 2022, table 1). Trained is that
    over exp(u) plus u, by which u learns its logarithm (Karras et al. 2024, eq. 14)."""
    weight = (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2
    weighted = weight * (denoised - clean_images).square().flatten(1).mean(1)
    return Losses(weighted / uncertainty.exp() + uncertainty, weighted)

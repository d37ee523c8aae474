"""What bare loops train: all that differs between a bare loop of train_ddpm.py and one of train_edm2.py."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from models.edm2_unet import force_weight_norm
from utils.diffusion.edm2 import EDM2Denoiser, losses_per_sample, training_noise_levels
from utils.diffusion.unet import make_edm2_unet, make_unet
from utils.optim.ema import EMA
from utils.optim.power_ema import PowerEMA
from utils.options.flags import DDPMOptions, EDM2Options
from utils.options.presets import EDM2_FLAGS, NETWORKS
from utils.training.memory_estimate import flops_per_image

SIZES = {"digits16": (16, 1), "cifar10": (32, 3), "celeba64": (64, 3), "256": (256, 3)}  # preset -> resolution, channels
EDM2_SIZE = (32, 3)  # of the EDM2 presets that are not in SIZES, when nothing else is asked for
NUM_CLASSES = 10  # of the digits, and of the synthetic data


@dataclass(frozen=True)
class DDPM:
    """The noise in noisy images, predicted by a preset's U-Net at its usual resolution, or another."""

    preset: str
    resolution: int
    channels: int
    dropout: float | None = None
    max_grad_norm: float = 1.0

    script = "train_ddpm.py"
    presets = tuple(NETWORKS)

    def options(self, **options) -> dict:
        size = {"resolution": self.resolution, "image_channels": self.channels}
        return {**size, "model_preset": self.preset, "dropout": self.dropout, **options}

    def make_network(self, **options) -> nn.Module:
        return make_unet(DDPMOptions(**self.options(**options)))

    def trained(self, unet: nn.Module) -> nn.Module:
        """What is optimized, of which `unet` is all or most."""
        return unet

    def make_optimizer(self, parameters: Iterable[nn.Parameter], fused: bool | None) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=fused)

    def make_ema(self, unet: nn.Module) -> EMA:
        """The script's own by default."""
        return EMA(unet)

    def batch(self, size: int, device: torch.device) -> dict[str, torch.Tensor]:
        noisy_images, noise = torch.randn(2, size, self.channels, self.resolution, self.resolution, device=device)
        return {"noisy_images": noisy_images, "noise": noise, "timesteps": torch.randint(0, 1000, (size,), device=device)}

    def predict(self, trained: nn.Module, batch: dict):
        """The forward pass, which the loop runs under autocast."""
        return trained(batch["noisy_images"], batch["timesteps"]).sample

    def loss(self, prediction, batch: dict) -> torch.Tensor:
        return nn.functional.mse_loss(prediction.float(), batch["noise"])

    def force_weight_norm(self, trained: nn.Module, finite: torch.Tensor) -> None:
        """What follows the optimizer's step: nothing."""

    def flops(self) -> int:
        """Of the forward and backward pass of one image."""
        return flops_per_image(self.make_network, (self.channels, self.resolution, self.resolution))


class EDM2(DDPM):
    """The denoised image, by class."""

    script = "train_edm2.py"
    presets = tuple(EDM2_FLAGS)

    def make_network(self, **options) -> nn.Module:
        return make_edm2_unet(EDM2Options(**self.options(**options)), num_classes=NUM_CLASSES)

    def trained(self, unet: nn.Module) -> nn.Module:
        return EDM2Denoiser(unet, sigma_data=0.5)

    def make_optimizer(self, parameters: Iterable[nn.Parameter], fused: bool | None) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.99), fused=fused)

    def make_ema(self, unet: nn.Module) -> EMA:
        return PowerEMA(unet, (0.05, 0.10))

    def batch(self, size: int, device: torch.device) -> dict[str, torch.Tensor]:
        clean_images, noise = torch.randn(2, size, self.channels, self.resolution, self.resolution, device=device)
        numbers = torch.arange(size, device=device)
        sigmas = training_noise_levels(0, numbers, -0.8, 1.6)
        noisy_images = clean_images + sigmas[:, None, None, None] * noise
        labels = numbers % NUM_CLASSES
        return {"clean_images": clean_images, "noisy_images": noisy_images, "sigmas": sigmas, "labels": labels}

    def predict(self, trained: nn.Module, batch: dict):
        return trained(batch["noisy_images"], batch["sigmas"], batch["labels"])

    def loss(self, prediction, batch: dict) -> torch.Tensor:
        denoised, uncertainty = prediction
        return losses_per_sample(denoised, batch["clean_images"], batch["sigmas"], uncertainty, 0.5).trained.mean()

    def force_weight_norm(self, trained: nn.Module, finite: torch.Tensor) -> None:
        force_weight_norm(trained, finite)


TASKS = {task.script: task for task in (DDPM, EDM2)}


def make_task(
    script: str, preset: str, *, resolution: int | None = None, channels: int | None = None, dropout: float | None = None
) -> DDPM:
    """Of the training `script`; what is None is as the preset has it. EDM2's paper sizes clip nothing, as published.

    Raises ValueError for a preset that the script does not have.
    """
    task = TASKS[script]
    if preset not in task.presets:
        raise ValueError(f"{script} has no preset {preset!r}, but {', '.join(task.presets)}")
    usual = SIZES.get(preset, EDM2_SIZE)
    max_grad_norm = EDM2_FLAGS[preset]["max_grad_norm"] if task is EDM2 else DDPM.max_grad_norm
    return task(preset, resolution or usual[0], channels or usual[1], dropout, max_grad_norm)

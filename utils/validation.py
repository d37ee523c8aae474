"""The loss on held-out images: the same images, noise and timesteps every time, in fp32, sharded over the processes."""

from collections.abc import Callable

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler
from torch import nn

from utils import randomness
from utils.augmentation import to_unit_range
from utils.diffusion import loss_per_sample, training_target
from utils.errors import UserError
from utils.launch import if_memory_allows


def split_validation(images, count: int, seed: int):
    """(training images, held-out images): `count` of `images` (an ImageSet) are held out, chosen by `seed`; may be 0."""
    if count >= len(images):
        raise UserError(f"--validation_images {count} leaves none of the {len(images)} images to train on")
    if count == 0:
        return images, images.subset([])  # no list of row numbers, which would grow with the set
    positions = torch.arange(len(images))
    shuffled = randomness.permute(seed, "validation split", torch.zeros_like(positions), positions, len(images)).numpy()
    held_out = images.subset(np.sort(shuffled[:count]))
    held_out.fetch([0])  # that none of them can be decoded is told now, not at the first validation
    return images.subset(np.sort(shuffled[count:])), held_out


def check_images(images, sample: int = 64) -> None:
    """Looks at images from all over the set. Raises UserError when every one of them is of the same single value."""
    pixels = images.fetch(np.linspace(0, len(images) - 1, min(sample, len(images))).astype(np.int64))
    if pixels.min() == pixels.max():
        raise UserError(f"the {len(pixels)} images looked at are all of one value ({pixels.min()}); check the image column")


@torch.no_grad()
def validation_loss(
    accelerator: Accelerator,
    unet: nn.Module,
    images,
    noise_scheduler: DDPMScheduler,
    weights: torch.Tensor,
    *,
    seed: int,
    batch_size: int,
    draws: int = 4,
) -> float:
    """Mean training loss over `draws` noisings of each of the held-out `images` (an ImageSet), equal on all ranks.

    `unet` is the unwrapped network, already in full precision and with the weights to judge. The timesteps of the
    noisings are spread evenly over the schedule, one in each of len(images) x draws equal slices, so that the figure moves
    with the weights and not with the luck of the draw.
    """
    num_timesteps = noise_scheduler.config.num_train_timesteps

    def losses_of(clean_images, noise, places, labels) -> torch.Tensor:
        timesteps = (places * num_timesteps).long().to(clean_images.device)
        noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
        target = training_target(noise_scheduler, clean_images, noise, timesteps)
        return loss_per_sample(unet(noisy_images, timesteps).sample, target, weights[timesteps])

    return mean_loss(accelerator, images, losses_of, seed=seed, batch_size=batch_size, draws=draws)


@torch.no_grad()
def mean_loss(
    accelerator: Accelerator,
    images,
    losses_of: Callable[..., torch.Tensor],
    *,
    seed: int,
    batch_size: int,
    draws: int = 4,
) -> float:
    """Mean of `losses_of(clean_images, noise, places, labels)` [B] over `draws` noisings of each of the held-out `images`.

    `places` float64 [B], on the CPU, is where in the distribution of noise levels a noising lies, in (0, 1): they are the
    middles of len(images) x draws equal slices. `labels` int64 [B] are the images' classes, -1 where they have none. Raises
    UserError on all processes where memory runs out on any.
    """
    total = len(images) * draws
    device = accelerator.device
    loss_sum = torch.zeros((), dtype=torch.float64, device="cpu")
    chunks = list(range(0, total, batch_size))[accelerator.process_index :: accelerator.num_processes]

    def summed(first: int) -> torch.Tensor:
        numbers = torch.arange(first, min(first + batch_size, total))
        rows = (numbers % len(images)).numpy()
        clean_images = images.fetch(rows, np.full((len(numbers), 2), 0.5, np.float32))
        clean_images = to_unit_range(torch.from_numpy(clean_images).to(device), images.max_value)
        # A fixed shuffle decides which image gets which slice.
        slices = randomness.permute(seed, "validation timesteps", torch.zeros_like(numbers), numbers, total)
        noise = randomness.normal(seed, "validation noise", numbers.to(device), images.shape)
        labels = torch.full_like(numbers, -1) if images.labels is None else torch.from_numpy(images.labels[images.shown(rows)])
        losses = losses_of(clean_images, noise, (slices.double() + 0.5) / total, labels.to(device))
        return losses.sum().cpu().double()  # in this order: not every device has float64

    with if_memory_allows(accelerator, "a validation", "set a smaller --train_batch_size, by which it is shared out"):
        for first in chunks:
            loss_sum += summed(first)
    return accelerator.reduce(loss_sum.float().to(device), "sum").item() / total

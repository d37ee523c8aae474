"""What a training learns from, by sample number: batches of images, their place in the dataset, and their noise."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from accelerate import Accelerator

from utils import randomness
from utils.augmentation import augment, to_unit_range
from utils.batches import SampleOrder, training_batches
from utils.data import ImageSet
from utils.errors import UserError


class TrainingSamples:
    """The training's samples, counted through all of its updates.

    Every random number belongs to its sample: order, crop, flip, jitter and noise are functions of `seed` and the sample
    number, whichever process and micro step trains on it, before or after a resume.

    Raises UserError for `balanced` (every class equally often) without class labels.
    """

    def __init__(
        self,
        images: ImageSet,
        accelerator: Accelerator,
        *,
        seed: int,
        train_batch_size: int,
        gradient_accumulation_steps: int = 1,
        balanced: bool = False,
        center_crop: bool = False,
        random_flip: bool = False,
        color_jitter: float = 0.0,
    ):
        if balanced and images.labels is None:
            raise UserError("--balanced_sampling needs class labels; name their column with --label_column")
        self.images, self.seed, self.device = images, seed, accelerator.device
        self.micro_batch_size = train_batch_size
        self.random_flip, self._color_jitter = random_flip, color_jitter
        self._order = SampleOrder(len(images), seed, images.labels if balanced else None)
        self._split = {
            "train_batch_size": train_batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "process_index": accelerator.process_index,
            "num_processes": accelerator.num_processes,
            "pin_memory": accelerator.device.type not in ("cpu", "mps"),  # else a copy to the device waits for all before it
            "center_crop": center_crop,
        }

    def batches(self, first_step: int, last_step: int, num_workers: int = 0) -> Iterator[dict]:
        """The micro-batches of this process for the updates from `first_step` up to `last_step`; see `training_batches`."""
        return training_batches(
            self.images,
            self._order,
            seed=self.seed,
            first_step=first_step,
            max_train_steps=last_step,
            num_workers=num_workers,
            **self._split,
        )

    def on_device(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(sample numbers int64 [B], clean images float32 [B, C, H, W] in [-1, 1], unit-variance noise of the same shape)."""
        sample_numbers = batch["sample_numbers"].to(self.device, non_blocking=True)
        clean_images = augment(
            batch["images"].to(self.device, non_blocking=True),
            sample_numbers,
            seed=self.seed,
            max_value=self.images.max_value,
            random_flip=self.random_flip,
            color_jitter=self._color_jitter,
        )
        return sample_numbers, clean_images, randomness.normal(self.seed, "noise", sample_numbers, self.images.shape)

    def labels(self, batch: dict) -> torch.Tensor:
        """Classes of the images, int64 [B] on the device; -1 where they have none."""
        if batch["labels"] is None:
            return torch.full((len(batch["sample_numbers"]),), -1, device=self.device)
        return batch["labels"].to(self.device, non_blocking=True)

    def seed_dropout(self, step: int, micro_step: int) -> None:
        """Dropout is the exception: it depends on the rank, so it repeats at the same number of processes only."""
        seed = randomness.derive_seed(self.seed, "dropout", step, micro_step, self._split["process_index"])
        randomness.seed_generator(self.device, seed)

    def dataset_rows(self, sample_numbers: torch.Tensor) -> torch.Tensor:
        """Rows of the dataset, int64 [B], that the samples int64 [B] show."""
        return self.images.dataset_rows(self.images.shown(self._order.indices(sample_numbers.cpu()).numpy()))

    def first_images(self, count: int) -> torch.Tensor:
        """The first clean images of this process, at most `count`, as the network is shown them: those of one pass over the
        data, so that none comes twice unless the sampling is balanced."""
        of_update = self._split["train_batch_size"] * self._split["gradient_accumulation_steps"]
        of_a_pass = len(self.images) // (of_update * self._split["num_processes"])
        updates = max(1, min(math.ceil(count / of_update), of_a_pass))
        return torch.cat([self.on_device(batch)[1] for batch in self.batches(0, updates)])[:count]


def held_out_images(images: ImageSet, count: int, device: torch.device) -> torch.Tensor | None:
    """The first `count` of the held-out `images`, float32 [B, C, H, W] in [-1, 1], as the validation shows them, or None."""
    if len(images) == 0:
        return None
    count = min(len(images), count)
    pixels = images.fetch(np.arange(count), np.full((count, 2), 0.5, np.float32))
    return to_unit_range(torch.from_numpy(pixels).to(device), images.max_value)

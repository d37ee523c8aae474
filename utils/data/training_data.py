"""What a training learns from, by sample number: batches of images, their place in the dataset, and their noise."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator

from utils.core import randomness
from utils.core.errors import UserError
from utils.data.augmentation import augment, draw_transforms, to_unit_range, transformed
from utils.data.autoencoder import Autoencoder
from utils.data.cache import Progress
from utils.data.dataset import ImageSet, load_images, spread
from utils.data.latents import PackedLatents, draw_latents, pack_latents
from utils.data.loader import BatchSplit, SampleOrder, WindowedOrder, training_batches
from utils.options.flags import RunOptions


class Batch(NamedTuple):
    """Samples on the device, of one process."""

    sample_numbers: torch.Tensor  # int64 [B]
    clean_images: torch.Tensor  # float32 [B, C, H, W] in [-1, 1]; or normalized latents
    noise: torch.Tensor  # of the same shape, unit variance
    labels: torch.Tensor | None  # the images' classes, int64 [B], still on the host; None where they have none
    transforms: torch.Tensor | None = None  # what was done to each image, see `draw_transforms`; None where nothing ever is

    def classes(self) -> torch.Tensor:
        """Returns the labels on the device, -1 where there are none."""
        if self.labels is None:
            return torch.full((len(self.sample_numbers),), -1, device=self.clean_images.device)
        return self.labels.to(self.clean_images.device, non_blocking=True)


class Encoded(NamedTuple):
    """What a run with --vae trains on: the latents of all images, and the autoencoder that made them."""

    latents: PackedLatents
    autoencoder: Autoencoder

    def drawn(self, stored: torch.Tensor, seed: int, purpose: str, sample_numbers: torch.Tensor) -> torch.Tensor:
        """Normalized latents float32 [B, C, H, W] of what `PackedLatents.fetch` gave."""
        return self.autoencoder.normalized(draw_latents(stored, seed, purpose, sample_numbers))


class TrainingSamples:
    """The training's samples, counted through all of its updates.

    Every random number belongs to its sample: order, crop, flip, jitter and noise are functions of `seed` and the sample
    number, whichever process and micro step trains on it, before or after a resume.

    Raises UserError for `balanced_sampling` (every class equally often) without class labels.
    """

    def __init__(self, images: ImageSet, accelerator: Accelerator, options: RunOptions, encoded: Encoded | None = None):
        if options.balanced_sampling and images.labels is None:
            raise UserError(
                "--balanced_sampling needs class labels, and the data has none\n"
                "set --label_column, or leave --balanced_sampling out"
            )
        self.images, self.seed, self.device = images, options.seed, accelerator.device
        self.encoded = encoded
        self.shape = images.shape if encoded is None else encoded.latents.shape  # of what the network sees
        self._options, self.micro_batch_size, self.random_flip = options, options.micro_batch_size, options.random_flip
        blocks = images.blocks()
        if blocks is not None:
            self._order: SampleOrder = WindowedOrder(blocks, options.shuffle_window, options.seed)
        else:
            self._order = SampleOrder(len(images), options.seed, images.labels if options.balanced_sampling else None)
        self._split = BatchSplit(
            train_batch_size=options.micro_batch_size,
            gradient_accumulation_steps=options.gradient_accumulation_steps,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )

    def batches(self, first_step: int, last_step: int, num_workers: int = 0) -> Iterator[dict]:
        """The micro-batches of this process for the updates from `first_step` up to `last_step`; see `training_batches`."""
        return training_batches(
            self.images,
            self._order,
            self._split,
            range(first_step, last_step),
            num_workers=num_workers,
            pin_memory=self.device.type not in ("cpu", "mps"),  # else a copy to the device waits for all before it
            center_crop=self._options.center_crop,
            latents=None if self.encoded is None else self.encoded.latents,
        )

    def on_device(self, batch: dict, as_they_are: bool = False) -> Batch:
        """Ready for an update; `as_they_are`: without transforms that the network would have to be told."""
        sample_numbers = batch["sample_numbers"].to(self.device, non_blocking=True)
        stored = batch["images"].to(self.device, non_blocking=True)
        if self.encoded is not None:
            clean_images = self.encoded.drawn(stored, self.seed, "latents", sample_numbers)
        else:
            clean_images = augment(
                stored,
                sample_numbers,
                seed=self.seed,
                max_value=self.images.max_value,
                random_flip=self.random_flip,
                color_jitter=self._options.color_jitter,
            )
        transforms = None
        if self._options.augment_probability and not as_they_are:
            transforms = draw_transforms(self.seed, sample_numbers, self._options.augment_probability)
            clean_images = transformed(clean_images, transforms)
        noise = randomness.normal(self.seed, "noise", sample_numbers, self.shape)
        return Batch(sample_numbers, clean_images, noise, batch["labels"], transforms)

    def seed_dropout(self, step: int, micro_step: int) -> None:
        """Dropout is the exception: it depends on the rank, so it repeats at the same number of processes only."""
        seed = randomness.derive_seed(self.seed, "dropout", step, micro_step, self._split.process_index)
        randomness.seed_generator(self.device, seed)

    def dataset_rows(self, sample_numbers: torch.Tensor) -> torch.Tensor:
        """Returns rows of the dataset, int64 [B], that the samples int64 [B] show."""
        return self.images.dataset_rows(self.images.shown(self._order.indices(sample_numbers.cpu()).numpy()))

    def drawn_rows(self, sample_numbers: torch.Tensor) -> torch.Tensor:
        """Returns the rows int64 [B] that the order gives, before others take the places of images that cannot be decoded."""
        return self.images.dataset_rows(self._order.indices(sample_numbers.cpu()).numpy())

    def first_batch(self, count: int) -> Batch:
        """The first samples of this process, at most `count`: those of one pass over the data, so that none comes twice unless
        the sampling is balanced."""
        of_update = self._split.train_batch_size * self._split.gradient_accumulation_steps
        of_a_pass = len(self.images) // (of_update * self._split.num_processes)
        updates = max(1, min(math.ceil(count / of_update), of_a_pass))
        parts = zip(*(self.on_device(batch, as_they_are=True) for batch in self.batches(0, updates)))
        return Batch._make(None if each[0] is None else torch.cat(each)[:count] for each in parts)

    def first_pictures(self, count: int) -> torch.Tensor:
        """Those of `first_batch` as images, float32 [n, C, H, W] in [-1, 1], which latents are not."""
        first = self.first_batch(count)
        if self.encoded is None:
            return first.clean_images
        pixels = torch.from_numpy(self.images.fetch(self._order.indices(first.sample_numbers.cpu()).numpy()))
        return to_unit_range(pixels.to(self.device), self.images.max_value)

    def held_out(self, images: ImageSet, numbers: torch.Tensor, device: torch.device) -> Batch:
        """Samples int64 [B], numbers on the host, of a validation on `images`, for `device`: image i modulo their number, cut
        in the middle, with noise of its own."""
        rows, numbers = (numbers % len(images)).numpy(), numbers.to(device)
        if self.encoded is not None:
            stored = torch.from_numpy(self.encoded.latents.fetch(images.shown_rows(rows), self.seed))
            clean_images = self.encoded.drawn(stored.to(device), self.seed, "validation latents", numbers)
        else:
            pixels = torch.from_numpy(images.fetch(rows, np.full((len(rows), 2), 0.5, np.float32)))
            clean_images = to_unit_range(pixels.to(device), images.max_value)
        noise = randomness.normal(self.seed, "validation noise", numbers, self.shape)
        labels = None if images.labels is None else torch.from_numpy(images.labels[images.shown(rows)])
        return Batch(numbers, clean_images, noise, labels)


class TrainingData:
    """The images that --dataset_name or --train_data_dir name, split into those to train on and those held out.

    Attributes:
        images: all of them; training, validation: parts of them, the second of which may be empty.
        encoded: what `encode` made of them; None where the network sees the images themselves.
        kept: of the autoencoder, for a checkpoint; JSON.
        samples: the training images in the order of the training.

    Raises UserError for anything about the data that a user can mend.
    """

    def __init__(self, options: RunOptions, accelerator: Accelerator, progress: Progress | None = None):
        self.images = load_images(options, progress)
        check_images(self.images)
        self.training, self.validation = split_validation(self.images, options.validation_images, options.seed)
        self.encoded: Encoded | None = None
        self.kept: dict[str, Any] = {}
        self.samples = TrainingSamples(self.training, accelerator, options)

    def encode(
        self, options: RunOptions, accelerator: Accelerator, autoencoder: Autoencoder, progress: Progress | None = None
    ) -> PackedLatents:
        """From here on the samples are latents, whose scale the `autoencoder` is still to get; see `pack_latents`."""
        how = {"cache_dir": options.cache_dir, "mirrors": options.random_flip, "device": accelerator.device}
        latents = pack_latents(self.images, autoencoder, progress=progress, **how)
        self.encoded = Encoded(latents, autoencoder)
        self.samples = TrainingSamples(self.training, accelerator, options, self.encoded)
        return latents

    @property
    def autoencoder(self) -> Autoencoder | None:
        """What turns latents into images, where the network makes latents."""
        return None if self.encoded is None else self.encoded.autoencoder

    def validation_batch(self, numbers: torch.Tensor) -> Batch:
        """See `TrainingSamples.held_out`."""
        return self.samples.held_out(self.validation, numbers, self.samples.device)


def split_validation(images: ImageSet, count: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """(training images, held-out images): `count` of `images` are held out, chosen by `seed`; may be 0."""
    if count >= len(images):
        raise UserError(
            f"--validation_images {count} leaves no images to train on: there are {len(images)}\n"
            "set a smaller number: this one may be that of the --model_preset"
        )
    if count == 0:
        return images, images.subset([])  # no list of row numbers, which would grow with the set
    held_out = images.nearby(count, randomness.derive_seed(seed, "validation split"))
    if held_out is None:
        held_out = np.sort(randomness.shuffled(seed, "validation split", count, len(images)).numpy())
    trained = np.ones(len(images), bool)
    trained[held_out] = False
    validation = images.subset(held_out)
    validation.fetch([0])  # that none of them can be decoded is told now, not at the first validation
    return images.subset(np.flatnonzero(trained)), validation


def check_images(images: ImageSet, sample: int = 64) -> None:
    """Looks at images from all over the set. Raises UserError when every one of them is of the same single value."""
    pixels = images.fetch(spread(images, sample))
    if pixels.min() == pixels.max():
        raise UserError(
            f"all pixels of {len(pixels)} images have the same value ({pixels.min()})\ncheck the images and --image_column"
        )

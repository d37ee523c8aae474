"""A packed cache of latents: every image of a dataset encoded once into one flat file that later runs map into memory.

    <folder>/latents.bin    float32 [images, mirrors, parts, channels, height, width]
    <folder>/meta.json      these sizes, mean and spread by channel, images that cannot be decoded; written last

`mirrors` is 2 with --random_flip: the image, and the mirror image, whose latents are not the mirrored ones. `parts` is 2 where
the autoencoder has a spread beside the mean. Like the packed images, it appears under its name complete or not at all.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import torch

from utils.core import randomness
from utils.core.errors import UserError
from utils.data.augmentation import to_unit_range
from utils.data.autoencoder import Autoencoder, Scale
from utils.data.bad_images import BadImage
from utils.data.cache import MappedArray, free_for, made_once
from utils.data.dataset import ImageSet, cache_folder
from utils.data.packed_caches import describe_size, mark_used, size_of

LATENTS_VERSION = 1  # part of a cache's fingerprint: raise it when the same options give other files
FILE = "latents.bin"


class PackedLatents:
    """The latents of one cache folder, by rows of the dataset.

    Attributes:
        measured: mean and spread by channel, of all images.

    Raises OSError, ValueError or KeyError for a folder that is missing, incomplete or damaged.
    """

    def __init__(self, folder: Path):
        meta = json.loads((folder / "meta.json").read_text())
        shape = tuple(meta["shape"])
        if (folder / FILE).stat().st_size != 4 * math.prod(shape):
            raise ValueError(f"{folder / FILE} is not complete")
        self.folder, self.measured = folder, Scale(meta["mean"], meta["std"])
        self.bad_images = [BadImage(**bad) for bad in meta["bad_images"]]
        self.in_use: IO | None = None  # keeps the cache from being removed
        self._latents = MappedArray(folder / FILE, np.float32, shape)

    def __getstate__(self) -> dict:
        """A copy in another process maps the file again."""
        return {**self.__dict__, "in_use": None}

    @property
    def mirrors(self) -> bool:
        """Whether it has mirror images too."""
        return self._latents.shape[1] == 2

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self._latents.shape[3:]
        return channels, height, width

    def fetch(self, rows: np.ndarray, seed: int, sample_numbers: torch.Tensor | None = None) -> np.ndarray:
        """Mean and, where there is one, spread: float32 [batch, 1 or 2, C, H, W] of `rows` int64 [batch]; with
        `sample_numbers` int64 [batch] of those that are mirrored, where any are, of the mirror image."""
        mirrored = np.zeros(len(rows), np.int64)
        if self.mirrors and sample_numbers is not None:
            mirrored = (randomness.uniform(seed, "flip", sample_numbers)[:, 0] < 0.5).numpy().astype(np.int64)
        batch = self._latents.array[rows, mirrored]
        self._latents.forget_pages()
        return batch


def draw_latents(stored: torch.Tensor, seed: int, purpose: str, sample_numbers: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W]: the mean, plus noise of the spread where there is one; a function of the seed and the sample's number.
    `stored` is of `PackedLatents.fetch`, on the device of the sample numbers int64 [B]."""
    if stored.shape[1] == 1:
        return stored[:, 0]
    noise = randomness.normal(seed, purpose, sample_numbers, tuple(stored.shape[2:]))
    return stored[:, 0] + stored[:, 1] * noise


def pack_latents(
    images: ImageSet,
    autoencoder: Autoencoder,
    *,
    cache_dir: str | None,
    mirrors: bool,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> PackedLatents:
    """The latents of all `images`, encoded first where no cache has them. One process encodes, and others wait for it.

    `progress` is called with (done, total) meanwhile. Raises UserError for a disk that is full or cannot be written, and for
    an autoencoder that gives NaN.
    """
    made_of = [LATENTS_VERSION, images.fingerprint, autoencoder.fingerprint(), mirrors]
    folder = cache_folder(cache_dir) / hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]

    def write(draft: Path) -> None:
        _write(draft, images, autoencoder, mirrors, device, progress)

    try:
        latents = made_once(folder, PackedLatents, write)
    except OSError as error:
        raise UserError(
            f"cannot write the latents {folder}: {error.strerror or error}\nchoose another disk with --cache_dir"
        ) from error
    images.bad_images.learn(latents.bad_images)
    about = {
        "data": f"{images.source}",
        "images": f"latents of {len(images):,} images",
        "options": f"mirror images: {'yes' if mirrors else 'no'}",
    }
    latents.in_use = mark_used(folder, about)
    images.notes.append(f"latents: {describe_size(size_of(folder))} in {folder}")
    return latents


def _write(
    folder: Path,
    images: ImageSet,
    autoencoder: Autoencoder,
    mirrors: bool,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> None:
    sums: list[torch.Tensor] = []
    count, parts = len(images), 0
    with open(folder / FILE, "wb") as file, autoencoder.on(device):
        for start in range(0, count, autoencoder.at_once):
            rows = np.arange(start, min(start + autoencoder.at_once, count))
            pixels = torch.from_numpy(images.fetch(rows, np.full((len(rows), 2), 0.5, np.float32)))
            clean = to_unit_range(pixels.to(device), images.max_value)
            encoded = torch.stack([autoencoder.encode(each) for each in ([clean, clean.flip(-1)] if mirrors else [clean])], 1)
            if not encoded.isfinite().all():
                raise UserError(
                    f"the autoencoder gives values that are not finite, for an image of rows {rows[0]} to {rows[-1]}\n"
                    "check --vae and the images"
                )
            if start == 0:
                parts = encoded.shape[2]
                free_for(folder, 4 * count * math.prod(encoded.shape[1:]))
            file.write(encoded.float().cpu().contiguous().numpy().data)
            wide = encoded[:, 0].cpu().double()
            spread = wide[:, 1].square() if parts == 2 else torch.zeros_like(wide[:, 0])
            sums.append(torch.stack([wide[:, 0].sum((0, 2, 3)), (wide[:, 0].square() + spread).sum((0, 2, 3))]))
            if progress is not None:
                progress(int(rows[-1]) + 1, count)
        file.flush()
        os.fsync(file.fileno())
    values = count * math.prod(autoencoder.latent_shape[1:])
    mean, square = torch.stack(sums).sum(0) / values
    std = (square - mean.square()).clamp(min=0).sqrt()
    meta = {
        "shape": [count, 1 + mirrors, parts, *autoencoder.latent_shape],
        "mean": mean.tolist(),
        "std": [value or 1.0 for value in std.tolist()],  # a channel that is the same everywhere stays as it is
        "bad_images": [dataclasses.asdict(bad) for bad in images.bad_images.values()],
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))

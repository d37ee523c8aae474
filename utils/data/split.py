"""Which images are held out of training, and a look at all of them before it."""

import numpy as np
import torch

from utils.core import randomness
from utils.core.errors import UserError
from utils.data.dataset import ImageSet, spread


def split_validation(images: ImageSet, count: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """(training images, held-out images): `count` of `images` are held out, chosen by `seed`; may be 0."""
    if count >= len(images):
        raise UserError(
            f"--validation_images {count} leaves no images to train on: there are {len(images)}\nset a smaller number"
        )
    if count == 0:
        return images, images.subset([])  # no list of row numbers, which would grow with the set
    held_out = images.nearby(count, randomness.derive_seed(seed, "validation split"))
    if held_out is None:
        positions = torch.arange(len(images))
        shuffled = randomness.permute(seed, "validation split", torch.zeros_like(positions), positions, len(images)).numpy()
        held_out = np.sort(shuffled[:count])
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

"""Are the samples copies? How near each is to its nearest training image, beside how near other real images are to theirs.

No figure tells memorization from too little training (Stein et al. 2023), so there is no verdict "free of memorization":
there are the distances of samples and of real images, the rate of near-duplicates of both, and the closest pairs for the eye.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from PIL import Image

from utils.core.images import side_by_side
from utils.data.augmentation import averaged_down, to_unit_range
from utils.data.dataset import ImageSet
from utils.diagnostics.data_check import NEAR_COPY_DISTANCE, gray_thumbnails, nearest
from utils.evaluation.extractors import eight_bit
from utils.evaluation.feature_sets import evenly

SIDE = 16  # pixels: larger images are compared after averaging down to this
MAX_IMAGES, MAX_BYTES = 1000, 256 * 2**20  # of samples that are looked at
SHEET_PAIRS = 24
_CHUNK_BYTES = 16 * 2**20  # of training images at once, as float64


def kept_for_memorization(count: int, image_bytes: int) -> int:
    """Returns how many of `count` samples, of so many bytes each, are compared with the training images."""
    return max(1, min(count, MAX_IMAGES, MAX_BYTES // max(image_bytes, 1)))


def small_pixels(images: torch.Tensor) -> torch.Tensor:
    """float32 [n, C x h x w] in [-1, 1] of uint8 [n, C, H, W], averaged down to at most 16 x 16."""
    return averaged_down(to_unit_range(images, 255), SIDE).flatten(1)


def near_duplicates(images: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Distances float64 [n] between images and others, both uint8 [n, C, H, W], in units of the contrast of the former's
    thumbnail; a near-duplicate is below NEAR_COPY_DISTANCE, where what that means was measured. Blank images give infinity."""
    first, second = gray_thumbnails(images, 255).double(), gray_thumbnails(others, 255).double()
    contrast = first.std(1, correction=0)
    distances = (first - second).square().mean(1).sqrt() / contrast.clamp(min=1e-12)
    return distances.where(contrast > 1e-6, torch.inf)


@dataclass
class Closest:
    """For each of n images its nearest training image, as it is or mirrored: `pixels` float32 [n] is the root mean square
    difference in [-1, 1] units at up to 16 x 16, `relative` float64 [n] that of `near_duplicates`, `indices` int64 [n]."""

    pixels: torch.Tensor
    relative: torch.Tensor
    indices: torch.Tensor


def closest(chunks: Callable[[], Iterable[torch.Tensor]], training: ImageSet, own: torch.Tensor | None = None) -> Closest:
    """Of the images uint8 [n, C, H, W] that `chunks` gives, twice, among those of `training`; `own` as in `nearest`.

    Both ways, because a model that was trained with random flips mirrors half of its copies.
    """
    ways = [(small_pixels(images), small_pixels(images.flip(-1))) for images in chunks()]
    queries = torch.stack([torch.cat(way) for way in zip(*ways)])
    count, pixels = queries.shape[1:]
    parts = torch.arange(len(training)).split(_at_once(max(math.prod(training.shape), pixels, 2 * count)))
    rows = ((int(part[0]), small_pixels(_fetch(training, part))) for part in parts)
    indices = nearest(queries.flatten(0, 1), rows, own if own is None else own.repeat(2)).view(2, count)
    distances, relative, start = torch.empty(2, count), torch.empty(2, count, dtype=torch.float64), 0
    for images in chunks():
        part = slice(start, start + len(images))
        for way, turned in enumerate((images, images.flip(-1))):
            found = _fetch(training, indices[way, part])
            distances[way, part] = (queries[way, part] - small_pixels(found)).square().mean(1).sqrt()
            relative[way, part] = near_duplicates(turned, found)
        start += len(images)
    return Closest(distances.amin(0), relative.amin(0), indices[relative.argmin(0), torch.arange(count)])


def _at_once(values: int) -> int:
    """How many images or rows of so many float64 values each are held at once."""
    return max(1, _CHUNK_BYTES // (8 * values))


class Originals:
    """The real images that samples may be copies of. How near real images are to them is searched once for each number.

    Args:
        training: all of its images are compared with; memory holds a chunk of them.
        validation: real images that were not trained on. Without it, as many of the training images as there are
            samples stand in, each compared with all others.
    """

    def __init__(self, training: ImageSet, validation: ImageSet | None = None):
        self.training, self.real = training, validation if validation is not None and len(validation) else training
        self._real: dict[int, Closest] = {}

    def real_closest(self, count: int) -> Closest:
        """Of `count` held-out images, or other training images, at most as many as there are."""
        if count not in self._real:
            chosen = evenly(len(self.real), count)
            chunks = chosen.split(_at_once(math.prod(self.training.shape)))
            own = chosen if self.real is self.training else None
            self._real[count] = closest(lambda: (_fetch(self.real, part) for part in chunks), self.training, own)
        return self._real[count]


def memorization(samples: torch.Tensor, originals: Originals) -> tuple[dict, Image.Image]:
    """Returns figures (JSON) of samples uint8 [n, C, H, W], on the CPU, and a sheet of the closest pairs.

    Returns:
        images, training_images: how many were compared; compared_with: "held-out images" or "other training images".
        pixel_distance, pixel_distance_real: medians of the root mean square difference, in [-1, 1] units, at up to 16 x 16.
        pixel_ratio: the first over the second: below 1 the samples are nearer to the training images than real ones are.
        near_duplicates, near_duplicates_real: shares; mirrored ones count.
        copies, copies_real: shares that are nearer to a training image than half of pixel_distance_real. Samples get there
            long before they are near-duplicates.
    """
    training, count = originals.training, len(samples)
    found, real = closest(lambda: samples.split(_at_once(math.prod(training.shape))), training), originals.real_closest(count)
    typical, typical_real = found.pixels.median().item(), real.pixels.median().item()
    figures = {
        "images": count,
        "training_images": len(training),
        "compared_with": "other training images" if originals.real is training else "held-out images",
        "pixel_distance": typical,
        "pixel_distance_real": typical_real,
        "pixel_ratio": typical / max(typical_real, 1e-12),
        "near_duplicates": (found.relative < NEAR_COPY_DISTANCE).double().mean().item(),
        "near_duplicates_real": (real.relative < NEAR_COPY_DISTANCE).double().mean().item(),
        "copies": (found.pixels < typical_real / 2).double().mean().item(),
        "copies_real": (real.pixels < typical_real / 2).double().mean().item(),
    }
    shown = found.relative.argsort()[: min(SHEET_PAIRS, count)]
    pairs = samples[shown], _fetch(training, found.indices[shown])
    return figures, side_by_side(*pairs, ("samples", "nearest training images"), columns=6)


def _fetch(images: ImageSet, indices: torch.Tensor) -> torch.Tensor:
    return eight_bit(images.fetch(indices.numpy()), images.max_value)

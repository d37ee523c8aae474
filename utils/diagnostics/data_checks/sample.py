"""What the checks of the data look at, and what they give."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from utils.core.images import denoising_path, side_by_side
from utils.data.dataset import ImageSet

MAX_IMAGES, MAX_DECODED, MAX_BYTES = 4096, 512, 64 * 2**20
NEARLY_PLAIN = 3  # levels of 255: images of a smaller standard deviation show next to nothing
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601


@dataclass
class Seen:
    """A finding: its code in the catalog, a severity, the numbers that show it, and a picture of them."""

    code: str
    severity: str
    evidence: str
    picture: Image.Image | None = field(default=None, repr=False)


@dataclass
class Sample:
    """Images of a set as it is trained on; all of a small one, an even choice of a large one.

    Attributes:
        images: uint8 [N, H, W, C], C 1 or 3; the mean where there are other numbers of channels.
        held_out: uint8 [M, H, W, C] of the validation; M may be 0.
        labels: int64 [N], or None.
        sizes: height and width, int64 [K, 2], of some of the files before preparation, or None.
        random_flip: whether the training mirrors images; None where nobody has said.
    """

    images: np.ndarray
    held_out: np.ndarray
    labels: np.ndarray | None = None
    sizes: np.ndarray | None = None
    random_flip: bool | None = None

    @classmethod
    def of(cls, training: ImageSet, held_out: ImageSet | None = None, random_flip: bool | None = None) -> "Sample":
        """Raises UserError without a cache, naming an image that cannot be decoded, once there are more than may be."""
        chosen, sizes = _spread(training), None
        images = _fetched(training, chosen)
        if training.files is not None:
            sizes = training.original_sizes(chosen[:: max(1, len(chosen) // 256)])
        held = images[:0] if held_out is None or len(held_out) == 0 else _fetched(held_out, _spread(held_out)[:512])
        labels = None if training.labels is None else training.labels[training.shown(chosen)]
        return cls(images, held, labels, sizes, random_flip)

    @cached_property
    def gray(self) -> np.ndarray:
        """float32 [N, H, W] in [0, 255]."""
        return gray(self.images)

    @cached_property
    def plain(self) -> np.ndarray:
        """bool [N]: images of a single value, of which the check of the data tells."""
        flat = self.images.reshape(len(self.images), -1)
        return flat.min(1) == flat.max(1)

    def is_labeled(self, kept: np.ndarray, part: np.ndarray) -> bool:
        """Whether a part, bool [K], of the images `kept` is one of their classes or several, but for a tenth of it at most."""
        if self.labels is None:
            return False
        names, places, counts = np.unique(self.labels[kept], return_inverse=True, return_counts=True)
        whole = (np.bincount(places, part) > counts / 2) & (counts >= 8) & (names >= 0)  # of few images, half come by chance
        return bool((whole[places] != part).sum() <= 0.1 * part.sum())

    def shown(self, numbers: np.ndarray, caption: str) -> Image.Image:
        """Some of the images `numbers`, beside others of the set that are not plain."""
        others = np.setdiff1d(np.flatnonzero(~self.plain), numbers)
        chosen, rest = (part[:: max(1, len(part) // 16)][:16] for part in (numbers, others))
        if len(rest) == 0:
            return large(self.images[chosen[:4]], (caption,))
        return compared(self.images[chosen], self.images[rest], (caption, "others of the set"))


def gray(images: np.ndarray) -> np.ndarray:
    """float32 [N, H, W] of uint8 [N, H, W, C]."""
    return images[..., 0].astype(np.float32) if images.shape[-1] == 1 else images.astype(np.float32) @ _LUMA


def color_codes(images: np.ndarray) -> np.ndarray:
    """uint64 [N, H, W]: each color of uint8 [N, H, W, C] as one number."""
    return (images.astype(np.uint64) * np.array((1, 256, 65536), np.uint64)[: images.shape[-1]]).sum(-1, dtype=np.uint64)


def compared(left: np.ndarray, right: np.ndarray, captions: tuple[str, str]) -> Image.Image:
    """Images [N, H, W, C] of values in [0, 255] beside others, to be compared place by place."""
    return side_by_side(_pixels(left), _pixels(right), captions, columns=4)


def large(images: np.ndarray, captions: Sequence[str]) -> Image.Image:
    """A row of images [N, H, W, C] of values in [0, 255], about 200 pixels each, under one caption or one for each."""
    factor = max(1, round(200 / min(images.shape[1:3])))
    return denoising_path(_pixels(images.repeat(factor, 1).repeat(factor, 2), 200)[None], captions)


def _pixels(images: np.ndarray, most: int = 128) -> torch.Tensor:
    """uint8 [N, C, H, W], made smaller where a side is above `most`."""
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))).float()
    if (factor := most / max(pixels.shape[-2:])) < 0.8:
        pixels = interpolate(pixels, scale_factor=factor, mode="bilinear", antialias=True)
    return pixels.clamp(0, 255).round().to(torch.uint8)


def _spread(images: ImageSet) -> np.ndarray:
    """Indices of a choice that is spread over the set and does not step along with an order of its rows."""
    most = max(64, MAX_BYTES // int(np.prod(images.shape)))
    count = min(len(images), most, MAX_IMAGES if images.cached else MAX_DECODED)
    if count == len(images):
        return np.arange(count)
    if (nearby := images.nearby(count)) is not None:
        return nearby
    return np.sort(np.random.default_rng(0).permutation(len(images))[:count])


def _fetched(images: ImageSet, indices: np.ndarray) -> np.ndarray:
    parts = [images.fetch(indices[start : start + 256]) for start in range(0, len(indices), 256)]
    pixels = np.concatenate([part if images.max_value == 255 else (part >> 8).astype(np.uint8) for part in parts])
    if pixels.shape[1] not in (1, 3):
        pixels = np.rint(pixels.mean(1, keepdims=True)).astype(np.uint8)
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))

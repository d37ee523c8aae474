"""Images with known faults: what evaluation must notice. Used by the benchmarks and the tests."""

import hashlib
import math

import numpy as np
import torch
from torch.nn.functional import conv2d, pad

from utils.data.dataset import load_images
from utils.options.flags import DataOptions

COLORS = np.array([[220, 60, 50], [50, 170, 80], [60, 90, 220], [230, 190, 40]])


def shapes(count: int, seed: int, side: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Discs and squares in four colors on gray: uint8 [count, 3, side, side] and their class, int64 in [0, 8).

    Eight modes of equal weight; place, size, angle, shade and noise vary within each. Class = 2 x color + (1 if square).
    """
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:side, :side]
    labels = np.arange(count) % 8
    images = np.empty((count, 3, side, side), np.uint8)
    for i, label in enumerate(labels):
        x, y = random.uniform(side * 0.35, side * 0.65, 2)
        radius, angle = random.uniform(side / 6, side / 3.5), random.uniform(0, 6)
        dx, dy = columns - x, rows - y
        across = np.abs(dx * math.cos(angle) + dy * math.sin(angle))
        along = np.abs(dy * math.cos(angle) - dx * math.sin(angle))
        # A square of side 2 r / 1.13 has the area of a disc of radius r.
        distance = np.hypot(dx, dy) if label % 2 == 0 else np.maximum(across, along) * 1.13
        inside = np.clip(radius - distance + 0.5, 0, 1)
        color = COLORS[label // 2] + random.normal(0, 15, 3)
        image = random.uniform(20, 120) * (1 - inside) + color[:, None, None] * inside
        images[i] = np.clip(image + random.normal(0, 4, image.shape), 0, 255).round()
    return torch.from_numpy(images), torch.from_numpy(labels)


class ArrayImages:
    """Images in memory as an ImageSet shows them: uint8 [N, C, H, W] and labels int64 [N], both tensors."""

    max_value, cached, class_names = 255, True, None

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor):
        self.pixels, self.labels = pixels.numpy(), labels.numpy()
        self.shape = tuple(pixels.shape[1:])
        self.fingerprint = hashlib.sha256(self.pixels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.pixels)

    def fetch(self, indices, crop=None) -> np.ndarray:
        return self.pixels[indices]

    def subset(self, indices) -> "ArrayImages":
        return ArrayImages(torch.from_numpy(self.pixels[indices]), torch.from_numpy(self.labels[indices]))


def halves(images: torch.Tensor, labels: torch.Tensor, seed: int) -> tuple[ArrayImages, torch.Tensor, torch.Tensor]:
    """A half of them as reference set, chosen by the seed; images and labels of the other half."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    others, reference = order[: len(images) // 2], order[len(images) // 2 :]
    return ArrayImages(images[reference], labels[reference]), images[others], labels[others]


def digits(cache_dir: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The real ones at 16x16: uint8 [1797, 1, 16, 16] and their labels."""
    images = load_images(DataOptions(dataset_name="digits", resolution=16, image_channels=1, cache_dir=cache_dir))
    return torch.from_numpy(images.fetch(np.arange(len(images)))), torch.from_numpy(images.labels)


def _to_bytes(images: torch.Tensor) -> torch.Tensor:
    return images.round().clamp(0, 255).byte()


def blur(images: torch.Tensor, sigma: float) -> torch.Tensor:
    """Gaussian, of `sigma` pixels."""
    radius = math.ceil(3 * sigma)
    kernel = torch.exp(-torch.arange(-radius, radius + 1).float().square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).repeat(images.shape[1], 1, 1, 1)
    padded = pad(images.float(), (radius,) * 4, mode="replicate")
    return _to_bytes(conv2d(conv2d(padded, kernel, groups=images.shape[1]), kernel.mT, groups=images.shape[1]))


def add_noise(images: torch.Tensor, sigma: float, generator: torch.Generator) -> torch.Tensor:
    """Gaussian, of `sigma` in units of white."""
    return _to_bytes(images + 255 * sigma * torch.randn(images.shape, generator=generator))


def _refill(chosen: torch.Tensor, count: int) -> torch.Tensor:
    return chosen[torch.arange(count) % len(chosen)]


def without_classes(images, labels, count: int, fresh, fresh_labels) -> torch.Tensor:
    """As many images, none of the first `count` classes: others of `fresh` take the places of those."""
    kept = images[labels >= count]
    return torch.cat([kept, _refill(fresh[fresh_labels >= count], len(images) - len(kept))])


def duplicated(images: torch.Tensor, times: int, generator: torch.Generator) -> torch.Tensor:
    """As many images, of which one in `times` is different."""
    return _refill(images[torch.randperm(len(images), generator=generator)[: len(images) // times]], len(images))


def shrunken(images: torch.Tensor, labels: torch.Tensor, share: float) -> torch.Tensor:
    """Each image moved by `share` of the way to the mean image of its class."""
    means = torch.stack([images[labels == label].float().mean(0) for label in range(int(labels.max()) + 1)])[labels]
    return _to_bytes(images + share * (means - images))


def enlarged_class(images: torch.Tensor, labels: torch.Tensor, label: int, factor: float, generator) -> torch.Tensor:
    """As many images, `factor` times as many of class `label` as there were, and fewer of all others; none twice if it can
    be."""
    order = torch.randperm(len(images), generator=generator)
    images, labels = images[order], labels[order]
    wanted = min(len(images), round(factor * (labels == label).sum().item()))
    return torch.cat([_refill(images[labels == label], wanted), images[labels != label][: len(images) - wanted]])


def halved_variance(images: torch.Tensor) -> torch.Tensor:
    """Half the variance of every pixel around the mean image, which the samples of an unsure model tend to."""
    mean = images.float().mean(0)
    return _to_bytes(mean + (images - mean) / math.sqrt(2))

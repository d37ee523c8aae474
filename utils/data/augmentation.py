"""Integer images -> floats in [-1, 1], flipped and jittered on the device, each as a function of its sample number."""

import torch
from torch.nn.functional import adaptive_avg_pool2d

from utils.core import randomness

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in Pillow's "L"


def to_unit_range(images: torch.Tensor, max_value: int) -> torch.Tensor:
    """float32 in [-1, 1] of integer images of any shape: 0 -> -1 and `max_value` -> 1, both exactly."""
    return images.to(torch.float32).div_(max_value / 2).sub_(1)


def averaged_down(pixels: torch.Tensor, most: int) -> torch.Tensor:
    """Of floats [batch, channels, height, width] the same, but sides of more than `most` pixels are averaged down to it."""
    return adaptive_avg_pool2d(pixels, (min(pixels.shape[-2], most), min(pixels.shape[-1], most)))


def augment(
    images: torch.Tensor,
    sample_numbers: torch.Tensor,
    *,
    seed: int,
    max_value: int,
    random_flip: bool = False,
    color_jitter: float = 0.0,
) -> torch.Tensor:
    """float32 [batch, channels, height, width] in [-1, 1] of uint8 or uint16 images of that shape, on their device.

    Args:
        sample_numbers: int64 [batch]; with `seed`, all that the random choices depend on.
        max_value: the value of white, 255 or 65535.
        random_flip: mirror left to right with probability 1/2.
        color_jitter: strength s in [0, 1); brightness, contrast and saturation are scaled, in this order, by factors
            uniform in [1 - s, 1 + s], as torchvision's and Pillow's enhancers do, each clamped to the range of images. Alpha,
            the last of 2 or 4 channels, stays as it is.
    """
    pixels = to_unit_range(images, max_value)
    if random_flip:
        flipped = randomness.uniform(seed, "flip", sample_numbers.to(images.device))[:, 0] < 0.5
        pixels = torch.where(flipped[:, None, None, None], pixels.flip(-1), pixels)
    if color_jitter:
        uniforms = randomness.uniform(seed, "color_jitter", sample_numbers.to(images.device), 3)
        colors = pixels.shape[1] - (pixels.shape[1] in (2, 4))
        jittered = _jitter(pixels[:, :colors], 1 + color_jitter * (2 * uniforms - 1))
        pixels = torch.cat([jittered, pixels[:, colors:]], dim=1) if colors < pixels.shape[1] else jittered
    return pixels


def _jitter(pixels: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Scales the distance to an anchor by factors [batch, 3]: to black, to the mean gray, to each pixel's own gray."""
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind(1)
    pixels = ((pixels + 1) * brightness - 1).clamp_(-1, 1)
    mean = _gray(pixels).mean(dim=(2, 3), keepdim=True)
    pixels = (mean + (pixels - mean) * contrast).clamp_(-1, 1)
    gray = _gray(pixels)
    return (gray + (pixels - gray) * saturation).clamp_(-1, 1)


def _gray(pixels: torch.Tensor) -> torch.Tensor:
    """[batch, 1, height, width]"""
    if pixels.shape[1] == 1:
        return pixels
    red, green, blue = pixels.split(1, dim=1)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue

"""Integer images -> floats in [-1, 1], flipped and jittered on the device, each as a function of its sample number.

Beside them the geometric transforms of Karras et al. 2022 (appendix F.2), of which the network is told: nine numbers of each
image, all of them 0 for an image as it is. So the network learns from turned images, too, and makes none when told zeros.
"""

import math

import torch
from torch.nn.functional import adaptive_avg_pool2d, grid_sample

from utils.core import randomness

TRANSFORM_NUMBERS = 9
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in Pillow's "L"
_LOG_SCALE, _SHIFT = 0.2 * math.log(2), 1 / 8  # standard deviations, of the logarithm of sizes and in image sides


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
            uniform in [1 - s, 1 + s], as torchvision's and Pillow's enhancers do, each clamped to the range of images. Of 1 or
            3 channels.
    """
    pixels = to_unit_range(images, max_value)
    if random_flip:
        flipped = randomness.uniform(seed, "flip", sample_numbers.to(images.device))[:, 0] < 0.5
        pixels = torch.where(flipped[:, None, None, None], pixels.flip(-1), pixels)
    if color_jitter:
        uniforms = randomness.uniform(seed, "color_jitter", sample_numbers.to(images.device), 3)
        pixels = _jitter(pixels, 1 + color_jitter * (2 * uniforms - 1))
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


def draw_transforms(seed: int, sample_numbers: torch.Tensor, probability: float) -> torch.Tensor:
    """Nine numbers of each sample, float32 [batch, 9], on the device of `sample_numbers` int64 [batch]:

    0 mirrored left to right (1 or 0), half of all samples; 1 upside down (1 or 0), half of those drawn;
    2 logarithm of the size; 3, 4 cosine - 1 and sine of the rotation, by any angle;
    5, 6 logarithm of the stretch x cosine and sine of twice its axis's angle, one pair for one stretch; 7, 8 shift to the right
    and down.

    Logarithms and shifts are standard normal, and x stands for 2^(0.2 x) and x / 8 image sides. Each transform but the first is
    drawn with `probability`, and what is not drawn is 0.
    """
    uniforms = randomness.uniform(seed, "transforms", sample_numbers, 9)
    drawn = (uniforms[:, :5] < probability).float()
    mirrored, upside_down = (uniforms[:, 5:7] < 0.5).float().unbind(1)
    rotation, axis = (math.pi * (2 * uniforms[:, 7:] - 1)).unbind(1)
    size, stretch, *shift = randomness.normal(seed, "sizes of transforms", sample_numbers, (4,)).unbind(1)
    flipped, sized, turned, stretched, shifted = drawn.unbind(1)
    rotation, stretch = rotation * turned, stretch * stretched
    turns = [rotation.cos() - 1, rotation.sin(), stretch * (2 * axis).cos(), stretch * (2 * axis).sin()]
    return torch.stack([mirrored, upside_down * flipped, size * sized, *turns, *(part * shifted for part in shift)], dim=1)


def transformed(pixels: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Images [batch, channels, height, width] that are transformed as the `numbers` of `draw_transforms` say: mirrored, scaled,
    rotated, stretched and shifted about the center, in this order.

    All in one bilinear resampling, where the image goes on beyond its edges as in a mirror. An image whose numbers are 0 keeps
    its bits. Written out for a 2x2 matrix, as a product of matrices on a GPU may be rounded to 10 bits (TF32).
    """
    height, width = pixels.shape[-2:]
    mirrored, upside_down, size, cosine, sine, along, across, right, down = numbers[:, :, None, None].unbind(1)
    x = torch.arange(width, device=pixels.device) - (width - 1) / 2 - right * _SHIFT * width
    y = (torch.arange(height, device=pixels.device) - (height - 1) / 2)[:, None] - down * _SHIFT * height
    # Back from each new pixel to where it comes from: the stretch's inverse is cosh(s) 1 - sinh(s) (reflection at its axis).
    stretch = torch.hypot(along, across).clamp(min=1e-6)
    grown = (stretch * _LOG_SCALE).exp()  # unlike cosh and sinh, it has the same bits in batches of all sizes
    even, odd = (grown + 1 / grown) / 2, (grown - 1 / grown) / 2 / stretch
    x, y = (even - odd * along) * x - odd * across * y, (even + odd * along) * y - odd * across * x
    x, y = (1 + cosine) * x + sine * y, (1 + cosine) * y - sine * x
    scale = (-_LOG_SCALE * size).exp()
    x, y = (1 - 2 * mirrored) * scale * x, (1 - 2 * upside_down) * scale * y
    grid = torch.stack([x * (2 / width), y * (2 / height)], dim=-1)
    resampled = grid_sample(pixels, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return torch.where(numbers.any(dim=1)[:, None, None, None], resampled, pixels)

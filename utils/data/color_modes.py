"""Images of every Pillow mode as 1 or 3 channels, without saturation and without hidden colors.

| mode | becomes |
|---|---|
| `1` | 0 or 255 |
| `L`, `RGB` | itself |
| `LA`, `La`, `PA`, `RGBA`, `RGBa`; `P`, `L`, `RGB` with a transparent color | composited on the background |
| `P`, `CMYK`, `YCbCr`, `HSV`, `LAB`, `RGBX` | RGB by Pillow |
| `I;16`, `I;16L`, `I;16B`, `I;16N`; `I` holding 0..65535 | v / 257 rounded, or v itself with `max_value` 65535 |
| `F`, which must hold values in [0, 1] | v * `max_value` rounded |

8-bit values become 16-bit ones by v * 257 (255 -> 65535). Three channels become one by Pillow's ITU-R 601 luma,
(19595 R + 38470 G + 7471 B + 32768) >> 16; one becomes three by repetition. Pillow itself reads 16-bit *color* PNG and
TIFF as 8 bits (the high byte), and that is what arrives here.
"""

import functools
from typing import Any

import numpy as np
from PIL import Image, ImageColor


@functools.cache
def background_color(background: str) -> tuple[int, int, int]:
    """RGB of a Pillow color ("white", "#808080", "rgb(0,0,0)", ...).

    Raises:
        ValueError: unknown color, or one with an alpha channel.
    """
    color = ImageColor.getrgb(background)
    if len(color) != 3:
        raise ValueError(f"background {background!r} is itself transparent; use an opaque color such as 'white'")
    return color


def is_deep(image: Image.Image) -> bool:
    """Returns whether the image holds more than 8 bits per channel."""
    return image.mode == "F" or image.mode.startswith("I")


def to_planes(image: Image.Image, channels: int, background: tuple[int, int, int], max_value: int) -> list[Image.Image]:
    """Turns the image into planes that Pillow can resize; `stack_planes` makes an array of them.

    Args:
        image: any Pillow image; of several frames, the current one.
        channels: 1 or 3.
        background: RGB in 0..255 that shows through transparent pixels.
        max_value: 255 or 65535, the value of white.

    Returns:
        One 8-bit `L` or `RGB` image for `max_value` 255, else `F` images in 0..65535, one per channel. A gray image stays one
        plane, whatever `channels` is.

    Raises:
        ValueError: values outside the range that the mode allows, or a mode that Pillow cannot convert.
    """
    if is_deep(image):
        return _deep_planes(image, channels, background, max_value)
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        canvas = Image.new("RGB", image.size, background)
        canvas.paste(image, mask=image)
        image = canvas
    if image.mode in ("1", "L"):
        image = image.convert("L")
    else:
        image = image.convert("RGB")
        if channels == 1:
            image = image.convert("L")
    if max_value == 255:
        return [image]
    return [Image.fromarray(np.asarray(band, dtype=np.float32) * 257) for band in image.split()]


def _deep_planes(image: Image.Image, channels: int, background: tuple[int, int, int], max_value: int) -> list[Image.Image]:
    values = np.asarray(image)
    low, high = values.min(), values.max()
    limit = 1 if image.mode == "F" else 65535
    if not (low >= 0 and high <= limit):  # written so that NaN fails too
        kind = "floats must lie in [0, 1]" if image.mode == "F" else "integers must lie in [0, 65535]"
        raise ValueError(f"values of mode {image.mode} range from {low} to {high}; {kind}, rescale the images")
    white = values.astype(np.float64) * (max_value / limit)
    planes = [np.rint(white)]
    transparent = image.info.get("transparency")  # PNG: the one gray value that is see-through
    if transparent is not None:
        gray: Any = Image.new("RGB", (1, 1), background).convert("L").getpixel((0, 0))
        colors = background if channels == 3 else [gray]
        planes = [np.where(values == transparent, color * (max_value / 255), planes[0]) for color in colors]
    if max_value == 65535:
        return [Image.fromarray(plane.astype(np.float32)) for plane in planes]
    bands = [Image.fromarray(plane.astype(np.uint8)) for plane in planes]
    return bands if len(bands) == 1 else [Image.merge("RGB", bands)]


def stack_planes(planes: list[Image.Image], channels: int, max_value: int) -> np.ndarray:
    """uint8 (`max_value` 255) or uint16 [channels, height, width] of what `to_planes` gave, resized or not."""
    if max_value == 255:
        pixels = np.asarray(planes[0])
        pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    else:
        # Bilinear resizing stays within the range of its inputs up to float rounding, which the clip removes.
        pixels = np.rint(np.stack([np.asarray(plane) for plane in planes])).clip(0, max_value).astype(np.uint16)
    return np.ascontiguousarray(pixels) if len(pixels) == channels else np.repeat(pixels, channels, axis=0)

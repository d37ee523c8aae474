"""An image file as the network is declared to see it. Pillow and numpy alone: shares no code with any trainer's decoding."""

import io
import os
from fractions import Fraction
from typing import Any

import fsspec
import numpy as np
from PIL import Image, ImageColor, ImageOps

from steady_doctor.data.declared import DeclaredImages

EXACT = 1e-5  # what float32 rounds off a value in [-1, 1], a few times over
LEVEL = 2 / 255  # one level of 8 bits
_LOSSLESS = ("PNG", "BMP", "GIF", "PPM")


def decoded(file: Any, declared: DeclaredImages) -> tuple[np.ndarray, float]:
    """(float64 [channels, height, width] in [-1, 1], by how much another decoder may differ).

    The planes are resized to cover the declared sides; only a declared center crop is cut.

    Args:
        file: bytes, a path, an object with `data` and `path`, or an array [H, W, C] or [H, W].

    Raises what Pillow raises, and ValueError for values that are not finite.
    """
    if isinstance(file, np.ndarray):
        bands, tolerance = _of_array(file.reshape(*file.shape[:2], -1), declared), LEVEL
    else:
        image = _opened(file)
        bands, tolerance = _of_image(image, declared), _tolerance(image, declared)
    white = declared.max_value
    planes = np.stack([np.asarray(part, np.float64) for band in bands for part in _covering(band, declared.sides).split()])
    planes = np.rint(planes).clip(0, white) * (2 / white) - 1
    planes = np.broadcast_to(planes, (declared.channels, *planes.shape[1:]))
    if declared.center_crop:
        room = max(whole - part for whole, part in zip(planes.shape[1:], declared.sides))
        planes = cut(planes, round(room / 2), declared.sides)
    return planes, tolerance


def cut(planes: np.ndarray, at: int, sides: tuple[int, ...]) -> np.ndarray:
    """The part of planes that begins at this row or column, whichever there is room for."""
    top, left = (at if whole > part else 0 for whole, part in zip(planes.shape[1:], sides))
    return planes[:, top : top + sides[0], left : left + sides[1]]


def decoded_or_none(file: Any, declared: DeclaredImages) -> tuple[np.ndarray, float] | None:
    """As `decoded`; None of a damaged file."""
    try:
        return decoded(file, declared)
    except Exception:  # Pillow's plugins raise OSError, SyntaxError, struct.error, ...
        return None


def _opened(file: Any) -> Image.Image:
    if not isinstance(file, (bytes, str, os.PathLike)):
        file = file.path if file.data is None else file.data
    if not isinstance(file, bytes):
        with fsspec.open(str(file)) as opened:  # in an archive, too
            file = opened.read()
    Image.init()
    formats = [name for name in Image.ID if name != "EPS"]  # EPS is a program that Ghostscript would run
    image = Image.open(io.BytesIO(file), formats=formats)
    image.load()
    return image


def _tolerance(image: Image.Image, declared: DeclaredImages) -> float:
    """A cache may be older than this Pillow, whose resizing rounds otherwise, as do the decoders of JPEG and its like."""
    room = image.height - declared.sides[0], image.width - declared.sides[1]
    return (EXACT if min(room) == 0 else LEVEL) if image.format in _LOSSLESS else 2 * LEVEL


def _covering(band: Image.Image, sides: tuple[int, int]) -> Image.Image:
    """The smallest image of these proportions that covers `sides`."""
    scale = max(Fraction(sides[0], band.height), Fraction(sides[1], band.width))
    return band.resize((int(scale * band.width), int(scale * band.height)), Image.Resampling.BILINEAR)


def _background(declared: DeclaredImages) -> tuple[int, ...]:
    """Its levels of 8 bits, one for each color."""
    color = ImageColor.getrgb(declared.background)
    gray = np.asarray(Image.new("RGB", (1, 1), color).convert("L"))
    return color if declared.channels > 2 else (int(gray[0, 0]),)


def _of_array(values: np.ndarray, declared: DeclaredImages) -> list[Image.Image]:
    if not np.isfinite(values).all():
        raise ValueError("values that are not finite")
    black, white = declared.data_range or (0, {"uint8": 255, "uint16": 65535}.get(str(values.dtype), 1))
    share = (values.astype(np.float64) - black) / (white - black)
    return [Image.fromarray(band.astype(np.float32)) for band in np.moveaxis(declared.max_value * share, -1, 0)]


def _of_image(image: Image.Image, declared: DeclaredImages) -> list[Image.Image]:
    """One image, or one for each channel, upright and before its background."""
    image = ImageOps.exif_transpose(image)
    if image.mode[0] in "FI":  # of 32 or 16 bits
        white = 1 if image.mode == "F" else 65535
        values = np.asarray(image, np.float64)
        bands = [np.rint(values.clip(0, white) * (declared.max_value / white))]
        if (hole := image.info.get("transparency")) is not None:
            bands = [np.where(values == hole, level * declared.max_value / 255, bands[0]) for level in _background(declared)]
        return [Image.fromarray(band.astype(np.uint8 if declared.max_value == 255 else np.float32)) for band in bands]
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        image, behind = image.convert("RGBA"), Image.new("RGB", image.size, ImageColor.getrgb(declared.background))
        behind.paste(image, mask=image)
        image = behind
    image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    if declared.channels == 1:
        image = image.convert("L")
    if declared.max_value == 255:
        return list(image.split())
    return [Image.fromarray(np.asarray(band, np.float32) * (declared.max_value / 255)) for band in image.split()]

"""Whole readings of an image file that fit a misread image to rounding or do not: names, and what the network then sees."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from utils.diagnostics.audit.files import LUMA, DeclaredImages, DecodedFile, Sides, covering

Change = Callable[[np.ndarray], np.ndarray]  # of planes [C, ...] from -1 to 1
_FILTERS = Image.Resampling


def _without_antialias(band: Image.Image, sides: Sides) -> Image.Image:
    size = covering(band, sides).size
    scale = [before / after for before, after in zip(band.size, size)]
    return band.transform(size, Image.Transform.AFFINE, (scale[0], 0, 0, 0, scale[1], 0), _FILTERS.BILINEAR)


def _by_filter(how: Image.Resampling) -> dict[str, Any]:
    return {"resize": lambda band, sides: covering(band, sides, how)}


def _by_way_of(share: int, how: Image.Resampling) -> dict[str, Any]:
    def resize(band: Image.Image, sides: Sides) -> Image.Image:
        small = covering(band, (max(1, sides[0] // share), max(1, sides[1] // share)))
        return small.resize(covering(band, sides).size, how)

    return {"resize": resize}


# What the network sees: how `DecodedFile.planes` reads the file like that.
_READINGS: dict[str, dict[str, Any]] = {
    "images as they are stored, not turned upright as their EXIF orientation asks": {"upright": False},
    "the colors that are hidden under transparent pixels": {"background": None},
    **{f"transparent images on {color}": {"background": color} for color in ("black", "white", "gray")},
    "16-bit images cut off at the value 255": {"cut_off": True},
    **{f"{mode} values instead of RGB": {"mode": mode} for mode in ("HSV", "YCbCr")},
    "images cut elsewhere than at the center": {"center_crop": False},
    **{f"images resized by the filter {how.name.lower()}": _by_filter(how) for how in _FILTERS if how != _FILTERS.BILINEAR},
    "images resized without antialiasing": {"resize": _without_antialias},
    **{f"images resized to 1/{n} of the resolution and enlarged again": _by_way_of(n, _FILTERS.BILINEAR) for n in (2, 4)},
    **{f"images made of blocks of {n} x {n} pixels": _by_way_of(n, _FILTERS.NEAREST) for n in (2, 4)},
    "images squeezed to the size, not cut": {"resize": lambda band, sides: band.resize(sides[::-1], _FILTERS.BILINEAR)},
    "images with a border that brings them to the size": {"resize": lambda band, sides: ImageOps.pad(band, sides[::-1], 2)},
    "pieces of images that were not resized": {"resize": lambda band, sides: band, "center_crop": False},
}
_TURNS: dict[str, Change] = {
    "mirrored images, though no flip is declared": lambda x: x[..., ::-1],
    "images upside down": lambda x: x[:, ::-1],
    "images turned by 180 degrees": lambda x: x[:, ::-1, ::-1],
    "images turned by 90 degrees to the left": lambda x: np.rot90(x, 1, (1, 2)),
    "images turned by 90 degrees to the right": lambda x: np.rot90(x, -1, (1, 2)),
    "images with rows and columns exchanged": lambda x: x.transpose(0, 2, 1),
    "images whose colors and places are mixed up (reshaped where axes should be permuted)": lambda x: np.ascontiguousarray(
        x.transpose(1, 2, 0)
    ).reshape(x.shape),
}
_STATISTICS = {
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CLIP": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "CIFAR-10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR-10 (0.2023)": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "MNIST": ((0.1307,), (0.3081,)),
}


def _standardized(*statistics: tuple[float, ...]) -> Change:
    mean, deviation = (np.array(part)[:, None] for part in statistics)
    return lambda x: (((x.reshape(len(x), -1) + 1) / 2 - mean) / deviation).reshape(x.shape)


def _mixed(*rows: npt.ArrayLike) -> Change:
    return lambda x: np.tensordot(np.array(rows, np.float64), x, 1)


def _filled(x: np.ndarray, place: int, value: float) -> np.ndarray:
    x = x.copy()
    x[place] = value
    return x


# Functions of one pixel's colors in [-1, 1].
_COLORS: dict[str, Change] = {
    "values in [0, 1], not in [-1, 1]": lambda x: (x + 1) / 2,
    "values in [0, 255], not in [-1, 1]": lambda x: (x + 1) * 127.5,
    "values in [0, 65535], not in [-1, 1]": lambda x: (x + 1) * 32767.5,
    "values in [-0.5, 0.5], not in [-1, 1]": lambda x: x / 2,
    "values that are scaled twice (to [-1, 1] as if they were still in [0, 255])": lambda x: x / 127.5 - 1,
    "values that are scaled twice (to [-1, 1] as if they were still in [0, 1])": lambda x: 2 * x - 1,
    "values that are divided by 255 twice": lambda x: (x + 1) / 510,
    "values that are divided by 255 twice, then shifted to -1": lambda x: (x + 1) / 255 - 1,
    "values that are divided by 255 once more": lambda x: x / 255,
    "values in [0, 255] that are taken for [0, 1]": lambda x: (x + 1) * 255 - 1,
    "values that are divided by 128, not by 127.5": lambda x: (x + 1) * (127.5 / 128) - 1,
    "16-bit values that are scaled as if they had 8 bits": lambda x: (x + 1) * 257 - 1,
    "8-bit values that are scaled as if they had 16 bits": lambda x: (x + 1) / 257 - 1,
    "inverted colors (negatives)": lambda x: -x,
    "values cut off below 0": lambda x: x.clip(0),
    "values rounded to whole numbers": np.rint,
    "values cut down to whole numbers": np.trunc,
    "black and white (values rounded in [0, 1])": lambda x: 2 * np.rint((x + 1) / 2) - 1,
}
_RGB: dict[str, Change] = {
    "red and blue exchanged (BGR)": _mixed((0, 0, 1), (0, 1, 0), (1, 0, 0)),
    "red and green exchanged": _mixed((0, 1, 0), (1, 0, 0), (0, 0, 1)),
    "green and blue exchanged": _mixed((1, 0, 0), (0, 0, 1), (0, 1, 0)),
    "channels in the order green, blue, red": _mixed((0, 1, 0), (0, 0, 1), (1, 0, 0)),
    "channels in the order blue, red, green": _mixed((0, 0, 1), (1, 0, 0), (0, 1, 0)),
    "gray images instead of colors": _mixed(LUMA, LUMA, LUMA),
    "gray images (mean of the channels) instead of colors": _mixed(*[(1 / 3, 1 / 3, 1 / 3)] * 3),
}
for _place, _name in enumerate(("red", "green", "blue")):
    _only = np.arange(3) == _place
    _RGB[f"the {_name} channel three times"] = _mixed(_only, _only, _only)
    _RGB[f"images whose {_name} channel is all black"] = partial(_filled, place=_place, value=-1.0)
    _RGB[f"images whose {_name} channel is all 0"] = partial(_filled, place=_place, value=0.0)


def alternatives(
    file: DecodedFile, planes: np.ndarray, declared: DeclaredImages
) -> Iterator[tuple[str, np.ndarray, Change | None]]:
    """(what the network sees, planes, change of colors after the jitter); `planes` are those that the file should give."""
    for name, reading in _READINGS.items():
        try:
            other = file.planes(**reading)
        except Exception:  # such as colors that Pillow cannot turn into a mode
            continue
        yield name, other, None
    for name, turn in _TURNS.items():
        yield name, turn(planes), None
    colors = _COLORS | (_RGB if declared.channels == 3 else {})
    colors |= {
        f"values scaled by the mean and the deviation of {name}": _standardized(*known)
        for name, known in _STATISTICS.items()
        if len(known[0]) == declared.channels
    }
    for name, change in colors.items():
        yield name, planes, change
        if declared.color_jitter:
            yield name, change(planes), None

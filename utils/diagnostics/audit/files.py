"""An image file as the network is declared to see it, and where in it a shown image lies: the judge of stage "data".

Shares no code with the training's own decoding, cropping and augmentation: Pillow and numpy alone. Images are float arrays
[channels, height, width] in [-1, 1].
"""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageOps

EXACT = 1e-5  # what float32 rounds off a value in [-1, 1], a few times over
LEVEL = 2 / 255  # one level of 8 bits
LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
JITTER_TOLERANCE = 4 * LEVEL  # clamps make the fit of the three factors stop short of the best ones, once in a thousand images
_LOSSLESS = ("PNG", "BMP", "GIF", "PPM")
_LINES = 128  # of a large image, by which its place is looked for
_LARGEST = 30  # times what is shown: larger files are not searched for a piece that was not resized
_PLACES = 24  # where a jittered image is looked for, of each order
_THOROUGH = 6  # of them, where its factors are looked for everywhere
_BILINEAR = Image.Resampling.BILINEAR


Sides = tuple[int, int]  # height and width


def sides_of(resolution: int | str) -> Sides:
    """What `--resolution` asks for: 64 for both sides, or 64x96 for a height of 64 and a width of 96."""
    height, _, width = str(resolution).partition("x")
    return int(height), int(width or height)


@dataclass(frozen=True)
class DeclaredImages:
    """What the options say that is done with each file; the names are those of the flags."""

    resolution: int | str
    channels: int
    center_crop: bool
    random_flip: bool
    color_jitter: float
    background: str
    max_value: int  # of white: 255, or 65535 where 16 bits are kept
    data_range: Sequence[float] | None = None  # of arrays: the values of black and white, where they were given

    @property
    def sides(self) -> Sides:
        return sides_of(self.resolution)


@dataclass(frozen=True)
class Match:
    """Where in the planes of a file a shown image fits best."""

    error: float  # root mean square difference
    mirrored: bool = False
    top: int = 0
    left: int = 0
    window: np.ndarray | None = None  # the part of the planes that is shown, neither mirrored nor jittered
    jittered: bool = False


def covering(band: Image.Image, sides: Sides, how=_BILINEAR) -> Image.Image:
    """The smallest image of these proportions that covers `sides`."""
    scale = max(Fraction(sides[0], band.height), Fraction(sides[1], band.width))
    return band.resize((int(scale * band.width), int(scale * band.height)), how)


class DecodedFile:
    """A file, given as bytes, a path, or an object with `data` and `path`; or an array [H, W, C] or [H, W]. Raises what Pillow
    raises, and ValueError for values that are not finite."""

    def __init__(self, file, declared: DeclaredImages):
        self.declared, self.array = declared, None
        if isinstance(file, np.ndarray):
            self.array, self.tolerance = file.reshape(*file.shape[:2], -1), LEVEL
            if not np.isfinite(self.array).all():
                raise ValueError("values that are not finite")
            return
        if not isinstance(file, (bytes, str, os.PathLike)):
            file = file.path if file.data is None else file.data
        Image.init()
        formats = [name for name in Image.ID if name != "EPS"]  # EPS is a program that Ghostscript would run
        content = file if isinstance(file, bytes) else Path(file).read_bytes()
        self.image = Image.open(io.BytesIO(content), formats=formats)
        self.image.load()
        stored = (self.image.height, self.image.width)
        is_tight = stored[0] == declared.sides[0] or stored[1] == declared.sides[1]
        covers = stored[0] >= declared.sides[0] and stored[1] >= declared.sides[1]
        unchanged = self.image.format in _LOSSLESS and is_tight and covers
        # A cache may be older than this Pillow, whose resizing rounds otherwise, as do the decoders of JPEG and its like.
        self.tolerance = EXACT if unchanged else LEVEL if self.image.format in _LOSSLESS else 2 * LEVEL

    def planes(self, resize=covering, center_crop: bool | None = None, **reading) -> np.ndarray:
        """What may be shown, cut at the center where that is declared; `reading` as in `_bands`."""
        declared, white = self.declared, self.declared.max_value
        bands = [part for band in self._bands(**reading) for part in resize(band, declared.sides).split()]
        planes = np.stack([np.asarray(band, np.float64) for band in bands])
        if self._has_alpha and self.array is None:
            unseen = ImageColor.getrgb(declared.background)
            unseen = unseen if declared.channels == 4 else Image.new("RGB", (1, 1), unseen).convert("L").getpixel((0, 0))
            planes[:-1, planes[-1] == 0] = np.reshape(unseen, (-1, 1))
        planes = np.rint(planes).clip(0, white) * (2 / white) - 1
        planes = np.broadcast_to(planes, (declared.channels, *planes.shape[1:]))
        if declared.center_crop if center_crop is None else center_crop:
            room = [max(0, whole - part) for whole, part in zip(planes.shape[1:], declared.sides)]
            planes = cut(planes, round(room[0] / 2), round(room[1] / 2), declared.sides)
        return planes

    @property
    def _has_alpha(self) -> bool:
        return self.declared.channels in (2, 4)

    def _bands(self, upright=True, background: str | None = "declared", cut_off=False, mode="RGB") -> list[Image.Image]:
        """One band or one for each channel, before they are resized. Other arguments than the defaults read it wrongly."""
        declared = self.declared
        if self.array is not None:
            black, white = declared.data_range or (0, {"uint8": 255, "uint16": 65535}.get(str(self.array.dtype), 1))
            share = (self.array.astype(np.float64) - black) / (white - black)
            return [Image.fromarray(band.astype(np.float32)) for band in np.moveaxis(declared.max_value * share, -1, 0)]
        image = self.image
        if upright:
            image = ImageOps.exif_transpose(image)
        if self._has_alpha:  # as one image, whose colors are resized by their share of the alpha
            return [_with_alpha(image).convert("RGBA" if declared.channels == 4 else "LA")]
        color = ImageColor.getrgb(declared.background if background == "declared" else background or "white")
        gray: Any = Image.new("RGB", (1, 1), color).convert("L").getpixel((0, 0))
        if image.mode == "F" or image.mode.startswith("I"):
            values = np.asarray(image, np.float64)
            white = 1 if image.mode == "F" else 255 if cut_off else 65535
            bands = [np.rint(values.clip(0, white) * (declared.max_value / white))]
            if (hole := image.info.get("transparency")) is not None and background is not None:
                colors = color if declared.channels == 3 else [gray]
                bands = [np.where(values == hole, level * declared.max_value / 255, bands[0]) for level in colors]
            return [Image.fromarray(band.astype(np.uint8 if declared.max_value == 255 else np.float32)) for band in bands]
        if image.mode == "La":
            image = image.convert("LA")
        if image.has_transparency_data and background is not None:
            image, behind = image.convert("RGBA"), Image.new("RGB", image.size, color)
            behind.paste(image, mask=image)
            image = behind
        image = image.convert("L" if image.mode in ("1", "L", "LA") else mode)
        if declared.channels == 1:
            image = image.convert("L")
        if declared.max_value == 255:
            return list(image.split())
        return [Image.fromarray(np.asarray(band, np.float32) * (declared.max_value / 255)) for band in image.split()]


def _with_alpha(image: Image.Image) -> Image.Image:
    if image.mode != "F" and not image.mode.startswith("I"):
        straight = {"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode)
        image = image.convert(straight)
        return (image if image.has_transparency_data else image.convert("RGB")).convert("RGBA")
    values = np.asarray(image, np.float64)
    gray = np.rint(values.clip(0, None) * (255 if image.mode == "F" else 255 / 65535)).clip(0, 255)
    seen = values != image.info.get("transparency", np.nan)
    layers = [gray, gray, gray, 255 * seen]
    return Image.fromarray(np.stack(layers, axis=-1).astype(np.uint8))


def compare(image: np.ndarray, planes: np.ndarray, lines: tuple[int, int] = (1, 1)) -> tuple[np.ndarray, np.ndarray]:
    """Mean squared difference and correlation of an image with each place of larger planes, [places down, places right].
    `lines`: by every how many rows and columns, see `few_lines`."""
    image, planes = (part[:, :: lines[0], :: lines[1]] for part in (image, planes))
    weights = np.arange(len(image), 0, -1.0)  # unequal: exchanged channels differ
    weights = np.array([0.5, 0.3, 0.2]) if len(image) == 3 else weights / weights.sum()
    y, p = (np.tensordot(weights, part, 1).astype(np.float64) for part in (image, planes))
    center = p.mean()
    y, p = y - center, p - center
    if y.shape == p.shape:
        product, total, squares = ((part.sum(),) for part in (y * p, p, p * p))
        product, total, squares = (np.reshape(part, (1, 1)) for part in (product, total, squares))
    else:
        valid = tuple(slice(0, whole - part + 1) for whole, part in zip(p.shape, y.shape))

        def slide(kernel, over):
            transformed = np.fft.rfft2(over) * np.conj(np.fft.rfft2(kernel, over.shape))
            return np.fft.irfft2(transformed, over.shape)[valid]

        ones = np.ones_like(y)
        product, total, squares = slide(y, p), slide(ones, p), slide(ones, p * p)
    difference = np.maximum(squares + (y * y).sum() - 2 * product, 0) / y.size
    spread = y.std() * np.sqrt(np.maximum(squares / y.size - (total / y.size) ** 2, 0))
    covariance = product / y.size - total / y.size * y.mean()
    return difference, np.divide(covariance, spread, out=np.zeros_like(spread), where=spread > 1e-7)


def cut(planes: np.ndarray, top: int, left: int, sides: Sides) -> np.ndarray:
    return planes[:, top : top + sides[0], left : left + sides[1]]


def find(shown: np.ndarray, planes: np.ndarray, declared: DeclaredImages, after=None, thorough: bool = True) -> Match:
    """The crop, mirror and jitter, of those that are declared, that make `planes` the image shown.

    Args:
        after: a change of colors that comes after the jitter.
        thorough: look for the factors of the jitter from many starts.
    """
    room = [whole - part for whole, part in zip(planes.shape[1:], shown.shape[1:])]
    too_large = min(room) > 0 and planes.size > _LARGEST * shown.size
    if min(room) < 0 or len(planes) != len(shown) or too_large:
        return Match(np.inf)
    matches = []
    for lines in dict.fromkeys((few_lines(planes, shown.shape[1:]), (1, 1))):
        matches.append(_find(shown, planes, declared, after, thorough, lines))
        if matches[-1].error <= (LEVEL / 8 if declared.color_jitter else EXACT):
            break
    return min(matches, key=lambda match: match.error)


def few_lines(planes: np.ndarray, sides: tuple[int, ...]) -> tuple[int, int]:
    """Every how many rows and columns tell where an image lies: all of them, but in large images that fit in one direction
    and have room in the other, where `_LINES` lines along the room do."""
    (height, width), (of_height, of_width) = planes.shape[1:], sides
    return (
        max(1, of_height // _LINES) if height == of_height and width > of_width else 1,
        max(1, of_width // _LINES) if width == of_width and height > of_height else 1,
    )


def _find(shown, planes, declared: DeclaredImages, after, thorough: bool, lines: tuple[int, int]) -> Match:
    """As `find`; `lines` are those of `few_lines` by which places are compared before an image is compared as a whole."""
    sides, change = shown.shape[1:], after or (lambda pixels: pixels)
    likely = []  # of each order the best places: mirrored, top, left
    for mirrored in (False, True)[: 1 + declared.random_flip]:
        difference, correlation = compare(_turned(shown, mirrored), change(planes), lines)
        for order, score in enumerate((difference, -correlation)):
            best = np.argsort(score, axis=None, kind="stable")[: _PLACES if declared.color_jitter and thorough else 2]
            likely += [(order, score.flat[place], mirrored, *divmod(int(place), score.shape[1])) for place in best]
    likely.sort()
    matches = []
    for order, _, mirrored, top, left in likely:
        if order == 0:
            window = cut(planes, top, left, sides)
            matches.append(Match(_rms(_turned(shown, mirrored) - change(window)), mirrored, top, left, window))
    best = min(matches, key=lambda match: match.error)
    if best.error <= EXACT or not declared.color_jitter:
        return best
    places = [place for place in likely if thorough or (place[0] and place[1] < -0.5)]
    tried, places = [], sorted(places, key=lambda place: (-place[0], place[1]))[: None if thorough else 2]
    for mirrored, top, left in dict.fromkeys(place[2:] for place in places):
        match = _with_jitter(shown, Match(np.inf, mirrored, top, left, cut(planes, top, left, sides), True), declared, change)
        if match.error < LEVEL / 8:
            return match
        tried.append(match)
    tried.sort(key=lambda match: match.error)
    if thorough:  # most images do not come to this: their factors follow from the pixels that are not clamped
        tried += [_with_jitter(shown, match, declared, change, thorough=True) for match in tried[:_THOROUGH]]
    return min([best, *tried], key=lambda match: match.error)


def _with_jitter(shown, match: Match, declared, change, thorough: bool = False) -> Match:
    error = _jitter_error(_turned(shown, match.mirrored), match.window, declared.color_jitter, change, thorough)
    return replace(match, error=error)


def _turned(image: np.ndarray, mirrored: bool) -> np.ndarray:
    return image[..., ::-1] if mirrored else image


def _rms(difference: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))


def _jitter_error(shown: np.ndarray, window: np.ndarray, strength: float, after, thorough: bool) -> float:
    """What is left of the difference by the best factors within 1 - strength to 1 + strength, found by Gauss-Newton. Alpha, the
    last of 2 or 4 channels, is not jittered."""
    if len(window) in (2, 4):
        colors = _jitter_error(shown[:-1], window[:-1], strength, after, thorough)
        return max(colors, _rms(shown[-1] - after(window)[-1]))
    luma = LUMA if len(window) == 3 else np.ones(1)
    x, y = (part.reshape(len(window), -1).astype(np.float64) for part in (window, shown))
    counted = [np.unique(plane, return_counts=True) for plane in x]  # so that the mean gray of all pixels is quick
    values = np.concatenate([levels for levels, _ in counted])
    weights = np.concatenate([counts * share / x.shape[1] for (_, counts), share in zip(counted, luma)])

    def jitter(factors, pixels):
        brightness, contrast, saturation = factors
        mean = weights @ ((values + 1) * brightness - 1).clip(-1, 1)
        pixels = (mean + (((pixels + 1) * brightness - 1).clip(-1, 1) - mean) * contrast).clip(-1, 1)
        gray = luma @ pixels
        return after((gray + (pixels - gray) * saturation).clip(-1, 1))

    some = slice(None, None, max(1, x.shape[1] // 3000) | 1)
    few, target = x[:, some], y[:, some]
    low, high = 1 - strength, 1 + strength
    starts = [_unclamped_factors(few, target, luma, weights @ (values + 1))]
    if thorough:
        grid = 1 + strength * (np.indices((9, 9, 5 if len(x) == 3 else 1)).reshape(3, -1).T / [4, 4, 2] - 1)
        grid[:, 2] = grid[:, 2] if len(x) == 3 else 1
        starts += sorted(grid, key=lambda factors: _rms(target - jitter(factors, few)))[:8]
    best, found = np.inf, None
    for start in starts:
        factors = np.clip(start, low, high)
        left = target - jitter(factors, few)
        for _ in range(20):
            slopes = [(jitter(factors + step, few) - target + left).ravel() / 1e-5 for step in 1e-5 * np.eye(3)]
            slopes = np.stack(slopes)
            for _ in range(2):  # a factor at its limit stays there, and the others are found for it
                move = np.linalg.lstsq(slopes @ slopes.T, slopes @ left.ravel(), rcond=1e-12)[0]
                slopes[((factors <= low) & (move < 0)) | ((factors >= high) & (move > 0))] = 0
            for share in (1, 0.3, 0.1, 0.02):
                tried = np.clip(factors + share * move, low, high)
                rest = target - jitter(tried, few)
                if better := np.square(rest).sum() < np.square(left).sum() * (1 - 1e-9):
                    factors, left = tried, rest
                    break
            if not better or _rms(left) < EXACT:
                break
        if _rms(left) < best:
            best, found = _rms(left), factors
        if best < LEVEL / 8:
            break
    return _rms(y - jitter(found, x))


def _unclamped_factors(x, y, luma, mean_gray) -> np.ndarray:
    """Factors of the pixels that no step clamped: y = c b s (x + 1) + c b (1 - s) gray(x + 1) + b g - 1 - c b g, where g is
    the mean of gray(x + 1)."""
    free = (np.abs(y) < 1 - 1e-4).all(0)
    if free.sum() < 8 or mean_gray <= 0:
        return np.ones(3)
    light = x[:, free] + 1
    gray = np.broadcast_to(luma @ light, light.shape)
    design = np.stack([light, gray, np.ones_like(light)], axis=-1).reshape(-1, 3)
    own, common, offset = np.linalg.lstsq(design, y[:, free].ravel(), rcond=None)[0]
    product = own + common
    brightness = (offset + 1) / mean_gray + product
    if abs(product) < 1e-6 or abs(brightness) < 1e-6:
        return np.ones(3)
    return np.array([brightness, product / brightness, own / product])

"""Some of the images were changed: turned, inverted, enlarged, damaged. One question is asked about all changes of a table."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageFilter

from utils.diagnostics.data_checks.recognition import blended, contradictions, describe, held_out_scores
from utils.diagnostics.data_checks.sample import NEARLY_PLAIN, Sample, Seen, gray

MOST = (400, 1600)  # images that are asked about, evenly chosen; more of them where the first ones leave a doubt
DOUBT = 2.0  # a natural logarithm: chance gives that to one question in seven at most
EXPECTED = 0.01


def _paler(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.rint(127.5 + (images - 127.5) * rng.uniform(0.4, 0.6, (len(images), 1, 1, 1))).astype(np.uint8)


def _darker(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.rint(images * rng.uniform(0.4, 0.6, (len(images), 1, 1, 1))).astype(np.uint8)


def _quarter_turn(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random((len(images), 1, 1, 1)) < 0.5, np.rot90(images, 1, (1, 2)), np.rot90(images, 3, (1, 2)))


def _without_color(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.rint(gray(images))[..., None].repeat(3, -1).astype(np.uint8)


def _each(images: np.ndarray, change: Callable[[Image.Image], Image.Image]) -> np.ndarray:
    flat = images[..., 0] if images.shape[-1] == 1 else images
    return np.stack([np.asarray(change(Image.fromarray(image))) for image in flat]).reshape(images.shape)


def _enlarged(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    filters = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)

    def change(image: Image.Image) -> Image.Image:
        half = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
        return half.resize(image.size, filters[rng.integers(2)])

    return _each(images, change)


def _out_of_focus(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return _each(images, lambda image: image.filter(ImageFilter.GaussianBlur(float(rng.uniform(1, 2)))))


def _compressed(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    def change(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=int(rng.integers(4, 12)))
        return Image.open(file)

    return _each(images, change)


def _with_wrong_bits(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    shares = np.exp(rng.uniform(np.log(0.01), np.log(0.1), (len(images), 1, 1, 1)))
    bits = np.left_shift(1, rng.integers(4, 8, images.shape)).astype(np.uint8)
    return np.where(rng.random(images.shape) < shares, images ^ bits, images)


def _torn(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The lower part moved to the side, and most often of another color, as when bits of a JPEG file are lost."""
    torn = images.astype(np.int16)
    for image in torn:
        height, width, channels = image.shape
        lower = image[rng.integers(height // 5, max(height // 5, height * 4 // 5) + 1) :]
        lower[:] = np.roll(lower, rng.integers(width), 1) + rng.integers(-70, 71, channels) * (rng.random() < 0.7)
    return np.clip(torn, 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Change:
    """What is said of changed images, how they are made, the code of the finding, and which images can be asked about."""

    what: str
    make: Callable[[np.ndarray, np.random.Generator], np.ndarray]  # uint8 [N, H, W, C], the same shape
    code: str = "data-mixed"
    colors: bool = False  # only colored ones
    square: bool = False
    shorter_side: int = 8

    def can_be_made(self, height: int, width: int, channels: int) -> bool:
        small = min(height, width) < self.shorter_side
        return not (small or (self.colors and channels == 1) or (self.square and height != width))


CHANGES = (
    Change("are negatives", lambda images, rng: 255 - images),
    Change("have red and blue exchanged", lambda images, rng: images[..., ::-1], colors=True),
    Change("are gray, among colored ones", _without_color, colors=True),
    Change("are turned by 90 degrees", _quarter_turn, square=True),
    Change("are upside down", lambda images, rng: images[:, ::-1, ::-1]),
    Change("have about half the contrast of the others", _paler),
    Change("are about half as bright as the others", _darker),
    Change("were enlarged from half their size", _enlarged, "data-resampled", shorter_side=16),
    Change("are out of focus", _out_of_focus, shorter_side=16),
    Change("have single wrong pixels, as of bits that were lost", _with_wrong_bits),
    Change("are torn: their lower part is moved or of another color", _torn),
    Change("were strongly compressed", _compressed, "data-compressed", shorter_side=16),
)


def changed(sample: Sample) -> Iterator[Seen]:
    """A part of the images that is told from the rest as surely as changed images are.

    A classifier learns to tell the images of the set from the same images after a change. Where it can, an image of the set
    of which it is sure that it was changed was so before; where it cannot, as of textures that are turned, nothing is said.
    """
    kept = np.flatnonzero(sample.gray.std((1, 2)) >= NEARLY_PLAIN)
    height, width, channels = sample.images.shape[1:]
    if len(kept) < 60 or min(height, width) < 8:
        return

    @cache
    def described(number: int) -> tuple[np.ndarray, list[torch.Tensor]]:
        chosen = kept[np.linspace(0, len(kept) - 1, number).astype(int)]
        return chosen, describe(sample.images[chosen])

    seen = []
    for change in (change for change in CHANGES if change.can_be_made(height, width, channels)):
        for number in sorted({min(most, len(kept)) for most in MOST}):
            chosen, stored = described(number)
            other = np.ascontiguousarray(change.make(sample.images[chosen], np.random.default_rng(0)))
            kinds = torch.arange(2).repeat_interleave(number)
            margins = held_out_scores(blended([stored, describe(other)], 250), kinds, pairs=True)[:number] @ (1, -1)
            found = contradictions(margins, 2, EXPECTED, len(MOST) * len(CHANGES))
            if found.sure or found.evidence < DOUBT:
                break
        if found.sure:
            seen.append((found, change, chosen[np.argsort(margins)[: max(1, round(found.share * number))]]))
    told = np.zeros(len(sample.images), bool)
    for found, change, members in sorted(seen, key=lambda one: -one[0].evidence):
        if told[members].mean() < 0.5:  # of the others a surer finding tells
            told[members] = True
            evidence = f"about {found.share:.0%} of the images {change.what}, at least {found.least:.1%}"
            yield Seen(change.code, "warning", evidence, sample.shown(np.sort(members), "changed"))

"""Which images and noise levels the batches of a script have, within an update and from update to update."""

from collections import Counter
from itertools import pairwise

import torch

from utils.diagnostics.audit.fitting import constant
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching.levels import Look
from utils.diagnostics.watching.seen import Seen

MOST_ALIKE = 0.4  # of the images of an update may have the first or last noise level, where all others differ
SURE = 6.0  # standard deviations of chance
FEWEST, MANY_IMAGES = 8, 64  # images of a batch that can be known again, and of all looks
ECHO = 8  # updates in which one batch may be used again on purpose
BATCHES = 3  # looks whose images are compared
FEW = 0.25  # of the images that might be different ones are: too few


class Batches:
    """What the images and noise levels of all looks show together."""

    def __init__(self) -> None:
        self.num_steps = 0  # of the noise schedule; 0: not known
        self._ended: list[bool] = []  # looks of which more than MOST_ALIKE have the first or last noise level
        self._batches: list[tuple[torch.Tensor, ...]] = []  # images and noise levels of the first looks
        self._ranked: list[tuple[float, int]] = []  # rank correlations of brightness and noise, and of how many images
        self._seen_batches: dict[tuple, int] = {}  # and the update in which each was seen first
        self._of_one: list[bool] = []  # whether a batch has one image alone
        self._marks: Counter[tuple[float, float]] = Counter()  # of the images seen
        self._unused: list[int] = []  # of each look, batches without a gradient

    def look(self, update: Update, looks: list[Look]) -> list[Check]:
        return [
            *self._again(looks, update.step),
            *self._brightness(looks),
            *_repeated([one.mixture.clean for one in looks]),
            *self._left_out(looks),
            *_channels_reversed(update, looks),
            *_wrapped_around(update),
            *self._one_batch(looks[0].mixture.clean, looks[0].mixture.of_noise),
        ]

    def _left_out(self, looks: list[Look]) -> list[Check]:
        """Whether the errors of other images are computed in each update and never reach the gradient."""
        without = [one for one in looks if one.gradient is None or not one.gradient.any()]
        used = [one for one in looks if one.gradient is not None and one.gradient.any()]
        others = [a for a in without if used and all(not _same(a.mixture.clean, b.mixture.clean) for b in used)]
        self._unused.append(len(others))
        always = len(self._unused) >= BATCHES and all(self._unused)
        text = (
            f"{len(others)} of {len(looks)} batches of an update have no part in the gradient: does backward() leave them out?"
        )
        name, found = "batches of an update without a gradient", str(len(others))
        return [Check("gradient", name, "none", found, not always, text)] if len(looks) > 1 else []

    def _again(self, looks: list[Look], update: int) -> list[Check]:
        """Whether a batch of an earlier look comes again, in its order: of batches that are kept, or of an order that is."""
        batches = [tuple(_marks(one.mixture.clean)) for one in looks if len(one.x) >= FEWEST]
        several = [batch for batch in batches if len(set(batch)) > len(batch) / 2]
        again = any(update - self._seen_batches.get(batch, update) > ECHO for batch in several)
        self._seen_batches = {batch: update for batch in several} | self._seen_batches
        self._marks.update(mark for batch in batches for mark in batch)
        self._of_one.extend(len(set(batch)) == 1 for batch in batches)
        text = "a batch has the images of an earlier update, in the same order: are batches kept, or is their order?"
        name, found = "batches that come again", "one" if again else "none"
        checks = [Check("data", name, "none", found, not again, text, "warning")] if several else []
        one = len(self._of_one) >= BATCHES and all(self._of_one)
        text = f"the {len(batches[0]) if batches else 0} images of each batch are one and the same, some of them mirrored"
        name, found = "different images of a batch", "one" if one else "several"
        return [*checks, Check("data", name, "several", found, not one, text, "warning")]

    def _brightness(self, looks: list[Look]) -> list[Check]:
        """Whether darker or brighter images have more noise: noise levels are drawn for each image, whatever it shows."""
        for one in looks:
            if len(one.x) >= FEWEST and constant(one.mixture.of_noise, 1e-5) is None:
                means, levels = one.mixture.clean.mean(1), one.mixture.of_noise / one.mixture.of_clean.clamp(min=1e-12)
                ranks = [values.argsort().argsort().double() - (len(means) - 1) / 2 for values in (means, levels)]
                self._ranked.append((float((ranks[0] * ranks[1]).sum() / ranks[0].square().sum()), len(means)))
        if sum(count for _, count in self._ranked) < MANY_IMAGES:
            return []
        # A rank correlation of n has the variance 1 / (n - 1) by chance.
        sure = sum(share * (count - 1) ** 0.5 for share, count in self._ranked) / len(self._ranked) ** 0.5
        share = sum(share for share, _ in self._ranked) / len(self._ranked)
        text = f"the noise of the images goes with their brightness (rank correlation {share:.2g}): were both sorted?"
        name, found = "noise beside brightness", f"rank correlation {share:.2g}"
        return [Check("timestep", name, "independent", found, abs(sure) < SURE, text, "warning")]

    def _one_batch(self, *parts: torch.Tensor) -> list[Check]:
        """Of the first three looks, at updates 2, 3 and 5: a shuffled set of one batch has another order each time."""
        checks = []
        if len(parts[0]) > 1:
            one = bool((parts[0] == parts[0][:1]).all()) and bool(parts[0].any())
            name, text = "images of a batch", "all images of the batch are one and the same"
            checks = [Check("data", name, "different ones", "the same" if one else "others", not one, text, "warning")]
        levels = parts[1]
        if len(levels) >= 8 and constant(levels, 1e-5) is None:
            share = _share_at_an_end(levels)
            self._ended.append(share > MOST_ALIKE)
            cut = self._ended[-1] and len(self._ended) >= BATCHES and sum(self._ended) > len(self._ended) / 2
            text = f"{share:.0%} of the images have the same noise level, the others differ: are the levels cut off at an end?"
            name, found = "share of images of the first or last noise level", f"{share:.0%}"
            checks.append(Check("timestep", name, "a small one", found, not cut, text, "warning"))
        if len(self._batches) == BATCHES:
            return checks
        self._batches.append(tuple(part.detach().to("cpu", copy=True) for part in parts))
        if len(self._batches) < BATCHES:
            return checks
        compared, self._batches = self._batches, [()] * BATCHES  # they are not needed any more
        same_images, same_levels = (
            all(one.shape == of[0].shape and torch.allclose(one, of[0], 0, 1e-6) for one in of) for of in zip(*compared)
        )
        several = len(levels) > 1 and constant(levels, 1e-5) is None  # a denoiser may have one level
        same_levels &= several
        sets = [of_noise.sort().values for _, of_noise in compared]
        whole = len(levels) == self.num_steps  # each step once
        alike = all(one.shape == sets[0].shape and torch.allclose(one, sets[0], 0, 1e-6) for one in sets)
        same_set = several and not whole and alike
        text = f"{BATCHES} updates had the same images in the same order: is one batch used again and again?"
        name, found = "batches of different updates", "the same" if same_images else "others"
        checks.append(Check("data", name, "different images", found, not same_images, text, "warning"))
        text = f"{BATCHES} updates had the same noise levels in the same order: are they drawn once, or with one seed?"
        if same_set and not same_levels:
            text = f"{BATCHES} updates had the same {len(levels)} noise levels in another order: all others are never trained"
        name, found = "noise levels of different updates", "the same" if same_set else "others"
        return [*checks, Check("timestep", name, "others", found, not same_set, text, "warning")]

    def end(self, images: int) -> list[Check]:
        """`images`: of the dataset; 0: not known."""
        count, different = self._marks.total(), len(self._marks)
        if count < MANY_IMAGES or not images:
            return []
        least = FEW * min(count, images)
        text = f"{count} images that were looked at are {different} different ones, and the dataset has {images}: "
        text += "which does the sampler leave out?"
        wanted = f"more than {least:.0f} of {count}"
        return [Check("data", "different images", wanted, f"{different} of {count}", different > least, text, "info")]


def _share_at_an_end(levels: torch.Tensor) -> float:
    """The share of `levels` [B] that are the smallest, or the largest, of all; 0 where others are alike, too: of few levels, or
    of one for several images, that says nothing."""
    at_ends = [(levels - end).abs() < 1e-6 for end in levels.aminmax()]
    alike = max(at_ends, key=lambda those: int(those.sum()))
    others = levels[~alike].sort().values
    return float(alike.double().mean()) if len(others) > 1 and bool((others.diff() >= 1e-6).all()) else 0.0


def _marks(images: torch.Tensor) -> list[tuple[float, float]]:
    """What tells images, float64 [B, N], from each other, and mirrored ones not from themselves."""
    rows = torch.stack([images.mean(1), images.square().mean(1)], 1).cpu()
    return [(round(mean, 6), round(square, 6)) for mean, square in rows.tolist()]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _repeated(images: list[torch.Tensor]) -> list[Check]:
    """`images`: of each micro step."""
    if len(images) < 2:
        return []
    same = any(a.shape == b.shape and torch.equal(a, b) for a, b in pairwise(images))
    text = "micro steps of an update see the same images: its batch is smaller than it should be"
    found = "the same" if same else "others"
    return [Check("data", "images of the micro steps", "other ones in each", found, not same, text, "warning")]


def _wrapped_around(update: Update) -> list[Check]:
    """Of images that are kept in bytes."""
    overflowed = any((step.batch.get("seen") or Seen()).overflowed for step in update.micro_steps)
    text = "arithmetic of uint8 images leaves 0 to 255 and begins anew at the other end: dark pixels become bright ones"
    found = "beyond it" if overflowed else "within it"
    known = any((step.batch.get("seen") or Seen()).bytes_seen for step in update.micro_steps)
    name, wanted = "arithmetic of uint8 images", "within 0 to 255"
    return [Check("data", name, wanted, found, not overflowed, text, "warning")] if known else []


def _channels_reversed(update: Update, looks: list[Look]) -> list[Check]:
    """Whether some images were flipped along their channels; all of them are where BGR becomes RGB."""
    count = sum((step.batch.get("seen") or Seen()).reversed for step in update.micro_steps)
    if not count:
        return []
    images = sum(len(one.x) for one in looks)
    text = f"{count} images of a batch were flipped along their channels, which exchanges red and blue: is it the wrong axis?"
    found = f"in {count} of {images}"
    return [Check("data", "channels in reverse order", "in none or in all", found, count >= images, text, "warning")]

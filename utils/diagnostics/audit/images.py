"""Stage "data" of the step audit: the images that a network is trained on, set beside their files, decoded once more.

    draws = Draws()
    checks = check_images(clean_images, files, declared, draws)     # at each audit
    checks += draws.checks(declared)                                # of all audits: chance needs many images

A healthy image differs by the rounding of float32, because Pillow decodes on both sides. Where one differs by more, all the
known ways of misreading a file are tried, and the one that fits is named.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from utils.diagnostics.audit.chance import IMPOSSIBLE, agrees, at_least
from utils.diagnostics.audit.files import (
    EXACT,
    JITTER_TOLERANCE,
    DeclaredImages,
    DecodedFile,
    Match,
    compare,
    cut,
    few_lines,
    find,
)
from utils.diagnostics.audit.misreadings import Seen, describe
from utils.diagnostics.audit.verdict import Check, not_observed

_PLACES = {"center": lambda room: {room // 2, -(-room // 2)}, "upper or left end": lambda room: {0}}
_PLACES["lower or right end"] = lambda room: {room}


@dataclass
class Draws:
    """What the declared augmentations drew, counted over all images that fit their files."""

    mirrored: int = 0
    # Decimal logarithm of the chance that all images of each batch so far are mirrored alike; None once some were not.
    alike: float | None = 0.0
    sided: int = 0  # images that differ from their mirror image
    plain: int = 0  # images that a jitter would have changed, and none did
    jittered: int = 0
    # Decimal logarithm of the chance that every crop so far lay at this place; a place leaves when a crop lies elsewhere.
    places: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PLACES, 0.0))
    flips: dict[int, bool] = field(
        default_factory=dict
    )  # by the number of the sample, of images that differ from their mirror image

    def add(self, seen: Seen, declared: DeclaredImages, number: int | None) -> None:
        """`number`: of the sample, where it is known."""
        match, planes, tolerance = seen.match, seen.planes, seen.tolerance
        sides = match.window.shape[1:]
        lines = few_lines(planes, sides)

        def alike(window):  # the places of the planes that could not be told from `window`
            difference, correlation = compare(window, planes, lines)
            return (difference <= (4 * tolerance) ** 2) | ((correlation > 0.98) & bool(declared.color_jitter))

        if declared.random_flip and not alike(match.window[..., ::-1]).any():
            self.sided += 1
            self.mirrored += match.mirrored
            if number is not None:
                self.flips[number] = match.mirrored
        down, right = (whole - part for whole, part in zip(planes.shape[1:], sides))
        room = max(down, right)
        for name in list(self.places) if room else ():
            windows = [cut(planes, min(at, down), min(at, right), sides) for at in _PLACES[name](room)]
            same = np.any([alike(window) for window in windows], axis=0)
            if same[match.top, match.left]:
                self.places[name] += math.log10(same.mean())
            else:
                del self.places[name]
        if declared.color_jitter and (np.abs(match.window) < 0.9).mean() > 0.05:  # neither black nor white: any factor shows
            plain = not match.jittered and match.error <= EXACT
            self.plain += plain
            self.jittered += not plain

    def end_batch(self, mirrored_before: int, sided_before: int) -> None:
        """After the images of one batch; the arguments are the counts before it."""
        mirrored, sided = self.mirrored - mirrored_before, self.sided - sided_before
        if self.alike is not None and sided > 1:
            self.alike = self.alike + (1 - sided) * math.log10(2) if mirrored in (0, sided) else None

    def _repeated(self, periods: dict[str, int]) -> str:
        """Of numbers of samples, by what repeats after so many: where images are mirrored as those that many samples before."""
        for name, period in periods.items():
            newest: dict[int, bool] = {}
            pairs = same = 0
            for number, mirrored in sorted(self.flips.items()):
                before = newest.get(number % period)
                pairs, same = pairs + (before is not None), same + (before == mirrored)
                newest[number % period] = mirrored
            if at_least(same, pairs, 0.5) < IMPOSSIBLE:
                return (
                    f"the same places of each {name} are mirrored ({same} of {pairs}): is it drawn without the sample's number?"
                )
        return ""

    def checks(self, declared: DeclaredImages, periods: dict[str, int] | None = None) -> list[Check]:
        """`periods`: name -> samples in one, such as a batch's."""
        checks = []
        if declared.random_flip:
            message = self._repeated(periods or {})
            if self.alike is not None and self.alike < math.log10(IMPOSSIBLE):
                message = "all images of a batch are mirrored or none is; declared: every second one, at random"
            if not agrees(self.mirrored, self.sided, 0.5):
                often = {0: "no image is", self.sided: "every image is"}.get(
                    self.mirrored, f"{self.mirrored / self.sided:.0%} of the images are"
                )
                message = f"{often} mirrored ({self.mirrored} of {self.sided}); declared: every second one, at random"
            observed = f"{self.mirrored} of {self.sided} images"
            checks.append(Check("data", "mirrored", "half of the images, at random", observed, not message, message))
        if not declared.center_crop:
            fixed = [name for name, chance in self.places.items() if chance < math.log10(IMPOSSIBLE)]
            message = f"images are always cut at the {fixed[0]}; declared: a random place" if fixed else ""
            checks.append(
                Check("data", "crop", "at a random place", fixed[0] if fixed else "no fixed place", not fixed, message)
            )
        if declared.color_jitter:
            never = self.plain > 3 and not self.jittered
            message = f"no image's colors are jittered; declared strength: {declared.color_jitter:g}" if never else ""
            observed = f"{self.jittered} of {self.jittered + self.plain} images"
            checks.append(Check("data", "color jitter", f"{declared.color_jitter:g}", observed, not never, message))
        return checks


def check_images(
    shown: torch.Tensor,
    files: list,
    declared: DeclaredImages,
    draws: Draws | None = None,
    sample_numbers: list[int] | None = None,
) -> list[Check]:
    """Whether a batch is made of its files as it is declared to be.

    Args:
        shown: float [B, C, H, W], the clean images that the network is trained on.
        files: the encoded image of each: bytes, a path, or an object with `data` and `path`. Those that Pillow cannot decode
            are left out.
        draws: counts what the augmentations drew.
        sample_numbers: of each image, for `draws`.
    """
    size = (declared.channels, *declared.sides)
    text = "the files' images, {}x{}x{}, in [-1, 1]".format(*size)
    if tuple(shown.shape[1:]) != size:
        found = "x".join(map(str, shown.shape[1:]))
        return [Check("data", "images", text, found, False, f"the network sees images of {found}; declared: {text}")]
    rounding = max(EXACT, torch.finfo(shown.dtype).eps if shown.dtype in (torch.float16, torch.bfloat16) else 0)
    images = shown.detach().cpu().double().numpy()
    batch, misread = [], []
    before = (draws.mirrored, draws.sided) if draws is not None else (0, 0)
    for number, (image, file) in enumerate(zip(images, files)):
        try:
            file = DecodedFile(file, declared)
            planes = file.planes()
        except Exception:  # Pillow's plugins raise OSError, SyntaxError, struct.error, ... on damaged files
            continue
        match = find(image, planes, declared) if np.isfinite(image).all() else Match(math.inf)
        tolerance = max(file.tolerance, rounding, JITTER_TOLERANCE if declared.color_jitter else 0)
        batch.append(Seen(number, image, file, planes, match, tolerance))
        if match.error > (tolerance if declared.color_jitter else rounding):
            misread.append(batch[-1])
        if draws is not None and match.error <= tolerance:
            draws.add(batch[-1], declared, None if sample_numbers is None else sample_numbers[number])
    if draws is not None:
        draws.end_batch(*before)
    if not batch:
        return [not_observed("data", "images", text, "none of the files can be decoded")]
    what = describe(misread, batch, declared) if misread else ""
    observed = f"{len(batch)} images that differ by {max(seen.match.error for seen in batch):.1g} at most"
    message = f"the network sees {what} ({len(misread)} of {len(batch)} images looked at)" if what else ""
    return [Check("data", "images", text, observed, not what, message)]

"""The images that a network is trained on, set beside their files, which are decoded once more.

A healthy image differs by the rounding of float32, because Pillow decodes on both sides.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from steady_doctor.data.chance import IMPOSSIBLE, agrees, at_least
from steady_doctor.data.declared import DeclaredImages
from steady_doctor.data.decode import EXACT, LEVEL, cut, decoded_or_none
from steady_doctor.data.place import JITTER_TOLERANCE, Match, compare, find, rms, turned
from steady_doctor.found import Found

_JITTER = 0.05  # strength from which two images that were drawn anew are not alike
_ALIKE = 1e-3  # above the rounding of one machine's kernels, far below what a jitter changes
_VALUES = 4096  # of an image that are kept
_FEW = 8  # levels: through fewer ones a straight line fits by chance
_PLACES = {"center": lambda room: {room // 2, -(-room // 2)}, "upper or left end": lambda room: {0}}
_PLACES["lower or right end"] = lambda room: {room}

Samples = Sequence[tuple[int, int]]  # number and row of each


class Draws:
    """What the declared augmentations drew, counted over all images that fit their files: chance needs many images."""

    def __init__(self, declared: DeclaredImages):
        self._declared = declared
        self._numbers: set[int] = set()  # of the samples that were counted
        self.sided = self.mirrored = 0  # images that differ from their mirror image, and those of them that are mirrored
        self._before = (0, 0)  # the two, before the batch under way
        # Decimal logarithm of the chance that all images of each batch so far are mirrored alike; None once some were not.
        self._alike: float | None = 0.0
        self.flips: dict[int, bool] = {}  # by the number of the sample
        self._images: dict[int, np.ndarray] = {}  # by row, of the first pass in which it was seen
        self.again = self.same = 0  # images that came again, and those of them that were drawn alike
        # Decimal logarithm of the chance that every crop so far lay at this place; a place leaves when a crop lies elsewhere.
        self.places = dict.fromkeys(_PLACES, 0.0)

    def add(self, image: np.ndarray, match: Match, planes: np.ndarray, tolerance: float, number: int, row: int) -> None:
        declared, sides = self._declared, match.window.shape[1:]
        if number in self._numbers:
            return
        self._numbers.add(number)

        def alike(window: np.ndarray) -> np.ndarray:  # the places of the planes that could not be told from `window`
            difference, correlation = compare(window, planes)
            return (difference <= (4 * tolerance) ** 2) | ((correlation > 0.98) & bool(declared.color_jitter))

        sided = declared.random_flip and not alike(match.window[..., ::-1]).any()
        if sided:
            self.sided += 1
            self.mirrored += match.mirrored
            self.flips[number] = match.mirrored
        # A jitter of black and white shows nothing, nor does a weak one, nor a flip of a symmetric image.
        varied = (np.abs(match.window) < 0.9).mean() > 0.05 and match.window.var() > 0.01
        if varied and declared.color_jitter >= _JITTER if declared.color_jitter else sided:
            some = image.ravel()[:: -(-image.size // _VALUES) | 1]  # an odd step, unlike rows
            if row in self._images:
                self.again += 1
                self.same += rms(some - self._images[row]) < _ALIKE
            self._images.setdefault(row, some.copy())
        room = max(whole - part for whole, part in zip(planes.shape[1:], sides))
        for name in list(self.places) if room else ():
            same = np.any([alike(cut(planes, at, sides)) for at in _PLACES[name](room)], axis=0)
            if same[match.at]:
                self.places[name] += math.log10(same.mean())
            else:
                del self.places[name]

    def end_batch(self) -> None:
        """After the images of one batch."""
        mirrored, sided = self.mirrored - self._before[0], self.sided - self._before[1]
        self._before = self.mirrored, self.sided
        if self._alike is not None and sided > 1:
            self._alike = self._alike + (1 - sided) * math.log10(2) if mirrored in (0, sided) else None

    def found(self, update: int, periods: Mapping[str, int]) -> Iterator[Found]:
        """`periods`: name -> samples in one, such as a batch's."""
        declared, impossible = self._declared, math.log10(IMPOSSIBLE)
        if not agrees(self.mirrored, self.sided, 0.5):
            yield Found("data-flips", update, {"mirrored": self.mirrored, "sided": self.sided})
        elif self._alike is not None and self._alike < impossible:
            yield Found("data-flips-together", update, {"sided": self.sided})
        else:
            for name, period in periods.items():
                pairs, same = self._repeated(period)
                if at_least(same, pairs, 0.5) < IMPOSSIBLE:
                    yield Found("data-flips-again", update, {"period": name, "same": same, "pairs": pairs})
                    break
        if self.same >= max(8, self.again) if declared.color_jitter else at_least(self.same, self.again, 0.5) < IMPOSSIBLE:
            yield Found("data-drawn-again", update, {"alike": self.same, "seen": self.again})
        for name, chance in self.places.items() if not declared.center_crop else ():
            if chance < impossible:
                yield Found("data-crop", update, {"place": name})
                break

    def _repeated(self, period: int) -> tuple[int, int]:
        """(pairs of samples so many apart, those of them that are mirrored alike)."""
        newest: dict[int, bool] = {}
        pairs = same = 0
        for number, mirrored in sorted(self.flips.items()):
            before = newest.get(number % period)
            pairs, same = pairs + (before is not None), same + (before == mirrored)
            newest[number % period] = mirrored
        return pairs, same


def check_images(
    update: int, images: Tensor, files: list, declared: DeclaredImages, draws: Draws | None = None, samples: Samples = ()
) -> Iterator[Found]:
    """Whether a batch is made of its files as it is declared to be.

    Args:
        images: float [B, C, H, W], the clean images that the network is trained on.
        files: of each, see `decoded`. Those that Pillow cannot decode are left out.
        draws, samples: counts what the augmentations drew for these samples; None in the validation.
    """
    size, part = (declared.channels, *declared.sides), "validation" if draws is None else "training"
    if tuple(images.shape[1:]) != size:
        yield Found("data-shape", update, {"shape": tuple(images.shape[1:]), "size": size, "part": part})
        return
    shown = images.detach().cpu().double().numpy()
    if broken := int((~np.isfinite(shown).all((1, 2, 3))).sum()):
        yield Found("data-not-finite", update, {"count": broken, "of": len(shown), "part": part})
        return
    rounding = max(EXACT, torch.finfo(images.dtype).eps if images.dtype in (torch.float16, torch.bfloat16) else 0)
    pairs = []
    for place, (image, file) in enumerate(zip(shown, files)):
        if (known := decoded_or_none(file, declared)) is None:
            continue
        planes, tolerance = known[0], max(known[1], rounding, JITTER_TOLERANCE if declared.color_jitter else 0)
        match = find(image, planes, declared)
        pairs.append((match.error, tolerance, image, planes))
        if draws is not None and match.error <= tolerance:
            draws.add(image, match, planes, tolerance, *samples[place])
    if draws is not None:
        draws.end_batch()
    wrong = [pair[2:] for pair in pairs if pair[0] > pair[1]]
    # What lies within an old cache's rounding is a fault where a straight line leaves nothing of it.
    others = wrong or [pair[2:] for pair in pairs if not declared.color_jitter and pair[0] > rounding]
    if not others:
        return
    aligned = [_aligned(*pair, declared.random_flip) for pair in others]
    y, x = (np.concatenate(parts) for parts in zip(*aligned))
    line = _line(y, x, rounding if not wrong else None)
    figures = {"count": len(others), "of": len(pairs), "part": part}
    if line is not None:
        yield Found("data-rescaled", update, {**figures, "gain": line[0], "offset": line[1], "low": y.min(), "high": y.max()})
    elif wrong:
        alike = float(np.mean([np.corrcoef(a, b)[0, 1] if np.ptp(a) > 0 < np.ptp(b) else 0.0 for a, b in aligned]))
        far = np.abs(y - x)
        yield Found("data-differs", update, {**figures, "largest": far.max(), "mean": far.mean(), "correlation": alike})


def _aligned(image: np.ndarray, planes: np.ndarray, flip: bool) -> tuple[np.ndarray, np.ndarray]:
    """(the image shown, the part of its file that is most like it), both flat; negatives are alike too."""
    found = []
    for mirrored in (False, True)[: 1 + flip]:
        shown = turned(image, mirrored)
        correlation = np.abs(compare(shown, planes)[1]).round(6)
        at = int(correlation.argmax())
        found.append((correlation[at], shown.ravel(), cut(planes, at, shown.shape[1:]).ravel()))
    return max(found, key=lambda pair: pair[0])[1:]


def _line(y: np.ndarray, x: np.ndarray, rounding: float | None) -> tuple[float, float] | None:
    """(gain, offset) of what `x` became, where a line with clamped ends explains it but for `rounding`; None: that of 8
    bits, which the gain makes larger or smaller."""
    free = (y > y.min() + 1e-6) & (y < y.max() - 1e-6)  # nothing is clamped there
    if len(np.unique(x[free].round(6))) < _FEW:
        return None
    gain, offset = map(float, np.polyfit(x[free], y[free], 1))
    rest, exact = rms(y - (gain * x + offset).clip(y.min(), y.max())), EXACT * max(1.0, float(np.abs(y).max()))
    most = max(2 * LEVEL * min(100.0, float(y.std() / x.std())), exact) if rounding is None else max(exact, rounding)
    return (gain, round(offset, 6)) if rest <= most and rest < 0.1 * y.std() else None

"""Where in the planes of a file a shown image lies: its crop, its mirror image, and the jitter of its colors."""

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from steady_doctor.data.declared import DeclaredImages
from steady_doctor.data.decode import EXACT, LEVEL, cut

LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
JITTER_TOLERANCE = 4 * LEVEL  # clamps make the fit of the three factors stop short of the best ones, once in a thousand images
_LINES = 128  # of a large image, by which its place is looked for
_PLACES = 24  # where a jittered image is looked for, of each order
_THOROUGH = 6  # of them, where its factors are looked for everywhere
_SOME = 3000  # pixels that factors are fitted to


@dataclass(frozen=True)
class Match:
    """Where an image fits best."""

    error: float  # root mean square difference
    mirrored: bool
    at: int  # see `cut`
    window: np.ndarray  # the part of the planes that is shown, neither mirrored nor jittered


def compare(image: np.ndarray, planes: np.ndarray, lines: int = _LINES) -> tuple[np.ndarray, np.ndarray]:
    """Mean squared difference and correlation of an image with each place of planes that are larger in one direction; of large
    images by about so many `lines` in this direction."""
    if planes.shape[1] > image.shape[1]:
        image, planes = image.swapaxes(1, 2), planes.swapaxes(1, 2)
    weights = np.arange(len(image), 0, -1.0)  # unequal: exchanged channels differ
    weights = np.array([0.5, 0.3, 0.2]) if len(image) == 3 else weights / weights.sum()
    y, p = (np.tensordot(weights, part[:, :: max(1, image.shape[1] // lines)], 1) for part in (image, planes))
    y, p = y - p.mean(), p - p.mean()
    windows = np.lib.stride_tricks.sliding_window_view(p, y.shape[1], axis=1)
    product = np.einsum("hpw,hw->p", windows, y)
    total, squares = (np.convolve(part.sum(0), np.ones(y.shape[1]), "valid") for part in (p, p * p))
    difference = np.maximum(squares + (y * y).sum() - 2 * product, 0) / y.size
    spread = y.std() * np.sqrt(np.maximum(squares / y.size - (total / y.size) ** 2, 0))
    covariance = product / y.size - total / y.size * y.mean()
    return difference, np.divide(covariance, spread, out=np.zeros_like(spread), where=spread > 1e-7)


def turned(image: np.ndarray, mirrored: bool) -> np.ndarray:
    return image[..., ::-1] if mirrored else image


def rms(difference: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))


def find(shown: np.ndarray, planes: np.ndarray, declared: DeclaredImages, lines: int = _LINES) -> Match:
    """The crop, mirror and jitter, of those that are declared, that make `planes` the image shown."""
    sides, jitter = shown.shape[1:], declared.color_jitter
    places: list[tuple] = []  # order, score, mirrored, at
    for mirrored in (False, True)[: 1 + declared.random_flip]:
        difference, correlation = compare(turned(shown, mirrored), planes, lines)
        for order, score in enumerate((-correlation, difference) if jitter else (difference,)):
            best = np.argsort(score, kind="stable")[: _PLACES if jitter else 2]
            places += [(order, score[at], mirrored, int(at)) for at in best]
    matches = []
    for mirrored, at in dict.fromkeys(place[2:] for place in sorted(places)):
        window = cut(planes, at, sides)
        matches.append(Match(rms(turned(shown, mirrored) - window), mirrored, at, window))
    tried = [min(matches, key=lambda match: match.error)]
    for thorough in (False, True) if jitter and tried[0].error > EXACT else ():  # most images do not come to the second turn
        for match in sorted(tried, key=lambda match: match.error)[:_THOROUGH] if thorough else matches:
            error = _jitter_error(turned(shown, match.mirrored), match.window, jitter, thorough)
            tried.append(replace(match, error=error))
            if error < LEVEL / 8:
                return tried[-1]
    if max(sides) > lines and min(match.error for match in tried) > EXACT:  # its lines may not tell where it lies
        tried.append(find(shown, planes, declared, max(sides)))
    return min(tried, key=lambda match: match.error)


def _jitter_error(shown: np.ndarray, window: np.ndarray, strength: float, thorough: bool) -> float:
    """What is left of the difference by the best factors within 1 - strength to 1 + strength. Alpha, the last of 2 or 4
    channels, is not jittered."""
    if len(window) in (2, 4):
        return max(_jitter_error(shown[:-1], window[:-1], strength, thorough), rms(shown[-1] - window[-1]))
    luma = LUMA if len(window) == 3 else np.ones(1)
    x, y = (part.reshape(len(window), -1).astype(np.float64) for part in (window, shown))
    counted = [np.unique(plane, return_counts=True) for plane in x]  # so that the mean gray of all pixels is quick
    values = np.concatenate([levels for levels, _ in counted])
    weights = np.concatenate([counts * share / x.shape[1] for (_, counts), share in zip(counted, luma)])

    def jitter(factors: np.ndarray, pixels: np.ndarray) -> np.ndarray:
        brightness, contrast, saturation = factors
        mean = weights @ ((values + 1) * brightness - 1).clip(-1, 1)
        pixels = (mean + (((pixels + 1) * brightness - 1).clip(-1, 1) - mean) * contrast).clip(-1, 1)
        gray = luma @ pixels
        return (gray + (pixels - gray) * saturation).clip(-1, 1)

    def rest(factors: np.ndarray) -> np.ndarray:
        return (target - jitter(factors, few)).ravel()

    some = slice(None, None, max(1, x.shape[1] // _SOME) | 1)
    few, target = x[:, some], y[:, some]
    low, high = 1 - strength, 1 + strength
    starts = [np.ones(3)]
    if thorough:
        grid = 1 + strength * (np.indices((9, 9, 5 if len(x) == 3 else 1)).reshape(3, -1).T / [4, 4, 2] - 1)
        grid[:, 2] = grid[:, 2] if len(x) == 3 else 1
        starts = sorted(grid, key=lambda factors: rms(rest(factors)))[:8]
    found = np.ones(3)
    for start in starts:
        fitted = least_squares(rest, start, bounds=(low, high), xtol=1e-12, ftol=1e-12, max_nfev=30).x
        found = min(found, fitted, key=lambda factors: rms(rest(factors)))
        if rms(rest(found)) < LEVEL / 8:
            break
    return rms(y - jitter(found, x))

"""What the error of each sample counts in the loss."""

from dataclasses import dataclass

import torch

from utils.diagnostics.audit.declared import WEIGHTINGS
from utils.diagnostics.audit.fitting import SMALL, constant, flat, simple, span, worst
from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.levels import Levels
from utils.diagnostics.watching.targets import is_part

_LAMBDA = "(sigma^2 + sigma_data^2) / (sigma sigma_data)^2"
MOST_APART = 1e3  # weights of two images, of no known function
MOST_PADDED = 8  # different values that padding may have
_OF_PIXELS = (  # what a mask may be made of
    lambda images: images.amax(1, keepdim=True),
    lambda images: images.amin(1, keepdim=True),
    lambda images: images.mean(1, keepdim=True),
)
MOST_OUTSIDE = 2.0  # times what errors in the holes of images count
TINY = 1e-4  # times the mean error; half of a batch of 64 in 50 micro steps is more
NOTHING = 1e-9  # a weight, or an SNR, that is 0
_GAMMAS = (5.0, 1.0, 2.0, 3.0, 4.0, 7.0, 10.0, 20.0)
_FAMILIAR = {  # what scripts weigh errors by on purpose
    "epsilon": ("1", "min(SNR, gamma) / SNR", "(SNR + 1) / SNR", "1 / (SNR + 1)"),
    "sample": ("1", "SNR", "max(SNR, 1)", "min(SNR, gamma)", "SNR + 1", "1 / (SNR + 1)", "SNR / (SNR + 1)"),
    "v_prediction": ("1", "SNR / (SNR + 1)", "min(SNR, gamma) / (SNR + 1)", "1 / (SNR + 1)", "max(SNR, 1) / (SNR + 1)"),
    "score": ("1", "1 / SNR", "1 / (SNR + 1)"),
}
_FUNCTIONS = WEIGHTINGS | {
    "SNR / (SNR + 1)": lambda snr, gamma: snr / (snr + 1),
    "1 / (SNR + 1)": lambda snr, gamma: 1 / (snr + 1),
    "(SNR + 1) / SNR": lambda snr, gamma: (snr + 1) / snr,
    "max(SNR, 1) / (SNR + 1)": lambda snr, gamma: snr.clamp(min=1) / (snr + 1),
    "SNR + 1": lambda snr, gamma: snr + 1,
}

_THROUGH = {  # what an error of v counts where the loss compares the noise, or the image, that follows from v
    "epsilon": lambda snr: snr / (snr + 1),
    "sample": lambda snr: 1 / (snr + 1),
}


@dataclass
class Weighting:
    name: str  # "" where it is no known function
    gamma: float | None
    factor: float  # times which it is
    healthy: bool
    message: str = ""
    severity: str = "critical"


def identify_weights(weights: torch.Tensor, levels: Levels, target: str, micro_steps: int) -> Weighting:
    """`weights` [B]: what each sample's mean squared error counts in the batch's mean, times the number of micro steps."""
    batch = float(levels.sizes[0])
    if not torch.isfinite(weights).all():
        return Weighting("", None, 1.0, False, "weights of the errors are not finite")
    if float(weights.min()) < 0 < float(weights.max()):
        text = "errors of some images are made larger: their weight is negative (a loss that compares images?)"
        return Weighting("", None, 1.0, False, text, "info")
    snr = (levels.a / levels.b.clamp(min=1e-12)) ** 2
    if bool(
        (ended := (weights.abs() <= NOTHING) & (snr <= NOTHING)).any()
    ):  # of noise alone, which has no SNR to be weighed by
        weights, snr = weights[~ended], snr[~ended]
    if not len(weights):
        return Weighting("", None, 1.0, True)
    familiar = _FAMILIAR.get(target, ("1",))
    if found := _known(weights, snr, familiar):
        familiar_one, best = found
        if best.name == "1" and (mean_of := _mean_of(best.factor, snr, familiar)):
            text = f"all images count {best.factor:.4g}, the mean of {mean_of}: weights [B, 1] times errors [B] make [B, B]?"
            return Weighting("1", None, best.factor, False, text)
        return _judged(best, familiar_one, target, micro_steps, levels.pixels, batch)
    for of, share in _THROUGH.items() if target == "v_prediction" and len(weights) > 3 else ():
        if (found := _known(weights / share(snr), snr, _FAMILIAR[of])) and abs(abs(found[1].factor) - 1) < SMALL:
            return _judged(found[1], found[0], of, micro_steps, levels.pixels, batch)
    for name in familiar if len(weights) > 3 else ():
        for gamma in _GAMMAS if "gamma" in name else (None,):
            if constant(weights.sort().values / _FUNCTIONS[name](snr, gamma or 0.0).sort().values) is not None:
                return Weighting(name, gamma, 1.0, False, "errors are weighed by the weight of another image of the batch")
    counted = int((weights.abs() > NOTHING).sum())
    if counted < len(weights):
        return Weighting("", None, 1.0, False, f"only {counted} of {len(weights)} images count in the loss", "warning")
    if len(weights) == len(levels.a) and (of_levels := _of_levels(weights, levels, target)) is not None:
        return of_levels
    most = float(weights.abs().max() / weights.abs().min())
    text = f"errors of some images count {most:.2g} times as much as those of others, which are then not learned"
    return Weighting("", None, 1.0, most < MOST_APART, "" if most < MOST_APART else text, "info")


def _known(weights: torch.Tensor, snr: torch.Tensor, familiar: tuple[str, ...]) -> tuple[bool, Weighting] | None:
    """(whether it is a familiar one, the known function that the weights are proportional to)."""
    found: list[tuple[bool, bool, Weighting]] = []
    for name in (*familiar, *_FUNCTIONS):
        for gamma in _gammas(weights, snr, name):
            factor = constant(weights / _FUNCTIONS[name](snr, gamma or 0.0))
            exact = factor is not None and abs(abs(factor) - 1) < SMALL
            if factor is not None and (exact or gamma in (None, *_GAMMAS)) and (exact or name in familiar or len(weights) > 3):
                found.append((name in familiar, exact, Weighting(name, gamma, factor, True)))
        if found and found[-1][:2] == (True, True):
            break
    if not found:
        return None
    familiar_one, _, best = max(found, key=lambda one: one[:2])
    return familiar_one, best


def _mean_of(factor: float, snr: torch.Tensor, names: tuple[str, ...]) -> str | None:
    """The weighting whose mean over the batch is the factor, to more digits than chance would give."""
    for name in names if len(snr) > 3 and abs(factor - 1) > SMALL else ():
        for gamma in _GAMMAS if "gamma" in name else (0.0,):
            mean = float(_FUNCTIONS[name](snr, gamma).mean())
            if name != "1" and abs(factor / mean - 1) < 1e-4:
                return name
    return None


def _of_levels(weights: torch.Tensor, levels: Levels, target: str) -> Weighting | None:
    """EDM's lambda(sigma) = 1 / sigma^2 + 1 / sigma_data^2, and 1 / sigma^2, times a number; and what they are mistaken for."""
    sigma, one = levels.sigma.clamp(min=1e-12), torch.ones_like(levels.b)
    if len(weights) < 4:
        return None
    if levels.kind == "flow":
        of_noise = target == "epsilon"  # an error of the noise is 1 - s times one of the velocity
        for name, share, fine in (("1 / s^2, the velocity's", levels.b, True), ("1 / (1 - s)^2", levels.a, of_noise)):
            inside = share > 0.1  # it is cut off below
            if int(inside.sum()) > 3 and (factor := constant((weights * share**2)[inside])) is not None:
                found = Weighting(
                    name, None, factor, fine, f"errors are weighed by {name}; the image and the noise are exchanged?"
                )
                return _judged(found, True, "", 1, levels.pixels, float(levels.sizes[0])) if fine else found
    if found := _sum_of(weights, 1 / sigma**2, one):
        factor, level = found
        sigma_data = (factor / level) ** 0.5 if level > 1e-6 * factor else 0.0
        name = f"{_LAMBDA}, sigma_data {sigma_data:.3g}" if sigma_data else "1 / sigma^2"
        return _judged(Weighting(name, None, factor, True), True, "", 1, levels.pixels, float(levels.sizes[0]))
    mistakes = {
        "(sigma^2 + sigma_data^2) / (sigma sigma_data)": _sum_of(weights, 1 / sigma, sigma),
        "(sigma sigma_data)^2 / (sigma^2 + sigma_data^2)": _sum_of(1 / weights, 1 / sigma**2, one),
    }
    for name, found in mistakes.items() if levels.kind in ("variance-exploding", "preconditioned") else ():
        if found and min(found) > 0:
            return Weighting(name, None, 1.0, False, f"errors are weighed by {name}; EDM's weight is {_LAMBDA}")
    return None


def _sum_of(values: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[float, float] | None:
    """(p, q) of values = p first + q second, p > 0."""
    columns = torch.stack([first, second], 1) / values[:, None]
    sizes = columns.norm(dim=0)
    solution = torch.linalg.lstsq(columns / sizes, torch.ones_like(values)[:, None]).solution[:, 0] / sizes
    p, q = solution.tolist()
    return None if worst(columns @ solution - 1) > SMALL or p <= 0 else (p, q)


def _gammas(weights: torch.Tensor, snr: torch.Tensor, name: str) -> list[float | None]:
    if "gamma" not in name:
        return [None]
    ratio = weights * (snr if name.endswith("/ SNR") else snr + 1 if name.endswith("+ 1)") else torch.ones_like(snr))
    own = [float(ratio[snr.argmax()]), float(ratio[snr.argmin()])]
    crossed = [g for g in (*_GAMMAS, *own) if g > 0 and float(snr.min()) < g < float(snr.max())]
    return list(dict.fromkeys(round(g, 4) for g in crossed))


def _judged(found: Weighting, familiar: bool, target: str, micro_steps: int, pixels: int, batch: float) -> Weighting:
    if not familiar:
        found.healthy = False
        gamma = f" (gamma {found.gamma:g})" if found.gamma else ""
        belongs = " or ".join(_FAMILIAR.get(target, ("1",)))
        found.message = f"errors are weighed by {found.name}{gamma}; with this target it should be {belongs}"
        return found
    causes = {
        "its sign is wrong: the loss is maximized": (-1.0, "critical"),
        "it is not divided by the number of micro steps, so it grows with the accumulation": (float(micro_steps), "warning"),
        "it is summed over the batch, not averaged, so it grows with the batch size": (batch, "warning"),
        "it is summed over pixels and batch, not averaged, so it grows with the batch size": (pixels * batch, "warning"),
        "it is divided by the number of micro steps twice": (1.0 / micro_steps, "warning"),
        "it is divided by the batch size twice": (1.0 / batch, "warning"),
    }
    if batch <= 3:  # 2 may as well be the sum of two means
        causes = {text: cause for text, cause in causes.items() if "batch" not in text}
    for text, (value, severity) in causes.items():
        if value != 1.0 and abs(found.factor / value - 1) < 2e-3:
            found.healthy, found.severity = False, severity
            found.message = f"the loss is {simple(found.factor)} times the mean error: {text}"
            return found
    if 0 < found.factor < TINY:
        found.healthy, found.severity = False, "warning"
        found.message = f"the loss is {simple(found.factor)} times the mean error: gradients are near the optimizer's epsilon"
    if found.factor < 0:
        found.healthy = False
        found.message = f"the loss is {simple(found.factor)} times the mean error: it is maximized"
    return found


def check_weights(found: Weighting, weights: torch.Tensor) -> Check:
    name = "weight of each sample's loss"
    wanted = "a known weighting of the mean error"
    gamma = f", gamma {found.gamma:g}" if found.gamma else ""
    if not found.name and found.healthy:
        return not_observed("weight", name, wanted, f"errors count by another function of the noise level ({span(weights)})")
    times = "" if abs(found.factor - 1) < SMALL else f", times {simple(found.factor)}"
    observed = f"{found.name}{gamma}{times}" if found.name else span(weights)
    return Check("weight", name, wanted, observed, found.healthy, found.message, found.severity)


def check_masked(levels: Levels) -> Check | None:
    """Of a loss that leaves out values: whether these are the darker or the brighter ones of the clean image, so that the image
    itself is the mask. Padding, which has one value, and masks that the network gets are no such thing."""
    channels = levels.looks[0].x.shape[1]
    gradients = [flat(look.gradient[:, :channels]) for look in levels.looks if look.gradient is not None]
    if any(look.joined for look in levels.looks) or len(gradients) < len(levels.looks) or levels.looks[0].x.ndim < 4:
        return None
    counted = torch.cat(gradients) != 0
    if not 1e-2 < float(counted.double().mean()) < 0.99 or counted.shape != levels.clean.shape:
        return None
    images, counted = levels.clean.reshape(len(counted), channels, -1), counted.reshape(len(counted), channels, -1)
    for values in (images, *(of(images).expand_as(images) for of in _OF_PIXELS)):
        left, used = values[~counted], values[counted]
        darker, brighter = float(left.max()) <= float(used.min()), float(left.min()) >= float(used.max())
        if (darker or brighter) and len(left.unique()) > MOST_PADDED:
            which, limit = ("darker", left.max()) if darker else ("brighter", left.min())
            text = (
                f"errors do not count where the image is {which} than {float(limit):.2g}: these parts of it are never learned"
            )
            found = f"those of {float(counted.double().mean()):.0%} of the values"
            return Check("weight", "errors that count", "those of all values", found, False, text, "warning")
    return None


def check_holes(levels: Levels, of_pixels: torch.Tensor) -> Check | None:
    """Of a script that has its images with holes too, which differ from them in nothing else: whether the loss asks for what is
    in the holes rather than for what is not. `of_pixels` [B, N]: what each pixel's error counts; NaN where it is not known."""
    if len(levels.looks) > 1 or of_pixels.shape != levels.clean.shape:
        return None
    for other in map(flat, levels.looks[0].others):
        if other.shape != levels.clean.shape or not is_part(other, levels.clean):
            continue
        hole = (other == 0) & (levels.clean != 0)
        counts = [torch.where(those, of_pixels, torch.nan).nanmedian(1, keepdim=True).values for those in (~hole, hole)]
        expected = torch.where(hole, counts[1], counts[0])
        ratios = of_pixels / expected
        alike = (ratios[~ratios.isnan()] - 1).abs() < 1e-2
        times = float((counts[0] / counts[1]).nanmedian())
        if not times > 0 or float(alike.double().mean()) < 0.99:
            continue
        text = f"what is outside the holes of the images counts {times:.3g} times as much as what is in them: exchanged?"
        name, wanted = "errors outside the holes of the images", "as much as those in them, or less"
        severity = "warning" if levels.looks[0].joined else "info"  # else it may be a reference: the subject cut out
        return Check("weight", name, wanted, f"{times:.3g} times as much", times < MOST_OUTSIDE, text, severity)
    return None

"""The known ways from an image to noise: how the share of the image follows from that of the noise."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from steady_doctor.seen import Seen

CLOSE = 2e-3  # of the larger share; half precision rounds to 4e-3
MOST_LEFT = 0.2  # of the noise, at the images' end of a line
EXPONENTS = (0.5, 1.0, 2.0, 4.0)  # of shares
SCATTERED = 0.02  # of the largest share of noise: by less it neither rises nor falls
LEAST = 4  # samples, before a path is told
SAME = 1e-3  # of the largest share


@dataclass
class Levels:
    """Of all samples that were seen, in float64.

    `kind`: "vp", a^2 + b^2 = 1; "sub-vp", a^2 + b = 1; "flow", a + b = 1; "ve", a = 1; "edm", that times
    1 / sqrt(sigma^2 + sigma_data^2); or "".
    """

    a: Tensor
    b: Tensor
    kind: str
    scale: float = 1.0  # edm: sigma_data; flow: 1 less the noise that is left at the images' end

    @property
    def single(self) -> bool:
        """One level in all that was seen, as where a distribution is smoothed, or one step is distilled: no path tells what the
        shares of image and noise should be."""
        return all(float(x.max() - x.min()) <= SAME * float(x.abs().max()) for x in (self.a, self.b))

    @property
    def sigma(self) -> Tensor:
        return self.b / self.a


def levels(seen: Seen) -> Levels | None:
    """None where no image was seen in the network's input, or too few."""
    known = [one.mixture for _, one in seen.mixed() if one.mixture.a is not None]
    if not known:
        return None
    a, b = (torch.cat([getattr(mixture, name) for mixture in known]) for name in "ab")
    a, b = (share[a.abs() + b.abs() > 0] for share in (a, b))  # a mask may leave nothing of a sample
    if len(a) < LEAST:
        return None
    half = any(mixture.input.dtype in (torch.float16, torch.bfloat16) for mixture in known)
    return Levels(a, b, *kind_of(a, b, 4 * CLOSE if half else CLOSE))


def has_levels(seen: Seen) -> bool:
    """False where all that was seen has noise of one strength, and the network is told none: an augmentation, numbers that fill
    the steps of whole ones, or a denoiser that is no diffusion model."""
    found = levels(seen)
    is_chosen = any(one.mixture.told or one.mixture.index is not None for _, one in seen.mixed())
    return found is None or not found.single or is_chosen


def factors(a: Tensor, b: Tensor) -> tuple[float, float] | None:
    """(s, k), where (a / s)^2 + (b / k)^2 = 1: a path of constant variance with s times the image and k times the noise."""
    sides = torch.stack([a * a, b * b], 1)
    over_s, over_k = torch.linalg.lstsq(sides, torch.ones(len(a), 1).to(a)).solution.flatten().tolist()
    is_known = len(a) >= 2 * LEAST and all(float(x.max() - x.min()) > 0.1 * float(x.abs().max()) for x in (a, b))
    if not is_known or over_s <= 0 or over_k <= 0 or float((a * a * over_s + b * b * over_k - 1).abs().max()) > CLOSE:
        return None
    return over_s**-0.5, over_k**-0.5


def is_slip(a: Tensor, b: Tensor) -> bool:
    """Whether shares on no known path are what a slip makes of one: with a root or a square too few or too many, noise of one
    share, or two levels in one sample. Other shares may be those of a path that is not known here."""
    if float((b.max() - b.min()) / b.abs().max()) <= SAME:
        return True
    if _turns(b[a.argsort()].tolist(), SCATTERED * float(b.abs().max())) > 1:
        return True
    powers = [[x.clamp(min=0) ** exponent for exponent in EXPONENTS] for x in (a, b)]
    sums = [one + other for one, other in itertools.product(*powers)]
    if float(a.min()) > 0:  # scales that are made for another noise
        sums += [rest / rest.median() for exponent in EXPONENTS for rest in [a**-2 - (b / a).clamp(min=0) ** exponent]]
    return any(bool(((total - 1).abs() <= CLOSE).all()) for total in sums)


def _turns(values: list[float], least: float) -> int:
    """How often they begin to rise or to fall, by more than `least`."""
    turns, rises, end = 0, 0, values[0]
    for value in values:
        if abs(value - end) > least:
            way = 1 if value > end else -1
            turns, rises = turns + (rises == -way), way
        if abs(value - end) > least or (value - end) * rises > 0:
            end = value
    return turns


def kind_of(a: Tensor, b: Tensor, close: float = CLOSE) -> tuple[str, float]:
    one = torch.ones_like(a)

    def near(x: Tensor, y: Tensor) -> bool:
        return bool(((x - y).abs() <= close * y.abs().clamp(min=1.0)).all())

    if near(a * a + b * b, one):
        return "vp", 1.0
    if near(a + b, one):
        return "flow", 1.0
    if near(a * a + b, one):
        return "sub-vp", 1.0
    if float(a.max() - a.min()) > 0.05 and float(a.max()) > 0.1:
        left = float(((a + b - 1) / a)[a > 0.1].median())
        if 0 < left < MOST_LEFT and near(a * (1 - left) + b, one):
            return "flow", 1 - left
    if float((a / a.median() - 1).abs().max()) <= close:
        return "ve", float(a.median())
    if bool((a > 0).all()):
        # c_in = 1 / sqrt(sigma^2 + s^2): 1 / a^2 - (b / a)^2 = s^2
        s2 = (1 - b * b) / (a * a)
        chosen = s2[b < 0.95] if bool((b < 0.95).any()) else s2
        middle = float(chosen.median())
        if middle > 0 and near(a * a * middle + b * b, one) and float(b.max() - b.min()) > 0.05:
            return "edm", middle**0.5
    return "", 1.0

"""The noising and the loss of DDPM, of EDM2, and of flow matching: formulas written once more, from the papers alone."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DDPM:
    """x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise (Ho et al. 2020, eq. 4), with timesteps that are equally likely.

    Args:
        alphas_cumprod: abar, float64 [T].
        prediction_type: "epsilon", "sample" or "v_prediction" (Salimans & Ho 2022).
        snr_gamma: of min-SNR (Hang et al. 2023, section 3.4). None: max(SNR, 1) for images, 1 for the others.
    """

    alphas_cumprod: Tensor
    prediction_type: str
    snr_gamma: float | None = None
    learned = False

    @property
    def possible(self) -> int:
        return len(self.alphas_cumprod)

    def input(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        alphas = self.alphas_cumprod[levels.long().clamp(0, self.possible - 1)]
        return alphas.sqrt(), (1 - alphas).sqrt()

    def told(self, levels: Tensor) -> Tensor:
        return levels.double()

    def target(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.input(levels)
        zero, one = torch.zeros_like(a), torch.ones_like(a)
        return {"epsilon": (zero, one), "sample": (one, zero), "v_prediction": (-b, a)}[self.prediction_type]

    def weight(self, levels: Tensor) -> Tensor:
        a, b = self.input(levels)
        snr = a.square() / b.square()
        if self.snr_gamma is None:
            return snr.clamp(min=1.0) if self.prediction_type == "sample" else torch.ones_like(snr)
        of_image = snr.clamp(max=self.snr_gamma)
        return of_image / {"epsilon": snr, "sample": torch.ones_like(snr), "v_prediction": snr + 1}[self.prediction_type]

    def places(self, levels: Tensor) -> Tensor:
        return (levels.double() + 0.5) / self.possible


@dataclass(frozen=True)
class EDM2:
    """x = y + sigma n, D = c_skip x + c_out F(c_in x; ln(sigma) / 4) (Karras et al. 2022, table 1), and the loss of Karras et
    al. 2024, eq. 14, with ln sigma normally distributed. All is said of F."""

    sigma_data: float
    P_mean: float
    P_std: float
    learned, possible = True, 0

    def input(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        sigma = levels.double()
        c_in = (sigma**2 + self.sigma_data**2).rsqrt()
        return c_in, c_in * sigma

    def told(self, levels: Tensor) -> Tensor:
        return levels.double().log() / 4

    def target(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """(y - c_skip x) / c_out."""
        sigma = levels.double()
        size = (sigma**2 + self.sigma_data**2).sqrt()
        return sigma / (self.sigma_data * size), -self.sigma_data / size

    def weight(self, levels: Tensor) -> Tensor:
        """lambda c_out^2, which is 1 at each level."""
        return torch.ones_like(levels, dtype=torch.float64)

    def places(self, levels: Tensor) -> Tensor:
        return torch.special.ndtr((levels.double().log() - self.P_mean) / self.P_std)


@dataclass(frozen=True)
class Flow:
    """x = (1 - sigma) y + sigma n with sigma = t / 1000 (Lipman et al. 2023, with time reversed), and the error of the velocity
    n - y; that of a predicted image is its error over sigma (Li & He 2025). Sigma is uniform, or logit-normal with `P_mean`."""

    prediction_type: str  # "v_prediction" or "sample"
    P_mean: float | None = None
    P_std: float = 1.0
    learned, possible, steps, least = False, 0, 1000, 0.05

    def input(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        sigma = levels.double() / self.steps
        return 1 - sigma, sigma

    def told(self, levels: Tensor) -> Tensor:
        return levels.double()

    def target(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(levels, dtype=torch.float64)
        return (one, 0 * one) if self.prediction_type == "sample" else (-one, one)

    def weight(self, levels: Tensor) -> Tensor:
        sigma = levels.double() / self.steps
        return torch.ones_like(sigma) if self.prediction_type != "sample" else 1 / sigma.clamp(min=self.least) ** 2

    def places(self, levels: Tensor) -> Tensor:
        sigma = levels.double() / self.steps
        return sigma if self.P_mean is None else torch.special.ndtr((torch.logit(sigma) - self.P_mean) / self.P_std)


def ema_decay(limit: float, inverse_gamma: float, power: float, update: int) -> float:
    """Returns the decay of the n-th update of an average that warms up, as diffusers has it: 0 at the first one."""
    return 0.0 if update <= 1 else min(limit, 1 - (1 + (update - 1) / inverse_gamma) ** -power)


def power_exponent(width: float) -> float:
    """Returns the exponent g of the average with the relative width sqrt((g + 1) / ((g + 2)^2 (g + 3))) (Karras et al. 2024,
    eq. 126), by halves: the width falls with it. The decay of its n-th update is (1 - 1 / n)^(g + 1), eq. 127."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        is_wider = (middle + 1) / ((middle + 2) ** 2 * (middle + 3)) > width**2
        low, high = (middle, high) if is_wider else (low, middle)
    return (low + high) / 2


class AdaptiveLimit:
    """The limit of a gradient's norm that follows the run: twice the running mean of the norms, within 0.1 to 10. The mean
    begins with the first norm, and each of the others moves it by a hundredth of the way. A norm counts as 10 at most; one that
    is not finite does not count."""

    def __init__(self, mean: float | None):
        """`mean`: of a run that goes on; None where none was counted yet."""
        self._mean = mean
        self._norms: list[Tensor] = []

    def count(self, norm: Tensor) -> None:
        """Of one update, 0-dim; read when `mean` or `limit` is asked for."""
        self._norms.append(norm)

    def mean(self) -> float | None:
        for norm in torch.stack(self._norms).tolist() if self._norms else ():
            if math.isfinite(norm):
                counted = min(norm, 10.0)
                self._mean = counted if self._mean is None else 0.99 * self._mean + 0.01 * counted
        self._norms.clear()
        return self._mean

    def limit(self) -> float:
        """Of the next update; 10 where no norm was counted."""
        mean = self.mean()
        return 10.0 if mean is None else min(max(2 * mean, 0.1), 10.0)

"""What one update cannot tell: distributions over all that was seen of a run, and repetitions."""

import math

import torch

from utils.diagnostics.audit.declared import Declared
from utils.diagnostics.audit.observer import fingerprint
from utils.diagnostics.audit.verdict import Check

SIGMAS = 7.0  # beyond which chance does not lie in the looks of any run
ROOM = 2e-3  # of what the arithmetic of random numbers leaves beside chance
_MOST = 1 << 16  # noise levels and labels that are kept


class Pool:
    """Sums over a run of what was drawn; the host reads them when `checks` is called."""

    def __init__(self, declared: Declared):
        self._declared = declared
        self._noise: list[torch.Tensor] = []
        self._levels: list[torch.Tensor] = []
        self._kept = 0
        self._digests: set[int] = set()
        self._repeated = self._seen = 0

    def add_levels(self, levels: torch.Tensor) -> None:
        """Timesteps or sigmas [B] of one micro step."""
        if self._kept < _MOST:
            self._kept += levels.numel()
            self._levels.append(levels.detach().reshape(-1))

    @torch.no_grad()
    def add_noise(self, noise: torch.Tensor) -> None:
        """The noise [B, C, H, W] of one audited micro step."""
        values = noise.detach().float()
        batch, channels = values.shape[:2]
        size = values[0].numel()
        sums = [values.numel(), values.sum(), values.square().sum(), values.pow(4).sum()]
        down, across = (values[:, :, 1:] * values[:, :, :-1]), (values[..., 1:] * values[..., :-1])
        sums += [down.numel(), down.sum(), across.numel(), across.sum()]
        between = (values[:, 1:] * values[:, :-1]) if channels > 1 else values.new_zeros(1)
        sums += [between.numel() if channels > 1 else 0, between.sum()]
        # Of images: their joint sum has the variance `batch` in each pixel, and each one's mean the variance 1 / size.
        sums += [
            size if batch > 1 else 0,
            values.sum(0).square().sum() / batch,
            batch,
            values.flatten(1).mean(1).square().sum() * size,
        ]
        self._noise.append(torch.stack([torch.as_tensor(s).cpu().double() for s in sums]))  # in this order: MPS has no float64
        for value in fingerprint(noise).tolist() if size >= 16 else ():  # few pixels may be equal by chance
            self._seen += 1
            self._repeated += value in self._digests
            self._digests.add(value)

    def checks(self) -> list[Check]:
        return [*self._noise_checks(), *self._level_checks()]

    def _noise_checks(self) -> list[Check]:
        if not self._noise:
            return []
        total = torch.stack(self._noise).sum(0).tolist()
        count, first, second, fourth, downs, down, acrosses, across, pairs, between, size, joint, images, means = total
        if count < 200:
            return []
        mean, variance = first / count, second / count
        kurtosis = fourth / count / variance**2 if variance else math.nan
        figures = [
            ("mean", mean, 0.0, 1 / math.sqrt(count), "its mean is {:.3g}, not 0"),
            ("variance", variance, 1.0, math.sqrt(2 / count), "its variance is {:.3g}, not 1"),
            ("kurtosis", kurtosis, 3.0, math.sqrt(96 / count), "its kurtosis is {:.3g}, not the 3 of normal numbers"),
        ]
        scale = variance or 1.0
        for name, sum_of, number in (("rows", down, downs), ("columns", across, acrosses), ("channels", between, pairs)):
            if number:
                text = f"neighboring {name} share it (correlation {{:.2g}})"
                figures.append((f"correlation of {name}", sum_of / number / scale, 0.0, 1 / math.sqrt(number), text))
        looks = len(self._noise)
        if size >= 64:
            spread = math.sqrt(2 / size)  # of the mean over pixels
            figures.append(
                (
                    "images together",
                    joint / size / scale,
                    1.0,
                    spread,
                    "the images of a batch share it (their sum has {:.3g} times the variance)",
                )
            )
        if images >= 64:
            text = "the pixels of an image share it (offset noise? {:.3g} times the variance)"
            figures.append(("mean of each image", means / images / scale, 1.0, math.sqrt(2 / images), text))
        said, healthy = [], True
        for _, value, wanted, spread, text in figures:
            if not abs(value - wanted) <= SIGMAS * spread * (1.5 if spread > 0.1 else 1.0) + ROOM:
                said.append(text.format(value))
        if self._repeated:
            said.append(f"{self._repeated} of {self._seen} images have noise that was there before")
        healthy = not said
        observed = f"mean {mean:.2g}, variance {variance:.4g}, kurtosis {kurtosis:.3g} over {looks} looks"
        return [Check("noise", "noise", "independent, mean 0, variance 1, normal", observed, healthy, "; ".join(said))]

    def _level_checks(self) -> list[Check]:
        if not self._levels:
            return []
        self._levels = [torch.cat(self._levels)]
        levels = self._levels[0].cpu().double()
        count = len(levels)
        if count < 64:
            return []
        limit = math.sqrt(math.log(2e12) / 2 / count)  # of the distance of two distributions, by chance 1e-12
        if self._declared.noising is not None:
            steps = self._declared.noising.steps
            places = (levels + 0.5) / steps
            wanted, said = (
                f"uniform from 0 to {steps - 1}",
                f"{levels.min():.0f} to {levels.max():.0f}, mean {levels.mean():.4g}",
            )
        else:
            formula = self._declared.denoising
            normal = (levels.log() - formula.P_mean) / formula.P_std
            places = torch.special.ndtr(normal)
            wanted = f"ln sigma normal, mean {formula.P_mean:g}, standard deviation {formula.P_std:g}"
            said = f"mean {levels.log().mean():.4g}, standard deviation {levels.log().std():.4g}"
        ordered = places.sort().values
        ranks = torch.arange(1, count + 1, dtype=torch.float64) / count
        distance = float(torch.maximum((ranks - ordered).abs(), (ranks - 1 / count - ordered).abs()).max())
        step = 0.0 if self._declared.noising is None else 1 / self._declared.noising.steps
        center, spread = float(places.mean()) - 0.5, float(places.var()) * 12 - 1
        fine = distance <= limit + step and abs(center) <= SIGMAS / math.sqrt(12 * count) + step
        fine = fine and abs(spread) <= SIGMAS * math.sqrt(0.8 / count) + 2 * step + ROOM
        stage, name = "timestep", "distribution of the noise levels"
        text = f"{count} noise levels are not drawn as declared: {said}, declared {wanted}"
        return [Check(stage, name, wanted, said, fine, text)]

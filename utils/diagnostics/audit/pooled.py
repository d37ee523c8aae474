"""What one update cannot tell: distributions over all that was seen of a run, and repetitions."""

import hashlib
import math
from collections import Counter

import torch

from utils.diagnostics.audit.declared import Declared
from utils.diagnostics.audit.elements import fingerprint
from utils.diagnostics.audit.verdict import Check

SIGMAS = 7.0  # beyond which chance does not lie in the looks of any run
ROOM = 2e-3  # of what the arithmetic of random numbers leaves beside chance
_MOST = 1 << 16  # noise levels and labels that are kept


class Pool:
    """What was drawn over a run, summed up."""

    def __init__(self, declared: Declared):
        self._declared = declared
        self._counts: Counter[str] = Counter()  # what was seen of the noise
        self._sums: Counter[str] = Counter()
        self._looks = 0
        self._levels: list[torch.Tensor] = []
        self._batch = 0  # noise levels of a micro step, where all have as many; -1 where they differ
        self._kept = 0
        self._passes: Counter[bytes] = Counter()  # states of torch's generator in which the network's passes began
        self._digests: set[int] = set()
        self._repeated = self._seen = 0

    def add_levels(self, levels: torch.Tensor) -> None:
        """Timesteps or sigmas [B] of one micro step."""
        if self._kept < _MOST:
            self._kept += levels.numel()
            self._levels.append(levels.detach().reshape(-1))
            self._batch = levels.numel() if self._batch in (0, levels.numel()) else -1

    @torch.no_grad()
    def add_noise(self, noise: torch.Tensor, images: torch.Tensor | None = None) -> None:
        """The noise [B, C, H, W] of one audited micro step, and the `images` that it is added to."""
        values = noise.detach().float()
        batch, size = len(values), values[0].numel()
        totals = {  # (sum, number)
            "values": _total(values),
            "squares": _total(values.square()),
            "fourth powers": _total(values.pow(4)),
            "rows": _total(values[:, :, 1:] * values[:, :, :-1]),
            "columns": _total(values[..., 1:] * values[..., :-1]),
            "channels": _total(values[:, 1:] * values[:, :-1]),
            # The sum of the images has the variance `batch` in each pixel, and the mean of each one the variance 1 / size.
            "sum of images": _total(values.sum(0).square() / batch if batch > 1 else values.new_zeros(0)),
            "means of images": _total(values.flatten(1).mean(1).square() * size),
            "variances of images": _total((values.flatten(1).square().mean(1) - 1).square() * (size / 2)),
            "shares of the image": _total(values.new_zeros(0) if images is None else _shares(values, images)),
        }
        sums = torch.stack([total for total, _ in totals.values()]).tolist()
        self._sums.update(dict(zip(totals, sums)))
        self._counts.update({name: number for name, (_, number) in totals.items()})
        self._looks += 1
        # Alike for noise of another sign, or whose pixels or channels are exchanged. Few pixels may be equal by chance.
        for value in fingerprint(values.flatten(1).abs().sort(1).values).tolist() if size >= 16 else ():
            self._seen += 1
            self._repeated += value in self._digests
            self._digests.add(value)

    def add_passes(self, states: list[torch.Tensor | None]) -> None:
        """Of torch's generator, when forward passes with dropout began."""
        self._passes.update(hashlib.sha256(state.cpu().numpy().tobytes()).digest() for state in states if state is not None)

    def checks(self) -> list[Check]:
        return [*self._noise_checks(), *self._level_checks(), *self._pass_checks()]

    def _pass_checks(self) -> list[Check]:
        count = self._passes.total()
        if count < 2:
            return []
        wanted, found = "drawn anew in each pass", f"{len(self._passes)} different ones in {count} passes"
        text = f"dropout leaves out the same activations in several passes: {found}"
        return [Check("network", "random numbers of dropout", wanted, found, len(self._passes) == count, text)]

    def _noise_checks(self) -> list[Check]:
        numbers = self._counts
        count = numbers["values"]
        if count < 200:
            return []
        means = {name: self._sums[name] / number for name, number in numbers.items() if number}
        mean, variance = means["values"], means["squares"]
        kurtosis, scale = means["fourth powers"] / variance**2 if variance else math.nan, variance or 1.0
        figures = [  # each with its mean and spread by chance
            (mean, 0.0, 1 / math.sqrt(count), "its mean is {:.3g}, not 0"),
            (variance, 1.0, math.sqrt(2 / count), "its variance is {:.3g}, not 1"),
            (kurtosis, 3.0, math.sqrt(96 / count), "its kurtosis is {:.3g}, not the 3 of normal numbers"),
        ]
        for name in ("rows", "columns", "channels"):
            if numbers[name]:
                text = f"neighboring {name} share it (correlation {{:.2g}})"
                figures.append((means[name] / scale, 0.0, 1 / math.sqrt(numbers[name]), text))
        for name, text in (
            ("sum of images", "the images of a batch share it (their sum has {:.3g} times the variance)"),
            ("means of images", "the pixels of an image share it (offset noise? {:.3g} times the variance)"),
            ("variances of images", "its size differs from image to image (by {:.3g} times as much as by chance)"),
            ("shares of the image", "it depends on the image that it is added to ({:.3g} times as much as by chance)"),
        ):
            if numbers[name] >= 64:
                value = means[name] / (scale if name.endswith("of images") and "variances" not in name else 1.0)
                figures.append((value, 1.0, math.sqrt(2 / numbers[name]), text))
        said = [
            text.format(value)
            for value, wanted, spread, text in figures
            if not abs(value - wanted) <= SIGMAS * spread * (1.5 if spread > 0.1 else 1.0) + ROOM
            or (wanted == 1.0 and _too_small(value, spread))
        ]
        if self._repeated:
            said.append(f"{self._repeated} of {self._seen} images have noise that an earlier image had, the same or rearranged")
        observed = f"mean {mean:.2g}, variance {variance:.4g}, kurtosis {kurtosis:.3g} over {self._looks} looks"
        return [Check("noise", "noise", "independent, mean 0, variance 1, normal", observed, not said, "; ".join(said))]

    def _level_checks(self) -> list[Check]:
        self._levels = [torch.cat(self._levels)] if self._levels else []
        if not self._levels or (count := len(self._levels[0])) < 64:
            return []
        levels, noising, denoising = self._levels[0].cpu().double(), self._declared.noising, self._declared.denoising
        places = self._places(levels)
        if noising is not None:
            step = 1 / noising.steps
            wanted = f"uniform from 0 to {noising.steps - 1}"
            said = f"{levels.min():.0f} to {levels.max():.0f}, mean {levels.mean():.4g}"
        else:
            step, logs = 0.0, levels.log()
            wanted = f"ln sigma normal, mean {denoising.P_mean:g}, standard deviation {denoising.P_std:g}"
            said = f"mean {logs.mean():.4g}, standard deviation {logs.std():.4g}"
        # `places` are uniform from 0 to 1 where the levels are as declared.
        limit = math.sqrt(math.log(2e12) / 2 / count)  # of the distance of two distributions, by chance 1e-12
        ranks = torch.arange(1, count + 1, dtype=torch.float64) / count
        below = ranks - places.sort().values
        distance = float(torch.maximum(below.abs(), (below - 1 / count).abs()).max())
        center, spread = float(places.mean()) - 0.5, float(places.var()) * 12 - 1
        fine = distance <= limit + step and abs(center) <= SIGMAS / math.sqrt(12 * count) + step
        fine = fine and abs(spread) <= SIGMAS * math.sqrt(0.8 / count) + 2 * step + ROOM
        text = f"{count} noise levels are not drawn as declared: {said}, declared {wanted}"
        distinct = len(self._levels[0].unique())
        if distinct < _fewest_distinct(count, noising.steps if noising is not None else 1 << 20):
            fine, text = False, f"noise levels repeat: there are {distinct} different ones in {count}"
        return [Check("timestep", "distribution of the noise levels", wanted, said, fine, text)]

    def _places(self, levels: torch.Tensor) -> torch.Tensor:
        """Numbers that are uniform from 0 to 1 where the noise levels are drawn as declared."""
        if (noising := self._declared.noising) is not None:
            return (levels + 0.5) / noising.steps
        denoising = self._declared.denoising
        return torch.special.ndtr((levels.log() - denoising.P_mean) / denoising.P_std)

    def independence(self) -> list[Check]:
        """Whether each noise level is drawn by itself. To be asked after `checks`."""
        if not self._levels or self._batch < 2 or len(self._levels[0]) < 64 * self._batch:
            return []
        batches = self._levels[0].cpu().double().reshape(-1, self._batch)
        how = _dependence(self._places(batches))
        name, wanted = "noise levels of a batch", "each drawn by itself"
        text = f"noise levels are not drawn independently: {how}"
        return [Check("timestep", name, wanted, how or f"no sign of another in {len(batches)} batches", not how, text)]


def _fewest_distinct(count: int, possible: int) -> float:
    """Of `count` independent numbers of so many `possible` ones, each as likely."""
    absent = math.exp(count * math.log1p(-1 / possible))  # chance of each that it does not come
    return possible * (1 - absent) - SIGMAS * math.sqrt(possible * absent * (1 - absent)) - 1


def _dependence(places: torch.Tensor) -> str:
    """How numbers [batches, B] that are uniform from 0 to 1 depend on each other; empty where chance explains it."""
    together = (places - 0.5) * 12**0.5
    count, batch = together.shape
    of_means = math.log(max(float(together.mean(1).square().mean()) * batch, 1e-30))
    if abs(of_means) > 1.5 * SIGMAS * math.sqrt(2 / count):
        return f"means of batches vary {math.exp(of_means):.2g} times as much as by chance"
    half = batch // 2
    pairs = {
        "neighbors in a batch": (together[:, 1:], together[:, :-1]),
        "the first and the last in a batch": (together[:, :half], together.flip(1)[:, :half]),
        "the two halves of a batch": (together[:, :half], together[:, batch - half :]),
        "the same places of two batches": (together[1:], together[:-1]),
    }
    for name, (one, other) in pairs.items():
        correlation = float((one * other).mean())
        if abs(correlation) > SIGMAS / math.sqrt(one.numel()):
            return f"those of {name} are correlated ({correlation:.2g})"
    return ""


def _shares(noise: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Squares of the noise's component along each image that is not black, [n]; 1 in the mean where they are independent."""
    lines = images.detach().float().flatten(1)
    sizes = lines.norm(dim=1)
    clear = sizes > 1e-3 * lines.shape[1] ** 0.5
    return ((noise.flatten(1) * lines).sum(1)[clear] / sizes[clear]).square()


def _too_small(value: float, spread: float) -> bool:
    """Whether chance leaves a mean of 2 / spread^2 squares of normal numbers so far below 1 (Chernoff's bound). Few of them are
    often as far above it."""
    value = max(value, 0.0) + ROOM
    return value < 1 and (value - 1 - math.log(value)) / spread**2 > SIGMAS**2 / 2


def _total(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    return values.sum(), values.numel()

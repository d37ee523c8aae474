"""What a sampler makes of a network that knows the answer.

The oracle knows one image. Asked about a noisy image x at any noise level, it answers the noise, the clean image or v that x
and the known image imply under the schedule that was trained. A sampler that takes the output for what it is, and steps along
that schedule, then ends at that image. On its way it shows the network nothing but the image with noise of its level.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from steady_doctor.found import Found

NUMBERS = 4096  # of noise in a batch: their spread is known to 1.1 %
SIGMAS = 7.0  # how far chance may lead
ROUNDING = 2.0**-24  # of fp32, relative
# Measured for all samplers, prediction types and schedules: 2e-7 is left at the end. The noise on the way is off by 8e-6
# (DDIM), by chance alone (DDPM), by 4e-4 (DPM-Solver++ with epsilon: at the cosine's end it divides rounding by a) and by 7e-5
# (EDM's two).
END_TOLERANCE, STEP_TOLERANCE = 1e-4, 5e-3


@dataclass(frozen=True)
class Process:
    """What was trained: x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise, or EDM's x = y + sigma n with its preconditioning, or
    flow matching's x = (1 - sigma) y + sigma n."""

    alphas_cumprod: Tensor | None = None  # float64 [T]; None: EDM's or flow matching's
    prediction_type: str = "epsilon"  # or sample, v_prediction
    sigma_data: float = 0.5
    flow: bool = False


class Oracle(nn.Module):
    """In the place of the network. It notes what it is asked: `asked` has (a, b, level, x) with x = a image + b noise, float64
    on the CPU. Of EDM's process it answers F of the preconditioning."""

    def __init__(self, image: Tensor, process: Process):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(()))  # samplers ask a network for its device
        self.image, self.process = image.double(), process
        self.asked: list[tuple[float, float, float, Tensor]] = []
        self.outside: float | None = None  # a timestep that was never trained

    def forward(self, x: Tensor, level: Tensor | float, *labels: Any, **others: Any) -> SimpleNamespace:
        told, seen = float(torch.as_tensor(level).reshape(-1)[0]), x.cpu().double()
        answers = self._of_flow if self.process.flow else self._edm if self.process.alphas_cumprod is None else self._of_chain
        answer = answers(seen, told)
        return SimpleNamespace(sample=answer.to(x.dtype).to(x.device))

    def _edm(self, x: Tensor, level: float) -> Tensor:
        sigma_data = self.process.sigma_data
        if not -10.0 < level < 5.0:  # ln(sigma) / 4
            self.outside, level = level, min(max(level, -10.0), 5.0) if math.isfinite(level) else 0.0
        sigma, variance = math.exp(4.0 * level), math.exp(8.0 * level) + sigma_data**2
        x = x * variance**0.5  # c_in undone
        self.asked.append((1.0, sigma, sigma, x))
        return (self.image - sigma_data**2 / variance * x) * variance**0.5 / (sigma * sigma_data)

    def _of_flow(self, x: Tensor, level: float) -> Tensor:
        sigma = level / 1000
        if not 0.0 < sigma <= 1.0:
            self.outside, sigma = level, min(max(sigma, 1e-3), 1.0) if math.isfinite(level) else 1.0
        self.asked.append((1 - sigma, sigma, sigma, x))
        return self.image.expand_as(x) if self.process.prediction_type == "sample" else (x - self.image) / sigma

    def _of_chain(self, x: Tensor, level: float) -> Tensor:
        table: Any = self.process.alphas_cumprod
        index = round(level) if math.isfinite(level) else -1
        if index != level or not 0 <= index < len(table):
            self.outside, index = level, min(max(index, 0), len(table) - 1)
        abar = float(table[index])
        a, b = abar**0.5, (1.0 - abar) ** 0.5
        self.asked.append((a, b, index, x))
        noise = (x - a * self.image) / b
        answers = {"epsilon": noise, "sample": self.image.expand_as(x), "v_prediction": a * noise - b * self.image}
        return answers[self.process.prediction_type]


def known_image(shape: tuple[int, int, int]) -> Tensor:
    """[C, H, W] from -1 to 1, both ends included, another ramp in each channel."""
    ramp = torch.linspace(-1.0, 1.0, math.prod(shape[1:])).reshape(shape[1:])
    return torch.stack([ramp, ramp.flip(0, 1), ramp.flip(1)][: shape[0]] * -(-shape[0] // 3))[: shape[0]].contiguous()


def sampler(
    call: Callable[[nn.Module, int], Tensor],
    process: Process,
    shape: tuple[int, int, int],
    update: int,
    *,
    adds_noise: bool = False,
    clips: bool = False,
) -> Iterator[Found]:
    """`call(oracle, count)` samples `count` images [count, C, H, W] with the oracle in the network's place.

    `adds_noise`: whether the sampler draws new noise at each step, as DDPM's does, with the variance of the true posterior.
    `clips`: whether it is meant to keep the denoised image within [-1, 1]; an answer beyond it is then tried as well. Only the
    first thing that is wrong is found: what follows from it is not looked at. Silent where the network is hardly asked.
    """
    count, image = max(4, math.ceil(NUMBERS / math.prod(shape))), known_image(shape)

    def ask(known: Tensor) -> tuple[Oracle, Tensor]:
        oracle = Oracle(known, process)
        with torch.no_grad():
            return oracle, call(oracle, count).cpu().double()

    oracle, images = ask(image)
    if len(oracle.asked) < 2:
        return
    for one in (_told(oracle), _start(oracle), _end(images, image), _steps(oracle, adds_noise)):
        if one is not None:
            yield Found(one.code, update, one.figures)
            return
    if clips and not (share := _clipped(ask(3.0 * image)[0])) > 0.5:
        yield Found("export-sampler-clipping", update, {"share": share})


def _told(oracle: Oracle) -> Found | None:
    levels, table = [level for _, _, level, _ in oracle.asked], oracle.process.alphas_cumprod
    rising = any(later > earlier * (1 + 1e-6) for earlier, later in pairwise(levels))
    late = table is not None and table[-1] == 0.0 and levels[0] != len(table) - 1  # the last one has nothing of the image
    if oracle.outside is None and not rising and not late:
        return None
    figures = {"first": levels[0], "last": levels[-1], "never": "-" if oracle.outside is None else f"{oracle.outside:g}"}
    return Found("export-sampler-levels", 0, figures)


def _start(oracle: Oracle) -> Found | None:
    _, sigma, _, x = oracle.asked[0]
    noise = x / (sigma if oracle.process.alphas_cumprod is None else 1.0)
    mean, spread = noise.mean().item(), noise.var(0).mean().sqrt().item()  # alike in all images: no spread
    near = abs(mean) < SIGMAS / noise.numel() ** 0.5 and abs(spread - 1.0) < SIGMAS / (2 * noise.numel()) ** 0.5
    return None if near else Found("export-sampler-start", 0, {"mean": mean, "spread": spread})


def _end(images: Tensor, image: Tensor) -> Found | None:
    off = (images - image.double()).abs().max().item()
    if off <= END_TOLERANCE:
        return None
    return Found("export-sampler-end", 0, {"off": off, "low": images.min().item(), "high": images.max().item()})


def _steps(oracle: Oracle, adds_noise: bool) -> Found | None:
    """What a step keeps of the noise and what it adds, in units of the next level's noise: as the true posterior does (Ho et
    al. 2020, eq. 7), or all and none where nothing is random."""
    shares, b_before, numbers = list[float](), 0.0, oracle.asked[0][3].numel()
    for (a, b, _, x), (a_next, b_next, level, x_next) in pairwise(oracle.asked):
        before, after = (x - a * oracle.image) / b, (x_next - a_next * oracle.image) / b_next
        size = before.square().mean().sqrt().item()
        kept = ((before * after).sum() / before.square().sum()).item()
        added = (after - kept * before).square().mean().sqrt().item()
        wanted = min(1.0, a / a_next * b_next / b) if adds_noise else 1.0
        wanted_added = (1.0 - wanted**2) ** 0.5
        # A corrector multiplies the rounding of the image, 1, by step / level, and the noise is as small as that level.
        allowed = SIGMAS * wanted_added / numbers**0.5 + ROUNDING * max(b_before, b) / b_next**2
        if not max(abs(kept - wanted) - allowed / min(size, 1.0), abs(added - wanted_added) - allowed) <= STEP_TOLERANCE:
            wished = {"wanted": wanted, "wanted_added": wanted_added}
            return Found("export-sampler-steps", 0, {"level": level, "kept": kept, "added": added, **wished})
        b_before, shares = b, shares + ([added / wanted_added] if wanted_added > 0.05 else [])
    share = sum(shares) / len(shares) if shares else 1.0
    if shares and abs(share - 1.0) > STEP_TOLERANCE + SIGMAS / (2 * numbers * len(shares)) ** 0.5:  # known better by all steps
        return Found("export-sampler-noise", 0, {"share": share})
    return None


def _clipped(oracle: Oracle) -> float:
    """The share of a clipped image in where the sampler steps, told of one that is three times too strong."""
    shares = []
    noisiest = sorted((b for _, b, _, _ in oracle.asked), reverse=True)[len(oracle.asked) // 2]
    for (_, b, _, x), (_, _, _, x_next) in pairwise(oracle.asked):
        if b >= noisiest:  # else x is the image, and the fit cannot tell them apart
            unclipped = oracle.image.expand_as(x)
            columns = torch.stack([x, unclipped.clamp(-1.0, 1.0), unclipped]).flatten(1).T
            _, clipped, strong = torch.linalg.lstsq(columns, x_next.flatten()[:, None]).solution[:, 0].tolist()
            shares.append(clipped / (clipped + strong))
    return sorted(shares)[len(shares) // 2]

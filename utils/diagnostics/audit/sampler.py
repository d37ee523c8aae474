"""What a sampler makes of a network that knows the answer.

The oracle knows one image. Asked about a noisy image x at any noise level, it answers the noise, the clean image or v that x
and the known image imply under the declared schedule. A sampler that takes the output for what it is, and steps along the
schedule that was trained, then ends at that image. On its way it shows the network nothing but the image with noise of the
declared level.
"""

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from utils.core.errors import UserError
from utils.diagnostics.audit.declared import DeclaredDenoising, DeclaredNoising, DeclaredProcess
from utils.diagnostics.audit.elements import judged_on
from utils.diagnostics.audit.fitting import ROUNDING
from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diffusion.objective import Objective
from utils.diffusion.sampling import SamplePlan, make_sampler, sample, set_timesteps

NUMBERS = 4096  # of noise in a batch: their spread is known to 1.1 %
SIGMAS = 7.0  # how far chance may lead
MOST_STEPS = 25
# Measured for all samplers, prediction types and schedules: 2e-7 is left at the end. The noise on the way is off by 8e-6
# (DDIM), by chance alone (DDPM), by 4e-4 (DPM-Solver++ with epsilon: at the cosine's end it divides rounding by a) and by 7e-5
# (EDM's two).
END_TOLERANCE, STEP_TOLERANCE = 1e-4, 5e-3
PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")


class Oracle(nn.Module):
    """In the place of the network. It notes what it is asked: `asked` has (a, b, level, x) with x = a image + b noise. Of EDM's
    process it answers F of the preconditioning."""

    def __init__(self, image: torch.Tensor, declared: DeclaredProcess):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(()))  # samplers ask a network for its device
        self.image, self.declared = image.double(), declared
        self.asked: list[tuple[float, float, float, torch.Tensor]] = []
        self.outside: float | None = None  # a timestep that was never trained

    def forward(self, x: torch.Tensor, level: torch.Tensor | float, *labels: Any, **others: Any) -> SimpleNamespace:
        level = float(torch.as_tensor(level).reshape(-1)[0])
        wide = x.to(judged_on(x.device)).double()
        image = self.image.to(wide.device)
        if isinstance(self.declared, DeclaredDenoising):
            sigma_data = self.declared.sigma_data
            if not -10.0 < level < 5.0:  # ln(sigma) / 4
                self.outside, level = level, min(max(level, -10.0), 5.0) if math.isfinite(level) else 0.0
            sigma, variance = math.exp(4.0 * level), math.exp(8.0 * level) + sigma_data**2
            wide = wide * variance**0.5  # c_in undone
            self.asked.append((1.0, sigma, sigma, wide))
            answer = (image - sigma_data**2 / variance * wide) * variance**0.5 / (sigma * sigma_data)
            return SimpleNamespace(sample=answer.to(x.dtype).to(x.device))
        index = round(level) if math.isfinite(level) else -1
        if index != level or not 0 <= index < self.declared.steps:
            self.outside = level
            index = min(max(index, 0), self.declared.steps - 1)
        abar = float(self.declared.alphas_cumprod[index])
        a, b = abar**0.5, (1.0 - abar) ** 0.5
        self.asked.append((a, b, index, wide))
        noise = (wide - a * image) / b
        answer = {"epsilon": noise, "sample": image.expand_as(wide), "v_prediction": a * noise - b * image}
        return SimpleNamespace(sample=answer[self.declared.prediction_type].to(x.dtype).to(x.device))


def sampler_call(objective: Objective, name: str, steps: int, seed: int = 0) -> Callable:
    """Training's way to sample, as `check_sampler` wants it: a function of (oracle, number of images) that returns images."""

    def call(oracle: nn.Module, count: int) -> torch.Tensor:
        stand_in = copy(objective)  # so that its `predict` asks the oracle
        stand_in.exported = oracle
        scheduler = make_sampler(name, objective.noise_scheduler)
        image: Any = oracle.image
        plan = SamplePlan(scheduler, _few_steps(scheduler, steps), tuple(image.shape), seed, count, image.device)
        return sample(oracle, plan, torch.arange(count), predict=stand_in.predict)

    return call


def _few_steps(scheduler: Any, steps: int) -> int:
    """`steps`, or at most 25 that this sampler can do: what a step does does not depend on their number."""
    for count in (min(steps, MOST_STEPS), *range(MOST_STEPS, 0, -1)):
        try:
            set_timesteps(scheduler, count)
            return count
        except UserError:
            continue
    return steps


def known_image(shape: tuple[int, int, int]) -> torch.Tensor:
    """[C, H, W] from -1 to 1, both ends included, another ramp in each channel."""
    ramp = torch.linspace(-1.0, 1.0, math.prod(shape[1:])).reshape(shape[1:])
    return torch.stack([ramp, ramp.flip(0, 1), ramp.flip(1)][: shape[0]] * -(-shape[0] // 3))[: shape[0]].contiguous()


def check_sampler(
    call: Callable[[nn.Module, int], torch.Tensor],
    declared: DeclaredProcess,
    shape: tuple[int, int, int] = (3, 8, 8),
    *,
    adds_noise: bool = False,
    clips: bool = False,
) -> list[Check]:
    """`call(oracle, count)` samples `count` images [count, C, H, W] with the oracle in the network's place.

    `adds_noise`: whether the sampler draws new noise at each step, as DDPM's does, with the variance of the true posterior.
    `clips`: whether it is declared to keep the denoised image within [-1, 1]; an answer beyond it is then tried as well. Only
    the first thing that is wrong is told.
    """
    count = max(4, math.ceil(NUMBERS / math.prod(shape)))
    image = known_image(shape)

    def ask(process: DeclaredProcess, scale: float = 1.0) -> tuple[Oracle, torch.Tensor]:
        oracle = Oracle(scale * image, process)
        with torch.no_grad():
            return oracle, call(oracle, count).cpu().double()

    oracle, images = ask(declared)
    if len(oracle.asked) < 2:
        return [not_observed("export", "sampler", "asks the network at each step", f"it asked {len(oracle.asked)} times")]
    checks = [_told(oracle), _start(oracle), _end(images, image), _steps(oracle, adds_noise)]
    if clips and all(check.healthy for check in checks):
        checks.append(_clipping(ask(declared, 3.0)[0]))
    first = next((k for k, check in enumerate(checks) if not check.healthy), len(checks))
    if first < len(checks) and isinstance(declared, DeclaredNoising):
        for other, cause in _known_mistakes(declared):
            oracle, images = ask(other)
            if _end(images, image).healthy and _steps(oracle, adds_noise).healthy:
                checks[first] = replace(checks[first], message=cause)
                break
    # One mistake is told once: what follows from it is not looked at.
    skipped = [not_observed("export", c.name, c.declared, f"{checks[first].name} is wrong") for c in checks[first + 1 :]]
    return checks[: first + 1] + skipped


def _known_mistakes(declared: DeclaredNoising) -> Iterator[tuple[DeclaredNoising, str]]:
    trained = declared.prediction_type
    for other_type in PREDICTION_TYPES:
        if other_type != trained:
            other = replace(declared, prediction_type=other_type)
            yield other, f"the sampler takes the network's output for {other_type}; it was trained as {trained}"
    for other in declared.others():
        if not torch.allclose(other.alphas_cumprod.sqrt(), declared.alphas_cumprod.sqrt(), atol=1e-5):
            yield other, f"the sampler steps along the schedule {other.called}, not the trained one"


def _verdict(name: str, declared: str, observed: str, message: str) -> Check:
    return Check("export", name, declared, observed, not message, message)


def _told(oracle: Oracle) -> Check:
    last, message, declared = "noise levels", "", oracle.declared
    levels = [level for _, _, level, _ in oracle.asked]
    if oracle.outside is not None:
        message = f"the sampler tells the network timestep {oracle.outside:g}, which it was never trained on"
    elif any(later > earlier * (1 + 1e-6) for earlier, later in pairwise(levels)):
        message = "the sampler's noise levels do not fall from step to step"
    elif isinstance(declared, DeclaredNoising) and declared.alphas_cumprod[-1] == 0.0 and levels[0] != declared.steps - 1:
        last = "from the last timestep"
        message = f"the sampler starts at timestep {levels[0]:g}, where the trained schedule still has some of the image"
    return _verdict("sampler's noise levels", f"{last}, falling", f"{levels[0]:.4g} to {levels[-1]:.4g}", message)


def _start(oracle: Oracle) -> Check:
    _, sigma, _, x = oracle.asked[0]
    noise = x.cpu() / (sigma if isinstance(oracle.declared, DeclaredDenoising) else 1.0)
    mean, spread = noise.mean().item(), noise.var(0).mean().sqrt().item()  # alike in all images: no spread
    message = ""
    if not (abs(mean) < SIGMAS / noise.numel() ** 0.5 and abs(spread - 1.0) < SIGMAS / (2 * noise.numel()) ** 0.5):
        message = f"the sampler starts from noise of mean {mean:.3g} and standard deviation {spread:.3g}; it should be 0 and 1"
        if spread < 1e-3 and noise.std() > 0.5:
            message = "the sampler starts all images from the same noise"
    return _verdict("sampler's first noise", "mean 0, standard deviation 1", f"{mean:.2g}, {spread:.3g}", message)


def _end(images: torch.Tensor, image: torch.Tensor) -> Check:
    image, message = image.double(), ""
    off = (images - image).abs().max().item()
    if not images.isfinite().all():
        message = "the sampler ends in NaN, though the network's answers are right"
    elif off > END_TOLERANCE:
        message = f"the sampler does not end at the image that the network's answers lead to: it is off by {off:.2g}"
        limit = images.abs().max().item()
        x, y = image.expand_as(images).flatten(), images.flatten()
        gain = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        offset = y.mean() - gain * x.mean()
        if (y - gain * x - offset).abs().max() < 0.1 * off:
            message = f"the sampler ends at {gain:.3g} times the image" + f", plus {offset:.2g}" * (abs(offset) > 1e-3)
        elif limit < 0.99 and (images - image.clamp(-limit, limit)).abs().max() < 10 * END_TOLERANCE:
            message = f"the sampler cuts its images off at {limit:.3g}"
    return _verdict("sampler's end", f"the image, within {END_TOLERANCE:g}", f"off by {off:.1g}", message)


def _steps(oracle: Oracle, adds_noise: bool) -> Check:
    """What a step keeps of the noise and what it adds, in units of the next level's noise: as the true posterior does (Ho et
    al. 2020, eq. 7), or all and none where nothing is random."""
    off, first, added_shares, b_before, numbers = 0.0, "", [], 0.0, oracle.asked[0][3].numel()
    for (a, b, _, x), (a_next, b_next, level, x_next) in pairwise(oracle.asked):
        before, after = (x - a * oracle.image) / b, (x_next - a_next * oracle.image) / b_next
        size = before.square().mean().sqrt().item()
        kept = ((before * after).sum() / before.square().sum()).item()
        added = (after - kept * before).square().mean().sqrt().item()
        wanted = min(1.0, a / a_next * b_next / b) if adds_noise else 1.0
        wanted_added = (1.0 - wanted**2) ** 0.5
        # A corrector multiplies the rounding of the image, 1, by step / level, and the noise is as small as that level.
        allowed = SIGMAS * wanted_added / numbers**0.5 + ROUNDING * max(b_before, b) / b_next**2
        off_here = max(abs(kept - wanted) - allowed / min(size, 1.0), abs(added - wanted_added) - allowed)
        if not off_here <= STEP_TOLERANCE and not first:
            first = f"toward {level:.4g} they keep {kept:.3f} of it and add {added:.3f}"
            first += f", declared {wanted:.3f} and {wanted_added:.3f}"
        off, b_before = max(off, off_here), b
        added_shares += [added / wanted_added] if wanted_added > 0.05 else []
    count = len(added_shares)
    share = sum(added_shares) / count if count else 1.0
    if count and not first and abs(share - 1.0) > STEP_TOLERANCE + SIGMAS / (2 * numbers * count) ** 0.5:
        first = f"they add {share:.3f} times the noise that they should"
    message = f"the sampler's steps leave another noise than trained: {first}" if first else ""
    observed = f"off by {off:.1g}" + (f", {share:.3f} of the new noise" if count else "")
    return _verdict("sampler's steps", "the noise of the next level", observed, message)


def _clipping(oracle: Oracle) -> Check:
    """Told of an image that is three times too strong, a sampler that clips steps toward the clipped image."""
    shares = []
    noisiest = sorted((b for _, b, _, _ in oracle.asked), reverse=True)[len(oracle.asked) // 2]
    for (_, b, _, x), (_, _, _, x_next) in pairwise(oracle.asked):
        if b >= noisiest:  # else x is the image, and the fit cannot tell them apart
            unclipped = oracle.image.expand_as(x)
            columns = torch.stack([x, unclipped.clamp(-1.0, 1.0), unclipped]).flatten(1).T
            _, clipped, strong = torch.linalg.lstsq(columns, x_next.flatten()[:, None]).solution[:, 0].tolist()
            shares.append(clipped / (clipped + strong))
    share = sorted(shares)[len(shares) // 2]
    message = ""
    if not share > 0.5:
        message = "the sampler does not keep the denoised image within [-1, 1], as it should: the network's errors add up"
    return _verdict("sampler's clipping", "within [-1, 1]", "clipped" if not message else "not clipped", message)

"""The samples of an update, and the noise schedule that their coefficients belong to."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch

from utils.diagnostics.audit.declared import Declared, DeclaredNoising, DeclaredOptimizer
from utils.diagnostics.audit.fitting import TOLERANCE, constant, flat, worst
from utils.diagnostics.watching.mixture import Mixture, family
from utils.diagnostics.watching.seen import Times


@dataclass
class Look:
    """One micro step: what went into the network and came out, and of what it was mixed."""

    x: torch.Tensor  # [B, C, ...]
    told: torch.Tensor | None  # the noise level that the network was told, float64 [B]
    output: torch.Tensor
    gradient: torch.Tensor | None  # of the loss, by the output; without the loss's scale
    mixture: Mixture
    times: Times | None = None  # whole numbers that were drawn, [B]
    noised_with: torch.Tensor | None = None  # timesteps that `add_noise` got
    moments: list[torch.Tensor] = field(default_factory=list)  # numbers drawn, one for each image, float64 [B]
    batch: int = 0  # images of the loss's mean, where it is not over those here alone
    silent: bool = False  # the script has a batch of images that are 0 everywhere
    others: list[torch.Tensor] = field(default_factory=list)  # [B, C, ...], which may be images, too
    told_to_layer: bool = False  # a linear layer gets the noise level itself, and no embedding of it
    joined: bool = False  # the network gets more channels with it, or a mask


@dataclass(frozen=True)
class Table(DeclaredNoising):
    """A noise schedule whose values are given."""

    values: torch.Tensor = field(default_factory=lambda: torch.zeros(1))

    @cached_property
    def alphas_cumprod(self) -> torch.Tensor:
        return self.values

    def others(self) -> list[DeclaredNoising]:
        return DeclaredNoising("linear", self.steps, False, self.prediction_type, None).others()


class Levels:
    """The samples of all micro steps of an update in one row, float64."""

    def __init__(self, looks: list[Look]):
        self.looks = looks
        self.a = torch.cat([look.mixture.of_clean for look in looks])
        self.b = torch.cat([look.mixture.of_noise for look in looks])
        self.residual = torch.cat([look.mixture.residual for look in looks])
        self.clean = torch.cat([look.mixture.clean for look in looks])
        self.noise = torch.cat([look.mixture.noise for look in looks])
        self.x = torch.cat([flat(look.x) for look in looks])
        told = [look.told for look in looks if look.told is not None]
        self.told = torch.cat(told) if len(told) == len(looks) else None
        self.sizes = torch.cat([torch.full((len(look.x),), float(look.batch or len(look.x))) for look in looks]).to(self.a)
        images = [look.mixture.clean_tensor for look in looks]
        self.pixels = images[0][0].numel()

    @property
    def sigma(self) -> torch.Tensor:
        return self.b / self.a.clamp(min=1e-12)

    @property
    def constant(self) -> float:
        return next((look.mixture.constant for look in self.looks if look.mixture.constant), 0.0)

    @property
    def noise_alone(self) -> bool:
        return worst(self.a) < 1e-3 and worst(self.residual) < 1e-3

    @property
    def drawn_rises(self) -> bool | None:
        """Whether the noise rises with the time that the script draws; None where no such time was seen."""
        for look in self.looks:
            levels = look.mixture.of_noise
            for moments in look.moments if len(levels) > 3 else ():
                if is_monotone(levels, moments):
                    steps = levels[moments.to(levels).argsort()].diff()
                    return float(steps.sum()) > 0
        return None

    @property
    def kind(self) -> str:
        return family(self.a, self.b)

    @cached_property
    def sigma_data(self) -> float | None:
        """Of a preconditioned input, a = 1 / sqrt(sigma^2 + sigma_data^2)."""
        squared = constant(1 / self.a**2 - self.sigma**2, 1e-2)
        return squared**0.5 if squared is not None and squared > 0 else None


def is_monotone(levels: torch.Tensor, moments: torch.Tensor) -> bool:
    """Whether levels [B] only rise, or only fall, with the moments [B]."""
    steps = levels[moments.to(levels).argsort()].diff()
    return bool((steps >= 0).all()) or bool((steps <= 0).all())


@lru_cache(maxsize=4)
def tables(steps: int) -> dict[str, torch.Tensor]:
    """Name -> alphas_cumprod, float64 [T], of the schedules that scripts use; by the names that diffusers has for its own."""

    def line(start: float, end: float) -> torch.Tensor:
        return torch.linspace(start, end, steps, dtype=torch.float64)

    moments = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    curve = torch.cos((moments + 0.008) / 1.008 * torch.pi / 2) ** 2
    cosine = 1 - curve[1:] / curve[:-1]
    betas = {
        "linear": line(1e-4, 0.02),
        "scaled_linear": line(1e-4**0.5, 0.02**0.5) ** 2,
        "squaredcos_cap_v2": cosine.clamp(0, 0.999),
        "sigmoid": line(-6, 6).sigmoid() * (0.02 - 1e-4) + 1e-4,
    }
    known = {name: torch.cumprod(1 - of, 0) for name, of in betas.items()}
    known["scaled_linear (0.00085 to 0.012)"] = torch.cumprod(1 - line(0.00085**0.5, 0.012**0.5) ** 2, 0)  # Stable Diffusion's
    for name, table in list(known.items()):
        roots = table.sqrt()
        known[f"{name} (zero terminal SNR)"] = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
    if steps != 1000 and steps > 20:
        known["linear (betas scaled by 1000 / T)"] = torch.cumprod(1 - line(0.1, 20) / steps, 0)
    known["cosine (betas up to 0.9999)"] = torch.cumprod(1 - cosine.clamp(0, 0.9999), 0)
    return known


def said(schedule: str) -> str:
    return {"squaredcos_cap_v2": "cosine"}.get(schedule, schedule)


def matching(levels: Levels, places: torch.Tensor, steps: int) -> tuple[str, torch.Tensor] | None:
    """The known schedule that has the coefficients of the samples at `places` [B]."""
    places = places.long()
    room = TOLERANCE if levels.looks[0].x.dtype.itemsize >= 4 else 1e-4  # as much as the audit's check allows, or bf16 leaves
    if bool(((places < 0) | (places >= steps)).any()):
        return None
    for name, table in tables(steps).items():
        values = table.to(levels.a)[places]
        if worst(levels.a - values.sqrt()) < room and worst(levels.b - (1 - values).sqrt()) < room:
            return name, table
    return None


def anywhere(levels: Levels, steps: int) -> tuple[str, torch.Tensor, torch.Tensor] | None:
    """(name, table, places) of the known schedule that has all coefficients, wherever."""
    for name, table in tables(steps).items():
        table = table.to(levels.a)
        near = (table.sqrt()[None] - levels.a[:, None]).abs() + ((1 - table).sqrt()[None] - levels.b[:, None]).abs()
        distance, places = near.min(1)
        if worst(distance) < 2e-5:
            return name, table, places
    return None


def half_matching(levels: Levels, places: torch.Tensor, steps: int) -> str:
    """What is wrong where one of the two coefficients is that of a known schedule at `places` [B], and the other is not."""
    places = places.long()
    if len(places) < 4 or bool(((places < 0) | (places >= steps)).any()):
        return ""
    for name, table in tables(steps).items():
        values = table.to(levels.a)[places]
        of_image, of_noise = worst(levels.a - values.sqrt()) < TOLERANCE, worst(levels.b - (1 - values).sqrt()) < TOLERANCE
        if of_image != of_noise:
            right, other = ("image", "noise") if of_image else ("noise", "image")
            return (
                f"the {right} has the coefficients of the {said(name)} schedule at these timesteps, and the {other} has others"
            )
    return ""


def declared_step(micro_steps: int, noising: Any = None, limit: float | None = 0.0) -> Declared:
    """For the audit's checks, of what they are to be told. `limit`: of the gradient's norm."""
    optimizer = DeclaredOptimizer("", 0.0, 0.0, 0.0, 0.0, 0.0, lambda step: 0.0, limit)
    return Declared(noising, None, optimizer, micro_steps, None)

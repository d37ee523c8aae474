"""Which diffusion process a script trains, identified from its passes: noise levels, target, weights; and whether it is one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch

from utils.diagnostics.audit.declared import SCHEDULES, WEIGHTINGS, DeclaredNoising, alphas_cumprod
from utils.diagnostics.audit.fitting import constant, fit, flat, middle, simple, span, worst
from utils.diagnostics.audit.noising import SMALL
from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.mixture import EXACT, Mixture, family


@dataclass
class Look:
    """One micro step: what went into the network and came out, and of what it was mixed."""

    x: torch.Tensor  # [B, C, ...]
    told: torch.Tensor | None  # the noise level that the network was told, float64 [B]
    output: torch.Tensor
    gradient: torch.Tensor | None  # of the loss, by the output; without the loss's scale
    mixture: Mixture
    times: list[torch.Tensor] = field(default_factory=list)  # whole numbers that were drawn, [B]
    drawn_from: tuple[int, int] | None = None  # the bounds of the draw, the second exclusive
    noised_with: torch.Tensor | None = None  # timesteps that `add_noise` got


@dataclass(frozen=True)
class Table(DeclaredNoising):
    """A noise schedule whose values are given."""

    values: torch.Tensor = field(default_factory=lambda: torch.zeros(1))
    weighting_name: str = "1"

    @cached_property
    def alphas_cumprod(self) -> torch.Tensor:
        return self.values

    @property
    def weighting(self) -> str:
        return self.weighting_name


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
        self.sizes = torch.cat([torch.full((len(look.x),), float(len(look.x))) for look in looks]).to(self.a)
        images = [look.mixture.clean_tensor for look in looks]
        self.pixels = images[0][0].numel()

    @property
    def sigma(self) -> torch.Tensor:
        return self.b / self.a.clamp(min=1e-12)

    @property
    def kind(self) -> str:
        return family(self.a, self.b)

    @cached_property
    def sigma_data(self) -> float | None:
        """Of a preconditioned input, a = 1 / sqrt(sigma^2 + sigma_data^2)."""
        squared = constant(1 / self.a**2 - self.sigma**2, 1e-2)
        return squared**0.5 if squared is not None and squared > 0 else None


# ---- known noise schedules


@lru_cache(maxsize=4)
def tables(steps: int) -> dict[str, torch.Tensor]:
    """Name -> alphas_cumprod of the schedules that scripts use, [T]."""
    known = {name: alphas_cumprod(name, steps) for name in SCHEDULES}
    known |= {f"{name} (zero terminal SNR)": alphas_cumprod(name, steps, True) for name in SCHEDULES}
    betas = torch.linspace(1e-4, 0.02, steps, dtype=torch.float64) * (1000 / steps)
    if steps != 1000 and float(betas.max()) < 1:
        known["linear (betas scaled by 1000 / T)"] = torch.cumprod(1 - betas, 0)
    moments = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    curve = torch.cos((moments + 0.008) / 1.008 * torch.pi / 2) ** 2
    for highest in (0.999, 0.9999):
        betas = (1 - curve[1:] / curve[:-1]).clamp(0, highest)
        known.setdefault(f"cosine (betas up to {highest:g})", torch.cumprod(1 - betas, 0))
    return known


def said(schedule: str) -> str:
    return {"squaredcos_cap_v2": "cosine"}.get(schedule, schedule)


def matching(levels: Levels, places: torch.Tensor, steps: int) -> tuple[str, torch.Tensor] | None:
    """The known schedule that has the coefficients of the samples at `places` [B]."""
    places = places.long()
    if bool(((places < 0) | (places >= steps)).any()):
        return None
    for name, table in tables(steps).items():
        values = table.to(levels.a)[places]
        if worst(levels.a - values.sqrt()) < 1e-4 and worst(levels.b - (1 - values).sqrt()) < 1e-4:
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


# ---- the target of the loss


@dataclass
class Target:
    name: str
    healthy: bool
    scale: torch.Tensor | None  # c [B] of the gradient c (output - target); None where the error is not a squared one
    residual: float
    loss: str = "squared error"
    of_clean: torch.Tensor | None = None  # the target's parts, [B]
    of_noise: torch.Tensor | None = None


GOOD = ("epsilon", "sample", "v_prediction", "velocity", "raw", "score")
SAID = {
    "epsilon": "the noise (epsilon)",
    "sample": "the clean image (sample)",
    "v_prediction": "v (v_prediction)",
    "velocity": "the flow's velocity noise - x_0",
    "backward": "the flow's velocity x_0 - noise",
    "raw": "(x_0 - c_skip x) / c_out, EDM's target",
    "score": "the score -noise / sigma",
}


def _parts(levels: Levels, table: "tuple[torch.Tensor, torch.Tensor] | None") -> dict[str, tuple]:
    """Name -> (of the clean image, of the noise) of the targets that a script may have; numbers or [B]."""
    a, b = (levels.a, levels.b) if table is None else table
    a, b = (a, b) if worst(a**2 + b**2 - 1) < 1e-2 else (a / (a**2 + b**2).sqrt(), b / (a**2 + b**2).sqrt())
    parts: dict[str, tuple] = {
        "epsilon": (0.0, 1.0),
        "sample": (1.0, 0.0),
        "v_prediction": (-b, a),
        "velocity": (-1.0, 1.0),
        "backward": (1.0, -1.0),
    }
    sigma_data, sigma = levels.sigma_data, levels.sigma
    if sigma_data is not None:
        total = sigma**2 + sigma_data**2
        skip, out = sigma_data**2 / total, sigma * sigma_data / total.sqrt()
        parts["raw"] = ((1 - skip) / out, -skip * sigma / out)
    parts |= {
        "score": (0.0, -1 / levels.b.clamp(min=1e-6)),
        "minus the noise": (0.0, -1.0),
        "minus the clean image": (-1.0, 0.0),
        "v of the wrong sign": (b, -a),
        "v with its coefficients exchanged": (-a, b),
        "v with its coefficients squared": (-(b**2), a**2),
        "the noised image": (levels.a, levels.b),
        "half of the noise": (0.0, 0.5),
        "zero": (0.0, 0.0),
    }
    return parts


def identify_target(levels: Levels, order: list[str], table: Any = None, others: "list[Look] | None" = None) -> Target | None:
    """`order`: the names that are tried first. None where no gradient was seen."""
    looks = levels.looks
    if any(look.gradient is None for look in looks):
        return None
    channels = looks[0].x.shape[1]
    output = torch.cat([flat(look.output[:, :channels]) for look in looks])
    gradient = torch.cat([flat(look.gradient[:, :channels]) for look in looks if look.gradient is not None])
    if not torch.isfinite(gradient).all():
        return None
    used = gradient.norm(dim=1) > 0
    if not used.any():
        return Target("nothing: the output gets no gradient", False, None, 1.0)
    precision = max(2 * float(torch.finfo(looks[0].output.dtype).eps), 1e-3)
    clean, noise, parts = levels.clean, levels.noise, _parts(levels, table)

    def made(of_clean: Any, of_noise: Any) -> torch.Tensor:
        return (
            torch.as_tensor(of_clean).reshape(-1, 1).to(clean) * clean
            + torch.as_tensor(of_noise).reshape(-1, 1).to(clean) * noise
        )

    candidates: dict[str, Callable[[], torch.Tensor]] = {
        name: lambda of=of: made(*of)  # type: ignore[misc]
        for name, of in sorted(parts.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    }
    candidates |= {
        "the noise of the next image": lambda: noise.roll(-1, 0),
        "the noise of the image before": lambda: noise.roll(1, 0),
        "the next clean image": lambda: clean.roll(-1, 0),
        "the clean image before": lambda: clean.roll(1, 0),
        "v of another image": lambda: made(*parts["v_prediction"]).roll(-1, 0),
        "the clean image in [0, 1]": lambda: (clean + 1) / 2,
        "the noise, upside down or mirrored": lambda: noise.flip(1),
    }
    for name, values in candidates.items():
        scale, residual = fit(gradient[used], (output - values())[used])
        if float(residual.quantile(0.9)) <= precision and worst(residual) <= 10 * precision:
            c = torch.zeros(len(gradient), dtype=gradient.dtype, device=gradient.device)
            c[used] = scale[:, 0]
            of = parts.get(name, (None, None))
            return Target(name, name in (*GOOD, "backward"), c, worst(residual), "squared error", *of)
    best = max(order[:6], key=lambda name: _agreement(gradient, output, candidates.get(name)))
    if _agreement(gradient, output, candidates.get(best)) > 0.99:
        size = gradient[used].abs()
        flat_share = float((size > 0.999 * size.amax(1, keepdim=True)).double().mean())
        kind = "absolute error (L1)" if flat_share > 0.9 else "Huber (smooth L1) error" if flat_share > 0.01 else "other error"
        return Target(best, True, None, 0.0, kind, *parts.get(best, (None, None)))
    (c, of_clean, of_noise), residual = (lambda r: (r[0].T, r[1]))(fit(gradient[used], output[used], clean[used], noise[used]))
    text = f"{middle(-of_clean / c):.2g} x_0 + {middle(-of_noise / c):.2g} noise"
    text += f", and {middle(residual):.0%} is something else" if worst(residual) > precision else ""
    return Target(text, False, None, worst(residual))


def _agreement(gradient: torch.Tensor, output: torch.Tensor, candidate: "Callable[[], torch.Tensor] | None") -> float:
    if candidate is None:
        return -1.0
    return float((torch.sign(gradient) * torch.sign(output - candidate())).mean())


def check_target(target: Target, declared: str | None, levels: Levels) -> Check:
    """`declared`: the prediction type that an object of the script says; None: none does."""
    name = "target of the loss"
    wanted = SAID.get(declared, str(declared)) if declared else "not declared"
    observed = f"{target.loss} against {SAID.get(target.name, target.name)}"
    if target.loss == "other error":
        return not_observed("target", name, wanted, "the loss is neither a squared, an absolute nor a Huber error")
    if declared is not None and target.name != declared:
        text = f"the loss compares the output with {SAID.get(target.name, target.name)}, not with {wanted}"
        text += ", as the scheduler's config says" if declared else ""
        return Check("target", name, wanted, observed, False, text)
    if target.name in ("velocity", "backward"):
        return _velocity(target, levels, wanted, observed)
    text = "" if target.healthy else f"the loss compares the output with {target.name}: no target that a sampler could use"
    return Check("target", name, wanted, observed, target.healthy, text)


def _velocity(target: Target, levels: Levels, wanted: str, observed: str) -> Check:
    """The velocity belongs to the path, and points the way that the time runs."""
    name = "target of the loss"
    if levels.kind != "flow":
        text = f"the loss compares the output with {SAID[target.name]}, but the path is not (1 - s) x_0 + s noise"
        return Check("target", name, wanted, observed, False, text)
    forward = target.name == "velocity"
    if levels.told is not None and len(levels.told) > 1:
        rises = float(((levels.told - levels.told.mean()) * (levels.b - levels.b.mean())).sum())
        if rises and (rises > 0) != forward:
            way = "rises" if rises > 0 else "falls"
            text = (
                f"the loss compares the output with {SAID[target.name]}, but the time that the network is told {way} with the "
                "noise: the velocity points against the path"
            )
            return Check("target", name, wanted, observed, False, text)
    return Check("target", name, wanted, observed, True)


# ---- what a sample's error counts

_GAMMAS = (5.0, 1.0, 2.0, 3.0, 4.0, 7.0, 10.0, 20.0)
_FAMILIAR = {  # what scripts weigh errors by on purpose
    "epsilon": ("1", "min(SNR, gamma) / SNR", "(SNR + 1) / SNR"),
    "sample": ("1", "SNR", "max(SNR, 1)", "min(SNR, gamma)", "SNR + 1"),
    "v_prediction": ("1", "SNR / (SNR + 1)", "min(SNR, gamma) / (SNR + 1)", "1 / (SNR + 1)"),
}
_FUNCTIONS = WEIGHTINGS | {
    "SNR / (SNR + 1)": lambda snr, gamma: snr / (snr + 1),
    "1 / (SNR + 1)": lambda snr, gamma: 1 / (snr + 1),
    "(SNR + 1) / SNR": lambda snr, gamma: (snr + 1) / snr,
    "SNR + 1": lambda snr, gamma: snr + 1,
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
        return Weighting("", None, 1.0, False, "some samples' errors are increased: their weight is negative")
    snr = (levels.a / levels.b.clamp(min=1e-12)) ** 2
    familiar = _FAMILIAR.get(target, ("1",))
    found: list[tuple[bool, bool, Weighting]] = []
    for name in (*familiar, *_FUNCTIONS):
        for gamma in _gammas(weights, snr, name):
            factor = constant(weights / _FUNCTIONS[name](snr, gamma or 0.0))
            exact = factor is not None and abs(abs(factor) - 1) < SMALL
            if factor is not None and (exact or gamma in (None, *_GAMMAS)) and (exact or name in familiar or len(weights) > 3):
                found.append((name in familiar, exact, Weighting(name, gamma, factor, True)))
        if found and found[-1][:2] == (True, True):
            break
    if found:
        familiar_one, _, best = max(found, key=lambda one: one[:2])
        return _judged(best, familiar_one, target, micro_steps, levels.pixels, batch)
    for shift in (1, -1):
        for name in familiar:
            for gamma in _gammas(weights, snr.roll(shift), name):
                if constant(weights / _FUNCTIONS[name](snr.roll(shift), gamma or 0.0)) is not None:
                    return Weighting(name, gamma, 1.0, False, "errors are weighed by the weight of another image of the batch")
    if (of_levels := _of_levels(weights, levels)) is not None:
        return of_levels
    counted = int((weights.abs() > 1e-9).sum())
    if counted < len(weights):
        return Weighting("", None, 1.0, False, f"only {counted} of {len(weights)} samples count in the loss")
    return Weighting("", None, 1.0, True)


def _of_levels(weights: torch.Tensor, levels: Levels) -> Weighting | None:
    """EDM's lambda(sigma) = 1 / sigma^2 + 1 / sigma_data^2, and 1 / sigma^2, times a number."""
    sigma = levels.sigma.clamp(min=1e-12)
    if len(weights) < 4:
        return None
    columns = torch.stack([1 / sigma**2, torch.ones_like(sigma)], 1) / weights[:, None]
    sizes = columns.norm(dim=0)
    solution = torch.linalg.lstsq(columns / sizes, torch.ones_like(sigma)[:, None]).solution
    factor, level = (solution[:, 0] / sizes).tolist()
    if worst(columns @ (solution[:, 0] / sizes) - 1) > SMALL or factor <= 0:
        return None
    sigma_data = (factor / level) ** 0.5 if level > 1e-6 * factor else 0.0
    name = f"(sigma^2 + sigma_data^2) / (sigma sigma_data)^2, sigma_data {sigma_data:.3g}" if sigma_data else "1 / sigma^2"
    return _judged(Weighting(name, None, factor, True), True, "", 1, levels.pixels, float(levels.sizes[0]))


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
    for text, (value, severity) in causes.items():
        if value != 1.0 and abs(found.factor / value - 1) < 2e-3:
            found.healthy, found.severity = False, severity
            found.message = f"the loss is {simple(found.factor)} times the mean squared error: {text}"
            return found
    if found.factor < 0:
        found.healthy, found.message = (
            False,
            f"the loss is {simple(found.factor)} times the mean squared error: it is maximized",
        )
    return found


def check_weights(found: Weighting, weights: torch.Tensor, target: str) -> Check:
    name = "weight of each sample's loss"
    wanted = "a known weighting of the mean squared error"
    gamma = f", gamma {found.gamma:g}" if found.gamma else ""
    if not found.name and found.healthy:
        return not_observed("weight", name, wanted, f"errors count by another function of the noise level ({span(weights)})")
    times = "" if abs(found.factor - 1) < SMALL else f", times {simple(found.factor)}"
    observed = f"{found.name}{gamma}{times}" if found.name else span(weights)
    return Check("weight", name, wanted, observed, found.healthy, found.message, found.severity)


# ---- the noise level that the network is told


def check_told(levels: Levels) -> tuple[Check, str]:
    """Of a process without a table of steps: (the check, what the network is told)."""
    name, wanted = "noise level that the network is told", "a function of the one that the image has"
    told, b, sigma = levels.told, levels.b, levels.sigma
    if told is None:
        return not_observed("timestep", name, wanted, "the network gets no number for each image beside it"), ""
    shapes = {
        "s": b,
        "1 - s": 1 - b,
        "1000 s": 1000 * b,
        "1000 (1 - s)": 1000 * (1 - b),
    }
    if levels.kind != "flow":
        shapes = {
            "sigma": sigma,
            "ln(sigma) / 4": sigma.log() / 4,
            "ln(sigma)": sigma.log(),
            "1000 ln(sigma) / 4": 250 * sigma.log(),
        }
        shapes |= {"-2 ln(sigma), the logarithm of the SNR": -2 * sigma.log(), "atan(sigma)": sigma.atan()}
        shapes |= {
            "2 atan(sigma) / pi": sigma.atan() * 2 / torch.pi,
            "1000 * 2 atan(sigma) / pi": sigma.atan() * 2000 / torch.pi,
        }
    for text, values in shapes.items():
        if worst(told - values) <= 2e-3 * max(worst(values), 1e-3):
            return Check("timestep", name, wanted, text, True), text
    for text, values in shapes.items():
        for shift, whose in ((1, "the image before"), (-1, "the next image")):
            if worst(told - values.roll(shift)) <= 2e-3 * max(worst(values), 1e-3) and len(told) > 1:
                message = f"the network is told the noise level of {whose} in the batch"
                return Check("timestep", name, wanted, message, False, message), text
    if len(told) < 3:
        return not_observed("timestep", name, wanted, "too few images to know the function"), ""
    if constant(told, 1e-6) is not None and constant(sigma, 1e-3) is None:
        message = f"the network is told {float(told[0]):.4g} for all images, though they have different noise levels"
        return Check("timestep", name, wanted, "one for all", False, message), ""
    order = told[sigma.argsort()].diff()
    if bool((order >= 0).all()) or bool((order <= 0).all()):
        return Check("timestep", name, wanted, "a monotone function of it", True), ""
    message = "the network is told noise levels that are not those of the images: more noise is not a higher (or lower) number"
    return Check("timestep", name, wanted, "no function of it", False, message), ""


def check_mixture(levels: Levels) -> Check:
    """Of a process without a table of steps."""
    name, wanted = "coefficients of image and noise", "one family for all noise levels"
    if worst(levels.a) < 1e-3 and worst(levels.residual) < 1e-3:
        return Check("input", name, wanted, "noise alone", False, "the network sees noise alone, without the image")
    if shift := next((look.mixture.constant for look in levels.looks if look.mixture.constant), 0.0):
        text = (
            f"the network's input is image, noise and a constant of {shift:.3g}: "
            "is the noise added before the images are normalized?"
        )
        return Check("input", name, wanted, f"and {shift:.3g}", False, text)
    kind = levels.kind
    formulas = {
        "variance-preserving": "a^2 + b^2 = 1",
        "flow": "a + b = 1",
        "variance-exploding": "x_0 + sigma noise",
        "preconditioned": f"c_in (x_0 + sigma noise), sigma_data {levels.sigma_data or 0:.3g}",
    }
    spread = f"a {span(levels.a)}, b {span(levels.b)}; residual {worst(levels.residual):.1e}"
    if worst(levels.residual) > 2e-2:
        text = f"the network's input is not made of image and noise: {middle(levels.residual):.0%} of it is something else"
        return Check("input", name, wanted, spread, False, text)
    if worst(levels.residual) > 100 * EXACT:
        text = f"the noised image is rounded: {middle(levels.residual):.1e} of it is neither image nor noise (bf16 leaves 3e-3)"
        return Check("input", name, wanted, spread, False, text, "warning")
    if kind in formulas:
        return Check("input", name, wanted, f"{kind}: {formulas[kind]}", True)
    if len(levels.a) > 2 and constant(levels.b) is not None and constant(levels.a) is not None:
        text = f"all images of the batch have one noise level ({spread}); each image should have its own"
        return Check("timestep", name, "one for each image", spread, False, text)
    text = f"the coefficients of image and noise belong to no known process ({spread})"
    return Check("input", name, wanted, spread, False, text)

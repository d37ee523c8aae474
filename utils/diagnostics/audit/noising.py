"""DDPM's forward pass and loss, identified: the noised image, the timestep, what is predicted, and how errors are weighed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from utils.diagnostics.audit.conditions import check_told
from utils.diagnostics.audit.declared import WEIGHTINGS, Declared, DeclaredNoising
from utils.diagnostics.audit.fitting import SMALL, TOLERANCE, constant, fit, gather, middle, named, named_multiple, span, worst
from utils.diagnostics.audit.loss import NO_GRADIENT, Loss, seen_loss
from utils.diagnostics.audit.seen import Call, MicroStep
from utils.diagnostics.audit.verdict import Check, not_observed


@dataclass(frozen=True)
class Seen:
    """The batches of an update's micro steps together. Images are [B, N]."""

    x: torch.Tensor  # the network's input
    told: torch.Tensor  # timesteps that the network is given, [B]
    clean: torch.Tensor
    noise: torch.Tensor
    timesteps: torch.Tensor  # those drawn, int64 [B]
    signal: torch.Tensor  # coefficient of the image that is declared for them, [B, 1]
    rest: torch.Tensor  # that of the noise

    @property
    def implied_noise(self) -> torch.Tensor:
        return (self.x - self.signal * self.clean) / self.rest.clamp(min=1e-12)

    @property
    def v(self) -> torch.Tensor:
        return self.signal * self.noise - self.rest * self.clean


def check_noising(micro_steps: list[MicroStep], declared: Declared, loss_scale: float = 1.0) -> list[Check]:
    """Checks of all micro steps of an update together, of a network that is called with (noisy images, timesteps) or
    with (noisy images, timesteps, labels).

    Clean images, noise and timesteps are those that the loop told as "clean_images", "noise" and "timesteps".
    """
    formula, wanted = declared.noising, "a x_0 + b noise"
    usable = [step for step in micro_steps if _complete(step)]
    if not usable:
        return [not_observed("input", "noisy image", wanted, "the network's forward pass was not seen")]
    calls = [step.calls["network"] for step in usable]
    x, told = gather(call.inputs[0] for call in calls), torch.cat([_timesteps(call) for call in calls])
    clean, noise = (gather(step.batch[name] for step in usable) for name in ("clean_images", "noise"))
    drawn = torch.cat([step.batch["timesteps"].detach().reshape(-1) for step in usable])
    if not (len(x) == len(told) == len(clean) == len(noise) == len(drawn)):
        message = f"the network got {len(x)} images and {len(told)} timesteps, the loss {len(clean)} images"
        return [Check("input", "batch", "one timestep for each image", "other numbers", False, message)]
    if x.shape[1] < 8:
        return [not_observed("input", "noisy image", wanted, "the images have too few different values for this check")]
    timesteps = drawn.double().round().clamp(0, formula.steps - 1).long().to(x.device)
    abar = formula.alphas_cumprod.to(x.device)[timesteps][:, None]
    seen = Seen(x, told, clean, noise, timesteps, abar.sqrt(), (1 - abar).sqrt())
    checks = [_timesteps_told(told, drawn, formula.steps), _noisy_images(seen, formula)]
    labels = check_told(usable, "network", declared.no_class)
    loss = seen_loss(calls, declared.micro_steps, loss_scale)
    if isinstance(loss, str):
        return [*checks, *labels, not_observed("target", "target", formula.prediction_type, loss)]
    target, weights = _target(seen, loss, formula.prediction_type)
    if target.healthy is False and checks[1].healthy is False:
        # The image may hold other noise than was drawn, and the loss may ask for that.
        other = _target(replace(seen, noise=seen.implied_noise), loss, formula.prediction_type)
        target, weights = other if other[0].healthy else (target, weights)
    return [*checks, *labels, target] + ([] if weights is None else [_weights(weights, seen, loss, formula)])


def _complete(step: MicroStep) -> bool:
    call = step.calls.get("network")
    known = {"clean_images", "noise", "timesteps"} <= step.batch.keys()
    return known and call is not None and bool(call.outputs) and len(call.inputs) >= 2


def _timesteps(call: Call) -> torch.Tensor:
    images, timesteps = call.inputs[:2]
    timesteps = torch.as_tensor(timesteps, device=images.device).reshape(-1)
    return timesteps.expand(len(images)) if len(timesteps) == 1 else timesteps


# ---- the timestep

_TOLD_AS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "reversed (T - 1 - t)": lambda t, steps: steps - 1 - t,
    "T - t": lambda t, steps: steps - t,
    "one too high": lambda t, steps: t + 1,
    "one too low": lambda t, steps: t - 1,
    "one too low, 0 staying 0": lambda t, steps: (t - 1).clamp(min=0),
    "one too high, the last staying": lambda t, steps: (t + 1).clamp(max=steps - 1),
    "as fractions t / T": lambda t, steps: t / steps,
    "as fractions t / (T - 1)": lambda t, steps: t / max(steps - 1, 1),
    "times 1000": lambda t, steps: t * 1000,
    "in units of ten": lambda t, steps: torch.div(t, 10, rounding_mode="floor"),
    "halved": lambda t, steps: torch.div(t, 2, rounding_mode="floor"),
    "those of the next image of the batch": lambda t, steps: t.roll(-1),
    "those of the image before in the batch": lambda t, steps: t.roll(1),
    "those of the batch in reverse order": lambda t, steps: t.flip(0),
    "sorted": lambda t, steps: t.sort().values,
    "rounded to bf16": lambda t, steps: t.to(torch.bfloat16).double(),
    "rounded to fp16": lambda t, steps: t.to(torch.float16).double(),
    "always 0": lambda t, steps: t * 0,
    "that of the first image for all": lambda t, steps: t[:1].expand(len(t)),
}


def _how_told(told: torch.Tensor, drawn: torch.Tensor, steps: int) -> str:
    told, drawn = told.double(), drawn.double()
    known = {name: change(drawn, steps) for name, change in _TOLD_AS.items()}
    if name := named(told, known, 1e-4 * max(worst(told), 1e-3)):
        return name
    same = torch.equal(told.sort().values, drawn.sort().values)
    return "those of other images of the batch (shuffled)" if same else "others"


def _timesteps_told(told: torch.Tensor, drawn: torch.Tensor, steps: int) -> Check:
    name, wanted = "timestep that the network gets", "the one that the image was noised with"
    if torch.equal(told.double(), drawn.double()):
        outside = bool(((told < 0) | (told >= steps)).any())
        if outside or bool((told.double() != told.double().round()).any()):
            found = f"{float(told.min()):.4g} to {float(told.max()):.4g}"
            message = f"timesteps must be whole numbers from 0 to {steps - 1}; the network gets {found}"
            return Check("timestep", name, wanted, found, False, message)
        if (len(told) - 1) * math.log10(steps) > 12 and bool((told == told[0]).all()):
            message = "all images of the update have one timestep; each image should have its own"
            return Check("timestep", name, "one for each image", f"{int(told[0])} for all", False, message)
        return Check("timestep", name, wanted, "the same", True)
    how = _how_told(told, drawn, steps)
    message = f"the network gets other timesteps than those drawn: {how} ({_few(told)} instead of {_few(drawn)})"
    return Check("timestep", name, wanted, how, False, message)


def _few(values: torch.Tensor) -> str:
    return ", ".join(f"{float(v):.5g}" for v in values[:3]) + (", ..." if len(values) > 3 else "")


# ---- the noisy image

# Of the declared coefficients a, b and of t / T: coefficients of image and noise.
_MIXTURES: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "the square roots are missing: the network sees abar x_0 + (1 - abar) noise": lambda a, b, t: (a**2, b**2),
    "sqrt(1 - abar) x_0 + sqrt(abar) noise: the two coefficients are exchanged": lambda a, b, t: (b, a),
    "x_0 + sqrt(1 - abar) noise: the image is not scaled": lambda a, b, t: (a**0, b),
    "sqrt(abar) x_0 + noise: the noise is not scaled": lambda a, b, t: (a, b**0),
    "sqrt(abar) x_0 - sqrt(1 - abar) noise: the noise is subtracted": lambda a, b, t: (a, -b),
    "the square root of the image's coefficient is missing": lambda a, b, t: (a**2, b),
    "the square root of the noise's coefficient is missing": lambda a, b, t: (a, b**2),
    "x_0 + sigma noise: the input is not scaled to variance 1": lambda a, b, t: (a**0, b / a),
    "the clean image, without noise": lambda a, b, t: (a**0, b * 0),
    "noise alone, without the image": lambda a, b, t: (a * 0, b**0),
    "noise alone, without the image (scaled)": lambda a, b, t: (a * 0, b),
    "a mixture with weights t / T": lambda a, b, t: (1 - t, t),
}


def _noisy_images(seen: Seen, formula: DeclaredNoising) -> Check:
    name, wanted = "coefficients of image and noise", f"sqrt(abar), sqrt(1 - abar) of the {formula.schedule} schedule"
    coefficients, residual = fit(seen.x, seen.clean, seen.noise)
    a, b = coefficients.T
    # An image without contrast says nothing of its coefficient.
    clear = seen.clean.norm(dim=1) > 1e-3 * seen.x.shape[1] ** 0.5
    off = worst((a - seen.signal[:, 0])[clear]), worst(b - seen.rest[:, 0])
    observed = f"off by {off[0]:.1e}, {off[1]:.1e}; residual {worst(residual):.1e}"
    if all(value <= TOLERANCE for value in (*off, worst(residual))):
        return Check("input", name, wanted, observed, True)
    if not torch.isfinite(seen.x).all():
        return Check("input", name, wanted, observed, False, "the network's input has values that are not finite")
    if worst(residual) > 1e-3:
        return Check("input", name, wanted, observed, False, _explain_rest(seen, residual))
    stage, message = _explain_coefficients(a.where(clear, torch.nan), b, seen, formula)
    return Check(stage, name, wanted, observed, False, message)


def _explain_coefficients(a: torch.Tensor, b: torch.Tensor, seen: Seen, formula: DeclaredNoising) -> tuple[str, str]:
    """(stage, message) of an input that is a image + b noise; `a` is NaN where nothing is known of it."""
    clear, table = ~a.isnan(), formula.alphas_cumprod.to(a.device)
    signal, rest, t = seen.signal[:, 0], seen.rest[:, 0], seen.timesteps / formula.steps
    mixtures = {text: mixture(signal, rest, t) for text, mixture in _MIXTURES.items()}
    known = {text: torch.cat([image[clear], noise]) for text, (image, noise) in mixtures.items()}
    if text := named(torch.cat([a[clear], b]), known, SMALL):
        return "input", text
    both = torch.stack([torch.where(clear, a, (1 - b**2).clamp(min=0).sqrt()), b])
    others = {other.called: other.alphas_cumprod.to(a.device)[seen.timesteps] for other in formula.others()}
    if name := named(both, {name: torch.stack([o.sqrt(), (1 - o).sqrt()]) for name, o in others.items()}, SMALL):
        return "input", f"images are noised by the schedule {name}; declared: {formula.called}"
    # Timesteps at which the declared schedule has the observed coefficients.
    distance, other = (torch.stack([table.sqrt(), (1 - table).sqrt()])[:, None] - both[..., None]).abs().sum(0).min(1)
    if worst(distance) < 1e-4 and not torch.equal(other, seen.timesteps):
        if torch.equal(other.double(), seen.told.double().to(other.device)):
            return "timestep", "images are noised with the timesteps that the network gets, which are not those drawn"
        how = _how_told(other, seen.timesteps, formula.steps)
        return "timestep", f"images are noised with other timesteps than the network gets: {how}"
    of_image, of_noise = span((a / signal.clamp(min=1e-12))[clear]), span(b / rest)
    return "input", f"the coefficients of image and noise are {of_image} and {of_noise} times those declared"


def _explain_rest(seen: Seen, residual: torch.Tensor) -> str:
    """Of an input that has something other than image and noise, of which `residual` [B] is the share."""
    if worst(residual) < 3e-2:
        return f"the noised image is rounded: {middle(residual):.1e} of it is neither image nor noise (bf16 leaves 3e-3)"
    implied = seen.implied_noise
    for k in (1, -1):
        other = seen.noise.roll(k, 0)
        if middle((implied - other).norm(dim=1) / other.norm(dim=1)) < 1e-2:
            return f"the noise in the image is not the noise drawn for it, but that of another image (rolled by {k})"
    of_image, _ = fit(seen.x, seen.clean)
    if worst(residual) > 0.9999 and middle(of_image.abs()) < 1e-6:
        return "the network's input contains neither the image nor the noise"
    if 0.8 < middle(implied.square().mean(1)) < 1.25 and abs(middle((implied * seen.noise).mean(1))) < 0.2:
        return "the noise in the image is not the noise that was drawn for it"
    return f"the network's input is not made of image and noise: {middle(residual):.0%} of it is something else"


# ---- what is predicted, and how its error is weighed

_TARGETS: dict[str, Callable[[Seen], torch.Tensor]] = {
    "epsilon": lambda seen: seen.noise,
    "sample": lambda seen: seen.clean,
    "v_prediction": lambda seen: seen.v,
    "minus the noise": lambda seen: -seen.noise,
    "minus the clean image": lambda seen: -seen.clean,
    "v of the wrong sign": lambda seen: -seen.v,
    "v with its coefficients exchanged": lambda seen: seen.rest * seen.noise - seen.signal * seen.clean,
    "the noised image": lambda seen: seen.x,
    "the flow's velocity noise - x_0": lambda seen: seen.noise - seen.clean,
    "x_0 - noise": lambda seen: seen.clean - seen.noise,
    "the score -noise / sqrt(1 - abar)": lambda seen: -seen.noise / seen.rest.clamp(min=1e-3),
    "the clean image in [0, 1]": lambda seen: (seen.clean + 1) / 2,
    "zero": lambda seen: seen.clean * 0,
    "half of the noise": lambda seen: seen.noise / 2,
    "the noise of the next image": lambda seen: seen.noise.roll(-1, 0),
    "the noise of the image before": lambda seen: seen.noise.roll(1, 0),
    "the next clean image": lambda seen: seen.clean.roll(-1, 0),
    "the clean image before": lambda seen: seen.clean.roll(1, 0),
    "v of the next image": lambda seen: seen.v.roll(-1, 0),
    "v of the image before": lambda seen: seen.v.roll(1, 0),
    "the noise, upside down or mirrored": lambda seen: seen.noise.flip(1),
}
_CALLED = {"epsilon": "the noise (epsilon)", "sample": "the clean image (sample)", "v_prediction": "v (v_prediction)"}


def _target(seen: Seen, loss: Loss, own: str) -> tuple[Check, torch.Tensor | None]:
    """(the check, what each sample's mean squared error counts, [B]; None where no target fits)."""
    name, wanted = "target of the loss", f"squared error of the {own} prediction"
    if not loss.used.any():
        return Check("target", name, wanted, "no gradient", False, NO_GRADIENT), None
    for key in dict.fromkeys([own, *_TARGETS]):
        weights, residual = loss.compared_with(_TARGETS[key](seen))
        limit = max(10 * TOLERANCE if key == own else 10 * SMALL, 2 * loss.precision)
        if float(residual.quantile(0.9)) <= limit and worst(residual) <= 10 * limit:
            if key == own:
                return Check("target", name, wanted, f"{own}, residual {worst(residual):.1e}", True), weights
            called = _CALLED.get(key, key)
            message = f"the loss compares the output with {called}, not with {_CALLED[own]}"
            return Check("target", name, wanted, called, False, message), weights
    best = max(_CALLED, key=lambda key: loss.agreement(_TARGETS[key](seen)))
    if loss.agreement(_TARGETS[best](seen)) > 0.99:
        message = loss.other_error(_TARGETS[best](seen), "" if best == own else f" of {_CALLED[best]}, not of {_CALLED[own]}")
        return Check("target", name, wanted, "another loss", False, message), None
    coefficients, residual = fit(*(part[loss.used] for part in (loss.gradient, loss.output, seen.clean, seen.noise)))
    c, of_clean, of_noise = coefficients.T
    parts = f"{middle(-of_clean / c):.2g} x_0 + {middle(-of_noise / c):.2g} noise"
    message = f"what the loss compares the output with is not {_CALLED[own]}: {parts}"
    return Check("target", name, wanted, parts, False, f"{message}, and {middle(residual):.0%} is something else"), None


def _weights(observed: torch.Tensor, seen: Seen, loss: Loss, formula: DeclaredNoising) -> Check:
    """`observed` [B]: what each sample's mean squared error counts in the declared mean."""
    name, wanted = "weight of each sample's loss", formula.weighting
    wanted += f", gamma {formula.snr_gamma:g}" if formula.snr_gamma else ""
    ratio = observed / formula.weights.to(observed.device)[seen.timesteps]
    fine = worst(ratio - 1) <= max(SMALL, loss.precision)
    message = "" if fine else _explain_weights(observed, seen, loss, formula)
    return Check("weight", name, wanted, f"{span(ratio)} times it", fine, message)


def _explain_weights(observed: torch.Tensor, seen: Seen, loss: Loss, formula: DeclaredNoising) -> str:
    table, t = formula.weights.to(observed.device), seen.timesteps
    expected, own = table[t], formula.weighting
    ratio = observed / expected
    far = int(ratio.clamp(min=1e-30).log().abs().argmax())
    sample = f"t = {int(t[far])} counts {float(observed[far]):.3g}, declared {float(expected[far]):.3g}"
    if (everywhere := constant(ratio)) is not None:
        return loss.explain_factor(everywhere)
    if float(ratio.min()) < 0:
        return f"some samples' errors are increased: their weight is negative ({sample})"
    if constant(observed) is not None and constant(expected) is None and abs(observed.mean() / expected.mean() - 1) < 0.05:
        return f"every sample of the batch has the same weight, the mean of all: a shape mistake? ({sample})"
    snr, gamma = formula.snr.to(observed.device), formula.snr_gamma or 5.0
    others = {key: function(snr, gamma) for key, function in WEIGHTINGS.items() if key != own}
    others |= {
        "the declared weights, reversed in time": table.flip(0),
        "the declared weights, squared": table**2,
        "the declared weights, their square root": table.sqrt(),
        "1 / the declared weights": 1 / table,
        "the declared weights of the next timestep": table.roll(-1),
        "the declared weights of the timestep before": table.roll(1),
    }
    if text := named_multiple(observed, {key: weights[t] for key, weights in others.items()}):
        return f"errors are weighed by {text}, not by {own} ({sample})"
    if torch.allclose(observed.sort().values, expected.sort().values, rtol=SMALL):
        return f"the weights are those of other images of the batch ({sample})"
    counted = int((observed.abs() > 1e-9).sum())
    if counted < len(observed):
        return f"only {counted} of {len(observed)} samples count in the loss"
    return f"errors are weighed by something other than {own}: {sample}"

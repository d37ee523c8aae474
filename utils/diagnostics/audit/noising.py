"""DDPM's forward pass and loss, identified: the noised image, the timestep, what is predicted, and how errors are weighed."""

import math
from collections.abc import Callable

import torch

from utils.diagnostics.audit.declared import SCHEDULES, WEIGHTINGS, Declared, DeclaredNoising, alphas_cumprod
from utils.diagnostics.audit.fitting import constant, fit, flat, middle, simple, span, worst
from utils.diagnostics.audit.observer import MicroStep
from utils.diagnostics.audit.verdict import Check, not_observed

TOLERANCE = 2e-5  # of fp32 arithmetic, which leaves 1e-7, far above its rounding and far below bf16's 4e-3
SMALL = 1e-3  # of what no training would feel


def check_noising(micro_steps: list[MicroStep], declared: Declared, loss_scale: float = 1.0) -> list[Check]:
    """Checks of all micro steps of an update together, of a network that is called with (noisy images, timesteps).

    Clean images, noise and timesteps are those that the loop told as "clean_images", "noise" and "timesteps".
    """
    usable = [step for step in micro_steps if _complete(step)]
    if not usable:
        return [not_observed("input", "noisy image", "a x_0 + b noise", "the network's forward pass was not seen")]
    x = torch.cat([flat(step.calls["network"].inputs[0]) for step in usable])
    told = torch.cat([_timesteps(step) for step in usable])
    clean = torch.cat([flat(step.batch["clean_images"]) for step in usable])
    noise = torch.cat([flat(step.batch["noise"]) for step in usable])
    drawn = torch.cat([step.batch["timesteps"].detach().reshape(-1) for step in usable])
    if not (len(x) == len(told) == len(clean) == len(noise) == len(drawn)):
        message = f"the network got {len(x)} images and {len(told)} timesteps, the loss {len(clean)} images"
        return [Check("input", "batch", "one timestep for each image", "other numbers", False, message)]
    formula = declared.noising
    if x.shape[1] < 8:
        return [not_observed("input", "noisy image", "a x_0 + b noise", "images of so few values tell nothing")]
    checks = [_timesteps_told(told, drawn, formula.steps)]
    input_check = _noisy_images(x, clean, noise, drawn, told, formula)
    checks.append(input_check)
    seen = [step for step in usable if step.calls["network"].gradients.get(0) is not None]
    if len(seen) < len(usable):
        return [*checks, not_observed("target", "target", formula.prediction_type, "no gradient reached the output")]
    output = torch.cat([flat(step.calls["network"].outputs[0]) for step in seen])
    gradient = torch.cat([flat(step.calls["network"].gradients[0]) for step in seen]) / loss_scale
    if not torch.isfinite(gradient).all():
        return [*checks, not_observed("target", "target", formula.prediction_type, "the gradient is not finite")]
    known = drawn.long().clamp(0, formula.steps - 1).to(x.device)
    abar = formula.alphas_cumprod.to(x.device)[known][:, None]
    precision = float(torch.finfo(seen[0].calls["network"].outputs[0].dtype).eps)
    target_check, scale = _target(gradient, output, clean, noise, x, abar, formula, precision)
    if target_check.healthy is False and input_check.healthy is False:
        # The image may hold other noise than was drawn, and the loss may ask for that.
        implied = (x - abar.sqrt() * clean) / (1 - abar).sqrt().clamp(min=1e-12)
        other_check, other_scale = _target(gradient, output, clean, implied, x, abar, formula, precision)
        if other_check.healthy:
            target_check, scale = other_check, other_scale
    checks.append(target_check)
    if scale is not None:
        sizes = torch.cat([torch.full((len(s.batch["timesteps"]),), float(len(s.batch["timesteps"]))) for s in seen])
        pixels = seen[0].calls["network"].outputs[0][0].numel()
        observed = scale * pixels * sizes.to(scale) * declared.micro_steps / 2
        checks.append(_weights(observed, known, formula, declared.micro_steps, pixels, int(sizes[0]), precision))
    return checks


def _complete(step: MicroStep) -> bool:
    call = step.calls.get("network")
    known = {"clean_images", "noise", "timesteps"} <= step.batch.keys()
    return known and call is not None and bool(call.outputs) and len(call.inputs) >= 2


def _timesteps(step: MicroStep) -> torch.Tensor:
    images, timesteps = step.calls["network"].inputs[:2]
    timesteps = torch.as_tensor(timesteps, device=images.device).reshape(-1)
    return timesteps.expand(len(images)) if len(timesteps) == 1 else timesteps


# ---- the timestep and the noisy image

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


def _named(told: torch.Tensor, drawn: torch.Tensor, steps: int) -> str:
    for name, change in _TOLD_AS.items():
        expected = change(drawn.double(), steps)
        if worst(expected - told.double()) <= 1e-4 * max(worst(expected), 1e-3):
            return name
    same = torch.equal(told.double().sort().values, drawn.double().sort().values)
    return "those of other images of the batch (shuffled)" if same else "others"


def _timesteps_told(told: torch.Tensor, drawn: torch.Tensor, steps: int) -> Check:
    name, wanted = "timestep that the network is told", "the one that the image was noised with"
    if torch.equal(told.double(), drawn.double()):
        outside = bool(((told < 0) | (told >= steps)).any())
        if outside or bool((told.double() != told.double().round()).any()):
            found = f"{float(told.min()):.4g} to {float(told.max()):.4g}"
            message = f"timesteps must be whole numbers from 0 to {steps - 1}; the network is told {found}"
            return Check("timestep", name, wanted, found, False, message)
        if (len(told) - 1) * math.log10(steps) > 12 and bool((told == told[0]).all()):
            message = "all images of the update have one timestep; each image should have its own"
            return Check("timestep", name, "one for each image", f"{int(told[0])} for all", False, message)
        return Check("timestep", name, wanted, "the same", True)
    how = _named(told, drawn, steps)
    message = f"the network is told other timesteps than those drawn: {how} ({_few(told)} instead of {_few(drawn)})"
    return Check("timestep", name, wanted, how, False, message)


def _few(values: torch.Tensor) -> str:
    return ", ".join(f"{float(v):.5g}" for v in values[:3]) + (", ..." if len(values) > 3 else "")


def _noisy_images(x, clean, noise, drawn, told, formula: DeclaredNoising) -> Check:
    name, wanted = "coefficients of image and noise", f"sqrt(abar), sqrt(1 - abar) of the {formula.schedule} schedule"
    coefficients, residual = fit(x, clean, noise)
    table = formula.alphas_cumprod.to(x.device)
    integer = drawn.double().round().clamp(0, formula.steps - 1).long().to(x.device)
    a, b = coefficients.T
    # An image without contrast says nothing of its coefficient.
    clear = clean.norm(dim=1) > 1e-3 * x.shape[1] ** 0.5
    off = torch.where(clear, (a - table[integer].sqrt()).abs(), 0.0), (b - (1 - table[integer]).sqrt()).abs()
    observed = f"off by {worst(off[0]):.1e}, {worst(off[1]):.1e}; residual {worst(residual):.1e}"
    if worst(torch.stack(off)) <= TOLERANCE and worst(residual) <= TOLERANCE:
        return Check("input", name, wanted, observed, True)
    stage, message = _explain_input(x, clean, noise, a, b, residual, clear, integer, told, formula)
    return Check(stage, name, wanted, observed, False, message)


def _explain_input(x, clean, noise, a, b, residual, clear, integer, told, formula) -> tuple[str, str]:
    table = formula.alphas_cumprod.to(x.device)
    signal, rest = table[integer], 1 - table[integer]
    if not torch.isfinite(x).all():
        return "input", "the network's input has values that are not finite"
    if worst(residual) <= 1e-3:
        shapes = {
            "the square roots are missing: the network sees abar x_0 + (1 - abar) noise": (signal, rest),
            "sqrt(1 - abar) x_0 + sqrt(abar) noise: the two coefficients are exchanged": (rest.sqrt(), signal.sqrt()),
            "x_0 + sqrt(1 - abar) noise: the image is not scaled": (torch.ones_like(signal), rest.sqrt()),
            "sqrt(abar) x_0 + noise: the noise is not scaled": (signal.sqrt(), torch.ones_like(signal)),
            "sqrt(abar) x_0 - sqrt(1 - abar) noise: the noise is subtracted": (signal.sqrt(), -rest.sqrt()),
            "the square root of the image's coefficient is missing": (signal, rest.sqrt()),
            "the square root of the noise's coefficient is missing": (signal.sqrt(), rest),
            "x_0 + sigma noise: the input is not scaled to variance 1": (torch.ones_like(signal), (rest / signal).sqrt()),
            "the clean image, without noise": (torch.ones_like(signal), torch.zeros_like(signal)),
            "noise alone, without the image": (torch.zeros_like(signal), torch.ones_like(signal)),
            "noise alone, without the image (scaled)": (torch.zeros_like(signal), rest.sqrt()),
            "a mixture with weights t / T": (1 - integer / formula.steps, integer / formula.steps),
        }
        for text, (for_image, for_noise) in shapes.items():
            if worst(torch.where(clear, a - for_image, 0.0)) < SMALL and worst(b - for_noise) < SMALL:
                return "input", text
        both = torch.where(clear, a, (1 - b**2).clamp(min=0).sqrt())
        for schedule in SCHEDULES:
            for zero_snr in (False, True):
                other = alphas_cumprod(schedule, formula.steps, zero_snr).to(x.device)[integer]
                if worst(both - other.sqrt()) < SMALL and worst(b - (1 - other).sqrt()) < SMALL:
                    ending = " with zero terminal SNR" if zero_snr else ""
                    return (
                        "input",
                        f"images are noised by the {schedule} schedule{ending}, declared {formula.schedule}",
                    )
        # Timesteps at which the declared schedule has the observed coefficients.
        nearest = (table.sqrt()[None] - both[:, None]).abs() + ((1 - table).sqrt()[None] - b[:, None]).abs()
        distance, other = nearest.min(1)
        if worst(distance) < 1e-4 and not torch.equal(other, integer):
            if torch.equal(other.double(), told.double().to(other.device)):
                return "timestep", "images are noised with the timesteps told, which are not those drawn"
            how = _named(other, integer, formula.steps)
            return "timestep", f"images are noised with other timesteps than the network is told: {how}"
        ratios = torch.where(clear, a / signal.sqrt().clamp(min=1e-12), torch.nan)
        text = (
            f"the coefficients of image and noise are {span(ratios[~ratios.isnan()])} and {span(b / rest.sqrt())} "
            "times those declared"
        )
        return "input", text
    if worst(residual) < 3e-2:
        text = f"the noised image is rounded: {middle(residual):.1e} of it is neither image nor noise (bf16 leaves 3e-3)"
        return "input", text
    left = x - signal.sqrt()[:, None] * clean
    implied = left / rest.sqrt().clamp(min=1e-12)[:, None]
    shifted = {f"of another image (rolled by {k})": noise.roll(k, 0) for k in (1, -1)}
    for text, other in shifted.items():
        if middle((implied - other).norm(dim=1) / other.norm(dim=1)) < 1e-2:
            return "input", f"the noise in the image is not the noise drawn for it, but that {text}"
    variance = middle(implied.square().mean(1))
    alike = middle((implied * noise).mean(1))
    of_image, _ = fit(x, clean)
    if worst(residual) > 0.9999 and middle(of_image.abs()) < 1e-6:
        return "input", "the network's input has nothing of image or noise"
    text = f"the network's input is not made of image and noise: {middle(residual):.0%} of it is something else"
    if 0.8 < variance < 1.25 and abs(alike) < 0.2:
        text = "the noise in the image is other noise than the one drawn for it"
    return "input", text


# ---- what is predicted, and how its error is weighed


def _target(gradient, output, clean, noise, x, abar, formula, precision) -> tuple[Check, torch.Tensor | None]:
    """(the check, c [B] with G = c (output - target); None where no target fits)."""
    name, wanted = "target of the loss", f"squared error of the {formula.prediction_type} prediction"
    signal, rest = abar.sqrt(), (1 - abar).sqrt()
    candidates: dict[str, Callable[[], torch.Tensor]] = {
        "epsilon": lambda: noise,
        "sample": lambda: clean,
        "v_prediction": lambda: signal * noise - rest * clean,
        "minus the noise": lambda: -noise,
        "minus the clean image": lambda: -clean,
        "v of the wrong sign": lambda: rest * clean - signal * noise,
        "v with its coefficients exchanged": lambda: rest * noise - signal * clean,
        "the noised image": lambda: x,
        "the flow's velocity noise - x_0": lambda: noise - clean,
        "x_0 - noise": lambda: clean - noise,
        "the score -noise / sqrt(1 - abar)": lambda: -noise / rest.clamp(min=1e-3),
        "the clean image in [0, 1]": lambda: (clean + 1) / 2,
        "zero": lambda: torch.zeros_like(clean),
        "half of the noise": lambda: noise / 2,
        "the noise of the next image": lambda: noise.roll(-1, 0),
        "the noise of the image before": lambda: noise.roll(1, 0),
        "the next clean image": lambda: clean.roll(-1, 0),
        "the clean image before": lambda: clean.roll(1, 0),
        "v of the next image": lambda: (signal * noise - rest * clean).roll(-1, 0),
        "v of the image before": lambda: (signal * noise - rest * clean).roll(1, 0),
        "the noise, upside down or mirrored": lambda: noise.flip(1),
    }
    used = gradient.norm(dim=1) > 0
    if not used.any():
        return Check("target", name, wanted, "no gradient", False, "the loss has no gradient with respect to the output"), None
    own = formula.prediction_type
    order = [own, *(key for key in candidates if key != own)]
    for key in order:
        scale, residual = fit(gradient[used], (output - candidates[key]())[used])
        limit = max(10 * TOLERANCE if key == own else 10 * SMALL, 2 * precision)
        if float(residual.quantile(0.9)) <= limit and worst(residual) <= 10 * limit:
            c = torch.zeros(len(gradient), dtype=gradient.dtype, device=gradient.device)
            c[used] = scale[:, 0]
            if key == own:
                observed = f"{own}, residual {worst(residual):.1e}"
                return Check("target", name, wanted, observed, True), c
            message = f"the loss compares the output with {_said(key)}, not with {_said(own)}"
            return Check("target", name, wanted, _said(key), False, message), c
    likely = {key: candidates[key]()[used] for key in ("epsilon", "sample", "v_prediction")}
    return _other_loss(gradient[used], output[used], likely, clean[used], noise[used], own)


def _said(key: str) -> str:
    names = {"epsilon": "the noise (epsilon)", "sample": "the clean image (sample)", "v_prediction": "v (v_prediction)"}
    return names.get(key, key)


def _other_loss(gradient, output, candidates, clean, noise, own) -> tuple[Check, None]:
    name, wanted = "target of the loss", f"squared error of the {own} prediction"

    def agreement(key: str) -> float:
        signs = torch.sign(gradient) * torch.sign(output - candidates[key])
        return float(signs.mean())

    best = max(candidates, key=agreement)
    of = "" if best == own else f" of {_said(best)}, not of {_said(own)}"
    if agreement(best) > 0.99:
        difference, size = output - candidates[best], gradient.abs()
        largest = size.amax(1, keepdim=True)
        flat_share = float((size > 0.999 * largest).double().mean())
        if flat_share > 0.9:
            text = f"the loss is the absolute error (L1){of}, not the squared one"
        elif flat_share > 0.01:
            text = f"the loss is a Huber (smooth L1) error{of}: large errors count less than their square"
        else:
            power, _ = fit(size.clamp(min=1e-30).log(), difference.abs().clamp(min=1e-30).log(), torch.ones_like(size))
            text = f"the loss is no squared error{of}: its gradient grows as the error to the power {middle(power[:, 0]):.2g}"
        return Check("target", name, wanted, "another loss", False, text), None
    coefficients, residual = fit(gradient, output, clean, noise)
    c, of_clean, of_noise = coefficients.T
    parts = f"{middle(-of_clean / c):.2g} x_0 + {middle(-of_noise / c):.2g} noise"
    text = f"what the loss compares the output with is not {_said(own)}: {parts}, and {middle(residual):.0%} is something else"
    return Check("target", name, wanted, parts, False, text), None


def _weights(
    observed, timesteps, formula: DeclaredNoising, micro_steps: int, pixels: int, batch: int, precision: float
) -> Check:
    """`observed` [B]: what each sample's mean squared error counts in the batch's mean."""
    name, wanted = (
        "weight of each sample's loss",
        formula.weighting + (f", gamma {formula.snr_gamma:g}" if formula.snr_gamma else ""),
    )
    declared = formula.weights.to(observed.device)
    ratio = observed / declared[timesteps]
    if worst(ratio - 1) <= max(SMALL, precision):
        return Check("weight", name, wanted, f"{span(ratio)} times it", True)
    message = _explain_weights(observed, ratio, timesteps, declared, formula, micro_steps, pixels, batch)
    return Check("weight", name, wanted, f"{span(ratio)} times it", False, message)


def _explain_weights(observed, ratio, timesteps, declared, formula, micro_steps, pixels, batch) -> str:
    far = int((ratio.clamp(min=1e-30).log().abs()).argmax())
    sample = f"t = {int(timesteps[far])} counts {float(observed[far]):.3g}, declared {float(declared[timesteps[far]]):.3g}"
    everywhere = constant(ratio)
    if everywhere is not None:
        return explain_factor(everywhere, micro_steps, pixels, batch)
    if float(ratio.min()) < 0:
        return f"some samples' errors are increased: their weight is negative ({sample})"
    if constant(observed) is not None and constant(declared[timesteps]) is None:
        mean = float(declared[timesteps].mean())
        if abs(float(observed.mean()) / mean - 1) < 0.05:
            return f"every sample of the batch has the same weight, the mean of all: a shape mistake? ({sample})"
    snr, gamma = formula.snr.to(observed.device), formula.snr_gamma or 5.0
    others = {key: function(snr, gamma) for key, function in WEIGHTINGS.items() if key != formula.weighting}
    others |= {
        "the declared weights, reversed in time": declared.flip(0),
        "the declared weights, squared": declared**2,
        "the declared weights, their square root": declared.sqrt(),
        "1 / the declared weights": 1 / declared,
        "the declared weights of the next timestep": declared.roll(-1),
        "the declared weights of the timestep before": declared.roll(1),
    }
    factors = {key: constant(observed / weights[timesteps]) for key, weights in others.items()}
    factors = {key: factor for key, factor in factors.items() if factor is not None}
    if factors:
        key = min(factors, key=lambda key: abs(factors[key] - 1))
        times = "" if abs(factors[key] - 1) < SMALL else f", times {simple(factors[key])}"
        return f"errors are weighed by {key}{times}, not by {formula.weighting} ({sample})"
    if torch.allclose(observed.sort().values, declared[timesteps].sort().values, rtol=SMALL):
        return f"the weights are those of other images of the batch ({sample})"
    counted = int((observed.abs() > 1e-9).sum())
    if counted < len(observed):
        return f"only {counted} of {len(observed)} samples count in the loss"
    return f"errors are weighed by something else than {formula.weighting}: {sample}"


def explain_factor(factor: float, micro_steps: int, pixels: int, batch: int) -> str:
    """In words, why the whole loss may be `factor` times the declared mean over pixels, batch and micro steps."""
    causes = {
        "its sign is wrong: the loss is maximized": -1.0,
        "it is summed over the pixels, not averaged": float(pixels),
        "it is summed over the batch, not averaged": float(batch),
        "it is summed over pixels and batch, not averaged": float(pixels * batch),
        "it is not divided by the number of micro steps": float(micro_steps),
        "it is divided by the number of micro steps twice": 1.0 / micro_steps,
        "it is divided by the batch size twice": 1.0 / batch,
    }
    for text, value in causes.items():
        if value != 1.0 and abs(factor / value - 1) < 2e-3:
            return f"the loss is {simple(factor)} times the declared mean: {text}"
    return f"the loss is {simple(factor)} times the declared mean over pixels, batch and micro steps"

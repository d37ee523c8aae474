"""EDM2's forward pass and loss, identified: noise level, preconditioning, labels, the denoised image, lambda(sigma) and u."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from utils.diagnostics.audit.conditions import check_told
from utils.diagnostics.audit.declared import Declared
from utils.diagnostics.audit.fitting import (
    SMALL,
    TOLERANCE,
    constant,
    fit,
    gather,
    middle,
    named,
    named_multiple,
    neighbors,
    simple,
    span,
    worst,
)
from utils.diagnostics.audit.loss import NO_GRADIENT, Loss, seen_loss
from utils.diagnostics.audit.seen import Call, MicroStep
from utils.diagnostics.audit.verdict import Check, not_observed


@dataclass(frozen=True)
class Seen:
    """The batches of an update's micro steps together. Images are [B, N], all else [B]."""

    x: torch.Tensor  # the noisy image that the denoiser gets
    clean: torch.Tensor
    noise: torch.Tensor
    drawn: torch.Tensor  # noise levels
    sigma: torch.Tensor  # those that the denoiser is told
    raw_x: torch.Tensor  # the raw network's input
    c_noise: torch.Tensor  # the noise level that it is told
    raw_output: torch.Tensor
    denoised: torch.Tensor
    u: torch.Tensor


def check_denoising(micro_steps: list[MicroStep], declared: Declared, loss_scale: float = 1.0) -> list[Check]:
    """Checks of all micro steps together, of a denoiser ("network") called with (noisy images, sigmas, labels) that gives
    (D, u), the raw network ("unet") in it, and u's ("uncertainty").

    Clean images y, noise and sigmas are those that the loop told as "clean_images", "noise" and "sigmas".
    """
    usable = [step for step in micro_steps if _complete(step)]
    if not usable:
        return [not_observed("input", "noisy image", "y + sigma noise", "the network's forward pass was not seen")]
    calls, raw_calls = ([step.calls[name] for step in usable] for name in ("network", "unet"))
    seen = Seen(
        x=gather(call.inputs[0] for call in calls),
        clean=gather(step.batch["clean_images"] for step in usable),
        noise=gather(step.batch["noise"] for step in usable),
        drawn=_line(step.batch["sigmas"] for step in usable),
        sigma=_line(call.inputs[1] for call in calls),
        raw_x=gather(call.inputs[0] for call in raw_calls),
        c_noise=_line(call.inputs[1] for call in raw_calls),
        raw_output=gather(call.outputs[0] for call in raw_calls),
        denoised=gather(call.outputs[0] for call in calls),
        u=_line(call.outputs[1] for call in calls),
    )
    if not len(seen.sigma) == len(seen.x) == len(seen.drawn):
        message = f"the network got {len(seen.x)} images and {len(seen.sigma)} noise levels, {len(seen.drawn)} were drawn"
        return [Check("input", "batch", "one noise level for each image", "other numbers", False, message)]
    if seen.x.shape[1] < 8:
        return [
            not_observed("input", "noisy image", "y + sigma noise", "the images have too few different values for this check")
        ]
    sigma_data = declared.denoising.sigma_data
    checks = [_told(seen), _noisy(seen), *_preconditioning(seen, sigma_data), *check_told(usable, "unet")]
    checks.append(_own_u(seen, [step.calls["uncertainty"] for step in usable if "uncertainty" in step.calls]))
    raw_loss = seen_loss(raw_calls, declared.micro_steps, loss_scale)
    loss = seen_loss(calls, declared.micro_steps, loss_scale)
    if isinstance(raw_loss, Loss):
        checks.append(_raw_target(seen, raw_loss, sigma_data))
    if isinstance(loss, str):
        return [*checks, not_observed("target", "target", "the clean image", loss)]
    target, weights = _target(seen, loss)
    checks.append(target)
    if weights is None:
        return checks
    checks.append(_weights(weights, seen, loss, sigma_data))
    if any(1 not in call.gradients for call in calls):
        text = "u(sigma) gets no gradient: it is not trained"
        return [*checks, Check("weight", "gradient of u(sigma)", "1 - lambda error / exp(u)", "none", False, text)]
    to_u = _line(call.gradients[1] for call in calls) / loss_scale * loss.sizes * loss.micro_steps
    pairs = [(step.calls["network"].outputs[0].detach().float(), step.batch["clean_images"].float()) for step in usable]
    error = torch.cat([(denoised - clean).square().flatten(1).mean(1).double() for denoised, clean in pairs])
    return [*checks, _uncertainty(to_u, _lambda(seen.sigma, sigma_data) * error, seen.u, loss)]


def _complete(step: MicroStep) -> bool:
    called = all(name in step.calls and step.calls[name].outputs for name in ("network", "unet"))
    return called and {"clean_images", "noise", "sigmas"} <= step.batch.keys()


def _line(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """One number for each image, float64 [B]."""
    return torch.cat([part.detach().double().reshape(-1) for part in parts])


def _lambda(sigma: torch.Tensor, sigma_data: float) -> torch.Tensor:
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


# ---- the noise level and the noisy image


def _told(seen: Seen) -> Check:
    name, wanted = "noise level that the network gets", "the one that was drawn"
    told, drawn = seen.sigma, seen.drawn
    if worst(told / drawn - 1) <= TOLERANCE:
        if len(told) >= 8 and constant(told, 1e-6) is not None:
            message = "all images of the update have one noise level; each image should have its own"
            return Check("timestep", name, "one for each image", f"{float(told[0]):.4g} for all", False, message)
        return Check("timestep", name, wanted, "the same", True)
    known = neighbors("those", drawn) | {
        "their logarithms": drawn.log(),
        "c_noise = ln(sigma) / 4": drawn.log() / 4,
        "their squares": drawn**2,
        "their square roots": drawn.sqrt(),
        "1 / sigma": 1 / drawn,
        "rounded to bf16": drawn.to(torch.bfloat16).double(),
    }
    factor = constant(told / drawn)
    how = f"{simple(factor)} times those" if factor else named(told, known, 1e-4 * worst(told)) or "others"
    message = f"the network gets other noise levels than those drawn: {how}"
    return Check("timestep", name, wanted, how, False, message)


def _noisy(seen: Seen) -> Check:
    name, wanted = "coefficients of image and noise", "1, sigma"
    x, y, sigma = seen.x, seen.clean, seen.drawn
    coefficients, residual = fit(x, y, seen.noise)
    a, b = coefficients.T
    clear = y.norm(dim=1) > 1e-3 * y.shape[1] ** 0.5
    # At high noise levels the image's coefficient is known to the rounding of the noise alone.
    blur = 1e-6 * (1 + sigma * seen.noise.norm(dim=1) / y.norm(dim=1).clamp(min=1e-12))
    off = ((a - 1).abs() / (TOLERANCE + blur))[clear], (b / sigma - 1).abs() / (TOLERANCE + 1e-6 * (1 + 1 / sigma))
    observed = f"{span(a[clear])}, sigma times {span(b / sigma)}; residual {worst(residual):.1e}"
    if worst(torch.cat(off)) <= 1 and worst(residual) <= TOLERANCE:
        return Check("input", name, wanted, observed, True)
    if worst(residual) > 1e-3:
        implied = (x - y) / sigma[:, None]
        message = f"the noisy image is not y + sigma noise: {middle(residual):.0%} of it is something else"
        if 0.8 < middle(implied.square().mean(1)) < 1.25:
            message = "the noise in the image is not the noise that was drawn for it"
    elif (factor := constant(b / sigma)) is not None:
        message = f"the noise is {simple(factor)} times sigma, and the image {span(a[clear])} times itself"
    else:
        known = {"sigma squared": sigma**2, "the square root of sigma": sigma.sqrt(), "1": sigma**0}
        said = named(b, known | neighbors("sigma", sigma), 0.0, SMALL) or f"{span(b / sigma)} times sigma"
        message = f"the noise in the image is scaled by {said}, not by sigma"
    return Check("input", name, wanted, observed, False, message)


# ---- the preconditioning

_Formulas = dict[str, Callable[[torch.Tensor, float], torch.Tensor]]  # of sigma s and sigma_data d
_OTHER_NOISE_LEVELS: _Formulas = {
    "ln(sigma)": lambda s, d: s.log(),
    "sigma": lambda s, d: s,
    "sigma / 4": lambda s, d: s / 4,
    "ln(sigma) / 2": lambda s, d: s.log() / 2,
    "1000 times it": lambda s, d: 250 * s.log(),
    "-ln(sigma) / 4": lambda s, d: -s.log() / 4,
    "0": lambda s, d: s * 0,
    "log2(sigma) / 4": lambda s, d: s.log2() / 4,
    "log10(sigma) / 4": lambda s, d: s.log10() / 4,
    "ln(sigma) / 8": lambda s, d: s.log() / 8,
    "ln(sigma^2 + sigma_data^2) / 4": lambda s, d: (s**2 + d**2).log() / 4,
    "ln(1 + sigma) / 4": lambda s, d: s.log1p() / 4,
    "rounded to bf16": lambda s, d: (s.log() / 4).to(torch.bfloat16).double(),
    "rounded to fp16": lambda s, d: (s.log() / 4).half().double(),
}
_FORMULAS: dict[str, tuple[str, Callable[[torch.Tensor, float], torch.Tensor]]] = {  # Karras et al. 2022, table 1
    "c_in": ("1 / sqrt(sigma^2 + sigma_data^2)", lambda s, d: (s**2 + d**2).rsqrt()),
    "c_skip": ("sigma_data^2 / (sigma^2 + sigma_data^2)", lambda s, d: d**2 / (s**2 + d**2)),
    "c_out": ("sigma sigma_data / sqrt(sigma^2 + sigma_data^2)", lambda s, d: s * d * (s**2 + d**2).rsqrt()),
}
_OTHER_COEFFICIENTS: _Formulas = {
    "1": lambda s, d: s**0,
    "0": lambda s, d: s * 0,
    "sigma": lambda s, d: s,
    "1 / sigma": lambda s, d: 1 / s,
    "1 / (sigma^2 + sigma_data^2)": lambda s, d: 1 / (s**2 + d**2),
    "sqrt(sigma^2 + sigma_data^2)": lambda s, d: (s**2 + d**2).sqrt(),
    "sigma^2 / (sigma^2 + sigma_data^2)": lambda s, d: s**2 / (s**2 + d**2),
    "sigma_data / (sigma^2 + sigma_data^2)": lambda s, d: d / (s**2 + d**2),
    "sigma sigma_data / (sigma^2 + sigma_data^2)": lambda s, d: s * d / (s**2 + d**2),
    "sigma / sqrt(sigma^2 + sigma_data^2)": lambda s, d: s * (s**2 + d**2).rsqrt(),
    "sigma_data / sqrt(sigma^2 + sigma_data^2)": lambda s, d: d * (s**2 + d**2).rsqrt(),
    "1 / sqrt(sigma^2 + 1)": lambda s, d: (s**2 + 1).rsqrt(),
    "1 / (sigma + sigma_data)": lambda s, d: 1 / (s + d),
    "sigma sigma_data": lambda s, d: s * d,
}
_SIGMA_DATA_SQUARED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {  # from the coefficient and sigma
    "c_in": lambda c, s: 1 / c**2 - s**2,
    "c_skip": lambda c, s: c * s**2 / (1 - c),
    "c_out": lambda c, s: c**2 * s**2 / (s**2 - c**2),
}


def _preconditioning(seen: Seen, sigma_data: float) -> list[Check]:
    """c_in and c_noise of the raw network's input; c_skip and c_out of the denoised image."""
    x, sigma, raw, denoised = seen.x, seen.sigma, seen.raw_output, seen.denoised
    checks = [_coefficient("c_in", seen.raw_x, (x,), sigma, sigma_data), _noise_level(seen, sigma_data)]
    if not raw.any():
        # A network that starts with an output of zeros shows its skip alone.
        return [*checks, _coefficient("c_skip", denoised, (x,), sigma, sigma_data)]
    checks.append(_coefficient("c_skip", denoised, (x, raw), sigma, sigma_data))
    some = raw.norm(dim=1) > 0
    return [*checks, _coefficient("c_out", denoised[some], (raw[some], x[some]), sigma[some], sigma_data)]


def _noise_level(seen: Seen, sigma_data: float) -> Check:
    declared, text = seen.sigma.log() / 4, ""
    fine = worst(seen.c_noise - declared) <= TOLERANCE * max(1.0, worst(declared))
    if not fine:
        known = {name: formula(seen.sigma, sigma_data) for name, formula in _OTHER_NOISE_LEVELS.items()}
        known |= neighbors("those", declared)
        how = named(seen.c_noise, known, 1e-4 * max(worst(seen.c_noise), 1e-3)) or "something else"
        text = f"the network gets {how} as noise level, not c_noise = ln(sigma) / 4"
    return Check("timestep", "c_noise", "ln(sigma) / 4", "the same" if fine else "others", fine, text)


def _coefficient(
    name: str, total: torch.Tensor, parts: tuple[torch.Tensor, ...], sigma: torch.Tensor, sigma_data: float
) -> Check:
    """Of the first of the `parts` [B, N] of which `total` is the sum."""
    mix, residual = fit(total, *parts)
    observed, (wanted, formula) = mix[:, 0], _FORMULAS[name]
    declared = formula(sigma, sigma_data)
    blur = TOLERANCE * (1 + declared.abs())
    if len(parts) > 1:  # rounding of the sum, as a share of this part
        blur = blur + 1e-5 * total.norm(dim=1) / parts[0].norm(dim=1).clamp(min=1e-300)
    times = f"{span(observed / declared)} times it"
    said, stage = f"{times}; residual {worst(residual):.1e}", "input" if name == "c_in" else "network"
    if bool(((observed - declared).abs() <= blur).all()) and worst(residual) <= 10 * TOLERANCE:
        return Check(stage, name, wanted, said, True)
    known = {text: other(sigma, sigma_data) for text, other in _OTHER_COEFFICIENTS.items()}
    known |= {f"-{wanted}": -declared} | neighbors("that", declared)
    how = named(observed, known, 10 * blur, SMALL)
    if how is None and worst(residual) > 1e-2:
        how = f"something else ({middle(residual):.0%} of it)"
    if how is None:
        squares = _SIGMA_DATA_SQUARED[name](observed, sigma)
        square = middle(squares)
        fits = square > 0 and worst(squares / square - 1) < 0.02
        how = f"that of sigma_data {square**0.5:.3g}, declared {sigma_data:g}" if fits else times
    return Check(stage, name, wanted, said, False, f"{name} is {how}, declared {wanted}")


# ---- the loss

_TARGETS: dict[str, Callable[[Seen], torch.Tensor]] = {
    "the clean image": lambda seen: seen.clean,
    "the noise": lambda seen: seen.noise,
    "the noisy image": lambda seen: seen.x,
    "minus the clean image": lambda seen: -seen.clean,
    "minus the noise": lambda seen: -seen.noise,
    "the clean image of the next sample": lambda seen: seen.clean.roll(-1, 0),
    "the clean image of the sample before": lambda seen: seen.clean.roll(1, 0),
    "the clean image in [0, 1]": lambda seen: (seen.clean + 1) / 2,
    "the clean image, mirrored or upside down": lambda seen: seen.clean.flip(1),
    "zero": lambda seen: seen.clean * 0,
    "sigma times the noise": lambda seen: seen.sigma[:, None] * seen.noise,
}


def _target(seen: Seen, loss: Loss) -> tuple[Check, torch.Tensor | None]:
    """(the check, what each sample's mean squared error counts, [B]; None where no target fits)."""
    name, wanted, own = "target of the loss", "squared error of the denoised image", "the clean image"
    if not loss.used.any():
        return Check("target", name, wanted, "no gradient", False, NO_GRADIENT), None
    for found, target_of in _TARGETS.items():
        target = target_of(seen)
        weights, residual = loss.compared_with(target)
        # The difference of nearly equal numbers has the rounding of both.
        blur = 1e-6 * (target.norm(dim=1) / (seen.denoised - target).norm(dim=1).clamp(min=1e-30))[loss.used]
        if bool((residual <= (10 * TOLERANCE if found == own else SMALL) + blur).all()):
            text = f"the loss compares the denoised image with {found}, not with the clean image"
            return Check("target", name, wanted, found, found == own, text), weights
    text = "the loss is not a squared error of the denoised image"
    text = loss.other_error(seen.clean) if loss.agreement(seen.clean) > 0.99 else text
    return Check("target", name, wanted, "another loss", False, text), None


def _raw_target(seen: Seen, loss: Loss, sigma_data: float) -> Check:
    """The squared error of D is one of the raw network's output, whose target follows from the preconditioning."""
    name, wanted = "target of the raw network", "(y - c_skip x) / c_out"
    c_skip, c_out = (_FORMULAS[part][1](seen.sigma, sigma_data)[:, None] for part in ("c_skip", "c_out"))
    if not loss.used.any():
        return not_observed("target", name, wanted, "no gradient")
    _, residual = loss.compared_with((seen.clean - c_skip * seen.x) / c_out)
    # x - y keeps fewer digits the less noise there is.
    fine = bool((residual <= max(SMALL, 4 * loss.precision) + 1e-5 / seen.sigma[loss.used]).all())
    text = f"the raw network is trained on another target than {wanted}: another preconditioning, or another loss"
    return Check("target", name, wanted, f"residual {worst(residual):.1e}", fine, text)


_WEIGHTS: dict[str, Callable[..., torch.Tensor]] = {  # of lambda, u, sigma and sigma_data
    "lambda(sigma), without exp(u)": lambda w, u, s, d: w,
    "lambda(sigma) exp(u): u of the wrong sign": lambda w, u, s, d: w * u.exp(),
    "1 / exp(u), without lambda(sigma)": lambda w, u, s, d: (-u).exp(),
    "1: neither lambda(sigma) nor u": lambda w, u, s, d: u**0,
    "1 / lambda(sigma)": lambda w, u, s, d: 1 / w,
    "1 / lambda(sigma) / exp(u): lambda upside down": lambda w, u, s, d: 1 / w / u.exp(),
    "lambda(sigma) / exp(2 u)": lambda w, u, s, d: w / (2 * u).exp(),
    "lambda(sigma) / exp(u / 2)": lambda w, u, s, d: w / (u / 2).exp(),
    "1 / sigma^2 / exp(u)": lambda w, u, s, d: 1 / s**2 / u.exp(),
    "(sigma^2 + sigma_data^2) / exp(u)": lambda w, u, s, d: (s**2 + d**2) / u.exp(),
    "(sigma^2 + sigma_data^2) / (sigma sigma_data) / exp(u): the square is missing": lambda w, u, s, d: (
        (s**2 + d**2) / (s * d) / u.exp()
    ),
    "lambda(sigma)^2 / exp(u)": lambda w, u, s, d: w**2 / u.exp(),
    "sqrt(lambda(sigma)) / exp(u)": lambda w, u, s, d: w.sqrt() / u.exp(),
    "lambda(sigma) / exp(u) of the next sample": lambda w, u, s, d: (w / u.exp()).roll(-1),
    "lambda(sigma) / exp(u) of the sample before": lambda w, u, s, d: (w / u.exp()).roll(1),
    "lambda(sigma) of the next sample, / exp(u)": lambda w, u, s, d: w.roll(-1) / u.exp(),
    "the mean of all, the same for every sample": lambda w, u, s, d: (w / u.exp()).mean().expand_as(w),
}


def _weights(observed: torch.Tensor, seen: Seen, loss: Loss, sigma_data: float) -> Check:
    """`observed` [B]: what each sample's mean squared error counts in the declared mean."""
    name, wanted = "weight of each sample's loss", "lambda(sigma) / exp(u)"
    weight = _lambda(seen.sigma, sigma_data)
    expected = weight / seen.u.exp()
    ratio = observed / expected
    if worst(ratio - 1) <= SMALL:
        return Check("weight", name, wanted, f"{span(ratio)} times it", True)
    known = {text: formula(weight, seen.u, seen.sigma, sigma_data) for text, formula in _WEIGHTS.items()}
    far = int(ratio.clamp(min=1e-30).log().abs().argmax())
    counts = f"sigma = {float(seen.sigma[far]):.3g} counts {float(observed[far]):.3g}, declared {float(expected[far]):.3g}"
    message = f"errors are weighed by {named_multiple(observed, known) or f'something else: {counts}'}"
    if (factor := constant(ratio)) is not None:
        message = loss.explain_factor(factor)
    return Check("weight", name, wanted, f"{span(ratio)} times it", False, message)


def _own_u(seen: Seen, calls: list[Call]) -> Check:
    """Whether each sample has the u that its own noise level gives."""
    name, wanted = "u of each sample", "u(sigma) of its noise level"
    outputs = [output for call in calls for output in call.outputs[:1]]
    if sum(output.numel() for output in outputs) != len(seen.u):
        return not_observed("weight", name, wanted, "the pass that computes it was not seen")
    told, given = _line(call.inputs[0] for call in calls), _line(outputs)
    off = max(worst(told / seen.sigma - 1), worst(given - seen.u))
    others = [neighbors("that", output) for output in outputs]
    how = named(seen.u, {said: _line(part[said] for part in others) for said in others[0]}, TOLERANCE) or "another"
    text = f"the u that weighs a sample's error is not that of its own noise level: {how}"
    return Check("weight", name, wanted, f"off by {off:.1e}", off <= TOLERANCE, text)


def _uncertainty(to_u: torch.Tensor, weighted: torch.Tensor, u: torch.Tensor, loss: Loss) -> Check:
    """`to_u` [B]: the gradient of the sample's loss with respect to u; `weighted` [B]: lambda times its squared error."""
    name, wanted = "gradient of u(sigma)", "1 - lambda error / exp(u)"
    share = weighted / u.exp()
    expected, blur = 1 - share, SMALL * (1 + share.abs())
    found = f"off by {worst(to_u - expected):.1e}"
    if bool(((to_u - expected).abs() <= blur).all()):
        return Check("weight", name, wanted, found, True)
    known = {
        "1: the weighted error does not reach it (detached?)": share**0,
        "- lambda error / exp(u): the term + u is missing": -share,
        "of the wrong sign": -expected,
        "1 + lambda error / exp(u): exp(-u) where exp(u) belongs": 1 + weighted,
        "0: it is detached": share * 0,
        "half of what it should be": expected / 2,
        "1/2 - lambda error / exp(u): u counts half": 0.5 - share,
        "2 - lambda error / exp(u): u counts twice": 2 - share,
    }
    how, factor = named(to_u, known, blur), constant(to_u / expected)
    if how is None and factor is not None:
        how = replace(loss, pixels=1).explain_factor(factor)  # it has no pixels to be summed over
    return Check("weight", name, wanted, found, False, f"the gradient that u(sigma) gets is {how or 'something else'}")

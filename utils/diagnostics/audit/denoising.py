"""EDM2's forward pass and loss, identified: noise level, preconditioning, labels, the denoised image, lambda(sigma) and u."""

import torch

from utils.diagnostics.audit.declared import Declared
from utils.diagnostics.audit.fitting import constant, fit, flat, middle, simple, span, worst
from utils.diagnostics.audit.noising import SMALL, TOLERANCE, explain_factor
from utils.diagnostics.audit.observer import MicroStep
from utils.diagnostics.audit.verdict import Check, not_observed


def check_denoising(micro_steps: list[MicroStep], declared: Declared, loss_scale: float = 1.0) -> list[Check]:
    """Checks of all micro steps together, of a denoiser ("network") called with (noisy images, sigmas, labels) that gives
    (D, u), the raw network ("unet") in it, and u's ("uncertainty").

    Clean images y, noise and sigmas are those that the loop told as "clean_images", "noise" and "sigmas".
    """
    usable = [
        s
        for s in micro_steps
        if {"network", "unet"} <= s.calls.keys() and {"clean_images", "noise", "sigmas"} <= s.batch.keys()
    ]
    usable = [s for s in usable if s.calls["network"].outputs and s.calls["unet"].outputs]
    if not usable:
        return [not_observed("input", "noisy image", "y + sigma noise", "the network's forward pass was not seen")]

    def gather(get) -> torch.Tensor:
        return torch.cat([flat(get(step)) for step in usable])

    def line(get) -> torch.Tensor:
        return torch.cat([get(step).detach().double().reshape(-1) for step in usable])

    x = gather(lambda s: s.calls["network"].inputs[0])
    y, noise = gather(lambda s: s.batch["clean_images"]), gather(lambda s: s.batch["noise"])
    drawn = line(lambda s: s.batch["sigmas"])
    told = line(lambda s: s.calls["network"].inputs[1])
    if len(told) != len(drawn) or len(x) != len(drawn):
        message = f"the network got {len(x)} images and {len(told)} noise levels, {len(drawn)} were drawn"
        return [Check("input", "batch", "one noise level for each image", "other numbers", False, message)]
    if x.shape[1] < 8:
        return [not_observed("input", "noisy image", "y + sigma noise", "images of so few values tell nothing")]
    checks = [_told(told, drawn), _noisy(x, y, noise, drawn)]
    sigma = told
    raw_x = gather(lambda s: s.calls["unet"].inputs[0])
    raw_out = gather(lambda s: s.calls["unet"].outputs[0])
    denoised = gather(lambda s: s.calls["network"].outputs[0])
    c_noise = line(lambda s: s.calls["unet"].inputs[1])
    checks += _preconditioning(raw_x, raw_out, denoised, x, c_noise, sigma, declared.denoising.sigma_data)
    checks += _labels(usable)
    seen = [s for s in usable if 0 in s.calls["network"].gradients]
    if len(seen) < len(usable):
        return [*checks, not_observed("target", "target", "the clean image", "no gradient reached the output")]
    if all(0 in s.calls["unet"].gradients for s in usable):
        to_raw = gather(lambda s: s.calls["unet"].gradients[0])
        precision = float(torch.finfo(usable[0].calls["unet"].outputs[0].dtype).eps)
        checks.append(_raw_target(to_raw, raw_out, x, y, sigma, declared.denoising.sigma_data, precision))
    gradient = gather(lambda s: s.calls["network"].gradients[0]) / loss_scale
    if not torch.isfinite(gradient).all():
        return [*checks, not_observed("target", "target", "the clean image", "the gradient is not finite")]
    batch = float(len(usable[0].batch["sigmas"]))
    outputs = [s.calls["network"].outputs[0].detach().double() for s in usable]
    error = torch.cat([(d - s.batch["clean_images"].double()).square().flatten(1).mean(1) for d, s in zip(outputs, usable)])
    pixels = outputs[0][0].numel()
    u = line(lambda s: s.calls["network"].outputs[1])
    to_u = None
    if all(1 in s.calls["network"].gradients for s in usable):
        to_u = line(lambda s: s.calls["network"].gradients[1]) / loss_scale * batch * declared.micro_steps
    return [*checks, *_loss(gradient, denoised, x, y, noise, sigma, u, to_u, error, pixels, declared, batch)]


def _told(told: torch.Tensor, drawn: torch.Tensor) -> Check:
    name, wanted = "noise level that the network is told", "the one that was drawn"
    off = worst(told / drawn - 1)
    if off <= TOLERANCE:
        if len(told) >= 8 and constant(told, 1e-6) is not None:
            message = "all images of the update have one noise level; each image should have its own"
            return Check("timestep", name, "one for each image", f"{float(told[0]):.4g} for all", False, message)
        return Check("timestep", name, wanted, "the same", True)
    shapes = {
        "those of the next image": drawn.roll(-1),
        "those of the image before": drawn.roll(1),
        "their logarithms": drawn.log(),
        "c_noise = ln(sigma) / 4": drawn.log() / 4,
        "their squares": drawn**2,
        "their square roots": drawn.sqrt(),
        "1 / sigma": 1 / drawn,
        "rounded to bf16": drawn.to(torch.bfloat16).double(),
    }
    how = next((text for text, values in shapes.items() if worst(told - values) < 1e-4 * worst(values)), "others")
    factor = constant(told / drawn)
    how = f"{simple(factor)} times those" if factor is not None else how
    message = f"the network is told other noise levels than those drawn: {how}"
    return Check("timestep", name, wanted, how, False, message)


def _noisy(x, y, noise, sigma) -> Check:
    name, wanted = "coefficients of image and noise", "1, sigma"
    coefficients, residual = fit(x, y, noise)
    a, b = coefficients.T
    clear = y.norm(dim=1) > 1e-3 * y.shape[1] ** 0.5
    # At high noise levels the image's coefficient is known to the rounding of the noise alone.
    blur = 1e-6 * (1 + sigma * noise.norm(dim=1) / y.norm(dim=1).clamp(min=1e-12))
    off = (
        torch.where(clear, (a - 1).abs() / (TOLERANCE + blur), 0.0),
        (b / sigma - 1).abs() / (TOLERANCE + 1e-6 * (1 + 1 / sigma)),
    )
    observed = f"{span(a[clear]) if clear.any() else '-'}, sigma times {span(b / sigma)}; residual {worst(residual):.1e}"
    if worst(torch.stack(off)) <= 1 and worst(residual) <= TOLERANCE:
        return Check("input", name, wanted, observed, True)
    if worst(residual) > 1e-3:
        implied = (x - y) / sigma[:, None]
        message = f"the noisy image is not y + sigma noise: {middle(residual):.0%} of it is something else"
        if 0.8 < middle(implied.square().mean(1)) < 1.25:
            message = "the noise in the image is other noise than the one drawn for it"
    elif (factor := constant(b / sigma)) is not None:
        message = (
            f"the noise is {simple(factor)} times sigma, and the image {span(a[clear]) if clear.any() else '?'} times itself"
        )
    else:
        shapes = {"sigma squared": sigma**2, "the square root of sigma": sigma.sqrt(), "the next image's sigma": sigma.roll(-1)}
        shapes |= {"sigma of the image before": sigma.roll(1), "1": torch.ones_like(sigma)}
        said = next(
            (text for text, values in shapes.items() if worst(b / values - 1) < SMALL), span(b / sigma) + " times sigma"
        )
        message = f"the noise in the image is scaled by {said}, not by sigma"
    return Check("input", name, wanted, observed, False, message)


def _preconditioning(raw_x, raw_out, denoised, x, c_noise, sigma, sigma_data) -> list[Check]:
    """c_in, c_noise of the raw network's input; c_skip, c_out of the denoised image (Karras et al. 2022, table 1)."""
    total = sigma**2 + sigma_data**2
    wanted = {"c_in": total**-0.5, "c_skip": sigma_data**2 / total, "c_out": sigma * sigma_data * total**-0.5}
    scale, residual = fit(raw_x, x)
    checks = [_coefficient("input", "c_in", scale[:, 0], wanted["c_in"], residual, sigma, sigma_data)]
    declared_noise = sigma.log() / 4
    fine = worst(c_noise - declared_noise) <= TOLERANCE * max(1.0, worst(declared_noise))
    text = ""
    if not fine:
        shapes = {"ln(sigma)": sigma.log(), "sigma": sigma, "sigma / 4": sigma / 4, "ln(sigma) / 2": sigma.log() / 2}
        shapes |= {"1000 times it": 250 * sigma.log(), "-ln(sigma) / 4": -sigma.log() / 4, "0": sigma * 0}
        shapes |= {"those of the next image": declared_noise.roll(-1), "those of the image before": declared_noise.roll(1)}
        shapes |= {"log2(sigma) / 4": sigma.log2() / 4, "log10(sigma) / 4": sigma.log10() / 4, "ln(sigma) / 8": sigma.log() / 8}
        shapes |= {"ln(sigma^2 + sigma_data^2) / 4": total.log() / 4, "ln(1 + sigma) / 4": sigma.log1p() / 4}
        shapes |= {
            "rounded to bf16": declared_noise.to(torch.bfloat16).double(),
            "rounded to fp16": declared_noise.half().double(),
        }
        how = next((t for t, v in shapes.items() if worst(c_noise - v) < 1e-4 * max(worst(v), 1e-3)), "something else")
        text = f"the network is told {how} as noise level, not c_noise = ln(sigma) / 4"
    checks.append(Check("timestep", "c_noise", "ln(sigma) / 4", "the same" if fine else "others", fine, text))
    if not raw_out.any():
        # A network that starts with an output of zeros shows its skip alone.
        skip, residual = fit(denoised, x)
        return [*checks, _coefficient("network", "c_skip", skip[:, 0], wanted["c_skip"], residual, sigma, sigma_data)]
    mix, residual = fit(denoised, x, raw_out)
    for place, name in enumerate(("c_skip", "c_out")):
        clear = raw_out.norm(dim=1) > 0 if place else torch.ones_like(sigma, dtype=torch.bool)
        values = (mix[clear, place], wanted[name][clear], residual[clear], sigma[clear])
        checks.append(
            _coefficient("network", name, *values, sigma_data, sizes=(x[clear], raw_out[clear], denoised[clear], place))
        )
    return checks


def _raw_target(
    gradient: torch.Tensor,
    raw_out: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    sigma: torch.Tensor,
    sigma_data: float,
    precision: float,
) -> Check:
    """The squared error of D is one of the raw network's output, whose target follows from the preconditioning."""
    name, wanted = "target of the raw network", "(y - c_skip x) / c_out"
    total = (sigma**2 + sigma_data**2)[:, None]
    target = (y - sigma_data**2 / total * x) / (sigma[:, None] * sigma_data * total.rsqrt())
    used = gradient.norm(dim=1) > 0
    if not used.any() or not torch.isfinite(gradient).all():
        return not_observed("target", name, wanted, "no gradient")
    _, residual = fit(gradient[used], (raw_out - target)[used])
    limit = max(SMALL, 4 * precision) + 1e-5 / sigma[used]  # x - y keeps fewer digits the less noise there is
    fine = bool((residual <= limit).all())
    text = "the raw network is trained on another target than (y - c_skip x) / c_out: another preconditioning, or another loss"
    return Check("target", name, wanted, f"residual {worst(residual):.1e}", fine, text)


def _coefficient(stage, name, observed, wanted, residual, sigma, sigma_data, sizes=None) -> Check:
    blur = torch.full_like(sigma, TOLERANCE) * (1 + wanted.abs())
    if sizes is not None:
        x, raw_out, denoised, place = sizes
        part = (x, raw_out)[place].norm(dim=1).clamp(min=1e-300)
        blur = blur + 1e-5 * denoised.norm(dim=1) / part  # rounding of the sum, as a share of this part
    formula = {"c_in": "1 / sqrt(sigma^2 + sigma_data^2)", "c_skip": "sigma_data^2 / (sigma^2 + sigma_data^2)"}
    formula |= {"c_out": "sigma sigma_data / sqrt(sigma^2 + sigma_data^2)"}
    ratio = observed / wanted
    said = f"{span(ratio)} times it; residual {worst(residual):.1e}"
    if bool(((observed - wanted).abs() <= blur).all()) and worst(residual) <= 10 * TOLERANCE:
        return Check(stage, name, formula[name], said, True)
    total = sigma**2 + sigma_data**2
    shapes = {
        "1": torch.ones_like(sigma),
        "0": torch.zeros_like(sigma),
        "sigma": sigma,
        "1 / sigma": 1 / sigma,
        "1 / (sigma^2 + sigma_data^2)": 1 / total,
        "sqrt(sigma^2 + sigma_data^2)": total.sqrt(),
        "sigma^2 / (sigma^2 + sigma_data^2)": sigma**2 / total,
        "sigma_data / (sigma^2 + sigma_data^2)": sigma_data / total,
        "sigma sigma_data / (sigma^2 + sigma_data^2)": sigma * sigma_data / total,
        "sigma / sqrt(sigma^2 + sigma_data^2)": sigma / total.sqrt(),
        "sigma_data / sqrt(sigma^2 + sigma_data^2)": sigma_data / total.sqrt(),
        "1 / sqrt(sigma^2 + 1)": (sigma**2 + 1).rsqrt(),
        "1 / (sigma + sigma_data)": 1 / (sigma + sigma_data),
        "sigma sigma_data": sigma * sigma_data,
        "-" + formula[name]: -wanted,
        "that of the next image": wanted.roll(-1),
        "that of the image before": wanted.roll(1),
    }
    how = next((t for t, v in shapes.items() if bool(((observed - v).abs() <= 10 * blur + SMALL * v.abs()).all())), None)
    if how is None and worst(residual) > 1e-2:
        how = f"something else ({middle(residual):.0%} of it)"
    if how is None:
        other = _other_sigma_data(name, observed, sigma)
        how = f"that of sigma_data {other:.3g}, declared {sigma_data:g}" if other else f"{span(ratio)} times it"
    return Check(stage, name, formula[name], said, False, f"{name} is {how}, declared {formula[name]}")


def _other_sigma_data(name: str, observed: torch.Tensor, sigma: torch.Tensor) -> float | None:
    """The sigma_data for which all observed coefficients would be right."""
    if name == "c_in":
        squares = 1 / observed**2 - sigma**2
    elif name == "c_skip":
        squares = observed * sigma**2 / (1 - observed)
    else:
        squares = observed**2 * sigma**2 / (sigma**2 - observed**2)
    value = middle(squares)
    return value**0.5 if value > 0 and worst(squares / value - 1) < 0.02 else None


def _labels(usable: list[MicroStep]) -> list[Check]:
    """Whether the raw network is told the labels that were drawn."""
    pairs = []
    for step in usable:
        drawn, inputs = step.batch.get("labels"), step.calls["unet"].inputs
        if drawn is None or len(inputs) < 3:
            return []
        if inputs[2] is None:
            pairs.append((drawn, torch.full_like(drawn, -1)))
        else:
            pairs.append((drawn, inputs[2].reshape(-1)))
    drawn, told = (torch.cat(parts) for parts in zip(*pairs))
    same = torch.equal(drawn.long().cpu(), told.long().cpu())
    text = ""
    if not same:
        rolled = {"those of the next image": drawn.roll(-1), "those of the image before": drawn.roll(1)}
        rolled |= {"none": torch.full_like(drawn, -1), "one too high": drawn + 1, "always 0": drawn * 0}
        how = next((t for t, v in rolled.items() if torch.equal(v.long().cpu(), told.long().cpu())), "others")
        text = f"the network is told other labels than those drawn: {how}"
    return [Check("condition", "labels that the network is told", "those drawn", "the same" if same else "others", same, text)]


def _loss(gradient, denoised, x, y, noise, sigma, u, to_u, error, pixels, declared: Declared, batch: float) -> list[Check]:
    sigma_data = declared.denoising.sigma_data
    total = sigma**2 + sigma_data**2
    name, wanted = "target of the loss", "squared error of the denoised image"
    candidates = {
        "the clean image": y,
        "the noise": noise,
        "the noisy image": x,
        "minus the clean image": -y,
        "minus the noise": -noise,
        "the clean image of the next sample": y.roll(-1, 0),
        "the clean image of the sample before": y.roll(1, 0),
        "the clean image in [0, 1]": (y + 1) / 2,
        "the clean image, mirrored or upside down": y.flip(1),
        "zero": torch.zeros_like(y),
        "sigma times the noise": sigma[:, None] * noise,
    }
    used = gradient.norm(dim=1) > 0
    if not used.any():
        return [Check("target", name, wanted, "no gradient", False, "the loss has no gradient with respect to the output")]
    found, scale = None, None
    for text, target in candidates.items():
        c, residual = fit(gradient[used], (denoised - target)[used])
        # The difference of nearly equal numbers, D and y, has the rounding of both.
        blur = 1e-6 * (target[used].norm(dim=1) / (denoised - target)[used].norm(dim=1).clamp(min=1e-30))
        if bool((residual <= (10 * TOLERANCE if target is y else SMALL) + blur).all()):
            found, scale = text, torch.zeros_like(sigma)
            scale[used] = c[:, 0]
            break
    if found is None:
        signs = float((torch.sign(gradient) * torch.sign(denoised - y))[used].mean())
        text = "the loss is no squared error of the denoised image"
        if signs > 0.99:
            size = gradient[used].abs()
            flat_share = float((size > 0.999 * size.amax(1, keepdim=True)).double().mean())
            kind = (
                "the absolute error (L1)"
                if flat_share > 0.9
                else "a Huber (smooth L1) error"
                if flat_share > 0.01
                else "another error"
            )
            text = f"the loss is {kind}, not the squared one"
        return [Check("target", name, wanted, "another loss", False, text)]
    fine = found == "the clean image"
    text = f"the loss compares the denoised image with {found}, not with the clean image"
    checks = [Check("target", name, wanted, found, fine, text)]
    observed = scale * pixels * batch * declared.micro_steps / 2
    weight = total / (sigma * sigma_data) ** 2
    checks.append(_weights(observed, weight, u, sigma, sigma_data, declared, pixels, int(batch)))
    if to_u is not None:
        checks.append(_uncertainty(to_u, weight * error / u.exp(), weight * error, declared, int(batch)))
    else:
        text = "u(sigma) gets no gradient: it is not trained"
        checks.append(Check("weight", "gradient of u(sigma)", "1 - lambda error / exp(u)", "none", False, text))
    return checks


def _weights(observed, weight, u, sigma, sigma_data, declared, pixels, batch) -> Check:
    name, wanted = "weight of each sample's loss", "lambda(sigma) / exp(u)"
    expected = weight / u.exp()
    ratio = observed / expected
    if worst(ratio - 1) <= SMALL:
        return Check("weight", name, wanted, f"{span(ratio)} times it", True)
    factor, message = constant(ratio), None
    if factor is not None:
        message = explain_factor(factor, declared.micro_steps, pixels, batch)
    else:
        total = sigma**2 + sigma_data**2
        shapes = {
            "lambda(sigma), without exp(u)": weight,
            "lambda(sigma) exp(u): u of the wrong sign": weight * u.exp(),
            "1 / exp(u), without lambda(sigma)": 1 / u.exp(),
            "1: neither lambda(sigma) nor u": torch.ones_like(u),
            "1 / lambda(sigma)": 1 / weight,
            "1 / lambda(sigma) / exp(u): lambda upside down": 1 / weight / u.exp(),
            "lambda(sigma) / exp(2 u)": weight / (2 * u).exp(),
            "lambda(sigma) / exp(u / 2)": weight / (u / 2).exp(),
            "1 / sigma^2 / exp(u)": 1 / sigma**2 / u.exp(),
            "(sigma^2 + sigma_data^2) / exp(u)": total / u.exp(),
            "(sigma^2 + sigma_data^2) / (sigma sigma_data) / exp(u): the square is missing": total
            / (sigma * sigma_data)
            / u.exp(),
            "lambda(sigma)^2 / exp(u)": weight**2 / u.exp(),
            "sqrt(lambda(sigma)) / exp(u)": weight.sqrt() / u.exp(),
            "lambda(sigma) / exp(u) of the next sample": expected.roll(-1),
            "lambda(sigma) / exp(u) of the sample before": expected.roll(1),
            "lambda(sigma) of the next sample, / exp(u)": weight.roll(-1) / u.exp(),
            "the mean of all, alike for every sample": expected.mean().expand_as(expected),
        }
        for text, values in shapes.items():
            times = constant(observed / values)
            if times is not None:
                message = f"errors are weighed by {text}" + ("" if abs(times - 1) < SMALL else f", times {simple(times)}")
                break
    if message is None:
        far = int(ratio.clamp(min=1e-30).log().abs().argmax())
        counts = f"sigma = {float(sigma[far]):.3g} counts {float(observed[far]):.3g}, declared {float(expected[far]):.3g}"
        message = f"errors are weighed by something else: {counts}"
    return Check("weight", name, wanted, f"{span(ratio)} times it", False, message)


def _uncertainty(to_u, share, weighted, declared, batch) -> Check:
    """`to_u` [B]: the gradient of the sample's loss with respect to u; `share` = lambda error / exp(u)."""
    name, wanted = "gradient of u(sigma)", "1 - lambda error / exp(u)"
    expected = 1 - share
    blur = SMALL * (1 + share.abs())
    found = f"off by {worst(to_u - expected):.1e}"
    if bool(((to_u - expected).abs() <= blur).all()):
        return Check("weight", name, wanted, found, True)
    shapes = {
        "1: the weighted error does not reach it (detached?)": torch.ones_like(share),
        "- lambda error / exp(u): the term + u is missing": -share,
        "of the wrong sign": -expected,
        "1 + lambda error / exp(u): exp(-u) where exp(u) belongs": 1 + weighted,
        "0: it is detached": torch.zeros_like(share),
        "half of what it should be": expected / 2,
        "1/2 - lambda error / exp(u): u counts half": 0.5 - share,
        "2 - lambda error / exp(u): u counts twice": 2 - share,
    }
    how = next((t for t, v in shapes.items() if bool(((to_u - v).abs() <= blur).all())), "something else")
    factor = constant(to_u / expected)
    how = explain_factor(factor, declared.micro_steps, 1, batch) if factor is not None and how == "something else" else how
    return Check("weight", name, wanted, found, False, f"the gradient that u(sigma) gets is {how}")

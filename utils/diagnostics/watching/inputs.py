"""What the network gets: image and noise in the amounts of one process, and the noise level that it is told."""

from collections.abc import Sequence
from typing import Any

import torch

from utils.diagnostics.audit.fitting import constant, fit, flat, middle, span, worst
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.levels import Levels
from utils.diagnostics.watching.mixture import EXACT, ROUNDED, axis_of_factors, images_of, noises_of
from utils.diagnostics.watching.seen import Seen

ENOUGH = 8  # images whose noise levels say something of all
SPREAD = 0.3  # of the noise levels told beside their mean, for their embeddings to differ
MOST_ALIKE = 0.012  # embeddings of frequencies from 1 to 1e-4 differ by 0.07 for numbers from 0 to 1, and by 0.7 up to 1000
BEYOND = 0.02  # an end of a path, which some leave a little
CUT = 0.02  # of the values, that are at an end
WHOLE_NOISE = 0.3, 3.3  # times a number that is near to sigma and not it
HARDLY = 0.35  # of noise in the noisiest of them: EDM's levels leave less in one update of 5,000, others never


def _known_levels(levels: Levels, times: float = 1.0) -> dict[str, torch.Tensor]:
    """What networks are told of a noise level, by how it is written. `times`: of its sigma."""
    b, sigma = levels.b, levels.sigma * times
    log, angle = sigma.log(), sigma.atan()
    if levels.kind == "flow":
        return {"s": b, "1 - s": 1 - b, "1000 s": 1000 * b, "1000 (1 - s)": 1000 * (1 - b)}
    return {
        "sigma": sigma,
        "ln(sigma) / 4": log / 4,
        "ln(sigma)": log,
        "ln(sigma / 2)": (sigma / 2).log(),  # as EDM has it for variance-exploding networks
        "1000 ln(sigma) / 4": 250 * log,
        "-2 ln(sigma), the logarithm of the SNR": -2 * log,
        "atan(sigma)": angle,
        "2 atan(sigma) / pi": angle * 2 / torch.pi,
        "1000 * 2 atan(sigma) / pi": angle * 2000 / torch.pi,
    }


def check_told(levels: Levels) -> tuple[Check, str]:
    """Of a process without a table of steps: (the check, what the network is told)."""
    name, wanted = "noise level that the network gets", "a function of the one that the image has"
    told, sigma = levels.told, levels.sigma
    if told is None:
        return not_observed("timestep", name, wanted, "the network gets no number for each image beside it"), ""
    known = _known_levels(levels)
    for text, values in known.items():
        if _alike(told, values):
            return Check("timestep", name, wanted, text, True), text
    for times in (2, 0.5, 4, 0.25) if levels.kind in ("variance-exploding", "preconditioned") and len(told) > 2 else ():
        for text, values in _known_levels(levels, times).items():
            if _alike(told, values):
                message = f"the network gets {text} of {times:g} times the noise that the images have"
                return Check("noise", "strength of the noise", "1", f"{1 / times:g}", False, message), text
    if len(told) < 3:
        return not_observed("timestep", name, wanted, "too few images to know the function"), ""
    if levels.kind == "variance-exploding" and bool((told > 0).all()):
        times, squared = constant(sigma / told, 2e-3), _alike(told**2, sigma)
        if squared and times is None:
            message = "the images have the square of the noise level that the network gets: x_0 + sigma^2 noise"
            return Check("input", "coefficients of image and noise", "x_0 + sigma noise", "sigma^2", False, message), "sigma"
        if times is not None and WHOLE_NOISE[0] < times < WHOLE_NOISE[1]:
            message = f"the images have {times:.3g} times the noise that the network gets as its level"
            return Check("noise", "strength of the noise", "1", f"{times:.3g}", False, message), "sigma"
    for text, values in known.items():
        others = {"the image before": values.roll(1), "the next image": values.roll(-1), "another image": values.flip(0)}
        for whose, moved in others.items():
            if _alike(told, moved):
                message = f"the network gets the noise level of {whose} in the batch"
                return Check("timestep", name, wanted, message, False, message), text
    if bool((told == told[0]).all()) and constant(sigma, 1e-3) is None:
        message = f"the network gets {float(told[0]):.4g} for all images, though they have different noise levels"
        return Check("timestep", name, wanted, "one for all", False, message), ""
    order = told[sigma.argsort()].diff()
    if bool((order >= 0).all()) or bool((order <= 0).all()):
        return Check("timestep", name, wanted, "a monotone function of it", True), ""
    message = "the network gets noise levels that are not those of the images: more noise is not a higher (or lower) number"
    return Check("timestep", name, wanted, "no function of it", False, message), ""


def check_embedded(told: torch.Tensor, vectors: list[torch.Tensor]) -> Check | None:
    """Of embeddings [B, D] by sines and cosines, whether those of the noise level `told` [B] differ between images."""
    spread = float(told.std() / told.mean().abs().clamp(min=1e-12)) if len(told) >= ENOUGH else 0.0
    told = (told - told.mean()) / told.std() if spread > SPREAD else told
    powers = torch.stack([told**n for n in range(4)], 1)
    sizes = []
    for vector in (vector.to(told) for vector in vectors if len(vector) == len(told) and spread > SPREAD):
        power = vector.square().mean(1)  # of sine and cosine a half, or 1 where they are scaled
        if any(worst(power - size) < 1e-2 for size in (0.5, 1.0)) and vector.shape[1] > 3:
            apart = vector - vector.mean(0)
            left = apart - powers @ torch.linalg.lstsq(powers, apart).solution
            size = float(apart.norm() / vector.norm())
            if size > MOST_ALIKE or (size > 1e-6 and float(left.norm() / apart.norm()) < 0.2):
                sizes.append(size)
    if not sizes:
        return None
    text = (
        f"the embedding of the noise level hardly differs between images (by {max(sizes):.2g} of it): "
        "the numbers are too small for its frequencies, which may be made for 0 to 1000"
    )
    fine, name = max(sizes) > MOST_ALIKE, "embedding of the noise level"
    return Check("timestep", name, "another for each level", f"differs by {max(sizes):.2g}", fine, text, "warning")


def told_as_edm(levels: Levels) -> bool:
    return levels.told is not None and _alike(levels.told, levels.sigma.log() / 4)


def _alike(told: torch.Tensor, values: torch.Tensor) -> bool:
    return worst(told - values) <= 2e-3 * max(worst(values), 1e-3)


def check_mixture(levels: Levels) -> Check:
    """Of a process without a table of steps."""
    name, wanted = "coefficients of image and noise", "one family for all noise levels"
    if levels.noise_alone:
        return Check("input", name, wanted, "noise alone", False, "the network sees noise alone, without the image")
    if shift := levels.constant:
        text = (
            f"the network's input is image, noise and a constant of {shift:.3g}: "
            "is the noise added before the images are normalized?"
        )
        return Check("input", name, wanted, f"and {shift:.3g}", False, text)
    spread = f"a {span(levels.a)}, b {span(levels.b)}; residual {worst(levels.residual):.1e}"
    if worst(levels.residual) > ROUNDED:
        text = f"the network's input is not made of image and noise: {middle(levels.residual):.0%} of it is something else"
        return Check("input", name, wanted, spread, False, text)
    if worst(levels.residual) > EXACT:
        text = f"the noised image is rounded: {middle(levels.residual):.1e} of it is neither image nor noise (bf16 leaves 3e-3)"
        return Check("input", name, wanted, spread, False, text, "info" if levels.looks[0].x.dtype.itemsize < 4 else "critical")
    many = len(levels.a) > 3
    if levels.kind == "flow" and min(float(levels.a.min()), float(levels.b.min())) < -BEYOND:
        text = f"the share of the noise is {span(levels.b)}, and a path goes from 0 to 1: how are its times drawn?"
        return Check("timestep", "noise levels of the path", "from 0 to 1", span(levels.b), False, text)
    if many and constant(levels.b, 1e-5) is not None and constant(levels.a, 1e-5) is not None:
        text = f"all images of the batch have one noise level ({spread}); each image should have its own"
        return Check("timestep", "noise levels of the batch", "one for each image", spread, False, text)
    if levels.kind == "variance-preserving" and len(levels.b) >= ENOUGH and float(levels.b.max()) < HARDLY:
        text = (
            f"the noisiest of {len(levels.b)} images has {float(levels.a.min()):.3g} of the image and "
            f"{float(levels.b.max()):.3g} of noise: does the schedule lack the cumulative product of its alphas?"
        )
        return Check("input", name, wanted, spread, False, text, "warning")
    if many and constant(levels.b, 1e-4) is not None and float(levels.a.max() - levels.a.min()) > 0.1:
        text = (
            f"the noise is equally strong in all images, while their share differs ({spread}): at no level the image is clean"
        )
        return Check("input", name, wanted, spread, False, text)
    formulas = {
        "variance-preserving": "a^2 + b^2 = 1",
        "flow": "a + b = 1",
        "variance-exploding": "x_0 + sigma noise",
        "preconditioned": f"c_in (x_0 + sigma noise), sigma_data {levels.sigma_data or 0:.3g}",
    }
    if levels.kind in formulas:
        return Check("input", name, wanted, f"{levels.kind}: {formulas[levels.kind]}", True)
    if bool((levels.a + levels.b**2 - 1).abs().max() < 1e-3) and many:
        text = f"the coefficient of the image is the square of what it should be: a + b^2 = 1, not a^2 + b^2 ({spread})"
        return Check("input", name, wanted, spread, False, text)
    whole = levels.told is not None and bool((levels.told == levels.told.round()).all())  # else it may be a sub-VP process
    if bool((levels.a**2 + levels.b - 1).abs().max() < 1e-3) and many and whole:
        text = f"the coefficient of the noise is the square of what it should be: a^2 + b = 1, not a^2 + b^2 ({spread})"
        return Check("input", name, wanted, spread, False, text)
    order = levels.sigma.argsort()
    a, b = levels.a[order], levels.b[order]
    if not many or bool((a > 0).all() and (a.diff() <= 1e-3).all() and (b.diff() >= -1e-3).all()):
        return not_observed("input", name, wanted, f"a process of its own, which may be right ({spread})")
    text = f"the coefficients of image and noise do not belong to a known process ({spread})"
    return Check("input", name, wanted, spread, False, text)


def check_noised_once(update: Update) -> Check | None:
    """What `add_noise` got for a clean image is what it gave before."""
    for step in update.micro_steps:
        noisings = step.batch.get("noising") or []
        for place, first in enumerate(noisings):
            for later in noisings[place + 1 :]:
                if later.clean.data_ptr() == first.result.data_ptr() and later.clean.shape == first.result.shape:
                    text = "noise is added twice: the image that add_noise gets is one that it has noised before"
                    return Check("input", "coefficients of image and noise", "noise is added once", "twice", False, text)
    return None


def check_exchanged(update: Update) -> Check | None:
    """What `add_noise` got for a clean image was drawn, and what it got for noise was not."""
    for step in update.micro_steps:
        drawn = {draw.tensor.data_ptr() for draw in (step.batch.get("seen") or Seen()).draws if draw.normal}
        for noising in step.batch.get("noising") or []:
            if noising.clean.data_ptr() in drawn and noising.noise.data_ptr() not in drawn:
                text = "add_noise gets the noise as its image, and the image as its noise: are its arguments exchanged?"
                return Check("input", "arguments of add_noise", "image, noise", "noise, image", False, text)
    return None


def images_in(x: torch.Tensor, made: int) -> list[torch.Tensor]:
    """What may be the noised images: all channels, or those at an end, where a condition is joined to them. `made`: channels
    of the output."""
    return [x[:, -made:], x[:, :made]] if x.ndim > 2 and x.shape[1] > made else [x]


def _told_by_place(inputs: Sequence[Any], places: int) -> bool:
    """Whether the network gets a noise level for each place, such as a frame, [B, places]."""
    others = [given for given in inputs[1:] if isinstance(given, torch.Tensor)]
    return any(given.ndim == 2 and given.shape[1] == places for given in others)


def check_unexplained(update: Update) -> Check:
    """Of an input that is no mixture. Where the loss asks for a noise that was drawn, it should be made of that."""
    name, wanted = "coefficients of image and noise", "a mixture of image and noise"
    for step in update.micro_steps:
        call, seen = step.calls.get("network"), step.batch.get("seen") or Seen()
        if call is None or not call.outputs or 0 not in call.gradients or not isinstance(call.inputs[0], torch.Tensor):
            continue
        x = next((x for x in images_in(call.inputs[0], call.outputs[0].shape[1])), call.inputs[0])
        if any(_told_by_place(call.inputs, places) for places in x.shape[2:]):
            continue  # each frame has a noise level of its own
        if (axis := axis_of_factors(x, seen)) is not None:
            found = f"others from place to place along axis {axis}"
            text = (
                f"the noise has a factor for each place along axis {axis}, the same in all samples, not one for each of them: "
            )
            text += "are the factors of the batch broadcast over the wrong axis?"
            return Check("input", name, wanted, found, False, text)
        output, gradient = (tensor[:, : x.shape[1]] for tensor in (call.outputs[0], call.gradients[0]))  # variances may follow
        for draw in seen.draws:
            if draw.tensor.shape == x.shape == output.shape and draw.normal and torch.isfinite(gradient).all():
                _, residual = fit(flat(gradient), flat(output) - flat(draw.tensor))
                if worst(residual) < 1e-2:
                    of_noise, left = fit(flat(x), flat(draw.tensor))
                    text = (
                        "the loss asks for the noise that was drawn, and the network's input is not that noise and an image "
                        f"that was seen: {middle(left):.0%} of it is not the noise, which counts {span(of_noise[:, 0])}"
                    )
                    return Check("input", name, wanted, f"residual {worst(left):.1e}", False, text)
        if (changed := _changed(x, seen)) is not None:
            return changed
    why = "the input of the network is not a mixture of noise and an earlier tensor"
    return not_observed("input", name, wanted, why)


def _changed(x: torch.Tensor, seen: Seen) -> Check | None:
    """Of a noised image, [B, C, ...], that was changed: cut off at both ends, or by one number for each channel."""
    values, name = flat(x), "coefficients of image and noise"
    if not torch.isfinite(values).all() or x.ndim < 3:
        return None
    low, high = values.min(), values.max()
    inside = (values > low) & (values < high)
    cut = CUT < 1 - float(inside.double().mean()) < 1 - CUT
    for noise in noises_of(x, seen)[:3]:
        for image in images_of(values, x, seen):
            parts = flat(image), flat(noise.expand(x.shape))
            if cut and _fits(*(part * inside for part in (values, *parts))):
                share = 1 - float(inside.double().mean())
                text = f"the noised image is cut off at {float(low):.3g} and {float(high):.3g}, which changes {share:.0%} of it"
                return Check("input", name, "a mixture of image and noise", "cut off", False, text)
            if _fits(*(_centered(part) for part in (x, image, noise.expand(x.shape)))):
                text = "one number for each channel is added to image and noise, which is not drawn as offset noise is"
                return Check("noise", "offset noise", "none, or normal", "of another kind", False, text, "warning")
    return None


def _fits(values: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor) -> bool:
    """Whether float64 `values` [B, N] are a mixture of the others."""
    coefficients, residual = fit(values, clean, noise)
    return worst(residual) <= EXACT and worst(coefficients[:, 0]) > 1e-3 and worst(coefficients[:, 1]) > 1e-3


def _centered(tensor: torch.Tensor) -> torch.Tensor:
    """Without the means of the channels."""
    values = tensor.detach().double().flatten(2)
    return (values - values.mean(2, keepdim=True)).flatten(1)

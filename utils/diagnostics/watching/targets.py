"""What the loss compares the network's output with, and whether that is what was declared."""

from dataclasses import dataclass
from typing import Any

import torch

from utils.diagnostics.audit.fitting import constant, fit, flat, middle, span, worst
from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.levels import Levels


@dataclass
class Target:
    name: str
    healthy: bool
    scale: torch.Tensor | None  # twice what each image's error counts, [B]: c of a squared one's gradient c (output - target)
    loss: str = "squared error"
    of_pixels: torch.Tensor | None = (
        None  # what each pixel's error counts, [B, N], where they differ; NaN where it is not known
    )


MOST_SORTED = 1 << 20  # numbers
NOTHING = "nothing"
OTHER_IMAGE = "an image that is not the one that is noised"
OTHER_NOISE = "other noise than that of the image"
MORE_NOISE = "more noise than the input's, as an input perturbation adds"
MEAN = "the mean of the target over all pixels"
WHOLE = "noise and the whole of an image of which a part is not in the input"
REORDERED = "the image with its values in another order"
EDM = "EDM's target"
_ABSOLUTE, _HUBER = "absolute error (L1)", "Huber (smooth L1) error"
OWN_V = "v of the image's own coefficients, as if they were on a circle"
GOOD = ("epsilon", "sample", "v_prediction", "velocity", "raw", "score")
SAID = {
    "epsilon": "the noise (epsilon)",
    "sample": "the clean image (sample)",
    "v_prediction": "v (v_prediction)",
    "velocity": "the flow's velocity noise - x_0",
    "backward": "the flow's velocity x_0 - noise",
    "raw": "(x_0 - c_skip x) / c_out, EDM's target",
    "score": "the score -noise / sigma",
    "velocity of its path": "the velocity of its path",
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


def identify_target(levels: Levels, order: list[str], table: Any = None) -> Target | None:
    """`order`: the names that are tried first. None where no finite gradient was seen."""
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
        return Target(NOTHING, False, None)
    sizes = gradient[used].abs().mean(1)
    if gradient.shape[1] > 1 and bool(
        ((gradient[used] - gradient[used].mean(1, keepdim=True)).abs().amax(1) < 1e-3 * sizes).all()
    ):
        return Target(MEAN, False, None)
    error = _Error(gradient[used], output[used], levels.clean[used], levels.noise[used], looks[0].output.dtype)
    parts = {name: tuple(_of_used(of, used) for of in both) for name, both in _parts(levels, table).items()}
    if "raw" not in order:
        parts.pop("raw", None)
    known = sorted(parts, key=lambda name: order.index(name) if name in order else len(order))
    candidates = {name: error.made(*parts[name]) for name in known}
    candidates |= {
        "the noise of the next image": error.noise.roll(-1, 0),
        "the noise of the image before": error.noise.roll(1, 0),
        "the next clean image": error.clean.roll(-1, 0),
        "the clean image before": error.clean.roll(1, 0),
        "v of another image": candidates["v_prediction"].roll(-1, 0),
        "the clean image in [0, 1]": (error.clean + 1) / 2,
        "the noise, upside down or mirrored": error.noise.flip(1),
    }
    turned = None  # what fits with the opposite sign alone: of an output near 0, a target and its negative both do
    for name, values in candidates.items():
        scale, residual = error.compared_with(values)
        if float(residual.quantile(0.9)) <= error.precision and worst(residual) <= 10 * error.precision:
            c = torch.zeros(len(gradient), dtype=gradient.dtype, device=gradient.device)
            c[used] = scale
            if name == "v of the wrong sign" and _runs(levels.told, torch.atan2(levels.b, levels.a)) < 0:
                name = "velocity of its path"  # whose time runs from the noise to the image
            found = Target(name, name in (*GOOD, "backward", "velocity of its path"), c, error.called)
            if float(scale.median()) > 0:
                return found
            turned = turned or found
    if turned is not None:
        return turned
    if (cut_off := _cut_off(error, candidates)) is not None:
        return cut_off
    agreements = {name: error.agreement(values) for name, values in candidates.items()}
    best = max((name for name in order[:6] if name in candidates), key=lambda name: agreements[name])
    if agreements[best] > 0.99:
        kind = error.other_kind()
        of_pixels, c = error.of_pixels(candidates[best]) if bool(used.all()) else None, None
        if (counts := error.counts(candidates[best], kind)) is not None:
            c = torch.zeros(len(gradient), dtype=gradient.dtype, device=gradient.device)
            c[used] = 2 * counts
        return Target(best, True, c, kind, of_pixels)
    wrong = max(agreements, key=lambda name: agreements[name])
    if agreements[wrong] > 0.99 and error.other_kind() != "other error":
        return Target(wrong, wrong in (*GOOD, "backward"), None, error.other_kind())
    return _of_other_parts(error, levels, used)


def _of_used(of: Any, used: torch.Tensor) -> Any:
    return of[used] if isinstance(of, torch.Tensor) and of.ndim else of


class _Error:
    """The gradient of the loss, [B, N], which is c (output - target) for a squared error. All float64."""

    def __init__(
        self, gradient: torch.Tensor, output: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor, dtype: torch.dtype
    ):
        self.gradient, self.output, self.clean, self.noise = gradient, output, clean, noise
        self.precision = max(2 * float(torch.finfo(dtype).eps), 1e-3)
        counted = gradient != 0  # a masked loss has no gradient elsewhere
        self.share = float(counted.double().mean())
        self._mask = counted if self.share < 0.99 else None

    @property
    def called(self) -> str:
        return "squared error" if self._mask is None else f"squared error (of {self.share:.0%} of the values)"

    def made(self, of_clean: Any, of_noise: Any) -> torch.Tensor:
        """[B, N] of numbers, or of one for each image."""
        both = (torch.as_tensor(of).reshape(-1, 1).to(self.clean) for of in (of_clean, of_noise))
        return next(both) * self.clean + next(both) * self.noise

    def explained_by(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fit(self.gradient, *(tensor if self._mask is None else tensor * self._mask for tensor in tensors))

    def compared_with(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(c [B], the residual [B])"""
        scale, residual = self.explained_by(self.output - target)
        return scale[:, 0], residual

    def agreement(self, target: torch.Tensor) -> float:
        """Of the signs: 1 for each error that grows with the distance."""
        signs = torch.sign(self.gradient) * torch.sign(self.output - target)
        return float(signs.mean()) / max(self.share, 1e-12)

    def of_pixels(self, target: torch.Tensor) -> torch.Tensor:
        distance = self.output - target
        return torch.where(distance.abs() > 1e-3, self.gradient / distance, torch.nan)

    def at_most(self) -> torch.Tensor:
        """Where the gradient is as large as that of any value of its image, [B, N]."""
        size = self.gradient.abs()
        return size > 0.999 * size.amax(1, keepdim=True)

    def other_kind(self) -> str:
        flat_share = float(self.at_most().double().mean()) / self.share
        return _ABSOLUTE if flat_share > 0.9 else _HUBER if flat_share > 0.01 else "other error"

    def counts(self, target: torch.Tensor, kind: str) -> torch.Tensor | None:
        """What an absolute error of each image counts, or half of the square of a small one, [B]; None where that differs
        within an image, or is not known."""
        most = self.at_most()
        slopes = self.gradient.abs() if kind == _ABSOLUTE else torch.where(most, torch.nan, self.of_pixels(target))
        slopes = torch.where(self.gradient == 0, torch.nan, slopes)
        middles = slopes.nanmedian(1, keepdim=True).values
        alike = (slopes / middles - 1).abs() < 1e-2
        few = (~slopes.isnan()).sum(1).min() < 8
        if kind not in (_ABSOLUTE, _HUBER) or few or not bool((alike | slopes.isnan()).all()):
            return None
        knee = float((self.gradient.abs().amax(1) / middles[:, 0]).max())
        return middles[:, 0] if abs(knee - 1) < 1e-2 else None  # torch's two functions have other factors beside another knee


def _cut_off(error: _Error, candidates: dict[str, torch.Tensor]) -> Target | None:
    """Of a known target that was cut off at both ends: the error is that of the target where it is small, and not elsewhere."""
    for name in [name for name in GOOD if name in candidates]:
        target, distance = candidates[name], error.output - candidates[name]
        slopes = torch.where(distance.abs() > 1e-3, error.gradient / distance, torch.nan)
        alike = (slopes / slopes.nanmedian(1, keepdim=True).values - 1).abs() < 1e-2
        known = ~slopes.isnan()
        inside, outside = target[alike & known].abs(), target[~alike & known].abs()
        if not len(outside) or not len(inside) or not 0.4 < len(inside) / int(known.sum()) < 0.99:
            continue
        inside, outside = (values[:: 1 + len(values) // MOST_SORTED] for values in (inside, outside))
        limit = float(inside.quantile(0.98))  # some beyond it are nearly right by chance
        # A Huber error has one size there, and beside an output of 0 looks the same.
        of_one_size = float(error.at_most()[~alike & known].double().mean())
        if float(outside.quantile(0.02)) > 0.97 * limit and of_one_size < 0.5:
            return Target(f"{SAID.get(name, name)}, cut off at {limit:.2g}", False, None)
    return None


def _of_other_parts(error: _Error, levels: Levels, used: torch.Tensor) -> Target:
    """Of a target that is none of the known ones."""
    coefficients, residual = error.explained_by(error.output, error.clean, error.noise)
    c, of_clean, of_noise = coefficients.T
    of_clean, of_noise = -of_clean / c, -of_noise / c
    if worst(residual) <= error.precision:
        told = None if levels.told is None else levels.told[used]
        if _is_tangent(levels.a[used], levels.b[used], of_clean, of_noise, told):
            return Target("velocity of its path", True, c if bool(used.all()) else None)
        if _of_v(levels.a[used], levels.b[used], of_clean, of_noise):
            return Target(OWN_V, False, None)
        if (sigma_data := _of_edm(levels.sigma[used], of_clean, of_noise)) is not None:
            return Target(f"{EDM} of sigma_data {sigma_data:.3g}", False, None)
        return Target(f"{middle(of_clean):.2g} x_0 + {middle(of_noise):.2g} noise", False, None)
    for image, other in _others(levels, used):
        parts, left = error.explained_by(error.output, error.noise, other)
        if worst(left) <= error.precision:
            alone = worst(parts[:, 1] / parts[:, 0]) < 1e-2 and worst(parts[:, 2] / parts[:, 0] + 1) < 1e-2
            if alone and _is_noise(image):
                return Target(OTHER_NOISE, False, None)
            if worst(parts[:, 1] / parts[:, 0]) > 0.1 and is_part(levels.clean[used], other):
                return Target(WHOLE, False, None)
            beside = worst(parts[:, 1] / parts[:, 0] + 1) < 1e-2 and _is_noise(other / other.std())
            if beside or (alone and _is_more_noise(error.noise, other)):
                return Target(MORE_NOISE, False, None)
            # No other network's output has the very values of the image.
            reordered = torch.equal(_sorted(image), _sorted(levels.looks[0].mixture.clean_tensor))
            return Target(REORDERED if reordered else OTHER_IMAGE, False, None)
    shifted = [
        error.explained_by(error.output, error.clean, error.noise, error.clean.roll(k, 0), error.noise.roll(k, 0))[1]
        for k in range(1, min(len(error.output), 64))
    ]
    if shifted and worst(torch.stack(shifted).min(0).values) <= error.precision:
        return Target("a target that is made of other images, or of the noise of other images of the batch", False, None)
    counts = 2 / (levels.pixels * levels.sizes[used])[:, None]
    for scale in (counts.to(c), c[:, None]):
        implied = error.output - error.gradient / scale
        fresh, left = fit(implied, error.clean, error.noise)
        rest = implied - fresh[:, :1] * error.clean - fresh[:, 1:] * error.noise
        own, size = middle(fresh[:, 1].abs()), max(float(rest.square().mean()), 1e-30)
        level = float((rest[:, 1:] * rest[:, :-1]).mean()) / size
        spreads = [float(rest.std())]
        a, b = levels.a[used], levels.b[used]
        of_v = a > 0.3  # v has a times the noise
        if int(of_v.sum()) > 3 and middle((fresh[:, 0] + b)[of_v].abs()) < 0.1:
            spreads.append(float((rest[of_v] / a[of_v, None]).std()))
        unit = any(0.9 < spread < 1.1 for spread in spreads)
        if unit and own < 0.2 and abs(level) < 0.05 and middle(left) > 0.3 and error.share > 0.99:
            return Target(OTHER_NOISE, False, None)
    return Target("", False, None, "error of another kind")


def _others(levels: Levels, used: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the script has beside the image that is noised, noise and noised image; of a single micro step. As it is, and as
    `flat` gives it."""
    if len(levels.looks) > 1 or len(levels.looks[0].x) != len(levels.a):
        return []
    others = [(image, flat(image)[used]) for image in levels.looks[0].others]
    parts = levels.clean[used], levels.noise[used]
    return [one for one in others if torch.isfinite(one[1]).all() and worst(fit(one[1], *parts)[1]) > 0.05]


def _is_noise(values: torch.Tensor) -> bool:
    """Whether a tensor [B, C, ...] looks like unit noise: independent values with the mean, variance and kurtosis of a normal
    distribution."""
    rows = values.detach().double().flatten(1)
    room = 6 / rows.numel() ** 0.5  # of the mean; neighbors' product and variance have 1 and 1.4 times as much, kurtosis 4.9
    mean, variance = float(rows.mean()), float(rows.var())
    alike, fourth = float((rows[:, 1:] * rows[:, :-1]).mean()), float((rows**4).mean())
    return max(abs(mean), abs(alike), abs(variance - 1) / 1.4, abs(fourth - 3) / 10) < room


def _is_more_noise(noise: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a target, [B, N], is the noise and a part of another one."""
    parts, left = fit(target, noise)
    rest = target - parts[:, :1] * noise
    return worst(parts[:, 0] - 1) < 0.1 and 1e-3 < middle(left) < 0.5 and _is_noise(rest / rest.std())


def has_wrong_velocity(levels: Levels) -> bool:
    """Of a path x = (1 - s) x_0 + s noise: whether the script has (x_0 - x) / (1 - s), or minus that, which would be the
    velocity if image and noise were exchanged."""
    used = levels.a > 0.1  # it is cut off below
    if int(used.sum()) < 4 or len(levels.looks) > 1:
        return False
    wrong = (levels.clean - levels.x)[used] / levels.a[used, None]
    others = (flat(other)[used] for other in levels.looks[0].others)
    return any(min(worst(other - wrong), worst(other + wrong)) < 1e-3 for other in others)


def is_part(image: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether the image is the whole one with some of its values set to 0."""
    cut = (image == 0) & (whole != 0)
    return bool((cut | (image == whole)).all()) and bool(cut.any()) and float(cut.double().mean()) < 0.99


def _sorted(images: torch.Tensor) -> torch.Tensor:
    return images.detach().flatten(1).sort(1).values


def _of_v(a: torch.Tensor, b: torch.Tensor, of_clean: torch.Tensor, of_noise: torch.Tensor) -> bool:
    """a noise - b x_0, or (noise - b x) / a, which is the same where a^2 + b^2 = 1."""
    if worst(of_clean + b) > 1e-2:
        return False
    return any(worst(of_noise / wanted - 1) < 1e-2 for wanted in (a, (1 - b**2) / a))


def _of_edm(sigma: torch.Tensor, of_clean: torch.Tensor, of_noise: torch.Tensor) -> float | None:
    """sigma_data of (x_0 - c_skip (x_0 + sigma noise)) / c_out, where that is what it is."""
    squared = constant(-sigma * of_noise / of_clean, 1e-2) if len(sigma) > 3 else None
    if squared is None or squared <= 0:
        return None
    wanted = (sigma**2 + squared).sqrt() / (sigma * squared**0.5)
    return squared**0.5 if worst(of_clean / wanted - 1) < 1e-2 else None


def _is_tangent(
    a: torch.Tensor, b: torch.Tensor, of_clean: torch.Tensor, of_noise: torch.Tensor, told: torch.Tensor | None
) -> bool:
    """Whether the target is the direction in which image and noise are exchanged on a straight path, or on a circle on which it
    has another speed than v: there it must be the way in which the time that is `told` to the network runs."""
    if len(a) < 3:
        return False
    if worst(a**2 + b**2 - 1) < 1e-2:
        speed, angle = constant(of_noise / a, 2e-2), torch.atan2(b, a)
        return speed is not None and worst(of_clean + speed * b) < 2e-2 * abs(speed) and _runs(told, angle) * speed >= 0
    if constant(of_clean, 1e-2) is None or constant(of_noise, 1e-2) is None:
        return False
    slope = float(((a - a.mean()) * (b - b.mean())).sum() / (a - a.mean()).square().sum().clamp(min=1e-30))
    straight = worst(b - b.mean() - slope * (a - a.mean())) < 1e-3
    return straight and abs(middle(of_noise) / middle(of_clean) / slope - 1) < 1e-2 if slope else False


def _half_of_flow(levels: Levels) -> bool:
    """Whether the share of the image, or of the noise, is the time that the network gets."""
    if levels.told is None or len(levels.told) < 3:
        return False
    times = levels.told / max(1.0, 1000.0 * bool(levels.told.max() > 1))
    return any(worst(share - of) < 2e-3 for share in (levels.a, levels.b) for of in (times, 1 - times))


def _runs(told: torch.Tensor | None, levels: torch.Tensor) -> float:
    """Above 0 where the time that the network gets rises with the noise, below 0 where it falls, 0 where it is not known."""
    return 0.0 if told is None else float(((told - told.mean()) * (levels - levels.mean())).sum())


def check_target(target: Target, declared: str | None, levels: Levels) -> Check:
    """`declared`: the prediction type that an object of the script says; None: none does."""
    name = "target of the loss"
    wanted = SAID.get(declared, str(declared)) if declared else "not declared"
    observed = f"{target.loss} against {SAID.get(target.name, target.name)}"
    if target.loss == "other error":
        return not_observed("target", name, wanted, "the loss is neither a squared, an absolute nor a Huber error")
    if target.name == NOTHING:
        text = "the loss gives the network's output no gradient: is it computed of a detached output?"
        return Check("gradient", "gradient of the output", "not zero", "zero", False, text)
    if not target.name:
        why = "the loss compares the output with something other than image and noise, or has more than one term"
        return not_observed("target", name, wanted, why)
    if target.name == OTHER_IMAGE:
        text = f"the loss compares the output with {target.name}: right for what a teacher says, or for pairs of images"
        return Check("target", name, wanted, observed, False, text, "info")
    if target.name == WHOLE:
        text = f"the loss compares the output with {target.name}: a part of the image is set to 0 before it is noised"
        return Check("input", "image that is noised", "that of the loss", "a part of it", False, text, "warning")
    if declared is not None and target.name != declared:
        text = f"the loss compares the output with {SAID.get(target.name, target.name)}, not with {wanted}, as was declared"
        return Check("target", name, wanted, observed, False, text)
    if target.name.startswith(EDM):
        text = f"the loss compares the output with {target.name}, and the input is not c_in (x_0 + sigma noise)"
        return Check("input", "coefficients of image and noise", "EDM's c_in", f"a {span(levels.a)}", False, text)
    if target.name == OWN_V:
        text = "the loss asks for v, but a^2 + b^2 is not 1 for the coefficients of image and noise: is a square root missing?"
        observed = f"a {span(levels.a)}, b {span(levels.b)}"
        return Check("input", "coefficients of image and noise", "a^2 + b^2 = 1, for v", observed, False, text)
    if target.name in ("velocity", "backward"):
        return _velocity(target, levels, wanted, observed)
    if target.name == MEAN:
        text = "the loss has the same gradient for all pixels of an image: is the error averaged before it is squared?"
        return Check("target", name, wanted, observed, False, text)
    text = "" if target.healthy else f"the loss compares the output with {target.name}: a sampler cannot use this target"
    # Of an input of no known kind, that is the likelier mistake: targets are made of it.
    stage = "input" if not target.healthy and levels.kind == "other" and declared is None else "target"
    return Check(stage, name, wanted, observed, target.healthy, text)


def _velocity(target: Target, levels: Levels, wanted: str, observed: str) -> Check:
    """The velocity belongs to the path, and points the way that the time runs."""
    name = "target of the loss"
    if levels.kind != "flow":
        text = f"the loss compares the output with {SAID[target.name]}, but the path is not (1 - s) x_0 + s noise"
        # A path of no known kind is the likelier mistake, and one of which a share is that of the time.
        stage = "input" if levels.kind == "other" or _half_of_flow(levels) else "target"
        return Check(stage, name, wanted, observed, False, text)
    forward = target.name == "velocity"
    rises = _runs(levels.told, levels.b)
    if rises and (rises > 0) != forward:
        way = "rises" if rises > 0 else "falls"
        if levels.drawn_rises is forward:
            text = f"the network gets 1 - t, which {way} with the noise; t is the time that is drawn, and the velocity's"
            told = "noise level that the network gets"
            return Check("timestep", told, "the time that was drawn", "1 minus it", False, text)
        text = (
            f"the loss compares the output with {SAID[target.name]}, but the time that the network gets {way} with the "
            "noise: the velocity points against the path"
        )
        return Check("target", name, wanted, observed, False, text)
    return Check("target", name, wanted, observed, True)

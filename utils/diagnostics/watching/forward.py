"""What a forward pass and its loss show: image and noise, the noise level, the target, what errors count."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from utils.diagnostics.audit.fitting import SMALL, constant
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.batches import Batches
from utils.diagnostics.watching.bound import check_bound
from utils.diagnostics.watching.drawing import Drawing
from utils.diagnostics.watching.facts import Facts
from utils.diagnostics.watching.images import check_encoded, check_latents, check_range, check_spread, is_signed, rounding_of
from utils.diagnostics.watching.inputs import (
    check_embedded,
    check_exchanged,
    check_mixture,
    check_noised_once,
    check_unexplained,
    told_as_edm,
)
from utils.diagnostics.watching.levels import Levels, Look, is_monotone
from utils.diagnostics.watching.looks import looks_of, scheduler_of, without_silence
from utils.diagnostics.watching.mixture import strength
from utils.diagnostics.watching.options import (
    check_declared_schedule,
    check_log_normal,
    declared_strength,
)
from utils.diagnostics.watching.places import begins_alike, number_told
from utils.diagnostics.watching.preconditioning import check_preconditioning
from utils.diagnostics.watching.schedules import Schedules, check_ends
from utils.diagnostics.watching.seen import Seen
from utils.diagnostics.watching.targets import check_target, has_wrong_velocity, identify_target
from utils.diagnostics.watching.weights import Weighting, check_holes, check_masked, check_weights, identify_weights

MOST_BELOW = 0.15  # of the images have less noise than their rounding: as uniform log-SNRs may have, or levels drawn as cubes
MOST_BELOW_DRAWN = 0.06  # of those whose times are drawn from a normal distribution, as far as EDM's have it
MANY_LEVELS = 64  # images before that is judged
MANY_SHARES, SHORT_SPAN = 40, 0.4  # images before it is judged which part of a path they have; normal times have twice that
NO_SIGNAL = 1e-12  # alpha_cumprod of zero terminal SNR; the cosine schedule, which is none, ends at 2e-9 or 2e-10


class ForwardJudge:
    """Of all looks; what is drawn is judged over all of them together.

    Args:
        words: gets what the script is found to do.
    """

    def __init__(self, words: dict[str, str]):
        self.mixed = False  # the network was seen to get a mixture of image and noise
        self._words = words
        self._schedules, self._drawing, self._batches = Schedules(words), Drawing(words), Batches()
        self._below, self._of_bytes = 0, 0  # images of 8 bits with less noise than their own rounding, and all of them
        self._shares: list[torch.Tensor] = []  # of noise, on a path from image to noise
        self._logs: list[float] = []  # ln(sigma)

    def look(self, update: Update, facts: Facts, loss_scale: float, encoded: tuple[float, float] | None = None) -> list[Check]:
        """`encoded`: the range of the images from which an autoencoder made the clean ones; None: it made none."""
        looks = looks_of(update, loss_scale)
        if not looks:
            return [check_unexplained(update), *_told_beside(update)]
        self.mixed = True
        levels = Levels(looks)
        drawn = looks
        if (c := strength(levels.a, levels.b)) != 1:  # the noise is judged as it is used
            looks = [replace(one, mixture=one.mixture.of_strength(c)) for one in looks]
            levels = Levels(looks)
        if (twice := check_noised_once(update)) is not None:
            return [twice, *self._drawing.look(looks)]
        if (exchanged := check_exchanged(update)) is not None:
            return [exchanged]
        if levels.noise_alone:
            silent = any(one.silent for one in looks) and constant(levels.b) is None
            alone = [] if silent else [check_mixture(levels)]
            return [*alone, *self._drawing.look(looks)]
        micro_steps = facts.micro_steps or max(1, sum(step.finished for step in update.micro_steps))
        shown = without_silence(looks) or looks
        heard, scheduler = Levels(shown), scheduler_of(update, facts)
        checks, table, prediction = self._schedules.look(heard, shown, facts, scheduler)
        if any(
            "dream" in name and value is True for name, value in facts.options.items()
        ):  # the network's own answer is in its input
            checks = [replace(c, severity="info") if "is not made of image" in c.message else c for c in checks]
        if table is not None:
            self._drawing.add_levels(table, looks)
            self._batches.num_steps = len(table)
            checks += [*check_ends(table, looks[0].x.ndim > 3), *self._schedules.variety(table, looks)]
        wrapped, kind = _raw_network(update, levels)
        if not levels.constant:
            any_range = levels.kind == "variance-exploding" and not kind
            wrapped.append(_data(looks[0], update, facts, encoded, any_range, _unit(looks[0], levels, kind)))
        return [
            *checks,
            *_told_beside(update),
            *_embedded(update),
            *self._loss(heard, table, prediction, micro_steps, kind, loss_scale),
            *wrapped,
            *self._drawing.look(drawn if declared_strength(facts, c) else looks),
            *self._below_rounding(looks),
            *self._span(levels),
            *self._log_normal(levels, facts),
            *check_declared_schedule(facts, scheduler),
            *self._batches.look(update, looks),
        ]

    def end(self, images: int) -> list[Check]:
        """`images`: of the dataset; 0: not known."""
        return self._batches.end(images)

    def _below_rounding(self, looks: list[Look]) -> list[Check]:
        """Of images that were bytes: noise that is smaller than the rounding to bytes."""
        timed = False
        for one in looks:
            sigma, rounding = Levels([one]).sigma, rounding_of(one.mixture.clean)
            if rounding:
                self._below += int((sigma < rounding).sum())
                self._of_bytes += len(sigma)
                timed |= any(float(drawn.min()) < 0 and is_monotone(sigma, drawn) for drawn in one.moments)
        if self._of_bytes < MANY_LEVELS:
            return []
        share = self._below / self._of_bytes
        most = MOST_BELOW_DRAWN if timed else MOST_BELOW
        fine = share < most + 3 * (most * (1 - most) / self._of_bytes) ** 0.5
        text = f"{share:.0%} of the images have less noise than they were rounded by, as bytes: nothing is learned from them"
        text += " (their times are drawn from a normal distribution; should they be from 0 to 1?)" if timed else ""
        name, found = "share of images with less noise than their rounding", f"{share:.0%}"
        return [Check("timestep" if timed else "input", name, "a small one", found, fine, text, "warning")]

    def _log_normal(self, levels: Levels, facts: Facts) -> list[Check]:
        if levels.kind in ("flow", "variance-preserving", "other"):
            return []
        self._logs += [value for value in levels.sigma.log().tolist() if math.isfinite(value)]
        return check_log_normal(facts, self._logs)

    def _span(self, levels: Levels) -> list[Check]:
        """Of a path from image to noise."""
        if levels.kind != "flow":
            return []
        self._shares.append(levels.b.cpu())
        shares = torch.cat(self._shares)
        if len(shares) < MANY_SHARES or (len(levels.b) > 1 and constant(levels.b) is not None):
            return []
        low, high = (float(end) for end in shares.aminmax())
        text = (
            f"{len(shares)} images had shares of noise from {low:.2g} to {high:.2g} alone: the rest of the path is not trained"
        )
        name, found = "shares of noise on the path", f"{low:.2g} to {high:.2g}"
        return [Check("timestep", name, "from near 0 to near 1", found, high - low > SHORT_SPAN, text, "warning")]

    def _loss(
        self, levels: Levels, table: torch.Tensor | None, prediction: str | None, micro_steps: int, kind: str, loss_scale: float
    ) -> list[Check]:
        """`kind`: of the preconditioning, where there is one."""
        coefficients = None
        if table is not None and all(look.noised_with is not None for look in levels.looks):
            known = torch.cat([look.noised_with for look in levels.looks]).long()  # type: ignore[misc]
            values = table.to(levels.a)[known.clamp(0, len(table) - 1)]
            coefficients = values.sqrt(), (1 - values).sqrt()
        target = identify_target(levels, _order(prediction, levels), coefficients)
        if target is None:
            return [not_observed("target", "target of the loss", "not declared", "no finite gradient reached the output")]
        checks = [check_target(target, prediction, levels)]
        if target.name == "epsilon" and table is not None and float(table[-1]) <= NO_SIGNAL:
            text = "the last step of the schedule has no signal, and the loss asks for the noise, which is the input there"
            wanted = "v or the image, for a schedule of zero terminal SNR"
            checks.append(Check("target", "target of the last step", wanted, "the noise", False, text, "warning"))
        by = "" if target.loss.startswith("squared error") or not target.name else f" by its {target.loss}"
        self._words["target"] = target.name + by
        if target.name and (masked := check_masked(levels)) is not None:
            checks.append(masked)
        if target.of_pixels is not None and (of_holes := check_holes(levels, target.of_pixels)) is not None:
            checks.append(of_holes)
        if target.scale is None:
            return checks
        weights = target.scale * levels.pixels * levels.sizes.to(target.scale) * micro_steps / 2
        weighting = identify_weights(weights, levels, target.name, micro_steps)
        if not weighting.name and weighting.healthy and len(levels.looks) > 1:  # [B, 1] times [B] is the same in each of them
            weighting = self._of_each(weights, levels, target.name, micro_steps) or weighting
        squared = target.loss.startswith("squared error")
        if squared and weighting.healthy and weighting.name == "1" and target.name == "sample" and kind.startswith("EDM"):
            weighting.healthy, weighting.severity = False, "warning"
            weighting.message = (
                f"weight 1 on the denoised image: the network is preconditioned as {kind}, so that errors of the raw network "
                "count c_out^2, almost nothing at low noise; EDM's weight is 1 / c_out^2"
            )
        if loss_scale == 1 and abs(weighting.factor - 1) < SMALL and levels.looks[0].output.dtype is torch.float16:
            text = "the loss of an fp16 network is not scaled: gradients below 6e-8 become 0 (torch has a GradScaler for it)"
            checks.append(Check("gradient", "scale of the loss", "above 1, in fp16", "1", False, text, "warning"))
        gamma = f" with gamma {weighting.gamma:g}" if weighting.gamma else ""
        if gamma or "gamma" not in self._words.get("weight", ""):  # a batch without high SNRs shows none
            self._words["weight"] = (weighting.name or "a function of their own") + gamma
        if not weighting.healthy and weighting.name.startswith("1 / (1 - s)^2") and has_wrong_velocity(levels):
            text = "the loss compares velocities that are not the path's: x_0 - x is divided by 1 - s, and s is that of noise"
            name, wanted, found = "velocity of the path", "(x_0 - x) / s", "(x_0 - x) / (1 - s)"
            return [*checks, Check("target", name, wanted, found, False, f"{text}; is the path the other way round?")]
        of_noise = squared and table is not None and target.name == "epsilon"
        bound = check_bound(levels, table, weights / micro_steps) if of_noise else None
        return [*checks, check_weights(weighting, weights), *([] if bound is None else [bound])]

    def _of_each(self, weights: torch.Tensor, levels: Levels, target: str, micro_steps: int) -> Weighting | None:
        """What is wrong with the weights in each micro step alone."""
        parts = weights.split([len(look.x) for look in levels.looks])
        found = [identify_weights(part, Levels([look]), target, micro_steps) for part, look in zip(parts, levels.looks)]
        return found[0] if all(each.name == "1" and not each.healthy for each in found) else None


def _unit(look: Look, levels: Levels, kind: str) -> float:
    """The spread that the process asks images for. `kind`: of the preconditioning, where there is one."""
    told = re.search(r"sigma_data ([\d.e+-]+)", kind)
    sigma_data = float(told[1]) if told else levels.sigma_data if levels.kind == "preconditioned" else None
    return float(look.mixture.noise_tensor.detach().float().std()) * (sigma_data or 1.0) or 1.0


def _data(
    look: Look,
    update: Update,
    facts: Facts,
    encoded: tuple[float, float] | None = None,
    any_range: bool = False,
    unit: float = 1.0,
) -> Check:
    """`any_range`: no process asks for images around 0; `unit`: see `check_range`."""
    images = look.mixture.clean_tensor
    config = getattr(facts.autoencoder, "config", None)
    config = config if isinstance(config, Mapping) else {}  # else the network is one of the script's own
    if encoded is not None and facts.autoencoder is not None and not is_signed(*encoded):
        return check_encoded(*encoded)
    if encoded is not None and facts.autoencoder is not None:
        return check_latents(images, update.micro_steps[0].batch.get("seen") or Seen(), config)
    if facts.autoencoder is not None:
        return check_spread(images, config)
    check = check_range(images, unit)
    return replace(check, severity="info") if any_range and check.severity == "warning" else check


def _raw_network(update: Update, levels: Levels) -> tuple[list[Check], str]:
    """Where the denoiser is made around a network of its own: (the checks, what kind of preconditioning it is)."""
    calls = update.micro_steps[0].calls if update.micro_steps else {}
    outer, inner = calls.get("network"), calls.get("raw")
    if outer is None or inner is None or not outer.outputs or not inner.outputs:
        return [], ""
    if not isinstance(inner.inputs[0], torch.Tensor):
        return [], ""
    return check_preconditioning(levels, outer.inputs[0], outer.outputs[0], inner.inputs[0], inner.outputs[0])


def _told_beside(update: Update) -> list[Check]:
    """Whether a network that is trained beside another gets the noise level that the other gets."""
    checks = []
    for step in update.micro_steps:
        call, beside = step.calls.get("network"), step.batch.get("beside") or ()
        if call is None or not beside or not begins_alike(beside, call.inputs):
            continue
        image, given = call.inputs[0], beside[0]  # a reference network gets another image
        if not torch.equal(image, given.to(image)):
            continue
        told, other = number_told(call.inputs, step), number_told(beside, step)
        if told is not None and other is not None:
            same = torch.equal(told, other)
            text = "the network that is trained gets other noise levels than the one that it is beside"
            name, wanted = "noise level that the network beside gets", "that of the network"
            checks.append(Check("timestep", name, wanted, "the same" if same else "others", same, text))
    return checks[:1]


def _embedded(update: Update) -> list[Check]:
    """Of the first micro step whose embedding of the noise level is known."""
    for step in update.micro_steps:
        told = number_told(step.calls["network"].inputs, step) if "network" in step.calls else None
        if told is not None and (check := check_embedded(told, step.batch.get("vectors") or [])) is not None:
            return [check]
    return []


def _order(declared: str | None, levels: Levels) -> list[str]:
    names = ["epsilon", "v_prediction", "sample", "velocity", "backward", "raw", "score"]
    if levels.kind == "flow":
        names = ["velocity", "backward", *names[:3]]
    if levels.kind == "preconditioned":
        names = ["raw", *names]
    if levels.kind == "variance-preserving" and not told_as_edm(levels):
        names.remove("raw")  # with a sigma_data of 1 it is v of the other sign
    return list(dict.fromkeys([declared, *names] if declared else names))

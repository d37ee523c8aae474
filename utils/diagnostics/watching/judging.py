"""What an update of a script shows: each quantity is identified, and held against what the script's own objects declare."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from utils.diagnostics.audit.declared import Declared, DeclaredOptimizer
from utils.diagnostics.audit.fitting import fit, flat, middle, span, worst
from utils.diagnostics.audit.gradients import check_gradients
from utils.diagnostics.audit.noising import check_noising
from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.pooled import Pool
from utils.diagnostics.audit.seen import Call, MicroStep, Update
from utils.diagnostics.audit.state import check_state
from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching import process
from utils.diagnostics.watching.averages import check_average
from utils.diagnostics.watching.facts import Facts
from utils.diagnostics.watching.latents import check_latents
from utils.diagnostics.watching.mixture import find
from utils.diagnostics.watching.optimizing import check_step
from utils.diagnostics.watching.options import check_options, check_schedule, declared_prediction
from utils.diagnostics.watching.preconditioning import check_preconditioning
from utils.diagnostics.watching.process import Levels, Look, Table
from utils.diagnostics.watching.ranks import Everyone, gather
from utils.diagnostics.watching.seen import Seen, Times

FAR = 1.2  # beyond the range of images
DTYPES = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Clip:
    """A call that clips gradients."""

    kind: str  # "norm" or "value"
    limit: float
    micro_step: int  # after which it came, from 1
    too_late: bool = False  # it came after the optimizer's step


@dataclass
class LastLook:
    """One update as it was seen."""

    update: Update
    observer: Observer
    facts: Facts
    loss_scale: float
    clips: list[Clip]
    moved: bool  # whether the weights changed between updates since the look before
    encoded: bool = False  # an autoencoder made the clean images from others
    everyone: Everyone = field(default_factory=Everyone)  # what all processes saw


@dataclass
class Judge:
    history: list[dict] = field(default_factory=list)  # as in a run's history
    is_words: dict[str, str] = field(default_factory=dict)  # what the script is found to do, by stage
    mixed: bool = False  # the network was seen to get a mixture of image and noise
    rates: list[tuple[int, list[float]]] = field(default_factory=list)
    _noise_pool: Pool = field(default_factory=lambda: Pool(_declared(None, 1)))
    _level_pool: Pool | None = None
    _num_steps: int = 0  # of the noise schedule
    _firsts: dict[str, torch.Tensor] = field(default_factory=dict)  # averages when they were first seen
    _facts: Facts = field(default_factory=Facts)
    _reached: set[str] = field(default_factory=set)  # parameters that ever got a gradient
    _looks_made: int = 0
    _conditions: list[torch.Tensor | None] = field(default_factory=list)  # the row that all images share; None: they differ

    def begin(self, network: nn.Module) -> None:
        self.is_words["network"] = type(network).__name__

    def rate(self, update: int, rates: list[float]) -> None:
        if not self.rates or self.rates[-1][1] != rates:
            self.rates.append((update, rates))
            if len(self.rates) > 4096:
                del self.rates[1:-1:2]

    def record(self, step: int, checks: list[Check]) -> None:
        self.history.append({"step": step, "audit": {"checks": [check.to_json() for check in checks]}})

    def end(self, updates: int, ended: bool) -> None:
        """`ended`: the script came to its own end."""
        if checks := check_schedule(self._facts, self.rates, updates, ended):
            self.record(updates, checks)

    def look(self, look: LastLook) -> None:
        self._facts = look.facts
        checks = self._process(look)
        checks += self._network(look)
        checks += self._condition(look)
        look.everyone = gather(look.update, look.observer)
        checks += self._update(look)
        checks += look.everyone.checks
        self.record(look.update.step + 1, checks)

    # ---- the process

    def _looks(self, look: LastLook) -> list[Look]:
        found = []
        for step in look.update.micro_steps:
            call = step.calls.get("network")
            if call is None or not call.outputs or not call.inputs or not isinstance(call.inputs[0], torch.Tensor):
                continue
            x = call.inputs[0]
            seen: Seen = step.batch.get("seen") or Seen()
            noisings = step.batch.get("noising") or []
            noising = next((n for n in reversed(noisings) if n[1].shape == x.shape), None)
            told = (noising[1], noising[2], type(noising[0]).__name__) if noising is not None else None
            mixture = find(x, seen, told)
            if mixture is None:
                continue
            step.batch |= {"noise": mixture.noise_tensor, "sample_numbers": mixture.clean_tensor}
            gradient = call.gradients.get(0)
            told_level = _told(call, len(x))
            found.append(
                Look(
                    x,
                    told_level,
                    call.outputs[0],
                    gradient / look.loss_scale if gradient is not None else None,
                    mixture,
                    _times(seen, told_level, len(x)),
                    noising[3].reshape(-1).double() if noising is not None else None,
                )
            )
        return found

    def _process(self, look: LastLook) -> list[Check]:
        looks = self._looks(look)
        if not looks:
            if (unexplained := _unexplained(look)) is not None:
                return [unexplained]
            why = "what the network gets is no mixture of noise and a tensor that was seen before it"
            return [not_observed("input", "coefficients of image and noise", "one family for all noise levels", why)]
        self.mixed = True
        levels = Levels(looks)
        if (twice := _noised_twice(look)) is not None:
            return [twice, *self._noise(looks)]
        micro_steps = self._micro_steps(look)
        scheduler = self._scheduler(look)
        checks, table, names = self._levels(levels, looks, scheduler, micro_steps)
        order = _order(names[1], levels)
        coefficients = None
        if table is not None and looks[0].noised_with is not None:
            known = torch.cat([one.noised_with for one in looks]).long()  # type: ignore[misc]
            values = table.to(levels.a)[known.clamp(0, len(table) - 1)]
            coefficients = values.sqrt(), (1 - values).sqrt()
        target = process.identify_target(levels, order, coefficients)
        if target is None:
            checks.append(not_observed("target", "target of the loss", "not declared", "no finite gradient reached the output"))
        else:
            checks.append(process.check_target(target, names[1], levels))
            self.is_words["target"] = target.name + ("" if target.loss == "squared error" else f" by its {target.loss}")
            if target.scale is not None:
                weights = target.scale * levels.pixels * levels.sizes.to(target.scale) * micro_steps / 2
                weighting = process.identify_weights(weights, levels, target.name, micro_steps)
                checks.append(process.check_weights(weighting, weights, target.name))
                gamma = f" with gamma {weighting.gamma:g}" if weighting.gamma else ""
                if gamma or "gamma" not in self.is_words.get("weight", ""):  # a batch without high SNRs shows none
                    self.is_words["weight"] = (weighting.name or "a function of their own") + gamma
        if table is not None:
            self._add_levels(table, looks)
        return [
            *checks,
            *_raw_network(look, levels),
            *self._noise(looks),
            *([] if levels.constant else self._data(looks, look)),
        ]

    def _scheduler(self, look: LastLook) -> Any:
        """The noise scheduler that the script calls, or has told."""
        for step in look.update.micro_steps:
            for noising in step.batch.get("noising") or []:
                return noising[0]
        return look.facts.noise_schedulers[0] if len(look.facts.noise_schedulers) == 1 else None

    def _levels(
        self, levels: Levels, looks: list[Look], scheduler: Any, micro_steps: int
    ) -> tuple[list[Check], torch.Tensor | None, tuple[str, str | None]]:
        """(checks of input and timestep, the table of the schedule, (its name, the declared prediction type))."""
        config = getattr(scheduler, "config", {}) if scheduler is not None else {}
        prediction = config.get("prediction_type") if config else None
        prediction = prediction if prediction in ("epsilon", "sample", "v_prediction") else None
        prediction = declared_prediction(self._facts) or prediction
        times = [one.times for one in looks if one.times is not None]
        drawn = torch.cat([one.values.double() for one in times]) if len(times) == len(looks) else None
        used = torch.cat([one.noised_with for one in looks]) if looks[0].noised_with is not None else None  # type: ignore[misc]
        if scheduler is not None and used is not None and "num_train_timesteps" in config:
            table = _own_table(scheduler)
            name = str(config.get("beta_schedule", "own"))
            return [*self._steps(levels, looks, used, name, table, micro_steps)], table, (name, prediction)
        steps = (times[0].highest if times else 0) or 1000
        for places in (levels.told, drawn):
            if places is not None and bool((places == places.round()).all()) and len(places) == len(levels.a):
                found = process.matching(levels, places, steps)
                if found is not None:
                    return self._steps(levels, looks, places, *found, micro_steps), found[1], (found[0], prediction)
        place = process.anywhere(levels, steps) if drawn is not None or _whole(levels.told) else None
        if place is not None:
            name, table, places = place
            return self._steps(levels, looks, places.double(), name, table, micro_steps), table, (name, prediction)
        if drawn is not None or _whole(levels.told):
            places = drawn if drawn is not None else levels.told
            broken = self._broken(levels, looks, places, steps, micro_steps)
            if broken is not None:
                return broken, None, ("", prediction)
        told, words = process.check_told(levels)
        known = "process of an unknown kind" if levels.kind == "other" else f"{levels.kind} path"
        self.is_words["schedule"] = known + (f", told {words}" if words else "")
        return [told, process.check_mixture(levels)], None, ("", prediction)

    def _steps(
        self, levels: Levels, looks: list[Look], places: torch.Tensor, name: str, table: torch.Tensor, micro_steps: int
    ) -> list[Check]:
        """By the audit's own checks of DDPM."""
        self.is_words["schedule"] = f"{process.said(name)} schedule of {len(table)} steps"
        declared = _declared(Table(name, len(table), False, "epsilon", None, values=table), micro_steps)
        steps, position = [], 0
        for one in looks:
            part = places[position : position + len(one.x)]
            position += len(one.x)
            told = one.told if one.told is not None else part
            call = Call((one.x, told), (one.output[:, : one.x.shape[1]],))
            mixture = one.mixture
            noise = mixture.noise_tensor
            if mixture.extra:
                noise = ((flat_as(mixture, one.x)) if one.x.numel() <= 1 << 18 else noise).to(noise)
            batch = {"clean_images": mixture.clean_tensor, "noise": noise, "timesteps": part}
            steps.append(MicroStep({"network": call}, batch))
        checks = [c for c in check_noising(steps, declared) if c.stage in ("timestep", "input")]
        if looks[0].x.dtype.itemsize < 4:  # image and noise are in half precision, as the script wants them
            checks = [replace(c, severity="info") if "is rounded" in c.message else c for c in checks]
        return checks

    def _broken(
        self, levels: Levels, looks: list[Look], places: torch.Tensor, steps: int, micro_steps: int
    ) -> list[Check] | None:
        """A known mistake in the formula of a known schedule."""
        if bool(((places < 0) | (places >= steps)).any()):
            return None
        for name, table in process.tables(steps).items():
            kept = dict(self.is_words)
            checks = self._steps(levels, looks, places, name, table, micro_steps)
            wrong = [c for c in checks if c.name == "coefficients of image and noise"]
            text = wrong[0].message if wrong else ""
            if text and "times those declared" not in text and "something else" not in text and " schedule" not in text:
                return checks
            self.is_words = kept
        return None

    def _add_levels(self, table: torch.Tensor, looks: list[Look]) -> None:
        """Of steps that were drawn as whole numbers: those that the images have."""
        drawn = [one.noised_with if one.noised_with is not None else one.times.values for one in looks if one.times]
        if self._level_pool is None or self._num_steps != len(table):
            self._num_steps = len(table)
            self._level_pool = Pool(_declared(Table("", len(table), False, "epsilon", None, values=table), 1))
        if len(drawn) == len(looks):
            for levels in drawn:
                self._level_pool.add_levels(levels)

    def _noise(self, looks: list[Look]) -> list[Check]:
        for one in looks:
            noise = one.mixture.noise_tensor
            if noise.ndim == 4:
                if one.mixture.offset:
                    noise = noise - noise.flatten(2).mean(2)[:, :, None, None]
                self._noise_pool.add_noise(noise)
        checks = self._noise_pool.checks()
        if checks and any(one.mixture.offset for one in looks):
            text = f"one number for each channel is added to the noise (offset noise of {looks[0].mixture.offset:.3g})"
            fine = replace(checks[0], healthy=None, observed=f"{checks[0].observed}; offset noise")
            checks = [fine, Check("noise", "offset noise", "none", f"{looks[0].mixture.offset:.3g}", False, text, "info")]
            self.is_words["noise"] = f"offset noise of {looks[0].mixture.offset:.3g}"
        if looks[0].mixture.extra:
            text = f"the network's input has {looks[0].mixture.extra:.3g} times more noise than its target (input perturbation)"
            observed = f"{looks[0].mixture.extra:.3g}"
            checks.append(Check("noise", "input perturbation", "none", observed, False, text, "info"))
            self.is_words["perturbation"] = f"input perturbation of {looks[0].mixture.extra:.3g}"
        if not looks[0].mixture.drawn:
            checks.append(not_observed("noise", "where it is drawn", "by torch, in this update", "it was not drawn by torch"))
        if self._level_pool is not None:
            checks += [self._distribution(check, looks) for check in self._level_pool.checks()]
        return checks

    def _distribution(self, check: Check, looks: list[Look]) -> Check:
        times = looks[0].times
        steps = self._num_steps
        if check.healthy is False and (times is None or not times.highest or (times.lowest, times.highest) == (0, steps)):
            return replace(check, severity="info")  # drawn in another way on purpose
        return replace(check, severity="warning") if check.healthy is False else check

    def _data(self, looks: list[Look], look: LastLook) -> list[Check]:
        images = looks[0].mixture.clean_tensor.detach().float()
        low, high, spread = float(images.min()), float(images.max()), float(images.std())
        name, observed = "range of the clean images", f"{low:.3g} to {high:.3g}, standard deviation {spread:.3g}"
        if look.encoded and look.facts.autoencoder is not None:
            seen: Seen = look.update.micro_steps[0].batch.get("seen") or Seen()
            return [check_latents(looks[0].mixture.clean_tensor, seen, look.facts.autoencoder.config)]
        if images.shape[1] not in (1, 3):
            return [not_observed("data", name, "-1 to 1", f"{images.shape[1]} channels are no images; they are {observed}")]
        wanted = "-1 to 1"
        if high > 2.0 and low > -2.0 and high > 20:
            text = f"the images that the noise is added to reach from {low:.3g} to {high:.3g}: they were not scaled to [-1, 1]"
            return [Check("data", name, wanted, observed, False, text, code="data-range")]
        if low >= -1e-3 and high <= 1 + 1e-3 and high > 0.5:
            text = f"the images that the noise is added to reach from {low:.3g} to {high:.3g}: [0, 1], not [-1, 1]"
            return [Check("data", name, wanted, observed, False, text, "warning", "data-range")]
        if max(high, -low) > FAR and look.facts.autoencoder is None:
            text = f"the images that the noise is added to reach from {low:.3g} to {high:.3g}, not from -1 to 1"
            return [Check("data", name, wanted, observed, False, text, "warning", "data-range")]
        return [Check("data", name, wanted, observed, True)]

    def _condition(self, look: LastLook) -> list[Check]:
        """Of what the network is told beside the noise level: whether it differs between images at all."""
        calls = [s.calls["network"] for s in look.update.micro_steps if "network" in s.calls]
        if not calls or not isinstance(calls[0].inputs[0], torch.Tensor) or len(calls[0].inputs[0]) < 2:
            return []
        batch = len(calls[0].inputs[0])
        for value in [v for v in calls[0].inputs[2:] if isinstance(v, torch.Tensor) and len(v.shape) and len(v) == batch]:
            rows = value.detach().reshape(batch, -1)
            self._conditions.append(rows[:1] if bool((rows == rows[:1]).all()) else None)
        if len(self._conditions) < 4 or any(c is None or c.shape != self._conditions[0].shape for c in self._conditions):
            return []
        same = all(bool((c == self._conditions[0]).all()) for c in self._conditions)
        text = f"the network is told the same label or text for all images, in all {len(self._conditions)} updates looked at"
        name, wanted = "label or text", "different for different images"
        return [Check("condition", name, wanted, "one for all" if same else "different", not same, text, "info")]

    # ---- the network and the update

    def _network(self, look: LastLook) -> list[Check]:
        calls = [s.calls["network"] for s in look.update.micro_steps if "network" in s.calls]
        if not calls:
            return []
        training = all(call.training for call in calls)
        text = "the network is in evaluation mode while it trains: dropout is off"
        checks = [Check("network", "mode", "training", "training" if training else "evaluation", training, text, "warning")]
        frozen, total = len(look.observer.frozen), len(look.observer.parameters) + len(look.observer.frozen)
        self.is_words["parameters"] = f"{total - frozen} of {total} tensors trained"
        seen = DTYPES.get(calls[0].autocast, str(calls[0].autocast))
        declared = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}.get(look.facts.precision or "")
        if declared is not None:
            text = f"layers compute in {seen}, Accelerate was asked for {declared}"
            checks.append(Check("network", "precision of the layers", declared, seen, seen == declared, text))
        self.is_words["precision"] = seen
        dtypes = {str(p.dtype).removeprefix("torch.") for p in look.observer.parameters.values()}
        text = f"weights are kept in {', '.join(sorted(dtypes))}: updates below its rounding are lost"
        fine = dtypes == {"float32"}
        checks.append(Check("network", "precision of the weights", "float32", ", ".join(sorted(dtypes)), fine, text, "warning"))
        return checks

    def _micro_steps(self, look: LastLook) -> int:
        told = look.facts.micro_steps
        passes = sum(step.finished for step in look.update.micro_steps)
        return told if told else max(1, passes)

    def _update(self, look: LastLook) -> list[Check]:
        update, observer = look.update, look.observer
        passes = sum(step.finished for step in update.micro_steps)
        micro_steps = look.facts.micro_steps or passes
        if look.facts.micro_steps and passes < look.facts.micro_steps:
            micro_steps = passes  # the end of the data cuts an accumulation short
        limit = next((clip.limit for clip in reversed(look.clips) if clip.kind == "norm" and not clip.too_late), 0.0)
        declared = _declared(None, max(1, micro_steps), limit)
        checks = []
        if not any(clip.kind == "value" for clip in look.clips) and (look.everyone.alone or look.everyone.mean is not None):
            checks += [self._scaled(c, limit) for c in check_gradients(update, declared, look.loss_scale, look.everyone.mean)]
        if any(clip.too_late for clip in look.clips):
            text = "gradients are clipped after the optimizer's step, where it has no effect"
            checks.append(Check("gradient", "clipping", "before the step", "after the step", False, text))
        early = [clip.micro_step for clip in look.clips if clip.micro_step < passes]
        if passes > 1 and look.clips:
            text = f"gradients are clipped after micro step {min(early, default=0)} of {passes}, before they are complete"
            found = ", ".join(str(clip.micro_step) for clip in look.clips)
            checks.append(Check("gradient", "clipped after micro step", str(passes), found, not early, text))
        checks += self._without_gradient(look)
        checks += check_step(update, observer)
        checks += check_state(update, declared, observer)
        text = (
            "the weights were changed between two updates, by something else than the optimizer: "
            "averaged weights that were copied in and not restored?"
        )
        wanted, found = "those that the step left", "others" if look.moved else "the same"
        checks.append(Check("state", "weights at the next update", wanted, found, not look.moved, text))
        if look.facts.shared:
            text = f"{look.facts.shared} holds the network's own weights, not copies of them: it moves as they do"
            checks.append(Check("ema", look.facts.shared, "copies of the weights", "the weights themselves", False, text))
        for average in look.facts.averages:
            old, new = update.averages_before.get(average.name), update.averages.get(average.name)
            if old is not None and new is not None:
                first = self._firsts.setdefault(average.name, old)
                found = check_average(average, old, new, first, look.update, look.observer)
                checks += found
                if any(check.healthy for check in found):
                    self.is_words["ema"] = f"{average.name}, {found[0].observed.split(',')[0]}"
        checks += check_options(look.facts, passes, limit, update.step > 1)
        self._say_update(look, micro_steps, limit)
        return checks

    def _without_gradient(self, look: LastLook) -> list[Check]:
        """Parameters that the optimizer was given, and that never got a gradient in any look."""
        step, sample = look.update.optimizer_step, look.observer.sample
        if step is None:
            return []
        self._looks_made += 1
        parts = list(zip(sample.names, step.gradient.split(sample.counts), step.group_of.split(sample.counts)))
        self._reached |= {name for name, gradient, _ in parts if gradient.any()}
        missing = [name for name, _, group in parts if name not in self._reached and int(group[0]) >= 0]
        if self._looks_made < 3 or not self._reached:
            return []
        text = f"{len(missing)} of {len(parts)} parameters never get a gradient"
        text += f", such as {missing[0]}" if missing else ""
        name, wanted = "parameters without a gradient", "none"
        found = str(len(missing)) if missing else "none"
        return [Check("gradient", name, wanted, found, not missing, text, "warning", "no-gradient")]

    def _scaled(self, check: Check, limit: float) -> Check:
        """A factor between backward pass and step is no fault where nobody declares a clipping."""
        if (
            check.healthy is False
            and not limit
            and check.name.startswith("gradient at the step over")
            and "times what" in check.message
        ):
            return replace(check, severity="info", message=f"{check.message}: clipped by hand?")
        return check

    def _say_update(self, look: LastLook, micro_steps: int, limit: float) -> None:
        step = look.update.optimizer_step
        if step is not None:
            group = step.groups[0]
            words = f"{step.optimizer}, learning rate {float(group['lr']):.3g}"
            if "betas" in group:
                words += f", betas {group['betas'][0]:g} and {group['betas'][1]:g}"
            if group.get("weight_decay"):
                words += f", weight decay {group['weight_decay']:g}"
            self.is_words["optimizer"] = words
        if micro_steps > 1:
            self.is_words["accumulation"] = f"{micro_steps} micro steps per update"
        if limit:
            self.is_words["clipping"] = f"gradients clipped to {limit:g}"
        for average in look.facts.averages:
            if average.is_average:
                self.is_words.setdefault("ema", average.name)


def _raw_network(look: LastLook, levels: Levels) -> list[Check]:
    """Where the denoiser is made around a network of its own."""
    calls = look.update.micro_steps[0].calls if look.update.micro_steps else {}
    outer, inner = calls.get("network"), calls.get("raw")
    if outer is None or inner is None or not outer.outputs or not inner.outputs:
        return []
    if not isinstance(inner.inputs[0], torch.Tensor):
        return []
    return check_preconditioning(levels, outer.inputs[0], outer.outputs[0], inner.inputs[0], inner.outputs[0])


def _noised_twice(look: LastLook) -> Check | None:
    """What `add_noise` got for a clean image is what it gave before."""
    for step in look.update.micro_steps:
        noisings = step.batch.get("noising") or []
        for place, first in enumerate(noisings):
            for later in noisings[place + 1 :]:
                if later[1].data_ptr() == first[4].data_ptr() and later[1].shape == first[4].shape:
                    text = "noise is added twice: the image that add_noise gets is one that it has noised before"
                    name, wanted = "coefficients of image and noise", "noise is added once"
                    return Check("input", name, wanted, "twice", False, text)
    return None


def _unexplained(look: LastLook) -> Check | None:
    """Where the loss asks for a noise that was drawn, the network's input should be made of it."""
    for step in look.update.micro_steps:
        call, seen = step.calls.get("network"), step.batch.get("seen") or Seen()
        if call is None or not call.outputs or 0 not in call.gradients or not isinstance(call.inputs[0], torch.Tensor):
            continue
        x, output, gradient = call.inputs[0], call.outputs[0], call.gradients[0]
        for draw in seen.draws:
            if draw.tensor.shape == x.shape == output.shape and draw.normal and torch.isfinite(gradient).all():
                _, residual = fit(flat(gradient), flat(output) - flat(draw.tensor))
                if worst(residual) < 1e-2:
                    of_noise, left = fit(flat(x), flat(draw.tensor))
                    text = (
                        "the loss asks for the noise that was drawn, and the network's input is not that noise and an image "
                        f"that was seen: {middle(left):.0%} of it is not the noise, which counts {span(of_noise[:, 0])}"
                    )
                    name, wanted = "coefficients of image and noise", "a mixture of image and noise"
                    return Check("input", name, wanted, f"residual {worst(left):.1e}", False, text)
    return None


def flat_as(mixture: Any, x: torch.Tensor) -> torch.Tensor:
    """The noise that the input has, where it has more than one."""
    values = flat(x) - mixture.of_clean[:, None] * mixture.clean
    return (values / mixture.of_noise.clamp(min=1e-12)[:, None]).reshape(x.shape)


def _whole(told: torch.Tensor | None) -> bool:
    return told is not None and bool((told == told.round()).all()) and float(told.max()) > 1


def _told(call: Call, batch: int) -> torch.Tensor | None:
    """The number for each image that the network gets beside it."""
    for value in call.inputs[1:]:
        if isinstance(value, torch.Tensor) and value.numel() in (1, batch) and value.dtype != torch.bool:
            return value.detach().double().reshape(-1).expand(batch)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return torch.full((batch,), float(value), dtype=torch.float64)
    return None


def _times(seen: Seen, told: torch.Tensor | None, batch: int) -> Times | None:
    """Of the whole numbers drawn for the batch: those that the network is told, else those of the widest range."""
    drawn = [times for times in seen.times if times.values.numel() == batch]
    for times in drawn:
        if told is not None and torch.equal(times.values.double().cpu(), told.cpu()):
            return times
    return max(drawn, key=lambda times: times.highest, default=None)


def _order(declared: str | None, levels: Levels) -> list[str]:
    names = ["epsilon", "v_prediction", "sample", "velocity", "backward", "raw", "score"]
    if levels.kind == "flow":
        names = ["velocity", "backward", *names[:3]]
    if levels.kind == "preconditioned":
        names = ["raw", *names]
    return list(dict.fromkeys([declared, *names] if declared else names))


def _own_table(scheduler: Any) -> torch.Tensor:
    """As a scheduler made anew of the same config has it."""
    fresh = type(scheduler).from_config(scheduler.config)
    return fresh.alphas_cumprod.double().cpu()


def _declared(noising: Any, micro_steps: int, limit: float | None = 0.0) -> Declared:
    optimizer = DeclaredOptimizer("", 0.0, 0.0, 0.0, 0.0, 0.0, lambda step: 0.0, limit)
    return Declared(noising, None, optimizer, micro_steps, None)

"""The step audit in the loop: which updates are looked at, what they are compared with, and what is recorded of it."""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from steady_doctor.built import network as built
from steady_doctor.built.equations import equations
from steady_doctor.built.sampler import Process, sampler
from steady_doctor.found import Found
from steady_doctor.stored import checkpoint as stored
from steady_doctor.stored.pipeline import Pipeline, exported, started_from
from utils.core.distributed import from_all, objects_from_all
from utils.core.errors import UserError
from utils.core.waiting import Meeting
from utils.diagnostics.audit.averages import check_averages
from utils.diagnostics.audit.continuity import Continuity
from utils.diagnostics.audit.declared import AdaptiveClipping, Declared, DeclaredNoising, declared_by
from utils.diagnostics.audit.denoising import check_denoising
from utils.diagnostics.audit.elements import digest, judged_on
from utils.diagnostics.audit.gradients import check_gradients
from utils.diagnostics.audit.noising import check_noising
from utils.diagnostics.audit.observer import Observer, failure_text
from utils.diagnostics.audit.optimizer import check_learning_rate, check_memory, check_optimizer, has_learning_rate
from utils.diagnostics.audit.pooled import Pool
from utils.diagnostics.audit.ranks import check_ranks, digests_of
from utils.diagnostics.audit.seen import Update, on_cpu
from utils.diagnostics.audit.slopes import check_slopes
from utils.diagnostics.audit.state import check_network, check_state
from utils.diagnostics.audit.verdict import Check, checks_of
from utils.diffusion.objective import Objective
from utils.diffusion.sampling import SamplePlan, make_sampler, sample, sampling_steps, set_timesteps
from utils.optim.clipping import Gradients
from utils.optim.power_ema import PowerEMA
from utils.training.data_audit import DataAudit
from utils.training.run import Run

EDM_LEVELS = {"sigma_min": 0.002, "sigma_max": 80.0, "rho": 7.0}  # of the sampler, Karras et al. 2022, table 1
MOST_STEPS = 25  # of the sampler that is asked: what a step does does not depend on their number
RATES_SAID = 3  # updates without a report whose learning rate is said to be wrong

T = TypeVar("T")


def audited_updates(count: int) -> set[int]:
    """Numbers of the updates of a run that are looked at: 1, 2, 3, 5, 8, 13, 20, 34, 60, 89, 100 and so on. They have no rhythm
    for a fault to share, but every second one from 20 on is round: so is what comes once in so many updates."""
    numbers = [1, 2]
    while numbers[-1] <= count:
        numbers.append(sum(numbers[-2:]))
    rounded = {
        int(float(f"{number:.0e}")) if number > 20 and place % 2 == 0 else number for place, number in enumerate(numbers)
    }
    return {number for number in rounded if number <= count}


def sampler_call(objective: Objective, name: str, steps: int, seed: int = 0) -> Callable[[nn.Module, int], torch.Tensor]:
    """Training's way to sample with another network: a function of (network with an `image`, number of images)."""

    def call(oracle: Any, count: int) -> torch.Tensor:
        stand_in = copy(objective)  # so that its `predict` asks the oracle
        stand_in.exported = oracle
        scheduler = make_sampler(name, objective.noise_scheduler)
        image = oracle.image
        plan = SamplePlan(scheduler, steps, tuple(image.shape), seed, count, image.device)
        return sample(oracle, plan, torch.arange(count), predict=stand_in.predict)

    return call


def _looked(stage: str, what: str, found: Iterable[Found], is_first: bool = True) -> list[Check]:
    """The checks of what was found, or at a first look that nothing was."""
    return checks_of(found) or [Check(stage, what, "as declared", "the same", True)] * is_first


class StepAudit:
    """Its methods are to be called on every process, in the order below."""

    def __init__(self, run: Run, eager: bool, turned_down: Callable[[], int]):
        """`eager`: see `Observer`. `turned_down`: how many updates the run has turned down so far; the host may wait."""
        self._run, self._turned_down = run, turned_down
        objective, options = run.objective, run.options
        modules: dict[str, Any] = {"network": objective.network}
        if objective.exported is not objective.network:
            modules |= {"unet": objective.exported, "uncertainty": objective.network.uncertainty}
        self.declared = declared_by(options, run.facts, run.resumed_from)
        self._observer = Observer(modules, self._averages(), eager=eager)
        self._continuity = Continuity(self._observer.parameters, self._observer.averages, self.declared.averages)
        self._channels = run.facts["vae.latent_shape"][0] if options.vae else options.image_channels  # that the network sees
        self._rates_said = 0  # updates without a report that had another learning rate
        self._built = False  # whether it was looked at how the network is built
        self._pool, self._data = Pool(self.declared), DataAudit(run)
        self._numbers = audited_updates(run.length.max_train_steps) | {run.state.step + 1}
        self._compiled, self._looks, self._scheduled = options.compile, 0, False
        self._loss_scale, self._finite, self._followed = 1.0, torch.tensor(True), True
        self._stored_mean = run.state.grad_norm_mean
        self._clipping = AdaptiveClipping(self._stored_mean) if options.adaptive_clipping else None
        self._limit: float = options.max_grad_norm  # of the update under way
        self._norm: torch.Tensor | None = None
        self._pending: Update | None = None
        self._checks: list[Check] = []
        self._check_started()
        self._saved = self._snapped = 0  # checkpoints and snapshots that were looked at
        self._counted: tuple[int, torch.Tensor] | None = None  # updates made, and the steps counted, at the newest look
        self._left: torch.Tensor | None = None  # digest of the weights and averages before what is made between updates

    def _averages(self) -> dict[str, dict[str, torch.Tensor]]:
        """By the names of the trained network's parameters."""
        ema, objective = self._run.ema, self._run.objective
        if ema is None:
            return {}
        prefix = "" if objective.exported is objective.network else "unet."
        several = ema.averages if isinstance(ema, PowerEMA) else {None: ema}
        return {
            "EMA" if width is None else f"EMA {width}": {prefix + name: tensor for name, tensor in average.shadow.items()}
            for width, average in several.items()
        }

    def begin(self, step: int, reported: bool) -> None:
        """Before the update that follows `step` finished ones. Compiled networks are looked at in updates that are `reported`,
        which run eagerly anyway, so that the audit changes no number."""
        self._continuity.begin()
        weights = self._finish()
        wanted = reported and self._due_of_compiled(step) if self._compiled else step + 1 in self._numbers
        self._scheduled = wanted
        if wanted and not self._built:
            self._built = True
            self._record(self._guarded(self._look_at_network, step == 0 and self._run.resumed_from is None))
        if wanted:
            scaler = self._run.accelerator.scaler
            self._loss_scale = 1.0 if scaler is None else scaler.get_scale()
            self._observer.begin(step, asks=self._looks % 3 == 1 and self._followed, weights=weights)
            self._looks += 1

    def _look_at_network(self, fresh: bool) -> list[Check]:
        exported, declared = self._run.objective.exported, self.declared
        options: Any = self._run.options  # both scripts have a config of the network
        flags: dict[str, Any] = dict.fromkeys(("in_channels", "out_channels"), self._channels)
        flags |= {"dropout": declared.dropout, "act_fn": declared.network and declared.network.activation}
        step, path = self._run.state.step, options.model_config_name_or_path
        found = [] if path is None else list(built.config(exported, Path(path), flags, step))
        if declared.network is not None:
            found += built.built(exported, declared.network, fresh, step)
        elif type(exported).__name__ == "EDM2UNet":
            found += equations(exported, step)
        elif path is None:  # of a pipeline
            return []
        return _looked("network", "built", found)

    def _due_of_compiled(self, step: int) -> bool:
        """The first report from each of the chosen updates on."""
        due = {number for number in self._numbers if number <= step + 1}
        self._numbers -= due
        return bool(due)

    @property
    def looks(self) -> bool:
        """Whether it looks at the update under way."""
        return self._scheduled

    def begin_micro_step(self, batch: dict[str, Any]) -> None:
        self._data.begin_micro_step(batch)
        if self._scheduled:
            self._observer.begin_micro_step(sample_numbers=batch["sample_numbers"])

    def add(self, drawn: dict[str, torch.Tensor]) -> None:
        """What a micro step was of."""
        self._pool.add_levels(drawn[self._run.objective.level])
        self._guarded(self._data.add, drawn)
        if self._scheduled:
            self._observer.tell(**drawn)

    def end_step(self, gradients: Gradients) -> None:
        """When the weights are those of the next update; `gradients`: those of this one, before they were clipped."""
        self._finite, self._norm = gradients.finite, gradients.norm
        self._continuity.stepped()
        if self._clipping is not None and self._scheduled:
            self._limit = self._clipping.limit()
        if self._scheduled:
            self._observer.end_step()

    def count(self, gradients: Gradients) -> None:
        """After `end_step`, and when an update is made again."""
        if self._clipping is not None:
            self._clipping.count(gradients.norm)

    def counters(self) -> list[object]:
        """What gathers something of each update."""
        return [self._pool, *self._data.counters(), *([] if self._clipping is None else [self._clipping])]

    def end_update(self, between: bool, reported: bool) -> None:
        """After all of an update; `between`: whether anything is made before the next one that may touch the weights."""
        self._continuity.end(self._run.state.step, self._finite)
        update = self._observer.end_update() if self._scheduled else None
        if self._scheduled and not self._all_saw(update):
            update, self._numbers = None, set()  # it would fail again
        self._scheduled = False
        if reported and self._clipping is not None:
            self._clipping.mean()  # the host waits for the device now anyway
        if update is None:
            rates = {float(group["lr"]) for o in self._run.accelerator._optimizers for group in o.param_groups}
            optimizer, finished = self.declared.optimizer, self._run.state.step - 1
            wrong = not has_learning_rate(rates, optimizer.learning_rate(finished))
            if reported or (wrong and self._rates_said < RATES_SAID):
                self._checks = [check_learning_rate(sorted(rates), optimizer, finished)]
                self._rates_said += not reported
        else:
            self._pending, self._checks = update, self._judge(update) + self._guarded(self._continuity.checks)
        if between or update is not None:
            self._left = self._digest(None if update is None else update.digest_last)

    def forget_update(self) -> None:
        """The newest update erred, and was replaced: what was seen of its weights and averages is no longer true."""
        self._continuity.restart()
        self._checks, self._pending, self._left, self._counted = [], None, None, None

    def check_sampler(self) -> None:
        """Asks the sampler of the run's pictures what it makes of a network that knows the answer. On the main process."""
        self._record(self._guarded(self._ask_sampler))

    def _ask_sampler(self) -> list[Check]:
        options, objective = self._run.options, self._run.objective
        noising = self.declared.noising
        steps = sampling_steps(options.sampler, options.sampling_steps, objective.noise_scheduler)
        if noising is not None and noising.steps < 10:
            return []  # too few noise levels to step along

        def possible(count: int) -> bool:
            try:
                set_timesteps(make_sampler(options.sampler, objective.noise_scheduler), count)
            except UserError:
                return False
            # diffusers spaces trailing timesteps unevenly where their number does not divide that of the levels.
            return noising is None or not noising.zero_snr or noising.steps % count == 0

        steps = next(filter(possible, range(min(steps, MOST_STEPS), 0, -1)))
        found = sampler(
            sampler_call(objective, options.sampler, steps),
            self._process(),
            (self._channels, 8, 8),
            self._run.state.step,
            adds_noise=options.sampler == "ddpm",
            clips=noising is not None and noising.clips and not (noising.zero_snr and options.sampler == "ddpm"),
        )
        return _looked("export", "sampler", found)

    def _process(self) -> Process:
        process = self.declared.process
        if isinstance(process, DeclaredNoising):
            return Process(process.alphas_cumprod, process.prediction_type)
        return Process(sigma_data=process.sigma_data)

    def check_exported(self) -> None:
        """Compares the pipeline that was just exported with what it should be. On the main process."""
        self._record(self._guarded(self._read_exported))

    def _read_exported(self) -> list[Check]:
        run, noising, process = self._run, self.declared.noising, self._process()
        network = run.objective.exported
        weights = network.state_dict()
        if run.ema is not None:
            weights |= {name: tensor for name, tensor in run.ema.shadow.items() if name in weights}
        if noising is not None:
            settings = {**noising.sampling, "prediction_type": noising.prediction_type}
        else:
            settings = {**EDM_LEVELS, "sigma_data": process.sigma_data}
        scale = (run.facts["vae.latent_mean"], run.facts["vae.latent_std"]) if run.options.vae else None
        names = (run.data.images.class_names or ()) if run.objective.classes else ()
        declared = Pipeline(weights, settings, process.alphas_cumprod, scale, names)
        return _looked("export", "pipeline", exported(run.output_dir, declared, network, run.state.step))

    def _check_started(self) -> None:
        """Beside what the run goes on from, or starts from."""
        run = self._run
        if run.resumed_from is not None:
            optimizer = None if "optimizer" in run.options.allow_option_change else run.accelerator._optimizers[0]
            self._read_checkpoint("state after the resume", run.resumed_from, self._state(optimizer))
        elif (pretrained := getattr(run.options, "pretrained", None)) and Path(pretrained, "unet").is_dir():
            weights, names = run.objective.exported.state_dict(), run.data.images.class_names or ()
            rescales = self.declared.denoising is not None and self.declared.denoising.force_weight_norm
            look = partial(started_from, Path(pretrained), weights, names, rescales)
            self._record(self._guarded(lambda: _looked("network", "pretrained", look())))

    def _read_checkpoint(self, what: str, checkpoint: Path, state: stored.State, only: int | None = None) -> None:
        self._record(self._guarded(lambda: _looked("state", what, stored.kept(checkpoint, state, only), only is None)))

    def _state(self, optimizer: Any) -> stored.State:
        run = self._run
        return stored.State(
            run.state.step,
            run.objective.network.state_dict(),
            optimizer,
            None if run.ema is None else run.ema.state_dict(),
            run.accelerator.scaler,
            run.clipping.mean,
            run.options.adaptive_clipping,
        )

    def check_saved(self) -> None:
        """Compares a checkpoint that was just saved with what the run has; later ones by a few tensors. On the main process."""
        run = self._run
        checkpoint, only = run.output_dir / f"checkpoint-{run.state.step}", self._saved or None
        self._saved += 1
        self._read_checkpoint("checkpoint as saved", checkpoint, self._state(run.accelerator._optimizers[0]), only)

    def check_snapshots(self) -> None:
        """Compares the snapshots of averages that were just saved with what the run has; later ones by a few tensors. On the
        main process."""
        run, several = self._run, self._run.ema
        if isinstance(several, PowerEMA):
            averages = {width: average.shadow for width, average in several.averages.items()}
            only = self._snapped or None
            self._snapped += 1
            look = partial(stored.snapshots, run.output_dir / "ema_snapshots", run.state.step, averages, only)
            self._record(self._guarded(lambda: _looked("ema", "snapshots", look(), only is None)))

    def _record(self, checks: list[Check]) -> None:
        if not checks:
            return
        self._run.doctor.record(self._run.state.step, {"audit": {"checks": [check.to_json() for check in checks]}})

    def measure_eagerly(self) -> None:
        """From here on audited updates run eagerly, as all others do once compiling is given up."""
        self._observer.eager = True

    def close(self) -> None:
        """At the end of the run, where no update follows."""
        self._finish()
        self._observer.rest()
        if checks := self._guarded(self._continuity.checks):
            self._record(checks)

    @torch.no_grad()
    def _digest(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [2], of the weights and of the averages. `weights`: that of the weights, where it is known."""
        weights = digest(self._observer.parameters.values()) if weights is None else weights
        averages = [tensor for average in self._observer.averages.values() for tensor in average.values()]
        return torch.stack([weights, digest(averages).to(weights.device)])

    def _all_saw(self, update: Update | None) -> bool:
        """Whether the observation succeeded on every process; else none of them judges it, and the main one says why."""
        if update is None:
            self._say_failed(self._observer.failure or "nothing was seen")
        self._observer.failure = ""
        accelerator = self._run.accelerator
        everywhere = all(from_all(accelerator, torch.tensor([update is not None], device=accelerator.device)))
        if update is not None and not everywhere:
            self._say_failed("it failed on another process")
        return everywhere

    def _judge(self, update: Update) -> list[Check]:
        """Checks of this process and, on the main one, what is wrong on the others."""
        accelerator = self._run.accelerator
        last = update.micro_steps[-1].gradient_after if update.micro_steps else None
        if accelerator.num_processes == 1:
            return self._guarded(self._judge_alone, update, last)
        own = self._observer.sample.take(self._observer.parameters.values()) * 0 if last is None else last.clone()
        with Meeting():
            mean = accelerator.reduce(own, "mean")
        checks = self._guarded(self._judge_alone, update, mean)
        num_levels = 2.0**24 if self.declared.noising is None else self.declared.noising.steps
        mine = digests_of(update, self._observer, num_levels)
        with Meeting():
            everyone = accelerator.gather(torch.stack([v.to(accelerator.device) for v in mine.values()])[None]).cpu()
        checks += check_ranks(list(mine), everyone)
        others = objects_from_all([[(accelerator.process_index, c) for c in checks if c.healthy is False]])
        told = {(check.stage, check.name) for check in checks if check.healthy is False}
        return checks + [
            replace(check, message=f"on process {rank}: {check.message}")
            for part in others
            for rank, check in part
            if rank != accelerator.process_index and (check.stage, check.name) not in told
        ]

    def _judge_alone(self, update: Update, gradient: torch.Tensor | None) -> list[Check]:
        """`gradient`: what the backward passes left, sampled, averaged over the processes."""
        scale = float(self._loss_scale)
        batches = [step.batch for step in update.micro_steps if "noise" in step.batch]
        for batch in batches:
            self._pool.add_noise(batch["noise"], batch.get("clean_images"))
        skipped = not bool(self._finite)  # then no step is declared
        update, gradient = self._judged(update), self._judged(gradient)
        checks, declared = self._clipped(update)
        numbers = [step.batch.get("sample_numbers") for step in update.micro_steps]
        images = [step.batch.get("clean_images") for step in update.micro_steps]
        # One check that fails must not hide what the others find.
        checks += self._guarded(self._data.checks, update.step, numbers, images)
        checks += self._guarded(check_network, update, self._observer, declared)
        if declared.dropout:
            self._pool.add_passes([step.calls["network"].randomness for step in update.micro_steps if "network" in step.calls])
        if self._observer.eager:
            look = check_noising if declared.noising is not None else check_denoising
            checks += self._guarded(look, update.micro_steps, declared, scale)
        checks += self._guarded(check_gradients, update, declared, scale, gradient)
        slopes = self._guarded(check_slopes, update, declared, self._observer, scale)
        self._followed = not any(check.healthy is False for check in slopes)  # once said, it is not looked into again
        checks += slopes
        checks += self._guarded(check_optimizer, update, declared, self._observer, skipped)
        checks += self._guarded(self._remembered, update, skipped)
        checks += self._guarded(check_state, update, declared, self._observer)
        checks += self._guarded(check_averages, update, declared, self._observer, skipped)
        return [*checks, *self._pool.checks(), *self._pool.independence()]

    def _remembered(self, update: Update, skipped: bool) -> list[Check]:
        """What an optimizer that counts its steps must have counted since the last look."""
        step, made = update.optimizer_step, update.step + 1 - self._turned_down()
        if step is None:
            return []
        checks = []
        if self._counted is not None:
            before, counted = self._counted
            checks = check_memory(step, counted, made - (not skipped) - before)
        self._counted = made, step.state_after.get("step", torch.zeros_like(step.before))
        return checks

    def _clipped(self, update: Update) -> tuple[list[Check], Declared]:
        """(checks of the limit that this update's gradient is clipped to, what is declared of it)."""
        limit, used, update.told_norm = self._limit, float(self._run.clipping.value), self._norm
        declared = replace(self.declared, optimizer=replace(self.declared.optimizer, max_grad_norm=limit))
        if self._clipping is None:
            return [], declared
        text = f"the gradient is clipped to {used:.4g}, and the norms so far give {limit:.4g}"
        fine = abs(used / limit - 1) < 1e-3
        return [Check("gradient", "limit of the norm", f"{limit:.4g}", f"{used:.4g}", fine, text)], declared

    def _judged(self, seen: T) -> T:
        """What was seen, where it can be computed with in float64."""
        device = self._run.accelerator.device
        return seen if judged_on(device) == device else on_cpu(seen)

    def _guarded(self, look: Callable[..., list[Check] | None], *arguments: Any) -> list[Check]:
        """An audit that fails must not end the training that it looks at; it is said to have failed."""
        try:
            return look(*arguments) or []
        except Exception as error:
            self._say_failed(failure_text(error))
            return []

    def _say_failed(self, text: str) -> None:
        self._run.doctor.record(self._run.state.step, {"audit": {"checks": [], "failed": text}})

    def _finish(self) -> torch.Tensor | None:
        """Looks at what was made between two updates, and records what was found. The digest of the weights as they are now,
        where it was taken."""
        checks, update, now = self._checks, self._pending, None
        if self._left is not None:
            now = self._digest()
            checks = [*checks, *self._between(now)]
        if checks and (update is not None or any(check.healthy is False for check in checks)):
            self._record(checks)
        self._checks, self._pending, self._left = [], None, None
        return None if now is None else now[0]

    def _between(self, now: torch.Tensor) -> list[Check]:
        same = torch.eq(cast(torch.Tensor, self._left), now).tolist()
        checks = []
        for name, fine in zip(("weights", "averages"), same):
            text = f"the {name} were changed between two updates: by a validation, samples, an export or a checkpoint?"
            if name == "weights":
                text += " Averaged weights may have been left in the network"
            found = "the same" if fine else "others"
            said = f"those that update {self._run.state.step} left"
            checks.append(Check("state", f"{name} at the next update", said, found, fine, text))
        stored, before = self._run.state.grad_norm_mean, self._stored_mean
        if self._clipping is not None and stored != before:  # a checkpoint was made, which asked for it
            self._stored_mean, mean = stored, self._clipping.mean()
            fine = stored is not None and mean is not None and abs(stored - mean) <= 1e-3 * mean
            text = f"the running mean of the gradient's norm is {mean}, and checkpoints store {stored}"
            checks.append(Check("state", "mean of the gradient's norm", f"{mean}", f"{stored}", fine, text))
        return checks

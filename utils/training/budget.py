"""`--budget`: one dial that sets the network, the batch, the number of updates, the EMA and the learning rate.

The network is the largest preset of which a quarter of its own updates fits into the budget; FEW_IMAGES or fewer get `few`.
A few updates of each that may be it are measured, with the run's data, on all processes together. What the run makes beside
its updates is counted and taken off. The choice is the main process's, and is stored: a resumed run measures nothing.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import nn

from utils.core.bars import Bar, duration
from utils.core.distributed import from_main_process, objects_from_all
from utils.core.errors import UserError
from utils.core.launcher import launcher_words
from utils.core.size import read_budget
from utils.data.training_data import TrainingData, TrainingSamples
from utils.diffusion.classes import count_classes
from utils.diffusion.objective import Objective
from utils.diffusion.sampling import SamplePlan, make_sampler, sampling_steps
from utils.optim.clipping import FixedLimit
from utils.optim.nonfinite import step_if_finite
from utils.optim.optimizers import make_optimizer
from utils.optim.power_ema import make_ema
from utils.options.budget import OF_THE_BATCH, OF_THE_DATA, SETS, chosen_by, repeating
from utils.options.flags import AnyRun, RunOptions
from utils.options.presets import FEW_IMAGES, networks_by_size
from utils.training.evaluation import DRAWS
from utils.training.memory_plan import MemoryPlan
from utils.training.run import load_data

SHARE_OF_PRESET = 0.25  # of a preset's own updates, that its network needs at least
MEASURING = 0.04  # share of the time that one measurement may take
WHOLE = 600.0  # seconds of a run that has this many; a shorter one has fewer, a longer one more checkpoints
WHOLE_UPDATES = 1000.0  # the same of a run whose length is told in updates
REPORTS, VALIDATIONS, EVALUATIONS, SAVES, GRIDS = 50, 8, 4, 6, 2
PROBE = 20  # forward passes of a look at the network, one with each grid
AROUND, REPORT, SAVE = 8.0, 0.05, 0.15  # seconds: before the first and after the last update; a report; a checkpoint
BYTES_PER_SECOND = 100e6  # of checkpoints, written and read back


def within_budget(
    options: AnyRun,
    accelerator: Accelerator,
    make_network: Callable[..., nn.Module],
    make_objective: Callable[[Any, AnyRun], Objective],
) -> AnyRun:
    """The options with what --budget sets, the same on every process, which is said. Raises UserError where no update fits."""
    if options.budget is None:
        return options
    stored = "max_train_steps" in options.given  # see `recalled`
    chosen = from_main_process({name: getattr(options, name) for name in SETS} if stored else None)
    said = f"what {options.output_dir} has stored"
    if chosen is None:
        dial = _Dial(options, accelerator, make_network, make_objective)
        trial, updates = dial.choose()
        chosen, said = from_main_process(trial.settings(updates)), trial.words(updates)
    made = chosen_by(options, chosen)
    if accelerator.is_main_process:
        own = () if stored else [name for name in SETS if name in options.given and name not in OF_THE_DATA]
        kept = ", ".join(f"--{name} {getattr(options, name)}" for name in own)
        print(f"--budget {options.budget}: {said}" + f"; as you set it: {kept}" * bool(kept))
        print(f"the same run without --budget: {repeating(made)}", flush=True)
    return made


class _Dial:
    def __init__(self, options: Any, accelerator: Accelerator, make_network: Callable, make_objective: Callable):
        self.options, self.accelerator = options, accelerator
        self.make_network = partial(make_network, device_type=accelerator.device.type)
        self.make_objective = make_objective
        self.amount, self.unit = read_budget(options.budget or "")
        self.data: TrainingData = load_data(replace(options, validation_images=0), accelerator)  # how many, a preset may say

    def choose(self) -> tuple["_Trial", int]:
        """(what was chosen, number of updates). Every process goes the same way."""
        best: Any = None
        for name in self._candidates():
            trial = _Trial(self, name)
            needed = SHARE_OF_PRESET * self.options.presets.get(name or "", {}).get("max_train_steps", 0)
            if best is not None and self.unit == "updates" and self.amount < needed:
                break
            if self.unit != "updates":
                expected = best and best.seconds * trial.flops() / best.flops()
                if expected and from_main_process(expected * needed > 2 * self.amount):  # it would also take long to measure
                    break
                trial.measure()
                if best is not None and from_main_process(trial.updates() < needed):
                    break
            best = trial
        updates = from_main_process(int(self.amount) if self.unit == "updates" else best.updates())
        if updates < 1:
            without = duration(self.amount - best.left())
            raise UserError(
                f"--budget {self.options.budget} is too short: start, samples and export take {without}\n"
                "set a longer one, or a lower --resolution"
            )
        return best, updates

    def times(self, of_whole: int) -> int:
        """How often a run has what a WHOLE one has so many times."""
        return max(1, round(of_whole * min(1.0, self.amount / (WHOLE if self.unit == "seconds" else WHOLE_UPDATES))))

    def _candidates(self) -> Sequence[str | None]:
        """Presets, the smallest network first; only that of the options where they name one."""
        options = self.options
        if options.model_config_name_or_path or "model_preset" in options.given:
            return [options.model_preset]
        few = len(self.data.images) <= FEW_IMAGES
        on_cpu = self.accelerator.device.type == "cpu" or self.unit == "updates"
        return networks_by_size(options.presets, options.resolution, few=few, on_cpu=on_cpu) or [options.model_preset]


class _Trial:
    """Options with a preset's network and a batch that fits into memory, and what an update takes with them."""

    def __init__(self, dial: _Dial, name: str | None):
        self.dial, options, accelerator = dial, dial.options, dial.accelerator
        preset, processes = options.presets.get(name or "", {}), accelerator.num_processes
        chosen = {each: getattr(options, each) for each in OF_THE_DATA} | ({"model_preset": name} if name else {})
        if name == "few":  # of which the preset holds out as many as a larger set can spare
            chosen["validation_images"] = min(preset["validation_images"], len(dial.data.images) // 5)
        self.options: Any = chosen_by(options, chosen)
        self.count = len(dial.data.images) - self.options.validation_images  # of training images
        self.usual_batch: int = (
            preset.get("global_batch_size") or preset.get("train_batch_size") or type(options).train_batch_size
        )
        if options.given.isdisjoint(OF_THE_BATCH):
            size = self.usual_batch
            while size > max(self.count // 4, processes):
                size //= 2
            self.options.global_batch_size = max(1, size // processes) * processes
        self.plan = MemoryPlan(accelerator, self.options, dial.make_network, partial(make_optimizer, options=self.options))
        if self.options.global_batch_size:
            self._split()
        self.images = processes * self.options.micro_batch_size * self.options.gradient_accumulation_steps
        self.seconds = self.forward = self.busy = 0.0

    def _split(self) -> None:
        options = self.options
        options.train_batch_size, options.gradient_accumulation_steps = self.plan.split()
        fits = self.plan.fits(self.plan.estimate(options.micro_batch_size, options.gradient_accumulation_steps))
        if not from_main_process(fits):
            options.train_batch_size = "auto"
            options.train_batch_size, options.gradient_accumulation_steps = self.plan.split()

    def flops(self) -> int:
        return self.plan.flops_per_image() * self.images

    def measure(self) -> None:
        """Times updates, the longest of all processes. Nothing else is left of them."""
        options, accelerator, data = self.options, self.dial.accelerator, self.dial.data
        shown = accelerator.is_main_process and not options.quiet
        scaler = accelerator.scaler.state_dict() if accelerator.scaler else {}
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(devices), Bar("measuring updates", shown=shown):
            classes = count_classes(data.images) if options.class_conditional else 0
            objective = self.dial.make_objective(self.dial.make_network(options, num_classes=classes), options)
            self.scheduler = objective.noise_scheduler
            self.parameters = sum(parameter.numel() for parameter in objective.exported.parameters())
            repeat = _updates(options, accelerator, TrainingSamples(data.training, accelerator, options), objective)
            first, _ = repeat(2)
            first, _ = repeat(1)  # the first ones do more
            count = from_main_process(min(200, max(3, int(MEASURING * self.dial.amount / first))))
            seconds, self.busy = repeat(count)
            forward, _ = repeat(max(2, count // 4), trains=False)
        accelerator.free_memory()
        if accelerator.scaler:
            accelerator.scaler.load_state_dict(scaler)
        self.seconds, self.forward = map(max, zip(*objects_from_all([(seconds, forward)])))
        if from_main_process(self.left() < self.dial.amount / 2):  # fewer samples for more updates
            fewer = {"eval_batch_size": max(4, options.eval_batch_size // 4)}
            fewer |= {"eval_images": max(16, options.eval_images // 4)} if options.eval_steps else {}
            self.options = replace(options, **{name: fewer[name] for name in fewer.keys() - self.dial.options.given})

    def beside(self) -> float:
        """Seconds that the run needs beside its updates; how often is in `settings`."""
        options, batch = self.options, self.options.micro_batch_size
        steps = sampling_steps(options.sampler, options.sampling_steps, self.scheduler)
        sampler = make_sampler(options.sampler, self.scheduler)
        steps = SamplePlan(sampler, steps, self.dial.data.training.shape, 0, 1, "cpu").denoising_steps(1)
        held_out, times = options.validation_images, self.dial.times
        images = times(GRIDS) * (steps * (1 + options.use_ema) * options.eval_batch_size + PROBE * batch)
        images += times(VALIDATIONS) * DRAWS * held_out
        images += times(EVALUATIONS) * steps * options.eval_images if options.eval_steps else 0
        saves = times(SAVES) + (times(VALIDATIONS) / 2 if held_out else 0)
        state = 4 * self.parameters * (3 + options.num_averages)
        fixed = AROUND + times(REPORTS) * REPORT + saves * (SAVE + state / BYTES_PER_SECOND)
        return images / batch * self.forward + self.busy * fixed

    def left(self) -> float:
        """Seconds for the updates. This process, or its launcher, has had those since its start."""
        started = psutil.Process(os.getppid() if launcher_words() else None).create_time()
        return self.dial.amount - self.beside() - (time.time() - started)

    def updates(self) -> int:
        return int(self.left() / self.seconds)

    def settings(self, updates: int) -> dict[str, Any]:
        """Returns values of SETS."""

        def part(of: int) -> int:
            return math.ceil(updates / self.dial.times(of))

        options = self.options
        rate = options.learning_rate * math.sqrt(self.images / self.usual_batch)
        settings = {name: getattr(options, name) for name in SETS} | {
            "max_train_steps": updates,
            "learning_rate": float(f"{rate:.2g}"),
            "lr_warmup_steps": min(options.lr_warmup_steps, updates // 20),
            "logging_steps": part(REPORTS),
            "validation_steps": part(VALIDATIONS),
            "checkpointing_steps": part(max(SAVES, int(self.dial.amount / WHOLE)) if self.dial.unit == "seconds" else SAVES),
            "save_images_steps": part(GRIDS),
            "save_model_steps": part(GRIDS),
        }
        if options.ema_type == "exponential":
            settings["ema_max_decay"] = round(min(0.9999, max(0.0, 1 - 10 / updates)), 6)  # averages a tenth of the run
        if options.eval_steps:
            settings["eval_steps"] = part(EVALUATIONS)
        if options.lr_scheduler == "inverse_sqrt":
            settings["lr_decay_steps"] = max(1, updates // 6)
        if self.images <= self.usual_batch and options.gradient_accumulation_steps == 1:
            del settings["train_batch_size"]  # so that other processes can share the batch out
        return settings

    def words(self, updates: int) -> str:
        network, times = self.options.model_preset or "the network", updates * self.images / self.count
        said = f"{network}, {updates:,} updates of {self.images} images, each of {self.count:,} images {times:.0f} times"
        if self.dial.unit == "updates":
            return said
        return f"{said}; an update takes {self.seconds * 1000:.0f} ms, all else {duration(self.dial.amount - self.left())}"


def _updates(options: RunOptions, accelerator: Accelerator, samples: TrainingSamples, objective: Objective) -> Callable:
    """Returns what makes updates, or forward passes, and gives (seconds of one, how many times as long as on an idle CPU)."""
    model, optimizer = accelerator.prepare(objective.network, make_optimizer(objective.network, options))
    ema, ema_decay = make_ema(objective.exported, options)
    clipping, micro_steps = FixedLimit(options.max_grad_norm), options.gradient_accumulation_steps
    parameters = [parameter for parameter in objective.network.parameters() if parameter.requires_grad]
    batches = samples.batches(0, 10**9)
    model.train()

    def update() -> None:
        for _ in range(micro_steps):
            drawn = objective.draw(samples.on_device(next(batches)))
            accelerator.backward(objective.losses(model, **drawn).trained.mean())
        gradients = clipping.clip(accelerator, parameters)
        step_if_finite(optimizer, gradients.finite)
        objective.after_step(gradients.finite)
        optimizer.zero_grad()
        if ema is not None:
            ema.update(ema_decay(1), gradients.finite)

    @torch.no_grad()
    def forward() -> None:
        objective.losses(objective.network, **objective.draw(samples.on_device(next(batches))))

    def repeat(count: int, trains: bool = True) -> tuple[float, float]:
        start, alone = time.perf_counter(), time.thread_time()
        for _ in range(count):
            update() if trains else forward()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return seconds / count, min(4.0, max(1.0, seconds / max(time.thread_time() - alone, 1e-3)))

    return repeat

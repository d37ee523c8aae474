"""The doctor of `steady_doctor/` in a run of ours: what it is given of the run, and where its findings go."""

from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from steady_doctor.built import network as built
from steady_doctor.built.asked import Sampling, asked
from steady_doctor.built.equations import equations
from steady_doctor.data.declared import Given
from steady_doctor.data.judge import DataJudge
from steady_doctor.declare.processes import AdaptiveLimit
from steady_doctor.declared_run import DeclaredRun, Plan, Trained
from steady_doctor.found import Found
from steady_doctor.stored import checkpoint as stored
from steady_doctor.stored.pipeline import Pipeline, exported, started_from
from utils.core.distributed import objects_from_all
from utils.core.errors import UserError
from utils.data.training_data import TrainingData
from utils.diffusion.objective import Objective
from utils.diffusion.sampling import SamplePlan, make_sampler, sample, sampling_steps, set_timesteps
from utils.optim.power_ema import PowerEMA
from utils.options.flags import DDPMOptions
from utils.training.declared import declared_by, declared_data, process_of, sampling_settings
from utils.training.run import Run


class StepAudit(DeclaredRun):
    """Measures the training step, and looks at what the run starts from and stores."""

    def __init__(self, run: Run, eager: bool):
        """`eager`: whether the network runs eagerly in each update."""
        self._run, options, objective = run, run.options, run.objective
        self._process = process_of(options, run.facts)
        self._channels = run.facts["vae.latent_shape"][0] if options.vae else options.image_channels
        self._compared = {"saved": 0, "snapshots": 0}  # checkpoints, and snapshots of averages, so far
        optimizer: Any = getattr(run.accelerator._optimizers[0], "optimizer", run.accelerator._optimizers[0])
        ema = run.ema.averages if isinstance(run.ema, PowerEMA) else {} if run.ema is None else {"": run.ema}
        averages = {f"EMA {width}".strip(): average.shadow for width, average in ema.items()}
        limit = AdaptiveLimit(run.state.grad_norm_mean) if options.adaptive_clipping else options.max_grad_norm
        super().__init__(
            declared_by(options, run.facts, self._process, run.resumed_from),
            Trained(optimizer, objective.network, objective.exported, averages),
            Plan(run.state.step + 1, run.length.max_train_steps, eager, limit),
            DataJudge(declared_data(options, run.facts, run.accelerator.process_index), given(run.data)),
            lambda made, said: run.doctor.record(made, {"audit": said}),
            objects_from_all,
        )
        if run.accelerator.is_main_process:
            self.look(self._started)
            self.look(self._network)

    def check(self, what: str) -> None:
        """On the main process: "sampler" before the first pictures, or "exported", "saved", "snapshots" after those were."""
        looks = {"sampler": self._sampler, "exported": self._exported, "saved": self._saved, "snapshots": self._snapshots}
        self.look(looks[what])

    def _started(self) -> Iterable[Found]:
        """Beside what the run goes on from, or starts from."""
        run = self._run
        if run.resumed_from is not None:
            optimizer = None if "optimizer" in run.options.allow_option_change else run.accelerator._optimizers[0]
            return stored.kept(run.resumed_from, self._state(optimizer), None)
        pretrained = getattr(run.options, "pretrained", None)
        if not pretrained or not Path(pretrained, "unet").is_dir():
            return []
        rescales = bool(getattr(run.options, "force_weight_norm", False))
        return started_from(Path(pretrained), run.objective.exported.state_dict(), run.data.images.class_names or (), rescales)

    def _network(self) -> Iterable[Found]:
        """As it is built; before the first update also its first weights."""
        network, options, step = self._run.objective.exported, self._run.options, self._run.state.step
        if (path := getattr(options, "model_config_name_or_path", None)) is not None:
            flags: dict[str, Any] = dict.fromkeys(("in_channels", "out_channels"), self._channels)
            flags |= {"dropout": getattr(options, "dropout", None), "act_fn": getattr(options, "activation", None)}
            yield from built.config(network, Path(path), flags, step)
        if isinstance(options, DDPMOptions) and not options.pretrained:
            wanted = (options.activation, options.initialisation, options.zero_init_output, options.spectral_norm)
            fresh = step == 0 and self._run.resumed_from is None
            yield from built.built(network, built.Built(*wanted), fresh, step)
        elif type(network).__name__ == "EDM2UNet":
            yield from equations(network, step)

    def _sampler(self) -> Iterable[Found]:
        """Of the run's pictures."""
        run, name, objective = self._run, self._run.options.sampler, self._run.objective
        steps = sampling_steps(name, run.options.sampling_steps, objective.noise_scheduler)
        settings = sampling_settings(run.options, run.facts)
        sampling = Sampling(self._process, settings, self._channels, adds_noise=name == "ddpm", steps=steps)
        return asked(sampling, partial(sampler_call, objective, name), run.state.step)

    def _exported(self) -> Iterable[Found]:
        """The pipeline."""
        run, network, table = self._run, self._run.objective.exported, getattr(self._process, "alphas_cumprod", None)
        weights = network.state_dict()
        if run.ema is not None:
            weights |= {name: tensor for name, tensor in run.ema.shadow.items() if name in weights}
        scale = (run.facts["vae.latent_mean"], run.facts["vae.latent_std"]) if run.options.vae else None
        names = (run.data.images.class_names or ()) if run.objective.classes else ()
        pipeline = Pipeline(weights, sampling_settings(run.options, run.facts), table, scale, names)
        return exported(run.output_dir, pipeline, network, run.state.step)

    def _saved(self) -> Iterable[Found]:
        """The checkpoint; later ones by a few tensors."""
        run = self._run
        checkpoint, only = run.output_dir / f"checkpoint-{run.state.step}", self._compared["saved"] or None
        self._compared["saved"] += 1
        yield from self.norm_mean_deviates(checkpoint.name, run.clipping.mean)
        yield from stored.kept(checkpoint, self._state(run.accelerator._optimizers[0]), only)

    def _snapshots(self) -> Iterable[Found]:
        """Of averages; later ones by a few tensors."""
        run, several = self._run, self._run.ema
        if not isinstance(several, PowerEMA):
            return []
        averages = {width: average.shadow for width, average in several.averages.items()}
        only = self._compared["snapshots"] or None
        self._compared["snapshots"] += 1
        return stored.snapshots(run.output_dir / "ema_snapshots", run.state.step, averages, only)

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


def sampler_call(objective: Objective, name: str, steps: int, seed: int = 0) -> Callable[[nn.Module, int], torch.Tensor] | None:
    """Training's way to sample: a function of (network with an `image`, number of images). None if it cannot."""
    try:
        set_timesteps(make_sampler(name, objective.noise_scheduler), steps)
    except UserError:
        return None

    def call(oracle: Any, count: int) -> torch.Tensor:
        stand_in = copy(objective)  # so that its `predict` asks the oracle
        stand_in.exported = oracle
        image = oracle.image
        plan = SamplePlan(make_sampler(name, objective.noise_scheduler), steps, tuple(image.shape), seed, count, image.device)
        return sample(oracle, plan, torch.arange(count), predict=stand_in.predict)

    return call


def given(data: TrainingData) -> Given:
    """What the run's own code says of its data."""

    def held_out(count: int) -> tuple[torch.Tensor, list[int], np.ndarray | None]:
        numbers = np.arange(min(count, len(data.validation)))
        batch = data.validation_batch(torch.from_numpy(numbers))
        rows = data.validation.dataset_rows(data.validation.shown(numbers)).tolist()
        return batch.clean_images, rows, None if batch.labels is None else batch.labels.numpy()

    trained, validated = (images.dataset_rows(np.arange(len(images))).numpy() for images in (data.training, data.validation))
    return Given(data.samples.drawn_rows, data.samples.dataset_rows, trained, validated, held_out, data.images.opened)

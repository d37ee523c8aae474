"""The doctor of `steady_doctor/` in a run of ours: what the run is declared to be, and where the findings go.

The declaration is made of the options alone, nothing of it from what trains: a mistake in `training_target`, `loss_weights` or
`learning_rate_at` would agree with itself. The formulas are the doctor's own.
"""

import math
import os
from collections.abc import Callable, Iterable
from copy import copy
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDPMScheduler
from torch import nn

from steady_doctor.built import network as built
from steady_doctor.built.asked import Sampling, asked
from steady_doctor.built.equations import equations
from steady_doctor.data.declared import DeclaredData, DeclaredImages, DeclaredLatents, Given, Source, sides_of
from steady_doctor.data.judge import DataJudge
from steady_doctor.declare.declaration import Declaration, Optimizer
from steady_doctor.declare.processes import DDPM, EDM2, AdaptiveLimit, Flow, ema_decay
from steady_doctor.declare.rates import Schedule, power_decay
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
from utils.options.flags import DDPMOptions, EDM2Options, RunOptions
from utils.training.run import Run


class StepAudit(DeclaredRun):
    """Measures the training step, and looks at what the run starts from and stores."""

    def __init__(self, run: Run):
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
            Plan(run.state.step + 1, run.length.max_train_steps, limit),
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


EDM_LEVELS = {"sigma_min": 0.002, "sigma_max": 80.0, "rho": 7.0}  # of the sampler, Karras et al. 2022, table 1
BETAS = ("beta_start", "beta_end", "trained_betas")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "rmsprop": "RMSprop", "sgd": "SGD"}  # that torch has


def declared_by(
    options: RunOptions, facts: dict[str, Any], process: DDPM | EDM2 | Flow, checkpoint: Path | None = None
) -> Declaration:
    """`checkpoint`: where the run goes on from. Of the `facts` (see `begin_run`) only what launch and data decided is used."""
    is_conditional = isinstance(options, DDPMOptions | EDM2Options) and options.class_conditional
    classes = facts.get("classes", 0) if is_conditional else 0
    return Declaration(
        process=process,
        optimizer=_optimizer(options, facts, checkpoint),
        learning_rate=schedule_of(options, _total(options, facts)),
        micro_steps=facts["gradient_accumulation_steps"],
        averages=_decays(options),
        # Not from the accelerator, which may have been given something else.
        layers=DTYPES.get(options.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), torch.float32),
        dropout=options.dropout if isinstance(options, DDPMOptions | EDM2Options) else None,
        normalized=isinstance(options, EDM2Options) and options.force_weight_norm,
        l1_weight=options.l1_weight,
        trained=partial(_is_trained, patterns=tuple(options.train_only or ())),
        classes=classes,
        no_class=classes if isinstance(options, DDPMOptions) else -1,  # a UNet2DModel has a number for none
        numbers=9 if options.augment_probability else 0,
    )


def process_of(options: RunOptions, facts: dict[str, Any]) -> DDPM | EDM2 | Flow:
    if isinstance(options, EDM2Options):
        return EDM2(options.sigma_data, options.P_mean, options.P_std)
    assert isinstance(options, DDPMOptions)  # noqa: S101
    if options.objective == "flow":
        return Flow(options.prediction_type, options.P_mean, options.P_std)
    settings: dict[str, Any] = {"beta_schedule": options.ddpm_beta_schedule}
    settings["rescale_betas_zero_snr"] = options.rescale_betas_zero_snr
    began_with = facts.get("pretrained.scheduler", {})
    settings |= {name: began_with[name] for name in BETAS if name in began_with}
    table = DDPMScheduler(num_train_timesteps=options.ddpm_num_steps, **settings).alphas_cumprod.double()
    return DDPM(table, options.prediction_type, options.snr_gamma)


def sampling_settings(options: RunOptions, facts: dict[str, Any]) -> dict[str, Any]:
    """How the exported scheduler is to sample, and what it is told of the network."""
    if isinstance(options, EDM2Options):
        return EDM_LEVELS | {"sigma_data": options.sigma_data}
    assert isinstance(options, DDPMOptions)  # noqa: S101
    if options.objective == "flow":
        told = {"prediction_type": "sample"} if options.prediction_type == "sample" else {}
        return {"num_train_timesteps": 1000, "shift": 1.0} | told
    began_with = facts.get("pretrained.scheduler", {})
    usual: dict[str, Any] = {"clip_sample": options.vae is None, "thresholding": False, "clip_sample_range": 1.0}
    usual |= {"timestep_spacing": "trailing"} if options.rescale_betas_zero_snr and not began_with else {}
    told = {name: began_with.get(name, value) for name, value in usual.items()}
    return told | {"prediction_type": options.prediction_type}


def schedule_of(options: RunOptions, total: int) -> Schedule:
    kind, peak, warmup = options.lr_scheduler, options.learning_rate, options.lr_warmup_steps
    floor, power, cycles = options.lr_floor, options.lr_power, options.lr_cycles
    return Schedule(kind, peak, total, warmup, floor, power, cycles, options.lr_decay_steps)


def _is_trained(name: str, patterns: tuple[str, ...]) -> bool:
    """Beside the named ones, what is no part of the pipeline; never the random frequencies of a Fourier time embedding."""
    is_named = any(fnmatchcase(name.removeprefix("unet."), pattern) for pattern in patterns)
    return not name.removeprefix("unet.").startswith("time_proj.") and (
        not patterns or is_named or name.startswith(("uncertainty.", "transforms."))
    )


def _total(options: RunOptions, facts: dict[str, Any]) -> int:
    """Updates of the run. Of a pass as diffusers' script counts them: a last short batch counts, and a last short update."""
    batches = math.ceil(facts["training_images"] / int(options.train_batch_size))
    of_pass = math.ceil(math.ceil(batches / facts["num_processes"]) / facts["gradient_accumulation_steps"])
    return options.max_train_steps or options.num_epochs * of_pass


def _optimizer(options: RunOptions, facts: dict[str, Any], checkpoint: Path | None) -> Optimizer | None:
    if (kind := OPTIMIZERS.get(options.optimizer)) is None:
        return None
    settings: dict[str, Any] = {"betas": (options.adam_beta1, options.adam_beta2), "amsgrad": False}
    if kind == "RMSprop":
        settings = {"momentum": options.momentum, "centered": False}
    elif kind == "SGD":
        settings = {"momentum": options.momentum, "nesterov": False, "dampening": 0}
    settings |= {"maximize": False} | ({} if kind == "SGD" else {"eps": _epsilon(options, facts, checkpoint)})
    return Optimizer(kind, settings, options.adam_weight_decay)


def _epsilon(options: RunOptions, facts: dict[str, Any], checkpoint: Path | None) -> float:
    """EDM2's recipe adds up the loss over the channels and pixels where ours is their mean; Adam divides that out, but for its
    epsilon. A run that goes on keeps the checkpoint's: earlier versions had another one."""
    if checkpoint is not None and not {"adam_epsilon", "optimizer"} & set(options.allow_option_change):
        stored = torch.load(checkpoint / "optimizer.bin", map_location="cpu", weights_only=True, mmap=True)
        return stored["param_groups"][0].get("eps", options.adam_epsilon)
    if isinstance(options, EDM2Options):
        return options.adam_epsilon / math.prod(facts.get("vae.latent_shape") or options.image_shape)
    return options.adam_epsilon


def _decays(options: RunOptions) -> dict[str, Callable[[int], float]]:
    if not options.use_ema:
        return {}
    if options.ema_type == "exponential":
        return {"EMA": partial(ema_decay, options.ema_max_decay, options.ema_inv_gamma, options.ema_power)}
    return {f"EMA {width}": power_decay(width) for width in options.ema_widths}


# ---- data


def declared_data(options: Any, facts: dict[str, Any], process: int) -> DeclaredData:
    """Of the process of this number. The dropout of labels and sigma_data are not both scripts' own options."""
    names = ("center_crop", "random_flip", "color_jitter", "background", "data_range")
    images = DeclaredImages(
        sides=sides_of(options.resolution),
        channels=options.image_channels,
        max_value=65535 if options.preserve_input_precision else 255,
        **{name: getattr(options, name) for name in names},
    )
    source = Source(
        name=options.dataset_name,
        split=options.dataset_split,
        config=options.dataset_config_name,
        image_column=options.image_column,
        label_column=options.label_column,
        first=options.max_train_images,
        streamed=options.streaming,
    )
    return DeclaredData(
        images=images,
        source=source,
        training=facts["training_images"],
        held_out=options.validation_images,
        batch_size=int(options.train_batch_size),
        micro_steps=options.gradient_accumulation_steps,
        processes=facts["num_processes"],
        process=process,
        balanced=options.balanced_sampling,
        window=options.shuffle_window if options.streaming else None,
        replaces_bad=options.on_bad_image == "replace",
        dropout=options.label_dropout,
        classes=facts.get("classes") if getattr(options, "class_conditional", False) else None,
        latents=None if options.vae is None else _latents(options, facts),
    )


def _latents(options: Any, facts: dict[str, Any]) -> DeclaredLatents:
    measured = options.latent_scale == "auto" or options.pretrained is not None  # here, or in an earlier run
    spread = None if measured else getattr(options, "sigma_data", 1.0)  # only EDM2 has another one than 1
    return DeclaredLatents(options.vae, facts["vae.latent_mean"], facts["vae.latent_std"], spread)

"""What a run of our scripts is declared to be: from the options alone, nothing of it from what trains.

A mistake in `training_target`, `loss_weights` or `learning_rate_at` would agree with itself; the formulas are the doctor's own.
"""

import math
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler

from steady_doctor.data.declared import DeclaredData, DeclaredImages, DeclaredLatents, Source, sides_of
from steady_doctor.declare.declaration import Declaration, Optimizer
from steady_doctor.declare.processes import DDPM, EDM2, Flow, ema_decay
from steady_doctor.declare.rates import Schedule, power_decay
from utils.options.flags import DDPMOptions, EDM2Options, RunOptions

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

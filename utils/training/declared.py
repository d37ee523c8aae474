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

from steady_doctor.declare.declaration import Declaration, Optimizer
from steady_doctor.declare.processes import DDPM, EDM2, ema_decay, power_exponent
from utils.options.flags import DDPMOptions, EDM2Options, RunOptions

BETAS = ("beta_start", "beta_end", "trained_betas")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "rmsprop": "RMSprop", "sgd": "SGD"}  # that torch has


def declared_by(
    options: RunOptions, facts: dict[str, Any], process: DDPM | EDM2, checkpoint: Path | None = None
) -> Declaration:
    """Of a run with these options, that goes on from `checkpoint` where there is one. `facts`: the run's, see `begin_run`; of
    them only what the launch and the data decided is used."""
    is_conditional = isinstance(options, DDPMOptions | EDM2Options) and options.class_conditional
    classes = facts.get("classes", 0) if is_conditional else 0
    return Declaration(
        process=process,
        optimizer=_optimizer(options, facts, checkpoint),
        learning_rate=partial(learning_rate, options=options, total=_total(options, facts)),
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
    )


def process_of(options: RunOptions, facts: dict[str, Any]) -> DDPM | EDM2:
    if isinstance(options, EDM2Options):
        return EDM2(options.sigma_data, options.P_mean, options.P_std)
    assert isinstance(options, DDPMOptions)  # noqa: S101
    from diffusers import DDPMScheduler  # here, as it takes seconds

    settings: dict[str, Any] = {"beta_schedule": options.ddpm_beta_schedule}
    settings["rescale_betas_zero_snr"] = options.rescale_betas_zero_snr
    began_with = facts.get("pretrained.scheduler", {})
    settings |= {name: began_with[name] for name in BETAS if name in began_with}
    table = DDPMScheduler(num_train_timesteps=options.ddpm_num_steps, **settings).alphas_cumprod.double()
    return DDPM(table, options.prediction_type, options.snr_gamma)


def sampling_settings(options: RunOptions, facts: dict[str, Any]) -> dict[str, Any]:
    """How the exported scheduler of a DDPM is to sample, and what it is told of the network."""
    began_with = facts.get("pretrained.scheduler", {})
    usual: dict[str, Any] = {"clip_sample": options.vae is None, "thresholding": False, "clip_sample_range": 1.0}
    is_zero_snr = isinstance(options, DDPMOptions) and options.rescale_betas_zero_snr
    usual |= {"timestep_spacing": "trailing"} if is_zero_snr and not began_with else {}
    told = {name: began_with.get(name, value) for name, value in usual.items()}
    return told | ({"prediction_type": options.prediction_type} if isinstance(options, DDPMOptions) else {})


def _is_trained(name: str, patterns: tuple[str, ...]) -> bool:
    """Beside those that are named also EDM2's uncertainty, which is no part of the pipeline; never the random frequencies of a
    Fourier time embedding."""
    is_named = any(fnmatchcase(name.removeprefix("unet."), pattern) for pattern in patterns)
    return not name.startswith("time_proj.") and (not patterns or is_named or name.startswith("uncertainty."))


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


def learning_rate(update: int, options: Any, total: int) -> float:
    """Of the n-th update, as docs and `--help` describe the schedules."""
    step, warmup, floor = update - 1, options.lr_warmup_steps, options.lr_floor
    kind, peak = options.lr_scheduler, options.learning_rate
    if kind == "constant":
        return peak
    ramp = 1.0 if warmup == 0 else min(1.0, step / warmup)
    if kind == "inverse_sqrt":
        reference = options.lr_decay_steps or warmup or 1
        return peak * ramp * min(1.0, (reference / step) ** 0.5 if step else 1.0)
    if ramp < 1.0 or kind == "constant_with_warmup":
        return peak * ramp
    done = min((step - warmup) / (total - warmup), 1.0) if total > warmup else min(1.0, float(step - warmup))
    cycle = math.modf(done * options.lr_cycles)[0]
    share = {
        "linear": 1 - done,
        "polynomial": (1 - done) ** options.lr_power,
        "cosine": math.cos(math.pi * done / 2) ** 2,
        "cosine_with_restarts": math.cos(math.pi * cycle / 2) ** 2 if done < 1 else 0.0,
        "cyclic": abs(2 * cycle - 1),
    }[kind]
    return peak * (floor + (1 - floor) * share)


def _decays(options: RunOptions) -> dict[str, Callable[[int], float]]:
    if not options.use_ema:
        return {}
    if options.ema_type == "exponential":
        return {"EMA": partial(ema_decay, options.ema_max_decay, options.ema_inv_gamma, options.ema_power)}
    return {f"EMA {width}": partial(_power_decay, power_exponent(width)) for width in options.ema_widths}


def _power_decay(exponent: float, update: int) -> float:
    return (1 - 1 / update) ** (exponent + 1)

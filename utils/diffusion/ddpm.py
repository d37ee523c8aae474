"""The forward process, what the network is asked to predict, and how the loss is weighted (DDPM and its descendants).

Notation: x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps with abar = `alphas_cumprod` (Ho et al. 2020, eq. 4), and
SNR(t) = abar_t / (1 - abar_t).
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

from models.flow_scheduler import FlowScheduler
from utils.core.errors import UserError

PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")
BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid")
KNOWN_TO_ALL = ("linear", "scaled_linear", "squaredcos_cap_v2")  # of diffusers' schedulers


def make_noise_scheduler(
    *,
    beta_schedule: str = "linear",
    num_train_timesteps: int = 1000,
    prediction_type: str = "epsilon",
    rescale_betas_zero_snr: bool = False,
    clips: bool = True,
) -> DDPMScheduler:
    """Returns the one scheduler whose saved config both training and sampling use.

    `squaredcos_cap_v2` is the cosine schedule of Nichol & Dhariwal 2021, eq. 17. Zero terminal SNR (Lin et al. 2023, alg. 1)
    also sets trailing timesteps, so that sampling starts where no signal is left; it refuses `epsilon`, from which x_0 cannot
    be recovered there. `clips`: whether samplers keep the denoised image within [-1, 1], where images are and latents are not.
    Raises UserError.
    """
    if beta_schedule not in BETA_SCHEDULES:
        raise UserError(f"unknown --ddpm_beta_schedule {beta_schedule!r}\nchoose from {', '.join(BETA_SCHEDULES)}")
    if prediction_type not in PREDICTION_TYPES:
        raise UserError(f"unknown --prediction_type {prediction_type!r}\nchoose from {', '.join(PREDICTION_TYPES)}")
    if num_train_timesteps < 2:
        raise UserError(f"--ddpm_num_steps {num_train_timesteps} is too small\nset 2 or more (1000 is usual)")
    if rescale_betas_zero_snr and prediction_type == "epsilon":
        raise UserError(
            "--rescale_betas_zero_snr does not work with --prediction_type epsilon: at SNR 0, the noise tells nothing about "
            "the image\nset --prediction_type v_prediction or sample"
        )
    return DDPMScheduler(
        num_train_timesteps=num_train_timesteps,
        beta_schedule=beta_schedule,
        prediction_type=prediction_type,
        rescale_betas_zero_snr=rescale_betas_zero_snr,
        timestep_spacing="trailing" if rescale_betas_zero_snr else "leading",
        clip_sample=clips,
    )


def scheduler_of(options: Mapping[str, Any]) -> DDPMScheduler | FlowScheduler:
    """Returns what noises images by a run's options, or those in a checkpoint, and what its pipeline is sampled with."""
    if options.get("objective") == "flow":
        return FlowScheduler(prediction_type=options["prediction_type"])
    return make_noise_scheduler(
        beta_schedule=options["ddpm_beta_schedule"],
        num_train_timesteps=options["ddpm_num_steps"],
        prediction_type=options["prediction_type"],
        rescale_betas_zero_snr=options["rescale_betas_zero_snr"],
        clips=not options.get("vae"),
    )


def config_for_any(config: Mapping) -> dict:
    """Return the config of a scheduler such that each of diffusers' schedulers can be made from it, and samples the same.

    A schedule that DDPMScheduler alone computes, such as the sigmoid one, gets its betas written out as `trained_betas`. They
    are those before rescaling to zero terminal SNR, for the scheduler that reads them rescales. Raises UserError for an unknown
    schedule.
    """
    # With this list, from_config would replace what training left at its default by the other class's default, and the
    # list is not saved: the same model would be sampled differently during training and from its export.
    config = {name: value for name, value in config.items() if name != "_use_default_values"}
    schedule = config.get("beta_schedule")
    if schedule is not None and schedule not in KNOWN_TO_ALL and config.get("trained_betas") is None:
        try:
            config["trained_betas"] = DDPMScheduler.from_config(config, rescale_betas_zero_snr=False).betas.tolist()
        except NotImplementedError:
            raise UserError(
                f"the pipeline's scheduler has an unknown beta_schedule {schedule!r}\n"
                f"use a pipeline with one of {', '.join(BETA_SCHEDULES)}"
            ) from None
    return config


def is_flow(config: Mapping) -> bool:
    """Returns whether a scheduler's config is of flow matching."""
    return "shift" in config


def predicts_clean_images(config: Mapping) -> bool:
    """Returns whether it is of flow matching that predicts the clean image, which no scheduler of diffusers samples."""
    return is_flow(config) and config["prediction_type"] == "sample"


def flow_config(config: Mapping, pipeline: str) -> dict:
    """Returns the config of the FlowScheduler that samples as a scheduler of diffusers with `config` does. Raises UserError for
    one that shifts its noise levels."""
    usual = dict(FlowMatchEulerDiscreteScheduler(num_train_timesteps=config["num_train_timesteps"]).config)
    others = [name for name, value in usual.items() if name[0] != "_" and config.get(name, value) != value]
    if others:
        raise UserError(
            f"the scheduler of {pipeline} has another {', '.join(others)} than FlowMatchEulerDiscreteScheduler has by default\n"
            "use a pipeline whose noise levels are not shifted"
        )
    settings = {"num_train_timesteps": config["num_train_timesteps"], "shift": 1.0}  # none left at its default
    return dict(FlowScheduler(**settings, prediction_type=config.get("prediction_type", "v_prediction")).config)


def training_target(
    noise_scheduler: DDPMScheduler | FlowScheduler, clean_images: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
) -> torch.Tensor:
    """Returns what the network should output, [B, C, H, W]: the noise, x_0, or v = sqrt(abar) eps - sqrt(1 - abar) x_0
    (Salimans & Ho 2022, section 4); in flow matching the velocity eps - x_0."""
    prediction_type = noise_scheduler.config.prediction_type
    if prediction_type == "epsilon":
        return noise
    if prediction_type == "sample":
        return clean_images
    return noise_scheduler.get_velocity(clean_images, noise, timesteps)


def loss_weights(noise_scheduler: DDPMScheduler, snr_gamma: float | None = None) -> torch.Tensor:
    """Weight of the squared error of the prediction at each timestep, float32 [T].

    Without `snr_gamma`: 1 for epsilon and v; max(SNR, 1) for sample (truncated SNR weighting, Salimans & Ho 2022, section 4),
    without which predicting x_0 would neglect the low noise levels. With it: min-SNR-gamma (Hang et al. 2023, section 3.4),
    min(SNR, gamma) in x_0 space, hence / SNR for epsilon and / (SNR + 1) for v. Raises UserError for a gamma that is not
    positive, and where a timestep would not be trained at all.
    """
    alphas_cumprod = noise_scheduler.alphas_cumprod.double()
    snr = alphas_cumprod / (1.0 - alphas_cumprod)
    prediction_type = noise_scheduler.config.prediction_type
    if snr_gamma is None:
        weights = snr.clamp(min=1.0) if prediction_type == "sample" else torch.ones_like(snr)
    elif snr_gamma <= 0:
        raise UserError(f"--snr_gamma {snr_gamma} is not positive\nset a number above 0 (the paper uses 5)")
    else:
        clipped = snr.clamp(max=snr_gamma)
        weights = {"epsilon": clipped / snr, "sample": clipped, "v_prediction": clipped / (snr + 1.0)}[prediction_type]
    weights = weights.float()
    if not weights.all():
        timestep = int((weights == 0).nonzero()[-1])
        raise UserError(
            f"--snr_gamma gives timestep {timestep} a weight of 0, because --rescale_betas_zero_snr sets its SNR to 0: "
            "the network would never learn the first step of sampling\nleave one of the two flags out"
        )
    return weights


def loss_per_sample(prediction: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted mean squared error of each sample, float32 [B]; `weights` is [B]."""
    return weights * (prediction.float() - target.float()).square().flatten(1).mean(1)


def describe_schedule(noise_scheduler: DDPMScheduler | FlowScheduler, points: int = 101) -> dict:
    """The schedule that is trained, for the record: alphas_cumprod at `points` timesteps, from the first to the last, and what
    its sampler clips images to (None: nothing). Empty where nothing was chosen, as in flow matching."""
    if isinstance(noise_scheduler, FlowScheduler):
        return {}
    alphas_cumprod = noise_scheduler.alphas_cumprod
    chosen = torch.linspace(0, len(alphas_cumprod) - 1, min(points, len(alphas_cumprod))).round().long()
    config = noise_scheduler.config
    clip_range = config.clip_sample_range if config.clip_sample else None
    return {"timesteps": chosen.tolist(), "alphas_cumprod": alphas_cumprod[chosen].tolist(), "clip_range": clip_range}

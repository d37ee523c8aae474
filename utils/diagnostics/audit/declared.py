"""What a training step is declared to be: formulas written here once more, from the options alone.

Nothing of this is taken from what trains: a mistake in `training_target`, `loss_weights` or `learning_rate_at` would agree with
itself. diffusers' own scheduler gives the noise schedules; the audit's checks use torch's own optimizers.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from steady_doctor.data.declared import sides_of
from utils.diagnostics.audit.built import DeclaredNetwork
from utils.options.flags import DDPMOptions, EDM2Options, OptimizerOptions, RunOptions

_BETAS = ("beta_start", "beta_end", "trained_betas")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid")
WEIGHTINGS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {  # of the SNR and gamma, to name what is observed
    "1": lambda snr, gamma: torch.ones_like(snr),
    "SNR": lambda snr, gamma: snr,
    "1 / SNR": lambda snr, gamma: 1 / snr,
    "max(SNR, 1)": lambda snr, gamma: snr.clamp(min=1.0),
    "min(SNR, gamma)": lambda snr, gamma: snr.clamp(max=gamma),
    "max(SNR, gamma)": lambda snr, gamma: snr.clamp(min=gamma),
    "min(SNR, gamma) / SNR": lambda snr, gamma: snr.clamp(max=gamma) / snr,
    "max(SNR, gamma) / SNR": lambda snr, gamma: snr.clamp(min=gamma) / snr,
    "min(SNR, gamma) / (SNR + 1)": lambda snr, gamma: snr.clamp(max=gamma) / (snr + 1),
    "max(SNR, gamma) / (SNR + 1)": lambda snr, gamma: snr.clamp(min=gamma) / (snr + 1),
    "min(1 / SNR, gamma)": lambda snr, gamma: (1 / snr).clamp(max=gamma),
}
_BY_PREDICTION = {  # the weighting of each prediction type, without and with gamma
    "epsilon": ("1", "min(SNR, gamma) / SNR"),
    "sample": ("max(SNR, 1)", "min(SNR, gamma)"),
    "v_prediction": ("1", "min(SNR, gamma) / (SNR + 1)"),
}


@dataclass(frozen=True)
class DeclaredNoising:
    """x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise, and a weighted squared error of what the network predicts."""

    schedule: str
    steps: int
    zero_snr: bool
    prediction_type: str
    snr_gamma: float | None
    pipeline: Mapping[str, Any] = field(default_factory=dict)  # config of the scheduler that a run began with, if it did
    of_latents: bool = False  # which no sampler clips

    @cached_property
    def alphas_cumprod(self) -> torch.Tensor:
        """float64 [T], as diffusers computes them."""
        from diffusers import DDPMScheduler  # here, as it takes seconds, which a script that does without it need not pay

        settings = {"beta_schedule": self.schedule, "rescale_betas_zero_snr": self.zero_snr}
        settings |= {name: self.pipeline[name] for name in _BETAS if name in self.pipeline}
        return DDPMScheduler(num_train_timesteps=self.steps, **settings).alphas_cumprod.double()

    @property
    def called(self) -> str:
        return self.schedule + ", zero SNR" * self.zero_snr

    def others(self) -> list["DeclaredNoising"]:
        """The same with each schedule that has a name."""
        return [
            replace(self, schedule=name, zero_snr=zero_snr, pipeline={}) for name in SCHEDULES for zero_snr in (False, True)
        ]

    @property
    def sampling(self) -> dict[str, Any]:
        """How the exported scheduler is to sample."""
        usual: dict[str, Any] = {"clip_sample": not self.of_latents, "thresholding": False, "clip_sample_range": 1.0}
        usual |= {"timestep_spacing": "trailing"} if self.zero_snr and not self.pipeline else {}
        return {name: self.pipeline.get(name, value) for name, value in usual.items()}

    @property
    def clips(self) -> bool:
        """Whether samplers keep the denoised image within [-1, 1]."""
        return self.sampling["clip_sample"] and not self.sampling["thresholding"] and self.sampling["clip_sample_range"] == 1.0

    @property
    def snr(self) -> torch.Tensor:
        return self.alphas_cumprod / (1 - self.alphas_cumprod)

    @property
    def weighting(self) -> str:
        return _BY_PREDICTION[self.prediction_type][self.snr_gamma is not None]

    @property
    def weights(self) -> torch.Tensor:
        """float64 [T]"""
        return WEIGHTINGS[self.weighting](self.snr, self.snr_gamma or 0.0)


@dataclass(frozen=True)
class DeclaredDenoising:
    """EDM2's: x = y + sigma n, D(x; sigma) = c_skip x + c_out F(c_in x; c_noise), lambda(sigma) / exp(u) |D - y|^2 + u."""

    sigma_data: float
    P_mean: float
    P_std: float
    force_weight_norm: bool


DeclaredProcess = DeclaredNoising | DeclaredDenoising


@dataclass(frozen=True)
class DeclaredOptimizer:
    name: str  # of torch's class, in lower case
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float  # of tensors of two dimensions or more
    momentum: float
    learning_rate: Callable[[int], float]  # of the update after so many finished ones
    max_grad_norm: float | None  # of the update's gradient, 0: no clipping; None: as `AdaptiveClipping` says


class AdaptiveClipping:
    """Clips to twice the running mean of the norms so far, within 0.1 to 10. The mean begins with the first norm, and each of
    the others moves it by a hundredth of the way. A norm counts as 10 at most; one that is not finite does not count."""

    def __init__(self, mean: float | None):
        """`mean`: of a run that goes on; None where none was counted yet."""
        self._mean = mean
        self._norms: list[torch.Tensor] = []

    def count(self, norm: torch.Tensor) -> None:
        """Of one update, 0-dim; read when `mean` or `limit` is asked for."""
        self._norms.append(norm)

    def mean(self) -> float | None:
        for norm in torch.stack(self._norms).tolist() if self._norms else ():
            if math.isfinite(norm):
                counted = min(norm, 10.0)
                self._mean = counted if self._mean is None else 0.99 * self._mean + 0.01 * counted
        self._norms.clear()
        return self._mean

    def limit(self) -> float:
        """Of the next update; 10 where no norm was counted."""
        mean = self.mean()
        return 10.0 if mean is None else min(max(2 * mean, 0.1), 10.0)


@dataclass(frozen=True)
class Declared:
    noising: DeclaredNoising | None
    denoising: DeclaredDenoising | None
    optimizer: DeclaredOptimizer
    micro_steps: int
    autocast: torch.dtype | None
    l1_weight: float = 0.0
    averages: dict[str, Callable[[int], float]] = field(default_factory=dict)  # name -> decay of the n-th update
    dropout: float | None = None  # of the network's activations; None: not declared
    network: DeclaredNetwork | None = None  # of a DDPM
    class_conditional: bool = True  # whether labels that the network gets should matter
    no_class: int = -1  # what the network is told for no class: a UNet2DModel the number after those of the classes

    train_only: tuple[str, ...] = ()  # shell patterns of the names of the parameters that are trained; none: all are

    def trains(self, name: str) -> bool:
        """Whether a parameter is trained: beside those named also EDM2's uncertainty, which is no part of the pipeline."""
        names = any(fnmatchcase(name.removeprefix("unet."), pattern) for pattern in self.train_only)
        return not self.train_only or names or name.startswith("uncertainty.")

    @property
    def process(self) -> DeclaredProcess:
        return self.noising or self.denoising


def declared_by(options: RunOptions, facts: dict[str, Any], checkpoint: Path | None = None) -> Declared:
    """Of a run with these options, that goes on from `checkpoint` where there is one. `facts`: the run's, see `begin_run`; of
    them only what the launch and the data decided is used."""
    noising = denoising = network = None
    if isinstance(options, DDPMOptions):
        noising = DeclaredNoising(
            options.ddpm_beta_schedule,
            options.ddpm_num_steps,
            options.rescale_betas_zero_snr,
            options.prediction_type,
            options.snr_gamma,
            facts.get("pretrained.scheduler", {}),
            options.vae is not None,
        )
        built = (options.activation, options.initialisation, options.zero_init_output, options.spectral_norm)
        network = None if options.pretrained else DeclaredNetwork(*built)
    elif isinstance(options, EDM2Options):
        denoising = DeclaredDenoising(
            options.sigma_data,
            options.P_mean,
            options.P_std,
            options.force_weight_norm,
        )
    total = options.max_train_steps or options.num_epochs * _updates_of_a_pass(options, facts)
    optimizer = DeclaredOptimizer(
        options.optimizer,
        options.adam_beta1,
        options.adam_beta2,
        _epsilon(options, facts, checkpoint),
        options.adam_weight_decay,
        options.momentum,
        lambda step: _learning_rate(step, total, options),
        None if options.adaptive_clipping else options.max_grad_norm,
    )
    return Declared(
        noising,
        denoising,
        optimizer,
        facts["gradient_accumulation_steps"],
        # Not from the accelerator, which may have been given something else.
        _DTYPES.get(options.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")),
        options.l1_weight,
        _decays(options),
        options.dropout if isinstance(options, DDPMOptions | EDM2Options) else None,
        network,
        options.class_conditional if isinstance(options, DDPMOptions | EDM2Options) else True,
        facts.get("classes", -1) if isinstance(options, DDPMOptions) else -1,
        tuple(options.train_only or ()),
    )


def _updates_of_a_pass(options: RunOptions, facts: dict[str, Any]) -> int:
    """As diffusers' script counts them: a last short batch counts, and so does a last short update."""
    batches = math.ceil(facts["training_images"] / int(options.train_batch_size))
    return math.ceil(math.ceil(batches / facts["num_processes"]) / facts["gradient_accumulation_steps"])


def _epsilon(options: RunOptions, facts: dict[str, Any], checkpoint: Path | None) -> float:
    """EDM2's recipe adds up the loss over the channels and pixels where ours is their mean; Adam divides that out, but for its
    epsilon. A run that goes on keeps the checkpoint's: earlier versions had another one."""
    if checkpoint is not None and not {"adam_epsilon", "optimizer"} & set(options.allow_option_change):
        stored = torch.load(checkpoint / "optimizer.bin", map_location="cpu", weights_only=True, mmap=True)
        return stored["param_groups"][0].get("eps", options.adam_epsilon)
    if isinstance(options, EDM2Options):
        shape = facts.get("vae.latent_shape") or (options.image_channels, *sides_of(options.resolution))
        return options.adam_epsilon / math.prod(shape)
    return options.adam_epsilon


def _learning_rate(step: int, total: int, options: OptimizerOptions) -> float:
    """As docs and `--help` describe the schedules; `step` updates are finished."""
    warmup, floor = options.lr_warmup_steps, options.lr_floor
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
        limit, gamma, power = options.ema_max_decay, options.ema_inv_gamma, options.ema_power
        return {"EMA": lambda n: 0.0 if n <= 1 else min(limit, 1 - (1 + (n - 1) / gamma) ** -power)}
    return {f"EMA {width}": _power_decay(width) for width in options.ema_widths}


def _power_decay(width: float) -> Callable[[int], float]:
    """Karras et al. 2024, eq. 121 to 126: an average of exponent g has the relative width sqrt((g+1) / ((g+2)^2 (g+3)))."""
    low, high = 0.0, 1e6  # by halves: the width falls with the exponent
    for _ in range(200):
        middle = (low + high) / 2
        wider = (middle + 1) / ((middle + 2) ** 2 * (middle + 3)) > width**2
        low, high = (middle, high) if wider else (low, middle)
    exponent = (low + high) / 2
    return lambda n: (1 - 1 / n) ** (exponent + 1)

"""Images from a trained network: diffusers' samplers over starting noise that belongs to image numbers, in whole
chunks.

Image i is a function of (seed, i): its starting noise comes from `utils.core.randomness`, and so does the noise that a sampler
adds on the way. What is left of the rest of the batch is float rounding, because other
batch sizes run other convolution kernels. Chunks are therefore cut by image number (chunk c holds images c *
batch_size up to (c + 1) * batch_size) and always computed whole, by whichever process: the arithmetic does not depend
on how many there are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from accelerate import Accelerator
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, EDMDPMSolverMultistepScheduler
from torch import nn
from torch.overrides import TorchFunctionMode

from models.edm_heun import EDMHeunScheduler
from models.flow_scheduler import FlowHeunScheduler, FlowScheduler
from utils.core import randomness
from utils.core.distributed import together
from utils.core.errors import UserError
from utils.data.autoencoder import Autoencoder
from utils.diffusion.ddpm import config_for_any, is_flow

Scheduler = Any  # of diffusers, whose classes share no type that has `step`, `timesteps` and `config`

FINISHED_EDM = -10.0  # ln(sigma) / 4 below that of any step, in place of the finished image's -inf


@contextmanager
def full_precision(model: nn.Module, *, compiled: bool = False) -> Iterator[nn.Module]:
    """Inside it the unwrapped `model` runs in fp32, in eval mode and without gradients; afterwards it trains on as
    before.

    `accelerate.prepare` replaces `model.forward` by one that autocasts and keeps the plain one as `_original_forward`.
    That one is put in its place here and taken out again; `unwrap_model(keep_fp32_wrapper=False)` would remove
    training's autocast for good. Modules that were compiled in place run eagerly unless `compiled`: no graph is
    compiled for the sampling batch, and the images are those that the exported weights give anywhere else. Raises TypeError
    for a DDP or torch.compile wrapper, through which the autocast would stay on.
    """
    if hasattr(model, "_orig_mod") or isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(f"full_precision needs the unwrapped model, got {type(model).__name__}")
    training_modes = [(module, module.training) for module in model.modules()]
    compiled_calls = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None and not compiled]
    autocast_forward = model.forward if hasattr(model, "_original_forward") else None
    device_type = next(model.parameters()).device.type
    try:
        if autocast_forward is not None:
            model.forward = cast(Callable, model._original_forward)
        for module, _ in compiled_calls:
            module._compiled_call_impl = None
        model.eval()
        # Not inference_mode: tensors first made inside it (a scheduler's or buffer's copy) could not be trained with
        # later.
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            yield model
    finally:
        if autocast_forward is not None:
            model.forward = autocast_forward
        for module, call in compiled_calls:
            module._compiled_call_impl = call
        for module, mode in training_modes:
            module.training = mode


class ClippingDPMSolver(DPMSolverMultistepScheduler):
    """DPM-Solver++ that clips the denoised image as DDPM and DDIM do, by `clip_sample` and `clip_sample_range`.

    diffusers' class ignores both. Without them a network that predicts the noise leads it out of the range of images, because
    what it gets wrong counts 1 / sqrt(abar) times in the denoised image, 157 times at the end of the linear schedule.
    """

    def convert_model_output(self, model_output: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        denoised = super().convert_model_output(model_output, *args, **kwargs)
        if self.config.thresholding or not self.config.get("clip_sample", True):  # thresholded already; DDPM's default
            return denoised
        limit = self.config.get("clip_sample_range", 1.0)
        return denoised.clamp(-limit, limit)


class NoiseOfSamples(TorchFunctionMode):
    """Inside it torch.randn, by which diffusers' schedulers draw the noise of a step, gives what `draw` gives."""

    def __init__(self, draw: Callable[[], torch.Tensor]):
        super().__init__()
        self._draw = draw

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        return self._draw() if function is torch.randn else function(*args, **(kwargs or {}))


def make_sampler(name: str, noise_scheduler: Scheduler | Mapping) -> Scheduler:
    """Returns a diffusers scheduler that samples what was trained: same betas, prediction type, clipping and spacing of
    timesteps; for the config of an EDM scheduler the same noise levels, with "heun" (Karras et al. 2022) or "dpmsolver++"; for
    that of flow matching "euler" or "heun".

    `name` is "ddim" (Song et al. 2021, eta = 0), "ddpm" (Ho et al. 2020, algorithm 2) or "dpmsolver++" (Lu et al. 2022,
    second order). `noise_scheduler` is the training scheduler or its config. With zero terminal SNR the timesteps are
    trailing, so that sampling starts where the noise is pure (Lin et al. 2023, section 3.3). Raises UserError.
    """
    classes = {"ddim": DDIMScheduler, "ddpm": DDPMScheduler, "dpmsolver++": ClippingDPMSolver}
    config = config_for_any(noise_scheduler if isinstance(noise_scheduler, Mapping) else noise_scheduler.config)
    if is_edm(config):
        classes = {"heun": EDMHeunScheduler, "dpmsolver++": EDMDPMSolverMultistepScheduler}
    elif is_flow(config):
        classes = {"euler": FlowScheduler, "heun": FlowHeunScheduler}
    if name not in classes:
        raise UserError(f"--sampler {name} does not work with this network\nchoose from {', '.join(classes)}")
    if classes[name] is ClippingDPMSolver:
        config["algorithm_type"] = "dpmsolver++"  # a pipeline of others may say which of its relatives made its images
    if config.get("rescale_betas_zero_snr"):
        config["timestep_spacing"] = "trailing"
    elif classes[name] is ClippingDPMSolver and config.get("timestep_spacing") == "leading":
        # DPM-Solver's notion of leading starts in the middle of the chain when asked for many steps: at 500 of 1000.
        config["timestep_spacing"] = "linspace"
    return classes[name].from_config(config)


def sampler_version(name: str, config: Mapping) -> int:
    """Return a number that goes up when a sampler begins to make other images of the same noise: those of two versions are no
    one set. 2: "dpmsolver++" clips, and "ddpm" draws the noise of a step from `utils.core.randomness`."""
    return 2 if name in ("ddpm", "dpmsolver++") and not is_edm(config) else 1


def is_edm(config: Mapping) -> bool:
    """Returns whether a scheduler's config is of the EDM kind: noise levels sigma, in place of a chain of betas."""
    return "sigma_data" in config


def usual_sampler(config: Mapping) -> str:
    """Returns the name of the sampler for the config of a scheduler."""
    return "heun" if is_edm(config) else "euler" if is_flow(config) else "ddim"


def path_steps(scheduler: Scheduler, timesteps: Sequence[float]) -> list[tuple[int, float]]:
    """Returns where a chain comes nearest to each of `timesteps`: (step index, its timestep) for each, after `set_timesteps`.

    Step k is the noisy image that step k denoises; the last index, one past the steps, is the finished image and
    counts as 0, with EDM as FINISHED_EDM.
    """
    chain = [*scheduler.timesteps.tolist(), FINISHED_EDM if is_edm(scheduler.config) else 0]
    nearest = [min(range(len(chain)), key=lambda k: (abs(chain[k] - wanted), -k)) for wanted in timesteps]
    return [(k, chain[k]) for k in nearest]


@dataclass(frozen=True)
class SamplePlan:
    """How images are made of their numbers."""

    scheduler: Scheduler  # of `make_sampler`; its timesteps are overwritten
    num_inference_steps: int
    shape: tuple[int, int, int]  # (C, H, W), of what the network makes
    seed: int
    batch_size: int
    device: torch.device | str
    autoencoder: Autoencoder | None = None  # that decodes it

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images."""
        return self.shape if self.autoencoder is None else self.autoencoder.image_shape

    def shown(self, made: torch.Tensor) -> torch.Tensor:
        """Images in [-1, 1] of what the network makes, [B, C, H, W]."""
        return made.clamp(-1.0, 1.0) if self.autoencoder is None else self.autoencoder.decode(made)

    @contextmanager
    def decoding(self, accelerator: Accelerator) -> Iterator[None]:
        """Around what decodes several times: the autoencoder, where there is one, moves to the device and back once. Every
        process must call it."""
        with ExitStack() as moved:
            if self.autoencoder is not None:
                with together(accelerator, "moving the autoencoder", "the autoencoder does not fit beside the network"):
                    moved.enter_context(self.autoencoder.on(self.device))
            yield

    def denoising_steps(self, num_images: int) -> int:
        """Returns how often `sample` asks `should_stop` while it makes so many images."""
        set_timesteps(self.scheduler, self.num_inference_steps)
        return -(-num_images // self.batch_size) * len(self.scheduler.timesteps)


@torch.no_grad()
def sample(
    unet: nn.Module,
    plan: SamplePlan,
    sample_numbers: torch.Tensor,
    *,
    should_stop: Callable[[], bool] | None = None,
    record_timesteps: Sequence[float] | None = None,
    predict: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    """Returns images [n, C, H, W], float32 in [-1, 1] on the plan's device, for `sample_numbers` int64 [n].

    `unet` must be in eval mode, and runs in the precision it is found in: wrap the call in `full_precision` unless
    autocast is wanted. The global random state is neither read nor changed. `should_stop` is asked before every step;
    once it says True the images are dropped and None is returned. With `record_timesteps` the result is (images, path):
    path [n, T, C, H, W] holds the noisy image nearest to each of these timesteps (see `path_steps`) as the network sees
    it, clamped to [-1, 1]. With the plan's autoencoder all of these are decoded.
    `predict` gives the prediction from (what the network sees, timestep, sample numbers); without
    it the prediction is `unet`'s. Raises UserError for a number of steps that the scheduler cannot do.
    """
    scheduler, shape, seed, device = plan.scheduler, plan.shape, plan.seed, plan.device
    images, paths = [], []
    for numbers in sample_numbers.split(plan.batch_size):
        set_timesteps(scheduler, plan.num_inference_steps)  # anew for every chunk: multistep solvers keep a history
        record_steps = [k for k, _ in path_steps(scheduler, record_timesteps or ())]
        numbers = numbers.to(device)
        current = randomness.normal(seed, "sample", numbers, shape) * scheduler.init_noise_sigma
        recorded = {}
        # The scheduler's timesteps stay on the CPU, for indexing the schedule by a device tensor would wait for the device
        # at every step. The network's are copied once: a copy at every step would wait as well.
        told_to_network = scheduler.timesteps.to(device)
        for k, timestep in enumerate(scheduler.timesteps):
            if should_stop is not None and should_stop():
                return None
            scaled = scheduler.scale_model_input(current, timestep)  # with EDM; the others leave it as it is
            if k in record_steps:
                recorded[k] = plan.shown(scaled)
            at = told_to_network[k]
            prediction = (predict(scaled, at, numbers) if predict else unet(scaled, at).sample).float()
            with NoiseOfSamples(partial(randomness.normal, seed, f"sampling noise/{k}", numbers, shape)):
                current = scheduler.step(prediction, timestep, current).prev_sample
        images.append(plan.shown(current))
        if record_timesteps is not None:
            recorded[len(scheduler.timesteps)] = images[-1]
            paths.append(torch.stack([recorded[k] for k in record_steps], dim=1))
    return torch.cat(images) if record_timesteps is None else (torch.cat(images), torch.cat(paths))


def sampling_steps(
    sampler: str, requested: int | None, noise_scheduler: Scheduler, *, flag: str = "--num_inference_steps"
) -> int:
    """Steps to sample with: `requested`, else 50, which DDIM needs for good images, or all of them for the full DDPM chain; 32
    with EDM (Karras et al. 2024), 25 of Heun's method in flow matching.

    Raises UserError for a number that `sampler` cannot do on this schedule, which names the `flag`.
    """
    num_train_timesteps = noise_scheduler.config.num_train_timesteps
    usual = num_train_timesteps if sampler == "ddpm" else min(25 if sampler == "heun" else 50, num_train_timesteps)
    steps = requested or (32 if is_edm(noise_scheduler.config) else usual)
    try:
        set_timesteps(make_sampler(sampler, noise_scheduler), steps)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from None
    return steps


def set_timesteps(scheduler: Scheduler, num_inference_steps: int) -> None:
    """Starts a chain of `num_inference_steps`. Raises UserError for a number that the scheduler cannot do."""
    limit = scheduler.config.num_train_timesteps
    if not 1 <= num_inference_steps <= limit:
        raise UserError(
            f"{num_inference_steps} sampling steps are not possible with this model\nset a number from 1 to {limit}"
        )
    scheduler.set_timesteps(num_inference_steps)
    if is_edm(scheduler.config) or is_flow(scheduler.config):
        return
    chain = scheduler.timesteps
    # Integer rounding inside diffusers: leading spacing of 600 over 1000 starts at t = 599, where pure noise is no longer
    # what the network knows; trailing spacing of 61 ends at t = -1; DPM-Solver's 1000 of 1000 visit one timestep twice.
    starts_late = chain[0] < 0.9 * (limit - limit / num_inference_steps)
    if starts_late or chain.min() < 0 or (chain.diff() >= 0).any():
        divisor = max(n for n in range(1, max(2, num_inference_steps)) if limit % n == 0)
        raise UserError(
            f"diffusers cannot spread {num_inference_steps} sampling steps evenly over {limit}\n"
            f"set another number, for example {divisor}"
        )


def to_uint16(images: torch.Tensor) -> torch.Tensor:
    """As `to_uint8`, with 65,536 levels."""
    levels = (images.nan_to_num(nan=-1.0).clamp(-1.0, 1.0) * 32767.5 + 32767.5).round()
    return levels.to(torch.int32).to(torch.uint16)


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """Turns images in [-1, 1] into uint8, rounded to the nearest level; what lies outside is clamped, NaN becomes black."""
    return (images.nan_to_num(nan=-1.0).clamp(-1.0, 1.0) * 127.5 + 127.5).round().to(torch.uint8)

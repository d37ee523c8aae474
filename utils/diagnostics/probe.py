"""Questions to a network: what it is made of, what reaches its modules before the first update, what it does with real images.

Figures only, no verdicts. Weights, modes and random numbers stay as they are.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

import torch
from diffusers import DDPMScheduler, ModelMixin
from torch import nn
from torch.nn.utils import parametrize

from models.flow_scheduler import FlowScheduler
from utils.core import randomness
from utils.core.errors import one_line
from utils.data.dataset import ImageSet
from utils.data.training_data import Batch, TrainingSamples
from utils.diffusion.classes import classes_known
from utils.diffusion.ddpm import PREDICTION_TYPES, training_target
from utils.diffusion.edm2 import EDM2Denoiser
from utils.diffusion.objective import Objective
from utils.diffusion.sampling import FINISHED_EDM, full_precision

LEVELS = torch.tensor([0.3, 0.6], dtype=torch.float64)  # shares of the training's noise levels below those of the images
# On a CPU, parameters x pixels above which nothing is computed: about a second on one core (10 M parameters at 32x32).
LARGEST_ON_CPU = 1e10
MAX_SWITCHED_OFF = 8  # layers, one more forward pass each
TIME_FEATURES = ("time_proj", "noise_features")  # of diffusers' networks and of EDM2's

Forward = Callable[[Callable], torch.Tensor]  # a network, or what stands for it -> the losses of the images


def examine(objective: Objective, samples: TrainingSamples) -> dict:
    """`examine_modules`, and `examine_flow` where that is quick; {"failed"} says why a look failed, which ends no run."""
    found = examine_modules(objective.exported)
    try:
        if affordable(objective.exported, samples.shape[-1] * samples.shape[-2]):
            batch = samples.on_device(next(samples.batches(0, 1)), as_they_are=True)
            count = min(len(LEVELS), len(batch.clean_images))
            labels = None if batch.labels is None else batch.labels[:count]
            few = Batch(batch.sample_numbers[:count], batch.clean_images[:count], batch.noise[:count], labels)
            drawn = objective.draw(few, LEVELS[:count])

            def losses(network: Callable) -> torch.Tensor:
                return objective.losses(cast(nn.Module, network), **drawn).shown

            found |= examine_flow(objective.network, objective.exported, losses)
    except Exception as error:  # out of memory, or a network that bears no hooks
        found["failed"] = one_line(error)
    return found


def examine_modules(network: nn.Module) -> dict:
    """What `network` (a UNet2DModel or EDM2UNet) is made of:

    batch_norms: modules that normalize over the batch; dropout: the largest probability; spectral_norm: whether a layer has
    it; attention: number of modules that attend; attention_declared: whether its config asks for any.
    """
    modules = dict(network.named_modules())
    config = dict(getattr(network, "config", {}))
    blocks = [*(config.get("down_block_types") or ()), *(config.get("up_block_types") or ())]
    return {
        "batch_norms": [name for name, module in modules.items() if isinstance(module, nn.modules.batchnorm._BatchNorm)],
        "dropout": max((float(module.p) for module in modules.values() if isinstance(module, nn.Dropout)), default=0.0),
        "spectral_norm": any(parametrize.is_parametrized(module) for module in modules.values()),
        "attention": sum("Attention" in type(module).__name__ for module in modules.values()),
        "attention_declared": any("Attn" in block for block in blocks),
    }


def affordable(network: nn.Module, pixels: int) -> bool:
    """Whether a pass of images of so many pixels is quick enough to be made before a run."""
    parameters = list(network.parameters())
    return parameters[0].device.type != "cpu" or sum(parameter.numel() for parameter in parameters) * pixels <= LARGEST_ON_CPU


def examine_flow(network: nn.Module, exported: ModelMixin, losses: Forward) -> dict:
    """What passes through `exported`, the part of `network` that makes images, when `losses` of a few images are computed:

    zero_inputs: layer -> share of its input's channels that are exactly zero in all images, where that is not 0; not behind
        ReLU.
    idle: layers of which neither output nor gradient depends on them: not called, or replaced by zeros without a change.
    cut: layers that change the output, but get no gradient.
    told, received: mean noise level that the network gets, and that its time embedding gets; None where there is none.

    Weights that are zero have random ones in their place meanwhile: before the first update they would hide what is before
    them.
    """
    layers: dict[str, nn.Module] = {
        name: module for name, module in exported.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))
    }
    norms: dict[str, nn.Module] = {
        name: module for name, module in exported.named_modules() if isinstance(module, nn.GroupNorm)
    }
    seen = _Seen()
    numbers = torch.ones(1, dtype=torch.int64, device=next(exported.parameters()).device)
    with full_precision(network), ExitStack() as restored:
        if exported.is_gradient_checkpointing:  # outputs of layers are no part of the graph then
            exported.disable_gradient_checkpointing()
            restored.callback(exported.enable_gradient_checkpointing)
        zeros = {name: parameter for name, parameter in network.named_parameters() if not parameter.any()}
        others = {name: randomness.normal(0, name, numbers, zero.shape)[0].to(zero) for name, zero in zeros.items()}

        def run(*arguments: torch.Tensor) -> object:
            return torch.func.functional_call(network, others, arguments)

        with torch.enable_grad(), seen.watching(exported, layers, norms):
            total = losses(run).sum()
            outputs = list(seen.outputs.items())
            gradients = torch.autograd.grad(total, [output for _, output in outputs], allow_unused=True)
        reached = {name for (name, _), gradient in zip(outputs, gradients) if gradient is not None and gradient.any()}
        without = [name for name in layers if name in seen.called - reached and layers[name].weight.requires_grad]
        # Queries and keys of a single pixel change nothing by their nature.
        without = [name for name in without if not name.endswith(("to_q", "to_k"))]
        cut = []
        for name in without[:MAX_SWITCHED_OFF]:
            hook = layers[name].register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
            changed = not torch.equal(losses(run).sum(), total.detach())
            hook.remove()
            cut += [name] if changed else []
    uncalled = [name for name in layers if name not in seen.called]
    return {
        "zero_inputs": {name: share for name, share in seen.zero_inputs().items() if share > 0},
        "idle": [*uncalled, *(name for name in without[:MAX_SWITCHED_OFF] if name not in cut)],
        "cut": cut,
        "told": seen.told,
        "received": seen.received,
    }


class _Seen:
    """What hooks saw of a forward pass."""

    def __init__(self) -> None:
        self.outputs: dict[str, torch.Tensor] = {}  # of layers, as far as they are part of the graph
        self.called: set[str] = set()
        self.told: float | None = None
        self.received: float | None = None
        self._live: dict[str, torch.Tensor] = {}  # layer -> which channels of its input are not all zero

    def zero_inputs(self) -> dict[str, float]:
        return {name: 1.0 - live.float().mean().item() for name, live in self._live.items()}

    @contextmanager
    def watching(self, exported: nn.Module, layers: dict[str, nn.Module], norms: dict[str, nn.Module]) -> Iterator[None]:
        features = (getattr(exported, name, None) for name in TIME_FEATURES)
        with ExitStack() as hooks:
            hooks.callback(exported.register_forward_pre_hook(self._note_told, with_kwargs=True).remove)
            for part in (part for part in features if isinstance(part, nn.Module)):
                hooks.callback(part.register_forward_pre_hook(self._note_received).remove)
            for name, module in layers.items():
                hooks.callback(module.register_forward_hook(partial(self._note_output, name)).remove)
            for name, module in (layers | norms).items():
                hooks.callback(module.register_forward_pre_hook(partial(self._note_input, name)).remove)
            yield

    def _note_told(self, module: nn.Module, inputs: tuple, named: dict) -> None:
        level = named.get("timestep", inputs[1] if len(inputs) > 1 else None)
        self.told = None if level is None else float(torch.as_tensor(level).float().mean())

    def _note_received(self, module: nn.Module, inputs: tuple) -> None:
        self.received = float(inputs[0].float().mean())

    def _note_output(self, name: str, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.called.add(name)
        if output.requires_grad:
            self.outputs[name] = output

    def _note_input(self, name: str, module: nn.Module, inputs: tuple) -> None:
        x = inputs[0].detach()
        if x.ndim == 4 and (x < 0).any():  # what ReLU gives may well be zero in all of a channel
            self._live[name] = (x != 0).any(dim=0).flatten(1).any(dim=1)


TIMESTEPS = (0, 100, 500, 900, 999)  # of 1000; spread in the same way over other lengths
PROBE_IMAGES = 32
SMALL_PIXELS = 2**13  # that need little memory however small the micro batch is: 32 images of 16x16, 2 of 64x64
MIDDLE = 2  # of TIMESTEPS: where noise, image and velocity are all far apart
OTHER_TIMES = (100, 900)  # of 1000, told to the network instead of the middle one
PATH_SIGMAS = (80.0, 10.0, 3.0, 1.0, 0.5, 0.2)  # where an EDM2 network's way from noise to image is looked at


def probe_timesteps(num_train_timesteps: int) -> list[int]:
    return [round(t * (num_train_timesteps - 1) / 999) for t in TIMESTEPS]


def probe_batch(micro_batch_size: int, image_shape: tuple[int, int, int]) -> int:
    """Returns images of (C, H, W) that go through the network at once when a run of this micro batch is examined."""
    return min(max(2, micro_batch_size, SMALL_PIXELS // math.prod(image_shape[1:])), PROBE_IMAGES)


@torch.no_grad()
def probe_network(
    unet: nn.Module,
    noise_scheduler: DDPMScheduler | FlowScheduler,
    clean_images: torch.Tensor,
    seed: int = 0,
    validation_images: torch.Tensor | None = None,
    batch_size: int | None = None,
    labels: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> dict:
    """Returns figures about `unet` (unwrapped, in full precision) on `clean_images` float32 [B, C, H, W] in [-1, 1].

    The network sees `batch_size` images at once, all of them where that is None; at least 2, or it could not be told whether it
    mixes them. Only these are on its device: the rest of the arithmetic is done where `clean_images` are. `labels`: the classes
    of both kinds of images, int64 [B], for a network that takes them.
    The noise is a function of `seed` and the image's place, so that figures of different updates can be compared. Gives

        images, held_out_images: how many were looked at
        error: timestep -> mean squared error of the prediction, unweighted; for the first timestep, the last and three between
        held_out_error: the same on `validation_images` under the same noise, where they are given
        linear_error: the same of the best predictor that only scales its input (the Wiener gain for white images with the
            batch's variance); a network at or above it has learned nothing yet at that noise level
        errors_as: prediction type -> timestep -> mean squared error if that is what the network predicts, over the target's
            mean square: 1 for a network whose output is zero
        timestep_response: rms change of the output at the middle timestep when another timestep is told, over the rms of the
            output; 0 for a network that does not see the timestep, None for one whose output is zero
        batch_response: rms change of the first image's output at the middle timestep when it is alone in the batch, over the
            rms of the output; 0 but for rounding
    """
    device = next((parameter.device for parameter in unet.parameters()), clean_images.device)
    batch_size = max(2, batch_size or len(clean_images))
    of_images, of_others = (told if told is None else told.to(device) for told in labels)  # sent once

    def predict(noisy_images: torch.Tensor, timesteps: torch.Tensor, told: torch.Tensor | None = of_images) -> torch.Tensor:
        inputs = (noisy_images, timesteps) if told is None else (noisy_images, timesteps, told[: len(timesteps)])
        parts = zip(*(value.to(device).split(batch_size) for value in inputs))
        return torch.cat([unet(*part).sample.float().to(noisy_images.device) for part in parts])

    numbers = torch.arange(len(clean_images), device=clean_images.device)
    steps = probe_timesteps(noise_scheduler.config.num_train_timesteps)
    variance = clean_images.var().item()
    found: dict = {
        "prediction_type": noise_scheduler.config.prediction_type,
        "images": len(clean_images),
        "held_out_images": 0 if validation_images is None else min(len(validation_images), len(clean_images)),
        "error": {},
        "held_out_error": {},
        "linear_error": {},
        "errors_as": {name: {} for name in PREDICTION_TYPES},
    }
    for place, step in enumerate(steps):
        noise = randomness.normal(seed, f"probe/{place}", numbers, tuple(clean_images.shape[1:]))
        timesteps = torch.full_like(numbers, step)
        noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
        target = training_target(noise_scheduler, clean_images, noise, timesteps)
        prediction = predict(noisy_images, timesteps)
        found["error"][str(step)] = (prediction - target).square().mean().item()
        found["linear_error"][str(step)] = _linear_error(noise_scheduler, step, variance)
        if validation_images is not None and len(validation_images):
            count = min(len(validation_images), len(noise))
            others, noise_of_others, their_steps = validation_images[:count], noise[:count], timesteps[:count]
            noisy_others = noise_scheduler.add_noise(others, noise_of_others, their_steps)
            wanted = training_target(noise_scheduler, others, noise_of_others, their_steps)
            error = predict(noisy_others, their_steps, of_others) - wanted
            found["held_out_error"][str(step)] = error.square().mean().item()
        velocity = noise_scheduler.get_velocity(clean_images, noise, timesteps)
        for name, other in zip(PREDICTION_TYPES, (noise, clean_images, velocity)):
            error = (prediction - other).square().mean() / other.square().mean().clamp(min=1e-12)
            found["errors_as"][name][str(step)] = error.item()
        if place == MIDDLE:
            scale = prediction.square().mean().sqrt()
            changes = [
                predict(noisy_images, torch.full_like(timesteps, round(t * (steps[-1]) / 999))) - prediction
                for t in OTHER_TIMES
            ]
            change = torch.stack(changes).square().mean().sqrt()
            found["timestep_response"] = (change / scale).item() if scale > 0 else None
            alone = predict(noisy_images[:1], timesteps[:1]) - prediction[:1]
            found["batch_response"] = (alone.square().mean().sqrt() / scale).item() if scale > 0 else None
    return found


def examine_network(
    unet: ModelMixin, noise_scheduler: DDPMScheduler | FlowScheduler, samples: TrainingSamples, validation: ImageSet
) -> dict:
    """`probe_network` on a run's first images. However many are looked at, a micro batch at once goes through the network, or
    some small images: what trains can be examined."""
    first, numbers = samples.first_batch(PROBE_IMAGES), torch.arange(min(len(validation), PROBE_IMAGES))
    clean_images = first.clean_images.cpu()
    held_out = samples.held_out(validation, numbers, clean_images.device) if len(numbers) else None
    others = None if held_out is None else held_out.clean_images
    labels: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if classes_known(unet):
        labels = first.labels, None if held_out is None else held_out.labels
    batch_size = probe_batch(samples.micro_batch_size, samples.shape)
    return probe_network(unet, noise_scheduler, clean_images, samples.seed, others, batch_size, labels)


def _linear_error(noise_scheduler: DDPMScheduler | FlowScheduler, timestep: int, variance: float) -> float:
    """Least mean squared error of target ~ gain * x_t for x_t = a x_0 + b eps, with x_0 of this variance and zero mean:
    Var(target) - Cov(target, x_t)^2 / Var(x_t)."""
    one, at = torch.ones(1, 1, 1, 1), torch.tensor([timestep])
    parts = (one, 0 * one), (0 * one, one)  # image and noise
    a, b = (noise_scheduler.add_noise(*part, at).item() for part in parts)
    image_part, noise_part = (training_target(noise_scheduler, *part, at).item() for part in parts)
    covariance = image_part * a * variance + noise_part * b
    spread = a * a * variance + b * b
    return image_part**2 * variance + noise_part**2 - covariance**2 / max(spread, 1e-12)


def sample_statistics(images: torch.Tensor) -> dict[str, float]:
    """Mean, std, min, max, share of pixels at the ends of the range, and rms distance between pairs, of images [B, C, H, W]."""
    images = images.float()
    flat = images.flatten(1)
    statistics = {"mean": images.mean().item(), "std": images.std().item(), "min": images.min().item()}
    statistics |= {"max": images.max().item(), "saturated": (images.abs() >= 0.999).float().mean().item()}
    if len(flat) > 1:
        # The mean squared distance of distinct pairs is twice the variance over the images, summed over the pixels.
        statistics["pair_distance"] = (2.0 * flat.var(dim=0)).mean().sqrt().item()
    return statistics


def path_timesteps() -> list[float]:
    """c_noise of PATH_SIGMAS, and of the finished image."""
    return [*(math.log(sigma) / 4.0 for sigma in PATH_SIGMAS), FINISHED_EDM]


def sigma_caption(timestep: float) -> str:
    return f"sigma {math.exp(4.0 * timestep):.2g}" if timestep > FINISHED_EDM else "finished"


def examine_denoiser(denoiser: EDM2Denoiser, samples: TrainingSamples) -> dict:
    """Returns {"timestep_response"}: change of F of the run's first images under noise of sigma 1, when another noise level is
    told, over its size; None for a network whose output is zero."""
    batch = samples.on_device(next(samples.batches(0, 1)), as_they_are=True)
    clean_images, labels = batch.clean_images[:PROBE_IMAGES], batch.classes()[:PROBE_IMAGES]
    numbers = torch.arange(len(clean_images), device=clean_images.device)
    noisy_images = clean_images + randomness.normal(samples.seed, "probe", numbers, tuple(clean_images.shape[1:]))
    scaled = noisy_images / noisy_images.std()
    first, *others = (denoiser.unet(scaled, math.log(sigma) / 4.0, labels).sample.float() for sigma in (1.0, 0.1, 10.0))
    scale = first.square().mean().sqrt()
    change = torch.stack([other - first for other in others]).square().mean().sqrt()
    return {"timestep_response": (change / scale).item() if scale > 0 else None}

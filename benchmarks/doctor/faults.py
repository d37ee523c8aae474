"""Faults of all kinds that audit.py plants, each a bug of a user's: of the data, the settings, the network, the step.

Each fault changes flags, the data, or functions of the project before `main` runs. Its form varies with the seed (for instance
three ways to cut off the timestep), so that a rule cannot live on the traces of one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

import utils.core.distributed
import utils.core.randomness
import utils.data.augmentation
import utils.data.dataset
import utils.data.loader
import utils.data.training_data
import utils.diffusion.ddpm
import utils.diffusion.sampling
import utils.diffusion.unet
import utils.optim.ema
import utils.optim.power_ema
from benchmarks.shared.replace import replace_everywhere

Flags = Callable[[int], dict]


def no_flags(seed: int) -> dict:
    return {}


@dataclass(frozen=True)
class Fault:
    stage: str | tuple[str, ...]  # of the finding that names it; several where each would be right
    patch: Callable[[int], None] | None = None  # of the seed, which chooses the variant
    flags: Flags = no_flags  # added to the run's
    imbalanced: bool = False  # nearly all images are of one class
    code: str | None = None  # of the finding that names it, where that has no stage

    @property
    def stages(self) -> tuple[str, ...]:
        return (self.stage,) if isinstance(self.stage, str) else self.stage


def choose(seed: int, *variants):
    return variants[seed % len(variants)]


# ---- the data


def scale_pixels(change) -> None:
    """`change(floats in [-1, 1])` wherever the project scales pixels for the network."""
    plain = utils.data.augmentation.to_unit_range

    def scaled(images, max_value):
        return change(plain(images, max_value))

    module: Any
    for module in (utils.data.augmentation, utils.data.training_data):
        module.to_unit_range = scaled


def from_0_to_1(seed: int) -> None:
    scale_pixels(lambda x: (x + 1) / 2)


def from_0_to_255(seed: int) -> None:
    scale_pixels(lambda x: (x + 1) * 127.5)


def normalized_twice(seed: int) -> None:
    scale_pixels(choose(seed, lambda x: x * 2 - 1, lambda x: x / 127.5 - 1, lambda x: (x - 0.5) / 0.5))


def change_fetch(change) -> None:
    """`change(plain fetch, set, indices, crop)` wherever pixels are read."""
    plain = utils.data.dataset.ImageSet.fetch
    utils.data.dataset.ImageSet.fetch = lambda self, indices, crop=None: change(plain, self, np.asarray(indices), crop)


def alike(seed: int) -> None:
    """A decoder that gives one image, a few, or one with some noise in its last bits."""

    def one_with_noise(fetch, images, indices, crop):
        pixels = fetch(images, indices * 0, crop)
        noise = np.stack([np.random.default_rng(i).integers(0, 3, pixels.shape[1:]) for i in indices])
        return np.maximum(pixels, noise.astype(pixels.dtype))

    change_fetch(
        choose(
            seed,
            lambda fetch, images, indices, crop: fetch(images, indices * 0, crop),
            lambda fetch, images, indices, crop: fetch(images, indices % 24, crop),
            one_with_noise,
        )
    )


def bad_image(seed: int) -> None:
    """Few images are damaged: full of NaN, a single NaN, or so large that their square is infinite."""
    plain, value = utils.data.augmentation.augment, choose(seed, torch.nan, torch.nan, 1e30)

    def damaged(images, sample_numbers, **options):
        pixels = plain(images, sample_numbers, **options)
        rows = sample_numbers % 331 == 97 + seed
        if seed % 3 == 1:
            pixels[rows, :, 3, 4] = value
        else:
            pixels[rows] = value
        return pixels

    replace_everywhere("utils.data.augmentation.augment", damaged)


def starving(seed: int) -> None:
    import time

    def slow(fetch, images, indices, crop):
        if crop is None and len(indices) == 16:  # a training batch
            time.sleep(0.06 + 0.03 * seed)
        return fetch(images, indices, crop)

    change_fetch(slow)


# ---- the process


def timesteps_of_a_tenth(seed: int) -> None:
    plain, first = utils.core.randomness.integers, choose(seed, 0, 450, 900)

    def narrow(seed, purpose, sample_numbers, high):
        numbers = plain(seed, purpose, sample_numbers, high)
        return first * high // 1000 + numbers // 10 if purpose == "timesteps" else numbers

    replace_everywhere("utils.core.randomness.integers", narrow)


def with_betas(start: float, end: float) -> None:
    plain = utils.diffusion.ddpm.make_noise_scheduler

    def other(*, num_train_timesteps=1000, **options):
        scheduler = plain(num_train_timesteps=num_train_timesteps, **options)
        return type(scheduler).from_config(scheduler.config, trained_betas=np.linspace(start, end, num_train_timesteps))

    replace_everywhere("utils.diffusion.ddpm.make_noise_scheduler", other)


def change_target(target) -> None:
    """`target` for training alone: the validation, which takes no gradients, keeps its own."""
    plain = utils.diffusion.ddpm.training_target

    def changed(*arguments):
        return (target if torch.is_grad_enabled() else plain)(*arguments)

    replace_everywhere("utils.diffusion.ddpm.training_target", changed)


def betas_too_small(seed: int) -> None:
    if seed % 3 != 2:  # else --ddpm_num_steps 100
        with_betas(1e-4, choose(seed, 2e-3, 5e-3))


def betas_too_large(seed: int) -> None:
    with_betas(*choose(seed, (1e-3, 0.2), (0.02, 0.5), (0.05, 0.05)))


def other_sampler(seed: int) -> None:
    """Sampling takes another prediction type or schedule; or the network is trained on another target than it is saved as."""
    if seed % 3 == 2:
        from utils.diffusion.ddpm import training_target

        types = {"epsilon": "sample", "sample": "v_prediction", "v_prediction": "epsilon"}

        def other_target(scheduler, *tensors):
            other = type(scheduler).from_config(scheduler.config, prediction_type=types[scheduler.config.prediction_type])
            return training_target(other, *tensors)

        change_target(other_target)
        return
    plain = utils.diffusion.sampling.make_sampler

    def other(name, scheduler):
        config = dict(scheduler.config)
        if seed % 3 == 0:
            config["prediction_type"] = "sample" if config["prediction_type"] == "epsilon" else "epsilon"
        else:
            config["beta_schedule"] = "linear" if config["beta_schedule"] != "linear" else "squaredcos_cap_v2"
        return plain(name, config)

    replace_everywhere("utils.diffusion.sampling.make_sampler", other)


# ---- the network


def change_unet(change) -> None:
    plain = utils.diffusion.unet.make_unet

    def changed(*arguments, **options):
        unet = plain(*arguments, **options)
        change(unet)
        return unet

    replace_everywhere("utils.diffusion.unet.make_unet", changed)


def timestep_cut_off(seed: int) -> None:
    def nothing(module, inputs, output):
        return output * 0

    def constant(module, inputs):
        return (torch.full_like(inputs[0], 10), *inputs[1:])

    def cut(unet) -> None:
        if seed % 3 == 0:
            unet.time_proj.register_forward_pre_hook(constant)
        elif seed % 3 == 1:
            unet.time_embedding.register_forward_hook(nothing)
        else:
            for name, module in unet.named_modules():
                if name.endswith("time_emb_proj"):
                    module.register_forward_hook(nothing)

    change_unet(cut)


def no_gradient(seed: int) -> None:
    def detach(module, inputs, output):
        return output.detach()

    def cut(unet) -> None:
        if seed % 3 == 0:
            unet.mid_block.register_forward_hook(detach)
        elif seed % 3 == 1:
            unet.up_blocks[0].requires_grad_(False)
        else:
            unet.down_blocks[0].resnets[0].conv1.register_forward_hook(detach)

    change_unet(cut)


def exploding(seed: int) -> None:
    """A loss weight, or a layer's gain, that grows with every update, or gradients that are never cleared of a growing sum."""
    updates = 0
    if seed % 3 == 1:

        def grow(unet) -> None:
            def louder(module, inputs, output):
                nonlocal updates
                updates += module.training
                return output * 1.04**updates

            unet.conv_out.register_forward_hook(louder)

        change_unet(grow)
        return
    backward, factor = Accelerator.backward, choose(seed, 1.06, 1.0, 1.12)

    def growing(accelerator, loss, **options):
        nonlocal updates
        updates += 1
        backward(accelerator, loss * factor**updates, **options)

    Accelerator.backward = growing


# ---- the averages and the arithmetic


def ema_frozen(seed: int) -> None:
    if seed % 3 == 0:
        utils.optim.ema.EMA.update = lambda self, decay, finite: None
    elif seed % 3 == 1:
        replace_everywhere(
            "utils.optim.power_ema.ema_decay", lambda *arguments, **options: 1.0
        )  # which makes the EMA of either kind
    else:  # the average of a copy that is not trained
        import copy

        plain = utils.optim.ema.EMA.__init__
        utils.optim.ema.EMA.__init__ = lambda self, model: plain(self, copy.deepcopy(model))


def ema_too_long(seed: int) -> None:
    if seed % 3 != 2:  # no warm-up of the decay; else --ema_power
        decay = choose(seed, 0.9999, 0.999)
        replace_everywhere("utils.optim.power_ema.ema_decay", lambda *arguments, **options: decay)


def scale_collapses(seed: int) -> None:
    """fp16 on a CPU: a real GradScaler, and gradients that overflow in most updates as fp16's would."""
    plain, backward, share = utils.core.distributed.make_accelerator, Accelerator.backward, choose(seed, 1.0, 0.5, 0.7)
    chance = np.random.default_rng(seed)

    def with_scaler(**options):
        accelerator = plain(**options)
        accelerator.scaler = torch.amp.GradScaler("cpu")
        return accelerator

    def unscale(accelerator, optimizer=None):
        for prepared in accelerator._optimizers:
            accelerator.scaler.unscale_(prepared.optimizer)

    def overflowing(accelerator, loss, **options):
        backward(accelerator, loss, **options)
        if chance.random() < share:
            accelerator._models[0].conv_in.weight.grad[0] = torch.inf

    replace_everywhere("utils.core.distributed.make_accelerator", with_scaler)
    Accelerator.unscale_gradients = unscale
    Accelerator.backward = overflowing


FAULTS = {
    "images in [0, 1]": Fault("data", from_0_to_1),
    "images in [0, 255]": Fault("data", from_0_to_255),
    "normalized twice": Fault("data", normalized_twice),
    "learning rate x 100": Fault("learning_rate", flags=lambda seed: {"learning_rate": choose(seed, 0.1, 0.2, 0.05)}),
    "learning rate / 1000": Fault("learning_rate", flags=lambda seed: {"learning_rate": choose(seed, 1e-6, 2e-6, 5e-7)}),
    "high learning rate, no warm-up": Fault(
        "learning_rate", flags=lambda seed: {"lr_warmup_steps": 0, "learning_rate": choose(seed, 0.03, 0.1, 0.02)}
    ),
    "timestep cut off": Fault(("network", "timestep"), timestep_cut_off),
    "timesteps of a tenth": Fault("timestep", timesteps_of_a_tenth),
    "betas too small": Fault(
        "input",
        betas_too_small,
        lambda seed: choose(seed, {}, {}, {"ddpm_num_steps": 100, "ddpm_beta_schedule": "linear"}),
    ),
    "betas too large": Fault("input", betas_too_large),
    "another sampler": Fault(("export", "target"), other_sampler),
    "EMA frozen": Fault("ema", ema_frozen),
    "EMA too long": Fault("ema", ema_too_long, lambda seed: choose(seed, {}, {}, {"ema_power": 3.0})),
    "clip at 1e-6": Fault("gradient", flags=lambda seed: {"max_grad_norm": choose(seed, 1e-6, 1e-6, 1e-5)}),
    "gradients exploding": Fault(("gradient", "network", "weight"), exploding),
    "NaN from a bad image": Fault(("data", "network"), bad_image),
    "block without gradient": Fault(("gradient", "network"), no_gradient),
    "images alike": Fault("data", alike),
    "one class 95 %": Fault(("data", "condition"), imbalanced=True),
    "overfitting on 32 images": Fault(
        "data",
        flags=lambda seed: {"max_train_images": 96, "validation_images": 64, "overfit": True},
        code="overfitting",
    ),
    "data loader starving": Fault("data", starving, lambda seed: {"max_train_steps": 64}),
    "fp16 scale collapsing": Fault(("network", "gradient"), scale_collapses),
}

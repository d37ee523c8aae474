"""Faults that were thought of after the doctor's first rules and thresholds stood.

Written before the doctor was asked about any of them; what it said at first, and what it says now, is in RESULTS.md.
"""

import copy

import torch
from diffusers import UNet2DModel

import utils.core.randomness
import utils.data.loader
import utils.diffusion.ddpm
import utils.optim.ema
import utils.optim.optimizers
from benchmarks.doctor.faults import Fault, change_fetch, change_target, change_unet, choose, scale_pixels
from benchmarks.shared.replace import replace_everywhere


def change_noise(change) -> None:
    """`change(noise [B, C, H, W])` of the training's noise alone."""
    plain = utils.core.randomness.normal

    def changed(seed, purpose, sample_numbers, shape):
        noise = plain(seed, purpose, sample_numbers, shape)
        return change(noise) if purpose == "noise" else noise

    replace_everywhere("utils.core.randomness.normal", changed)


def another_target(seed: int) -> None:
    """The noise is drawn twice, once to be added and once to be predicted; or the target is that of the next image."""
    plain = utils.diffusion.ddpm.training_target

    def drawn_again(scheduler, clean_images, noise, timesteps):
        return plain(scheduler, clean_images, torch.randn_like(noise), timesteps)

    def of_the_next(scheduler, *tensors):
        return plain(scheduler, *tensors).roll(1, 0)

    change_target(choose(seed, drawn_again, of_the_next, of_the_next))


def noise_not_normal(seed: int) -> None:
    change_noise(
        choose(
            seed,
            lambda noise: 0.5 * noise,
            lambda noise: torch.rand_like(noise) * 2 - 1,
            lambda noise: noise[:, :, :1].expand_as(noise),  # one row for all
        )
    )


def noise_shared(seed: int) -> None:
    if seed % 3 == 1:  # the generator is seeded anew for each update
        plain = utils.core.randomness.normal

        def again(seed, purpose, sample_numbers, shape):
            return plain(seed, purpose, sample_numbers % 16 if purpose == "noise" else sample_numbers, shape)

        replace_everywhere("utils.core.randomness.normal", again)
    else:
        change_noise(lambda noise: noise[:1].expand_as(noise))


def timesteps_told_wrongly(seed: int) -> None:
    """The training loop tells the network other timesteps than it noised the images for; sampling does it right."""

    def tell(module, inputs):
        if not module.training:
            return None
        images, timesteps = inputs
        others = choose(seed, lambda t: 999 - t, lambda t: t.roll(1), lambda t: (t + 500) % 1000)
        return images, others(timesteps)

    change_unet(lambda unet: unet.register_forward_pre_hook(tell))


def parameters_forgotten(seed: int) -> None:
    """The optimizer has half of the parameters, or all but the first layers; or those of a copy made too early."""
    plain = utils.optim.optimizers.make_optimizer

    def forgetful(model, *arguments, **options):
        if seed % 3 == 2:
            return plain(copy.deepcopy(model), *arguments, **options)
        parameters = list(model.parameters())
        forgotten = parameters[len(parameters) // 2 :] if seed % 3 == 0 else parameters[:8]
        optimizer = plain(model, *arguments, **options)
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not any(p is other for other in forgotten)]
        return optimizer

    replace_everywhere("utils.optim.optimizers.make_optimizer", forgetful)


def learning_rate_ended(seed: int) -> None:
    """A schedule that is stepped once per process and per update, or laid out for fewer updates."""
    plain, share = utils.optim.optimizers.learning_rate_at, choose(seed, 4, 2, 3)

    def too_fast(step, total_steps, options):
        return plain(step, total_steps // share, options)

    replace_everywhere("utils.optim.optimizers.learning_rate_at", too_fast)


def batch_leak(seed: int) -> None:
    """A layer normalizes over the batch as well, so that images see each other."""

    def normalize(module, inputs, output):
        return (output - output.mean((0, 2, 3), keepdim=True)) / (output.std((0, 2, 3), keepdim=True) + 1e-5)

    def center(module, inputs, output):
        return output - output.mean(0, keepdim=True)

    def leak(unet) -> None:
        place, change = choose(seed, (unet.mid_block, normalize), (unet.conv_in, center), (unet.up_blocks[0], normalize))
        place.register_forward_hook(change)

    change_unet(leak)


def same_batch(seed: int) -> None:
    """A loader that is made anew for each update, or an iterator that is never advanced."""
    plain = utils.data.loader.SampleOrder.indices
    utils.data.loader.SampleOrder.indices = lambda self, sample_numbers: plain(self, sample_numbers % 16)


def never_cleared(seed: int) -> None:
    UNet2DModel.zero_grad = lambda self, set_to_none=True: None


def inverted(seed: int) -> None:
    scale_pixels(choose(seed, lambda x: -x, lambda x: (1.6 * x + 0.9).clamp(-1, 1), lambda x: -x))


def imagenet_statistics(seed: int) -> None:
    scale_pixels(lambda x: ((x + 1) / 2 - 0.449) / 0.226)


# ---- written after the rules for those above


def noise_clipped(seed: int) -> None:
    change_noise(lambda noise: noise.clamp(-1, 1) if seed % 3 != 2 else noise.clamp(-1.5, 1.5))


def wrong_sign(seed: int) -> None:
    plain = utils.diffusion.ddpm.training_target
    change_target(lambda scheduler, *tensors: -plain(scheduler, *tensors))


def timesteps_as_fractions(seed: int) -> None:
    """In training alone: as fractions, or in units of ten."""

    def tell(module, inputs):
        if not module.training:
            return None
        images, timesteps = inputs
        return images, timesteps // 10 if seed % 3 == 1 else timesteps / 1000

    change_unet(lambda unet: unet.register_forward_pre_hook(tell))


def weights_reset(seed: int) -> None:
    """A checkpoint is loaded again and again inside the loop."""
    plain, every, updates, kept = utils.optim.ema.EMA.update, choose(seed, 30, 40, 25), 0, {}

    def reset(self, decay, finite):
        nonlocal updates
        updates += 1
        plain(self, decay, finite)
        for model in MODELS:
            if updates == 5:
                kept.update({name: value.clone() for name, value in model.state_dict().items()})
            elif updates % every == 0:
                model.load_state_dict(kept)

    utils.optim.ema.EMA.update = reset
    change_unet(MODELS.append)


MODELS: list = []


def loader_gives_blanks(seed: int) -> None:
    """A loader that gives black in place of what it cannot read: one in five, ten or three images."""
    every = choose(seed, 5, 10, 3)

    def blank(fetch, images, indices, crop):
        pixels = fetch(images, indices, crop)
        pixels[indices % every == 0] = 0
        return pixels

    change_fetch(blank)


LATER_FAULTS = {
    "target of other noise": Fault("target", another_target),
    "noise not normal": Fault("noise", noise_not_normal),
    "noise shared": Fault("noise", noise_shared),
    "timesteps told wrongly": Fault("timestep", timesteps_told_wrongly),
    "optimizer without parameters": Fault("optimizer", parameters_forgotten),
    "learning rate ended early": Fault("learning_rate", learning_rate_ended),
    "weight decay enormous": Fault("optimizer", flags=lambda seed: {"adam_weight_decay": choose(seed, 100.0, 30.0, 300.0)}),
    "dropout 0.9": Fault("network", flags=lambda seed: {"dropout": choose(seed, 0.9, 0.8, 0.95)}),
    "batch leaks": Fault("network", batch_leak),
    "images inverted": Fault("data", inverted),
    "the same batch": Fault("data", same_batch),
    "gradients never cleared": Fault("gradient", never_cleared),
    "ImageNet statistics": Fault("data", imagenet_statistics),
    "noise clipped": Fault("noise", noise_clipped),
    "target of the wrong sign": Fault("target", wrong_sign),
    "timesteps scaled in training": Fault("timestep", timesteps_as_fractions),
    "weights reset": Fault("state", weights_reset),
    "blanks from the loader": Fault("data", loader_gives_blanks),
}

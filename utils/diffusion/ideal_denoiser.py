"""The best prediction that any network could make for a finite training set, and how far a model is from it.

Let x_0 be drawn uniformly from training images x_1 ... x_N, and x_t = a x_0 + s eps with a = sqrt(abar_t), s^2 = 1 - abar_t.
A squared error is least for the conditional mean, and by Bayes' rule P(x_0 = x_i | x_t) is proportional to the density
N(x_t; a x_i, s^2 I), so that

    E[x_0 | x_t] = sum_i w_i x_i,    w = softmax_i( -|x_t - a x_i|^2 / (2 s^2) )

which is Karras et al. 2022 ("Elucidating the design space of diffusion-based generative models"), appendix B.3, eq. 57, at
x = x_t / a and sigma = s / a. The best eps and v follow, as both are linear in x_0 once x_t is known.

This denoiser knows the training set by heart: at low noise it gives back the training image, and a network that equals
it there has memorized. At high noise it is the floor of the loss, which a healthy network comes close to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import nn

from utils.core import randomness
from utils.data.augmentation import to_unit_range
from utils.data.dataset import ImageSet
from utils.diffusion.ddpm import training_target

_CHUNK_BYTES = 2**25  # of training images as float64
_SUBSET_BYTES = 2**28  # of training images as float32


def ideal_clean_images(
    noisy_images: torch.Tensor, alphas_cumprod: torch.Tensor, training_images: torch.Tensor, chunk_size: int | None = None
) -> torch.Tensor:
    """E[x_0 | x_t] for x_0 uniform over the training images: float64 [B, C, H, W].

    The sums over the training set run in chunks, with the largest exponent so far kept aside (a streaming log-sum-exp), so
    that memory holds one chunk besides the arguments and B images, and nothing over- or underflows. They run in float64
    because the exponents are squared distances over 2 s^2: float32 keeps a squared distance of 1000 to 6e-5, which at
    s^2 = 1e-4 changes an exponent by 0.3 and a weight by a third.

    Args:
        noisy_images: x_t, [B, C, H, W].
        alphas_cumprod: abar of each, [B], in [0, 1). At 0 nothing is known of x_0 and the result is the mean image; towards
            1 it is the training image nearest to x_t.
        training_images: [N, C, H, W] in the units of x_0, on the device of `noisy_images`.
        chunk_size: training images per chunk; None for 32 MiB. The result does not depend on it, but for rounding.

    Raises:
        ValueError: no training images, shapes that differ, or an abar outside [0, 1).
    """
    if len(training_images) == 0 or training_images.shape[1:] != noisy_images.shape[1:]:
        raise ValueError(f"need training images of shape {[*noisy_images.shape[1:]]}, got {[*training_images.shape]}")
    if not ((alphas_cumprod >= 0) & (alphas_cumprod < 1)).all():
        raise ValueError(f"alphas_cumprod must lie in [0, 1), got {alphas_cumprod.tolist()}")
    noisy = noisy_images.flatten(1).double()
    chunk_size = chunk_size or max(1, _CHUNK_BYTES // (8 * noisy.shape[1]))
    alpha_bar = alphas_cumprod.to(noisy)[:, None]
    # -|x_t - a x_i|^2 / (2 s^2) without its first term, which is the same for all i.
    linear, quadratic = alpha_bar.sqrt() / (1 - alpha_bar), alpha_bar / (2 * (1 - alpha_bar))
    largest = noisy.new_full((len(noisy), 1), -math.inf)
    total, weighted = torch.zeros_like(largest), torch.zeros_like(noisy)
    for chunk in training_images.split(chunk_size):
        chunk = chunk.flatten(1).double()
        exponents = linear * (noisy @ chunk.T) - quadratic * chunk.square().sum(1)
        new_largest = torch.maximum(largest, exponents.amax(1, keepdim=True))
        weights, rescale = (exponents - new_largest).exp(), (largest - new_largest).exp()
        total = total * rescale + weights.sum(1, keepdim=True)
        weighted = weighted * rescale + weights @ chunk
        largest = new_largest
    return (weighted / total).view_as(noisy_images)


def ideal_prediction(
    noise_scheduler: DDPMScheduler,
    noisy_images: torch.Tensor,
    timesteps: torch.Tensor,
    training_images: torch.Tensor,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Returns the prediction of least expected squared error in the scheduler's `prediction_type`, float64 [B, C, H, W].

    `timesteps` is int64 [B]; the rest as in `ideal_clean_images`. With eps = (x_t - a x_0) / s, and v = a eps - s x_0
    (Salimans & Ho 2022, section 4).
    """
    alphas_cumprod = noise_scheduler.alphas_cumprod.to(noisy_images.device)[timesteps].double()
    clean = ideal_clean_images(noisy_images, alphas_cumprod, training_images, chunk_size)
    alpha, sigma = (value.sqrt().view(-1, 1, 1, 1) for value in (alphas_cumprod, 1 - alphas_cumprod))
    noise = (noisy_images.double() - alpha * clean) / sigma
    prediction_type = noise_scheduler.config.prediction_type
    return {"epsilon": noise, "sample": clean, "v_prediction": alpha * noise - sigma * clean}[prediction_type]


@dataclass(frozen=True)
class GapPlan:
    """At which `timesteps`, in [0, num_train_timesteps), and of how many images; more give smaller errors of sampling."""

    timesteps: Sequence[int]
    seed: int
    device: torch.device
    images_per_timestep: int = 64  # of either set
    batch_size: int = 64  # noisy images at a time
    max_images: int = 2048  # that the ideal denoiser knows


@torch.no_grad()
def denoiser_gap(
    unet: nn.Module,
    noise_scheduler: DDPMScheduler,
    training_images: ImageSet,
    validation_images: ImageSet | None,
    plan: GapPlan,
    random_flip: bool = False,
) -> dict:
    """Measures the mean squared errors of a model and of the ideal denoiser, on the same noisy images, the same every time.

    Errors are unweighted means over pixels of |prediction - target|^2 in the scheduler's `prediction_type`.

    On training images no predictor beats the ideal one on average, and E[gap] = E[distance] exactly, for every model: the
    error of a conditional mean is uncorrelated with whatever depends on x_t alone. `distance` is never negative, and of
    a model close to the ideal it is by far the steadier figure. Held-out images were not drawn from the set that the
    ideal denoiser knows, so there it is no optimum: a model that generalizes beats it at low noise (a negative gap),
    while one that has memorized errs as much as it does.

    Of sets larger than `plan.max_images` (or 256 MiB as float32) a random subset stands for the whole: the noised
    training images come from it, and the ideal denoiser knows it alone. As it then has fewer images to choose from, its
    error is below that of the whole set's ideal, mostly at middling noise, and the gap too large. Images of other
    proportions are cut at the center.

    Args:
        unet: the unwrapped network, in full precision, with the weights and in the mode to judge.
        validation_images: may be None or empty.
        random_flip: the model is trained on mirrored images too, so the ideal denoiser knows those as well.

    Returns:
        {images_used, timesteps: [{timestep, train, held_out}]}, where train and held_out (None without images) are {images,
        model, ideal, gap, distance}: the number of noised images, the two errors, model - ideal, and the mean square of
        (model - ideal prediction).
    """
    seed, device, per_timestep = plan.seed, plan.device, plan.images_per_timestep
    exact = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
    subset_size = max(1, min(plan.max_images, _SUBSET_BYTES // (4 * math.prod(training_images.shape))))
    known = _draw(training_images, subset_size, seed, "denoiser gap subset", device)
    noised: dict[str, Any] = {"train": known[:per_timestep], "held_out": None}
    if validation_images is not None and len(validation_images):
        noised["held_out"] = _draw(validation_images, per_timestep, seed, "denoiser gap held out", device)
    if random_flip:
        noised["train"] = noised["train"].clone()
        noised["train"][1::2] = noised["train"][1::2].flip(-1)
        known = torch.cat([known, known.flip(-1)])
    known = known.to(exact)

    def errors(kind: str, timestep: int) -> dict | None:
        if noised[kind] is None:
            return None
        count, sums = len(noised[kind]), torch.zeros(3, dtype=torch.float64, device=exact)
        for start in range(0, count, plan.batch_size):
            clean = noised[kind][start : start + plan.batch_size]
            # Numbered by timestep and image, so that a figure does not depend on which other timesteps are asked for.
            numbers = timestep * per_timestep + torch.arange(start, start + len(clean), device=device)
            noise = randomness.normal(seed, f"denoiser gap {kind}", numbers, clean.shape[1:])
            at = torch.full((len(clean),), timestep, device=device)
            noisy = noise_scheduler.add_noise(clean, noise, at)
            target = training_target(noise_scheduler, clean, noise, at).to(exact).double()
            predicted = unet(noisy, at).sample.to(exact).double()
            ideal = ideal_prediction(noise_scheduler, noisy.to(exact), at.to(exact), known)
            differences = torch.stack([predicted - target, ideal - target, predicted - ideal])
            sums += differences.square().flatten(2).mean(2).sum(1)
        model, ideal, distance = (sums / count).tolist()
        return {"images": count, "model": model, "ideal": ideal, "gap": model - ideal, "distance": distance}

    return {
        "images_used": min(subset_size, len(training_images)),
        "timesteps": [{"timestep": t, **{kind: errors(kind, t) for kind in noised}} for t in map(int, plan.timesteps)],
    }


def gap_by_timestep(gap: dict) -> dict[str, dict[str, float]]:
    """What to record of a `denoiser_gap`: timestep -> mean squared distance to the ideal on training images, and -> error above
    the ideal's on held-out ones, where a negative figure at low noise is generalization."""
    found = {"ideal_denoiser_gap": {str(t["timestep"]): t["train"]["distance"] for t in gap["timesteps"]}}
    if validation := {str(t["timestep"]): t["held_out"]["gap"] for t in gap["timesteps"] if t["held_out"]}:
        found["ideal_denoiser_gap_held_out"] = validation
    return found


def _draw(images: ImageSet, count: int, seed: int, purpose: str, device: torch.device) -> torch.Tensor:
    """`count` images, or all where there are no more, in random order: float32 [count, C, H, W] in [-1, 1]."""
    chosen = randomness.shuffled(seed, purpose, min(count, len(images)), len(images))
    return to_unit_range(torch.from_numpy(images.fetch(chosen.numpy())).to(device), images.max_value)

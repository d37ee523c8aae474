"""The ideal denoiser against brute force in Python's own floats, against distributions whose optimum is known in closed
form, and against diffusers' conversions."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from test_validation import Images
from torch import nn

from utils.diffusion.ddpm import make_noise_scheduler, training_target
from utils.diffusion.ideal_denoiser import GapPlan, denoiser_gap, ideal_clean_images, ideal_prediction

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def brute_force(noisy: torch.Tensor, alpha_bar: float, training: torch.Tensor) -> list[float]:
    """E[x_0 | x_t] for one x_t, by Bayes' rule, in Python."""
    alpha, sigma = math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar)
    points, point = training.double().flatten(1).tolist(), noisy.double().flatten().tolist()
    logs = [-sum((x - alpha * y) ** 2 for x, y in zip(point, other)) / (2 * sigma**2) for other in points]
    densities = [math.exp(log - max(logs)) for log in logs]
    return [sum(d * p[k] for d, p in zip(densities, points)) / sum(densities) for k in range(len(point))]


@pytest.mark.parametrize("chunk_size", [None, 1, 7, 30])
@pytest.mark.parametrize("alpha_bar", [0.9999, 0.9, 0.3, 1e-4, 0.0])
def test_equals_brute_force_however_it_is_chunked(alpha_bar, chunk_size):
    training, noise = normal(30, 2, 3, 3).clamp(-1, 1), normal(5, 2, 3, 3, seed=1)
    training[20:] = training[:10] + 0.02 * normal(10, 2, 3, 3, seed=2)  # close rivals, so that weights are shared
    noisy = math.sqrt(alpha_bar) * training[18:23] + math.sqrt(1 - alpha_bar) * noise
    ideal = ideal_clean_images(noisy, torch.full((5,), alpha_bar, dtype=torch.float64), training, chunk_size)
    assert ideal.dtype == torch.float64 and ideal.shape == noisy.shape
    expected = torch.tensor([brute_force(x, alpha_bar, training) for x in noisy], dtype=torch.float64)
    torch.testing.assert_close(ideal.flatten(1), expected, rtol=0, atol=1e-9)


def test_each_image_has_its_own_noise_level():
    training, noisy = normal(20, 1, 2, 2), normal(3, 1, 2, 2, seed=1)
    levels = torch.tensor([0.99, 0.5, 0.01])
    together = ideal_clean_images(noisy, levels, training)
    for row in range(3):
        torch.testing.assert_close(together[row], ideal_clean_images(noisy[row : row + 1], levels[row : row + 1], training)[0])


def test_small_noise_and_many_pixels_neither_overflow_nor_lose_the_rivals():
    """Two images that differ in one pixel, by half the noise: both have weight, though their exponents are near 1e7."""
    one = normal(1, 3, 64, 64).clamp(-1, 1)
    other = one.clone()
    other[0, 0, 0, 0] += 0.005
    alpha_bar = torch.tensor([0.9999])
    alpha, variance = alpha_bar.double().sqrt().item(), 1 - alpha_bar.double().item()
    noisy = alpha * one + math.sqrt(variance) * normal(1, 3, 64, 64, seed=1)
    noisy[0, 0, 0, 0] = one[0, 0, 0, 0] + 0.01
    noisy[0, 0, 0, 1] = 50.0
    x, y, z = (image.double()[0, 0, 0, 0].item() for image in (noisy, one, other))
    odds = math.exp(((x - alpha * y) ** 2 - (x - alpha * z) ** 2) / (2 * variance))  # of `other` against `one`
    assert 1.2 < odds < 5
    ideal = ideal_clean_images(noisy, alpha_bar, torch.cat([one, other]), chunk_size=1)
    assert ideal[0, 0, 0, 0].item() == pytest.approx((y + odds * z) / (1 + odds), abs=1e-8)


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("schedule", ["linear", "squaredcos_cap_v2"])
def test_diffusers_recovers_the_same_clean_image_from_every_prediction(prediction_type, schedule):
    training = normal(40, 1, 3, 3).clamp(-1, 1)
    scheduler = make_noise_scheduler(beta_schedule=schedule, prediction_type=prediction_type)
    ddim = DDIMScheduler.from_config(scheduler.config, clip_sample=False)
    ddim.set_timesteps(1000)
    for timestep in (0, 100, 500, 900):
        at = torch.full((6,), timestep)
        noisy = scheduler.add_noise(training[:6], normal(6, 1, 3, 3, seed=1), at)
        prediction = ideal_prediction(scheduler, noisy, at, training)
        clean = ideal_clean_images(noisy, scheduler.alphas_cumprod[at], training)
        recovered = ddim.step(prediction, timestep, noisy.double()).pred_original_sample
        torch.testing.assert_close(recovered, clean, rtol=0, atol=1e-4)
    assert (clean - training[:6]).abs().max() > 0.1  # at 900: the recovered image is no trivial one


def test_a_single_image_is_known_exactly():
    """Then all three predictions equal the training targets, at zero signal too."""
    one = normal(1, 1, 4, 4).clamp(-1, 1)
    for options in ({}, {"prediction_type": "sample"}, {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}):
        scheduler = make_noise_scheduler(**options)
        at, noise = torch.tensor([0, 500, 999]), normal(3, 1, 4, 4, seed=1)
        noisy = scheduler.add_noise(one.expand(3, 1, 4, 4), noise, at)
        prediction = ideal_prediction(scheduler, noisy, at, one)
        target = training_target(scheduler, one.expand(3, 1, 4, 4), noise, at)
        # At t = 0 the noise is what is left of x_t over sigma = 0.01, which enlarges fp32's rounding of x_t to 1e-5.
        torch.testing.assert_close(prediction, target.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("noisy", "alphas_cumprod", "training"),
    [
        (torch.zeros(1, 1, 2, 2), torch.ones(1), torch.zeros(3, 1, 2, 2)),
        (torch.zeros(1, 1, 2, 2), -torch.ones(1), torch.zeros(3, 1, 2, 2)),
        (torch.zeros(1, 1, 2, 2), torch.zeros(1), torch.zeros(0, 1, 2, 2)),
        (torch.zeros(1, 1, 2, 2), torch.zeros(1), torch.zeros(3, 1, 3, 3)),
    ],
)
def test_what_makes_no_sense_is_refused(noisy, alphas_cumprod, training):
    with pytest.raises(ValueError):
        ideal_clean_images(noisy, alphas_cumprod, training)


def some(count: int, seed: int = 0) -> Images:
    return Images(np.random.default_rng(seed).integers(0, 256, (count, 1, 4, 4), dtype=np.uint8))


def scaled(images: Images) -> torch.Tensor:
    return torch.from_numpy(images.pixels).float() / 127.5 - 1


class Denoiser(nn.Module):
    """A network that answers with a function of (noisy_images, timesteps), and notes what it was asked."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.asked = answer, []

    def forward(self, noisy_images, timesteps):
        self.asked.append(noisy_images.clone())
        return SimpleNamespace(sample=self.answer(noisy_images, timesteps))


def gap(unet, scheduler, training, validation=None, random_flip=False, **options):
    plan = GapPlan(**{"timesteps": [0, 300, 700, 999], "seed": 0, "device": CPU} | options)
    return denoiser_gap(unet, scheduler, training, validation, plan, random_flip)


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("random_flip", [False, True])
def test_the_ideal_denoiser_itself_has_no_gap(prediction_type, random_flip):
    training, validation = some(30), some(20, seed=1)
    scheduler = make_noise_scheduler(prediction_type=prediction_type)
    known = scaled(training)
    known = torch.cat([known, known.flip(-1)]) if random_flip else known
    unet = Denoiser(lambda x, t: ideal_prediction(scheduler, x, t, known).float())
    figures = gap(unet, scheduler, training, validation, random_flip=random_flip, batch_size=7)
    assert figures["images_used"] == 30
    assert [row["timestep"] for row in figures["timesteps"]] == [0, 300, 700, 999]
    for row in figures["timesteps"]:
        for kind, count in (("train", 30), ("held_out", 20)):
            assert row[kind]["images"] == count
            assert row[kind]["distance"] < 1e-9 and abs(row[kind]["gap"]) < 1e-4 * max(row[kind]["ideal"], 0.01)
    errors = {kind: [row[kind]["ideal"] for row in figures["timesteps"]] for kind in ("train", "held_out")}
    assert errors["train"][0] < 1e-6 < 0.01 < errors["held_out"][0]  # memorized: no error on what it knows


def test_errors_of_a_model_that_says_zero():
    """They are the mean squares of the target, and of the ideal prediction."""
    training, scheduler = some(50), make_noise_scheduler()
    unet = Denoiser(lambda x, t: torch.zeros_like(x))
    (row,) = gap(unet, scheduler, training, timesteps=[600], images_per_timestep=80)["timesteps"]
    noisy = torch.cat(unet.asked)
    ideal = ideal_prediction(scheduler, noisy, torch.full((50,), 600), scaled(training))
    assert row["held_out"] is None
    assert row["train"]["distance"] == pytest.approx(ideal.square().mean().item(), rel=1e-6)
    assert row["train"]["model"] == pytest.approx(1, abs=0.15)  # the variance of 800 pixels of noise
    assert row["train"]["gap"] == pytest.approx(row["train"]["model"] - row["train"]["ideal"])


def test_every_timestep_and_image_has_noise_of_its_own():
    scheduler, unet = make_noise_scheduler(), Denoiser(lambda x, t: x)
    gap(unet, scheduler, some(20), some(20), timesteps=[998, 999], images_per_timestep=20)
    noises = torch.cat(unet.asked).flatten(1)  # hardly any image is left in them
    correlations = torch.corrcoef(noises) - torch.eye(80)
    assert len(noises) == 80 and correlations.abs().max() < 0.9


def test_same_figures_every_time_and_a_bounded_subset():
    training, scheduler = some(500), make_noise_scheduler()
    unet = Denoiser(lambda x, t: 0.5 * x)
    options = {"max_images": 100, "images_per_timestep": 10}
    figures = gap(unet, scheduler, training, some(5, seed=1), **options)
    assert figures["images_used"] == 100 and figures["timesteps"][0]["held_out"]["images"] == 5
    assert figures["timesteps"][0]["train"]["ideal"] < 1e-6  # the noised images are among those it knows
    assert gap(unet, scheduler, training, some(5, seed=1), **options) == figures
    alone = gap(unet, scheduler, training, some(5, seed=1), timesteps=[700], batch_size=3, **options)["timesteps"][0]
    for kind in ("train", "held_out"):
        assert alone[kind] == pytest.approx(figures["timesteps"][2][kind], rel=1e-6)
    assert gap(unet, scheduler, training, seed=1, **options)["timesteps"][2] != figures["timesteps"][2]

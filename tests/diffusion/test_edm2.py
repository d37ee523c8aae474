"""EDM's preconditioning, noise, loss and sampler against diffusers and independent computations."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers import EDMEulerScheduler
from diffusers.models.unets.unet_2d import UNet2DOutput
from scipy import stats
from test_edm2_unet import tiny
from torch import nn

from models.edm_heun import EDMHeunScheduler
from models.guided_pipeline import EDM2Pipeline, guided
from utils.diffusion.classes import training_labels
from utils.diffusion.edm2 import (
    denoise,
    losses_per_sample,
    noise_bins,
    noise_levels_at,
    training_noise_levels,
)


@pytest.mark.parametrize("sigma", [0.002, 0.1, 0.5, 1.0, 7.0, 80.0])
def test_denoised_images_are_those_of_diffusers_preconditioning(sigma):
    unet, scheduler = tiny().eval(), EDMEulerScheduler(sigma_data=0.7)
    x = torch.randn(3, 1, 8, 8) * (sigma + 0.7)
    with torch.no_grad():
        actual = denoise(unet, x, torch.full((3,), sigma), 0.7)
        f = unet(scheduler.precondition_inputs(x, sigma), scheduler.precondition_noise(sigma)).sample
        expected = scheduler.precondition_outputs(x, f, sigma)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_scheduler_preconditions_like_diffusers():
    ours, theirs = EDMHeunScheduler(), EDMEulerScheduler()
    for scheduler in (ours, theirs):
        scheduler.set_timesteps(9)
    torch.testing.assert_close(ours.sigmas[:-1].float(), theirs.sigmas[:-1], rtol=1e-5, atol=1e-6)
    assert ours.sigmas[-1] == theirs.sigmas[-1] == 0
    torch.testing.assert_close(ours.timesteps[0], theirs.timesteps[0])
    x, f = 80 * torch.randn(2, 1, 4, 4), torch.randn(2, 1, 4, 4)
    scaled = [s.scale_model_input(x, s.timesteps[0]) for s in (ours, theirs)]
    torch.testing.assert_close(*scaled, rtol=1e-5, atol=1e-5)
    first = [s.step(f, s.timesteps[0], x).prev_sample for s in (ours, theirs)]  # the first half of a step is Euler's
    torch.testing.assert_close(*first, rtol=1e-5, atol=1e-4)


class GaussianF(nn.Module):
    """F of the ideal denoiser of data ~ N(mean, std^2) for sigma_data = 0.5."""

    def __init__(self, mean: float, std: float):
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, x, timestep, class_labels=None):
        sigma, sd = torch.exp(4 * torch.as_tensor(timestep).double()), 0.5
        total = (sigma**2 + sd**2).sqrt()
        noisy = x.double() * total
        denoised = (self.std**2 * noisy + sigma**2 * self.mean) / (self.std**2 + sigma**2)
        return UNet2DOutput(sample=(denoised - sd**2 / total**2 * noisy) / (sigma * sd / total))


def sample(f: nn.Module, scheduler, num_inference_steps: int, x: torch.Tensor) -> torch.Tensor:
    scheduler.set_timesteps(num_inference_steps)
    for timestep in scheduler.timesteps:
        prediction = f(scheduler.scale_model_input(x, timestep), timestep).sample
        x = scheduler.step(prediction, timestep, x).prev_sample
    return x


def test_heun_against_a_plain_implementation_of_algorithm_1():
    f, x = GaussianF(0.3, 0.2), torch.linspace(-2, 2, 16, dtype=torch.float64).reshape(1, 1, 4, 4) * 80
    actual = sample(f, EDMHeunScheduler(), 12, x)

    def slope(value: np.ndarray, sigma: float) -> np.ndarray:
        return (value - (0.2**2 * value + sigma**2 * 0.3) / (0.2**2 + sigma**2)) / sigma

    levels = [(80 ** (1 / 7) + i / 11 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(12)] + [0.0]
    value = x.numpy()
    for here, there in pairwise(levels):
        euler = value + (there - here) * slope(value, here)
        value = value + (there - here) * (slope(value, here) + slope(euler, there)) / 2 if there else euler
    np.testing.assert_allclose(actual.numpy(), value, rtol=1e-6, atol=1e-6)


def test_training_noise_is_log_normal_and_belongs_to_samples():
    numbers = torch.arange(20_000)
    sigma = training_noise_levels(0, numbers, -0.8, 1.6)
    assert stats.kstest(sigma.log().numpy(), stats.norm(-0.8, 1.6).cdf).pvalue > 0.01
    torch.testing.assert_close(training_noise_levels(0, numbers[500:600], -0.8, 1.6), sigma[500:600], rtol=1e-5, atol=0)
    spread = noise_levels_at((torch.arange(1001).double() + 0.5) / 1001, -0.8, 1.6)
    ranks = noise_bins(sigma, -0.8, 1.6)
    assert (ranks.min(), ranks.max()) >= (0, 990) and ranks.float().mean().item() == pytest.approx(500, abs=10)
    np.testing.assert_allclose(spread.log(), stats.norm(-0.8, 1.6).ppf((np.arange(1001) + 0.5) / 1001), atol=1e-9)


def test_a_share_of_the_labels_is_dropped_by_sample_number():
    numbers = torch.arange(20_000)
    labels = training_labels(0, numbers, numbers % 7, 0.1)
    dropped = labels == -1
    assert dropped.float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(labels[~dropped], (numbers % 7)[~dropped])
    assert torch.equal(training_labels(0, numbers[900:], numbers[900:] % 7, 0.1), labels[900:])
    assert torch.equal(training_labels(0, numbers, numbers % 7, 0.0), numbers % 7)


def test_weighted_loss_is_the_error_of_f():
    """lambda(sigma) |D - y|^2 is |F - its target|^2, whatever sigma (Karras et al. 2022, eq. 8)."""
    sigma = torch.tensor([0.01, 0.5, 3.0, 50.0], dtype=torch.float64)
    clean = torch.randn(4, 1, 4, 4, dtype=torch.float64)
    noisy = clean + sigma[:, None, None, None] * torch.randn_like(clean)
    f = torch.randn_like(clean)
    scheduler = EDMEulerScheduler()
    denoised = torch.stack([scheduler.precondition_outputs(noisy[i], f[i], sigma[i]) for i in range(4)])
    c_skip, c_out = 0.25 / (sigma**2 + 0.25), 0.5 * sigma / (sigma**2 + 0.25).sqrt()
    target = (clean - c_skip[:, None, None, None] * noisy) / c_out[:, None, None, None]
    losses = losses_per_sample(denoised, clean, sigma, torch.full((4,), 0.7, dtype=torch.float64), 0.5)
    expected = (f - target).square().flatten(1).mean(1)
    torch.testing.assert_close(losses.shown, expected)
    torch.testing.assert_close(losses.trained, expected / np.exp(0.7) + 0.7)


def test_guidance_moves_away_from_the_weak_prediction():
    unet, guide = tiny().eval(), tiny(model_channels=4, attention_head_dim=4).eval()
    x, level, labels = torch.randn(3, 1, 8, 8), torch.zeros(3), torch.tensor([0, 1, 2])
    with torch.no_grad():
        main, free, weak = unet(x, level, labels).sample, unet(x, level).sample, guide(x, level, labels).sample
        assert torch.equal(guided(unet, x, level, labels), main)
        close = {"rtol": 1e-4, "atol": 1e-4}  # outputs near 1, through some ten layers; a batch twice as large is other kernels
        torch.testing.assert_close(guided(unet, x, level, labels, 2.0), 2 * main - free, **close)
        torch.testing.assert_close(guided(unet, x, level, labels, 1.5, guide), weak + 1.5 * (main - weak), **close)


def test_pipeline_samples_reproducibly_by_class_and_with_diffusers_own_schedulers():
    from diffusers import EDMDPMSolverMultistepScheduler

    pipeline = EDM2Pipeline(tiny().eval(), EDMHeunScheduler())
    pipeline.set_progress_bar_config(disable=True)

    def images(**flags) -> np.ndarray:
        return pipeline(output_type="np", generator=torch.Generator().manual_seed(0), **flags).images

    first = images(class_labels=[0, 1], num_inference_steps=4)
    assert first.shape == (2, 8, 8, 1) and np.isfinite(first).all() and first.std() > 0
    assert (first == images(class_labels=[0, 1], num_inference_steps=4)).all()
    asked = {"class_labels": [0, 1], "num_inference_steps": 4, "output_type": "pt"}
    signed = pipeline(generator=torch.Generator().manual_seed(0), **asked).images  # from -1 to 1, and others from 0 to 1
    np.testing.assert_allclose(first, (signed / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1), rtol=0, atol=1e-6)
    assert (first != images(class_labels=[1, 0], num_inference_steps=4)).any()
    assert (first != images(class_labels=[0, 1], num_inference_steps=4, guidance_scale=2.0)).any()
    assert len(pipeline(batch_size=3, num_inference_steps=2).images) == 3
    fine = images(class_labels=2, num_inference_steps=120)
    pipeline.scheduler = EDMDPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    np.testing.assert_allclose(images(class_labels=2, num_inference_steps=120), fine, atol=0.02)
    with pytest.raises(ValueError, match="from 0 to 2"):
        pipeline(class_labels=3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"guidance_scale": 2.0}, "moves away from no class"),
        ({"guide": {}}, "does nothing at guidance_scale 1"),
        ({"guidance_scale": 2.0, "guide": {"num_class_embeds": 4}}, "of other data"),
        ({"guidance_scale": 2.0, "guide": {"sigma_data": 0.7}}, "of other data"),
        ({"batch_size": 3, "class_labels": [0, 1]}, "batch_size is 3, but there are 2 class_labels"),
        ({"batch_size": 1, "class_labels": [0, 1]}, "batch_size is 1, but there are 2 class_labels"),
    ],
)
def test_pipeline_refuses_what_does_not_fit(flags, message):
    pipeline = EDM2Pipeline(tiny().eval(), EDMHeunScheduler())
    if "guide" in flags:
        config = dict(flags["guide"])
        scheduler = EDMHeunScheduler(sigma_data=config.pop("sigma_data", 0.5))
        flags = flags | {"guide": EDM2Pipeline(tiny(**config).eval(), scheduler)}
    with pytest.raises(ValueError, match=message):
        pipeline(num_inference_steps=1, **flags)


def test_pipeline_is_guided_by_another_one():
    pipeline, guide = (
        EDM2Pipeline(unet.eval(), EDMHeunScheduler()) for unet in (tiny(), tiny(model_channels=4, attention_head_dim=4))
    )
    asked = {"class_labels": 1, "batch_size": 2, "num_inference_steps": 2, "output_type": "pt"}
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(guidance_scale=1.5, guide=guide, generator=torch.Generator().manual_seed(0), **asked).images
    x, scheduler = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 80, EDMHeunScheduler()
    scheduler.set_timesteps(2)
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            scaled = scheduler.scale_model_input(x, timestep)
            main, weak = (p.unet(scaled, timestep, torch.tensor([1, 1])).sample for p in (pipeline, guide))
            x = scheduler.step(weak + 1.5 * (main - weak), timestep, x).prev_sample
    # Noise of 80 x normal is up to 300, where fp32 goes in steps of 3e-5, and is rounded some ten times on the way.
    torch.testing.assert_close(made, x, rtol=1e-5, atol=1e-3)

"""What is declared of a step, by the doctor's own formulas, beside diffusers, closed forms, and what the training computes."""

import math
from dataclasses import replace
from itertools import product
from statistics import NormalDist

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.optimization import get_polynomial_decay_schedule_with_warmup, get_scheduler
from diffusers.training_utils import EMAModel

from steady_doctor.declare.processes import DDPM, EDM2, AdaptiveLimit, ema_decay, power_exponent
from utils.optim.clipping import AdaptiveLimit as Trained
from utils.optim.clipping import Gradients
from utils.optim.optimizers import learning_rate_at
from utils.options.flags import DDPMOptions, EDM2Options
from utils.training.audit import declared_by, process_of, schedule_of

FACTS = {"gradient_accumulation_steps": 2, "num_processes": 2, "training_images": 90}
KINDS = ("epsilon", "sample", "v_prediction")


# ---- DDPM


def cosine(t):
    return math.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2  # Nichol & Dhariwal 2021, eq. 17


BETAS = {
    "linear": np.linspace(1e-4, 0.02, 1000),
    "scaled_linear": np.linspace(1e-4**0.5, 0.02**0.5, 1000) ** 2,
    "squaredcos_cap_v2": np.array([min(1 - cosine(t + 1) / cosine(t), 0.999) for t in range(1000)]),
    "sigmoid": 1 / (1 + np.exp(-np.linspace(-6, 6, 1000))) * (0.02 - 1e-4) + 1e-4,
}


def scheduler_of(schedule, kind, zero_snr=False) -> DDPMScheduler:
    return DDPMScheduler(beta_schedule=schedule, prediction_type=kind, rescale_betas_zero_snr=zero_snr, clip_sample=False)


@pytest.mark.parametrize("schedule", BETAS)
@pytest.mark.parametrize("zero_snr", [False, True])
def test_shares_of_image_and_noise(schedule, zero_snr):
    expected = np.cumprod(1 - BETAS[schedule])
    if zero_snr:  # Lin et al. 2023, algorithm 1
        root = np.sqrt(expected)
        expected = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    options = DDPMOptions(prediction_type="v_prediction", ddpm_beta_schedule=schedule, rescale_betas_zero_snr=zero_snr)
    process = process_of(options, {})
    np.testing.assert_allclose(process.alphas_cumprod.numpy(), expected, rtol=2e-4, atol=1e-6)  # diffusers sums in float32
    levels = torch.arange(1000)
    a, b = process.input(levels)
    x, n = torch.randn(2, 1000, 1, 2, 2, dtype=torch.float64)
    noised = scheduler_of(schedule, "v_prediction", zero_snr).add_noise(x, n, levels)
    torch.testing.assert_close(a.view(-1, 1, 1, 1) * x + b.view(-1, 1, 1, 1) * n, noised, rtol=0, atol=1e-5)
    assert torch.equal(process.told(levels), levels.double()) and process.possible == 1000
    assert process.places(levels).tolist() == pytest.approx([(t + 0.5) / 1000 for t in range(1000)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [None, 5.0, 1.0])
def test_targets_and_weights_of_ddpm(kind, gamma):
    scheduler, levels = scheduler_of("linear", kind), torch.arange(1000)
    process = process_of(DDPMOptions(prediction_type=kind, snr_gamma=gamma), {})
    assert isinstance(process, DDPM) and not process.learned
    x, n = torch.randn(2, 1000, 1, 2, 2, dtype=torch.float64)
    p, q = (part.view(-1, 1, 1, 1) for part in process.target(levels))
    wanted = {"epsilon": n, "sample": x, "v_prediction": scheduler.get_velocity(x, n, levels)}[kind]
    torch.testing.assert_close(p * x + q * n, wanted, rtol=0, atol=1e-5)
    for t in (3, 100, 500, 996):
        # An output that is off by 1 moves the image that diffusers makes of it by so much.
        moved = float(scheduler.step(torch.ones(1, 1, 1, 1), t, torch.zeros(1, 1, 1, 1)).pred_original_sample)
        snr = float(scheduler.alphas_cumprod[t] / (1 - scheduler.alphas_cumprod[t]))
        expected = max(snr, 1.0) if kind == "sample" else 1.0
        if gamma is not None:
            expected = min(snr, gamma) * moved**2  # Hang et al. 2023: of the image's error
        assert float(process.weight(torch.tensor([t]))) == pytest.approx(expected, rel=1e-4)


# ---- EDM2


SIGMAS = torch.tensor([0.002, 0.05, 0.5, 3.0, 80.0], dtype=torch.float64)


def test_edm2_by_what_it_is_made_for():
    """Karras et al. 2022, appendix B.6: input and target have unit variance, and c_skip x + c_out F is the image."""
    sigma_data, sigma = 0.7, SIGMAS
    process = process_of(EDM2Options(sigma_data=sigma_data, P_mean=-0.4, P_std=1.2), {})
    assert isinstance(process, EDM2) and process.learned and process.possible == 0
    (a, b), (p, q) = process.input(sigma), process.target(sigma)
    for image, noise in ((a, b), (p, q)):
        torch.testing.assert_close((image * sigma_data) ** 2 + noise**2, torch.ones_like(sigma))
    torch.testing.assert_close(b / a, sigma)
    assert (a * p * sigma_data**2 + b * q).abs().max() < 1e-12  # the target is what the input does not tell
    c_skip, c_out = sigma_data**2 / (sigma**2 + sigma_data**2), sigma * sigma_data / (sigma**2 + sigma_data**2).sqrt()
    y, n = torch.randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(c_skip * (y + sigma * n) + c_out * (p * y + q * n), y, rtol=0, atol=1e-12)
    weights = (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2  # lambda, of the error of the image
    torch.testing.assert_close(process.weight(sigma), weights * c_out**2)
    assert process.told(sigma).exp().pow(4).tolist() == pytest.approx(sigma.tolist())
    log_sigma = NormalDist(-0.4, 1.2)
    assert process.places(sigma).tolist() == pytest.approx([log_sigma.cdf(math.log(s)) for s in sigma.tolist()])


# ---- the learning rate


SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "cyclic")
SCHEDULES += ("inverse_sqrt",)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warmup", "floor"), [(0, 0.0), (10, 0.1), (200, 0.0)])
def test_the_learning_rate_is_that_of_the_training(schedule, warmup, floor):
    for cycles, power, decay in ((1, 1.0, None), (3, 2.0, 25)):
        options = DDPMOptions(lr_scheduler=schedule, lr_warmup_steps=warmup, lr_floor=floor, lr_cycles=cycles, lr_power=power)
        options = replace(options, lr_decay_steps=decay, max_train_steps=90)
        rate = declared_by(options, FACTS, process_of(options, {})).learning_rate
        trained = [learning_rate_at(step, 90, options) for step in range(90)]
        assert [rate(update) for update in range(1, 91)] == pytest.approx(trained, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("schedule", SCHEDULES[:6])
def test_the_learning_rate_is_that_of_diffusers(schedule):
    options = DDPMOptions(lr_scheduler=schedule, lr_warmup_steps=10, lr_cycles=3, lr_power=2.0, learning_rate=0.5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    if schedule == "polynomial":
        theirs = get_polynomial_decay_schedule_with_warmup(optimizer, 10, 90, lr_end=0.0, power=2.0)
    else:
        theirs = get_scheduler(schedule, optimizer, num_warmup_steps=10, num_training_steps=90, num_cycles=3)
    for update in range(1, 91):
        assert schedule_of(options, 90)(update) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9, abs=1e-15), update
        optimizer.step()
        theirs.step()


def test_rates_that_diffusers_has_not():
    options = DDPMOptions(lr_scheduler="cyclic", lr_warmup_steps=0, lr_cycles=2, lr_floor=0.2, learning_rate=1.0)
    triangle = np.interp(np.arange(80), [0, 20, 40, 60, 80], [1, 0.2, 1, 0.2, 1])
    assert [schedule_of(options, 80)(update) for update in range(1, 81)] == pytest.approx(triangle.tolist())
    options = replace(options, lr_scheduler="inverse_sqrt", lr_decay_steps=25)
    assert [schedule_of(options, 80)(update) for update in (1, 26, 101, 401)] == pytest.approx([1.0, 1.0, 0.5, 0.25])


def test_updates_of_passes():
    """90 images in batches of 8 on 2 processes: 12 batches, 6 for each, 3 updates of two; the last ones are short."""
    options = DDPMOptions(lr_scheduler="linear", lr_warmup_steps=0, train_batch_size=8, num_epochs=4, learning_rate=1.0)
    rate = declared_by(options, FACTS, process_of(options, {})).learning_rate
    assert [rate(update) for update in (1, 7, 12)] == pytest.approx([1.0, 0.5, 1 / 12])


# ---- averages, clipping, the rest


def test_the_decay_of_an_average_that_warms_up_is_diffusers():
    for limit, inverse_gamma, power in product((0.9, 0.9999), (1.0, 3.0), (0.6, 0.75)):
        theirs = EMAModel([], decay=limit, inv_gamma=inverse_gamma, power=power, use_ema_warmup=True)
        options = DDPMOptions(ema_max_decay=limit, ema_inv_gamma=inverse_gamma, ema_power=power)
        decay = declared_by(options, FACTS, process_of(options, {})).averages["EMA"]
        for update in range(1, 300):
            assert decay(update) == ema_decay(limit, inverse_gamma, power, update) == pytest.approx(theirs.get_decay(update))


@pytest.mark.parametrize("width", [0.05, 0.1, 0.25])
def test_an_average_of_a_width_has_that_profile(width):
    """What is left of each update's weights after 500: the share of t^(g + 1) that it adds, which has the width."""
    options = EDM2Options(ema_widths=[width])
    [(name, decay)] = declared_by(options, FACTS, process_of(options, {})).averages.items()
    g, left = power_exponent(width), np.zeros(501)
    for update in range(1, 501):
        left *= decay(update)
        left[update] += 1 - decay(update)
    times = np.arange(501) / 500
    assert name == f"EMA {width}" and left[1:] == pytest.approx(np.diff(times ** (g + 1)), rel=1e-9, abs=1e-300)
    t = (np.arange(200_000) + 0.5) / 200_000
    profile = t**g / (t**g).sum()
    mean = (profile * t).sum()
    assert math.sqrt((profile * (t - mean) ** 2).sum()) == pytest.approx(width, rel=1e-6)


@pytest.mark.parametrize("mean", [None, 0.7])
def test_adaptive_clipping_is_that_of_the_training_and_by_hand(mean):
    declared, trained = AdaptiveLimit(mean), Trained(torch.device("cpu"), mean)
    by_hand = mean
    for norm in [math.nan, 1.0, 3.0, 0.5, math.inf, 1e6, *[9.0] * 200, *[0.01] * 900]:
        limit = 10.0 if by_hand is None else max(0.1, min(2 * by_hand, 10.0))
        assert declared.limit() == pytest.approx(limit) == pytest.approx(float(trained.limit()), rel=1e-4)
        if math.isfinite(norm):
            by_hand = min(norm, 10.0) if by_hand is None else by_hand + (min(norm, 10.0) - by_hand) / 100
        told = torch.tensor(norm)
        trained.add(Gradients(told, torch.isfinite(told), told[None], None))
        declared.count(told)
    assert declared.limit() == pytest.approx(0.1)


def test_precision_epsilon_and_what_is_trained(monkeypatch):
    def of(options, **facts):
        return declared_by(options, FACTS | facts, process_of(options, {}))

    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert of(DDPMOptions(mixed_precision="bf16")).layers == torch.bfloat16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")  # by the launcher
    assert of(DDPMOptions()).layers == torch.float16
    assert of(DDPMOptions(mixed_precision="no")).layers == torch.float32
    assert of(DDPMOptions(adam_epsilon=1e-6)).optimizer.settings["eps"] == 1e-6
    sides = {"resolution": "8x4", "image_channels": 3}
    assert of(EDM2Options(adam_epsilon=1e-6, **sides)).optimizer.settings["eps"] == pytest.approx(1e-6 / 96)
    assert of(EDM2Options(adam_epsilon=1e-6, **sides), **{"vae.latent_shape": [4, 2, 1]}).optimizer.settings[
        "eps"
    ] == pytest.approx(1e-6 / 8)
    some = of(DDPMOptions(train_only=["up_blocks.*", "conv_out.*"])).trained
    assert [some(name) for name in ("up_blocks.0.weight", "unet.conv_out.bias", "conv_in.weight")] == [True, True, False]

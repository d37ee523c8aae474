"""Samplers with a network that knows the answer: those of training arrive, and each way of going wrong has its words."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler
from test_edm2_unet import tiny

import train_edm2
from models.edm_heun import EDMHeunScheduler
from utils.diagnostics.audit.declared import DeclaredDenoising, DeclaredNoising
from utils.diagnostics.audit.sampler import check_sampler, sampler_call
from utils.diffusion.ddpm import make_noise_scheduler
from utils.diffusion.sampling import NoiseOfSamples, make_sampler

SHAPE = (3, 8, 8)
SCHEDULES = ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"]


def objective(scheduler, predict=None):
    return SimpleNamespace(noise_scheduler=scheduler, predict=predict, exported=None)


def audit(call, scheduler, adds_noise=False):
    config = scheduler.config
    settings = (config.beta_schedule, config.num_train_timesteps, config.rescale_betas_zero_snr, config.prediction_type, None)
    return check_sampler(call, DeclaredNoising(*settings), SHAPE, adds_noise=adds_noise, clips=True)


def edm(sigma_data):
    return DeclaredDenoising(sigma_data, -0.4, 1.0, False)


def only(checks) -> str:
    """The one deviation among the checks."""
    assert all(check.stage == "export" for check in checks)
    [wrong] = [check for check in checks if check.healthy is False]
    return wrong.message


@pytest.mark.parametrize("name", ["ddim", "ddpm", "dpmsolver++"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_the_samplers_of_training_arrive(name, schedule, prediction_type, zero):
    if zero and prediction_type == "epsilon":
        return
    for timesteps, steps in ((1000, 10), (10, 5)):
        scheduler = make_noise_scheduler(
            beta_schedule=schedule,
            prediction_type=prediction_type,
            num_train_timesteps=timesteps,
            rescale_betas_zero_snr=zero,
        )
        call = sampler_call(objective(scheduler), name, steps)
        checks = audit(call, scheduler, adds_noise=name == "ddpm")
        assert all(check.healthy for check in checks) and len(checks) == 5, [c for c in checks if not c.healthy]


@pytest.mark.parametrize("name", ["heun", "dpmsolver++"])
@pytest.mark.parametrize("steps", [2, 3, 18, 32])
def test_the_samplers_of_edm_arrive(name, steps):
    recipe = SimpleNamespace(noise_scheduler=EDMHeunScheduler(sigma_data=0.3))
    recipe.predict = None
    checks = check_sampler(sampler_call(recipe, name, steps), edm(0.3), (1, 8, 8))
    assert all(check.healthy for check in checks) and len(checks) == 4, [c for c in checks if not c.healthy]


def test_the_recipe_of_edm2_is_asked_by_its_own_predict():
    options = train_edm2.parse_args(["--dataset_name", "digits", "--sigma_data", "0.4"])
    recipe = train_edm2.EDM2(tiny(), options)
    checks = check_sampler(sampler_call(recipe, "heun", 18), edm(0.4), (1, 8, 8))
    assert all(check.healthy for check in checks)
    assert isinstance(recipe.exported, type(tiny()))
    checks = check_sampler(sampler_call(recipe, "heun", 18), edm(0.5), (1, 8, 8))
    assert "ends at 0.8 times the image" in only(checks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"start": 1.0}, "starts from noise of mean"),
        ({"scale": lambda scheduler, x, t: x}, ""),
        ({"told": lambda t: (4 * t).exp()}, "which it was never trained on"),  # sigma instead of ln(sigma) / 4
        ({"told": lambda t: 4 * t}, ""),
        ({"answer": lambda output: -output}, ""),
        ({"settings": {"sigma_max": 20.0}, "start": 80.0}, "starts from noise of mean"),
        ({"settings": {"sigma_data": 0.4}}, ""),
    ],
)
def test_a_loop_of_edm_that_does_something_else_is_named(change, message):
    def call(oracle, count):
        scheduler = EDMHeunScheduler(**{"sigma_data": 0.5} | change.get("settings", {}))
        scheduler.set_timesteps(18)
        x = change.get("start", scheduler.init_noise_sigma) * torch.randn(
            count, *SHAPE, generator=torch.Generator().manual_seed(0)
        )
        for t in scheduler.timesteps:
            seen = change.get("scale", EDMHeunScheduler.scale_model_input)(scheduler, x, t)
            output = change.get("answer", lambda output: output)(oracle(seen, change.get("told", lambda t: t)(t)).sample)
            x = scheduler.step(output, t, x).prev_sample
        return x

    checks = check_sampler(call, edm(0.5), SHAPE)
    assert all(check.healthy for check in checks) if message is None else message in only(checks)


def run(scheduler, told=lambda t: t, answer=lambda output: output, steps=10, start=1.0, same=False, noise=1.0):
    """A sampler loop as a user may write it, with something wrong in it."""

    def call(oracle, count):
        generator = torch.Generator().manual_seed(0)
        scheduler.set_timesteps(steps)
        x = start * torch.randn(count, *SHAPE, generator=generator)
        x = x[:1].expand(count, -1, -1, -1) if same else x
        for t in scheduler.timesteps:
            with NoiseOfSamples(lambda shape=x.shape: noise * torch.randn(shape, generator=generator)):
                x = scheduler.step(answer(oracle(x, told(t)).sample), t, x).prev_sample
        return x

    return call


def test_a_loop_with_nothing_wrong_in_it_is_healthy():
    trained = make_noise_scheduler()
    assert all(check.healthy for check in audit(run(make_sampler("ddim", trained)), trained))
    assert all(check.healthy for check in audit(run(make_sampler("ddpm", trained)), trained, adds_noise=True))


@pytest.mark.parametrize("name", ["ddim", "dpmsolver++"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prediction_type": "sample"}, "takes the network's output for sample; it was trained as epsilon"),
        ({"prediction_type": "v_prediction"}, "takes the network's output for v_prediction; it was trained as epsilon"),
        ({"beta_schedule": "squaredcos_cap_v2"}, "steps along the schedule squaredcos_cap_v2, not the trained one"),
        ({"beta_schedule": "scaled_linear"}, "steps along the schedule scaled_linear, not the trained one"),
        ({"clip_sample_range": 0.5}, "cuts its images off at 0.5"),
        ({"beta_end": 0.03}, ""),
    ],
)
def test_another_config_is_named(name, settings, message):
    trained = make_noise_scheduler()
    sampling = make_sampler(name, {**trained.config, **settings})
    assert message in only(audit(run(sampling), trained))


def test_a_sampler_that_does_not_clip_is_named():
    trained = make_noise_scheduler()
    plain = DPMSolverMultistepScheduler.from_config(trained.config, timestep_spacing="linspace")
    assert "does not keep the denoised image within [-1, 1]" in only(audit(run(plain), trained))
    for adds_noise, kind in ((False, DDIMScheduler), (True, DDPMScheduler)):
        plain = kind.from_config(trained.config, clip_sample=False)
        assert "does not keep the denoised image" in only(audit(run(plain), trained, adds_noise=adds_noise))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"told": lambda t: t + 1}, ""),
        ({"told": lambda t: (t - 1).clamp(min=0)}, ""),
        ({"told": lambda t: 999 - t}, "noise levels do not fall"),
        ({"told": lambda t: t * 1000}, "which it was never trained on"),
        ({"told": lambda t: t / 1000}, "which it was never trained on"),
        ({"told": lambda t: torch.tensor(float("nan"))}, "which it was never trained on"),
        ({"answer": lambda output: -output}, ""),
        ({"answer": lambda output: 0.9 * output}, ""),
        ({"answer": lambda output: output * float("nan")}, "NaN"),
        ({"start": 2.0}, "starts from noise of mean"),
        ({"start": 0.0}, "starts from noise of mean"),
        ({"same": True}, "starts all images from the same noise"),
    ],
)
def test_a_loop_that_does_something_else_is_named(change, message):
    trained = make_noise_scheduler()
    assert message in only(audit(run(make_sampler("ddim", trained), **change), trained))


@pytest.mark.parametrize("noise", [0.0, 0.95, 1.4])
def test_other_noise_on_the_way_is_named(noise):
    trained = make_noise_scheduler()
    checks = audit(run(make_sampler("ddpm", trained), noise=noise), trained, adds_noise=True)
    assert "steps leave another noise than trained" in only(checks)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (lambda x: x / 2 + 0.5, "0.5 times the image, plus 0.5"),
        (lambda x: -x, "-1 times the image"),
        (lambda x: x * 2, "2 times the image"),
        (lambda x: x.flip(-1), "does not end at the image"),
        (lambda x: x.clamp(0), "does not end at the image"),
    ],
)
def test_another_end_is_named(images, message):
    trained = make_noise_scheduler()
    call = run(make_sampler("ddim", trained))
    assert message in only(audit(lambda *asked: images(call(*asked)), trained))


def test_a_chain_with_zero_snr_starts_at_its_end():
    trained = make_noise_scheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    leading = DDIMScheduler.from_config(trained.config, timestep_spacing="leading")
    assert "still has some of the image" in only(audit(run(leading), trained))


def test_a_sampler_that_asks_nobody_is_not_judged():
    checks = audit(lambda oracle, count: torch.zeros(count, *SHAPE), make_noise_scheduler())
    assert [check.healthy for check in checks] == [None]

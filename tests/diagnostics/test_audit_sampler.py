"""Samplers with a network that knows the answer: those of training arrive, and each way of going wrong has its words."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from torch import nn

from utils.diagnostics.audit.sampler import check_sampler, known_image, sampler_call
from utils.diffusion.ddpm import make_noise_scheduler
from utils.diffusion.sampling import make_sampler, sample

SHAPE = (3, 8, 8)
SCHEDULES = ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"]


def objective(scheduler, predict=None):
    return SimpleNamespace(noise_scheduler=scheduler, predict=predict, exported=None)


def audit(call, scheduler, name="ddim", prediction_type="epsilon", **others):
    return check_sampler(
        call, scheduler.alphas_cumprod, prediction_type, SHAPE, adds_noise=name == "ddpm", **({"clips": True} | others)
    )


def deviations(checks):
    assert all(check.stage == "export" for check in checks)
    return [check.message for check in checks if check.healthy is False]


@pytest.mark.parametrize("name", ["ddim", "ddpm", "dpmsolver++"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("prediction_type", "zero"), [("epsilon", 0), ("sample", 0), ("v_prediction", 0), ("sample", 1), ("v_prediction", 1)])
def test_the_samplers_of_training_arrive(name, schedule, prediction_type, zero):
    for timesteps, steps in ((1000, 10), (10, 5)):
        scheduler = make_noise_scheduler(
            beta_schedule=schedule,
            prediction_type=prediction_type,
            num_train_timesteps=timesteps,
            rescale_betas_zero_snr=bool(zero),
        )
        checks = audit(sampler_call(objective(scheduler), name, steps), scheduler, name, prediction_type)
        assert all(check.healthy for check in checks) and len(checks) == 5, [c for c in checks if not c.healthy]

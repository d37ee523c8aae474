"""What the audit declares, by formulas of its own, is what training computes by others: over all options."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from utils.diagnostics.audit.declared import AdaptiveClipping, declared_by
from utils.diffusion.ddpm import loss_weights, make_noise_scheduler
from utils.optim.clipping import AdaptiveLimit, Gradients
from utils.optim.optimizers import learning_rate_at
from utils.optim.power_ema import make_ema
from utils.options.flags import DDPMOptions, EDM2Options

FACTS = {"gradient_accumulation_steps": 1, "num_processes": 1, "mixed_precision": "no", "training_images": 90}
SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "cyclic",
    "inverse_sqrt",
)


@pytest.mark.parametrize("mean", [None, 0.7])
def test_adaptive_clipping_is_that_of_the_training(mean):
    declared, trained = AdaptiveClipping(mean), AdaptiveLimit(torch.device("cpu"), mean)
    for norm in [float("nan"), 1.0, 3.0, 0.5, float("inf"), 1e6, *[9.0] * 200, *[0.01] * 900]:
        norm = torch.tensor(norm)
        assert declared.limit() == pytest.approx(float(trained.limit()), rel=1e-4)
        trained.add(Gradients(norm, torch.isfinite(norm), norm[None], None))
        declared.count(norm)
    assert declared.limit() == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warmup", "floor"), [(0, 0.0), (10, 0.1), (200, 0.0)])
def test_the_learning_rate_is_that_of_the_training(schedule, warmup, floor):
    for cycles, power, decay in ((1, 1.0, None), (3, 2.0, 25)):
        options = DDPMOptions(lr_scheduler=schedule, lr_warmup_steps=warmup, lr_floor=floor, lr_cycles=cycles, lr_power=power)
        options = replace(options, lr_decay_steps=decay, max_train_steps=90)
        rate = declared_by(options, FACTS).optimizer.learning_rate
        trained = [learning_rate_at(step, 90, options) for step in range(90)]
        assert [rate(step) for step in range(90)] == pytest.approx(trained, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"])
def test_schedule_and_weights_are_those_of_the_training(prediction_type, schedule):
    for gamma, zero_snr in product((None, 5.0, 1.0), (False, True)):
        if zero_snr and (prediction_type == "epsilon" or gamma is not None):
            continue
        options = DDPMOptions(prediction_type=prediction_type, ddpm_beta_schedule=schedule, snr_gamma=gamma)
        declared = declared_by(replace(options, rescale_betas_zero_snr=zero_snr), FACTS).noising
        trained = make_noise_scheduler(beta_schedule=schedule, prediction_type=prediction_type, rescale_betas_zero_snr=zero_snr)
        torch.testing.assert_close(declared.alphas_cumprod, trained.alphas_cumprod.double())
        torch.testing.assert_close(declared.weights.float(), loss_weights(trained, gamma), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    "options", [DDPMOptions(), DDPMOptions(ema_power=0.6, ema_inv_gamma=3.0, ema_max_decay=0.9), EDM2Options()]
)
def test_the_decay_of_the_average_is_that_of_the_training(options):
    network = torch.nn.Linear(2, 2)
    _, trained = make_ema(network, options)
    decay = next(iter(declared_by(options, FACTS).averages.values()))
    assert [decay(n) for n in range(1, 300)] == pytest.approx([trained(n) for n in range(1, 300)], rel=1e-9, abs=1e-12)


def test_the_precision_is_the_one_that_was_asked_for(monkeypatch):
    assert declared_by(DDPMOptions(mixed_precision="bf16"), FACTS).autocast == torch.bfloat16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # by the launcher
    assert declared_by(DDPMOptions(), FACTS).autocast == torch.bfloat16
    assert declared_by(DDPMOptions(mixed_precision="no"), FACTS).autocast is None

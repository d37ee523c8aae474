import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr

from utils.core.errors import UserError
from utils.diffusion.ddpm import loss_per_sample, loss_weights, make_noise_scheduler, training_target

IMAGES = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
NOISE = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))
TIMESTEPS = torch.tensor([0, 100, 500, 900, 999])


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"])
def test_targets_lead_back_to_the_clean_image(schedule):
    """x_0 computed by hand from each target and x_t must be the image that went in."""
    for prediction_type in ("epsilon", "sample", "v_prediction"):
        scheduler = make_noise_scheduler(beta_schedule=schedule, prediction_type=prediction_type)
        noisy = scheduler.add_noise(IMAGES, NOISE, TIMESTEPS).double()
        target = training_target(scheduler, IMAGES, NOISE, TIMESTEPS).double()
        alpha = scheduler.alphas_cumprod[TIMESTEPS].double().sqrt().view(-1, 1, 1, 1)
        sigma = (1 - alpha**2).sqrt()
        recovered = {
            "epsilon": (noisy - sigma * target) / alpha,
            "sample": target,
            "v_prediction": alpha * noisy - sigma * target,
        }[prediction_type]
        easy = alpha.flatten() > 0.01  # the cosine schedule leaves too little signal at the very end to divide by
        torch.testing.assert_close(recovered[easy], IMAGES.double()[easy], rtol=1e-3, atol=1e-3)


def test_zero_terminal_snr_leaves_no_signal_and_samples_from_there():
    scheduler = make_noise_scheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    noisy = scheduler.add_noise(IMAGES, NOISE, torch.full((5,), 999))
    torch.testing.assert_close(noisy, NOISE, rtol=0, atol=1e-4)
    scheduler.set_timesteps(10)
    assert scheduler.timesteps[0] == 999


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_min_snr_weights_follow_the_definition(prediction_type):
    scheduler = make_noise_scheduler(prediction_type=prediction_type)
    snr = compute_snr(DDPMScheduler(num_train_timesteps=1000), torch.arange(1000))
    clipped = torch.minimum(snr, torch.tensor(5.0))
    expected = {"epsilon": clipped / snr, "sample": clipped, "v_prediction": clipped / (snr + 1)}[prediction_type]
    torch.testing.assert_close(loss_weights(scheduler, 5.0), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("gamma", [None, 5.0])
@pytest.mark.parametrize("steps", [1000, 7])
def test_the_timestep_where_sampling_starts_is_trained_or_refused(prediction_type, zero_snr, gamma, steps):
    if zero_snr and prediction_type == "epsilon":
        return  # refused for another reason
    for schedule in ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"):
        options = {"beta_schedule": schedule, "prediction_type": prediction_type, "num_train_timesteps": steps}
        scheduler = make_noise_scheduler(**options, rescale_betas_zero_snr=zero_snr)
        if zero_snr and gamma:
            with pytest.raises(UserError, match=f"timestep {steps - 1} a weight of 0, because --rescale_betas_zero_snr"):
                loss_weights(scheduler, gamma)
        else:
            assert (loss_weights(scheduler, gamma) > 0).all()


def test_weights_without_gamma():
    assert (loss_weights(make_noise_scheduler()) == 1).all()
    assert (loss_weights(make_noise_scheduler(prediction_type="v_prediction")) == 1).all()
    sample = loss_weights(make_noise_scheduler(prediction_type="sample"))
    assert sample[-1] == 1 and sample[0] == pytest.approx(0.9999 / 0.0001, rel=1e-3)


def test_losses_are_per_sample_and_weighted():
    prediction, target = torch.zeros(2, 1, 2, 2), torch.ones(2, 1, 2, 2)
    target[1] *= 3
    assert loss_per_sample(prediction, target, torch.tensor([1.0, 0.5])).tolist() == [1.0, 4.5]
    half = loss_per_sample(prediction.half(), target.half() * 300, torch.ones(2))
    assert half.tolist() == [90_000.0, 810_000.0]  # beyond fp16's range: the loss is computed in fp32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta_schedule": "cosinus"}, "ddpm_beta_schedule"),
        ({"prediction_type": "noise"}, "prediction_type"),
        ({"num_train_timesteps": 1}, "ddpm_num_steps"),
        ({"rescale_betas_zero_snr": True}, "v_prediction"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(UserError, match=message):
        make_noise_scheduler(**options)


def test_gamma_must_be_positive():
    with pytest.raises(UserError, match="snr_gamma"):
        loss_weights(make_noise_scheduler(), 0.0)

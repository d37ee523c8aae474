"""Flow matching: samplers beside diffusers' own, noise levels and weights beside their formulas."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from scipy import stats

from models.flow_scheduler import FlowHeunScheduler, FlowScheduler
from utils.core.errors import UserError
from utils.diffusion import flow
from utils.diffusion.ddpm import flow_config
from utils.diffusion.sampling import make_sampler

IMAGES = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1


def noise(seed: int) -> torch.Tensor:
    return torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def sampled(scheduler, network, steps: int) -> torch.Tensor:
    scheduler.set_timesteps(steps)
    x = noise(1)
    for timestep in scheduler.timesteps:
        x = scheduler.step(network(x, timestep), timestep, x).prev_sample
    return x


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(FlowScheduler, FlowMatchEulerDiscreteScheduler), (FlowHeunScheduler, FlowMatchHeunDiscreteScheduler)],
)
def test_steps_as_diffusers(ours, theirs, steps):
    def network(x, timestep):  # bends the way, so that the order of the method shows
        return torch.sin(3 * x) + timestep / 500 - IMAGES

    expected, found = (sampled(kind(), network, steps) for kind in (theirs, ours))
    assert (found - expected).abs().max() < 2e-3  # diffusers' Heun divides fp32 rounding of 4, 2e-7, by the last sigma, 1e-3


@pytest.mark.parametrize("kind", [FlowScheduler, FlowHeunScheduler])
def test_a_network_that_knows_the_image_ends_at_it(kind):
    asked = []

    def network(x, timestep):
        asked.append(float(timestep))
        return IMAGES

    assert (sampled(kind(prediction_type="sample"), network, 9) - IMAGES).abs().max() < 1e-5
    assert asked[0] == 1000 and len(asked) == (9 if kind is FlowScheduler else 17)


def test_a_clean_image_and_its_velocity_are_sampled_alike():
    def clean(x, timestep):
        return torch.tanh(x) * IMAGES

    def velocity(x, timestep):
        return (x - clean(x, timestep)) / (timestep / 1000)

    theirs = FlowMatchEulerDiscreteScheduler()
    theirs.set_timesteps(sigmas=[k / 12 for k in range(12, 0, -1)])
    theirs.set_timesteps = lambda steps: None
    found = sampled(FlowScheduler(prediction_type="sample"), clean, 12)
    assert (found - sampled(theirs, velocity, 12)).abs().max() < 1e-4


def test_images_are_noised_as_by_diffusers():
    theirs = FlowMatchEulerDiscreteScheduler()
    timesteps = theirs.timesteps[[0, 300, 700, 999]]
    found = FlowScheduler().add_noise(IMAGES, noise(2), timesteps)
    assert (found - theirs.scale_noise(IMAGES, timesteps, noise(2))).abs().max() < 1e-6


@pytest.mark.parametrize(("mean", "std"), [(None, 1.0), (0.0, 1.0), (0.8, 0.8)])
def test_noise_levels_are_distributed_as_asked(mean, std):
    drawn = flow.training_sigmas(3, torch.arange(20000), mean, std).double()
    assert drawn.min() >= 0 and drawn.max() < 1
    wanted = stats.uniform(0, 1).cdf if mean is None else lambda sigma: stats.norm(mean, std).cdf(torch.logit(sigma))
    assert stats.kstest(drawn.numpy(), lambda sigma: wanted(torch.as_tensor(sigma))).pvalue > 1e-3
    counts = torch.bincount(flow.bins(drawn, mean, std), minlength=flow.LEVELS)
    assert stats.chisquare(counts.reshape(50, -1).sum(1).numpy()).pvalue > 1e-3
    places = torch.linspace(0.001, 0.999, 101, dtype=torch.float64)
    assert (torch.as_tensor(wanted(flow.sigmas_at(places, mean, std))) - places).abs().max() < 1e-9


def test_errors_of_a_clean_image_weigh_as_those_of_its_velocity():
    sigma, guess = torch.tensor([1.0, 0.5, 0.1, 0.01]), IMAGES + 0.3 * noise(4)
    x = FlowScheduler().add_noise(IMAGES, noise(2), 1000 * sigma)
    of_velocity = ((x - guess) / sigma[:, None, None, None] - (noise(2) - IMAGES)).square().mean((1, 2, 3))
    weighed = flow.weights("sample", sigma) * (guess - IMAGES).square().mean((1, 2, 3))
    assert torch.allclose(weighed[:3], of_velocity[:3], rtol=1e-3)  # float32: x - guess over 0.1
    assert weighed[3] < of_velocity[3] / 20  # 0.01 counts as 0.05
    assert flow.weights("v_prediction", sigma).tolist() == [1.0] * 4


def test_a_scheduler_of_others_is_taken_where_it_lays_its_levels_alike():
    config = flow_config(FlowMatchEulerDiscreteScheduler(num_train_timesteps=500).config, "theirs")
    assert len(make_sampler("heun", config)) == 500
    with pytest.raises(UserError, match="another shift than"):
        flow_config(FlowMatchEulerDiscreteScheduler(shift=3.0).config, "theirs")
    with pytest.raises(UserError, match="choose from euler, heun"):
        make_sampler("ddim", config)

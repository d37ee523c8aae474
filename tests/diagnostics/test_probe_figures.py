"""The probe's figures and those of samples, on networks and images whose answers are known."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils.diagnostics.probe import probe_network, sample_statistics
from utils.diffusion.ddpm import make_noise_scheduler


class Known(nn.Module):
    """Predicts by a function of (noisy images, timesteps)."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, noisy_images, timesteps):
        return SimpleNamespace(sample=self.function(noisy_images, timesteps))


IMAGES = torch.randn(256, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.5


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_the_best_scaling_has_the_linear_error(prediction_type):
    """White images: E[target | x_t] is linear in x_t, with the gain that least squares finds."""
    scheduler = make_noise_scheduler(beta_schedule="squaredcos_cap_v2", prediction_type=prediction_type)
    alphas_cumprod = scheduler.alphas_cumprod

    def wiener(noisy_images, timesteps):
        a, b = alphas_cumprod[timesteps[0]].sqrt(), (1 - alphas_cumprod[timesteps[0]]).sqrt()
        image = noisy_images * a * 0.25 / (a * a * 0.25 + b * b)
        noise = noisy_images * b / (a * a * 0.25 + b * b)
        return {"epsilon": noise, "sample": image, "v_prediction": a * noise - b * image}[prediction_type]

    found = probe_network(Known(wiener), scheduler, IMAGES)
    assert list(found["error"]) == ["0", "100", "500", "900", "999"]
    for step, error in found["error"].items():
        assert error == pytest.approx(found["linear_error"][step], rel=0.05, abs=2e-4)
    assert found["prediction_type"] == prediction_type


def test_a_network_that_ignores_the_timestep_does_not_respond_to_it():
    scheduler = make_noise_scheduler()
    blind = probe_network(Known(lambda x, t: 2 * x), scheduler, IMAGES)
    seeing = probe_network(Known(lambda x, t: x * (1 + t / 1000).view(-1, 1, 1, 1)), scheduler, IMAGES)
    silent = probe_network(Known(lambda x, t: 0 * x), scheduler, IMAGES)
    assert blind["timestep_response"] == 0.0
    assert seeing["timestep_response"] == pytest.approx(0.4 / 1.5, rel=0.01)  # 1.1 and 1.9 instead of 1.5
    assert silent["timestep_response"] is None


def test_a_network_that_looks_at_the_whole_batch_gives_it_away():
    scheduler = make_noise_scheduler()
    leaky = probe_network(Known(lambda x, t: x - x.mean(0)), scheduler, IMAGES)
    assert leaky["batch_response"] == pytest.approx(1, rel=0.2)  # alone, an image minus its mean is nothing
    assert probe_network(Known(lambda x, t: 2 * x), scheduler, IMAGES)["batch_response"] == 0


def test_sample_statistics_by_hand():
    images = torch.tensor([[-1.0, 1.0], [0.0, 1.0], [0.5, -0.5]]).view(3, 1, 1, 2)
    found = sample_statistics(images)
    pairs = [(images[i] - images[j]).square().mean() for i in range(3) for j in range(3) if i != j]
    assert found["pair_distance"] == pytest.approx((sum(pairs) / len(pairs)).sqrt().item())
    assert (found["min"], found["max"]) == (-1.0, 1.0)
    assert found["saturated"] == pytest.approx(0.5)
    assert "pair_distance" not in sample_statistics(images[:1])

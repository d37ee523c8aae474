"""The questions to a network on real images, put to networks whose answers are known; figures of samples."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from test_data_check import image_set
from torch import nn

from utils.data.training_data import TrainingSamples
from utils.diagnostics.dynamics import Dynamics
from utils.diagnostics.probe import probe_network, sample_statistics
from utils.diffusion.ddpm import PREDICTION_TYPES, make_noise_scheduler
from utils.optim.clipping import Gradients
from utils.options.flags import DDPMOptions


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


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1


def knows(images: torch.Tensor, scheduler, answer: str):
    """A network that has the images by heart and answers in one of the prediction types."""

    def unet(noisy_images, timesteps):
        alpha = scheduler.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
        noise = (noisy_images - alpha.sqrt() * images) / (1 - alpha).sqrt()
        answers = (noise, images, alpha.sqrt() * noise - (1 - alpha).sqrt() * images)
        return dict(zip(PREDICTION_TYPES, answers))[answer]

    return Known(unet)


@pytest.mark.parametrize("answer", PREDICTION_TYPES)
@pytest.mark.parametrize("claimed", PREDICTION_TYPES)
def test_the_probe_tells_what_a_network_predicts(images, answer, claimed):
    scheduler = make_noise_scheduler(prediction_type=claimed)
    found = probe_network(knows(images, scheduler, answer), scheduler, images)
    errors = {name: sum(by_level.values()) for name, by_level in found["errors_as"].items()}
    assert errors[answer] < 1e-3
    assert min(error for name, error in errors.items() if name != answer) > 0.3
    assert (max(found["error"].values()) < 1e-3) == (answer == claimed)


def test_held_out_images_show_what_is_known_by_heart(images):
    scheduler = make_noise_scheduler()
    others = images.flip(0)
    found = probe_network(knows(images, scheduler, "epsilon"), scheduler, images, validation_images=others)
    assert found["held_out_error"].keys() == found["error"].keys()
    assert all(found["held_out_error"][step] > 10 * error for step, error in found["error"].items())
    assert probe_network(knows(images, scheduler, "epsilon"), scheduler, images)["held_out_error"] == {}


@pytest.mark.parametrize(("images", "micro_batch", "accumulation", "given"), [(40, 1, 1, 32), (40, 3, 4, 32), (20, 1, 2, 20)])
def test_the_first_images_are_many_however_small_the_micro_batch(images, micro_batch, accumulation, given):
    pixels = np.arange(images, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(4, axis=2).repeat(4, axis=3)
    options = DDPMOptions(train_batch_size=micro_batch, gradient_accumulation_steps=accumulation)
    samples = TrainingSamples(image_set(pixels), Accelerator(cpu=True), options)
    shown = samples.first_batch(32).clean_images
    assert shown.shape == (given, 1, 4, 4) and len(shown[:, 0, 0, 0].unique()) == given
    alone = next(samples.batches(0, 1))  # they begin with those that the training begins with
    assert torch.equal(shown[:micro_batch], samples.on_device(alone)[1])


def test_frozen_layers_are_shown_without_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    dynamics = Dynamics(model)
    dynamics.begin(True)
    dynamics.see_images(torch.zeros(2, 1, 2, 2))
    model(torch.ones(2, 4)).square().mean().backward()
    norms = torch.stack([p.grad.norm() for p in model[1].parameters()])
    dynamics.before_step()
    dynamics.end(Gradients(norms.norm(), torch.tensor(True), norms, None))
    figures, layers = dynamics.report()
    assert layers["0.weight"]["gradient"] == layers["0.bias"]["gradient"] == 0.0 < layers["1.weight"]["gradient"]
    assert figures["gradients/parameters_without"] == 2

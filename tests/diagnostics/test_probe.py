"""The questions to a network on real images, put to networks whose answers are known; frozen layers among the magnitudes."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from test_data_check import image_set
from test_probe_figures import Known
from torch import nn

from utils.data.training_data import TrainingSamples
from utils.diagnostics.dynamics import Dynamics
from utils.diagnostics.probe import probe_network
from utils.diffusion.ddpm import PREDICTION_TYPES, make_noise_scheduler
from utils.optim.clipping import Gradients
from utils.options.flags import DDPMOptions


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


def test_a_network_of_zeros_has_relative_error_one_in_every_type(images):
    scheduler = make_noise_scheduler()
    found = probe_network(Known(lambda x, t: torch.zeros_like(x)), scheduler, images)
    for by_level in found["errors_as"].values():
        assert list(by_level.values()) == pytest.approx([1.0] * 5)
    assert found["timestep_response"] is None


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

"""What is made between two updates in pieces, what reports leave out where memory is small, and devices without float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import test_memory_plan
import torch
from accelerate import Accelerator
from diffusers.configuration_utils import FrozenDict
from test_data_check import image_set
from test_memory_plan import peak
from test_probe import Known
from torch import nn

from utils.data.training_data import TrainingSamples
from utils.diagnostics.dynamics import Dynamics
from utils.diagnostics.probe import PROBE_IMAGES, examine_network, probe_network
from utils.diffusion.ddpm import make_noise_scheduler
from utils.diffusion.objective import Losses
from utils.optim.clipping import Gradients
from utils.options.flags import DDPMOptions
from utils.training.evaluation import Validation
from utils.training.memory_estimate import SHARE
from utils.training.progress import ProgressBar

plan_with = test_memory_plan.plan_with  # a fixture


class Seen(nn.Module):
    """Passes on a share of its input that grows with the timestep; notes the sizes of the batches."""

    def __init__(self):
        super().__init__()
        self.gain, self.sizes = nn.Parameter(torch.tensor(0.9)), []
        self.config = FrozenDict(num_class_embeds=None)

    def forward(self, noisy_images, timesteps):
        self.sizes.append(len(noisy_images))
        return SimpleNamespace(sample=self.gain * noisy_images * (1 + timesteps.view(-1, 1, 1, 1) / 1000))


@pytest.mark.parametrize(("micro_batch", "most"), [(1, 2), (3, 3), (64, PROBE_IMAGES)])
def test_the_probe_shows_the_network_no_more_than_a_micro_batch(micro_batch, most):
    pixels = np.random.default_rng(0).integers(0, 256, (80, 1, 64, 64), dtype=np.uint8)
    samples = TrainingSamples(image_set(pixels), Accelerator(cpu=True), DDPMOptions(train_batch_size=micro_batch))
    network = Seen()
    found = examine_network(network, make_noise_scheduler(), samples, image_set(pixels[:40]))
    assert max(network.sizes) == most and found["images"] == PROBE_IMAGES


def test_figures_of_the_probe_do_not_depend_on_its_pieces():
    images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    scheduler, network = make_noise_scheduler(), Seen()
    whole, pieces = (probe_network(network, scheduler, images, 0, images.flip(0), size) for size in (None, 5))
    for name in ("error", "held_out_error"):
        assert list(pieces[name].values()) == pytest.approx(list(whole[name].values()), rel=1e-5)  # float sums of 2048 values
    assert pieces["timestep_response"] == pytest.approx(whole["timestep_response"], rel=1e-5)
    mixes = Known(lambda x, t: x - x.mean(0))
    assert probe_network(mixes, scheduler, images, batch_size=1)["batch_response"] > 0.5


def test_a_batch_that_fits_compiled_alone_is_measured_without_an_eager_update(plan_with):
    small = 0.9 * peak(8, accumulates=False)
    assert plan_with(small, train_batch_size=8).measures_eagerly()  # eager anyway
    assert not plan_with(small, train_batch_size=8, compile=True).measures_eagerly()
    assert plan_with(1.1 * peak(8, accumulates=False) / SHARE, train_batch_size=8, compile=True).measures_eagerly()
    assert "the update of each report runs eagerly" in plan_with(small, compile=True).table(8, 1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values):
        return self.layer(values).square()


@pytest.mark.parametrize("eager", [True, False])
def test_reports_can_leave_compiled_code_alone(eager):
    graphs = []
    model = Layer()
    model.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    dynamics = Dynamics(model, eager=eager)
    dynamics.begin(True)
    dynamics.see_images(torch.zeros(2, 1, 2, 2))
    model(torch.ones(2, 4)).mean().backward()
    norms = torch.stack([p.grad.norm() for p in model.parameters()])
    dynamics.before_step()
    dynamics.end(Gradients(norms.norm(), torch.tensor(True), norms, None))
    _, layers = dynamics.report()
    torch._dynamo.reset()
    assert (len(graphs) == 0) is eager and ("activation" in layers["layer.weight"]) is eager
    assert layers["layer.weight"]["gradient"] > 0


# ---- devices without float64


class WithoutFloat64(torch.Tensor):
    """As on Apple's GPUs: what becomes float64 there is an error; `cpu` takes it to the host."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        result = super().__torch_function__(function, types, arguments, options or {})
        if function is torch.Tensor.cpu:
            return result.as_subclass(torch.Tensor)
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


def test_validation_needs_no_float64_of_the_device():
    process = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"), reduce=lambda tensor, how: tensor)
    data = SimpleNamespace(validation=range(6), validation_batch=lambda numbers: numbers)
    objective = SimpleNamespace(
        network=None,
        draw=lambda batch, places: {"clean_images": batch},
        losses=lambda network, clean_images: Losses(None, torch.full(clean_images.shape, 0.25).as_subclass(WithoutFloat64)),
    )
    options = DDPMOptions(train_batch_size=4)
    progress = ProgressBar(False, 0, 1)
    run = SimpleNamespace(options=options, accelerator=process, data=data, objective=objective, progress=progress)
    assert Validation(run).mean_loss() == 0.25

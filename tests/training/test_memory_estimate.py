"""Predictions of memory and operations against real steps, real objects and closed forms."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import slow_turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from utils.diffusion.ddpm import loss_per_sample
from utils.diffusion.unet import make_edm2_unet, make_unet
from utils.optim.ema import EMA
from utils.optim.optimizers import make_optimizer
from utils.optim.power_ema import PowerEMA
from utils.options.flags import DDPMOptions, EDM2Options, OptimizerOptions
from utils.training.memory_estimate import AUTOCAST, UpdateParts, estimate_memory, flops_per_image

SHAPE = (1, 16, 16)


def network(checkpointing: bool = False, **options) -> nn.Module:
    unet = make_unet(DDPMOptions(resolution=SHAPE[1], image_channels=SHAPE[0], model_preset="digits16", **options))
    if checkpointing:
        unet.enable_gradient_checkpointing()
    return unet


def without_attention() -> nn.Module:
    from diffusers import UNet2DModel

    unet = UNet2DModel(16, 1, 1, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=2,
                       down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)  # fmt: skip
    unet.mid_block.attentions = nn.ModuleList([None])
    return unet


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(model, OptimizerOptions(learning_rate=1e-4))


def estimate(make_network=network, make=adamw, batch: int = 4, accumulates: bool = False, **parts):
    return estimate_memory(UpdateParts(make_network, make, SHAPE, **parts), batch, "cpu", accumulates=accumulates)


def forward(model: nn.Module, batch: int, precision: str) -> torch.Tensor:
    with torch.autocast("cpu", AUTOCAST.get(precision), enabled=precision != "no"):
        prediction = model(torch.randn(batch, *SHAPE), torch.zeros(batch, dtype=torch.int64)).sample
    return loss_per_sample(prediction.float(), torch.randn(batch, *SHAPE), torch.ones(batch)).mean()


def bytes_kept(model: nn.Module, batch: int, precision: str) -> int:
    """Of a real forward pass, by address of the memory."""
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(model, batch, precision)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)


CONFIGURATIONS = {
    "batch 8": (network, 8, "no"),
    "bf16": (network, 4, "bf16"),
    "checkpointing, bf16": (partial(network, checkpointing=True), 8, "bf16"),
    "dropout, checkpointing, bf16": (partial(network, dropout=0.1, checkpointing=True), 4, "bf16"),
    "mish": (partial(network, activation="mish"), 4, "no"),
    "spectral norm": (partial(network, spectral_norm=True), 4, "no"),
    "without attention": (without_attention, 4, "no"),
}


FAST = ["checkpointing, bf16"]


@pytest.mark.parametrize("name", [*FAST, *slow_turns(*(name for name in CONFIGURATIONS if name not in FAST))])
def test_activations_are_what_a_real_step_keeps(name):
    make_network, batch, precision = CONFIGURATIONS[name]
    real = bytes_kept(make_network().train(), batch, precision)
    assert real > 100_000
    assert estimate(make_network, batch=batch, mixed_precision=precision).activations == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("name", ["adamw", *slow_turns("adam", "rmsprop", "sgd")])
def test_static_parts_are_those_of_the_real_objects(name):
    make = partial(make_optimizer, options=OptimizerOptions(optimizer=name, learning_rate=1e-4))
    predicted = estimate(make=make)
    model = network()
    forward(model, 2, "no").backward()
    optimizer = make(model)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert predicted.optimizer == sum(value.nbytes for value in states)
    assert predicted.ema == sum(tensor.nbytes for tensor in EMA(model).shadow.values())
    assert predicted.parameters == predicted.gradients == sum(parameter.nbytes for parameter in model.parameters())
    assert estimate(make=make, averages=0).ema == 0


def most_allocated(model: nn.Module, batch: int, micro_steps: int = 1) -> int:
    """The most that an update of `model` held beyond what was there before it, by torch's own allocator."""
    waits = model.no_sync if isinstance(model, DistributedDataParallel) else nullcontext
    optimizer = adamw(model)
    for _ in range(3):  # in the second DDP makes its buckets anew, in the order in which gradients come
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for micro_step in range(micro_steps):
                with waits() if micro_step < micro_steps - 1 else nullcontext():
                    forward(model, batch, "no").backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = [parameter.detach().clone() for parameter in model.parameters()]  # for the report on an update
            optimizer.step()
            optimizer.zero_grad()
            del before
    now = most = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("checkpointing", [False, *slow_turns(True)])
@pytest.mark.parametrize("batch", [2, *slow_turns(16)])
def test_peak_is_that_of_a_real_update(batch, checkpointing):
    make_network = partial(network, checkpointing=checkpointing)
    predicted = estimate(make_network, batch=batch, averages=0)
    there_before = predicted.parameters + predicted.optimizer
    real = there_before + most_allocated(make_network().train(), batch)
    assert predicted.peak - predicted.workspace == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("micro_steps", [3, *slow_turns(1)])
@pytest.mark.parametrize("batch", [2, *slow_turns(16)])
def test_peak_with_ddp_is_that_of_a_real_update(process_group, batch, micro_steps):
    predicted = estimate(batch=batch, averages=0, distributed=True, accumulates=micro_steps > 1)
    model = DistributedDataParallel(network().train(), gradient_as_bucket_view=True)
    buckets = sum(parameter.nbytes for parameter in model.parameters())
    there_before = predicted.parameters + buckets + predicted.optimizer
    real = there_before + most_allocated(model, batch, micro_steps)
    assert predicted.buckets == buckets
    assert predicted.peak - predicted.workspace == pytest.approx(real, rel=0.03)


def test_flops_are_those_of_the_closed_form():
    class Network(nn.Module):
        """A 3x3 convolution from 1 to 4 channels, attention over all pixels with one head, and one back."""

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

        def forward(self, images, timesteps):
            pixels = self.first(images).flatten(2).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(pixels, pixels, pixels)
            return SimpleNamespace(sample=self.last(mixed.transpose(1, 2).unflatten(2, images.shape[2:])))

    count = 8 * 8
    convolution, product = 2 * count * 9 * 4, 2 * count * count * 4
    # The image needs no gradient: the first layer has no second product in the backward pass.
    expected = convolution * (2 + 3) + 2 * product * 3
    assert flops_per_image(Network, (1, 8, 8)) == expected


@pytest.mark.slow
def test_checkpointing_changes_no_flops_and_prediction_leaves_no_trace():
    state = torch.random.get_rng_state()
    flops = [flops_per_image(partial(network, checkpointing=checkpointing), SHAPE) for checkpointing in (False, True)]
    estimate()
    assert flops[0] == flops[1] > 0
    assert torch.equal(state, torch.random.get_rng_state())


def test_several_averages_and_an_edm2_network_are_counted_as_they_are():
    make_network = partial(make_edm2_unet, EDM2Options(resolution=16, image_channels=1, model_preset="digits16"))
    predicted = estimate(make_network, averages=2)
    model = make_network().train()
    assert predicted.activations == pytest.approx(bytes_kept(model, 4, "no"), rel=0.03)
    averages = PowerEMA(model, (0.05, 0.1)).averages.values()
    assert predicted.ema == sum(tensor.nbytes for average in averages for tensor in average.shadow.values())

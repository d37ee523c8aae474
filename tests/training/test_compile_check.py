"""A compiled network beside the eager one: right and wrong compilers, what is left behind, and what all ranks do."""

import json
import math
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import TINY_NETWORK, same_bytes, slow_turns
from diffusers.models.unets.unet_2d import UNet2DOutput
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.parallel import DistributedDataParallel

from utils.diffusion.unet import make_unet
from utils.options.flags import DDPMOptions
from utils.training.compile_check import check_compiled


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)


class OneToken(nn.Module):
    """A convolution, group norm, self-attention at 1x1, where queries and keys have a gradient of 0, and an output layer."""

    def __init__(self, dropout: float = 0.0, zero_init_output: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(1, 32, 3, stride=4), nn.GroupNorm(4, 32)
        self.attention = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("to_q", "to_k", "to_v")})
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(32, 16)
        self.register_buffer("calls", torch.zeros(()))
        if zero_init_output:
            nn.init.zeros_(self.out.weight)

    def forward(self, images, timesteps):
        self.calls += 1  # as the power iterations of spectral norms, a buffer that each forward pass moves
        hidden = self.norm(self.conv(images)).flatten(2).transpose(1, 2) + timesteps[:, None, None] / 1000
        q, k, v = (layer(hidden).unflatten(2, (4, 8)).transpose(1, 2) for layer in self.attention.values())
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return UNet2DOutput(self.out(self.dropout(hidden + attended)).view(-1, 1, 4, 4))


def tiny_unet(resolution: int = 16, **options) -> nn.Module:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY_NETWORK))
        return make_unet(DDPMOptions(image_channels=1, model_config_name_or_path=folder, resolution=resolution, **options))


one_token_unet = partial(tiny_unet, resolution=2)  # of two levels


class Setup:
    """A network on noise, as a script has it: prepared, in training mode, compiled in place."""

    def __init__(self, make=OneToken, precision: str = "no", backend="aot_eager", size: int = 4, **options):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True, mixed_precision=precision)
        self.network = make(**options).train()
        if backend is not None:
            self.network.compile(backend=backend)
        self.model = self.accelerator.prepare(self.network)
        generator = torch.Generator().manual_seed(0)
        self.images, self.noise = torch.randn(2, 4, 1, size, size, generator=generator)
        self.said = []

    def loss(self) -> torch.Tensor:
        torch.manual_seed(7)  # as seed_dropout
        return (self.network(self.images, torch.tensor([1, 300, 600, 999])).sample - self.noise).square().mean()

    def check(self) -> bool:
        return check_compiled(self.accelerator, self.model, self.network, self.loss, self.said.append)


def rounded_anew(graph: torch.fx.GraphModule):
    """`graph` where each result in fp32 may be off by one more rounding, as another right kernel's."""

    class Rounded(torch.fx.Interpreter):
        def call_function(self, target, arguments, keywords):
            result = super().call_function(target, arguments, keywords)
            if isinstance(result, tuple):
                return tuple(map(self.off, result))
            return self.off(result)

        def off(self, values):
            if not isinstance(values, torch.Tensor) or values.dtype != torch.float32:
                return values
            return values * (1 - 2**-24 * torch.randint(0, 2, values.shape))

    return make_boxed_func(lambda *inputs: Rounded(graph).run(*inputs))


def rounding_backend():
    return aot_autograd(fw_compiler=lambda graph, inputs: rounded_anew(graph))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "size"), [(OneToken, 4), (one_token_unet, 2)], ids=["attention", "unet"])
def test_layers_whose_gradient_is_rounding_alone_are_no_error(make, size):
    """Queries and keys of an attention to one token: the softmax is 1 whatever they are."""
    setup = Setup(make, backend=rounding_backend(), size=size)
    assert setup.check(), setup.said
    assert "gradients are those of the eager network" in setup.said[0]
    # `rounded_anew` does what it should: what is rounding in the eager pass is another rounding in the compiled one
    gradients = []
    for stance in ("force_eager", "default"):
        with torch.compiler.set_stance(stance):
            setup.network.zero_grad()
            setup.loss().backward()
            gradients.append({n: p.grad for n, p in setup.network.named_parameters() if n.endswith("to_k.weight")})
    (eager,), (compiled,) = (found.values() for found in gradients)
    assert (compiled - eager).norm() > 0.01 * eager.norm()


NETWORKS = [
    (OneToken, "no", 4, {"dropout": 0.5}),
    (tiny_unet, "bf16", 16, {"channels_last": True, "gradient_checkpointing": True}),
    (tiny_unet, "no", 16, {"spectral_norm": True, "dropout": 0.5}),
]
SLOW_NETWORKS = [NETWORKS[0], *slow_turns(*NETWORKS[1:])]


@pytest.mark.parametrize(("make", "precision", "size", "options"), SLOW_NETWORKS)
def test_a_right_compiler_stays_and_nothing_is_left_behind(make, precision, size, options):
    setup = Setup(make, precision, size=size, **options)
    setup.network.zero_grad()
    dropouts = [module.p for module in setup.network.modules() if isinstance(module, nn.Dropout)]
    before = {name: tensor.clone() for name, tensor in setup.network.state_dict().items()}
    state = torch.get_rng_state()
    assert setup.check(), setup.said
    assert len(setup.said) == 1 and "gradients are those of the eager network" in setup.said[0]
    assert torch.equal(torch.get_rng_state(), state)
    after = setup.network.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in setup.network.parameters())
    assert all(module.training for module in setup.network.modules())
    assert dropouts == [module.p for module in setup.network.modules() if isinstance(module, nn.Dropout)]
    assert setup.network._compiled_call_impl is not None


def one_and_a_half_times_too_large(layer: nn.Module, call) -> None:
    """From here on compiled code takes 1.5 times the gradient of the layer's weight; `call` is what the layer computes."""

    class TooLarge(torch.autograd.Function):
        @staticmethod
        def forward(context, values):
            return values.clone()

        @staticmethod
        def backward(context, gradient):
            return 1.5 * gradient

    def wrong(inputs):
        weight = TooLarge.apply(layer.weight) if torch.compiler.is_compiling() else layer.weight
        return call(inputs, weight, layer.bias)

    layer.forward = wrong


@pytest.mark.parametrize("options", [*slow_turns({}), {"zero_init_output": True}])
def test_a_wrong_gradient_of_one_layer_is_found(options):
    """Also behind an output layer of zeros, where all gradients are 0 at the start."""
    setup = Setup(backend=None, **options)
    one_and_a_half_times_too_large(setup.network.attention["to_v"], nn.functional.linear)
    setup.network.compile(backend="aot_eager")
    assert not setup.check()
    assert setup.network._compiled_call_impl is None
    said = "the gradient of attention.to_v differs from the eager one by 0.5 of its size; rounding explains 0.0001"
    assert said in setup.said[0] and "--train_batch_size" in setup.said[0]


def test_a_network_that_cannot_be_compiled_runs_eagerly():
    def backend(graph, inputs):
        raise RuntimeError("no C++ compiler")

    setup = Setup(backend=backend)
    assert not setup.check() and "no C++ compiler" in setup.said[0]
    setup.loss().backward()


def test_without_memory_for_the_comparison_the_network_stays_compiled():
    setup = Setup()
    plain = setup.loss

    def loss():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    setup.loss = loss
    assert setup.check() and "--compile is not checked: out of memory" in setup.said[0]
    setup.loss = plain
    assert setup.network._compiled_call_impl is not None


@pytest.mark.parametrize("value", [math.nan, *slow_turns(math.inf)])
def test_gradients_that_are_not_finite_are_not_called_compared(value):
    setup = Setup()
    setup.noise[:] = value
    assert setup.check() and setup.network._compiled_call_impl is not None
    assert setup.said == ["--compile is not checked: the eager gradients are not finite"]


def test_under_ddp_nothing_is_sent_and_what_is_compiled_is_what_trains(monkeypatch, process_group):
    """A collective inside what may fail on one process alone would leave the others waiting. Graphs end at DDP's buckets."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    setup = Setup(backend=backend)
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 2000)
    setup.model = DistributedDataParallel(setup.network, bucket_cap_mb=0.002)
    sent = []
    monkeypatch.setattr(setup.model, "_sync_buffers", lambda: sent.append("buffers"))
    monkeypatch.setattr(setup.model, "_pre_forward", lambda *inputs, **options: (sent.append("pass"), (inputs, options))[1])
    assert setup.check(), setup.said
    assert not sent and len(graphs) > 1
    monkeypatch.undo()
    checked = len(graphs)
    images, timesteps = setup.images, torch.tensor([1, 300, 600, 999])
    (setup.model(images, timesteps).sample - setup.noise).square().mean().backward()
    assert len(graphs) == checked


# ---- in the scripts


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, *slow_turns(2)])
def test_a_wrong_compiler_is_not_trained_with(server, script, script_flags, tmp_path, processes):
    """Found on the last rank alone, it is given up by all, and the run is the eager one."""
    flags = [*script_flags, "--train_batch_size", 8 // processes, "--max_train_steps", 2, "--checkpointing_steps", 2]
    inject = ["tests/faults/inject.py", script, "wrong-compiler", "--rank", processes - 1, "--value", "1.5", "--"]
    runs = server.start([*inject, *flags, "--compile", "--output_dir", tmp_path / "wrong"], processes)
    assert [run.wait(200) for run in runs] == [0] * processes, runs[-1].text()[-3000:]
    assert runs[0].text().count("--compile is off: the gradient of ") == 1
    server.run([script, *flags, "--output_dir", tmp_path / "eager"], processes)
    wrong, eager = (tmp_path / run / "checkpoint-2" / "model.safetensors" for run in ("wrong", "eager"))
    assert same_bytes(wrong, eager)

"""A compiled network beside the eager one: right and wrong compilers, what is left behind, and what all ranks do."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import same_bytes
from torch import nn

from utils.compile_check import check_compiled
from utils.edm2_network import make_edm2_unet
from utils.unet import make_unet


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)


class Setup:
    """A network of two levels on noise, as a script has it: prepared, in training mode, compiled in place."""

    def __init__(self, make=make_unet, precision: str = "no", backend="aot_eager", **options):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True, mixed_precision=precision)
        self.network = make(resolution=16, image_channels=1, preset="digits16", **options).train()
        if backend is not None:
            self.network.compile(backend=backend)
        self.model = self.accelerator.prepare(self.network)
        generator = torch.Generator().manual_seed(0)
        self.images, self.noise = torch.randn(2, 4, 1, 16, 16, generator=generator)
        self.said = []

    def loss(self) -> torch.Tensor:
        torch.manual_seed(7)  # as seed_dropout
        return (self.model(self.images, torch.tensor([1, 300, 600, 999])).sample - self.noise).square().mean()

    def check(self) -> bool:
        return check_compiled(self.accelerator, self.model, self.network, self.loss, self.said.append)


NETWORKS = [
    (make_unet, "no", {}),
    (make_unet, "bf16", {"channels_last": True, "gradient_checkpointing": True}),
    (make_unet, "no", {"spectral_norm": True, "dropout": 0.5}),
    (make_edm2_unet, "no", {"dropout": 0.5}),
]


@pytest.mark.parametrize(("make", "precision", "options"), NETWORKS)
def test_a_right_compiler_stays_and_nothing_is_left_behind(make, precision, options):
    setup = Setup(make, precision, **options)
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


@pytest.mark.parametrize(("make", "precision", "options"), [NETWORKS[1], (make_unet, "no", {"zero_init_output": True})])
def test_a_wrong_gradient_of_one_layer_is_found(make, precision, options):
    """Also behind an output layer of zeros, where all gradients are 0 at the start."""
    setup = Setup(make, precision, backend=None, **options)

    class TooLarge(torch.autograd.Function):
        @staticmethod
        def forward(context, values):
            return values.clone()

        @staticmethod
        def backward(context, gradient):
            return 1.5 * gradient

    convolution = setup.network.mid_block.resnets[0].conv1

    def wrong_in_one_place(images):
        weight = TooLarge.apply(convolution.weight) if torch.compiler.is_compiling() else convolution.weight
        return nn.functional.conv2d(images, weight, convolution.bias, padding=1)

    convolution.forward = wrong_in_one_place
    setup.network.compile(backend="aot_eager")
    assert not setup.check()
    assert setup.network._compiled_call_impl is None
    assert "the gradient of mid_block.resnets.0.conv1 is 0.5 of the eager one off it" in setup.said[0]


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


def test_what_is_compiled_for_the_check_is_what_trains():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    setup = Setup(backend=backend)
    assert setup.check() and len(graphs) == 1
    setup.loss().backward()
    assert len(graphs) == 1


# ---- in the scripts


@pytest.fixture
def module_compile():
    compile_module = nn.Module.compile
    yield compile_module
    nn.Module.compile = compile_module


def test_the_check_changes_no_bit_of_the_training(train_script, script_flags, tmp_path, monkeypatch, module_compile, capsys):
    flags = [*script_flags, "--compile", "--max_train_steps", 3, "--checkpointing_steps", 3, "--logging_steps", 3]
    flags += ["--train_batch_size", 4, "--gradient_accumulation_steps", 2, "--mixed_precision", "bf16", "--channels_last"]
    monkeypatch.setattr(nn.Module, "compile", lambda module: module_compile(module, backend="aot_eager"))
    assert train_script([*flags, "--output_dir", tmp_path / "checked"]) == 0
    said = capsys.readouterr()
    assert "--compile: gradients are those of the eager network" in said.out + said.err
    torch._dynamo.reset()
    monkeypatch.setattr("utils.compile_check.check_compiled", lambda *arguments: True)
    assert train_script([*flags, "--output_dir", tmp_path / "unchecked"]) == 0
    for name in ("model.safetensors", "optimizer.bin"):
        checked, unchecked = (Path(tmp_path, run, "checkpoint-3", name) for run in ("checked", "unchecked"))
        assert same_bytes(checked, unchecked)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_wrong_compiler_is_not_trained_with(server, script, script_flags, tmp_path, processes):
    """Found on the last rank alone, it is given up by all, and the run is the eager one."""
    flags = [*script_flags, "--train_batch_size", 8 // processes, "--max_train_steps", 2, "--checkpointing_steps", 2]
    inject = ["tests/faults/inject.py", script, "wrong-compiler", "--rank", processes - 1, "--value", "1.5", "--"]
    runs = server.start([*inject, *flags, "--compile", "--output_dir", tmp_path / "wrong"], processes)
    assert [run.wait(200) for run in runs] == [0] * processes, runs[-1].text()[-3000:]
    assert runs[0].text().count("--compile is off: the gradient of ") == 1
    runs = server.start([script, *flags, "--output_dir", tmp_path / "eager"], processes)
    assert [run.wait(200) for run in runs] == [0] * processes, runs[0].text()[-3000:]
    wrong, eager = (tmp_path / run / "checkpoint-2" / "model.safetensors" for run in ("wrong", "eager"))
    assert same_bytes(wrong, eager)


@pytest.mark.slow
def test_torchs_own_compiler_passes_in_bf16_with_channels_last():
    setup = Setup(precision="bf16", backend="inductor", channels_last=True)
    assert setup.check(), setup.said

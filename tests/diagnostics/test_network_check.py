"""A look at a network before its first update: faults planted in it are named, healthy ones are not, and nothing is changed."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DModel
from torch import nn

from models.edm2_unet import PRESETS, EDM2UNet
from utils.diagnostics.diagnose import diagnose
from utils.diagnostics.probe import affordable, examine_flow, examine_modules
from utils.diffusion.unet import normalize_spectra
from utils.options.presets import NETWORKS
from utils.runs.history import HISTORY, read_history
from utils.runs.record import RunRecord


def unet(**config) -> UNet2DModel:
    return UNet2DModel(sample_size=16, in_channels=1, out_channels=1, **{**NETWORKS["digits16"], **config})


def edm2() -> EDM2UNet:
    return EDM2UNet(sample_size=16, in_channels=1, out_channels=1, **PRESETS["digits16"])


def look(network: nn.Module) -> dict:
    images, levels = torch.linspace(-1, 1, 2 * 256).reshape(2, 1, 16, 16).sin(), torch.tensor([300, 600])
    found = examine_modules(network)
    return found | examine_flow(network, network, lambda called: called(images, levels).sample.square().flatten(1).mean(1))


def said(network: nn.Module) -> list[str]:
    return [finding.code for finding in diagnose(RunRecord(Path(), history=[{"step": 0, "network": look(network)}]))]


def plain(network: nn.Module) -> nn.Module:
    return network


def zero_output(network: nn.Module) -> nn.Module:
    nn.init.zeros_(network.conv_out.weight)
    nn.init.zeros_(network.conv_out.bias)
    return network


@pytest.mark.parametrize("change", [plain, zero_output])
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_a_healthy_network_has_no_finding_and_stays_as_it_is(change, activation):
    network = change(unet(act_fn=activation, dropout=0.1)).train()
    network.enable_gradient_checkpointing()
    weights, random = {name: value.clone() for name, value in network.state_dict().items()}, torch.get_rng_state()
    assert said(network) == []
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
    assert all(module.training for module in network.modules()) and network.is_gradient_checkpointing
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_an_edm2_network_whose_gains_start_at_zero_has_no_finding():
    assert said(edm2()) == []


def batch_norms(network: nn.Module) -> None:
    for parent in list(network.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.GroupNorm) and "norm1" in name:
                setattr(parent, name, nn.BatchNorm2d(module.num_channels))


def without_skips(network: nn.Module) -> None:
    for block in network.up_blocks:
        block.forward = lambda x, skips, *rest, inner=block.forward: inner(x, tuple(0 * skip for skip in skips), *rest)


def scaled_time(network: nn.Module) -> None:
    network.time_proj.forward = lambda t, inner=network.time_proj.forward: inner(t)
    network.time_proj.register_forward_pre_hook(lambda module, inputs: (1000 * inputs[0],))


def without_attention(network: nn.Module) -> None:
    for block in (*network.down_blocks, network.mid_block, *network.up_blocks):
        for place in range(len(getattr(block, "attentions", None) or ())):
            block.attentions[place] = nn.Identity()
            block.attentions[place].forward = lambda x, *_, **__: x


def multiplied_by_zero(network: nn.Module) -> None:
    network.down_blocks[1].resnets[0].conv2.register_forward_hook(lambda module, inputs, output: 0 * output)


def detached(network: nn.Module) -> None:
    network.down_blocks[1].resnets[0].conv1.register_forward_hook(lambda module, inputs, output: output.detach())


def never_called(network: nn.Module) -> None:
    network.extra = nn.Linear(4, 4)


def half_normalized(network: nn.Module) -> None:
    for resnet in (module for module in network.modules() if hasattr(module, "conv_shortcut")):
        resnet.dropout.p = 0.2
    normalize_spectra(network)


@pytest.mark.parametrize(
    ("plant", "code"),
    [
        (batch_norms, "batch-norm"),
        (without_skips, "inputs-zero"),
        (scaled_time, "time-embedding"),
        (without_attention, "attention-missing"),
        (multiplied_by_zero, "layers-idle"),
        (never_called, "layers-idle"),
        (detached, "no-gradient"),
        (half_normalized, "dropout-with-spectral-norm"),
    ],
)
def test_a_fault_in_a_network_is_named(plant, code):
    network = unet()
    plant(network)
    assert code in said(network)


def test_large_networks_are_looked_at_by_their_modules_alone_on_a_cpu():
    with torch.device("meta"):
        assert affordable(unet(), 256)
    assert affordable(unet(), 256) and not affordable(unet(), 1024 * 1024)


def test_a_run_records_the_look(train, tiny_flags, tmp_path):
    assert train([*tiny_flags, "--max_train_steps", "1", "--output_dir", tmp_path]) == 0
    (found,) = (line["network"] for line in read_history(tmp_path / HISTORY) if "network" in line)
    assert found["told"] == found["received"] and not found["idle"] and "failed" not in found
    assert json.dumps(found)

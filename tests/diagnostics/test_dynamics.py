"""Magnitudes per layer, against torch on each tensor by itself; and that measuring changes nothing."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from utils.diagnostics.dynamics import Dynamics
from utils.optim.clipping import clip_gradients


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def train(model: nn.Module, dynamics: Dynamics | None, wanted: bool = True) -> dict:
    optimizer, accelerator = torch.optim.SGD(model.parameters(), lr=0.1), Accelerator(cpu=True)
    seen = {}
    torch.manual_seed(1)
    for step in range(3):
        images = torch.randn(8, 1, 8, 8)
        if dynamics is not None:
            dynamics.begin(wanted and step == 2)
            dynamics.see_images(images)
        model(images).square().mean().backward()
        seen["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        gradients = clip_gradients(accelerator, list(model.parameters()), 0.0)
        seen["before"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        if dynamics is not None:
            dynamics.before_step()
        optimizer.step()
        if dynamics is not None:
            dynamics.end(gradients)
        seen["images"] = images
        optimizer.zero_grad()
    return seen


def test_magnitudes_are_those_of_each_tensor():
    model = network()
    dynamics = Dynamics(model)
    seen = train(model, dynamics)
    figures, layers = dynamics.report()
    for name, parameter in model.named_parameters():
        before = seen["before"][name]
        assert layers[name]["weight"] == pytest.approx(parameter.square().mean().sqrt().item(), rel=1e-5)
        assert layers[name]["gradient"] == pytest.approx(seen["gradients"][name].square().mean().sqrt().item(), rel=1e-5)
        assert layers[name]["update"] == pytest.approx(((parameter - before).norm() / parameter.norm()).item(), rel=1e-4)
    with torch.no_grad():
        for name, value in seen["before"].items():
            model.get_parameter(name).copy_(value)
        outputs = {"0.weight": model[0](seen["images"]), "3.weight": model(seen["images"])}
    for name, output in outputs.items():
        assert layers[name]["activation"] == pytest.approx(output.square().mean().sqrt().item(), rel=1e-5)
    images = seen["images"]
    expected = [figure.item() for figure in (images.min(), images.max(), images.mean(), images.std())]
    assert [figures[f"data/{name}"] for name in ("min", "max", "mean", "std")] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert figures["gradients/parameters_without"] == 0
    assert dynamics.report() == ({}, {})  # once


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_micro_steps_give_the_spread_of_all_their_images(micro_batch):
    """Most of it lies between the images: each is of nearly one gray."""
    model, grays = network(), torch.linspace(-1, 1, 8).view(8, 1, 1, 1)
    images = grays + 0.01 * torch.randn(8, 1, 8, 8)
    dynamics = Dynamics(model)
    dynamics.begin(True)
    for part in images.split(micro_batch):
        dynamics.see_images(part)
        model(part).square().mean().backward()
    dynamics.before_step()
    dynamics.end(clip_gradients(Accelerator(cpu=True), list(model.parameters()), 0.0))
    figures, _ = dynamics.report()
    assert figures["data/std"] == pytest.approx(images.std().item(), rel=1e-5)
    assert figures["data/mean"] == pytest.approx(images.mean().item(), abs=1e-6)


def test_measuring_changes_nothing():
    models = network(), network(), network()
    for model, dynamics, wanted in zip(models, (None, Dynamics(models[1]), Dynamics(models[2])), (True, True, False)):
        train(model, dynamics, wanted)
    for first, *others in zip(*(model.parameters() for model in models)):
        assert all(torch.equal(first, other) for other in others)
    assert not any(module._forward_hooks for module in models[1].modules())


def test_a_report_is_one_transfer(monkeypatch):
    model, transfers, plain = network(), [], torch.Tensor.tolist
    dynamics = Dynamics(model)
    train(model, dynamics)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: transfers.append(len(tensor)) or plain(tensor))
    dynamics.report()
    assert len(transfers) == 1

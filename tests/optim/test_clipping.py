import math

import pytest
import torch
from accelerate import Accelerator

from utils.optim.clipping import AdaptiveLimit, Gradients, clip_gradients


def gradients(norm: float) -> Gradients:
    norm = torch.tensor(norm)
    return Gradients(norm, torch.isfinite(norm), norm[None], None)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("limit", [1e-3, 4.9999, 4.999999, 5.0, 5.0000005, 5.00001, 1e3, torch.tensor(5.0)])
def test_the_limit_is_that_of_torch_to_the_bit(limit):
    ours, torchs = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    ours.grad, torchs.grad = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])
    clip_gradients(Accelerator(cpu=True), [ours], limit)
    torch.nn.utils.clip_grad_norm_([torchs], limit)
    assert torch.equal(ours.grad, torchs.grad)


def test_the_joint_norm_is_clipped_and_told_by_parameter():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model(torch.randn(8, 3)).square().sum().backward()
    model[1].bias.grad = None
    model[0].bias.requires_grad_(False)
    whole = torch.cat([p.grad.flatten() for p in (model[0].weight, model[1].weight)])
    before = model[1].weight.grad.clone()
    found = clip_gradients(Accelerator(cpu=True), trained(model), torch.tensor(0.5))
    assert found.norm.item() == pytest.approx(whole.norm().item(), rel=1e-5)
    expected = [model[0].weight.grad.norm().item() * whole.norm().item() / 0.5, before.norm().item(), 0.0]
    assert found.norms.tolist() == pytest.approx(expected, rel=1e-4)
    assert torch.allclose(model[1].weight.grad, before * 0.5 / whole.norm(), rtol=1e-4)


def test_no_clipping_leaves_the_gradient():
    model = torch.nn.Linear(3, 4)
    (1e3 * model(torch.ones(1, 3))).sum().backward()
    before = model.weight.grad.clone()
    clip_gradients(Accelerator(cpu=True), trained(model), 0.0)
    assert torch.equal(model.weight.grad, before)


def test_the_limit_follows_the_mean_of_the_norm():
    limit, mean = AdaptiveLimit(torch.device("cpu")), None
    assert limit.limit().item() == 10.0
    for norm in [1.0, 3.0, 0.5, math.nan, math.inf, 1e6, 0.2] + [0.01] * 600:
        limit.add(gradients(norm))
        if math.isfinite(norm):  # brute force
            norm = min(norm, 10.0)
            mean = norm if mean is None else mean + 0.01 * (norm - mean)
        assert limit.limit().item() == pytest.approx(min(max(2 * mean, 0.1), 10.0), rel=1e-4)
    assert limit.limit().item() == pytest.approx(0.1)
    continued = AdaptiveLimit(torch.device("cpu"), limit.mean)
    assert continued.limit().item() == limit.limit().item()

import copy

import pytest
import torch
from diffusers.training_utils import EMAModel
from torch import nn

from utils.core.errors import UserError
from utils.optim.ema import EMA, ema_decay

FINITE = torch.tensor(True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))


def walk(model: nn.Module, seed: int) -> None:
    """A pretended optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)


def test_follows_diffusers_ema_model():
    model = network()
    ours = EMA(model)
    theirs = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True, inv_gamma=2.0, power=0.6)
    for step in range(1, 60):
        walk(model, step)
        ours.update(ema_decay(step, max_decay=0.9, inv_gamma=2.0, power=0.6), FINITE)
        theirs.step(model.parameters())
    for (name, _), expected in zip(model.named_parameters(), theirs.shadow_params):
        torch.testing.assert_close(ours.shadow[name], expected, rtol=1e-5, atol=1e-5)


def test_decay_warms_up_to_its_maximum():
    assert ema_decay(1) == 0.0  # the initial weights leave no trace
    assert ema_decay(1_000) == pytest.approx(1 - 1000**-0.75)
    assert ema_decay(10_000_000) == 0.9999


def test_buffers_are_averaged_and_counters_copied():
    model = network()
    ema = EMA(model)
    with torch.no_grad():
        model[1].running_mean += 1.0
        model[1].num_batches_tracked += 7
    ema.update(0.75, FINITE)
    torch.testing.assert_close(ema.shadow["1.running_mean"], torch.full((4,), 0.25))
    assert ema.shadow["1.num_batches_tracked"] == 7


def test_skipped_update_changes_nothing():
    model = network()
    ema = EMA(model)
    before = copy.deepcopy(ema.shadow)
    walk(model, 0)
    ema.update(0.5, torch.tensor(False))
    assert all(torch.equal(before[name], ema.shadow[name]) for name in before)


def test_average_stays_fp32_for_half_precision_weights():
    model = nn.Linear(4, 4).to(torch.bfloat16)
    ema = EMA(model)
    expected = model.weight.float().clone()
    for step in range(200):
        walk(model, step)
        ema.update(0.999, FINITE)
        expected = expected + (model.weight.float() - expected) * 0.001
    assert ema.shadow["weight"].dtype == torch.float32
    torch.testing.assert_close(ema.shadow["weight"], expected, rtol=1e-5, atol=1e-6)


def test_swap_gives_the_raw_weights_back_bit_for_bit_even_after_an_error():
    model = network()
    ema = EMA(model)
    for step in range(5):
        walk(model, step)
        ema.update(0.9, FINITE)
    raw = copy.deepcopy(model.state_dict())
    average = copy.deepcopy(ema.shadow)
    with pytest.raises(RuntimeError), ema.swapped_into_model():
        assert all(torch.equal(model.state_dict()[name], average[name]) for name in average)
        raise RuntimeError
    assert all(torch.equal(model.state_dict()[name], raw[name]) for name in raw)
    assert all(torch.equal(ema.shadow[name], average[name]) for name in average)


def test_optimizer_still_trains_the_model_after_a_swap():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = EMA(model)
    with ema.swapped_into_model():
        pass
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.1)


def test_distance_is_relative():
    model = nn.Linear(3, 1, bias=False)
    ema = EMA(model)
    with torch.no_grad():
        model.weight *= 1.5
    assert ema.distance().item() == pytest.approx(0.5)


def test_refuses_the_weights_of_another_model():
    with pytest.raises(UserError, match="do not fit this network"):
        EMA(nn.Linear(2, 2)).load_state_dict({"weight": torch.zeros(2, 2)})

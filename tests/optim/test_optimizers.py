import copy
import math
from itertools import pairwise

import pytest
import torch
from diffusers.optimization import get_scheduler
from torch import nn

from utils.core.errors import UserError
from utils.optim.clipping import clip_gradients
from utils.optim.nonfinite import BadUpdates, step_if_finite
from utils.optim.optimizers import l1_norm, learning_rate_at, make_optimizer, match_layouts, set_learning_rate
from utils.options.flags import OptimizerOptions

TOTAL, WARMUP = 120, 20


def curve(schedule: str, **options) -> list[float]:
    options = OptimizerOptions(lr_scheduler=schedule, learning_rate=0.5, lr_warmup_steps=WARMUP, **options)
    return [learning_rate_at(step, TOTAL, options) for step in range(TOTAL)]


@pytest.mark.parametrize(
    ("schedule", "options", "theirs"),
    [
        ("constant", {}, {}),
        ("constant_with_warmup", {}, {}),
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_restarts", {"lr_cycles": 3}, {"num_cycles": 3}),
    ],
)
def test_curves_are_those_of_diffusers(schedule, options, theirs):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=WARMUP, num_training_steps=TOTAL, **theirs)
    expected = []
    for _ in range(TOTAL):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert curve(schedule, **options) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_inverse_sqrt_does_not_jump_when_the_warm_up_outlasts_its_decay():
    """Ramp and decay are factors of one another (Karras et al. 2024): their product peaks at the end of the ramp."""
    options = OptimizerOptions(lr_scheduler="inverse_sqrt", learning_rate=1.0, lr_warmup_steps=400, lr_decay_steps=100)
    rates = [learning_rate_at(step, 1000, options) for step in range(1000)]
    assert rates[100] == pytest.approx(0.25) and rates[225] == pytest.approx(225 / 400 / 1.5)
    assert rates[400] == max(rates) == pytest.approx(0.5)
    assert max(abs(b - a) for a, b in pairwise(rates)) <= 1 / 400 + 1e-12


def test_polynomial_and_inverse_sqrt_in_closed_form():
    polynomial = curve("polynomial", lr_power=2.0)
    assert polynomial[70] == pytest.approx(0.5 * 0.5**2)
    inverse_sqrt = curve("inverse_sqrt")
    assert inverse_sqrt[WARMUP] == 0.5
    assert inverse_sqrt[4 * WARMUP] == pytest.approx(0.25)


def test_cyclic_touches_floor_and_peak_once_per_cycle():
    values = curve("cyclic", lr_cycles=2, lr_floor=0.1)[WARMUP:]
    assert values[0] == values[50] == pytest.approx(0.5)
    assert values[25] == values[75] == pytest.approx(0.05)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial"])
def test_floor_is_reached_at_the_end_and_kept(schedule):
    options = OptimizerOptions(lr_scheduler=schedule, learning_rate=2.0, lr_warmup_steps=5, lr_floor=0.1)
    assert learning_rate_at(50, 50, options) == pytest.approx(0.2)
    assert learning_rate_at(5, 50, options) == pytest.approx(2.0)
    assert learning_rate_at(500, 50, options) == pytest.approx(0.2)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="lr_scheduler"):
        learning_rate_at(5, 10, OptimizerOptions(lr_scheduler="cosin", lr_warmup_steps=0))
    with pytest.raises(UserError, match="optimizer"):
        make_optimizer(nn.Linear(1, 1), OptimizerOptions(optimizer="lion", learning_rate=0.1))


def test_weight_decay_is_decoupled_and_spares_biases_and_norms():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4))
    before = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model, OptimizerOptions(optimizer="adamw", learning_rate=0.1, adam_weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = model.state_dict()
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 0.1 * 0.5))
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(after[name], before[name])


@pytest.mark.parametrize("name", ["adamw", "adam", "rmsprop", "sgd"])
@pytest.mark.parametrize("place", [0, 1])
def test_bad_gradients_of_one_layer_change_neither_weights_nor_optimizer(name, place):
    """Nor those of the very first update: what follows them is to the bit what it is without them."""

    def trained(gradients_of_bias: list[float]) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = make_optimizer(model, OptimizerOptions(optimizer=name, learning_rate=0.1, adam_weight_decay=0.1))
        for number, gradient in enumerate(gradients_of_bias):
            before = copy.deepcopy(model.state_dict())
            model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.full_like(model.bias, gradient)
            step_if_finite(optimizer, torch.isfinite(model.bias.grad).all())
            moved = [not torch.equal(before[key], tensor) for key, tensor in model.state_dict().items()]
            assert moved == [math.isfinite(gradient)] * 2, number
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    good = [1.0, 2.0, 3.0]
    assert torch.equal(trained([*good[:place], math.nan, math.inf, *good[place:]]), trained(good))


def test_learning_rate_reaches_every_group():
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, OptimizerOptions(learning_rate=0.1))
    set_learning_rate(optimizer, 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_l1_norm_counts_kernels_only_and_has_the_sign_as_gradient():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -3.0]]))
        model.bias.fill_(100.0)
    norm = l1_norm(model)
    norm.backward()
    assert norm.item() == 5.0
    assert model.weight.grad.tolist() == [[1.0, -1.0]]
    assert model.bias.grad is None


def test_scaler_of_fp16_skips_by_itself_on_the_same_condition():
    """On the CPU's GradScaler, which is torch's own: a GPU's follows the same protocol. From the loss to the counts."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    inner = make_optimizer(model, OptimizerOptions(optimizer="adamw", learning_rate=0.1))
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    accelerator.scaler, accelerator.unscale_gradients = scaler, lambda: scaler.unscale_(inner)
    bad_updates = BadUpdates(accelerator, 2)
    cases = [  # factor on the loss -> (moves, bad updates, the scaler's skips)
        (1.0, True, (0, 0)),
        (2.0**10, False, (0, 1)),  # the loss is finite, its gradient only overflows by the scale, which is halved
        (1.0, True, (0, 1)),
        (math.inf, False, (1, 1)),  # the loss itself
        (1.0, True, (1, 1)),
    ]
    for step, (factor, moves, counts) in enumerate(cases):
        before, scale = model.weight.detach().clone(), scaler.get_scale()
        losses = model(torch.ones(1, 3)).sum()[None] * factor
        scaler.scale(losses.mean()).backward()
        bad_updates.add_losses(losses)
        gradients = clip_gradients(accelerator, list(model.parameters()), 1.0)
        assert gradients.loss_scale.item() == scale
        bad_updates.add(step, gradients)
        step_if_finite(optimizer, gradients.finite)
        model.zero_grad()
        assert gradients.finite.item() is moves
        assert torch.equal(before, model.weight) is not moves
        assert (scaler.get_scale() < scale) is not moves
        assert bad_updates.totals()[:2] == counts
    AcceleratorState._reset_state(reset_partial_state=True)


def test_fused_adamw_takes_the_decision_on_the_device(monkeypatch):
    """The way a GPU goes, on the CPU's kernel of the same protocol: the flag is handed over, not read by the host."""
    model = nn.Linear(3, 1)
    optimizer = make_optimizer(model, OptimizerOptions(optimizer="adamw", learning_rate=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    before = copy.deepcopy(model.state_dict())
    flag = torch.tensor(False)
    monkeypatch.setattr("utils.optim.nonfinite.on_cpu", lambda tensor: False)
    step_if_finite(optimizer, flag)
    assert optimizer.found_inf.item() == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert optimizer.state[model.weight]["step"] == 0


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_state_of_another_layout_is_laid_out_as_the_weights_are(name):
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3)
    turned = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 5, 5)
    optimizers = [make_optimizer(model, OptimizerOptions(optimizer=name, learning_rate=0.1)) for model in (plain, turned)]
    plain(images).square().mean().backward()
    optimizers[0].step()
    turned.load_state_dict(plain.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    match_layouts(optimizers[1])
    for model, optimizer in zip((plain, turned), optimizers):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
    # Adam's steps of 0.1 follow a small gradient's sign: its rounding, 1e-6 of the largest, may be 1e-4 of it.
    torch.testing.assert_close(turned.weight, plain.weight, rtol=0, atol=1e-4)


def test_the_state_of_bitsandbytes_stays_as_it_lies_in_memory():
    weight = nn.Parameter(torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weight])
    codes = torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2)
    optimizer.state[weight] = {"state1": codes, "absmax1": torch.ones(1)}
    match_layouts(optimizer)
    assert optimizer.state[weight]["state1"] is codes

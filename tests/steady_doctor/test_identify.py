"""What is read off the tape of one update, in loops whose parts are known: each figure beside the script's own."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import huber_loss, l1_loss, mse_loss

from steady_doctor.identify.step import Step, identify
from steady_doctor.record.session import Session

B, SHAPE, T = 6, (6, 3, 8, 8), 1000
ALPHA_BAR = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T), dim=0)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.time = nn.Linear(1, 8)

    def forward(self, x, t):
        return self.last(torch.relu(self.first(x) + self.time(t.float().reshape(-1, 1) / T)[:, :, None, None]))


class Patches(nn.Module):
    """Sees 4 patches of 4x4 pixels in a row, and gives them back in that form."""

    def __init__(self):
        super().__init__()
        self.inside, self.time = nn.Linear(48, 48), nn.Linear(1, 48)

    def forward(self, x, t):
        rows = x.reshape(len(x), 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(len(x), 4, 48)
        return self.inside(rows) + self.time(t.float().reshape(-1, 1, 1) / T)


def unpatched(rows):
    return rows.reshape(len(rows), 2, 2, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(len(rows), 3, 8, 8)


def watched(loop, updates: int = 3) -> list[Step]:
    """`loop(step)` makes one update; returns what was recorded."""
    steps: list[Step] = []
    session = Session(lambda recorded: steps.append(identify(recorded)))
    with session.install():
        for step in range(updates):
            loop(step)
    assert session.failure is None
    return steps


def column(values):
    return values.reshape(-1, 1, 1, 1)


def circle():
    t = torch.randint(0, T, (B,))
    return t, ALPHA_BAR[t].sqrt(), (1 - ALPHA_BAR[t]).sqrt()


def line():
    s = torch.rand(B)
    return s * T, 1 - s, s


def exploding():
    sigma = torch.exp(torch.randn(B))
    return sigma, torch.ones(B), sigma


WAYS = {  # path, and (p, q) of the target from (a, b)
    "epsilon": (circle, lambda a, b: (0 * a, 1 + 0 * a)),
    "sample": (circle, lambda a, b: (1 + 0 * a, 0 * a)),
    "v": (circle, lambda a, b: (-b, a)),
    "flow": (line, lambda a, b: (-1 + 0 * a, 1 + 0 * a)),
    "exploding": (exploding, lambda a, b: (1 + 0 * a, 0 * a)),
}


@pytest.mark.parametrize("loss", [mse_loss, l1_loss, huber_loss])
@pytest.mark.parametrize("way", WAYS)
def test_mixture_and_target_are_those_of_the_script(way, loss):
    path, target_of = WAYS[way]
    torch.manual_seed(0)
    network, images, told = Network(), torch.rand(50, 3, 8, 8) * 2 - 1, []
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)

    def loop(step):
        x0, noise = images[torch.randperm(50)[:B]], torch.randn(SHAPE)
        t, a, b = path()
        p, q = target_of(a, b)
        told.append((t, a, b, p, q, x0, noise))
        output = network(column(a) * x0 + column(b) * noise, t)
        optimizer.zero_grad()
        loss(output, column(p) * x0 + column(q) * noise).backward()
        optimizer.step()

    for step, (t, a, b, p, q, x0, noise) in zip(watched(loop), told[1:]):
        mixture, target = step.passes[0].mixture, step.passes[0].target
        for found, expected in (
            (mixture.a, a),
            (mixture.b, b),
            (target.p, p),
            (target.q, q),
            (mixture.told[0], t / T),
        ):  # the network divides
            assert torch.allclose(found, expected.double(), rtol=1e-4, atol=1e-4)
        for figures, batch in ((mixture.clean, x0), (mixture.noise, noise)):
            assert (figures.shape, figures.same_along) == (SHAPE, ())
            assert figures.mean == pytest.approx(float(batch.mean()), abs=1e-6)
            assert figures.std == pytest.approx(float(batch.std(correction=0)), abs=1e-6)
            assert torch.equal(figures.head[:, 0], batch[:, 0, 0, 0].double())
        assert (target.kind == "squared") == (loss is mse_loss) or loss is huber_loss  # small errors are squared
        assert float(target.rest.max()) < 1e-4


def test_each_samples_weight_is_the_slope_of_the_loss():
    torch.manual_seed(0)
    network, images, told = Network(), torch.rand(50, 3, 8, 8) * 2 - 1, []
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)

    def loop(step):
        x0, noise = images[:B], torch.randn(SHAPE)
        t, a, b = circle()
        weight = (a / b).square().clamp(max=5) / (a / b).square()
        told.append(weight)
        error = (network(column(a) * x0 + column(b) * noise, t) - noise).square().mean((1, 2, 3))
        optimizer.zero_grad()
        (weight * error).mean().backward()
        optimizer.step()

    for step, weight in zip(watched(loop), told[1:]):
        expected = 2 * weight.double() / math.prod(SHAPE)
        assert torch.allclose(step.passes[0].target.slope, expected, rtol=1e-2)
        assert step.passes[0].target.even > 0.9


def test_patches_are_put_back_as_the_script_does():
    torch.manual_seed(0)
    network, images = Patches(), torch.rand(50, 3, 8, 8) * 2 - 1
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)

    def loop(step):
        x0, noise = images[torch.randperm(50)[:B]], torch.randn(SHAPE)
        t, a, b = line()
        optimizer.zero_grad()
        mse_loss(unpatched(network(column(a) * x0 + column(b) * noise, t)), noise - x0).backward()
        optimizer.step()

    for step in watched(loop):
        target = step.passes[0].target
        assert torch.allclose(target.p, torch.full((B,), -1.0).double(), atol=1e-4)
        assert torch.allclose(target.q, torch.ones(B).double(), atol=1e-4)


def updates_of(change=lambda event, network, optimizer, ema: None, passes: int = 1) -> list:
    """The updates of a plain loop; `change(event, ...)` is called at each of its events."""
    torch.manual_seed(0)
    network, images = Network(), torch.rand(50, 3, 8, 8) * 2 - 1
    ema = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)

    def loop(step):
        change("begin", network, optimizer, ema)
        optimizer.zero_grad()
        for _ in range(passes):
            x0, noise = images[torch.randperm(50)[:B]], torch.randn(SHAPE)
            t, a, b = circle()
            loss = mse_loss(network(column(a) * x0 + column(b) * noise, t), noise)
            change("forward", network, optimizer, ema)
            loss.backward()
        change("backward", network, optimizer, ema)
        optimizer.step()
        change("step", network, optimizer, ema)

    return [step.update for step in watched(loop, 4)]


@torch.no_grad()
def average(ema, network, keep=0.9):
    for old, new in zip(ema.parameters(), network.parameters()):
        old.lerp_(new, 1 - keep)


def at(event, do):
    return lambda now, network, optimizer, ema: do(network, optimizer, ema) if now == event else None


def test_a_plain_update():
    for update in updates_of(passes=2):
        gradient = update.gradient
        assert (gradient.passes, gradient.left_over, gradient.cleared_between) == (2, False, False)
        assert (gradient.ratio, gradient.without, gradient.unread, gradient.unowned) == (pytest.approx(1), (), (), 0)
        assert gradient.rest == pytest.approx(0, abs=1e-6) and gradient.changed_after_step == ()
        assert update.averages == [] and update.weights_moved == 0 and update.weights_written_by == ()


@pytest.mark.parametrize(("event", "when"), [("step", "after the step"), ("backward", "before the step")])
def test_averages_and_when_they_are_made(event, when):
    for update in updates_of(at(event, lambda network, optimizer, ema: average(ema, network)))[1:]:
        assert len(update.averages) == 6 and {one.when for one in update.averages} == {when}
        assert all(one.keep == pytest.approx(0.9, abs=1e-3) for one in update.averages)


def test_averages_that_are_made_anew_each_time():
    shadow = {}

    @torch.no_grad()
    def replace(network, optimizer, ema):
        for name, parameter in network.named_parameters():
            old = shadow.get(name, torch.zeros_like(parameter))
            shadow[name] = 0.75 * old + 0.25 * parameter.data

    for update in updates_of(at("step", replace))[1:]:
        assert len(update.averages) == 6
        assert all(one.keep == pytest.approx(0.75, abs=1e-3) for one in update.averages)


def test_gradients_that_are_clipped_at_the_right_and_at_the_wrong_time():
    def clip(network, optimizer, ema):
        nn.utils.clip_grad_norm_(network.parameters(), 1e-3)

    for update in updates_of(at("backward", clip)):
        assert update.gradient.ratio < 0.1 and update.gradient.rest == pytest.approx(0, abs=1e-4)
        assert update.gradient.changed_after_step == ()
    assert all(update.gradient.changed_after_step for update in updates_of(at("step", clip)))


def test_gradients_that_are_cleared_too_often_or_never():
    updates = updates_of(at("forward", lambda network, optimizer, ema: optimizer.zero_grad()), passes=2)
    assert all(update.gradient.cleared_between for update in updates)
    never = updates_of(at("begin", lambda network, optimizer, ema: setattr(optimizer, "zero_grad", lambda: None)))
    assert all(update.gradient.left_over for update in never)


def test_parameters_that_the_optimizer_lacks_or_that_get_no_gradient():
    torch.manual_seed(0)
    network, noise = Network(), torch.randn(SHAPE)
    network.first.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([*network.first.parameters(), *network.last.parameters()], 1e-3)

    def loop(step):
        t, a, b = circle()
        optimizer.zero_grad()
        mse_loss(network(column(a) * 0.3 + column(b) * torch.randn(SHAPE), t), noise).backward()
        optimizer.step()

    for step in watched(loop):
        assert (step.update.gradient.unowned, step.update.gradient.without) == (2, ())  # the two of `time`


def test_weights_that_something_else_than_the_step_changes():
    @torch.no_grad()
    def restore(network, optimizer, ema):
        network.load_state_dict(ema.state_dict())

    updates = updates_of(at("step", restore))
    assert all(update.weights_moved > 1e-4 and "copy_" in update.weights_written_by for update in updates)


def test_the_losses_are_the_same_to_the_last_bit():
    def losses(around) -> list[str]:
        torch.manual_seed(0)
        network, seen = Network(), []
        optimizer = torch.optim.AdamW(network.parameters(), 1e-3)

        def loop(step):
            noise = torch.randn(SHAPE)
            t, a, b = circle()
            loss = mse_loss(network(column(a) * 0.3 + column(b) * noise, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item().hex())

        around(loop)
        return seen

    assert losses(lambda loop: watched(loop, 6)) == losses(lambda loop: [loop(step) for step in range(6)])

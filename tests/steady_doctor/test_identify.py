"""What is read off the tape of one update, in loops whose parts are known: each figure beside the script's own."""

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


def watched(network, loss_of) -> list[Step]:
    """What is recorded of the second and the third update with the loss `loss_of(images, noise)`."""
    torch.manual_seed(0)
    images, optimizer = torch.rand(50, *SHAPE[1:]) * 2 - 1, torch.optim.Adam(network.parameters(), 1e-3)
    steps: list[Step] = []
    session = Session(lambda recorded: steps.append(identify(recorded)))
    with session.install():
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(images[torch.randperm(50)[:B]], torch.randn(SHAPE)).backward()
            optimizer.step()
    assert session.failure is None and len(steps) == 2
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
    (path, target_of), network, told = WAYS[way], Network(), []

    def loss_of(x0, noise):
        t, a, b = path()
        p, q = target_of(a, b)
        told.append((t, a, b, p, q, x0, noise))
        return loss(network(column(a) * x0 + column(b) * noise, t), column(p) * x0 + column(q) * noise)

    for step, (t, a, b, p, q, x0, noise) in zip(watched(network, loss_of), told[1:]):
        mixture, target = step.passes[0].mixture, step.passes[0].target
        figures = (
            (mixture.a, a),
            (mixture.b, b),
            (target.p, p),
            (target.q, q),
            (mixture.told[0], t / T),
        )  # the network divides
        assert all(torch.allclose(found, expected.double(), rtol=1e-4, atol=1e-4) for found, expected in figures)
        for figures, batch in ((mixture.clean, x0), (mixture.noise, noise)):
            assert (figures.shape, figures.same_along) == (SHAPE, ())
            assert figures.mean == pytest.approx(float(batch.mean()), abs=1e-6)
            assert figures.std == pytest.approx(float(batch.std(correction=0)), abs=1e-6)
            assert torch.equal(figures.head[:, 0], batch[:, 0, 0, 0].double())
        assert (target.kind == "squared") == (loss is mse_loss) or loss is huber_loss  # small errors are squared
        assert float(target.rest.max()) < 1e-4


def test_each_samples_weight_is_the_slope_of_the_loss():
    network, told = Network(), []

    def loss_of(x0, noise):
        t, a, b = circle()
        told.append((a / b).square().clamp(max=5) / (a / b).square())
        error = (network(column(a) * x0 + column(b) * noise, t) - noise).square().mean((1, 2, 3))
        return (told[-1] * error).mean()

    for step, weight in zip(watched(network, loss_of), told[1:]):
        expected = 2 * weight.double() / math.prod(SHAPE)
        assert torch.allclose(step.passes[0].target.slope, expected, rtol=1e-2)
        assert step.passes[0].target.even > 0.9


def test_patches_are_put_back_as_the_script_does():
    network = Patches()

    def loss_of(x0, noise):
        t, a, b = line()
        return mse_loss(unpatched(network(column(a) * x0 + column(b) * noise, t)), noise - x0)

    for step in watched(network, loss_of):
        target = step.passes[0].target
        assert torch.allclose(target.p, torch.full((B,), -1.0).double(), atol=1e-4)
        assert torch.allclose(target.q, torch.ones(B).double(), atol=1e-4)

"""Small training loops of which the doctor is asked, and what they share."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from steady_doctor.described import described
from steady_doctor.doctor import Doctor

B, C, SIDE, T = 8, 3, 8, 1000
ALPHA = 1 - torch.linspace(1e-4, 0.02, T)
ALPHA_BAR = torch.cumprod(ALPHA, dim=0)
LEAST, MOST = 0.1, 20.0  # the rates of the continuous path


class Network(nn.Module):
    def __init__(self, channels=C, out=C):
        super().__init__()
        self.first, self.last = nn.Conv2d(channels, 16, 3, padding=1), nn.Conv2d(16, out, 3, padding=1)
        self.time = nn.Linear(32, 16)

    def embedding(self, t):
        waves = t.float().reshape(-1, 1) * torch.exp(-torch.arange(16) / 2)
        return self.time(torch.cat([waves.sin(), waves.cos()], 1))[:, :, None, None]

    def forward(self, x, t):
        return self.last(torch.relu(self.first(x) + self.embedding(t)))


def column(values):
    return values.reshape(-1, 1, 1, 1)


def pictures(count=64):
    return torch.rand(count, C, SIDE, SIDE, generator=torch.Generator().manual_seed(1)) * 2 - 1


def train(network, loss_of, updates=14, data=None, rate=1e-3, after=lambda: None):
    """Returns the codes of all findings, and what is said of the script. `loss_of`: of a batch."""
    torch.manual_seed(0)
    doctor = Doctor()
    with doctor.install():
        optimizer = torch.optim.Adam(network.parameters(), rate)
        loader, step = DataLoader(TensorDataset(pictures() if data is None else data), B, shuffle=True), 0
        while step < updates:
            for (batch,) in loader:
                optimizer.zero_grad()
                loss_of(batch).backward()
                optimizer.step()
                after()
                step += 1
    assert doctor.session.failure is None
    found = [one.code for one in doctor.findings()]
    said = described(doctor.seen)
    assert said.startswith(f"{step} updates of ")
    return found, said


def is_healthy(network, loss_of, words, **more):
    """Nothing is found in a training, and `words` are said of it."""
    found, said = train(network, loss_of, **more)
    assert found == [] and words in said


def vp(network, loss=mse_loss):
    """Epsilon on the variance-preserving path."""

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        return loss(network(column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise, t), noise)

    return loss_of


def continuous(network, weight=lambda t, bar: 1.0, variance=lambda bar: (1 - bar).sqrt()):
    """Epsilon at a time that is drawn evenly from 1e-3 to 1, on the path with linear rates."""

    def loss_of(x0):
        t = torch.rand(len(x0)) * (1 - 1e-3) + 1e-3
        bar = torch.exp(-0.5 * t**2 * (MOST - LEAST) - t * LEAST)
        noise = torch.randn_like(x0)
        output = network(column(bar.sqrt()) * x0 + column(variance(bar)) * noise, 999 * t)
        return ((output - noise).square().mean((1, 2, 3)) * weight(t, bar)).mean()

    return loss_of

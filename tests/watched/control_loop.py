"""A small network beside a frozen one, which adds to its input; its hint is the image's darkest channel."""

import sys

import torch
from plain_ddpm import Network, T, pictures
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Control(nn.Module):
    def __init__(self):
        super().__init__()
        self.hint, self.classes = nn.Conv2d(1, 3, 3, padding=1), nn.Embedding(4, 3)

    def forward(self, t, label, hint):
        return [self.hint(hint) + self.classes(label)[:, :, None, None]]


class Controlled(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, t, residuals):
        return self.network(x + residuals[0], t)


steps = int(sys.argv[1])
torch.manual_seed(0)
alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T), dim=0)
frozen, control = Controlled(Network().requires_grad_(False)).eval(), Control()
average = AveragedModel(control, multi_avg_fn=get_ema_multi_avg_fn(0.98))
optimizer = torch.optim.AdamW(control.parameters(), lr=1e-3)
images, labels = pictures() / 127.5 - 1, torch.arange(64) % 4
for step in range(steps):
    chosen = torch.randperm(len(images))[:8]
    x0, label = images[chosen], labels[chosen]
    hint = x0.amin(1, keepdim=True)
    t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
    a = alpha_bar[t][:, None, None, None]
    x = a.sqrt() * x0 + (1 - a).sqrt() * noise
    loss = (frozen(x, t, control(t, label, hint)) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(control)
    print(step + 1, loss.item().hex(), flush=True)

"""Low-rank adapters over a frozen network: they are kept beside it, and its layers' forward passes are replaced."""

import sys

import torch
from plain_ddpm import Network, T, pictures
from torch import nn


class LoRA(nn.Module):
    def __init__(self, layer, rank=2):
        super().__init__()
        self.down = nn.Conv2d(layer.in_channels, rank, 1, bias=False)
        self.up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        nn.init.zeros_(self.up.weight)
        self.original = [layer.forward]  # a list, so that the layer does not become a part of this
        layer.forward = self.forward

    def forward(self, x):
        return self.original[0](x) + self.up(self.down(x))


steps = int(sys.argv[1])
torch.manual_seed(0)
alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T), dim=0)
model = Network().requires_grad_(False)
for p in model.parameters():
    p.mul_(1.1)  # "pretrained"
adapters = nn.ModuleList(LoRA(layer) for layer in (model.first, model.middle, model.last))
optimizer = torch.optim.AdamW(adapters.parameters(), lr=1e-3)
average = {name: p.detach().clone() for name, p in adapters.named_parameters()}
images = pictures() / 127.5 - 1
for step in range(steps):
    x0 = images[torch.randperm(len(images))[:8]]
    t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
    a = alpha_bar[t][:, None, None, None]
    snr = a / (1 - a)
    error = (model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise).square()
    loss = (error * snr.clamp(max=5) / snr).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(adapters.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for name, p in adapters.named_parameters():
            average[name].lerp_(p, 0.01)
    print(step + 1, loss.item().hex(), flush=True)

"""A training loop as people write it by hand: DDPM without diffusers, with labels that are dropped now and then, a copy of the
network as its average, and a learning rate that warms up.
"""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

T, CLASSES, BATCH = 1000, 6, 16


class Network(nn.Module):
    def __init__(self, channels=3, width=12, classes=0):
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.Conv2d(width, channels, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(classes + 1, width) if classes else None

    def forward(self, x, t, y=None):
        told = self.time(t.float()[:, None] / T)
        if self.classes is not None:
            told = told + self.classes(y)
        hidden = self.first(x) + told[:, :, None, None]
        return self.last(F.silu(self.middle(F.silu(hidden))))


def pictures(count=64, size=8):
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randint(0, 256, (count, 3, size // 4, size // 4), generator=generator).float()
    return F.interpolate(coarse, scale_factor=4, mode="nearest")


def main():
    torch.manual_seed(0)
    betas = torch.linspace(1e-4, 0.02, T)
    alpha_bar = torch.cumprod(1 - betas, dim=0)
    images, labels = pictures() / 127.5 - 1, torch.arange(64) % CLASSES
    model = Network(classes=CLASSES)
    ema = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))
    for step in range(int(sys.argv[1])):
        chosen = torch.randint(0, len(images), (BATCH,))
        x0, label = images[chosen], labels[chosen]
        t = torch.randint(0, T, (len(x0),))
        noise = torch.randn_like(x0)
        a = alpha_bar[t][:, None, None, None]
        x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
        told = torch.where(torch.rand(len(x0)) < 0.1, CLASSES, label)
        loss = F.mse_loss(model(x_t, t, told), noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        with torch.no_grad():
            for average, weight in zip(ema.parameters(), model.parameters()):
                average.lerp_(weight, 0.01)
        print(step + 1, loss.item().hex(), flush=True)


if __name__ == "__main__":
    main()

"""A training loop as people write it by hand: DDPM without diffusers, a copy of the network as its average."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

T = 1000


class Network(nn.Module):
    def __init__(self, channels=3, width=12):
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.Conv2d(width, channels, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x, t):
        hidden = self.first(x) + self.time(t.float()[:, None] / T)[:, :, None, None]
        return self.last(F.silu(self.middle(F.silu(hidden))))


def pictures(count=64, size=8):
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randint(0, 256, (count, 3, size // 4, size // 4), generator=generator).float()
    return F.interpolate(coarse, scale_factor=4, mode="nearest")


def main():
    steps = int(sys.argv[1])
    torch.manual_seed(0)
    betas = torch.linspace(1e-4, 0.02, T)
    alpha_bar = torch.cumprod(1 - betas, dim=0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(pictures()), batch_size=8, shuffle=True, num_workers=0)
    model = Network()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while step < steps:
        for (images,) in loader:
            x0 = images / 127.5 - 1
            t = torch.randint(0, T, (len(x0),))
            noise = torch.randn_like(x0)
            a = alpha_bar[t][:, None, None, None]
            x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
            loss = F.mse_loss(model(x_t, t), noise)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for average, weight in zip(ema.parameters(), model.parameters()):
                    average.lerp_(weight, 0.01)
            step += 1
            print(step, loss.item().hex(), flush=True)
            if step == steps:
                break


if __name__ == "__main__":
    main()

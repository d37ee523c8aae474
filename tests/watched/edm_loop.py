"""An EDM training loop: a preconditioned denoiser, lambda(sigma), a loss summed over pixels, a list of averaged parameters."""

import sys

import torch
from plain_ddpm import Network, pictures
from torch import nn

SIGMA_DATA = 0.5


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Network()

    def forward(self, x, sigma):
        s = sigma[:, None, None, None]
        total = s**2 + SIGMA_DATA**2
        c_skip, c_out, c_in = SIGMA_DATA**2 / total, s * SIGMA_DATA / total.sqrt(), 1 / total.sqrt()
        c_noise = sigma.log() / 4
        return c_skip * x + c_out * self.net(c_in * x, c_noise)


torch.manual_seed(0)
images = pictures() / 127.5 - 1
model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
ema_weights = [p.detach().clone() for p in model.parameters()]
for step in range(int(sys.argv[1])):
    y = images[torch.randint(0, len(images), (16,))]
    sigma = (torch.randn(len(y)) * 1.2 - 1.2).exp()
    noise = torch.randn_like(y)
    weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
    denoised = model(y + sigma[:, None, None, None] * noise, sigma)
    loss = (weight[:, None, None, None] * (denoised - y) ** 2).sum() / len(y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, weight in zip(ema_weights, model.parameters()):
            average.mul_(0.95).add_(weight, alpha=0.05)
    print(step + 1, loss.item().hex(), flush=True)

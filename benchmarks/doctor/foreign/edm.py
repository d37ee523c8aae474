"""EDM (Karras et al. 2022): a preconditioned denoiser, log-normal noise levels, a list of averaged parameters.

python edm.py --steps 150 --labels
"""

import argparse
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from images import shapes
from networks import UNet
from torch import nn


class EDMPrecond(nn.Module):
    def __init__(self, model: nn.Module, sigma_data: float = 0.5):
        super().__init__()
        self.model = model
        self.sigma_data = sigma_data

    def forward(self, x, sigma, labels=None):
        sigma = sigma.to(torch.float32).reshape(-1, 1, 1, 1)
        total = sigma**2 + self.sigma_data**2
        c_skip = self.sigma_data**2 / total
        c_out = sigma * self.sigma_data / total.sqrt()
        c_in = 1 / total.sqrt()
        c_noise = sigma.log() / 4
        F_x = self.model(c_in * x, c_noise.flatten() * 100, labels)
        return c_skip * x + c_out * F_x


class EDMLoss:
    def __init__(self, P_mean: float = -1.2, P_std: float = 1.2, sigma_data: float = 0.5):
        self.P_mean, self.P_std, self.sigma_data = P_mean, P_std, sigma_data

    def __call__(self, net, images, labels=None):
        rnd_normal = torch.randn([images.shape[0], 1, 1, 1], device=images.device)
        sigma = (rnd_normal * self.P_std + self.P_mean).exp()
        weight = (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2
        n = torch.randn_like(images) * sigma
        D_yn = net(images + n, sigma, labels)
        return weight * ((D_yn - images) ** 2)


class ShadowParameters:
    """A list beside the model; a half-life in updates, shorter at the start."""

    def __init__(self, parameters, halflife: float, rampup: float = 0.05):
        self.shadow = [p.detach().clone() for p in parameters]
        self.halflife, self.rampup = halflife, rampup

    @torch.no_grad()
    def update(self, parameters, step: int):
        halflife = min(self.halflife, max(step, 1) * self.rampup * 10)
        beta = 0.5 ** (1 / halflife)
        for s, p in zip(self.shadow, parameters):
            s.copy_(p.detach().lerp(s, beta))

    @contextmanager
    def swapped(self, parameters):
        parameters = list(parameters)
        kept = [p.detach().clone() for p in parameters]
        for p, s in zip(parameters, self.shadow):
            p.data.copy_(s)
        try:
            yield
        finally:
            for p, k in zip(parameters, kept):
                p.data.copy_(k)


@torch.no_grad()
def heun(net, labels, num_steps=6, sigma_min=0.002, sigma_max=80, rho=7):
    order = torch.arange(num_steps) / (num_steps - 1)
    sigmas = (sigma_max ** (1 / rho) + order * (sigma_min ** (1 / rho) - sigma_max ** (1 / rho))) ** rho
    sigmas = torch.cat([sigmas, torch.zeros(1)])
    x = torch.randn(4, 3, 16, 16) * sigmas[0]
    for now, after in pairwise(sigmas):
        d = (x - net(x, now.repeat(4), labels)) / now
        ahead = x + (after - now) * d
        if after > 0:
            d = (d + (ahead - net(ahead, after.repeat(4), labels)) / after) / 2
        x = x + (after - now) * d
    return x


def training_loop(steps, seed, batch_size, lr, rampup_steps, rounds, labels, halflife, sample_every, dropout):
    torch.manual_seed(seed)
    np.random.seed(seed)
    pictures, classes = shapes(512, seed=1)
    net = EDMPrecond(UNet(classes=4 if labels else 0, dropout=dropout))
    net.train().requires_grad_(True)
    loss_fn = EDMLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.9, 0.99), eps=1e-8)
    ema = ShadowParameters(net.parameters(), halflife)

    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        value = 0.0
        for _ in range(rounds):
            chosen = np.random.randint(0, len(pictures), batch_size // rounds)
            images = torch.from_numpy(pictures[chosen]).permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1
            of_class = torch.from_numpy(classes[chosen]) if labels else None
            loss = loss_fn(net, images, of_class)
            loss.sum().mul(1 / batch_size / images[0].numel()).backward()
            value += loss.mean().item() / rounds
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / rampup_steps, 1)
        for param in net.parameters():
            if param.grad is not None:
                torch.nan_to_num(param.grad, nan=0, posinf=1e5, neginf=-1e5, out=param.grad)
        optimizer.step()
        ema.update(net.parameters(), step)
        print(f"{step + 1} {value!r}")
        if sample_every and (step + 1) % sample_every == 0:
            net.eval()
            with ema.swapped(net.parameters()):
                pixels = heun(net, torch.arange(4) if labels else None)
            net.train()
            print("samples", repr(pixels.std().item()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=16, help="of an update, in all rounds")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rampup_steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="gradient accumulation")
    parser.add_argument("--labels", action="store_true")
    parser.add_argument("--halflife", type=float, default=30, help="of the average, in updates")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--sample_every", type=int, default=60)
    training_loop(**vars(parser.parse_args()))

"""Continuous time with a shifted cosine schedule of log SNR, in the manner of simple diffusion: v out, the loss on epsilon.

python log_snr.py --steps 100 --micro 2
"""

import argparse
import copy
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from images import shapes
from networks import ResBlock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4


def logsnr_schedule_cosine_shifted(t, resolution=16, base=32, logsnr_min=-15.0, logsnr_max=15.0):
    t_min = math.atan(math.exp(-0.5 * logsnr_max))
    t_max = math.atan(math.exp(-0.5 * logsnr_min))
    logsnr = -2 * torch.log(torch.tan(t_min + t * (t_max - t_min)))
    return logsnr + 2 * math.log(base / resolution)


class UViT(nn.Module):
    """Convolutions outside, attention in the middle."""

    def __init__(self, width=32, embedding=64):
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(16), requires_grad=False)
        self.time = nn.Sequential(nn.Linear(32, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.classes = nn.Embedding(CLASSES + 1, embedding)
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.first = ResBlock(width, width, embedding, dropout=0.1)
        self.shrink = nn.Conv2d(width, 2 * width, 4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn(16, 2 * width))
        layer = nn.TransformerEncoderLayer(2 * width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.middle = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.grow = nn.ConvTranspose2d(2 * width, width, 4, stride=4)
        self.second = ResBlock(2 * width, width, embedding, dropout=0.1)
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, z, *, logsnr, y):
        angles = logsnr[:, None] * self.frequencies
        emb = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1)) + self.classes(y)
        outer = self.first(self.enter(z), emb)
        h = self.shrink(outer)
        tokens = h.flatten(2).transpose(1, 2) + self.places + emb[:, None]
        h = self.middle(tokens).transpose(1, 2).reshape(h.shape)
        return self.leave(F.silu(self.second(torch.cat([self.grow(h), outer], dim=1), emb)))


class SimpleDiffusion:
    def __init__(self, model, cond_drop=0.1):
        self.model, self.cond_drop = model, cond_drop

    def sample_t(self, n):
        """Low discrepancy: one number, and the others at equal distances."""
        return (torch.rand(1) + torch.arange(n) / n) % 1.0

    def diffuse(self, x, logsnr):
        alpha = torch.sigmoid(logsnr).sqrt()[:, None, None, None]
        sigma = torch.sigmoid(-logsnr).sqrt()[:, None, None, None]
        eps = torch.randn_like(x)
        return alpha * x + sigma * eps, eps, alpha, sigma

    def loss(self, x, y):
        t = self.sample_t(x.shape[0])
        logsnr = logsnr_schedule_cosine_shifted(t)
        z, eps, alpha, sigma = self.diffuse(x, logsnr)
        y = torch.where(torch.rand(len(y)) < self.cond_drop, CLASSES, y)
        v = self.model(z, logsnr=logsnr, y=y)
        eps_hat = sigma * z + alpha * v
        return ((eps_hat - eps) ** 2).mean()

    @torch.no_grad()
    def ddim(self, model, y, steps=4):
        z = torch.randn(len(y), 3, 16, 16)
        times = torch.linspace(1, 0, steps + 1)
        for now, then in pairwise(times):
            logsnr, after = (logsnr_schedule_cosine_shifted(t.repeat(len(y))) for t in (now, then))
            alpha, sigma = torch.sigmoid(logsnr).sqrt(), torch.sigmoid(-logsnr).sqrt()
            v = model(z, logsnr=logsnr, y=y)
            x = (alpha[:, None, None, None] * z - sigma[:, None, None, None] * v).clamp(-1, 1)
            eps = (z - alpha[:, None, None, None] * x) / sigma[:, None, None, None]
            z = torch.sigmoid(after).sqrt()[:, None, None, None] * x + torch.sigmoid(-after).sqrt()[:, None, None, None] * eps
        return z


class EMA:
    def __init__(self, model, beta=0.995, update_every=1):
        self.online, self.ema_model = model, copy.deepcopy(model).eval().requires_grad_(False)
        self.beta, self.update_every, self.count = beta, update_every, 0

    @torch.no_grad()
    def update(self):
        self.count += 1
        beta = min(self.beta, (1 + self.count) / (10 + self.count))
        for ours, theirs in zip(self.ema_model.parameters(), self.online.parameters()):
            ours.data.lerp_(theirs.data, 1 - beta)


def main(args):
    torch.manual_seed(args.seed)
    pictures, labels = shapes(512, seed=1)
    pictures = torch.from_numpy(pictures).permute(0, 3, 1, 2) / 255.0 * 2 - 1
    data = TensorDataset(pictures, torch.from_numpy(labels))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)

    model = UViT()
    diffusion, ema = SimpleDiffusion(model), EMA(model)
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.99)
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    step = 0
    while step < args.steps:
        for x, y in loader:
            model.train()
            optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for x_part, y_part in zip(x.chunk(args.micro), y.chunk(args.micro)):
                loss = diffusion.loss(x_part, y_part) / args.micro
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            ema.update()
            step += 1
            print(step, repr(total))
            if step % args.sample_every == 0:
                print("samples", repr(diffusion.ddim(ema.ema_model, torch.arange(CLASSES)).std().item()))
            if step == args.steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--sample_every", type=int, default=20)
    main(parser.parse_args())

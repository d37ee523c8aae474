"""Tiny pixel-space DDPM, one file: Unet + GaussianDiffusion + EMA + Trainer."""

import argparse
import copy
import itertools
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


def cycle(dl):
    while True:
        yield from dl


def extract(a, t, x_shape):
    return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))


class Blobs(Dataset):
    """RGB pictures of soft discs on a shaded background, uint8, HWC."""

    def __init__(self, n, size, augment_flip=True, seed=0):
        rng = np.random.default_rng(seed)
        yy, xx = np.mgrid[0:size, 0:size] / (size - 1)
        self.images = np.zeros((n, size, size, 3), dtype=np.uint8)
        for i in range(n):
            sky = np.array([0.25, 0.45, 0.85]) * rng.uniform(0.6, 1.1)
            img = sky * (1 - 0.6 * yy[..., None]) + np.array([0.1, 0.3, 0.0]) * yy[..., None]
            for _ in range(rng.integers(1, 4)):
                cx, cy, r = rng.uniform(0.2, 0.8), rng.uniform(0.2, 0.8), rng.uniform(0.1, 0.25)
                mask = 1 / (1 + np.exp(((xx - cx) ** 2 + (yy - cy) ** 2 - r**2) * 120))
                color = rng.uniform([0.6, 0.2, 0.0], [1.0, 0.9, 0.3])
                img = img * (1 - mask[..., None]) + color * mask[..., None]
            self.images[i] = (img.clip(0, 1) * 255).round()
        self.augment_flip = augment_flip

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        img = torch.from_numpy(self.images[index]).permute(2, 0, 1)
        img = img.float() / 255.0
        if self.augment_flip and random.random() < 0.5:
            img = img.flip(-1)
        return img


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim, theta=10000):
        super().__init__()
        self.dim, self.theta = dim, theta

    def forward(self, x):
        half = self.dim // 2
        freqs = torch.exp(torch.arange(half, device=x.device) * -(math.log(self.theta) / (half - 1)))
        emb = x[:, None].float() * freqs[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class ResnetBlock(nn.Module):
    def __init__(self, dim, dim_out, time_dim, groups=8, dropout=0.0):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_dim, dim_out * 2))
        self.conv1 = nn.Conv2d(dim, dim_out, 3, padding=1)
        self.norm1 = nn.GroupNorm(groups, dim_out)
        self.conv2 = nn.Conv2d(dim_out, dim_out, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, dim_out)
        self.drop = nn.Dropout(dropout)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, time_emb):
        scale, shift = self.mlp(time_emb)[:, :, None, None].chunk(2, dim=1)
        h = self.norm1(self.conv1(x)) * (scale + 1) + shift
        h = self.drop(F.silu(h))
        h = F.silu(self.norm2(self.conv2(h)))
        return h + self.res_conv(x)


class Unet(nn.Module):
    def __init__(self, dim=24, channels=3, dropout=0.0):
        super().__init__()
        td = dim * 4
        self.init_conv = nn.Conv2d(channels, dim, 5, padding=2)
        self.time_mlp = nn.Sequential(SinusoidalPosEmb(dim), nn.Linear(dim, td), nn.GELU(), nn.Linear(td, td))
        self.down1 = ResnetBlock(dim, dim, td, dropout=dropout)
        self.downsample = nn.Conv2d(dim, dim * 2, 4, 2, 1)
        self.down2 = ResnetBlock(dim * 2, dim * 2, td, dropout=dropout)
        self.mid = ResnetBlock(dim * 2, dim * 2, td, dropout=dropout)
        self.up2 = ResnetBlock(dim * 4, dim * 2, td, dropout=dropout)
        self.upsample = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(dim * 2, dim, 3, padding=1))
        self.up1 = ResnetBlock(dim * 2, dim, td, dropout=dropout)
        self.final = ResnetBlock(dim * 2, dim, td, dropout=dropout)
        self.final_conv = nn.Conv2d(dim, channels, 1)

    def forward(self, x, time):
        x = self.init_conv(x)
        r = x.clone()
        t = self.time_mlp(time)
        h1 = self.down1(x, t)
        h2 = self.down2(self.downsample(h1), t)
        m = self.mid(h2, t)
        u = self.up2(torch.cat((m, h2), dim=1), t)
        u = self.up1(torch.cat((self.upsample(u), h1), dim=1), t)
        return self.final_conv(self.final(torch.cat((u, r), dim=1), t))


def linear_beta_schedule(T):
    return torch.linspace(0.1 / T, 20 / T, T, dtype=torch.float64)


def cosine_beta_schedule(T, s=0.008):
    x = torch.linspace(0, T, T + 1, dtype=torch.float64) / T
    ac = torch.cos((x + s) / (1 + s) * math.pi * 0.5) ** 2
    return torch.clip(1 - ac[1:] / ac[:-1], 0, 0.999)


class GaussianDiffusion(nn.Module):
    def __init__(
        self,
        model,
        image_size,
        timesteps=1000,
        objective="pred_v",
        beta_schedule="cosine",
        min_snr=False,
        min_snr_gamma=5.0,
        offset_noise=0.0,
    ):
        super().__init__()
        self.model, self.image_size, self.objective = model, image_size, objective
        self.num_timesteps, self.offset_noise_strength = timesteps, offset_noise
        betas = {"linear": linear_beta_schedule, "cosine": cosine_beta_schedule}[beta_schedule](timesteps)
        ac = torch.cumprod(1.0 - betas, dim=0)
        snr = ac / (1 - ac)
        clipped = snr.clamp(max=min_snr_gamma) if min_snr else snr.clone()
        weight = {"pred_noise": clipped / snr, "pred_x0": clipped, "pred_v": clipped / (snr + 1)}[objective]
        for name, val in (
            ("alphas_cumprod", ac),
            ("sqrt_ac", ac.sqrt()),
            ("sqrt_one_minus_ac", (1 - ac).sqrt()),
            ("loss_weight", weight),
        ):
            self.register_buffer(name, val.to(torch.float32))

    def q_sample(self, x_start, t, noise):
        return extract(self.sqrt_ac, t, x_start.shape) * x_start + extract(self.sqrt_one_minus_ac, t, x_start.shape) * noise

    def predict_v(self, x_start, t, noise):
        return extract(self.sqrt_ac, t, x_start.shape) * noise - extract(self.sqrt_one_minus_ac, t, x_start.shape) * x_start

    def predict_x0_eps(self, x, t, out):
        a, s = extract(self.sqrt_ac, t, x.shape), extract(self.sqrt_one_minus_ac, t, x.shape)
        x0 = {"pred_noise": (x - s * out) / a, "pred_x0": out, "pred_v": a * x - s * out}[self.objective]
        x0 = x0.clamp(-1, 1)
        return x0, (x - a * x0) / s

    @torch.no_grad()
    def sample(self, batch_size, steps=8, generator=None):
        """Deterministic DDIM; returns images in [0, 1]."""
        img = torch.randn(batch_size, 3, self.image_size, self.image_size, generator=generator)
        times = [*torch.linspace(self.num_timesteps - 1, 0, steps).long().tolist(), -1]
        for cur, nxt in itertools.pairwise(times):
            t = torch.full((batch_size,), cur, dtype=torch.long)
            x0, eps = self.predict_x0_eps(img, t, self.model(img, t))
            ac = self.alphas_cumprod[nxt] if nxt >= 0 else torch.ones(())
            img = ac.sqrt() * x0 + (1 - ac).sqrt() * eps
        return (img + 1) * 0.5

    def p_losses(self, x_start, t, noise=None):
        noise = torch.randn_like(x_start) if noise is None else noise
        if self.offset_noise_strength > 0.0:
            offset = torch.randn(x_start.shape[:2], device=x_start.device)
            noise = noise + self.offset_noise_strength * offset[:, :, None, None]
        x = self.q_sample(x_start, t, noise)
        model_out = self.model(x, t)
        if self.objective == "pred_v":
            target = self.predict_v(x_start, t, noise)
        else:
            target = noise if self.objective == "pred_noise" else x_start
        loss = F.mse_loss(model_out.float(), target, reduction="none")
        loss = loss.flatten(1).mean(dim=1)
        loss = loss * extract(self.loss_weight, t, loss.shape)
        return loss.mean()

    def forward(self, img):
        assert img.shape[-1] == img.shape[-2] == self.image_size
        t = torch.randint(0, self.num_timesteps, (img.shape[0],), device=img.device).long()
        img = img * 2 - 1
        return self.p_losses(img, t)


class EMA:
    def __init__(self, model, beta=0.995, update_every=2, step_start=8):
        self.beta, self.update_every, self.step_start, self.step = beta, update_every, step_start, 0
        self.ema_model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        self.step += 1
        if self.step % self.update_every != 0:
            return
        warm = self.step <= self.step_start
        for p_ema, p in zip(self.ema_model.parameters(), model.parameters()):
            p_ema.copy_(p) if warm else p_ema.lerp_(p, 1 - self.beta)


class Trainer:
    def __init__(self, diffusion, dataset, args):
        self.args, self.step = args, 0
        self.accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision)
        dl = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True, num_workers=0)
        self.ema = EMA(diffusion, args.ema_decay, args.ema_update_every, args.ema_start)
        opt = torch.optim.Adam(diffusion.parameters(), lr=args.lr, betas=(0.9, 0.99))
        self.model, self.opt, dl = self.accelerator.prepare(diffusion, opt, dl)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt.optimizer, lambda s: min(1.0, (s + 1) / max(1, args.warmup)))
        self.dl = cycle(dl)

    def train(self):
        args, acc = self.args, self.accelerator
        self.model.train()
        while self.step < args.steps:
            total_loss = 0.0
            for _ in range(args.accum):
                data = next(self.dl)
                with acc.autocast():
                    loss = self.model(data)
                    loss = loss / args.accum
                total_loss += loss.item()
                acc.backward(loss)
            acc.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
            self.opt.step()
            self.opt.zero_grad()
            self.sched.step()
            self.step += 1
            self.ema.update(acc.unwrap_model(self.model))
            print(f"step {self.step} loss {total_loss!r}", flush=True)
            if self.step % args.sample_every == 0:
                self.milestone(self.step // args.sample_every)

    def milestone(self, number):
        gen = torch.Generator().manual_seed(number)
        imgs = self.ema.ema_model.sample(4, generator=gen)
        print(f"milestone {number} sample mean {imgs.mean().item():.4f} std {imgs.std().item():.4f}", flush=True)
        if self.args.out:
            torch.save(
                {"step": self.step, "samples": imgs, "ema": self.ema.ema_model.state_dict()}, f"{self.args.out}-{number}.pt"
            )


def main():
    p = argparse.ArgumentParser()
    defaults = {
        "steps": 48,
        "seed": 0,
        "batch_size": 16,
        "accum": 2,
        "lr": 1e-3,
        "warmup": 10,
        "max_grad_norm": 1.0,
        "objective": "pred_v",
        "beta_schedule": "cosine",
        "timesteps": 1000,
        "offset_noise": 0.0,
        "dropout": 0.1,
        "ema_decay": 0.95,
        "ema_update_every": 2,
        "ema_start": 8,
        "mixed_precision": "no",
        "sample_every": 24,
        "out": "",
    }
    for name, value in defaults.items():
        p.add_argument(f"--{name}", type=type(value), default=value)
    for name in ("min_snr", "no_flip"):
        p.add_argument(f"--{name}", action="store_true")
    args = p.parse_args()
    random.seed(args.seed), np.random.seed(args.seed), torch.manual_seed(args.seed)
    unet = Unet(dropout=args.dropout)
    diffusion = GaussianDiffusion(
        unet, 16, args.timesteps, args.objective, args.beta_schedule, args.min_snr, offset_noise=args.offset_noise
    )
    print(f"parameters {sum(q.numel() for q in unet.parameters())}")
    Trainer(diffusion, Blobs(256, 16, augment_flip=not args.no_flip), args).train()


if __name__ == "__main__":
    main()

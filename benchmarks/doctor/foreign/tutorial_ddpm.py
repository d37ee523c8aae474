"""Tiny class-conditional DDPM in plain PyTorch (shapes, 16x16)."""

import argparse
import copy
import math
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Colored discs, squares, bars and crosses on a dark background, kept as uint8 HWC."""

    COLORS = np.array([[220, 60, 40], [50, 200, 70], [60, 90, 230], [230, 210, 50]], dtype=np.float32)

    def __init__(self, n=256, size=16, seed=0):
        rng = np.random.default_rng(seed)
        yy, xx = np.mgrid[0:size, 0:size]
        self.images = np.zeros((n, size, size, 3), dtype=np.uint8)
        self.labels = np.zeros(n, dtype=np.int64)
        for i in range(n):
            k = i % 4
            cy, cx = rng.uniform(5, size - 5, 2)
            r = rng.uniform(3, 5)
            dy, dx = yy - cy, xx - cx
            mask = [
                dy**2 + dx**2 < r**2,
                np.maximum(abs(dy), abs(dx)) < r * 0.85,
                (abs(dy) < 2) & (abs(dx) < r + 2),
                np.minimum(abs(dy - dx), abs(dy + dx)) < 1.6,
            ][k]
            img = np.full((size, size, 3), 25.0) + rng.uniform(0, 30)
            img[mask] = self.COLORS[k] * rng.uniform(0.8, 1.1)
            self.images[i], self.labels[i] = np.clip(img, 0, 255).astype(np.uint8), k

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        img = torch.from_numpy(self.images[i]).permute(2, 0, 1).float() / 255.0
        if torch.rand(()) < 0.5:
            img = torch.flip(img, dims=[-1])
        return img * 2.0 - 1.0, int(self.labels[i])


class Diffusion:
    def __init__(self, noise_steps=1000, beta_start=1e-4, beta_end=0.02, img_size=16, device="cpu"):
        self.noise_steps, self.img_size, self.device = noise_steps, img_size, device
        self.beta = torch.linspace(beta_start, beta_end, noise_steps).to(device)
        self.alpha = 1.0 - self.beta
        self.alpha_hat = torch.cumprod(self.alpha, dim=0)

    def noise_images(self, x, t):
        sqrt_alpha_hat = torch.sqrt(self.alpha_hat[t])[:, None, None, None]
        sqrt_one_minus_alpha_hat = torch.sqrt(1.0 - self.alpha_hat[t])[:, None, None, None]
        eps = torch.randn_like(x)
        return sqrt_alpha_hat * x + sqrt_one_minus_alpha_hat * eps, eps

    def sample_timesteps(self, n):
        return torch.randint(low=0, high=self.noise_steps, size=(n,), device=self.device)

    @torch.no_grad()
    def sample(self, model, labels, steps=10, cfg_scale=2.0, generator=None):
        """Deterministic (DDIM) sampling with classifier-free guidance."""
        n, was_training = len(labels), model.training
        model.eval()
        null = torch.full_like(labels, model.num_classes)
        x = torch.randn((n, 3, self.img_size, self.img_size), generator=generator, device=self.device)
        times = torch.linspace(self.noise_steps - 1, 0, steps).long().tolist()
        for i, step in enumerate(times):
            t = torch.full((n,), step, device=self.device, dtype=torch.long)
            eps = torch.lerp(model(x, t, null), model(x, t, labels), cfg_scale)
            a = self.alpha_hat[step]
            a_prev = self.alpha_hat[times[i + 1]] if i + 1 < steps else torch.ones(())
            x0 = ((x - torch.sqrt(1 - a) * eps) / torch.sqrt(a)).clamp(-1, 1)
            x = torch.sqrt(a_prev) * x0 + torch.sqrt(1 - a_prev) * eps
        model.train(was_training)
        return ((x.clamp(-1, 1) + 1) * 127.5).to(torch.uint8)


class EMA:
    def __init__(self, beta, start):
        self.beta, self.start, self.step = beta, start, 0

    @torch.no_grad()
    def step_ema(self, ema_model, model):
        self.step += 1
        if self.step <= self.start:
            ema_model.load_state_dict(model.state_dict())
            return
        for old, new in zip(ema_model.parameters(), model.parameters()):
            old.data.mul_(self.beta).add_(new.data, alpha=1.0 - self.beta)


class ResBlock(nn.Module):
    def __init__(self, c_in, c_out, emb_dim, dropout=0.05):
        super().__init__()
        self.norm1 = nn.GroupNorm(8, c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.emb = nn.Linear(emb_dim, c_out)
        self.norm2 = nn.GroupNorm(8, c_out)
        self.drop = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.skip = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        h = self.conv2(self.drop(F.silu(self.norm2(h))))
        return self.skip(x) + h


class UNet(nn.Module):
    def __init__(self, num_classes=4, c=24, emb_dim=64):
        super().__init__()
        self.num_classes, self.emb_dim = num_classes, emb_dim
        self.time_mlp = nn.Sequential(nn.Linear(emb_dim, emb_dim), nn.SiLU(), nn.Linear(emb_dim, emb_dim))
        self.label_emb = nn.Embedding(num_classes + 1, emb_dim)  # the last one means "no label"
        self.inc = nn.Conv2d(3, c, 3, padding=1)
        self.down1 = ResBlock(c, c, emb_dim)
        self.pool1 = nn.Conv2d(c, 2 * c, 3, stride=2, padding=1)
        self.down2 = ResBlock(2 * c, 2 * c, emb_dim)
        self.pool2 = nn.Conv2d(2 * c, 2 * c, 3, stride=2, padding=1)
        self.mid = ResBlock(2 * c, 2 * c, emb_dim)
        self.up2 = ResBlock(4 * c, 2 * c, emb_dim)
        self.up1 = ResBlock(3 * c, c, emb_dim)
        self.norm_out = nn.GroupNorm(8, c)
        self.outc = nn.Conv2d(c, 3, 3, padding=1)

    def pos_encoding(self, t):
        half = self.emb_dim // 2
        freqs = torch.exp(-math.log(10000.0) * torch.arange(half, device=t.device) / half)
        ang = t[:, None].float() * freqs[None]
        return torch.cat([ang.sin(), ang.cos()], dim=-1)

    def forward(self, x, t, y):
        emb = self.time_mlp(self.pos_encoding(t)) + self.label_emb(y)
        x1 = self.down1(self.inc(x), emb)
        x2 = self.down2(self.pool1(x1), emb)
        x3 = self.mid(self.pool2(x2), emb)
        u = F.interpolate(x3, scale_factor=2.0, mode="nearest")
        u = self.up2(torch.cat([u, x2], dim=1), emb)
        u = F.interpolate(u, scale_factor=2.0, mode="nearest")
        u = self.up1(torch.cat([u, x1], dim=1), emb)
        return self.outc(F.silu(self.norm_out(u)))


def train(args):
    torch.manual_seed(args.seed)
    device = "cpu"
    loader = DataLoader(Shapes(args.images), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = UNet().to(device)
    ema_model = copy.deepcopy(model).eval().requires_grad_(False)
    ema = EMA(args.ema_beta, args.ema_start)
    diffusion = Diffusion(noise_steps=args.noise_steps, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.updates, pct_start=0.2)
    mse = nn.MSELoss()
    amp_dtype = torch.float16 if args.amp == "fp16" else torch.bfloat16
    scaler = torch.amp.GradScaler(device, enabled=args.amp == "fp16")
    update, micro, running, epoch = 0, 0, 0.0, 0
    model.train()
    while update < args.updates:
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            t = diffusion.sample_timesteps(images.shape[0])
            x_t, noise = diffusion.noise_images(images, t)
            drop = torch.rand(labels.shape[0], device=device) < args.label_drop
            labels = torch.where(drop, torch.full_like(labels, model.num_classes), labels)
            with torch.autocast(device, dtype=amp_dtype, enabled=args.amp != "no"):
                predicted_noise = model(x_t, t, labels)
            loss = mse(predicted_noise.float(), noise)
            scaler.scale(loss / args.accum).backward()
            running += loss.item() / args.accum
            micro += 1
            if micro % args.accum != 0:
                continue
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            ema.step_ema(ema_model, model)
            print(f"step {update} loss {running!r}", flush=True)
            update, running = update + 1, 0.0
            if update == args.updates:
                break
        epoch += 1
        if args.preview and epoch % args.preview == 0:
            gen = torch.Generator(device).manual_seed(1234)
            grid = diffusion.sample(ema_model, torch.arange(4, device=device), generator=gen)
            print(f"epoch {epoch} preview mean {grid.float().mean().item():.3f}", flush=True)
            if args.save:
                os.makedirs(args.save, exist_ok=True)
                torch.save({"model": model.state_dict(), "ema": ema_model.state_dict()}, f"{args.save}/ckpt.pt")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    for name, default in [
        ("updates", 48),
        ("images", 256),
        ("batch_size", 16),
        ("accum", 1),
        ("noise_steps", 1000),
        ("ema_start", 5),
        ("preview", 1),
        ("seed", 0),
    ]:  # preview: every N epochs, 0 = never
        p.add_argument("--" + name, type=int, default=default)
    for name, default in [("lr", 2e-3), ("clip", 1.0), ("label_drop", 0.1), ("ema_beta", 0.95)]:
        p.add_argument("--" + name, type=float, default=default)
    p.add_argument("--amp", choices=["no", "bf16", "fp16"], default="no")
    p.add_argument("--save", default="", help="folder for checkpoints, empty = none")
    train(p.parse_args())

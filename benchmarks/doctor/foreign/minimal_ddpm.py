"""Minimal DDPM / v-prediction training on small colored shapes, in one file."""

import argparse
import copy
import math
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

NUM_CLASSES = 4


class Shapes(Dataset):
    """Colored shapes (disc, square, cross, stripes) on a dark background."""

    def __init__(self, n, size, seed=0, flip=True):
        rng = np.random.default_rng(seed)
        self.images = np.zeros((n, size, size, 3), dtype=np.uint8)
        self.labels = rng.integers(0, NUM_CLASSES, n)
        self.flip = flip
        yy, xx = np.mgrid[:size, :size]
        for i, c in enumerate(self.labels):
            cy, cx = rng.uniform(size * 0.35, size * 0.65, 2)
            r = rng.uniform(size * 0.2, size * 0.35)
            if c == 0:
                mask = (yy - cy) ** 2 + (xx - cx) ** 2 < r**2
            elif c == 1:
                mask = (abs(yy - cy) < r) & (abs(xx - cx) < r)
            elif c == 2:
                mask = (abs(yy - cy) < r / 2.5) | (abs(xx - cx) < r / 2.5)
            else:
                mask = ((yy + xx + int(cx)) // 3) % 2 == 0
            color = rng.integers(60, 256, 3)
            self.images[i] = rng.integers(0, 40, 3)
            self.images[i][mask] = color

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        x = torch.from_numpy(self.images[i]).permute(2, 0, 1).float()
        x = x / 127.5 - 1.0
        if self.flip and torch.rand(()) < 0.5:
            x = torch.flip(x, dims=[2])
        return x, int(self.labels[i])


def timestep_embedding(t, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, device=t.device).float() / half)
    args = t.float()[:, None] * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, emb_dim, dropout=0.0):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.emb = nn.Linear(emb_dim, cout)
        self.norm2 = nn.GroupNorm(4, cout)
        self.drop = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        h = self.conv2(self.drop(F.silu(self.norm2(h))))
        return self.skip(x) + h


class Attention(nn.Module):
    def __init__(self, ch, heads=2):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, ch)
        self.qkv = nn.Conv2d(ch, 3 * ch, 1)
        self.proj = nn.Conv2d(ch, ch, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).unbind(1)
        scores = torch.einsum("bhdi,bhdj->bhij", q, k) / math.sqrt(c // self.heads)
        att = scores.softmax(dim=-1)
        out = torch.einsum("bhij,bhdj->bhdi", att, v).reshape(b, c, h, w)
        return x + self.proj(out)


class UNet(nn.Module):
    def __init__(self, ch=16, num_classes=None, dropout=0.0):
        super().__init__()
        emb_dim = ch * 4
        self.ch = ch
        self.time_mlp = nn.Sequential(nn.Linear(ch, emb_dim), nn.SiLU(), nn.Linear(emb_dim, emb_dim))
        # one extra class is the "null" label for classifier-free guidance
        self.label_emb = nn.Embedding(num_classes + 1, emb_dim) if num_classes else None
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        self.down1 = ResBlock(ch, ch, emb_dim, dropout)
        self.pool = nn.Conv2d(ch, ch * 2, 3, stride=2, padding=1)
        self.down2 = ResBlock(ch * 2, ch * 2, emb_dim, dropout)
        self.mid1 = ResBlock(ch * 2, ch * 2, emb_dim, dropout)
        self.mid_attn = Attention(ch * 2)
        self.mid2 = ResBlock(ch * 2, ch * 2, emb_dim, dropout)
        self.up2 = ResBlock(ch * 4, ch * 2, emb_dim, dropout)
        self.upconv = nn.Conv2d(ch * 2, ch, 3, padding=1)
        self.up1 = ResBlock(ch * 2, ch, emb_dim, dropout)
        self.norm_out = nn.GroupNorm(4, ch)
        self.conv_out = nn.Conv2d(ch, 3, 3, padding=1)
        nn.init.zeros_(self.conv_out.weight)
        nn.init.zeros_(self.conv_out.bias)

    def forward(self, x, t, y=None):
        emb = self.time_mlp(timestep_embedding(t, self.ch))
        if self.label_emb is not None and y is not None:
            emb = emb + self.label_emb(y)
        h1 = self.down1(self.conv_in(x), emb)
        h2 = self.down2(self.pool(h1), emb)
        h = self.mid2(self.mid_attn(self.mid1(h2, emb)), emb)
        h = self.up2(torch.cat([h, h2], dim=1), emb)
        h = self.upconv(F.interpolate(h, scale_factor=2, mode="nearest"))
        h = self.up1(torch.cat([h, h1], dim=1), emb)
        return self.conv_out(F.silu(self.norm_out(h)))


class Diffusion:
    def __init__(self, num_timesteps=1000, schedule="linear", prediction="eps", device="cpu"):
        self.T = num_timesteps
        self.prediction = prediction
        if schedule == "linear":
            betas = torch.linspace(1e-4, 0.02, num_timesteps, dtype=torch.float64)
        else:
            s = torch.arange(num_timesteps + 1, dtype=torch.float64) / num_timesteps
            f = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
            betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
        alpha_bar = torch.cumprod(1.0 - betas, dim=0)
        self.betas = betas.float().to(device)
        self.alpha_bar = alpha_bar.float().to(device)
        self.sqrt_ab = alpha_bar.sqrt().float().to(device)
        self.sqrt_1mab = (1.0 - alpha_bar).sqrt().float().to(device)

    def q_sample(self, x0, t, noise):
        a = self.sqrt_ab[t].view(-1, 1, 1, 1)
        s = self.sqrt_1mab[t].view(-1, 1, 1, 1)
        return a * x0 + s * noise

    def get_target(self, x0, t, noise):
        if self.prediction == "eps":
            return noise
        a = self.sqrt_ab[t].view(-1, 1, 1, 1)
        s = self.sqrt_1mab[t].view(-1, 1, 1, 1)
        return a * noise - s * x0

    def loss_weight(self, t, gamma):
        snr = self.alpha_bar[t] / (1.0 - self.alpha_bar[t])
        clipped = snr.clamp(max=gamma)
        if self.prediction == "eps":
            return clipped / snr
        return clipped / (snr + 1.0)

    @torch.no_grad()
    def sample(self, model, shape, y=None, guidance=1.0, steps=20, device="cpu"):
        """DDIM sampling with classifier-free guidance."""
        x = torch.randn(shape, device=device)
        ts = torch.linspace(self.T - 1, 0, steps, device=device).round().long()
        for i, ti in enumerate(ts):
            t = ti.expand(shape[0])
            out = model(x, t, y)
            if y is not None and guidance != 1.0:
                null = torch.full_like(y, NUM_CLASSES)
                out_null = model(x, t, null)
                out = out_null + guidance * (out - out_null)
            a, s = self.sqrt_ab[ti], self.sqrt_1mab[ti]
            if self.prediction == "eps":
                x0, eps = (x - s * out) / a, out
            else:
                x0, eps = a * x - s * out, s * x + a * out
            x0 = x0.clamp(-1, 1)
            x = x0
            if i + 1 < len(ts):
                x = self.sqrt_ab[ts[i + 1]] * x0 + self.sqrt_1mab[ts[i + 1]] * eps
        return x


class EMA:
    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.num_updates = 0
        self.model = copy.deepcopy(model).eval()
        self.model.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        self.num_updates += 1
        d = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for p_ema, p in zip(self.model.parameters(), model.parameters()):
            p_ema.mul_(d).add_(p, alpha=1 - d)


@torch.no_grad()
def validate(model, diffusion, loader, class_cond, device):
    gen = torch.Generator(device=device).manual_seed(1234)  # same noise at every validation
    model.eval()
    losses = []
    for x0, y in loader:
        x0 = x0.to(device)
        t = torch.randint(0, diffusion.T, (x0.shape[0],), generator=gen, device=device)
        noise = torch.randn(x0.shape, generator=gen, device=device)
        pred = model(diffusion.q_sample(x0, t, noise), t, y.to(device) if class_cond else None)
        losses.append(F.mse_loss(pred, diffusion.get_target(x0, t, noise)).item())
    model.train()
    return float(np.mean(losses))


def lr_lambda(step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=48, help="number of optimizer updates")
    p.add_argument("--batch_size", type=int, default=8)
    p.add_argument("--accum", type=int, default=1, help="gradient accumulation steps")
    p.add_argument("--size", type=int, default=16)
    p.add_argument("--n_images", type=int, default=512)
    p.add_argument("--ch", type=int, default=16)
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--warmup", type=int, default=10)
    p.add_argument("--weight_decay", type=float, default=0.01)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--timesteps", type=int, default=1000)
    p.add_argument("--schedule", choices=["linear", "cosine"], default="linear")
    p.add_argument("--prediction", choices=["eps", "v"], default="eps")
    p.add_argument("--min_snr_gamma", type=float, default=0.0, help="0 turns the weighting off")
    p.add_argument("--ema_decay", type=float, default=0.999)
    p.add_argument("--class_cond", action="store_true")
    p.add_argument("--label_drop", type=float, default=0.1)
    p.add_argument("--guidance", type=float, default=2.0)
    p.add_argument("--amp", action="store_true", help="bf16 autocast")
    p.add_argument("--no_flip", action="store_true")
    p.add_argument("--resume", type=str, default=None)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--val_every", type=int, default=0, help="validate every N updates, 0 for never")
    p.add_argument("--log_every", type=int, default=10)
    p.add_argument("--out", type=str, default="ddpm_out")
    return p.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    os.makedirs(args.out, exist_ok=True)

    dataset = Shapes(args.n_images, args.size, flip=not args.no_flip)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(Shapes(16, args.size, seed=1, flip=False), batch_size=args.batch_size)

    model = UNet(args.ch, NUM_CLASSES if args.class_cond else None, args.dropout).to(device)
    ema = EMA(model, args.ema_decay)
    diffusion = Diffusion(args.timesteps, args.schedule, args.prediction, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: lr_lambda(s, args.warmup, args.steps))

    step = 0
    if args.resume:
        ckpt = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(ckpt["model"])
        ema.model.load_state_dict(ckpt["ema"])
        ema.num_updates = ckpt["ema_updates"]
        optimizer.load_state_dict(ckpt["optimizer"])
        scheduler.load_state_dict(ckpt["scheduler"])
        step = ckpt["step"]

    model.train()
    micro = 0
    running = []
    while step < args.steps:
        for x0, y in loader:
            x0, y = x0.to(device), y.to(device)
            if args.class_cond:
                drop = torch.rand(y.shape[0], device=device) < args.label_drop
                y = torch.where(drop, torch.full_like(y, NUM_CLASSES), y)
            else:
                y = None
            t = torch.randint(0, diffusion.T, (x0.shape[0],), device=device)
            noise = torch.randn_like(x0)
            xt = diffusion.q_sample(x0, t, noise)
            target = diffusion.get_target(x0, t, noise)

            with torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=args.amp):
                pred = model(xt, t, y)
            loss = F.mse_loss(pred.float(), target, reduction="none").mean(dim=(1, 2, 3))
            if args.min_snr_gamma > 0:
                loss = loss * diffusion.loss_weight(t, args.min_snr_gamma)
            loss = loss.mean()
            (loss / args.accum).backward()
            running.append(loss.item())
            micro += 1
            if micro % args.accum != 0:
                continue

            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            ema.update(model)
            step += 1
            if step % args.log_every == 0:
                print(f"step {step} loss {np.mean(running):.4f} lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
                running = []
            if args.val_every and step % args.val_every == 0:
                val = validate(model, diffusion, val_loader, args.class_cond, device)
                print(f"step {step} val {val:.4f}", flush=True)
            if step >= args.steps:
                break

    torch.save(
        {
            "model": model.state_dict(),
            "ema": ema.model.state_dict(),
            "ema_updates": ema.num_updates,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": step,
            "args": vars(args),
        },
        os.path.join(args.out, "last.pt"),
    )

    labels = torch.arange(8, device=device) % NUM_CLASSES if args.class_cond else None
    samples = diffusion.sample(ema.model, (8, 3, args.size, args.size), labels, args.guidance, device=device)
    grid = ((samples + 1) * 127.5).clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
    from PIL import Image

    Image.fromarray(np.concatenate(list(grid), axis=1)).save(os.path.join(args.out, "samples.png"))


if __name__ == "__main__":
    main()

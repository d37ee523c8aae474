"""Flow matching on short films, in the manner of JiT: time runs from noise (0) to film (1), the network gives the film, and the
loss compares velocities. The learning rate depends on the films seen; everything is passed by keyword.

python video_flow.py --steps 100 --checkpointing --accum_iter 2
"""

import argparse
import math

import numpy as np
import torch
from images import shapes
from networks import Block, sinusoidal
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

CLASSES, FRAMES = 4, 4


class Films(Dataset):
    """A shape that moves: uint8, frames first."""

    def __init__(self, count, seed):
        self.images, self.labels = shapes(count, seed=seed)
        self.speed = np.random.default_rng(seed).integers(-2, 3, (count, 2))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        frames = [np.roll(self.images[i], n * self.speed[i], axis=(0, 1)) for n in range(FRAMES)]
        return {"video": np.stack(frames), "label": self.labels[i]}


def collate(items):
    video = np.stack([item["video"] for item in items]).astype(np.float32)
    video = np.moveaxis(video, -1, 1) / 255.0
    labels = np.array([item["label"] for item in items])
    return {"video": torch.from_numpy(video), "label": torch.from_numpy(labels).long()}


class VideoTransformer(nn.Module):
    def __init__(self, width=64, depth=3, patch=4):
        super().__init__()
        self.patch, self.width, self.checkpointing = patch, width, False
        self.x_embedder = nn.Conv3d(3, width, (1, patch, patch), stride=(1, patch, patch))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, FRAMES * (16 // patch) ** 2, width))
        self.t_embedder = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.y_embedder = nn.Embedding(CLASSES + 1, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.final_norm, self.final_linear = nn.LayerNorm(width), nn.Linear(width, 3 * patch * patch)

    def forward(self, *, sample, time, label):
        c = self.t_embedder(sinusoidal(1000 * time, self.width)) + self.y_embedder(label)
        tokens = self.x_embedder(sample).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            if self.checkpointing and self.training:
                tokens = checkpoint(block, tokens, c, use_reentrant=False)
            else:
                tokens = block(tokens, c)
        n, side, p = len(sample), 16 // self.patch, self.patch
        out = self.final_linear(self.final_norm(tokens)).view(n, FRAMES, side, side, 3, p, p)
        return out.permute(0, 4, 1, 2, 5, 3, 6).reshape(n, 3, FRAMES, 16, 16)


class Denoiser(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.net = VideoTransformer()
        self.net.checkpointing = args.checkpointing
        self.P_mean, self.P_std, self.t_eps = args.P_mean, args.P_std, 0.05
        self.noise_scale, self.label_drop_prob, self.ema_decay = args.noise_scale, args.label_drop_prob, args.ema_decay
        self.ema_params = None

    def drop_labels(self, labels):
        drop = torch.rand(labels.shape[0], device=labels.device) < self.label_drop_prob
        return torch.where(drop, torch.full_like(labels, CLASSES), labels)

    def sample_t(self, n):
        return torch.sigmoid(torch.randn(n) * self.P_std + self.P_mean)

    def forward(self, x, labels):
        labels_dropped = self.drop_labels(labels) if self.training else labels
        t = self.sample_t(x.size(0))
        s = t.view(-1, *([1] * (x.ndim - 1)))
        e = torch.randn_like(x) * self.noise_scale
        z = s * x + (1 - s) * e
        v = (x - z) / (1 - s).clamp_min(self.t_eps)
        x_pred = self.net(sample=z, time=t, label=labels_dropped)
        v_pred = (x_pred.float() - z) / (1 - s).clamp_min(self.t_eps)
        loss = (v - v_pred) ** 2
        return loss.mean(dim=(1, 2, 3, 4)).mean()

    @torch.no_grad()
    def update_ema(self):
        source_params = list(self.net.parameters())
        torch._foreach_mul_(self.ema_params, self.ema_decay)
        torch._foreach_add_(self.ema_params, source_params, alpha=1 - self.ema_decay)

    @torch.no_grad()
    def generate(self, labels, steps=4, cfg=2.0):
        kept = [p.clone() for p in self.net.parameters()]
        torch._foreach_copy_(list(self.net.parameters()), self.ema_params)
        z = self.noise_scale * torch.randn(len(labels), 3, FRAMES, 16, 16)
        for i in range(steps):
            t = torch.full((len(labels),), i / steps)
            cond = self.net(sample=z, time=t, label=labels)
            uncond = self.net(sample=z, time=t, label=torch.full_like(labels, CLASSES))
            x = uncond + cfg * (cond - uncond)
            z = z + (x - z) / max(1 - i / steps, self.t_eps) / steps
        torch._foreach_copy_(list(self.net.parameters()), kept)
        return z


def adjust_learning_rate(optimizer, seen, args):
    """Linear rise, then a fall with the root of the films seen."""
    lr = args.lr / math.sqrt(max(seen / args.ref_films, 1.0))
    if seen < args.warmup_films:
        lr = lr * seen / args.warmup_films
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    return lr


def main(args):
    torch.manual_seed(args.seed)
    loader = DataLoader(
        Films(256, seed=1), args.batch_size, shuffle=True, drop_last=True, collate_fn=collate, num_workers=args.num_workers
    )
    model = Denoiser(args)
    model.train()
    decay = [p for p in model.net.parameters() if p.ndim > 1]
    no_decay = [p for p in model.net.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    model.ema_params = [p.detach().clone() for p in model.net.parameters()]

    update, micro, seen = 0, 0, 0
    while update < args.steps:
        for batch in loader:
            x = batch["video"].mul(2.0).sub(1.0)
            labels = batch["label"]
            seen += len(x)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
                loss = model(x, labels)
            (loss / args.accum_iter).backward()
            micro += 1
            if micro % args.accum_iter:
                continue
            adjust_learning_rate(optimizer, seen, args)
            if args.clip_grad:
                torch.nn.utils.clip_grad_norm_(model.net.parameters(), args.clip_grad)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            model.update_ema()
            update += 1
            print(update, repr(loss.item()))
            if update % args.sample_freq == 0:
                model.eval()
                print("samples", repr(model.generate(torch.arange(CLASSES)).std().item()))
                model.train()
            if update == args.steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--accum_iter", type=int, default=1)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--ref_films", type=float, default=400)
    parser.add_argument("--warmup_films", type=float, default=100)
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--clip_grad", type=float, default=1.0)
    parser.add_argument("--P_mean", type=float, default=-0.8)
    parser.add_argument("--P_std", type=float, default=0.8)
    parser.add_argument("--noise_scale", type=float, default=1.0)
    parser.add_argument("--label_drop_prob", type=float, default=0.1)
    parser.add_argument("--ema_decay", type=float, default=0.95)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--sample_freq", type=int, default=20)
    main(parser.parse_args())

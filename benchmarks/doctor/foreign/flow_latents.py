#!/usr/bin/env python
"""Rectified flow on the latents of a (random, frozen) VAE, with accelerate and diffusers."""

import argparse
import itertools
import os

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, Dataset, TensorDataset

CLASSES = ("disc", "square", "ring", "bars")


def draw(kind, size, rng):
    y, x = np.mgrid[0:size, 0:size].astype(np.float32)
    cy, cx = rng.uniform(0.4 * size, 0.6 * size, 2)
    r = rng.uniform(0.2, 0.4) * size
    d = np.hypot(y - cy, x - cx)
    if kind == "disc":
        m = d < r
    elif kind == "square":
        m = np.maximum(abs(y - cy), abs(x - cx)) < r
    elif kind == "ring":
        m = abs(d - r) < 2
    else:
        m = (x + rng.integers(0, 4)) % 6 < 3
    fg = rng.uniform(0.4, 1.0, 3)
    bg = rng.uniform(0.0, 0.2, 3)
    return np.where(m[..., None], fg, bg).astype(np.float32)


class ShapeImages(Dataset):
    """Like an image folder: one class after another."""

    def __init__(self, per_class, size, seed):
        rng = np.random.default_rng(seed)
        self.items = [(draw(k, size, rng), c) for c, k in enumerate(CLASSES) for _ in range(per_class)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, idx):
        img, label = self.items[idx]
        pixels = torch.from_numpy(img).permute(2, 0, 1)
        return pixels * 2 - 1, torch.tensor(label)


def make_vae():
    """Stands for a pretrained VAE: random weights, small posterior variance."""
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
    )
    with torch.no_grad():
        vae.quant_conv.bias[4:] -= 10.0  # log-variance
    return vae.requires_grad_(False).eval()


class Trainer:
    def __init__(self, args):
        self.args = args
        self.accelerator = Accelerator(
            gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
        )
        set_seed(args.seed)
        self.device = self.accelerator.device

        self.vae = make_vae().to(self.device)
        self.dataset = ShapeImages(args.per_class, args.image_size, args.seed)
        self.fit_latent_statistics()

        self.model = UNet2DModel(
            sample_size=args.image_size // 2,
            in_channels=4,
            out_channels=4,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
            attention_head_dim=8,
            dropout=args.dropout,
            num_class_embeds=len(CLASSES) + 1 if args.class_cond else None,
        )
        self.ema = EMAModel(self.model.parameters(), decay=args.ema_decay, use_ema_warmup=True, power=0.75)
        self.ema.to(self.device)

        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if p.ndim > 1], "weight_decay": args.weight_decay},
            {"params": [p for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.99))

        train_set = self.cache_latents() if args.cache_latents else self.dataset
        self.loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
        self.lr_scheduler = get_scheduler(
            args.lr_scheduler,
            optimizer=self.optimizer,
            num_warmup_steps=args.warmup_steps * self.accelerator.num_processes,
            num_training_steps=args.steps * self.accelerator.num_processes,
        )
        self.model, self.optimizer, self.loader, self.lr_scheduler = self.accelerator.prepare(
            self.model, self.optimizer, self.loader, self.lr_scheduler
        )
        self.accelerator.register_for_checkpointing(self.ema)
        self.step = 0

    @torch.no_grad()
    def fit_latent_statistics(self):
        ids = np.random.default_rng(0).permutation(len(self.dataset))[:64]
        pixels = torch.stack([self.dataset[i][0] for i in ids]).to(self.device)
        z = self.vae.encode(pixels).latent_dist.mode()
        self.latents_mean = z.mean(dim=(0, 2, 3), keepdim=True)
        self.vae.register_to_config(scaling_factor=1.0 / (z - self.latents_mean).std().item())

    @torch.no_grad()
    def encode(self, pixels):
        z = self.vae.encode(pixels.to(self.device)).latent_dist.sample()
        return (z - self.latents_mean) * self.vae.config.scaling_factor

    def cache_latents(self):
        latents, labels = [], []
        for pixels, y in DataLoader(self.dataset, batch_size=32, shuffle=False):
            latents.append(self.encode(pixels).cpu())
            labels.append(y)
        return TensorDataset(torch.cat(latents), torch.cat(labels))

    def sample_times(self, n):
        u = torch.randn(n, device=self.device) * self.args.logit_std + self.args.logit_mean
        t = torch.sigmoid(u)
        shift = self.args.time_shift
        return shift * t / (1 + (shift - 1) * t)

    def weighting(self, t):
        if self.args.weighting == "cosmap":
            return 2 / (torch.pi * (1 - 2 * t + 2 * t**2))
        return torch.ones_like(t)

    def compute_loss(self, batch):
        data, labels = batch
        latents = data if self.args.cache_latents else self.encode(data)
        noise = torch.randn_like(latents)
        t = self.sample_times(latents.shape[0])

        tt = t.view(-1, 1, 1, 1)
        noisy = (1 - tt) * latents + tt * noise
        target = noise - latents

        kwargs = {}
        if self.args.class_cond:
            drop = torch.rand(labels.shape, device=self.device) < self.args.cond_dropout
            kwargs["class_labels"] = labels.masked_fill(drop, len(CLASSES))
        pred = self.model(noisy, t * 1000, **kwargs).sample

        loss = (pred.float() - target.float()).pow(2).mean(dim=(1, 2, 3))
        return (self.weighting(t) * loss).mean()

    def train(self):
        args = self.args
        losses = []
        self.model.train()
        while self.step < args.steps:
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.compute_loss(batch)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
                    self.optimizer.step()
                    self.lr_scheduler.step()
                    self.optimizer.zero_grad()
                losses.append(loss.item())

                if self.accelerator.sync_gradients:
                    self.ema.step(self.model.parameters())
                    self.step += 1
                    if self.step % args.log_every == 0:
                        lr = self.lr_scheduler.get_last_lr()[0]
                        print(f"step {self.step} loss {np.mean(losses):.4f} lr {lr:.2e}", flush=True)
                        losses = []
                    if args.sample_every and self.step % args.sample_every == 0:
                        self.preview()
                    if self.step >= args.steps:
                        break
        if args.output_dir:
            self.accelerator.save_state(os.path.join(args.output_dir, "state"))
            self.preview()

    def preview(self):
        unet = self.accelerator.unwrap_model(self.model)
        unet.eval()
        self.ema.store(unet.parameters())
        self.ema.copy_to(unet.parameters())
        images = self.sample(unet, 4, self.args.sample_steps)
        self.ema.restore(unet.parameters())
        unet.train()
        if self.args.output_dir:
            from PIL import Image

            os.makedirs(self.args.output_dir, exist_ok=True)
            rows = (images * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
            Image.fromarray(np.concatenate(list(rows), 1)).save(os.path.join(self.args.output_dir, f"step{self.step:06d}.png"))

    @torch.no_grad()
    def sample(self, unet, n, steps):
        gen = torch.Generator(device=self.device).manual_seed(0)
        size = self.args.image_size // 2
        x = torch.randn((n, 4, size, size), generator=gen, device=self.device)
        labels = torch.arange(n, device=self.device) % len(CLASSES) if self.args.class_cond else None
        ts = torch.linspace(1, 0, steps + 1, device=self.device)
        for t0, t1 in itertools.pairwise(ts):
            v = unet(x, (t0 * 1000).expand(n), class_labels=labels).sample
            x = x + (t1 - t0) * v
        z = x / self.vae.config.scaling_factor + self.latents_mean
        return (self.vae.decode(z).sample / 2 + 0.5).clamp(0, 1)


def parse_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=48)
    p.add_argument("--batch_size", type=int, default=8)
    p.add_argument("--gradient_accumulation_steps", type=int, default=1)
    p.add_argument("--image_size", type=int, default=16)
    p.add_argument("--per_class", type=int, default=64)
    p.add_argument("--class_cond", action="store_true")
    p.add_argument("--cond_dropout", type=float, default=0.1)
    p.add_argument("--cache_latents", action="store_true")
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--lr_scheduler", default="cosine")
    p.add_argument("--warmup_steps", type=int, default=8)
    p.add_argument("--weight_decay", type=float, default=1e-2)
    p.add_argument("--max_grad_norm", type=float, default=1.0)
    p.add_argument("--logit_mean", type=float, default=0.0)
    p.add_argument("--logit_std", type=float, default=1.0)
    p.add_argument("--time_shift", type=float, default=1.0)
    p.add_argument("--weighting", choices=["none", "cosmap"], default="none")
    p.add_argument("--ema_decay", type=float, default=0.999)
    p.add_argument("--mixed_precision", default="no", choices=["no", "bf16"])
    p.add_argument("--sample_every", type=int, default=0)
    p.add_argument("--sample_steps", type=int, default=10)
    p.add_argument("--log_every", type=int, default=10)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output_dir", default="flow_out")
    return p.parse_args()


if __name__ == "__main__":
    Trainer(parse_args()).train()

# Scalable interpolant transformer, minimal version, on sklearn's digits at 16x16.
# Paths and objectives as in SiT (https://arxiv.org/abs/2401.08740) and JiT (https://arxiv.org/abs/2511.13720):
# t = 0 is data, t = 1 is noise, x_t = alpha(t) x + sigma(t) eps, the sampler integrates dx/dt = v from 1 to 0.
import argparse
import copy
import itertools
import math
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self, hidden_size, frequency_embedding_size=64):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(frequency_embedding_size, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        self.frequency_embedding_size = frequency_embedding_size

    @staticmethod
    def timestep_embedding(t, dim, max_period=10000):
        half = dim // 2
        freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
        args = t[:, None].float() * freqs[None]
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def forward(self, t):
        return self.mlp(self.timestep_embedding(1000 * t, self.frequency_embedding_size))


class LabelEmbedder(nn.Module):
    """Embeds class labels and handles label dropout for classifier-free guidance."""

    def __init__(self, num_classes, hidden_size, dropout_prob):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, hidden_size)
        self.num_classes = num_classes
        self.dropout_prob = dropout_prob

    def token_drop(self, labels):
        drop_ids = torch.rand(labels.shape[0], device=labels.device) < self.dropout_prob
        return torch.where(drop_ids, self.num_classes, labels)

    def forward(self, labels, train):
        if train and self.dropout_prob > 0:
            labels = self.token_drop(labels)
        return self.embedding_table(labels)


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class SiTBlock(nn.Module):
    def __init__(self, hidden_size, num_heads, mlp_ratio=2):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, mlp_ratio * hidden_size), nn.GELU(), nn.Linear(mlp_ratio * hidden_size, hidden_size)
        )
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        x = x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x


class FinalLayer(nn.Module):
    def __init__(self, hidden_size, patch_size, out_channels):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class SiT(nn.Module):
    def __init__(self, input_size=16, patch_size=2, in_channels=1, hidden_size=64, depth=3, num_heads=4, num_classes=10,
                 class_dropout_prob=0.1):
        super().__init__()
        self.patch_size, self.out_channels = patch_size, in_channels
        self.x_embedder = nn.Conv2d(in_channels, hidden_size, patch_size, stride=patch_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size, class_dropout_prob)
        self.pos_embed = nn.Parameter(torch.randn(1, (input_size // patch_size) ** 2, hidden_size) * 0.02)
        self.blocks = nn.ModuleList([SiTBlock(hidden_size, num_heads) for _ in range(depth)])
        self.final_layer = FinalLayer(hidden_size, patch_size, in_channels)
        self.initialize_weights()

    def initialize_weights(self):
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        # Zero-out adaLN modulation layers and the output layer
        for block in self.blocks:
            nn.init.zeros_(block.adaLN_modulation[-1].weight)
        nn.init.zeros_(self.final_layer.adaLN_modulation[-1].weight)
        nn.init.zeros_(self.final_layer.linear.weight)

    def unpatchify(self, x):
        p, c = self.patch_size, self.out_channels
        h = w = int(x.shape[1] ** 0.5)
        x = x.reshape(x.shape[0], h, w, p, p, c)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], c, h * p, w * p)

    def forward(self, x, t, y):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y, self.training)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x, c))


class Transport:
    """Interpolant, objective and loss weight."""

    def __init__(self, path="linear", prediction="velocity", time_dist="logit_normal", weighting="none", t_eps=0.05):
        self.path, self.prediction, self.time_dist, self.weighting, self.t_eps = path, prediction, time_dist, weighting, t_eps

    def sample_time(self, n, device, mean=0.0, std=1.0):
        if self.time_dist == "uniform":
            return torch.rand(n, device=device)
        return torch.sigmoid(mean + std * torch.randn(n, device=device))

    def coefficients(self, t):
        """alpha, sigma and their derivatives with respect to t"""
        t = t.view(-1, 1, 1, 1)
        if self.path == "linear":
            return 1 - t, t, -torch.ones_like(t), torch.ones_like(t)
        a = t * math.pi / 2
        return torch.cos(a), torch.sin(a), -math.pi / 2 * torch.sin(a), math.pi / 2 * torch.cos(a)

    def velocity(self, out, x_t, t):
        if self.prediction == "velocity":
            return out
        alpha, sigma, d_alpha, d_sigma = self.coefficients(t)
        sigma = sigma.clamp(min=self.t_eps)
        return d_alpha * out + d_sigma * (x_t - alpha * out) / sigma

    def training_losses(self, model, x, y):
        t = self.sample_time(x.shape[0], x.device)
        eps = torch.randn_like(x)
        alpha, sigma, d_alpha, d_sigma = self.coefficients(t)
        x_t = alpha * x + sigma * eps
        target = d_alpha * x + d_sigma * eps
        if self.prediction == "x":  # as in JiT: the same clamp in both velocities
            target = self.velocity(x, x_t, t)
        v = self.velocity(model(x_t, t, y).float(), x_t, t)
        loss = (v - target).square().mean(dim=(1, 2, 3))
        if self.weighting == "cosmap":  # Stable Diffusion 3
            loss = loss * 2 / (math.pi * (1 - 2 * t + 2 * t.square()))
        return loss.mean()

    @torch.no_grad()
    def sample_heun(self, model, noise, y, steps, cfg_scale, num_classes=10):
        def drift(x, t):
            t = torch.full((2 * len(x),), t)
            labels = torch.cat([y, torch.full_like(y, num_classes)])
            v_c, v_u = self.velocity(model(torch.cat([x, x]), t, labels), torch.cat([x, x]), t).chunk(2)
            return v_u + cfg_scale * (v_c - v_u)

        x, times = noise, torch.linspace(1, 0, steps + 1).tolist()
        for t, s in zip(times[:-1], times[1:]):
            d = drift(x, t)
            x_next = x + (s - t) * d
            if s > 0:
                x_next = x + (s - t) * 0.5 * (d + drift(x_next, s))
            x = x_next
        return x


@torch.no_grad()
def update_ema(ema_model, model, decay):
    ema_params = dict(ema_model.named_parameters())
    for name, param in model.named_parameters():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def load_data(args):
    digits = load_digits()
    x = torch.from_numpy(digits.images).float()[:, None] / 16 * 2 - 1
    x = F.interpolate(x, size=args.image_size, mode="bilinear")
    y = torch.from_numpy(digits.target).long()
    generator = torch.Generator().manual_seed(args.seed)
    return DataLoader(TensorDataset(x, y), batch_size=args.batch_size, shuffle=True, drop_last=True, generator=generator)


def save_preview(transport, model, args, step):
    generator = torch.Generator().manual_seed(1234)
    noise = torch.randn(10, 1, args.image_size, args.image_size, generator=generator)
    samples = transport.sample_heun(model, noise, torch.arange(10), args.sampling_steps, args.cfg_scale)
    np.save(os.path.join(args.results_dir, f"samples_{step:05d}.npy"), samples.clamp(-1, 1).numpy())


def main(args):
    torch.manual_seed(args.seed)
    os.makedirs(args.results_dir, exist_ok=True)
    model = SiT(input_size=args.image_size, class_dropout_prob=args.class_dropout)
    ema = copy.deepcopy(model)
    requires_grad(ema, False)
    print(f"SiT parameters: {sum(p.numel() for p in model.parameters()):,}")

    transport = Transport(args.path, args.prediction, args.time_dist, args.weighting)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, args.beta2), weight_decay=args.weight_decay)

    def lr_lambda(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        progress = (step - args.warmup) / max(1, args.steps - args.warmup)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lr_lambda)
    loader = load_data(args)
    model.train()
    ema.eval()
    data = (batch for _ in itertools.count() for batch in loader)
    for step in range(1, args.steps + 1):
        opt.zero_grad(set_to_none=True)
        running_loss = 0.0
        for _ in range(args.accum):
            x, y = next(data)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
                loss = transport.training_losses(model, x, y)
            (loss / args.accum).backward()
            running_loss += loss.item() / args.accum
        if args.grad_clip > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        opt.step()
        scheduler.step()
        update_ema(ema, model, args.ema_decay)

        if step % args.log_every == 0:
            print(f"(step={step:05d}) Train Loss: {running_loss:.4f}, LR: {scheduler.get_last_lr()[0]:.2e}")
        if step % args.sample_every == 0:
            save_preview(transport, ema, args, step)
        if step % args.ckpt_every == 0 or step == args.steps:
            checkpoint = {"model": model.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict(), "args": vars(args)}
            torch.save(checkpoint, os.path.join(args.results_dir, f"{step:05d}.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--results_dir", type=str, default="results")
    parser.add_argument("--image_size", type=int, default=16)
    parser.add_argument("--path", type=str, choices=["linear", "gvp"], default="linear")
    parser.add_argument("--prediction", type=str, choices=["velocity", "x"], default="velocity")
    parser.add_argument("--time_dist", type=str, choices=["logit_normal", "uniform"], default="logit_normal")
    parser.add_argument("--weighting", type=str, choices=["none", "cosmap"], default="none")
    parser.add_argument("--class_dropout", type=float, default=0.1)
    parser.add_argument("--cfg_scale", type=float, default=1.5)
    parser.add_argument("--sampling_steps", type=int, default=6)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--batch_size", type=int, default=24)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--beta2", type=float, default=0.99)
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--ema_decay", type=float, default=0.95)
    parser.add_argument("--precision", type=str, choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log_every", type=int, default=2)
    parser.add_argument("--sample_every", type=int, default=25)
    parser.add_argument("--ckpt_every", type=int, default=50)
    main(parser.parse_args())

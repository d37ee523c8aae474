"""Train a small SiT on precomputed VAE features: a transformer on latent patches with an interpolant loss."""

import argparse
import itertools
import logging
import math
from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy
from time import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

#################################################################################
#                             Training Helper Functions                         #
#################################################################################


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9999):
    """Step the EMA model towards the current model."""
    ema_params = OrderedDict(ema_model.named_parameters())
    model_params = OrderedDict(model.named_parameters())
    for name, param in model_params.items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def create_logger():
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    return logging.getLogger(__name__)


#################################################################################
#                                    Features                                   #
#################################################################################


def extract_features(count, num_classes, seed=7):
    """Stand-in for a folder of features: VAE moments (mean and log variance, [count, 8, 8, 8]) and labels.

    The mean of each latent has std about 5.5, as those of the usual f8 autoencoder.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, count)
    yy, xx = np.mgrid[0:8, 0:8] / 7.0
    basis = rng.normal(size=(num_classes, 4, 3))
    mean = np.empty((count, 4, 8, 8))
    for i, k in enumerate(labels):
        phase, freq = rng.uniform(0, 2 * np.pi, 3), 1 + k % 3
        waves = np.stack(
            [
                np.cos(2 * np.pi * freq * xx / 2 + phase[0]),
                np.cos(2 * np.pi * (1 + k // 3) * yy / 2 + phase[1]),
                np.cos(np.pi * (xx + yy) * freq + phase[2]),
            ]
        )
        mean[i] = np.einsum("cw,whx->chx", basis[k], waves) + rng.normal(0, 0.5, (4, 1, 1))
    mean *= 5.5 / mean.std()
    logvar = np.full_like(mean, -6.0)
    moments = torch.from_numpy(np.concatenate([mean, logvar], axis=1)).float()
    return moments, torch.from_numpy(labels).long()


def sample_posterior(moments):
    mean, logvar = moments.chunk(2, dim=1)
    return mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)


#################################################################################
#                                     Model                                     #
#################################################################################


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    """Embeds scalar times in [0, 1] into vectors."""

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
        t_freq = self.timestep_embedding(t * 1000, self.frequency_embedding_size)
        return self.mlp(t_freq)


class LabelEmbedder(nn.Module):
    """Embeds class labels into vectors; drops them for classifier-free guidance."""

    def __init__(self, num_classes, hidden_size, dropout_prob):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + int(dropout_prob > 0), hidden_size)
        self.num_classes = num_classes
        self.dropout_prob = dropout_prob

    def token_drop(self, labels, force_drop_ids=None):
        if force_drop_ids is None:
            drop_ids = torch.rand(labels.shape[0], device=labels.device) < self.dropout_prob
        else:
            drop_ids = force_drop_ids == 1
        return torch.where(drop_ids, self.num_classes, labels)

    def forward(self, labels, train, force_drop_ids=None):
        if (train and self.dropout_prob > 0) or force_drop_ids is not None:
            labels = self.token_drop(labels, force_drop_ids)
        return self.embedding_table(labels)


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class SiTBlock(nn.Module):
    """A transformer block with adaLN-Zero conditioning."""

    def __init__(self, hidden_size, num_heads, mlp_ratio=4.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = SelfAttention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        hidden = int(hidden_size * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, hidden_size))
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


def get_2d_sincos_pos_embed(embed_dim, grid_size):
    omega = 1.0 / 10000 ** (np.arange(embed_dim // 4) / (embed_dim / 4.0))
    rows, cols = np.mgrid[0:grid_size, 0:grid_size].reshape(2, -1, 1)
    parts = [np.sin(cols * omega), np.cos(cols * omega), np.sin(rows * omega), np.cos(rows * omega)]
    return np.concatenate(parts, axis=1)


class SiT(nn.Module):
    def __init__(
        self,
        input_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=96,
        depth=4,
        num_heads=4,
        class_dropout_prob=0.1,
        num_classes=6,
    ):
        super().__init__()
        self.in_channels, self.patch_size, self.grid = in_channels, patch_size, input_size // patch_size
        self.x_embedder = nn.Conv2d(in_channels, hidden_size, patch_size, stride=patch_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size, class_dropout_prob)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid**2, hidden_size), requires_grad=False)
        self.blocks = nn.ModuleList([SiTBlock(hidden_size, num_heads) for _ in range(depth)])
        self.final_layer = FinalLayer(hidden_size, patch_size, in_channels)
        self.initialize_weights()

    def initialize_weights(self):
        def _basic_init(module):
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

        self.apply(_basic_init)
        pos_embed = get_2d_sincos_pos_embed(self.pos_embed.shape[-1], self.grid)
        self.pos_embed.data.copy_(torch.from_numpy(pos_embed).float().unsqueeze(0))
        w = self.x_embedder.weight.data
        nn.init.xavier_uniform_(w.view([w.shape[0], -1]))
        nn.init.zeros_(self.x_embedder.bias)
        nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        nn.init.normal_(self.t_embedder.mlp[0].weight, std=0.02)
        nn.init.normal_(self.t_embedder.mlp[2].weight, std=0.02)
        for block in self.blocks:
            nn.init.zeros_(block.adaLN_modulation[-1].weight)
            nn.init.zeros_(block.adaLN_modulation[-1].bias)
        nn.init.zeros_(self.final_layer.adaLN_modulation[-1].weight)
        nn.init.zeros_(self.final_layer.adaLN_modulation[-1].bias)
        nn.init.zeros_(self.final_layer.linear.weight)
        nn.init.zeros_(self.final_layer.linear.bias)

    def unpatchify(self, x):
        p, g = self.patch_size, self.grid
        x = x.reshape(x.shape[0], g, g, p, p, self.in_channels)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], self.in_channels, g * p, g * p)

    def forward(self, x, t, y):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y, self.training)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x, c))

    def forward_with_cfg(self, x, t, y, cfg_scale):
        cond = self.forward(x, t, y)
        uncond = self.forward(x, t, torch.full_like(y, self.y_embedder.num_classes))
        return uncond + cfg_scale * (cond - uncond)


#################################################################################
#                                   Transport                                   #
#################################################################################


def expand_t_like_x(t, x):
    """t: [batch_dim,] -> [batch_dim, 1, ..., 1]"""
    return t.view(t.size(0), *[1] * (x.dim() - 1))


def mean_flat(x):
    """Take the mean over all non-batch dimensions."""
    return torch.mean(x, dim=list(range(1, x.dim())))


class LinearPath:
    """x_t = t x_1 + (1 - t) x_0: noise x_0 at t = 0, data x_1 at t = 1."""

    def compute_alpha_t(self, t):
        return t, torch.ones_like(t)

    def compute_sigma_t(self, t):
        return 1 - t, -torch.ones_like(t)

    def plan(self, t, x0, x1):
        t = expand_t_like_x(t, x1)
        alpha_t, d_alpha_t = self.compute_alpha_t(t)
        sigma_t, d_sigma_t = self.compute_sigma_t(t)
        xt = alpha_t * x1 + sigma_t * x0
        ut = d_alpha_t * x1 + d_sigma_t * x0
        return xt, ut

    def velocity_from_noise(self, noise, x, t):
        t = expand_t_like_x(t, x)
        alpha_t, d_alpha_t = self.compute_alpha_t(t)
        sigma_t, d_sigma_t = self.compute_sigma_t(t)
        data = ((x - sigma_t * noise) / alpha_t.clamp(min=5e-2)).clamp(-4, 4)
        return d_alpha_t * data + d_sigma_t * noise


class GVPPath(LinearPath):
    def compute_alpha_t(self, t):
        return torch.sin(t * np.pi / 2), np.pi / 2 * torch.cos(t * np.pi / 2)

    def compute_sigma_t(self, t):
        return torch.cos(t * np.pi / 2), -np.pi / 2 * torch.sin(t * np.pi / 2)


class Transport:
    def __init__(self, path, prediction, t_sampling):
        self.path, self.prediction, self.t_sampling = path, prediction, t_sampling

    def sample(self, x1):
        x0 = torch.randn_like(x1)
        if self.t_sampling == "uniform":
            t = torch.rand(x1.shape[0], device=x1.device)
        else:
            t = torch.sigmoid(torch.randn(x1.shape[0], device=x1.device))
        return t, x0, x1

    def training_losses(self, model, x1, model_kwargs):
        t, x0, x1 = self.sample(x1)
        xt, ut = self.path.plan(t, x0, x1)
        model_output = model(xt, t, **model_kwargs)
        if self.prediction == "velocity":
            loss = mean_flat((model_output.float() - ut) ** 2)
        else:
            loss = mean_flat((model_output.float() - x0) ** 2)
        return {"loss": loss, "pred": model_output}

    @torch.no_grad()
    def sample_ode(self, model_fn, z, num_steps=20):
        ts = torch.linspace(0, 1, num_steps + 1)
        for t0, t1 in itertools.pairwise(ts):
            t = torch.full((z.shape[0],), float(t0), device=z.device)
            out = model_fn(z, t).float()
            v = out if self.prediction == "velocity" else self.path.velocity_from_noise(out, z, t)
            z = z + (t1 - t0) * v
        return z


#################################################################################
#                                  Training Loop                                #
#################################################################################


def main(args):
    torch.manual_seed(args.global_seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logger = create_logger()

    model = SiT(class_dropout_prob=args.class_dropout_prob, num_classes=args.num_classes).to(device)
    ema = deepcopy(model).to(device)
    requires_grad(ema, False)
    transport = Transport({"Linear": LinearPath, "GVP": GVPPath}[args.path_type](), args.prediction, args.t_sampling)
    logger.info(f"SiT Parameters: {sum(p.numel() for p in model.parameters()):,}")

    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / args.warmup_steps))

    x, y = extract_features(args.num_samples, args.num_classes)
    loader = DataLoader(TensorDataset(x, y), batch_size=args.batch_size, shuffle=True, drop_last=True)
    autocast = (lambda: torch.autocast(device, dtype=torch.bfloat16)) if args.precision == "bf16" else nullcontext

    update_ema(ema, model, decay=0)  # Ensure EMA is initialized with synced weights
    model.train()
    ema.eval()

    train_steps = micro_steps = 0
    start_time = time()
    while train_steps < args.max_steps:
        for moments, y in loader:
            moments, y = moments.to(device), y.to(device)
            with torch.no_grad():
                # Map the moments to latent space and normalize them:
                x = sample_posterior(moments).mul_(0.18215)
            with autocast():
                loss_dict = transport.training_losses(model, x, dict(y=y))
            loss = loss_dict["loss"].mean()
            (loss / args.grad_accum).backward()
            micro_steps += 1
            if micro_steps % args.grad_accum:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
            update_ema(ema, model, decay=args.ema_decay)

            train_steps += 1
            print(f"(step={train_steps:07d}) Train Loss: {loss.item()!r}", flush=True)
            if train_steps >= args.max_steps:
                break
    logger.info(f"Train Steps/Sec: {train_steps / (time() - start_time):.2f}")

    model.eval()
    y = torch.arange(4, device=device) % args.num_classes
    z = torch.randn(4, 4, 8, 8, device=device)
    with autocast():
        samples = transport.sample_ode(lambda x, t: ema.forward_with_cfg(x, t, y, args.cfg_scale), z)
    print("latents", tuple(samples.shape), "mean", repr(samples.mean().item()), "std", repr(samples.std().item()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-samples", type=int, default=1024)
    parser.add_argument("--num-classes", type=int, default=6)
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--ema-decay", type=float, default=0.98)
    parser.add_argument("--class-dropout-prob", type=float, default=0.1)
    parser.add_argument("--cfg-scale", type=float, default=1.5)
    parser.add_argument("--path-type", choices=["Linear", "GVP"], default="Linear")
    parser.add_argument("--prediction", choices=["velocity", "noise"], default="velocity")
    parser.add_argument("--t-sampling", choices=["uniform", "lognormal"], default="uniform")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--global-seed", type=int, default=0)
    main(parser.parse_args())

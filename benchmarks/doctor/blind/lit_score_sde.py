"""Class-conditional score model with continuous SDEs (VP, sub-VP, VE), on drawn ellipses, with a Lightning-like trainer."""
import argparse
import math
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mini_lightning import Callback, LitModule, Trainer


# ---- SDEs -----------------------------------------------------------------------------------------------------------
class VPSDE:
    T = 1.0

    def __init__(self, beta_min=0.1, beta_max=20.0):
        self.beta_0, self.beta_1 = beta_min, beta_max

    def integral(self, t):
        return self.beta_0 * t + 0.5 * (self.beta_1 - self.beta_0) * t**2

    def sde(self, x, t):
        beta_t = (self.beta_0 + t * (self.beta_1 - self.beta_0)).view(-1, 1, 1, 1)
        return -0.5 * beta_t * x, torch.sqrt(beta_t)

    def marginal_prob(self, x, t):
        integral = self.integral(t).view(-1, 1, 1, 1)
        return torch.exp(-0.5 * integral) * x, torch.sqrt(-torch.expm1(-integral))

    def prior_sampling(self, shape):
        return torch.randn(shape)

    def importance_time(self, u, eps):
        """Time with density g^2 / std^2, for which the likelihood weighting has the least variance."""
        lo, hi = (math.log(math.expm1(self.integral(t))) for t in (eps, self.T))
        integral = F.softplus(lo + u * (hi - lo))
        slope = self.beta_1 - self.beta_0
        return (torch.sqrt(self.beta_0**2 + 2 * slope * integral) - self.beta_0) / slope


class SubVPSDE(VPSDE):
    def sde(self, x, t):
        drift, diffusion = super().sde(x, t)
        discount = -torch.expm1(-2 * self.integral(t)).view(-1, 1, 1, 1)
        return drift, diffusion * torch.sqrt(discount)

    def marginal_prob(self, x, t):
        integral = self.integral(t).view(-1, 1, 1, 1)
        return torch.exp(-0.5 * integral) * x, -torch.expm1(-integral)


class VESDE:
    T = 1.0

    def __init__(self, sigma_min=0.01, sigma_max=20.0):
        self.sigma_min, self.sigma_max = sigma_min, sigma_max

    def sigma(self, t):
        return self.sigma_min * (self.sigma_max / self.sigma_min) ** t

    def sde(self, x, t):
        diffusion = self.sigma(t) * math.sqrt(2 * math.log(self.sigma_max / self.sigma_min))
        return torch.zeros_like(x), diffusion.view(-1, 1, 1, 1)

    def marginal_prob(self, x, t):
        return x, self.sigma(t).view(-1, 1, 1, 1)

    def prior_sampling(self, shape):
        return torch.randn(shape) * self.sigma_max


# ---- network --------------------------------------------------------------------------------------------------------
class PositionalEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("freqs", torch.exp(-math.log(10000) * torch.arange(dim // 2) / (dim // 2 - 1)))

    def forward(self, cond):
        args = cond[:, None] * self.freqs
        return torch.cat([args.sin(), args.cos()], dim=1)


class GaussianFourierProjection(nn.Module):
    def __init__(self, dim, scale=1.0):
        super().__init__()
        self.register_buffer("W", torch.randn(dim // 2) * scale)

    def forward(self, cond):
        args = cond[:, None] * self.W * 2 * math.pi
        return torch.cat([args.sin(), args.cos()], dim=1)


class ResnetBlock(nn.Module):
    def __init__(self, in_ch, out_ch, emb_ch, dropout=0.0):
        super().__init__()
        self.norm0, self.norm1 = nn.GroupNorm(8, in_ch), nn.GroupNorm(8, out_ch)
        self.conv0 = nn.Conv2d(in_ch, out_ch, 3, padding=1)
        self.conv1 = nn.Conv2d(out_ch, out_ch, 3, padding=1)
        self.dense = nn.Linear(emb_ch, out_ch)
        self.dropout = nn.Dropout(dropout)
        self.shortcut = nn.Conv2d(in_ch, out_ch, 1) if in_ch != out_ch else nn.Identity()

    def forward(self, x, emb):
        h = self.conv0(F.silu(self.norm0(x)))
        h = h + self.dense(F.silu(emb))[:, :, None, None]
        h = self.conv1(self.dropout(F.silu(self.norm1(h))))
        return (self.shortcut(x) + h) / math.sqrt(2)


class ScoreNet(nn.Module):
    def __init__(self, num_classes, ch=16, fourier=False, dropout=0.0):
        super().__init__()
        emb = 4 * ch
        self.embed = GaussianFourierProjection(2 * ch) if fourier else PositionalEmbedding(2 * ch)
        self.mlp = nn.Sequential(nn.Linear(2 * ch, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.label_emb = nn.Embedding(num_classes + 1, emb)  # the last row stands for "no class"
        self.conv_in = nn.Conv2d(3, ch, 3, padding=1)
        self.down0 = ResnetBlock(ch, ch, emb, dropout)
        self.down1 = ResnetBlock(ch, 2 * ch, emb, dropout)
        self.mid = ResnetBlock(2 * ch, 2 * ch, emb, dropout)
        self.up1 = ResnetBlock(4 * ch, ch, emb, dropout)
        self.up0 = ResnetBlock(2 * ch, ch, emb, dropout)
        self.norm_out = nn.GroupNorm(8, ch)
        self.conv_out = nn.Conv2d(ch, 3, 3, padding=1)
        nn.init.zeros_(self.conv_out.weight)

    def forward(self, x, time_cond, y):
        emb = self.mlp(self.embed(time_cond)) + self.label_emb(y)
        h0 = self.down0(self.conv_in(x), emb)
        h1 = self.down1(F.avg_pool2d(h0, 2), emb)
        h = self.up1(torch.cat([self.mid(h1, emb), h1], dim=1), emb)
        h = self.up0(torch.cat([F.interpolate(h, scale_factor=2), h0], dim=1), emb)
        return self.conv_out(F.silu(self.norm_out(h))).float()


# ---- data -----------------------------------------------------------------------------------------------------------
class EllipsesDataModule:
    """Ellipses that lie, stand or are round, bright or dark: six classes."""

    num_classes = 6

    def __init__(self, batch_size, n=768, size=16, seed=1, centered=True):
        rng = np.random.default_rng(seed)
        yy, xx = np.mgrid[:size, :size] / (size - 1) * 2 - 1
        labels = rng.integers(self.num_classes, size=n)
        images = np.empty((n, size, size, 3), dtype=np.float32)
        for image, label in zip(images, labels):
            a, b = [(0.7, 0.3), (0.3, 0.7), (0.5, 0.5)][label % 3]
            cy, cx = rng.uniform(-0.25, 0.25, 2)
            inside = ((xx - cx) / a) ** 2 + ((yy - cy) / b) ** 2 < 1
            light, dark = rng.uniform(0.6, 1.0, 3), rng.uniform(0.0, 0.4, 3)
            image[:] = (light if label >= 3 else dark) + 0.1 * yy[..., None] * rng.uniform(-1, 1)
            image[inside] = dark if label >= 3 else light
        x = torch.from_numpy(images).clamp(0, 1).permute(0, 3, 1, 2).contiguous()
        if centered:
            x = x * 2 - 1
        self.dataset = TensorDataset(x, torch.from_numpy(labels))
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True, drop_last=True)


# ---- module ---------------------------------------------------------------------------------------------------------
class LitScoreModel(LitModule):
    def __init__(self, args, num_classes):
        super().__init__()
        self.args, self.num_classes = args, num_classes
        self.sde = {"vp": VPSDE, "subvp": SubVPSDE, "ve": VESDE}[args.sde]()
        self.net = ScoreNet(num_classes, args.ch, fourier=args.sde == "ve", dropout=args.dropout)

    def score(self, x, t, y):
        _, std = self.sde.marginal_prob(torch.zeros_like(x), t)
        if self.args.sde == "ve":
            return self.net(x, torch.log(std.flatten()), y) / std
        return -self.net(x, t * 999, y) / std

    def sample_time(self, n):
        if self.args.time == "stratified":
            u = (torch.rand(1) + torch.arange(n) / n) % 1
        else:
            u = torch.rand(n)
        if self.args.time == "importance":
            return self.sde.importance_time(u, self.args.eps)
        return u * (self.sde.T - self.args.eps) + self.args.eps

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.args.label_dropout > 0:
            drop = torch.rand(y.shape) < self.args.label_dropout
            y = torch.where(drop, self.num_classes, y)
        t = self.sample_time(x.shape[0])
        z = torch.randn_like(x)
        mean, std = self.sde.marginal_prob(x, t)
        score = self.score(mean + std * z, t, y)
        losses = (score + z / std).square().flatten(1).mean(dim=1)
        weight = std.flatten() ** 2
        loss = (weight * losses).mean()
        self.log("train/loss", loss)
        self.log("lr", self.trainer.optimizer.param_groups[0]["lr"])
        return loss

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        no_decay = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": self.args.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
        if self.args.optimizer == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=self.args.lr, betas=(0.9, 0.999))
        else:
            optimizer = torch.optim.RAdam(groups, lr=self.args.lr, decoupled_weight_decay=True)

        def factor(step):
            warm = min(1.0, (step + 1) / self.args.warmup)
            if self.args.lr_schedule == "constant":
                return warm
            return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.args.max_steps)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def sample(self, y, steps, guidance=1.0):
        x = self.sde.prior_sampling((len(y), 3, 16, 16))
        times = torch.linspace(self.sde.T, 1e-3, steps + 1)
        for t, t_next in zip(times[:-1], times[1:]):
            vec_t, dt = t.expand(len(y)), t - t_next
            score = self.score(x, vec_t, y)
            if guidance != 1.0:
                free = self.score(x, vec_t, torch.full_like(y, self.num_classes))
                score = free + guidance * (score - free)
            drift, g = self.sde.sde(x, vec_t)
            x_mean = x - (drift - g**2 * score) * dt
            x = x_mean + g * dt.sqrt() * torch.randn_like(x)
        return x_mean


# ---- callbacks ------------------------------------------------------------------------------------------------------
class EMACallback(Callback):
    def __init__(self, decay):
        self.decay, self.num_updates = decay, 0

    def on_fit_start(self, trainer, module):
        self.shadow = {k: p.detach().clone() for k, p in module.named_parameters()}

    @torch.no_grad()
    def on_optimizer_step_end(self, trainer, module):
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for k, p in module.named_parameters():
            self.shadow[k].sub_((1 - decay) * (self.shadow[k] - p))

    @torch.no_grad()
    def copy_to(self, module):
        for k, p in module.named_parameters():
            p.copy_(self.shadow[k])

    def store(self, module):
        self.collected = {k: p.detach().clone() for k, p in module.named_parameters()}

    @torch.no_grad()
    def restore(self, module):
        for k, p in module.named_parameters():
            p.copy_(self.collected[k])

    def state_dict(self):
        return {"decay": self.decay, "num_updates": self.num_updates, "shadow": self.shadow}


class PreviewCallback(Callback):
    def __init__(self, ema, every, steps, guidance, centered):
        self.ema, self.every, self.steps, self.guidance, self.centered = ema, every, steps, guidance, centered

    def on_optimizer_step_end(self, trainer, module):
        if self.every and trainer.global_step % self.every == 0:
            self.ema.store(module)
            self.ema.copy_to(module)
            module.eval()
            x = module.sample(torch.arange(6) % module.num_classes, self.steps, self.guidance)
            module.train()
            self.ema.restore(module)
            x = (x + 1) / 2 if self.centered else x
            path = os.path.join(trainer.root_dir, f"preview_{trainer.global_step:05d}.npy")
            np.save(path, (x.clamp(0, 1) * 255).byte().permute(0, 2, 3, 1).numpy())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--sde", choices=["vp", "subvp", "ve"], default="vp")
    p.add_argument("--time", choices=["uniform", "stratified", "importance"], default="uniform")
    p.add_argument("--eps", type=float, default=1e-5)
    p.add_argument("--ch", type=int, default=16)
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--label_dropout", type=float, default=0.1)
    p.add_argument("--guidance", type=float, default=1.5)
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--precision", default="32")
    p.add_argument("--optimizer", choices=["adamw", "radam"], default="adamw")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--lr_schedule", choices=["constant", "cosine"], default="constant")
    p.add_argument("--warmup", type=int, default=5)
    p.add_argument("--weight_decay", type=float, default=0.01)
    p.add_argument("--ema_decay", type=float, default=0.95)
    p.add_argument("--max_steps", type=int, default=70)
    p.add_argument("--preview_every", type=int, default=35)
    p.add_argument("--preview_steps", type=int, default=20)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--root_dir", default="lit_logs")
    args = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    centered = args.sde != "ve"
    data = EllipsesDataModule(args.batch_size, centered=centered)
    module = LitScoreModel(args, data.num_classes)
    ema = EMACallback(args.ema_decay)
    preview = PreviewCallback(ema, args.preview_every, args.preview_steps, args.guidance, centered)
    trainer = Trainer(args.max_steps, args.accumulate, args.clip, args.precision, [ema, preview], args.root_dir)
    trainer.fit(module, data)


if __name__ == "__main__":
    main()

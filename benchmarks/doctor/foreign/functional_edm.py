"""
EDM2-flavoured training on the sklearn digits, ported from a JAX code base: parameters are a dict that is handed to
torch.func.functional_call, random numbers come from one numpy Generator, and EMA lengths are chosen after training.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call

NUM_CLASSES = 10


# ---------------------------------------------------------------- network
def normalize(x, dim, eps=1e-4):
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.float32)
    norm = torch.add(eps, norm, alpha=np.sqrt(norm.numel() / x.numel()))
    return x / norm.to(x.dtype)


def mp_silu(x):
    return nn.functional.silu(x) / 0.596


def mp_sum(a, b, t=0.3):
    return torch.lerp(a, b, t) / np.sqrt((1 - t) ** 2 + t**2)


class MPFourier(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.register_buffer("freqs", 2 * np.pi * torch.randn(channels))
        self.register_buffer("phases", 2 * np.pi * torch.rand(channels))

    def forward(self, x):
        return torch.cos(x[:, None] * self.freqs + self.phases) * np.sqrt(2)


class MPConv(nn.Module):
    """Convolution (or linear map, kernel=0) whose weights have unit magnitude for each output channel."""

    def __init__(self, cin, cout, kernel):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(cout, cin, *([kernel, kernel] if kernel else [])))

    def forward(self, x, gain=1.0):
        w = normalize(self.weight, dim=list(range(1, self.weight.ndim)))
        w = w * (gain / np.sqrt(w[0].numel()))
        return x @ w.t() if w.ndim == 2 else nn.functional.conv2d(x, w, padding=w.shape[-1] // 2)


class Block(nn.Module):
    def __init__(self, cin, cout, cemb, dropout):
        super().__init__()
        self.skip = MPConv(cin, cout, 1)
        self.conv0, self.conv1 = MPConv(cout, cout, 3), MPConv(cout, cout, 3)
        self.emb_linear = MPConv(cemb, cout, 0)
        self.emb_gain = nn.Parameter(torch.zeros([]))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, emb):
        x = normalize(self.skip(x), dim=1)
        y = self.conv0(mp_silu(x))
        c = self.emb_linear(emb, gain=self.emb_gain) + 1
        y = self.dropout(mp_silu(y * c[:, :, None, None]))
        return mp_sum(x, self.conv1(y))


class UNet(nn.Module):
    def __init__(self, channels, dropout):
        super().__init__()
        c, cemb = channels, 2 * channels
        self.fourier = MPFourier(c)
        self.emb_noise, self.emb_label = MPConv(c, cemb, 0), MPConv(NUM_CLASSES, cemb, 0)
        self.conv_in = MPConv(2, c, 3)
        self.enc0, self.enc1 = Block(c, c, cemb, dropout), Block(c, 2 * c, cemb, dropout)
        self.mid = Block(2 * c, 2 * c, cemb, dropout)
        self.dec1, self.dec0 = Block(4 * c, 2 * c, cemb, dropout), Block(3 * c, c, cemb, dropout)
        self.conv_out = MPConv(c, 1, 3)
        self.out_gain = nn.Parameter(torch.zeros([]))

    def forward(self, x, c_noise, onehot):
        emb = self.emb_noise(self.fourier(c_noise))
        emb = mp_silu(mp_sum(emb, self.emb_label(onehot * np.sqrt(NUM_CLASSES)), t=0.5))
        x = self.conv_in(torch.cat([x, torch.ones_like(x)], dim=1))
        h0 = self.enc0(x, emb)
        h1 = self.enc1(nn.functional.avg_pool2d(h0, 2), emb)
        h = self.dec1(torch.cat([self.mid(h1, emb), h1], dim=1), emb)
        h = nn.functional.interpolate(h, scale_factor=2, mode="nearest")
        h = self.dec0(torch.cat([h, h0], dim=1), emb)
        return self.conv_out(h, gain=self.out_gain)


class Precond(nn.Module):
    def __init__(self, channels, dropout, sigma_data, uncertainty):
        super().__init__()
        self.unet, self.sigma_data = UNet(channels, dropout), sigma_data
        if uncertainty:
            self.logvar_fourier, self.logvar_linear = MPFourier(32), MPConv(32, 1, 0)

    def forward(self, x, sigma, onehot, return_logvar=False):
        sigma = sigma.reshape(-1, 1, 1, 1)
        c_skip = self.sigma_data**2 / (sigma**2 + self.sigma_data**2)
        c_out = sigma * self.sigma_data / (sigma**2 + self.sigma_data**2).sqrt()
        c_in = 1 / (sigma**2 + self.sigma_data**2).sqrt()
        c_noise = sigma.flatten().log() / 4
        denoised = c_skip * x + c_out * self.unet(c_in * x, c_noise, onehot).float()
        if return_logvar:
            return denoised, self.logvar_linear(self.logvar_fourier(c_noise)).float().reshape(-1, 1, 1, 1)
        return denoised


# ---------------------------------------------------------------- data
def load_arrays(sigma_data):
    digits = load_digits()
    images = digits.images[:, None].repeat(2, axis=2).repeat(2, axis=3).astype(np.float32)
    images = (images - images.mean()) / images.std() * sigma_data
    return images, np.eye(NUM_CLASSES, dtype=np.float32)[digits.target]


def batches(rng, images, onehot, batch_size, shift):
    while True:
        order = rng.permutation(len(images))
        for i in range(0, len(order) - batch_size + 1, batch_size):
            idx = order[i : i + batch_size]
            x, y = images[idx], onehot[idx]
            if shift:
                x = np.stack([np.roll(im, rng.integers(-shift, shift + 1, 2), axis=(1, 2)) for im in x])
            yield x, y


# ---------------------------------------------------------------- post-hoc EMA
def std_to_gamma(std):
    tmp = float(std) ** -2
    return np.roots([1, 7, 16 - tmp, 12 - tmp]).real.max()


def power_beta(gamma, step):
    return (1 - 1 / step) ** (gamma + 1)


def p_dot_p(t_a, gamma_a, t_b, gamma_b):
    ratio = (t_a / t_b) ** np.where(t_a < t_b, gamma_b, -gamma_a)
    return (gamma_a + 1) * (gamma_b + 1) * ratio / ((gamma_a + gamma_b + 1) * np.maximum(t_a, t_b))


def reconstruct(snapshots, step, std):
    """The average of length std at this step, as the best linear combination of what was stored."""
    t, gamma = (np.float64([s[i] for s in snapshots]) for i in (0, 1))
    a = p_dot_p(t[:, None], gamma[:, None], t[None], gamma[None])
    b = p_dot_p(t, gamma, np.float64(step), std_to_gamma(std))
    weights = np.linalg.solve(a, b)
    return {k: sum(float(w) * s[2][k] for w, s in zip(weights, snapshots)) for k in snapshots[0][2]}


# ---------------------------------------------------------------- training
@dataclasses.dataclass
class TrainState:
    step: int
    params: dict
    opt: torch.optim.Optimizer
    emas: dict  # gamma -> averaged parameters


def learning_rate(cfg, step):
    lr = cfg.lr / np.sqrt(max(step / cfg.decay_steps, 1))
    return lr * min((step + 1) / cfg.rampup, 1)


def loss_fn(params, net, cfg, rng, x, y):
    if cfg.label_dropout > 0:
        y = y * (rng.random((len(y), 1)) >= cfg.label_dropout)
    images = torch.from_numpy(x)
    sigma = torch.from_numpy(rng.lognormal(cfg.p_mean, cfg.p_std, len(x)).astype(np.float32)).reshape(-1, 1, 1, 1)
    noise = torch.from_numpy(rng.standard_normal(x.shape).astype(np.float32)) * sigma
    onehot = torch.from_numpy(y.astype(np.float32))
    weight = (sigma**2 + cfg.sigma_data**2) / (sigma * cfg.sigma_data) ** 2
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cfg.precision == "bf16"):
        out = functional_call(net, params, (images + noise, sigma, onehot), {"return_logvar": bool(cfg.uncertainty)})
    denoised, logvar = out if cfg.uncertainty else (out, None)
    error = weight * (denoised - images) ** 2
    loss = error / logvar.exp() + logvar if cfg.uncertainty else error
    return loss.mean(), error.detach().mean()


def clip_by_global_norm(grads, max_norm):
    norm = torch.sqrt(sum((g**2).sum() for g in grads.values()))
    scale = min(1.0, max_norm / (norm.item() + 1e-8))
    return {k: g * scale for k, g in grads.items()}


def train_step(state, net, cfg, rng, x, y):
    keys = list(state.params)
    grads, losses = {k: torch.zeros_like(p) for k, p in state.params.items()}, []
    for xs, ys in zip(np.split(x, cfg.accum), np.split(y, cfg.accum)):
        loss, error = loss_fn(state.params, net, cfg, rng, xs, ys)
        micro = torch.autograd.grad(loss, [state.params[k] for k in keys])
        grads = {k: grads[k] + g / cfg.accum for k, g in zip(keys, micro)}
        losses.append((loss.item(), error.item()))
    grads = {k: torch.nan_to_num(g, nan=0, posinf=1e5, neginf=-1e5) for k, g in grads.items()}
    if cfg.clip > 0:
        grads = clip_by_global_norm(grads, cfg.clip)
    for group in state.opt.param_groups:
        group["lr"] = learning_rate(cfg, state.step)
    for k, p in state.params.items():
        p.grad = grads[k]
    state.opt.step()
    state.step += 1
    with torch.no_grad():
        for gamma, ema in state.emas.items():
            beta = power_beta(gamma, state.step)
            for k, p in state.params.items():
                ema[k].lerp_(p, 1 - beta)
    return np.mean(losses, axis=0)


@torch.no_grad()
def sample(net, params, onehot, seed, steps=8, sigma_min=0.002, sigma_max=80, rho=7):
    denoise = functools.partial(functional_call, net, params)
    ramp = np.linspace(0, 1, steps)
    sigmas = (sigma_max ** (1 / rho) + ramp * (sigma_min ** (1 / rho) - sigma_max ** (1 / rho))) ** rho
    sigmas = torch.tensor([*sigmas, 0.0], dtype=torch.float32)
    noise = np.random.default_rng(seed).standard_normal((len(onehot), 1, 16, 16)).astype(np.float32)
    x = torch.from_numpy(noise) * sigmas[0]
    for s, s_next in itertools.pairwise(sigmas):
        d = (x - denoise((x, s.expand(len(x)), onehot))) / s
        x_next = x + (s_next - s) * d
        if s_next > 0:
            d_next = (x_next - denoise((x_next, s_next.expand(len(x)), onehot))) / s_next
            x_next = x + (s_next - s) * (d + d_next) / 2
        x = x_next
    return x.numpy()


def main():
    parser = argparse.ArgumentParser()
    for name, default in dict(
        steps=64,
        batch_size=32,
        accum=1,
        lr=2e-2,
        rampup=4,
        decay_steps=40,
        optimizer="adam",
        clip=0.0,
        channels=16,
        dropout=0.0,
        label_dropout=0.0,
        shift=0,
        sigma_data=0.5,
        p_mean=-1.2,
        p_std=1.2,
        uncertainty=1,
        precision="fp32",
        ema_stds="0.05,0.10",
        posthoc_std=0.075,
        snapshot_every=16,
        preview_every=32,
        log_every=1,
        seed=7,
        outdir="functional_edm_out",
    ).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    cfg = parser.parse_args()
    outdir = pathlib.Path(cfg.outdir)
    outdir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(cfg.seed)
    rng = np.random.default_rng(cfg.seed)

    net = Precond(cfg.channels, cfg.dropout, cfg.sigma_data, cfg.uncertainty).train()
    params = {k: p.detach().clone().requires_grad_() for k, p in net.named_parameters()}
    make = {"adam": functools.partial(torch.optim.Adam, betas=(0.9, 0.99)), "nadam": torch.optim.NAdam}[cfg.optimizer]
    opt = make(list(params.values()), lr=cfg.lr)
    emas = {std_to_gamma(s): {k: p.detach().clone() for k, p in params.items()} for s in cfg.ema_stds.split(",")}
    state, snapshots = TrainState(0, params, opt, emas), []
    data = batches(rng, *load_arrays(cfg.sigma_data), cfg.batch_size, cfg.shift)
    while state.step < cfg.steps:
        loss, error = train_step(state, net, cfg, rng, *next(data))
        if state.step % cfg.log_every == 0:
            print(f"step={state.step} loss={loss:.5f} weighted_mse={error:.5f} lr={opt.param_groups[0]['lr']:.5f}", flush=True)
        if state.step % cfg.snapshot_every == 0:
            for gamma, ema in state.emas.items():
                snapshots.append((state.step, gamma, {k: v.clone() for k, v in ema.items()}))
        if state.step % cfg.preview_every == 0:
            net.eval()
            pixels = sample(net, next(iter(state.emas.values())), torch.eye(NUM_CLASSES), cfg.seed)
            np.save(outdir / f"preview_{state.step:05d}.npy", pixels)
            net.train()
    final = reconstruct(snapshots, state.step, cfg.posthoc_std)
    torch.save({"ema": final, "params": state.params, "config": vars(cfg)}, outdir / "final.pt")
    np.save(outdir / "final.npy", sample(net.eval(), final, torch.eye(NUM_CLASSES), cfg.seed))


if __name__ == "__main__":
    main()

"""Score matching by stochastic differential equations: a dictionary of the state, and functions made by functions.

Images from 0 to 1 with the variance exploding process (as its authors have it), from -1 to 1 with the preserving one.

python score_sde.py --steps 100 --sde vp --likelihood_weighting
"""

import argparse
import math

import numpy as np
import torch
import torch.nn.functional as F
from images import shapes
from networks import ResBlock
from torch import nn


class VESDE:
    def __init__(self, sigma_min=0.01, sigma_max=10.0):
        self.sigma_min, self.sigma_max, self.centered = sigma_min, sigma_max, False

    def marginal_prob(self, x, t):
        std = self.sigma_min * (self.sigma_max / self.sigma_min) ** t
        return x, std

    def diffusion(self, t):
        return self.marginal_prob(None, t)[1] * math.sqrt(2 * math.log(self.sigma_max / self.sigma_min))

    def labels(self, t):
        return self.marginal_prob(None, t)[1].log()


class VPSDE:
    def __init__(self, beta_min=0.1, beta_max=20.0):
        self.beta_0, self.beta_1, self.centered = beta_min, beta_max, True

    def marginal_prob(self, x, t):
        log_mean_coeff = -0.25 * t**2 * (self.beta_1 - self.beta_0) - 0.5 * t * self.beta_0
        mean = torch.exp(log_mean_coeff[:, None, None, None]) * x
        std = torch.sqrt(1.0 - torch.exp(2.0 * log_mean_coeff))
        return mean, std

    def diffusion(self, t):
        return torch.sqrt(self.beta_0 + t * (self.beta_1 - self.beta_0))

    def labels(self, t):
        return t * 999


class NCSNpp(nn.Module):
    def __init__(self, centered, fourier_scale, width=32):
        super().__init__()
        self.centered = centered
        self.W = nn.Parameter(torch.randn(16) * fourier_scale, requires_grad=False)
        self.embed = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down_blocks = nn.ModuleList([ResBlock(width, width, 64), ResBlock(width, width, 64)])
        self.middle = ResBlock(width, width, 64)
        self.up_blocks = nn.ModuleList([ResBlock(2 * width, width, 64), ResBlock(2 * width, width, 64)])
        self.act_norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, time_cond):
        if not self.centered:
            x = 2 * x - 1.0
        proj = time_cond[:, None] * self.W * 2 * np.pi
        temb = self.embed(torch.cat([torch.sin(proj), torch.cos(proj)], dim=-1))
        h1 = self.down_blocks[0](self.first(x), temb)
        h2 = self.down_blocks[1](F.avg_pool2d(h1, 2), temb)
        h = self.middle(h2, temb)
        h = self.up_blocks[0](torch.cat([h, h2], dim=1), temb)
        h = self.up_blocks[1](torch.cat([F.interpolate(h, scale_factor=2.0), h1], dim=1), temb)
        return self.last(F.silu(self.act_norm(h)))


def get_score_fn(sde, model):
    def score_fn(x, t):
        out = model(x, sde.labels(t))
        std = sde.marginal_prob(torch.zeros_like(x), t)[1]
        return -out / std[:, None, None, None]

    return score_fn


def get_sde_loss_fn(sde, reduce_mean, likelihood_weighting, eps=1e-5):
    reduce_op = torch.mean if reduce_mean else lambda *args, **kwargs: 0.5 * torch.sum(*args, **kwargs)

    def loss_fn(model, batch):
        score_fn = get_score_fn(sde, model)
        t = torch.rand(batch.shape[0], device=batch.device) * (1.0 - eps) + eps
        z = torch.randn_like(batch)
        mean, std = sde.marginal_prob(batch, t)
        perturbed_data = mean + std[:, None, None, None] * z
        score = score_fn(perturbed_data, t)
        if not likelihood_weighting:
            losses = torch.square(score * std[:, None, None, None] + z)
            losses = reduce_op(losses.reshape(losses.shape[0], -1), dim=-1)
        else:
            g2 = sde.diffusion(t) ** 2
            losses = torch.square(score + z / std[:, None, None, None])
            losses = reduce_op(losses.reshape(losses.shape[0], -1), dim=-1) * g2
        return torch.mean(losses)

    return loss_fn


class ExponentialMovingAverage:
    def __init__(self, parameters, decay, use_num_updates=True):
        self.decay, self.num_updates = decay, 0 if use_num_updates else None
        self.shadow_params = [p.clone().detach() for p in parameters if p.requires_grad]
        self.collected_params = []

    def update(self, parameters):
        decay = self.decay
        if self.num_updates is not None:
            self.num_updates += 1
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            parameters = [p for p in parameters if p.requires_grad]
            for s_param, param in zip(self.shadow_params, parameters):
                s_param.sub_((1.0 - decay) * (s_param - param))

    def copy_to(self, parameters):
        for s_param, param in zip(self.shadow_params, [p for p in parameters if p.requires_grad]):
            param.data.copy_(s_param.data)

    def store(self, parameters):
        self.collected_params = [param.clone() for param in parameters]

    def restore(self, parameters):
        for c_param, param in zip(self.collected_params, parameters):
            param.data.copy_(c_param.data)


def optimization_manager(config):
    def optimize_fn(optimizer, params, step, lr=config.lr, warmup=config.warmup, grad_clip=config.grad_clip):
        params = list(params)
        if warmup > 0:
            for g in optimizer.param_groups:
                g["lr"] = lr * np.minimum((step + 1) / warmup, 1.0)
        if grad_clip >= 0:
            torch.nn.utils.clip_grad_norm_(params, max_norm=grad_clip)
        optimizer.step()

    return optimize_fn


def get_step_fn(loss_fn, train, optimize_fn=None, functional=False):
    def gradients(model, batch):
        def of_params(params):
            return loss_fn(lambda *args: torch.func.functional_call(model, params, args), batch)

        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        grads, loss = torch.func.grad_and_value(of_params)(params)
        for name, param in params.items():
            param.grad = grads[name]
        return loss

    def step_fn(state, batch):
        model = state["model"]
        if train:
            optimizer = state["optimizer"]
            optimizer.zero_grad()
            if functional:
                loss = gradients(model, batch)
            else:
                loss = loss_fn(model, batch)
                loss.backward()
            optimize_fn(optimizer, model.parameters(), step=state["step"])
            state["step"] += 1
            state["ema"].update(model.parameters())
        else:
            with torch.no_grad():
                ema = state["ema"]
                ema.store(model.parameters())
                ema.copy_to(model.parameters())
                loss = loss_fn(model, batch)
                ema.restore(model.parameters())
        return loss

    return step_fn


def endless(arrays, batch_size, random):
    while True:
        order = random.permutation(len(arrays))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield arrays[order[start : start + batch_size]]


def get_data_scaler(sde):
    return (lambda x: x * 2.0 - 1.0) if sde.centered else (lambda x: x)


def train(config):
    torch.manual_seed(config.seed)
    sde = VESDE() if config.sde == "ve" else VPSDE()
    score_model = NCSNpp(sde.centered, 0.3 if config.sde == "ve" else 0.003)
    ema = ExponentialMovingAverage(score_model.parameters(), decay=config.ema_rate)
    optimizer = torch.optim.Adam(score_model.parameters(), lr=config.lr, betas=(0.9, 0.999), eps=1e-8)
    state = dict(optimizer=optimizer, model=score_model, ema=ema, step=0)
    scaler = get_data_scaler(sde)
    loss_fn = get_sde_loss_fn(sde, config.reduce_mean, config.likelihood_weighting)
    train_step_fn = get_step_fn(loss_fn, True, optimization_manager(config), config.functional)
    eval_step_fn = get_step_fn(loss_fn, False)

    train_iter = endless(shapes(512, seed=1)[0], config.batch_size, np.random.default_rng(config.seed))
    eval_iter = endless(shapes(64, seed=2)[0], config.batch_size, np.random.default_rng(config.seed))
    for step in range(1, config.steps + 1):
        batch = torch.from_numpy(next(train_iter).astype(np.float32) / 255.0).permute(0, 3, 1, 2)
        batch = scaler(batch)
        loss = train_step_fn(state, batch)
        print(step, repr(loss.item()))
        if step % config.eval_freq == 0:
            eval_batch = scaler(torch.from_numpy(next(eval_iter).astype(np.float32) / 255.0).permute(0, 3, 1, 2))
            print("evaluation", repr(eval_step_fn(state, eval_batch).item()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--sde", choices=["ve", "vp"], default="ve")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--ema_rate", type=float, default=0.99)
    parser.add_argument("--likelihood_weighting", action="store_true")
    parser.add_argument("--reduce_mean", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--functional", action="store_true", help="gradients by torch.func")
    parser.add_argument("--eval_freq", type=int, default=20)
    train(parser.parse_args())

"""Learned variances, micro-batches, and a flat float32 copy of 16-bit weights, in the manner of guided diffusion.

python guided_loop.py --steps 100 --microbatch 8 --use_bf16
"""

import argparse
import copy
from functools import partial

import numpy as np
import torch as th
from images import shapes
from networks import ResBlock, sinusoidal
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def mean_flat(tensor):
    return tensor.mean(dim=list(range(1, tensor.dim())))


def _extract_into_tensor(arr, timesteps, broadcast_shape):
    res = th.from_numpy(arr)[timesteps].float()
    return res.view(-1, *[1] * (len(broadcast_shape) - 1)).expand(broadcast_shape)


class GaussianDiffusion:
    def __init__(self, *, betas, rescale_timesteps=False):
        betas = np.array(betas, dtype=np.float64)
        self.num_timesteps, self.rescale_timesteps = len(betas), rescale_timesteps
        alphas = 1.0 - betas
        alphas_cumprod = np.cumprod(alphas, axis=0)
        alphas_cumprod_prev = np.append(1.0, alphas_cumprod[:-1])
        self.sqrt_alphas_cumprod = np.sqrt(alphas_cumprod)
        self.sqrt_one_minus_alphas_cumprod = np.sqrt(1.0 - alphas_cumprod)
        self.sqrt_recip_alphas_cumprod = np.sqrt(1.0 / alphas_cumprod)
        self.sqrt_recipm1_alphas_cumprod = np.sqrt(1.0 / alphas_cumprod - 1)
        posterior_variance = betas * (1.0 - alphas_cumprod_prev) / (1.0 - alphas_cumprod)
        self.posterior_log_variance_clipped = np.log(np.append(posterior_variance[1], posterior_variance[1:]))
        self.log_betas = np.log(betas)
        self.posterior_mean_coef1 = betas * np.sqrt(alphas_cumprod_prev) / (1.0 - alphas_cumprod)
        self.posterior_mean_coef2 = (1.0 - alphas_cumprod_prev) * np.sqrt(alphas) / (1.0 - alphas_cumprod)

    def q_sample(self, x_start, t, noise):
        return (
            _extract_into_tensor(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + _extract_into_tensor(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        )

    def _scale_timesteps(self, t):
        return t.float() * (1000.0 / self.num_timesteps) if self.rescale_timesteps else t

    def _predict_xstart_from_eps(self, x_t, t, eps):
        return (
            _extract_into_tensor(self.sqrt_recip_alphas_cumprod, t, x_t.shape) * x_t
            - _extract_into_tensor(self.sqrt_recipm1_alphas_cumprod, t, x_t.shape) * eps
        )

    def q_posterior_mean(self, x_start, x_t, t):
        return (
            _extract_into_tensor(self.posterior_mean_coef1, t, x_t.shape) * x_start
            + _extract_into_tensor(self.posterior_mean_coef2, t, x_t.shape) * x_t
        )

    def _vb_terms(self, x_start, x_t, t, eps, var_values):
        """KL between the true and the learned step back, in bits."""
        min_log = _extract_into_tensor(self.posterior_log_variance_clipped, t, x_t.shape)
        max_log = _extract_into_tensor(self.log_betas, t, x_t.shape)
        frac = (var_values + 1) / 2
        log_variance = frac * max_log + (1 - frac) * min_log
        true_mean = self.q_posterior_mean(x_start, x_t, t)
        mean = self.q_posterior_mean(self._predict_xstart_from_eps(x_t, t, eps), x_t, t)
        kl = log_variance - min_log + th.exp(min_log - log_variance) + (true_mean - mean) ** 2 * th.exp(-log_variance) - 1
        return mean_flat(0.5 * kl) / np.log(2.0)

    def training_losses(self, model, x_start, t, model_kwargs=None, noise=None):
        if noise is None:
            noise = th.randn_like(x_start)
        x_t = self.q_sample(x_start, t, noise=noise)
        model_output = model(x_t, self._scale_timesteps(t), **(model_kwargs or {}))
        model_output, model_var_values = th.split(model_output, x_t.shape[1], dim=1)
        terms = {"vb": self._vb_terms(x_start, x_t, t, model_output.detach(), model_var_values)}
        terms["vb"] *= self.num_timesteps / 1000.0
        terms["mse"] = mean_flat((noise - model_output) ** 2)
        terms["loss"] = terms["mse"] + terms["vb"]
        return terms


class ScheduleSampler:
    """`importance`: early steps more often, and for that with smaller weights."""

    def __init__(self, name, num_timesteps):
        self._weights = np.ones(num_timesteps) if name == "uniform" else np.linspace(2.0, 0.5, num_timesteps)

    def sample(self, batch_size):
        p = self._weights / np.sum(self._weights)
        indices = np.random.choice(len(p), size=(batch_size,), p=p)
        weights = 1 / (len(p) * p[indices])
        return th.from_numpy(indices).long(), th.from_numpy(weights).float()


class UNetModel(nn.Module):
    """Twice the channels: the noise, and where the variance lies between its bounds."""

    def __init__(self, num_classes, dim=24):
        super().__init__()
        self.dim, self.dtype = dim, th.float32
        self.time_embed = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, 2 * dim))
        self.label_emb = nn.Embedding(num_classes + 1, 2 * dim)
        self.enter = nn.Conv2d(3, dim, 3, padding=1)
        self.input_blocks = nn.ModuleList([ResBlock(dim, dim, 2 * dim), ResBlock(dim, 2 * dim, 2 * dim)])
        self.down = nn.AvgPool2d(2)
        self.middle_block = ResBlock(2 * dim, 2 * dim, 2 * dim)
        self.up = nn.Upsample(scale_factor=2)
        self.output_blocks = nn.ModuleList([ResBlock(4 * dim, dim, 2 * dim), ResBlock(2 * dim, dim, 2 * dim)])
        self.out = nn.Sequential(nn.GroupNorm(8, dim), nn.SiLU(), nn.Conv2d(dim, 6, 3, padding=1))

    def forward(self, x, timesteps, y=None):
        emb = self.time_embed(sinusoidal(timesteps, self.dim).to(self.dtype))
        emb = emb + self.label_emb(y)
        h1 = self.input_blocks[0](self.enter(x.to(self.dtype)), emb)
        h2 = self.input_blocks[1](self.down(h1), emb)
        h = self.middle_block(h2, emb)
        h = self.up(self.output_blocks[0](th.cat([h, h2], dim=1), emb))
        return self.out(self.output_blocks[1](th.cat([h, h1], dim=1), emb)).float()


def update_ema(target_params, source_params, rate=0.99):
    for targ, src in zip(target_params, source_params):
        targ.detach().mul_(rate).add_(src.detach(), alpha=1 - rate)


class TrainLoop:
    def __init__(self, *, model, diffusion, data, args):
        self.model, self.diffusion, self.data, self.args = model, diffusion, data, args
        self.microbatch = args.microbatch if args.microbatch > 0 else args.batch_size
        self.ema_rate = [float(x) for x in args.ema_rate.split(",")]
        self.schedule_sampler = ScheduleSampler(args.schedule_sampler, diffusion.num_timesteps)
        self.step = 0
        self.model_params = list(self.model.parameters())
        self.master_params = self.model_params
        if args.use_bf16:
            self.master_params = [nn.Parameter(_flatten_dense_tensors([p.detach().float() for p in self.model_params]))]
            self.model.to(th.bfloat16).dtype = th.bfloat16
        self.opt = th.optim.AdamW(self.master_params, lr=args.lr, weight_decay=args.weight_decay)
        self.ema_params = [copy.deepcopy(self.master_params) for _ in range(len(self.ema_rate))]

    def run_loop(self):
        while self.step < self.args.steps:
            batch, cond = next(self.data)
            self.run_step(batch, cond)
            self.step += 1

    def run_step(self, batch, cond):
        loss = self.forward_backward(batch, cond)
        if self.args.use_bf16:
            grads = [p.grad.detach().float() for p in self.model_params]
            self.master_params[0].grad = _flatten_dense_tensors(grads)
        if self.args.clip:
            th.nn.utils.clip_grad_norm_(self.master_params, self.args.clip)
        self._anneal_lr()
        self.opt.step()
        for rate, params in zip(self.ema_rate, self.ema_params):
            update_ema(params, self.master_params, rate=rate)
        if self.args.use_bf16:
            values = _unflatten_dense_tensors(self.master_params[0].detach(), self.model_params)
            for param, value in zip(self.model_params, values):
                param.detach().copy_(value)
        print(self.step, repr(loss))

    def forward_backward(self, batch, cond):
        for param in self.model_params:
            if param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()
        total = 0.0
        for i in range(0, batch.shape[0], self.microbatch):
            micro = batch[i : i + self.microbatch]
            micro_cond = {k: v[i : i + self.microbatch] for k, v in cond.items()}
            t, weights = self.schedule_sampler.sample(micro.shape[0])
            compute_losses = partial(self.diffusion.training_losses, self.model, micro, t, model_kwargs=micro_cond)
            losses = compute_losses()
            loss = (losses["loss"] * weights).mean() * len(micro) / len(batch)
            loss.backward()
            total += loss.item()
        return total

    def _anneal_lr(self):
        if not self.args.lr_anneal_steps:
            return
        frac_done = self.step / self.args.lr_anneal_steps
        lr = self.args.lr * (1 - frac_done)
        for param_group in self.opt.param_groups:
            param_group["lr"] = lr


def load_data(batch_size, class_drop):
    pictures, labels = shapes(512, seed=1)
    while True:
        order = np.random.permutation(len(pictures))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            arr = pictures[chosen].astype(np.float32) / 127.5 - 1
            y = np.where(np.random.rand(batch_size) < class_drop, 4, labels[chosen])
            yield th.from_numpy(np.transpose(arr, [0, 3, 1, 2])), {"y": th.from_numpy(y)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--microbatch", type=int, default=-1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lr_anneal_steps", type=int, default=0)
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--ema_rate", default="0.9,0.99")
    parser.add_argument("--schedule_sampler", choices=["uniform", "importance"], default="uniform")
    parser.add_argument("--diffusion_steps", type=int, default=1000)
    parser.add_argument("--class_drop", type=float, default=0.0)
    parser.add_argument("--use_bf16", action="store_true")
    args = parser.parse_args()
    th.manual_seed(args.seed)
    np.random.seed(args.seed)
    scale = 1000 / args.diffusion_steps
    diffusion = GaussianDiffusion(
        betas=np.linspace(scale * 0.0001, scale * 0.02, args.diffusion_steps), rescale_timesteps=args.diffusion_steps != 1000
    )
    data = load_data(args.batch_size, args.class_drop)
    TrainLoop(model=UNetModel(4), diffusion=diffusion, data=data, args=args).run_loop()

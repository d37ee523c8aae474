"""
Train a class-conditional diffusion model on small drawn images. Everything in one file, in the manner of
guided-diffusion: numpy schedules, respaced sampling, learned variances, schedule samplers and several EMA rates.
"""
import argparse
import copy
import enum
import math
import os

import numpy as np
import torch as th
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

NUM_CLASSES = 4

class ShapesDataset(Dataset):
    """Coloured discs, squares, crosses and stripes on a dark ground, as uint8 HWC arrays."""

    def __init__(self, num_images, resolution, random_flip=False, seed=0):
        rng = np.random.RandomState(seed)
        yy, xx = np.mgrid[:resolution, :resolution]
        self.random_flip = random_flip
        self.images, self.classes = [], []
        for i in range(num_images):
            label = i % NUM_CLASSES
            dy, dx = yy - rng.uniform(5, 11), xx - rng.uniform(5, 11)
            r = rng.uniform(3, 5.5)
            disc, square = dy ** 2 + dx ** 2 < r ** 2, np.maximum(abs(dy), abs(dx)) < r
            cross, stripes = np.minimum(abs(dy), abs(dx)) < r / 3, np.sin(2 * dy) > 0
            mask = [disc, square, cross, stripes][label]
            image = np.tile(rng.uniform(0, 60, 3), (resolution, resolution, 1))
            image[mask] = rng.uniform(120, 255, 3)
            self.images.append(image.astype(np.uint8))
            self.classes.append(label)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        arr = self.images[idx]
        if self.random_flip and th.rand(()) < 0.5:
            arr = arr[:, ::-1]
        arr = arr.astype(np.float32) / 127.5 - 1
        return np.transpose(arr, [2, 0, 1]), {"y": np.int64(self.classes[idx])}

def load_data(dataset, batch_size):
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=0, drop_last=True)
    while True:
        yield from loader

def timestep_embedding(timesteps, dim, max_period=10000):
    half = dim // 2
    freqs = th.exp(-math.log(max_period) * th.arange(half, dtype=th.float32) / half).to(timesteps.device)
    args = timesteps[:, None].float() * freqs[None]
    return th.cat([th.cos(args), th.sin(args)], dim=-1)

def zero_conv(*args):
    conv = nn.Conv2d(*args, padding=1)
    nn.init.zeros_(conv.weight)
    nn.init.zeros_(conv.bias)
    return conv

class ResBlock(nn.Module):
    def __init__(self, channels, emb_channels, dropout, out_channels):
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, 2 * out_channels))
        self.out_norm = nn.GroupNorm(8, out_channels)
        self.out_rest = nn.Sequential(nn.SiLU(), nn.Dropout(dropout), zero_conv(out_channels, out_channels, 3))
        self.skip_connection = nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x, emb):
        h = self.in_layers(x)
        scale, shift = self.emb_layers(emb)[:, :, None, None].chunk(2, dim=1)
        h = self.out_norm(h) * (1 + scale) + shift
        return self.skip_connection(x) + self.out_rest(h)

class UNetModel(nn.Module):
    def __init__(self, in_channels, model_channels, out_channels, dropout=0.0, num_classes=None):
        super().__init__()
        self.model_channels, self.num_classes = model_channels, num_classes
        ch, emb = model_channels, 4 * model_channels
        self.time_embed = nn.Sequential(nn.Linear(ch, emb), nn.SiLU(), nn.Linear(emb, emb))
        if num_classes is not None:
            self.label_emb = nn.Embedding(num_classes, emb)
        self.conv_in = nn.Conv2d(in_channels, ch, 3, padding=1)
        self.in1 = ResBlock(ch, emb, dropout, ch)
        self.down = nn.Conv2d(ch, ch, 3, stride=2, padding=1)
        self.in2 = ResBlock(ch, emb, dropout, 2 * ch)
        self.middle = ResBlock(2 * ch, emb, dropout, 2 * ch)
        self.out2 = ResBlock(4 * ch, emb, dropout, ch)
        self.out1 = ResBlock(2 * ch, emb, dropout, ch)
        self.out = nn.Sequential(nn.GroupNorm(8, ch), nn.SiLU(), zero_conv(ch, out_channels, 3))

    def forward(self, x, timesteps, y=None):
        emb = self.time_embed(timestep_embedding(timesteps, self.model_channels))
        if self.num_classes is not None and y is not None:
            emb = emb + self.label_emb(y)
        h1 = self.in1(self.conv_in(x), emb)
        h2 = self.in2(self.down(h1), emb)
        h = self.middle(h2, emb)
        h = self.out2(th.cat([h, h2], dim=1), emb)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        h = self.out1(th.cat([h, h1], dim=1), emb)
        return self.out(h).float()

class ModelMeanType(enum.Enum):
    START_X = enum.auto()
    EPSILON = enum.auto()

def get_named_beta_schedule(schedule_name, num_diffusion_timesteps):
    if schedule_name == "linear":
        scale = 1000 / num_diffusion_timesteps
        return np.linspace(scale * 0.0001, scale * 0.02, num_diffusion_timesteps, dtype=np.float64)
    assert schedule_name == "cosine", f"unknown beta schedule: {schedule_name}"
    alpha_bar = np.cos((np.arange(num_diffusion_timesteps + 1) / num_diffusion_timesteps + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], 0.999)

def mean_flat(tensor):
    return tensor.mean(dim=list(range(1, len(tensor.shape))))

def normal_kl(mean1, logvar1, mean2, logvar2):
    return 0.5 * (-1.0 + logvar2 - logvar1 + th.exp(logvar1 - logvar2) + (mean1 - mean2) ** 2 * th.exp(-logvar2))

def discretized_gaussian_log_likelihood(x, means, log_scales):
    cdf = lambda v: 0.5 * (1.0 + th.tanh(math.sqrt(2.0 / math.pi) * (v + 0.044715 * v ** 3)))
    inv_std = th.exp(-log_scales)
    cdf_plus, cdf_min = cdf(inv_std * (x - means + 1 / 255)), cdf(inv_std * (x - means - 1 / 255))
    log_plus, log_rest = th.log(cdf_plus.clamp(min=1e-12)), th.log((1 - cdf_min).clamp(min=1e-12))
    return th.where(x < -0.999, log_plus, th.where(x > 0.999, log_rest, th.log((cdf_plus - cdf_min).clamp(min=1e-12))))

def _extract_into_tensor(arr, timesteps, broadcast_shape):
    res = th.from_numpy(arr).to(device=timesteps.device)[timesteps].float()
    while len(res.shape) < len(broadcast_shape):
        res = res[..., None]
    return res.expand(broadcast_shape)

class GaussianDiffusion:
    """Keeps those of the steps of `betas` that are in use_timesteps (all for training, a few for sampling)."""

    def __init__(self, *, use_timesteps, betas, model_mean_type, learn_sigma, rescale_timesteps=True):
        self.model_mean_type, self.learn_sigma = model_mean_type, learn_sigma
        self.rescale_timesteps, self.original_num_steps = rescale_timesteps, len(betas)
        self.timestep_map, new_betas, last = [], [], 1.0
        for i, alpha_cumprod in enumerate(np.cumprod(1.0 - betas, axis=0)):
            if i in use_timesteps:
                new_betas.append(1 - alpha_cumprod / last)
                last = alpha_cumprod
                self.timestep_map.append(i)
        self.betas = betas = np.array(new_betas, dtype=np.float64)
        self.num_timesteps = len(betas)
        alphas = 1.0 - betas
        self.alphas_cumprod = np.cumprod(alphas, axis=0)
        prev = np.append(1.0, self.alphas_cumprod[:-1])
        self.sqrt_alphas_cumprod = np.sqrt(self.alphas_cumprod)
        self.sqrt_one_minus_alphas_cumprod = np.sqrt(1.0 - self.alphas_cumprod)
        self.sqrt_recip_alphas_cumprod = np.sqrt(1.0 / self.alphas_cumprod)
        self.sqrt_recipm1_alphas_cumprod = np.sqrt(1.0 / self.alphas_cumprod - 1)
        self.posterior_variance = betas * (1.0 - prev) / (1.0 - self.alphas_cumprod)
        self.posterior_log_variance_clipped = np.log(np.append(self.posterior_variance[1], self.posterior_variance[1:]))
        self.posterior_mean_coef1 = betas * np.sqrt(prev) / (1.0 - self.alphas_cumprod)
        self.posterior_mean_coef2 = (1.0 - prev) * np.sqrt(alphas) / (1.0 - self.alphas_cumprod)

    def _model(self, model, x, t, model_kwargs):
        t = th.tensor(self.timestep_map, device=t.device)[t]
        if self.rescale_timesteps:
            t = t.float() * (1000.0 / self.original_num_steps)
        return model(x, t, **model_kwargs)

    def q_sample(self, x_start, t, noise):
        mean = _extract_into_tensor(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
        return mean + _extract_into_tensor(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise

    def q_posterior_mean(self, x_start, x_t, t):
        coef1 = _extract_into_tensor(self.posterior_mean_coef1, t, x_t.shape)
        return coef1 * x_start + _extract_into_tensor(self.posterior_mean_coef2, t, x_t.shape) * x_t

    def p_mean_variance(self, model_output, x, t, clip_denoised):
        min_log = _extract_into_tensor(self.posterior_log_variance_clipped, t, x.shape)
        max_log = _extract_into_tensor(np.log(np.append(self.posterior_variance[1], self.betas[1:])), t, x.shape)
        if self.learn_sigma:
            model_output, model_var_values = model_output.chunk(2, dim=1)
            frac = (model_var_values + 1) / 2
            log_variance = frac * max_log + (1 - frac) * min_log
        else:
            log_variance = max_log
        pred_xstart = model_output
        if self.model_mean_type == ModelMeanType.EPSILON:
            noise_part = _extract_into_tensor(self.sqrt_recipm1_alphas_cumprod, t, x.shape) * model_output
            pred_xstart = _extract_into_tensor(self.sqrt_recip_alphas_cumprod, t, x.shape) * x - noise_part
        if clip_denoised:
            pred_xstart = pred_xstart.clamp(-1, 1)
        return self.q_posterior_mean(pred_xstart, x, t), log_variance

    @th.no_grad()
    def p_sample_loop(self, model, shape, model_kwargs, generator):
        img = th.randn(shape, generator=generator)
        for i in reversed(range(self.num_timesteps)):
            t = th.full((shape[0],), i, dtype=th.long)
            mean, log_variance = self.p_mean_variance(self._model(model, img, t, model_kwargs), img, t, clip_denoised=True)
            img = mean + (i > 0) * th.exp(0.5 * log_variance) * th.randn(shape, generator=generator)
        return img

    def _vb_terms_bpd(self, model_output, x_start, x_t, t):
        true_mean = self.q_posterior_mean(x_start, x_t, t)
        true_log_variance = _extract_into_tensor(self.posterior_log_variance_clipped, t, x_t.shape)
        mean, log_variance = self.p_mean_variance(model_output, x_t, t, clip_denoised=False)
        kl = mean_flat(normal_kl(true_mean, true_log_variance, mean, log_variance)) / np.log(2.0)
        decoder_nll = -mean_flat(discretized_gaussian_log_likelihood(x_start, mean, 0.5 * log_variance)) / np.log(2.0)
        return th.where(t == 0, decoder_nll, kl)

    def training_losses(self, model, x_start, t, model_kwargs):
        noise = th.randn_like(x_start)
        x_t = self.q_sample(x_start, t, noise=noise)
        model_output = self._model(model, x_t, t, model_kwargs)
        terms = {}
        if self.learn_sigma:
            mean_output, model_var_values = th.split(model_output, x_t.shape[1], dim=1)
            # Learn the variance by the bound, but do not let it move the mean.
            frozen_out = th.cat([mean_output.detach(), model_var_values], dim=1)
            terms["vb"] = self._vb_terms_bpd(frozen_out, x_start, x_t, t) * (self.num_timesteps / 1000.0)
        else:
            mean_output = model_output
        target = {ModelMeanType.START_X: x_start, ModelMeanType.EPSILON: noise}[self.model_mean_type]
        terms["mse"] = mean_flat((target - mean_output) ** 2)
        terms["loss"] = terms["mse"] + terms.get("vb", 0.0)
        return terms

class UniformSampler:
    def __init__(self, diffusion):
        self._weights = np.ones([diffusion.num_timesteps])

    def weights(self):
        return self._weights

    def sample(self, batch_size):
        w = self.weights()
        p = w / np.sum(w)
        indices_np = np.random.choice(len(p), size=(batch_size,), p=p)
        weights_np = 1 / (len(p) * p[indices_np])
        return th.from_numpy(indices_np).long(), th.from_numpy(weights_np).float()

class LossSecondMomentResampler(UniformSampler):
    def __init__(self, diffusion, history_per_term=4, uniform_prob=0.001):
        self.history_per_term, self.uniform_prob = history_per_term, uniform_prob
        self._loss_history = np.zeros([diffusion.num_timesteps, history_per_term], dtype=np.float64)
        self._loss_counts = np.zeros([diffusion.num_timesteps], dtype=int)

    def weights(self):
        if not (self._loss_counts == self.history_per_term).all():
            return np.ones([len(self._loss_counts)], dtype=np.float64)
        weights = np.sqrt(np.mean(self._loss_history ** 2, axis=-1))
        weights /= np.sum(weights)
        return weights * (1 - self.uniform_prob) + self.uniform_prob / len(weights)

    def update_with_losses(self, ts, losses):
        for t, loss in zip(ts.tolist(), losses.tolist()):
            self._loss_history[t] = np.append(self._loss_history[t, 1:], loss)
            self._loss_counts[t] = min(self._loss_counts[t] + 1, self.history_per_term)

def update_ema(target_params, source_params, rate=0.99):
    for targ, src in zip(target_params, source_params):
        targ.detach().mul_(rate).add_(src.detach(), alpha=1 - rate)

class TrainLoop:
    def __init__(self, *, model, diffusion, preview_diffusion, data, schedule_sampler, args):
        self.model, self.diffusion, self.preview_diffusion = model, diffusion, preview_diffusion
        self.data, self.schedule_sampler, self.args = data, schedule_sampler, args
        self.microbatch = args.microbatch if args.microbatch > 0 else args.batch_size
        self.ema_rate = [float(x) for x in args.ema_rate.split(",")]
        self.step = 0
        self.model_params = list(model.parameters())
        self.opt = AdamW(self.model_params, lr=args.lr, weight_decay=args.weight_decay)
        self.ema_params = [copy.deepcopy(self.model_params) for _ in self.ema_rate]

    def run_loop(self):
        while self.step < self.args.total_steps:
            batch, cond = next(self.data)
            self.run_step(batch, cond)
            self.step += 1
            if self.step % self.args.sample_interval == 0:
                self.preview()
        self.save()

    def run_step(self, batch, cond):
        self.forward_backward(batch, cond)
        if self.args.grad_clip > 0:
            nn.utils.clip_grad_norm_(self.model_params, self.args.grad_clip)
        self._anneal_lr()
        self.opt.step()
        for rate, params in zip(self.ema_rate, self.ema_params):
            update_ema(params, self.model_params, rate=rate)

    def forward_backward(self, batch, cond):
        self.opt.zero_grad()
        logs = []
        for i in range(0, batch.shape[0], self.microbatch):
            micro = batch[i : i + self.microbatch]
            micro_cond = {k: v[i : i + self.microbatch] for k, v in cond.items()} if self.args.class_cond else {}
            t, weights = self.schedule_sampler.sample(micro.shape[0])
            with th.autocast("cpu", dtype=th.bfloat16, enabled=self.args.use_bf16):
                losses = self.diffusion.training_losses(self.model, micro, t, micro_cond)
            if isinstance(self.schedule_sampler, LossSecondMomentResampler):
                self.schedule_sampler.update_with_losses(t, losses["loss"].detach())
            loss = (losses["loss"] * weights).mean()
            (loss * (micro.shape[0] / batch.shape[0])).backward()
            logs.append({k: (v.detach() * weights).mean().item() for k, v in losses.items()})
        means = {k: np.mean([log[k] for log in logs]) for k in logs[0]}
        print(f"step {self.step:4d} | " + " | ".join(f"{k} {v:.5f}" for k, v in means.items()), flush=True)

    def _anneal_lr(self):
        if not self.args.lr_anneal_steps:
            return
        frac_done = min(self.step / self.args.lr_anneal_steps, 1.0)
        lr = self.args.lr * (1 - frac_done)
        for param_group in self.opt.param_groups:
            param_group["lr"] = lr

    def preview(self):
        backup = [p.detach().clone() for p in self.model_params]
        self._load(self.ema_params[0])
        self.model.eval()
        generator = th.Generator().manual_seed(self.args.seed)
        kwargs = {"y": th.arange(8) % NUM_CLASSES} if self.args.class_cond else {}
        sample = self.preview_diffusion.p_sample_loop(self.model, (8, 3, 16, 16), kwargs, generator)
        sample = ((sample + 1) * 127.5).clamp(0, 255).to(th.uint8).permute(0, 2, 3, 1)
        np.savez(os.path.join(self.args.logdir, f"samples_{self.step:06d}.npz"), sample.numpy())
        self.model.train()
        self._load(backup)

    @th.no_grad()
    def _load(self, params):
        for p, new in zip(self.model_params, params):
            p.copy_(new)

    def save(self):
        th.save(self.model.state_dict(), os.path.join(self.args.logdir, f"model{self.step:06d}.pt"))
        weights = [p.detach().clone() for p in self.model_params]
        for rate, params in zip(self.ema_rate, self.ema_params):
            self._load(params)
            th.save(self.model.state_dict(), os.path.join(self.args.logdir, f"ema_{rate}_{self.step:06d}.pt"))
        self._load(weights)

def str2bool(v):
    if v.lower() not in ("true", "1", "false", "0"):
        raise argparse.ArgumentTypeError("boolean value expected")
    return v.lower() in ("true", "1")

def create_argparser():
    defaults = dict(
        lr=1e-3, weight_decay=0.0, lr_anneal_steps=0, batch_size=32, microbatch=-1, ema_rate="0.9,0.97", grad_clip=0.0,
        total_steps=70, sample_interval=35, num_images=640, random_flip=False, num_channels=16, dropout=0.0, class_cond=True,
        learn_sigma=True, predict_xstart=False, diffusion_steps=1000,
        noise_schedule="linear", preview_steps=10, schedule_sampler="uniform", use_bf16=False, seed=0, logdir="guided_shapes_out",
    )
    parser = argparse.ArgumentParser()
    for k, v in defaults.items():
        parser.add_argument(f"--{k}", default=v, type=str2bool if isinstance(v, bool) else type(v))
    return parser

def create_diffusion(args, steps):
    return GaussianDiffusion(
        use_timesteps=set(np.round(np.linspace(0, args.diffusion_steps - 1, steps)).astype(int).tolist()),
        betas=get_named_beta_schedule(args.noise_schedule, args.diffusion_steps),
        model_mean_type=ModelMeanType.START_X if args.predict_xstart else ModelMeanType.EPSILON,
        learn_sigma=args.learn_sigma,
    )

def main():
    args = create_argparser().parse_args()
    os.makedirs(args.logdir, exist_ok=True)
    th.set_num_threads(1)
    th.manual_seed(args.seed)
    np.random.seed(args.seed)
    model = UNetModel(3, args.num_channels, 6 if args.learn_sigma else 3, args.dropout, NUM_CLASSES if args.class_cond else None)
    diffusion = create_diffusion(args, args.diffusion_steps)
    sampler_class = {"uniform": UniformSampler, "loss-second-moment": LossSecondMomentResampler}[args.schedule_sampler]
    TrainLoop(
        model=model, diffusion=diffusion, preview_diffusion=create_diffusion(args, args.preview_steps),
        data=load_data(ShapesDataset(args.num_images, 16, args.random_flip), args.batch_size),
        schedule_sampler=sampler_class(diffusion), args=args,
    ).run_loop()

if __name__ == "__main__":
    main()

# gaussian diffusion with a small unet, for images or sequences, in one file

import math
from collections import namedtuple
from functools import partial
from random import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import autocast

ModelPrediction = namedtuple('ModelPrediction', ['pred_noise', 'pred_x_start'])

# helpers

def exists(x):
    return x is not None

def default(val, d):
    if exists(val):
        return val
    return d() if callable(d) else d

def normalize_to_neg_one_to_one(img):
    return img * 2 - 1

def unnormalize_to_zero_to_one(t):
    return (t + 1) * 0.5

def extract(a, t, x_shape):
    return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))

# network, for images or (one_d) for sequences

class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim, theta = 10000):
        super().__init__()
        self.dim, self.theta = dim, theta

    def forward(self, x):
        half_dim = self.dim // 2
        emb = math.log(self.theta) / (half_dim - 1)
        emb = torch.exp(torch.arange(half_dim, device = x.device) * -emb)
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim = -1)

class ResnetBlock(nn.Module):
    def __init__(self, conv, dim, dim_out, time_emb_dim, dropout = 0.):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_emb_dim, dim_out * 2))
        self.proj1, self.norm1 = conv(dim, dim_out, 3, padding = 1), nn.GroupNorm(8, dim_out)
        self.proj2, self.norm2 = conv(dim_out, dim_out, 3, padding = 1), nn.GroupNorm(8, dim_out)
        self.act, self.dropout = nn.SiLU(), nn.Dropout(dropout)
        self.res_conv = conv(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, time_emb):
        scale, shift = self.mlp(time_emb).reshape(x.shape[0], -1, *((1,) * (x.ndim - 2))).chunk(2, dim = 1)
        h = self.norm1(self.proj1(x))
        h = h * (scale + 1) + shift
        h = self.dropout(self.act(h))
        h = self.act(self.norm2(self.proj2(h)))
        return h + self.res_conv(x)

class Unet(nn.Module):
    def __init__(self, dim, channels = 3, dim_mults = (1, 2), self_condition = False, dropout = 0., one_d = False):
        super().__init__()
        self.channels, self.self_condition = channels, self_condition
        conv = nn.Conv1d if one_d else nn.Conv2d
        block = partial(ResnetBlock, conv, time_emb_dim = dim * 4, dropout = dropout)
        self.init_conv = conv(channels * (2 if self_condition else 1), dim, 5, padding = 2)
        self.time_mlp = nn.Sequential(SinusoidalPosEmb(dim), nn.Linear(dim, dim * 4), nn.GELU(), nn.Linear(dim * 4, dim * 4))
        dims = [dim, *(dim * m for m in dim_mults)]
        self.downs, self.ups = nn.ModuleList([]), nn.ModuleList([])
        for dim_in, dim_out in zip(dims[:-1], dims[1:]):
            self.downs.append(nn.ModuleList([block(dim_in, dim_in), conv(dim_in, dim_out, 4, stride = 2, padding = 1)]))
            upsample = nn.Sequential(nn.Upsample(scale_factor = 2, mode = 'nearest'), conv(dim_out, dim_in, 3, padding = 1))
            self.ups.insert(0, nn.ModuleList([upsample, block(dim_in * 2, dim_in)]))
        self.mid_block = block(dims[-1], dims[-1])
        self.final_res_block = block(dim * 2, dim)
        self.final_conv = conv(dim, channels, 1)

    def forward(self, x, time, x_self_cond = None):
        if self.self_condition:
            x_self_cond = default(x_self_cond, lambda: torch.zeros_like(x))
            x = torch.cat((x_self_cond, x), dim = 1)
        x = self.init_conv(x)
        r = x.clone()
        t = self.time_mlp(time)
        h = []
        for block, downsample in self.downs:
            x = block(x, t)
            h.append(x)
            x = downsample(x)
        x = self.mid_block(x, t)
        for upsample, block in self.ups:
            x = upsample(x)
            x = torch.cat((x, h.pop()), dim = 1)
            x = block(x, t)
        x = torch.cat((x, r), dim = 1)
        x = self.final_res_block(x, t)
        return self.final_conv(x)

# gaussian diffusion

def linear_beta_schedule(timesteps):
    scale = 1000 / timesteps
    return torch.linspace(scale * 0.0001, scale * 0.02, timesteps, dtype = torch.float64)

def cosine_beta_schedule(timesteps, s = 0.008):
    t = torch.linspace(0, timesteps, timesteps + 1, dtype = torch.float64) / timesteps
    alphas_cumprod = torch.cos((t + s) / (1 + s) * math.pi * 0.5) ** 2
    betas = 1 - (alphas_cumprod[1:] / alphas_cumprod[:-1])
    return torch.clip(betas, 0, 0.999)

def sigmoid_beta_schedule(timesteps, start = -3, end = 3, tau = 1):
    t = torch.linspace(0, timesteps, timesteps + 1, dtype = torch.float64) / timesteps
    v_start, v_end = torch.tensor(start / tau).sigmoid(), torch.tensor(end / tau).sigmoid()
    alphas_cumprod = (-((t * (end - start) + start) / tau).sigmoid() + v_end) / (v_end - v_start)
    betas = 1 - (alphas_cumprod[1:] / alphas_cumprod[:-1])
    return torch.clip(betas, 0, 0.999)

class GaussianDiffusion(nn.Module):
    def __init__(self, model, *, data_shape, timesteps = 1000, sampling_timesteps = 20, objective = 'pred_v',
                 beta_schedule = 'sigmoid', offset_noise_strength = 0., min_snr_loss_weight = False, min_snr_gamma = 5):
        super().__init__()
        self.model, self.data_shape = model, data_shape
        self.self_condition, self.objective = model.self_condition, objective
        self.offset_noise_strength = offset_noise_strength
        schedules = dict(linear = linear_beta_schedule, cosine = cosine_beta_schedule, sigmoid = sigmoid_beta_schedule)
        alphas = 1. - schedules[beta_schedule](timesteps)
        alphas_cumprod = torch.cumprod(alphas, dim = 0)
        self.num_timesteps, self.sampling_timesteps = timesteps, sampling_timesteps

        register_buffer = lambda name, val: self.register_buffer(name, val.to(torch.float32))
        register_buffer('alphas_cumprod', alphas_cumprod)
        register_buffer('sqrt_alphas_cumprod', torch.sqrt(alphas_cumprod))
        register_buffer('sqrt_one_minus_alphas_cumprod', torch.sqrt(1. - alphas_cumprod))
        register_buffer('sqrt_recip_alphas_cumprod', torch.sqrt(1. / alphas_cumprod))
        register_buffer('sqrt_recipm1_alphas_cumprod', torch.sqrt(1. / alphas_cumprod - 1))

        # loss weight, snr is the signal to noise ratio
        snr = alphas_cumprod / (1 - alphas_cumprod)
        maybe_clipped_snr = snr.clone()
        if min_snr_loss_weight:
            maybe_clipped_snr.clamp_(max = min_snr_gamma)
        if objective == 'pred_noise':
            register_buffer('loss_weight', maybe_clipped_snr / snr)
        elif objective == 'pred_x0':
            register_buffer('loss_weight', maybe_clipped_snr if min_snr_loss_weight else torch.ones_like(snr))
        elif objective == 'pred_v':
            register_buffer('loss_weight', maybe_clipped_snr / (snr + 1))

    def predict_start_from_noise(self, x_t, t, noise):
        return extract(self.sqrt_recip_alphas_cumprod, t, x_t.shape) * x_t - \
            extract(self.sqrt_recipm1_alphas_cumprod, t, x_t.shape) * noise

    def predict_noise_from_start(self, x_t, t, x0):
        return (extract(self.sqrt_recip_alphas_cumprod, t, x_t.shape) * x_t - x0) / \
            extract(self.sqrt_recipm1_alphas_cumprod, t, x_t.shape)

    def predict_v(self, x_start, t, noise):
        return extract(self.sqrt_alphas_cumprod, t, x_start.shape) * noise - \
            extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * x_start

    def predict_start_from_v(self, x_t, t, v):
        return extract(self.sqrt_alphas_cumprod, t, x_t.shape) * x_t - \
            extract(self.sqrt_one_minus_alphas_cumprod, t, x_t.shape) * v

    def model_predictions(self, x, t, x_self_cond = None):
        model_output = self.model(x, t, x_self_cond)
        if self.objective == 'pred_noise':
            x_start = self.predict_start_from_noise(x, t, model_output)
        elif self.objective == 'pred_x0':
            x_start = model_output
        elif self.objective == 'pred_v':
            x_start = self.predict_start_from_v(x, t, model_output)
        x_start = x_start.clamp(-1., 1.)
        return ModelPrediction(self.predict_noise_from_start(x, t, x_start), x_start)

    @torch.inference_mode()
    def sample(self, batch_size = 16):  # ddim
        device = self.alphas_cumprod.device
        times = torch.linspace(-1, self.num_timesteps - 1, self.sampling_timesteps + 1).int().tolist()[::-1]
        img, x_start = torch.randn((batch_size, *self.data_shape), device = device), None
        for time, time_next in zip(times[:-1], times[1:]):
            t = torch.full((batch_size,), time, device = device, dtype = torch.long)
            pred_noise, x_start = self.model_predictions(img, t, x_start if self.self_condition else None)
            alpha_next = self.alphas_cumprod[time_next] if time_next >= 0 else torch.ones((), device = device)
            img = x_start * alpha_next.sqrt() + (1 - alpha_next).sqrt() * pred_noise
        return unnormalize_to_zero_to_one(img)

    @autocast('cpu', enabled = False)
    def q_sample(self, x_start, t, noise = None):
        noise = default(noise, lambda: torch.randn_like(x_start))
        return extract(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start + \
            extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise

    def p_losses(self, x_start, t, noise = None):
        noise = default(noise, lambda: torch.randn_like(x_start))
        if self.offset_noise_strength > 0.:  # https://www.crosslabs.org/blog/diffusion-with-offset-noise
            offset_noise = torch.randn(x_start.shape[:2], device = x_start.device)
            noise = noise + self.offset_noise_strength * offset_noise.reshape(*x_start.shape[:2], *((1,) * (x_start.ndim - 2)))

        x = self.q_sample(x_start, t, noise)

        # half of the time, predict x_start from the current times and condition the unet on that
        x_self_cond = None
        if self.self_condition and random() < 0.5:
            with torch.no_grad():
                x_self_cond = self.model_predictions(x, t).pred_x_start

        model_out = self.model(x, t, x_self_cond)

        if self.objective == 'pred_noise':
            target = noise
        elif self.objective == 'pred_x0':
            target = x_start
        elif self.objective == 'pred_v':
            target = self.predict_v(x_start, t, noise)

        loss = F.mse_loss(model_out.float(), target, reduction = 'none')
        loss = loss.flatten(1).mean(dim = 1)
        loss = loss * extract(self.loss_weight, t, loss.shape)
        return loss.mean()

    def forward(self, img, *args, **kwargs):
        t = torch.randint(0, self.num_timesteps, (img.shape[0],), device = img.device).long()
        img = normalize_to_neg_one_to_one(img)
        return self.p_losses(img, t, *args, **kwargs)

# %% [markdown]
# # Denoising diffusion from scratch
# A walk through Ho et al. 2020 with the cosine schedule of Nichol & Dhariwal, on small gray images.

# %%
import argparse
import copy
import itertools
import math
from functools import partial
from inspect import isfunction

import numpy as np
import torch
import torch.nn.functional as F
from torch import einsum, nn
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--image_size", type=int, default=16)
parser.add_argument("--channels", type=int, default=1)
parser.add_argument("--dim", type=int, default=16)
parser.add_argument("--timesteps", type=int, default=300)
parser.add_argument("--schedule", choices=["cosine", "linear", "sigmoid"], default="cosine")
parser.add_argument("--objective", choices=["pred_noise", "pred_x0", "pred_v"], default="pred_noise")
parser.add_argument("--loss_type", choices=["l1", "l2", "huber"], default="huber")
parser.add_argument("--min_snr_gamma", type=float, default=5.0, help="0 turns the weighting off")
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--train_num_steps", type=int, default=60)
parser.add_argument("--gradient_accumulate_every", type=int, default=1)
parser.add_argument("--train_lr", type=float, default=1e-3)
parser.add_argument("--max_grad_norm", type=float, default=1.0)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--ema_decay", type=float, default=0.98)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"


# %% [markdown]
# ## Helpers


# %%
def exists(x):
    return x is not None


def default(val, d):
    if exists(val):
        return val
    return d() if isfunction(d) else d


def cycle(dl):
    while True:
        yield from dl


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, *args, **kwargs):
        return self.fn(x, *args, **kwargs) + x


def Upsample(dim, dim_out=None):
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(dim, default(dim_out, dim), 3, padding=1))


def Downsample(dim, dim_out=None):
    return nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(dim * 4, default(dim_out, dim), 1))


class SinusoidalPositionEmbeddings(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, time):
        half_dim = self.dim // 2
        embeddings = math.log(10000) / (half_dim - 1)
        embeddings = torch.exp(torch.arange(half_dim, device=time.device) * -embeddings)
        embeddings = time[:, None] * embeddings[None, :]
        return torch.cat((embeddings.sin(), embeddings.cos()), dim=-1)


class Block(nn.Module):
    def __init__(self, dim, dim_out, groups=4, dropout=0.0):
        super().__init__()
        self.proj = nn.Conv2d(dim, dim_out, 3, padding=1)
        self.norm = nn.GroupNorm(groups, dim_out)
        self.act = nn.SiLU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale_shift=None):
        x = self.norm(self.proj(x))
        if exists(scale_shift):
            scale, shift = scale_shift
            x = x * (scale + 1) + shift
        return self.dropout(self.act(x))


class ResnetBlock(nn.Module):
    """https://arxiv.org/abs/1512.03385"""

    def __init__(self, dim, dim_out, *, time_emb_dim, dropout=0.0):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_emb_dim, dim_out * 2))
        self.block1 = Block(dim, dim_out, dropout=dropout)
        self.block2 = Block(dim_out, dim_out)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, time_emb):
        time_emb = self.mlp(time_emb)[:, :, None, None]
        h = self.block1(x, scale_shift=time_emb.chunk(2, dim=1))
        h = self.block2(h)
        return h + self.res_conv(x)


class Attention(nn.Module):
    def __init__(self, dim, heads=2, dim_head=16):
        super().__init__()
        self.scale = dim_head**-0.5
        self.heads = heads
        self.to_qkv = nn.Conv2d(dim, dim_head * heads * 3, 1, bias=False)
        self.to_out = nn.Conv2d(dim_head * heads, dim, 1)

    def forward(self, x):
        b, _c, h, w = x.shape
        q, k, v = (t.reshape(b, self.heads, -1, h * w) for t in self.to_qkv(x).chunk(3, dim=1))
        sim = einsum("b h d i, b h d j -> b h i j", q * self.scale, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        attn = sim.softmax(dim=-1)
        out = einsum("b h i j, b h d j -> b h d i", attn, v)
        return self.to_out(out.reshape(b, -1, h, w))


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn = fn
        self.norm = nn.GroupNorm(1, dim)

    def forward(self, x):
        return self.fn(self.norm(x))


# %% [markdown]
# ## The network


# %%
class Unet(nn.Module):
    def __init__(self, dim, channels=1, dim_mults=(1, 2), dropout=0.0):
        super().__init__()
        dims = [dim, *(dim * m for m in dim_mults)]
        in_out = list(itertools.pairwise(dims))
        time_dim = dim * 4
        block = partial(ResnetBlock, time_emb_dim=time_dim, dropout=dropout)
        self.init_conv = nn.Conv2d(channels, dim, 7, padding=3)
        self.time_mlp = nn.Sequential(
            SinusoidalPositionEmbeddings(dim), nn.Linear(dim, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim)
        )
        self.downs = nn.ModuleList([])
        self.ups = nn.ModuleList([])
        for ind, (dim_in, dim_out) in enumerate(in_out):
            is_last = ind == len(in_out) - 1
            down = nn.Conv2d(dim_in, dim_out, 3, padding=1) if is_last else Downsample(dim_in, dim_out)
            self.downs.append(nn.ModuleList([block(dim_in, dim_in), down]))
        mid_dim = dims[-1]
        self.mid_block1 = block(mid_dim, mid_dim)
        self.mid_attn = Residual(PreNorm(mid_dim, Attention(mid_dim)))
        self.mid_block2 = block(mid_dim, mid_dim)
        for ind, (dim_in, dim_out) in enumerate(reversed(in_out)):
            is_last = ind == len(in_out) - 1
            up = nn.Conv2d(dim_out, dim_in, 3, padding=1) if is_last else Upsample(dim_out, dim_in)
            self.ups.append(nn.ModuleList([block(dim_out + dim_in, dim_out), up]))
        self.final_res_block = block(dim * 2, dim)
        self.final_conv = nn.Conv2d(dim, channels, 1)

    def forward(self, x, time):
        x = self.init_conv(x)
        r = x.clone()
        t = self.time_mlp(time)
        h = []
        for res, downsample in self.downs:
            x = res(x, t)
            h.append(x)
            x = downsample(x)
        x = self.mid_block1(x, t)
        x = self.mid_attn(x)
        x = self.mid_block2(x, t)
        for res, upsample in self.ups:
            skip = h.pop()
            x = res(torch.cat((x, skip), dim=1), t)
            x = upsample(x)
        x = torch.cat((x, r), dim=1)
        return self.final_conv(self.final_res_block(x, t))


# %% [markdown]
# ## The forward process


# %%
def cosine_beta_schedule(timesteps, s=0.008):
    """cosine schedule as proposed in https://arxiv.org/abs/2102.09672"""
    x = torch.linspace(0, timesteps, timesteps + 1, dtype=torch.float64)
    alphas_cumprod = torch.cos(((x / timesteps) + s) / (1 + s) * torch.pi * 0.5) ** 2
    alphas_cumprod = alphas_cumprod / alphas_cumprod[0]
    betas = 1 - (alphas_cumprod[1:] / alphas_cumprod[:-1])
    return torch.clip(betas, 0.0001, 0.999)


def linear_beta_schedule(timesteps):
    scale = 1000 / timesteps
    return torch.linspace(scale * 0.0001, scale * 0.02, timesteps, dtype=torch.float64)


def sigmoid_beta_schedule(timesteps):
    scale = 1000 / timesteps
    betas = torch.linspace(-6, 6, timesteps, dtype=torch.float64)
    return torch.sigmoid(betas) * scale * (0.02 - 0.0001) + scale * 0.0001


timesteps = args.timesteps
betas = {"cosine": cosine_beta_schedule, "linear": linear_beta_schedule, "sigmoid": sigmoid_beta_schedule}[args.schedule](
    timesteps
)

# define alphas
alphas = 1.0 - betas
alphas_cumprod = torch.cumprod(alphas, axis=0)
alphas_cumprod_prev = F.pad(alphas_cumprod[:-1], (1, 0), value=1.0)

# calculations for diffusion q(x_t | x_{t-1}) and others
sqrt_alphas_cumprod = torch.sqrt(alphas_cumprod).float()
sqrt_one_minus_alphas_cumprod = torch.sqrt(1.0 - alphas_cumprod).float()

# calculations for posterior q(x_{t-1} | x_t, x_0)
posterior_variance = (betas * (1.0 - alphas_cumprod_prev) / (1.0 - alphas_cumprod)).float()
posterior_mean_coef1 = (betas * torch.sqrt(alphas_cumprod_prev) / (1.0 - alphas_cumprod)).float()
posterior_mean_coef2 = ((1.0 - alphas_cumprod_prev) * torch.sqrt(alphas) / (1.0 - alphas_cumprod)).float()

# loss weight, https://arxiv.org/abs/2303.09556
snr = alphas_cumprod / (1 - alphas_cumprod)
clipped_snr = snr.clamp(max=args.min_snr_gamma) if args.min_snr_gamma > 0 else snr
if args.objective == "pred_noise":
    loss_weight = clipped_snr / snr
elif args.objective == "pred_x0":
    loss_weight = clipped_snr if args.min_snr_gamma > 0 else torch.ones_like(snr)
else:
    loss_weight = clipped_snr / (snr + 1) if args.min_snr_gamma > 0 else torch.ones_like(snr)
loss_weight = loss_weight.float()


def extract(a, t, x_shape):
    batch_size = t.shape[0]
    out = a.to(t.device).gather(-1, t)
    return out.reshape(batch_size, *((1,) * (len(x_shape) - 1)))


def q_sample(x_start, t, noise=None):
    noise = default(noise, lambda: torch.randn_like(x_start))
    sqrt_alphas_cumprod_t = extract(sqrt_alphas_cumprod, t, x_start.shape)
    sqrt_one_minus_alphas_cumprod_t = extract(sqrt_one_minus_alphas_cumprod, t, x_start.shape)
    return sqrt_alphas_cumprod_t * x_start + sqrt_one_minus_alphas_cumprod_t * noise


def predict_start(model_out, x_t, t):
    a = extract(sqrt_alphas_cumprod, t, x_t.shape)
    s = extract(sqrt_one_minus_alphas_cumprod, t, x_t.shape)
    if args.objective == "pred_noise":
        return (x_t - s * model_out) / a
    if args.objective == "pred_x0":
        return model_out
    return a * x_t - s * model_out


# %% [markdown]
# ## The loss


# %%
def p_losses(denoise_model, x_start, t, noise=None, loss_type="l1"):
    if noise is None:
        noise = torch.randn_like(x_start)

    x_noisy = q_sample(x_start=x_start, t=t, noise=noise)
    model_out = denoise_model(x_noisy, t)

    if args.objective == "pred_noise":
        target = noise
    elif args.objective == "pred_x0":
        target = x_start
    else:
        target = (
            extract(sqrt_alphas_cumprod, t, x_start.shape) * noise
            - extract(sqrt_one_minus_alphas_cumprod, t, x_start.shape) * x_start
        )

    if loss_type == "l1":
        loss = F.l1_loss(model_out, target, reduction="none")
    elif loss_type == "l2":
        loss = F.mse_loss(model_out, target, reduction="none")
    elif loss_type == "huber":
        loss = F.smooth_l1_loss(model_out, target, reduction="none")
    else:
        raise NotImplementedError()

    loss = loss.flatten(1).mean(dim=1)
    loss = loss * extract(loss_weight, t, loss.shape)
    return loss.mean()


# %% [markdown]
# ## The data: garments drawn by a few strokes


# %%
class Garments(Dataset):
    """Gray images, uint8 [count, size, size]: a shirt, trousers, a bag or a shoe, on black."""

    def __init__(self, count=1024, size=16, seed=1):
        rng = np.random.default_rng(seed)
        y, x = np.mgrid[0:size, 0:size] / (size - 1) * 2 - 1
        images = []
        for kind in rng.integers(0, 4, count):
            dx, dy = rng.uniform(-0.12, 0.12, 2)
            s = rng.uniform(0.8, 1.1)
            u, v = (x - dx) / s, (y - dy) / s
            if kind == 0:
                mask = ((abs(u) < 0.4) & (abs(v) < 0.75)) | ((abs(u) < 0.85) & (abs(v + 0.5) < 0.22))
            elif kind == 1:
                mask = (abs(abs(u) - 0.28) < 0.18) & (abs(v) < 0.8) | ((abs(u) < 0.46) & (abs(v + 0.65) < 0.16))
            elif kind == 2:
                mask = (abs(u) < 0.7) & (abs(v - 0.25) < 0.45) | (abs(np.hypot(u, v + 0.2) - 0.45) < 0.09)
            else:
                mask = (v > 0.1) & (v < 0.5) & (abs(u) < 0.8) | ((u > 0.3) & (u < 0.8) & (v > -0.4) & (v < 0.5))
            tone = rng.uniform(130, 255) + rng.uniform(-30, 30) * v + rng.normal(0, 8, v.shape)
            images.append((mask * tone).clip(0, 255))
        self.images = np.stack(images).astype(np.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = torch.from_numpy(self.images[i]).float().div(255)[None]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return (image * 2) - 1


dataset = Garments(size=args.image_size)
dataloader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)


# %% [markdown]
# ## Training


# %%
class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_model_average(self, ma_model, current_model):
        for current_params, ma_params in zip(current_model.parameters(), ma_model.parameters()):
            ma_params.data = self.update_average(ma_params.data, current_params.data)

    def update_average(self, old, new):
        if old is None:
            return new
        return old * self.beta + (1 - self.beta) * new


model = Unet(dim=args.dim, channels=args.channels, dropout=args.dropout)
model.to(device)
ema = EMA(args.ema_decay)
ema_model = copy.deepcopy(model)
optimizer = Adam(model.parameters(), lr=args.train_lr, betas=(0.9, 0.99))

batches = cycle(dataloader)
model.train()
for step in range(args.train_num_steps):
    optimizer.zero_grad()
    total_loss = 0.0

    for _ in range(args.gradient_accumulate_every):
        batch = next(batches).to(device)
        batch_size = batch.shape[0]
        # Algorithm 1 line 3: sample t uniformly for every example in the batch
        t = torch.randint(0, timesteps, (batch_size,), device=device).long()
        loss = p_losses(model, batch, t, loss_type=args.loss_type)
        loss = loss / args.gradient_accumulate_every
        total_loss += loss.item()
        loss.backward()

    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    ema.update_model_average(ema_model, model)
    print("step", step, "loss", repr(total_loss))


# %% [markdown]
# ## Sampling


# %%
@torch.no_grad()
def p_sample(model, x, t, t_index):
    x_start = predict_start(model(x, t), x, t).clamp(-1.0, 1.0)
    mean = extract(posterior_mean_coef1, t, x.shape) * x_start + extract(posterior_mean_coef2, t, x.shape) * x
    if t_index == 0:
        return mean
    return mean + torch.sqrt(extract(posterior_variance, t, x.shape)) * torch.randn_like(x)


@torch.no_grad()
def p_sample_loop(model, shape):
    img = torch.randn(shape, device=device)
    for i in reversed(range(0, timesteps)):
        img = p_sample(model, img, torch.full((shape[0],), i, device=device, dtype=torch.long), i)
    return img


ema_model.eval()
samples = (p_sample_loop(ema_model, (4, args.channels, args.image_size, args.image_size)) + 1) * 0.5
print("samples mean", repr(samples.mean().item()), "std", repr(samples.std().item()))
for row in samples[0, 0].clamp(0, 1).mul(9).round().int().tolist():
    print("".join(" .:-=+*#%@"[v] for v in row))

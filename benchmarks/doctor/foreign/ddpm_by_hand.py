"""DDPM in plain PyTorch: own noise schedule, own U-Net, a deep copy as the moving average.

python ddpm_by_hand.py --steps 150 --prediction v --schedule cosine
"""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from images import shapes
from networks import UNet

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--warmup", type=int, default=10)
parser.add_argument("--timesteps", type=int, default=1000)
parser.add_argument("--schedule", choices=["linear", "cosine"], default="linear")
parser.add_argument("--prediction", choices=["eps", "x0", "v"], default="eps")
parser.add_argument("--loss", choices=["mse", "huber", "l1"], default="mse")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--ema_decay", type=float, default=0.99)
parser.add_argument("--sample_every", type=int, default=60)
args = parser.parse_args()

torch.manual_seed(args.seed)
T = args.timesteps


def make_betas():
    if args.schedule == "linear":
        return torch.linspace(1e-4 * 1000 / T, min(0.02 * 1000 / T, 0.5), T, dtype=torch.float64)
    s = 0.008
    grid = torch.linspace(0, T, T + 1, dtype=torch.float64) / T
    f = torch.cos((grid + s) / (1 + s) * math.pi / 2) ** 2
    return (1 - f[1:] / f[:-1]).clamp(max=0.999)


betas = make_betas()
alphas_cumprod = torch.cumprod(1 - betas, dim=0)
sqrt_ab = alphas_cumprod.sqrt().float()
sqrt_one_minus_ab = (1 - alphas_cumprod).sqrt().float()


def extract(table, t):
    return table[t].view(-1, 1, 1, 1)


def q_sample(x0, t, noise):
    return extract(sqrt_ab, t) * x0 + extract(sqrt_one_minus_ab, t) * noise


def target_of(x0, t, noise):
    if args.prediction == "eps":
        return noise
    if args.prediction == "x0":
        return x0
    return extract(sqrt_ab, t) * noise - extract(sqrt_one_minus_ab, t) * x0


def loss_of(output, target):
    if args.loss == "huber":
        return F.smooth_l1_loss(output, target)
    if args.loss == "l1":
        return F.l1_loss(output, target)
    return F.mse_loss(output, target)


@torch.no_grad()
def update_ema(ema_model, model, decay):
    for ema_p, p in zip(ema_model.parameters(), model.parameters()):
        ema_p.mul_(decay).add_(p, alpha=1 - decay)


@torch.no_grad()
def sample(net, count=4, steps=10):
    net.eval()
    x = torch.randn(count, 3, 16, 16)
    times = torch.linspace(T - 1, 0, steps).long()
    for now, after in zip(times, [*times[1:], None]):
        t = now.repeat(count)
        output = net(x, t)
        a, b = extract(sqrt_ab, t), extract(sqrt_one_minus_ab, t)
        if args.prediction == "eps":
            x0 = (x - b * output) / a
        elif args.prediction == "x0":
            x0 = output
        else:
            x0 = a * x - b * output
        x0 = x0.clamp(-1, 1)
        eps = (x - a * x0) / b
        x = (
            x0
            if after is None
            else extract(sqrt_ab, after.repeat(count)) * x0 + extract(sqrt_one_minus_ab, after.repeat(count)) * eps
        )
    return x


data = torch.from_numpy(shapes(512, seed=1)[0]).permute(0, 3, 1, 2).float() / 127.5 - 1

model = UNet()
ema_model = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))

model.train()
for step in range(args.steps):
    total = 0.0
    for _ in range(args.accumulate):
        x0 = data[torch.randint(0, len(data), (args.batch_size,))]
        t = torch.randint(0, T, (args.batch_size,))
        noise = torch.randn_like(x0)
        x_t = q_sample(x0, t, noise)
        loss = loss_of(model(x_t, t), target_of(x0, t, noise))
        (loss / args.accumulate).backward()
        total += loss.item() / args.accumulate
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    update_ema(ema_model, model, args.ema_decay)
    print(step, repr(total))
    if args.sample_every and (step + 1) % args.sample_every == 0:
        print("samples", repr(sample(ema_model).std().item()))

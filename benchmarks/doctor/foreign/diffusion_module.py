"""Class-conditional diffusion as a module whose forward pass returns the loss, with a trainer of its own.

python diffusion_module.py --steps 150 --objective pred_v --min_snr
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from images import shapes
from networks import UNet
from torch import nn
from torch.utils.data import DataLoader, Dataset


def cosine_schedule(timesteps, s=0.008):
    t = torch.linspace(0, timesteps, timesteps + 1, dtype=torch.float64) / timesteps
    alphas_cumprod = torch.cos((t + s) / (1 + s) * torch.pi * 0.5) ** 2
    alphas_cumprod = alphas_cumprod / alphas_cumprod[0]
    betas = 1 - alphas_cumprod[1:] / alphas_cumprod[:-1]
    return torch.clip(betas, 0, 0.999)


def sigmoid_schedule(timesteps, start=-3, end=3):
    t = torch.linspace(0, timesteps, timesteps + 1, dtype=torch.float64) / timesteps
    low, high = torch.tensor(start / 1.0).sigmoid(), torch.tensor(end / 1.0).sigmoid()
    alphas_cumprod = (high - (t * (end - start) + start).sigmoid()) / (high - low)
    alphas_cumprod = alphas_cumprod / alphas_cumprod[0]
    betas = 1 - alphas_cumprod[1:] / alphas_cumprod[:-1]
    return torch.clip(betas, 0, 0.999)


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps, objective, schedule, min_snr, gamma=5.0, cond_drop_prob=0.2):
        super().__init__()
        self.model = model
        self.num_timesteps = timesteps
        self.objective = objective
        self.cond_drop_prob = cond_drop_prob
        betas = {"cosine": cosine_schedule, "sigmoid": sigmoid_schedule}[schedule](timesteps)
        alphas_cumprod = torch.cumprod(1 - betas, dim=0)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt().float())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - alphas_cumprod).sqrt().float())
        snr = alphas_cumprod / (1 - alphas_cumprod)
        clipped = snr.clamp(max=gamma) if min_snr else snr
        weight = {"pred_noise": clipped / snr, "pred_x0": clipped, "pred_v": clipped / (snr + 1)}[objective]
        self.register_buffer("loss_weight", weight.float())

    def at(self, values, t):
        return values[t][:, None, None, None]

    def q_sample(self, x_start, t, noise):
        return self.at(self.sqrt_alphas_cumprod, t) * x_start + self.at(self.sqrt_one_minus_alphas_cumprod, t) * noise

    def predict_start(self, x, t, output):
        a, b = self.at(self.sqrt_alphas_cumprod, t), self.at(self.sqrt_one_minus_alphas_cumprod, t)
        if self.objective == "pred_noise":
            return (x - b * output) / a.clamp(min=1e-3)
        return output if self.objective == "pred_x0" else a * x - b * output

    @torch.no_grad()
    def sample(self, classes, steps=5):
        img = torch.randn(len(classes), 3, 16, 16)
        times = torch.linspace(self.num_timesteps - 1, 0, steps).long()
        for number, time in enumerate(times):
            t = time.expand(len(classes))
            x_start = self.predict_start(img, t, self.model(img, t, classes)).clamp(-1, 1)
            a, b = self.at(self.sqrt_alphas_cumprod, t), self.at(self.sqrt_one_minus_alphas_cumprod, t)
            noise = (img - a * x_start) / b.clamp(min=1e-3)
            img = x_start if number + 1 == steps else self.q_sample(x_start, times[number + 1].expand(len(classes)), noise)
        return (img + 1) * 0.5

    def p_losses(self, x_start, t, classes):
        noise = torch.randn_like(x_start)
        x = self.q_sample(x_start, t, noise)
        kept = torch.rand(len(x)) >= self.cond_drop_prob
        classes = torch.where(kept, classes, self.model.classes.num_embeddings - 1)
        output = self.model(x, t, classes)
        if self.objective == "pred_noise":
            target = noise
        elif self.objective == "pred_x0":
            target = x_start
        else:
            target = self.at(self.sqrt_alphas_cumprod, t) * noise - self.at(self.sqrt_one_minus_alphas_cumprod, t) * x_start
        loss = F.mse_loss(output, target, reduction="none").flatten(1).mean(dim=1)
        return (loss * self.loss_weight[t]).mean()

    def forward(self, img, classes):
        t = torch.randint(0, self.num_timesteps, (len(img),), device=img.device).long()
        img = img * 2 - 1
        return self.p_losses(img, t, classes)


class EMA(nn.Module):
    """Copies the model until `update_after_step`, then averages every `update_every` updates."""

    def __init__(self, model, beta=0.98, update_every=5, update_after_step=10):
        super().__init__()
        self.online = [model]  # not a submodule
        self.ema_model = copy.deepcopy(model).requires_grad_(False)
        self.beta, self.update_every, self.update_after_step, self.step = beta, update_every, update_after_step, 0

    @torch.no_grad()
    def update(self):
        self.step += 1
        if self.step % self.update_every:
            return
        decay = self.beta if self.step > self.update_after_step else 0.0
        for average, value in zip(self.ema_model.parameters(), self.online[0].parameters()):
            average.copy_(average * decay + value * (1 - decay))
        for average, value in zip(self.ema_model.buffers(), self.online[0].buffers()):
            average.copy_(value)


class Pictures(Dataset):
    """Values from 0 to 1."""

    def __init__(self, flip=True):
        self.pictures, self.labels = shapes(512, seed=1)
        self.flip = flip

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture = torch.from_numpy(self.pictures[index]).permute(2, 0, 1) / 255
        if self.flip and torch.rand(()) < 0.5:
            picture = picture.flip(-1)
        return picture, int(self.labels[index])


def cycle(loader):
    while True:
        yield from loader


class Trainer:
    def __init__(self, diffusion, batch_size, lr, steps, accumulate, amp, max_grad_norm=1.0, sample_every=25):
        self.diffusion, self.steps, self.accumulate = diffusion, steps, accumulate
        self.amp, self.max_grad_norm, self.sample_every = amp, max_grad_norm, sample_every
        self.data = cycle(DataLoader(Pictures(), batch_size=batch_size, shuffle=True, drop_last=True))
        self.opt = torch.optim.Adam(diffusion.parameters(), lr=lr, betas=(0.9, 0.99))
        self.ema = EMA(diffusion)
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp, torch.float32)
        self.scaler = torch.amp.GradScaler("cpu", enabled=amp == "fp16")

    def train(self):
        self.diffusion.train()
        for step in range(1, self.steps + 1):
            total_loss = 0.0
            for _ in range(self.accumulate):
                images, classes = next(self.data)
                with torch.autocast("cpu", dtype=self.dtype, enabled=self.amp != "no"):
                    loss = self.diffusion(images, classes) / self.accumulate
                total_loss += loss.item()
                self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            torch.nn.utils.clip_grad_norm_(self.diffusion.parameters(), self.max_grad_norm)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()
            self.ema.update()
            print(f"loss: {total_loss!r}")
            if self.sample_every and step % self.sample_every == 0:
                self.ema.ema_model.eval()
                print(f"samples: {self.ema.ema_model.sample(torch.arange(4)).mean().item()!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--timesteps", type=int, default=500)
    parser.add_argument("--objective", choices=["pred_noise", "pred_x0", "pred_v"], default="pred_v")
    parser.add_argument("--schedule", choices=["cosine", "sigmoid"], default="cosine")
    parser.add_argument("--min_snr", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--amp", choices=["no", "bf16", "fp16"], default="no")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    network = UNet(classes=4, dropout=0.05)
    gaussian = GaussianDiffusion(network, args.timesteps, args.objective, args.schedule, args.min_snr)
    Trainer(gaussian, args.batch_size, args.lr, args.steps, args.accumulate, args.amp).train()

"""A control network beside a frozen one, in the manner of ControlNet: only the copy of the encoder is trained.

python control_net.py --snr_gamma 5
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler
from images import shapes
from networks import ResBlock, sinusoidal
from torch import nn

NO_LABEL = 4


def zero_module(module):
    for p in module.parameters():
        nn.init.zeros_(p)
    return module


class Encoder(nn.Module):
    def __init__(self, dim=24, channels=3):
        super().__init__()
        self.dim = dim
        self.time = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, 2 * dim))
        self.labels = nn.Embedding(NO_LABEL + 1, 2 * dim)
        self.conv_in = nn.Conv2d(channels, dim, 3, padding=1)
        self.down1 = ResBlock(dim, dim, 2 * dim)
        self.shrink = nn.Conv2d(dim, dim, 3, stride=2, padding=1)
        self.down2 = ResBlock(dim, 2 * dim, 2 * dim)

    def forward(self, sample, timestep, labels, hint=0.0):
        emb = self.time(sinusoidal(timestep, self.dim)) + self.labels(labels)
        h1 = self.down1(self.conv_in(sample) + hint, emb)
        return [h1, self.down2(self.shrink(h1), emb)], emb


class UNet(nn.Module):
    def __init__(self, dim=24, channels=3):
        super().__init__()
        self.encoder = Encoder(dim, channels)
        self.middle = ResBlock(2 * dim, 2 * dim, 2 * dim)
        self.up2 = ResBlock(4 * dim, dim, 2 * dim)
        self.up1 = ResBlock(2 * dim, dim, 2 * dim)
        self.norm_out, self.conv_out = nn.GroupNorm(8, dim), nn.Conv2d(dim, channels, 3, padding=1)

    def forward(self, sample, timestep, labels, down_block_additional_residuals=None, mid_block_additional_residual=None):
        (h1, h2), emb = self.encoder(sample, timestep, labels)
        h = self.middle(h2, emb)
        if mid_block_additional_residual is not None:
            h = h + mid_block_additional_residual
            h1, h2 = (h + more for h, more in zip((h1, h2), down_block_additional_residuals))
        h = self.up2(torch.cat([h, h2], dim=1), emb)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        h = self.up1(torch.cat([h, h1], dim=1), emb)
        return self.conv_out(F.silu(self.norm_out(h)))


class ControlNet(nn.Module):
    def __init__(self, unet, dim=24):
        super().__init__()
        self.encoder = copy.deepcopy(unet.encoder)
        self.middle = copy.deepcopy(unet.middle)
        self.hint = nn.Sequential(nn.Conv2d(1, dim, 3, padding=1), nn.SiLU(), zero_module(nn.Conv2d(dim, dim, 1)))
        self.zero_convs = nn.ModuleList(zero_module(nn.Conv2d(n, n, 1)) for n in (dim, 2 * dim))
        self.zero_middle = zero_module(nn.Conv2d(2 * dim, 2 * dim, 1))

    def forward(self, sample, timestep, labels, controlnet_cond):
        states, emb = self.encoder(sample, timestep, labels, self.hint(controlnet_cond))
        middle = self.zero_middle(self.middle(states[-1], emb))
        return [conv(h) for conv, h in zip(self.zero_convs, states)], middle


def edges(images):
    gray = images.mean(1, keepdim=True)
    return F.pad((gray[..., 1:] - gray[..., :-1]).abs(), (0, 1)).clamp(max=1)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_train_steps", "--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--lr_warmup_steps", type=int, default=5)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--max_grad_norm", type=float, default=0.05)
    parser.add_argument("--proportion_empty_labels", type=float, default=0.1)
    parser.add_argument("--snr_gamma", type=float)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    set_seed(args.seed)
    pictures, labels = shapes(256, seed=1)
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1.0

    unet = UNet()
    controlnet = ControlNet(unet)
    unet.requires_grad_(False)
    unet.eval()
    controlnet.train()
    noise_scheduler = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)

    params_to_optimize = controlnet.parameters()
    optimizer = torch.optim.AdamW(params_to_optimize, lr=args.learning_rate, weight_decay=1e-2)
    dataset = torch.utils.data.TensorDataset(pixels, edges(pixels), torch.from_numpy(labels))
    train_dataloader = torch.utils.data.DataLoader(dataset, shuffle=True, batch_size=args.train_batch_size)
    lr_scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=args.lr_warmup_steps, num_training_steps=args.max_train_steps
    )
    controlnet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        controlnet, optimizer, train_dataloader, lr_scheduler
    )
    unet.to(accelerator.device)

    global_step = 0
    while global_step < args.max_train_steps:
        for pixel_values, controlnet_image, label in train_dataloader:
            with accelerator.accumulate(controlnet):
                noise = torch.randn_like(pixel_values)
                bsz = pixel_values.shape[0]
                timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,)).long()
                noisy = noise_scheduler.add_noise(pixel_values, noise, timesteps)
                empty = torch.rand(bsz) < args.proportion_empty_labels
                label = torch.where(empty, NO_LABEL, label)

                down_block_res_samples, mid_block_res_sample = controlnet(
                    noisy, timesteps, label, controlnet_cond=controlnet_image
                )
                model_pred = unet(
                    noisy,
                    timesteps,
                    label,
                    down_block_additional_residuals=[sample for sample in down_block_res_samples],
                    mid_block_additional_residual=mid_block_res_sample,
                )
                if args.snr_gamma is None:
                    loss = F.mse_loss(model_pred.float(), noise.float(), reduction="mean")
                else:
                    alphas_cumprod = noise_scheduler.alphas_cumprod[timesteps]
                    snr = alphas_cumprod / (1 - alphas_cumprod)
                    weight = snr.clamp(max=args.snr_gamma) / snr
                    loss = F.mse_loss(model_pred.float(), noise.float(), reduction="none")
                    loss = (loss.mean(dim=[1, 2, 3]) * weight).mean()

                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(controlnet.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                global_step += 1
                accelerator.print(global_step, repr(loss.item()))
            if global_step >= args.max_train_steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()

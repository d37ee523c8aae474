"""Unconditional diffusion with diffusers and Accelerate.

accelerate launch unconditional.py --prediction_type v_prediction --use_ema --gradient_accumulation_steps 2
"""

import argparse
import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, compute_snr
from images import shapes


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120, help="updates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--lr_scheduler", default="cosine")
    parser.add_argument("--lr_warmup_steps", type=int, default=10)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--prediction_type", choices=["epsilon", "sample", "v_prediction"], default="epsilon")
    parser.add_argument("--beta_schedule", default="linear")
    parser.add_argument("--rescale_betas_zero_snr", action="store_true")
    parser.add_argument("--num_train_timesteps", type=int, default=1000)
    parser.add_argument("--snr_gamma", type=float)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--use_ema", action="store_true")
    parser.add_argument("--ema_max_decay", type=float, default=0.999)
    parser.add_argument("--preview_steps", type=int, default=50)
    return parser.parse_args()


@torch.no_grad()
def preview(model, scheduler, count=2, steps=4):
    generator = torch.Generator().manual_seed(0)
    sampler = DDPMScheduler.from_config(scheduler.config)
    sampler.set_timesteps(steps)
    images = torch.randn(count, 3, 16, 16, generator=generator)
    for t in sampler.timesteps:
        images = sampler.step(model(images, t).sample, t, images, generator=generator).prev_sample
    return images.std().item()


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    set_seed(args.seed)

    images = torch.from_numpy(shapes(512, seed=1)[0]).permute(0, 3, 1, 2).float() / 255
    images = (images - 0.5) / 0.5
    dataloader = torch.utils.data.DataLoader(images, batch_size=args.train_batch_size, shuffle=True)

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    if args.use_ema:
        ema_model = EMAModel(model.parameters(), decay=args.ema_max_decay, use_ema_warmup=True, power=3 / 4)
    noise_scheduler = DDPMScheduler(
        num_train_timesteps=args.num_train_timesteps,
        beta_schedule=args.beta_schedule,
        prediction_type=args.prediction_type,
        rescale_betas_zero_snr=args.rescale_betas_zero_snr,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.95, 0.999), weight_decay=1e-6)
    # Accelerate steps the schedule once for each process.
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes,
        num_training_steps=args.steps * accelerator.num_processes,
    )
    model, optimizer, dataloader, lr_scheduler = accelerator.prepare(model, optimizer, dataloader, lr_scheduler)

    set_seed(args.seed, device_specific=True)  # other noise on each process
    global_step = 0
    epochs = math.ceil(args.steps * args.gradient_accumulation_steps / len(dataloader)) + 1
    for _ in range(epochs):
        model.train()
        for clean_images in dataloader:
            if global_step >= args.steps:
                break
            noise = torch.randn(clean_images.shape)
            timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(clean_images),)).long()
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            with accelerator.accumulate(model):
                output = model(noisy_images, timesteps).sample
                if args.prediction_type == "epsilon":
                    target = noise
                elif args.prediction_type == "sample":
                    target = clean_images
                else:
                    target = noise_scheduler.get_velocity(clean_images, noise, timesteps)
                if args.snr_gamma is None:
                    loss = F.mse_loss(output.float(), target.float())
                else:
                    snr = compute_snr(noise_scheduler, timesteps)
                    clipped = torch.minimum(snr, torch.full_like(snr, args.snr_gamma))
                    if args.prediction_type == "epsilon":
                        weights = clipped / snr
                    elif args.prediction_type == "sample":
                        weights = clipped
                    else:
                        weights = clipped / (snr + 1)
                    loss = F.mse_loss(output.float(), target.float(), reduction="none")
                    loss = (loss.mean(dim=[1, 2, 3]) * weights).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if args.use_ema:
                    ema_model.step(model.parameters())
                global_step += 1
                if global_step % args.preview_steps == 0 and accelerator.is_main_process:
                    unet = accelerator.unwrap_model(model)
                    unet.eval()
                    if args.use_ema:
                        ema_model.store(unet.parameters())
                        ema_model.copy_to(unet.parameters())
                    print("preview", repr(preview(unet, noise_scheduler)))
                    if args.use_ema:
                        ema_model.restore(unet.parameters())
                    unet.train()
            print(f"{accelerator.process_index}: {global_step} {loss.item()!r} {lr_scheduler.get_last_lr()[0]:.3g}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

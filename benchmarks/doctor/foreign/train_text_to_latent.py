#!/usr/bin/env python
"""Train a small text-to-image latent diffusion model on captioned drawings of shapes.

Follows diffusers' `train_text_to_image.py`. The autoencoder and the text encoder are frozen; both are tiny and built here, so
that the example needs no download.

    python train_text_to_latent.py --use_ema --snr_gamma 5.0 --output_dir shapes-model
"""
import argparse
import logging
import math
import os

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from diffusers import DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, compute_snr
from PIL import Image

from captioned_shapes import CaptionedShapes, LinearAutoencoder, TinyTextEncoder, WordTokenizer

logger = get_logger(__name__, log_level="INFO")


def parse_args():
    parser = argparse.ArgumentParser(description="Simple example of a training script.")
    parser.add_argument("--output_dir", type=str, default="shapes-model")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--num_samples", type=int, default=768)
    parser.add_argument("--resolution", type=int, default=32)
    parser.add_argument("--random_flip", action="store_true")
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--max_train_steps", type=int, default=60)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--lr_scheduler", type=str, default="cosine")
    parser.add_argument("--lr_warmup_steps", type=int, default=5)
    parser.add_argument("--snr_gamma", type=float, default=None, help="Min-SNR weighting, https://arxiv.org/abs/2303.09556")
    parser.add_argument("--noise_offset", type=float, default=0.0)
    parser.add_argument("--beta_schedule", type=str, default="scaled_linear")
    parser.add_argument("--prediction_type", type=str, default="epsilon", choices=["epsilon", "v_prediction", "sample"])
    parser.add_argument("--proportion_empty_prompts", type=float, default=0.1)
    parser.add_argument("--unet_dropout", type=float, default=0.0)
    parser.add_argument("--use_ema", action="store_true")
    parser.add_argument("--ema_decay", type=float, default=0.995)
    parser.add_argument("--adam_beta1", type=float, default=0.9)
    parser.add_argument("--adam_beta2", type=float, default=0.999)
    parser.add_argument("--adam_weight_decay", type=float, default=1e-2)
    parser.add_argument("--adam_epsilon", type=float, default=1e-8)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--mixed_precision", type=str, default="no", choices=["no", "bf16"])
    parser.add_argument("--checkpointing_steps", type=int, default=40)
    parser.add_argument("--validation_steps", type=int, default=20)
    parser.add_argument("--num_inference_steps", type=int, default=5)
    parser.add_argument("--guidance_scale", type=float, default=3.0)
    return parser.parse_args()


@torch.no_grad()
def log_validation(unet, vae, text_encoder, tokenizer, noise_scheduler, args, accelerator, step):
    """Draws a few prompts with DDIM and classifier-free guidance and saves them side by side."""
    prompts = ["a red circle on white", "a blue square on black", "a green triangle on gray"]
    model = accelerator.unwrap_model(unet)
    model.eval()
    scheduler = DDIMScheduler.from_config(noise_scheduler.config, clip_sample=False)
    scheduler.set_timesteps(args.num_inference_steps)
    generator = torch.Generator().manual_seed(args.seed)
    size = args.resolution // vae.patch
    latents = torch.randn(len(prompts), 4, size, size, generator=generator).to(accelerator.device)
    embeds = text_encoder(tokenizer([""] * len(prompts) + prompts).to(accelerator.device))
    for t in scheduler.timesteps:
        with accelerator.autocast():
            pred = model(torch.cat([latents] * 2), t, embeds, return_dict=False)[0].float()
        uncond, cond = pred.chunk(2)
        latents = scheduler.step(uncond + args.guidance_scale * (cond - uncond), t, latents).prev_sample
    images = vae.decode(latents / vae.scaling_factor).clamp(-1, 1)
    images = ((images + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    Image.fromarray(np.concatenate(list(images), axis=1)).save(os.path.join(args.output_dir, f"validation-{step:04d}.png"))
    model.train()


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    set_seed(args.seed)
    os.makedirs(args.output_dir, exist_ok=True)

    # Frozen parts
    tokenizer = WordTokenizer()
    text_encoder = TinyTextEncoder(len(tokenizer), tokenizer.model_max_length, dim=32)
    vae = LinearAutoencoder(CaptionedShapes(256, args.resolution, seed=0))
    text_encoder.requires_grad_(False).eval()

    noise_scheduler = DDPMScheduler(
        num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012, beta_schedule=args.beta_schedule,
        prediction_type=args.prediction_type, clip_sample=False,
    )
    unet = UNet2DConditionModel(
        sample_size=args.resolution // vae.patch, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(32, 64), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=4,
        norm_num_groups=8, dropout=args.unet_dropout,
    )
    unet.train()

    if args.use_ema:
        ema_unet = EMAModel(
            unet.parameters(), decay=args.ema_decay, model_cls=UNet2DConditionModel, model_config=unet.config
        )

    optimizer = torch.optim.AdamW(
        unet.parameters(), lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.adam_weight_decay, eps=args.adam_epsilon,
    )

    train_dataset = CaptionedShapes(args.num_samples, args.resolution, args.seed, random_flip=args.random_flip)

    def collate_fn(examples):
        pixel_values = torch.stack([example["image"] for example in examples]).float() / 127.5 - 1.0
        input_ids = tokenizer([example["caption"] for example in examples])
        return {"pixel_values": pixel_values, "input_ids": input_ids}

    train_dataloader = torch.utils.data.DataLoader(
        train_dataset, shuffle=True, collate_fn=collate_fn, batch_size=args.train_batch_size, drop_last=True
    )
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)

    lr_scheduler = get_scheduler(
        args.lr_scheduler, optimizer=optimizer, num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(unet, optimizer, train_dataloader, lr_scheduler)
    text_encoder.to(accelerator.device)
    vae.to(accelerator.device)
    if args.use_ema:
        ema_unet.to(accelerator.device)
    null_ids = tokenizer([""]).to(accelerator.device)

    logger.info(f"***** Running training: {len(train_dataset)} examples, {num_train_epochs} epochs, "
                f"{args.max_train_steps} optimization steps *****")
    global_step = 0
    train_loss = 0.0
    for epoch in range(num_train_epochs):
        for step, batch in enumerate(train_dataloader):
            with accelerator.accumulate(unet):
                # Convert images to latent space
                latents = vae.encode(batch["pixel_values"])
                latents = latents * vae.scaling_factor
                bsz = latents.shape[0]

                # Sample noise that we'll add to the latents
                noise = torch.randn_like(latents)
                if args.noise_offset:
                    # https://www.crosslabs.org//blog/diffusion-with-offset-noise
                    noise += args.noise_offset * torch.randn(bsz, latents.shape[1], 1, 1, device=latents.device)

                # Sample a random timestep for each image
                timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,), device=latents.device)
                noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)

                # Drop captions for classifier-free guidance
                drop = torch.rand(bsz, device=latents.device) < args.proportion_empty_prompts
                input_ids = torch.where(drop[:, None], null_ids, batch["input_ids"])
                encoder_hidden_states = text_encoder(input_ids)

                if noise_scheduler.config.prediction_type == "epsilon":
                    target = noise
                elif noise_scheduler.config.prediction_type == "v_prediction":
                    target = noise_scheduler.get_velocity(latents, noise, timesteps)
                else:
                    target = latents

                model_pred = unet(noisy_latents, timesteps, encoder_hidden_states, return_dict=False)[0]

                if args.snr_gamma is None:
                    loss = F.mse_loss(model_pred.float(), target.float(), reduction="mean")
                else:
                    snr = compute_snr(noise_scheduler, timesteps)
                    mse_loss_weights = torch.stack([snr, args.snr_gamma * torch.ones_like(snr)], dim=1).min(dim=1)[0]
                    if noise_scheduler.config.prediction_type == "epsilon":
                        mse_loss_weights = mse_loss_weights / snr
                    elif noise_scheduler.config.prediction_type == "v_prediction":
                        mse_loss_weights = mse_loss_weights / (snr + 1)
                    loss = F.mse_loss(model_pred.float(), target.float(), reduction="none")
                    loss = loss.mean(dim=list(range(1, len(loss.shape)))) * mse_loss_weights
                    loss = loss.mean()

                train_loss += loss.detach().item() / args.gradient_accumulation_steps

                accelerator.backward(loss)
                if accelerator.sync_gradients and args.max_grad_norm > 0:
                    accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                if args.use_ema:
                    ema_unet.step(unet.parameters())
                global_step += 1
                logger.info(f"step {global_step} loss {train_loss:.4f} lr {lr_scheduler.get_last_lr()[0]:.2e}")
                train_loss = 0.0

                if global_step % args.checkpointing_steps == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{global_step}"))

                if global_step % args.validation_steps == 0:
                    if args.use_ema:
                        ema_unet.store(unet.parameters())
                        ema_unet.copy_to(unet.parameters())
                    log_validation(unet, vae, text_encoder, tokenizer, noise_scheduler, args, accelerator, global_step)
                    if args.use_ema:
                        ema_unet.restore(unet.parameters())

            if global_step >= args.max_train_steps:
                break

    unet = accelerator.unwrap_model(unet)
    if args.use_ema:
        ema_unet.copy_to(unet.parameters())
    unet.save_pretrained(os.path.join(args.output_dir, "unet"))
    accelerator.end_training()


if __name__ == "__main__":
    main()

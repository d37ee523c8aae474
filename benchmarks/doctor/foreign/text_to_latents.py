"""Text to image in the latents of an autoencoder, in the manner of Stable Diffusion, all networks tiny and random.

python text_to_latents.py --noise_offset 0.1 --snr_gamma 5 --use_ema
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, compute_snr
from images import shapes
from torch import nn

CAPTIONS = ("a photo of a disk", "a photo of a square", "a photo of a cross", "a photo of a ring")
WORDS = sorted({word for caption in CAPTIONS for word in caption.split()})


def tokenize(captions):
    """Word numbers from 2; 0 fills up, 1 ends."""
    rows = [[WORDS.index(word) + 2 for word in caption.split()] + [1] for caption in captions]
    return torch.tensor([(row + [0] * 8)[:8] for row in rows])


class TextEncoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(len(WORDS) + 2, width)
        self.places = nn.Parameter(torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids):
        return self.layers(self.words(input_ids) + self.places)


def load_vae(images):
    """Half the images' size, four channels; its config says how its latents become standard normal."""
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
    )
    with torch.no_grad():
        vae.quant_conv.weight[4:] = 0
        vae.quant_conv.bias[4:] = -8.0  # log variances: as narrow as those of a trained autoencoder
        latents = vae.encode(images).latent_dist.mode()
        vae.quant_conv.bias[:4] += 0.2 - latents.mean((0, 2, 3))
    vae.register_to_config(shift_factor=0.2, scaling_factor=1 / (latents - latents.mean((0, 2, 3), True)).std().item())
    return vae


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_train_steps", "--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--lr_scheduler", default="constant_with_warmup")
    parser.add_argument("--lr_warmup_steps", type=int, default=5)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--prediction_type", default="epsilon")
    parser.add_argument("--noise_offset", type=float, default=0)
    parser.add_argument("--input_perturbation", type=float, default=0)
    parser.add_argument("--snr_gamma", type=float)
    parser.add_argument("--proportion_empty_prompts", type=float, default=0.1)
    parser.add_argument("--use_ema", action="store_true")
    parser.add_argument("--validation_steps", type=int, default=40)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    set_seed(args.seed)
    pictures, labels = shapes(256, seed=1)
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1.0

    vae = load_vae(pixels[:64])
    text_encoder = TextEncoder()
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    vae.requires_grad_(False).eval()
    text_encoder.requires_grad_(False).eval()
    unet.train()
    noise_scheduler = DDPMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type=args.prediction_type
    )
    ema_unet = EMAModel(unet.parameters(), decay=0.995) if args.use_ema else None
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.learning_rate, weight_decay=1e-2)

    tokens = tokenize([CAPTIONS[label] for label in labels])
    empty = tokenize([""])
    dataset = torch.utils.data.TensorDataset(pixels, tokens)
    train_dataloader = torch.utils.data.DataLoader(dataset, shuffle=True, batch_size=args.train_batch_size)
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(unet, optimizer, train_dataloader, lr_scheduler)

    global_step, train_loss = 0, 0.0
    while global_step < args.max_train_steps:
        for pixel_values, input_ids in train_dataloader:
            with accelerator.accumulate(unet):
                latents = vae.encode(pixel_values).latent_dist.sample()
                latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor

                noise = torch.randn_like(latents)
                if args.noise_offset:
                    noise += args.noise_offset * torch.randn((latents.shape[0], latents.shape[1], 1, 1))
                if args.input_perturbation:
                    new_noise = noise + args.input_perturbation * torch.randn_like(noise)
                bsz = latents.shape[0]
                timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,)).long()
                if args.input_perturbation:
                    noisy_latents = noise_scheduler.add_noise(latents, new_noise, timesteps)
                else:
                    noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)

                drop = torch.rand(bsz) < args.proportion_empty_prompts
                input_ids = torch.where(drop[:, None], empty, input_ids)
                encoder_hidden_states = text_encoder(input_ids)

                if noise_scheduler.config.prediction_type == "epsilon":
                    target = noise
                elif noise_scheduler.config.prediction_type == "v_prediction":
                    target = noise_scheduler.get_velocity(latents, noise, timesteps)
                else:
                    raise ValueError(f"Unknown prediction type {noise_scheduler.config.prediction_type}")

                model_pred = unet(noisy_latents, timesteps, encoder_hidden_states, return_dict=False)[0]
                if args.snr_gamma is None:
                    loss = F.mse_loss(model_pred.float(), target.float(), reduction="mean")
                else:
                    snr = compute_snr(noise_scheduler, timesteps)
                    mse_loss_weights = torch.stack([snr, args.snr_gamma * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
                    if noise_scheduler.config.prediction_type == "epsilon":
                        mse_loss_weights = mse_loss_weights / snr
                    else:
                        mse_loss_weights = mse_loss_weights / (snr + 1)
                    loss = F.mse_loss(model_pred.float(), target.float(), reduction="none")
                    loss = loss.mean(dim=list(range(1, len(loss.shape)))) * mse_loss_weights
                    loss = loss.mean()

                train_loss += accelerator.gather(loss.detach()).mean().item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                if args.use_ema:
                    ema_unet.step(unet.parameters())
                global_step += 1
                accelerator.print(global_step, repr(train_loss))
                train_loss = 0.0
                if args.use_ema and global_step % args.validation_steps == 0:
                    ema_unet.store(unet.parameters())
                    ema_unet.copy_to(unet.parameters())
                    unet.eval()
                    with torch.no_grad():
                        last = torch.full((len(CAPTIONS),), noise_scheduler.config.num_train_timesteps - 1)
                        output = unet(torch.randn(len(CAPTIONS), 4, 8, 8), last, text_encoder(tokenize(CAPTIONS))).sample
                        accelerator.print("validation", repr(output.std().item()))
                    unet.train()
                    ema_unet.restore(unet.parameters())
            if global_step >= args.max_train_steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()

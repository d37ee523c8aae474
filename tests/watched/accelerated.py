"""A training loop with Accelerate and diffusers: a noise scheduler, an EMAModel, accumulation, a cosine schedule."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from plain_ddpm import pictures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--prediction_type", default="v_prediction")
    args = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    model = UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    ema = EMAModel(model.parameters(), decay=0.99, use_ema_warmup=True)
    scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type=args.prediction_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999), weight_decay=1e-2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(pictures()), batch_size=8, shuffle=True)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=args.steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    torch.manual_seed(accelerator.process_index)
    step = 0
    while step < args.steps:
        for (images,) in loader:
            with accelerator.accumulate(model):
                clean = images / 127.5 - 1
                noise = torch.randn(clean.shape)
                timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (len(clean),))
                noisy = scheduler.add_noise(clean, noise, timesteps)
                output = model(noisy, timesteps).sample
                target = noise if args.prediction_type == "epsilon" else scheduler.get_velocity(clean, noise, timesteps)
                loss = F.mse_loss(output, target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
                step += 1
                print(step, loss.item().hex(), flush=True)
                if step == args.steps:
                    return


if __name__ == "__main__":
    main()

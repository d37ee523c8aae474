"""Small UNet2DModel on drawn shapes, in the manner of the diffusers basic training notebook."""

import argparse
import os
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import Dataset
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel, compute_snr
from PIL import Image, ImageDraw


@dataclass
class TrainingConfig:
    image_size: int = 16
    num_images: int = 256
    num_classes: int = 4
    train_batch_size: int = 16
    num_updates: int = 48
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    lr_warmup_steps: int = 6
    max_grad_norm: float = 1.0
    mixed_precision: str = "no"
    num_train_timesteps: int = 1000
    beta_schedule: str = "linear"
    prediction_type: str = "epsilon"  # or v_prediction
    snr_gamma: float = 0.0  # 0 turns min-SNR off
    label_dropout: float = 0.1
    ema_decay: float = 0.95
    save_image_epochs: int = 1  # 0: no previews
    output_dir: str = ""  # nothing is written when empty
    gradient_checkpointing: int = 0
    seed: int = 0


class LabelUNet(UNet2DModel):
    """UNet2DModel which takes the last class ("no label") when it is given none."""

    def forward(self, sample, timestep, class_labels=None, return_dict=True):
        if class_labels is None:
            class_labels = torch.full((sample.shape[0],), self.config.num_class_embeds - 1, device=sample.device)
        return super().forward(sample, timestep, class_labels=class_labels, return_dict=return_dict)


def draw_images(config):
    rng = np.random.default_rng(config.seed)
    palette = [(215, 70, 50), (60, 190, 80), (70, 100, 225), (225, 200, 60)]
    images, labels = [], []
    for _ in range(config.num_images):
        k = int(rng.integers(config.num_classes))
        bg = int(rng.integers(20, 50))
        img = Image.new("RGB", (config.image_size, config.image_size), (bg, bg, bg))
        pen = ImageDraw.Draw(img)
        x, y = (int(v) for v in rng.integers(5, config.image_size - 5, 2))
        r = int(rng.integers(3, 5))
        color = tuple(int(min(255, c * rng.uniform(0.85, 1.1))) for c in palette[k % 4])
        if k == 0:
            pen.ellipse([x - r, y - r, x + r, y + r], fill=color)
        elif k == 1:
            pen.rectangle([x - r, y - r, x + r, y + r], fill=color)
        elif k == 2:
            pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=color)
        else:
            pen.line([(x - r, y), (x + r, y)], fill=color, width=2)
            pen.line([(x, y - r), (x, y + r)], fill=color, width=2)
        images.append(img)
        labels.append(k)
    return Dataset.from_dict({"image": images, "label": labels})


def preprocess(image):
    array = np.array(image.convert("RGB"), dtype=np.float32) / 255.0
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    if torch.rand(1).item() < 0.5:
        tensor = tensor.flip(-1)
    return (tensor - 0.5) / 0.5


def build_model(config):
    return LabelUNet(
        sample_size=config.image_size,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32, 32),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
        dropout=0.05,
        num_class_embeds=config.num_classes + 1,
    )


def evaluate(config, epoch, pipeline):
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator(device="cpu").manual_seed(config.seed)
    images = pipeline(batch_size=4, generator=generator, num_inference_steps=8, output_type="np").images
    print(f"epoch {epoch} preview mean {float(images.mean()):.4f}", flush=True)
    if config.output_dir:
        os.makedirs(config.output_dir, exist_ok=True)
        strip = (np.concatenate(list(images), axis=1) * 255).round().astype("uint8")
        Image.fromarray(strip).save(os.path.join(config.output_dir, f"{epoch:04d}.png"))
        pipeline.save_pretrained(config.output_dir)


def train_loop(config):
    torch.manual_seed(config.seed)
    accelerator = Accelerator(
        cpu=True, mixed_precision=config.mixed_precision, gradient_accumulation_steps=config.gradient_accumulation_steps
    )
    dataset = draw_images(config)

    def transform(examples):
        return {"images": [preprocess(im) for im in examples["image"]], "labels": examples["label"]}

    dataset.set_transform(transform)
    train_dataloader = torch.utils.data.DataLoader(dataset, batch_size=config.train_batch_size, shuffle=True, drop_last=True)

    model = build_model(config)
    if config.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    noise_scheduler = DDPMScheduler(
        num_train_timesteps=config.num_train_timesteps,
        beta_schedule=config.beta_schedule,
        prediction_type=config.prediction_type,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=1e-4)
    lr_scheduler = get_cosine_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=config.lr_warmup_steps, num_training_steps=config.num_updates
    )
    ema = EMAModel(model.parameters(), decay=config.ema_decay)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)

    global_step, epoch, losses = 0, 0, []
    while global_step < config.num_updates:
        model.train()
        for batch in train_dataloader:
            clean_images = batch["images"]
            labels = batch["labels"]
            bs = clean_images.shape[0]
            noise = torch.randn(clean_images.shape, device=clean_images.device)
            timesteps = torch.randint(
                0, noise_scheduler.config.num_train_timesteps, (bs,), device=clean_images.device, dtype=torch.int64
            )
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            dropped = torch.rand(bs, device=labels.device) < config.label_dropout
            labels = labels.masked_fill(dropped, config.num_classes)

            with accelerator.accumulate(model):
                model_output = model(noisy_images, timesteps, class_labels=labels, return_dict=False)[0]
                if noise_scheduler.config.prediction_type == "v_prediction":
                    target = noise_scheduler.get_velocity(clean_images, noise, timesteps)
                else:
                    target = noise
                if config.snr_gamma > 0:
                    snr = compute_snr(noise_scheduler, timesteps)
                    weights = snr.clamp(max=config.snr_gamma)
                    weights = weights / (snr + 1 if config.prediction_type == "v_prediction" else snr)
                    loss = F.mse_loss(model_output.float(), target.float(), reduction="none")
                    loss = (loss.mean(dim=(1, 2, 3)) * weights).mean()
                else:
                    loss = F.mse_loss(model_output.float(), target.float())
                accelerator.backward(loss)
                losses.append(loss.detach().item())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                ema.step(model.parameters())
                print(f"step {global_step} loss {sum(losses) / len(losses)!r}", flush=True)
                losses = []
                global_step += 1
                if global_step >= config.num_updates:
                    break

        epoch += 1
        if config.save_image_epochs and accelerator.is_main_process and epoch % config.save_image_epochs == 0:
            unet = accelerator.unwrap_model(model)
            unet.eval()
            ema.store(unet.parameters())
            ema.copy_to(unet.parameters())
            preview_scheduler = DDPMScheduler.from_config(noise_scheduler.config)
            evaluate(config, epoch, DDPMPipeline(unet=unet, scheduler=preview_scheduler))
            ema.restore(unet.parameters())
    accelerator.end_training()


def parse_config():
    parser = argparse.ArgumentParser()
    for f in fields(TrainingConfig):
        parser.add_argument(f"--{f.name}", type=f.type, default=f.default)
    return TrainingConfig(**vars(parser.parse_args()))


if __name__ == "__main__":
    train_loop(parse_config())

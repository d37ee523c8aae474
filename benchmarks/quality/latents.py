"""Latents against pixels, on the digits: an autoencoder is trained, and then DDPM on its latents and on the images.

    python benchmarks/quality/latents.py --output_dir runs/latents

It trains a small AutoencoderKL on the built-in digits (16x16 -> 2x8x8) by a squared error and a small weight of the KL
divergence, and prints how far its reconstructions are from digits that it did not see. Then it trains train_ddpm.py by class
on the latents (--vae, --latent_scale auto), and on the images for as many updates as fit into the same time, with all other
flags alike. evaluate.py measures both, and `digits.py classes` asks an SVM for the class of each sample. Beside them it
measures what the autoencoder makes of the real digits: samples of latents cannot be expected to be better. What is already
there is not trained again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image

from benchmarks.shared.real_script import ROOT, train_once
from utils.data.dataset import load_images
from utils.diffusion.sampling import to_uint8
from utils.options.flags import DataOptions
from utils.runs.record import RunRecord

DIGITS = {"dataset_name": "digits", "resolution": 16, "image_channels": 1}
HELD_OUT = 200  # digits
TIMED = 60  # updates
BATCH = 64
KL_WEIGHT = 1e-3  # beside a squared error per pixel; the latents keep a spread that is far below that of their means


def digits() -> torch.Tensor:
    """float32 [1797, 1, 16, 16] in [-1, 1], in an order of its own."""
    images = load_images(DataOptions(**DIGITS))
    order = np.random.default_rng(0).permutation(len(images))
    return torch.from_numpy(images.fetch(order)).float() / 127.5 - 1


def train_autoencoder(images: torch.Tensor, updates: int) -> AutoencoderKL:
    torch.manual_seed(0)
    autoencoder = AutoencoderKL(
        in_channels=1,
        out_channels=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=2,
    )
    optimizer = torch.optim.AdamW(autoencoder.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, updates)
    for update in range(updates):
        batch = images[torch.randint(len(images), (BATCH,))]
        encoded = autoencoder.encode(batch).latent_dist
        error = (autoencoder.decode(encoded.sample()).sample - batch).square().mean()
        loss = error + KL_WEIGHT * encoded.kl().mean() / batch[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (update + 1) % 100 == 0:
            print(f"autoencoder: update {update + 1} of {updates}, squared error {error.item():.4f}", flush=True)
    return autoencoder.eval()


@torch.no_grad()
def reconstructed(autoencoder: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    return torch.cat([autoencoder.decode(autoencoder.encode(part).latent_dist.mean).sample for part in images.split(BATCH)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--autoencoder_updates", type=int, default=1500, help=f"of {BATCH} images")
    parser.add_argument("--updates", type=int, default=1200, help="of 32 images")
    parser.add_argument("--num_images", type=int, default=1000)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--cpu_threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.cpu_threads)

    images, folder = digits(), args.output_dir / "autoencoder"
    if not (folder / "config.json").exists():
        train_autoencoder(images[HELD_OUT:], args.autoencoder_updates).save_pretrained(folder)
    autoencoder = AutoencoderKL.from_pretrained(folder)
    made, real = reconstructed(autoencoder, images), images
    error, variance = (made - real)[:HELD_OUT].square().mean(), (real[:HELD_OUT] - real.mean(0)).square().mean()
    print(f"autoencoder: squared error {error:.4f} on {HELD_OUT} unseen digits, whose variance is {variance:.4f}")
    shown = args.output_dir / "reconstructed"
    shown.mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(to_uint8(made[: args.num_images]).numpy()):
        Image.fromarray(pixels[0]).save(shown / f"{number:06d}.png")

    flags = ["--class_conditional", "--train_batch_size", 32, "--cpu_threads", args.cpu_threads]
    flags += ["--save_images_steps", 10**6, "--save_model_steps", 10**6, "--checkpointing_steps", 10**6]
    runs = {"latents": ["--vae", folder, "--latent_scale", "auto"], "pixels": []}

    def trained(name: str, run: str, updates: int, logged: int) -> float:
        """Images per second of the updates alone."""
        more = ["--max_train_steps", updates, "--logging_steps", logged]
        record: RunRecord = train_once("train_ddpm.py", [*flags, *runs[name], *more], args.output_dir / run)
        speeds = record.series("perf/images_per_second")[1]
        return len(speeds) / sum(1 / speed for speed in speeds)

    timed = {name: trained(name, f"{name}-timed", TIMED, TIMED // 3) for name in runs}
    for name in runs:
        updates = round(args.updates * timed[name] / timed["latents"])
        speed = trained(name, name, updates, 36)
        print(f"{name}: {updates} updates in {updates * 32 / speed:.0f} s", flush=True)
    command = [sys.executable, ROOT / "evaluate.py", "--pipeline", *(args.output_dir / name for name in runs)]
    command += ["--images", shown, "--dataset_name", "digits", "--resolution", 16, "--image_channels", 1]
    command += ["--num_images", args.num_images, "--sampler", "ddpm", "--num_inference_steps", 50, "--json"]
    command += ["--output_dir", args.output_dir / "evaluation", "--cpu_threads", args.cpu_threads, "--no_classes"]
    result = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    for found in json.loads(result.stdout)["results"]:
        figures = found["figures"]
        name, floor = Path(found["name"]).name, figures["floor"]["fd"]
        print(f"{name}: fd {figures['fd']:.4g}, kd {figures['kd']:.4g} (real/real fd {floor:.4g})", flush=True)
    for name in runs:
        asked = [ROOT / "benchmarks/quality/digits.py", "classes", args.output_dir / name, "--guidance", 1, 2]
        print(name, flush=True)
        subprocess.run(list(map(str, [sys.executable, *asked, "--num_images", args.num_images])), check=True)


if __name__ == "__main__":
    main()

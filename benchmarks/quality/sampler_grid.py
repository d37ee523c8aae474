"""Samples of every sampler, from a network for each prediction type and noise schedule.

    python benchmarks/quality/sampler_grid.py --output_dir runs/sampler_grid

trains 12 small networks on the digits at 8x8, and writes output_dir/grid.png, a row for each network and a block of columns for
each sampler, all from the same noise; and output_dir/table.md, of each block the share of saturated pixels and the standard
deviation of all pixels. The last block is diffusers' own DPM-Solver++, which does not clip. Two minutes of one CPU core.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from diffusers import DPMSolverMultistepScheduler, UNet2DModel
from PIL import Image, ImageDraw

from benchmarks.shared.real_script import small_network
from utils.core import randomness
from utils.core.images import BACKGROUND, save_png, to_pil
from utils.data.dataset import load_images
from utils.diagnostics.probe import sample_statistics
from utils.diffusion.ddpm import (
    BETA_SCHEDULES,
    PREDICTION_TYPES,
    config_for_any,
    loss_per_sample,
    loss_weights,
    make_noise_scheduler,
    training_target,
)
from utils.diffusion.sampling import SamplePlan, make_sampler, sample, to_uint8
from utils.options.flags import DataOptions

SAMPLERS = {"ddim": 50, "ddpm": 50, "dpmsolver++": 20}  # name -> steps
UNCLIPPED = "dpmsolver++ of diffusers"
SHOWN, SCALE, GAP, MARGIN = 4, 4, 12, 190  # images of a block; enlargement; pixels between blocks, and for names
BATCH, SIDE = 64, 8


def train(images: torch.Tensor, noise_scheduler, updates: int) -> torch.nn.Module:
    """A network in eval mode, trained by Adam with a learning rate that falls to 0."""
    torch.manual_seed(0)
    unet = UNet2DModel.from_config(small_network(SIDE, 1, widths=(24, 48), groups=8))
    optimizer = torch.optim.Adam(unet.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 2 * (1 - step / updates), 1))
    weights = loss_weights(noise_scheduler)
    for step in range(updates):
        numbers = torch.arange(step * BATCH, (step + 1) * BATCH)
        clean = images[randomness.integers(0, "images", numbers, len(images))]
        noise = randomness.normal(0, "noise", numbers, tuple(clean.shape[1:]))
        timesteps = randomness.integers(0, "timesteps", numbers, noise_scheduler.config.num_train_timesteps)
        prediction = unet(noise_scheduler.add_noise(clean, noise, timesteps), timesteps).sample
        target = training_target(noise_scheduler, clean, noise, timesteps)
        optimizer.zero_grad()
        loss_per_sample(prediction, target, weights[timesteps]).mean().backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return unet.eval()


def samplers(noise_scheduler) -> dict:
    """Name -> (sampler, its steps)."""
    made = {name: (make_sampler(name, noise_scheduler), steps) for name, steps in SAMPLERS.items()}
    config = config_for_any(noise_scheduler.config) | {"timestep_spacing": "linspace"}
    return made | {UNCLIPPED: (DPMSolverMultistepScheduler.from_config(config), SAMPLERS["dpmsolver++"])}


def draw_grid(rows: dict[str, list[torch.Tensor]], columns: list[str]) -> Image.Image:
    """`rows` holds for each name its blocks, uint8 [SHOWN, 1, SIDE, SIDE] each, in the order of `columns`."""
    tile, width = SIDE * SCALE + 2, SHOWN * (SIDE * SCALE + 2) + GAP
    page = Image.new("L", (MARGIN + width * len(columns), 20 + len(rows) * (tile + 4)), BACKGROUND)
    pen = ImageDraw.Draw(page)
    for column, name in enumerate(columns):
        pen.text((MARGIN + column * width, 4), name, fill=0)
    for row, (name, blocks) in enumerate(rows.items()):
        top = 20 + row * (tile + 4)
        pen.text((4, top + tile // 2 - 6), name, fill=0)
        for column, block in enumerate(blocks):
            for place, image in enumerate(block):
                enlarged = to_pil(image).resize((SIDE * SCALE,) * 2, Image.Resampling.NEAREST)
                page.paste(enlarged, (MARGIN + column * width + place * tile, top))
    return page


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/sampler_grid"))
    parser.add_argument("--updates", type=int, default=300, help="of each network (300)")
    parser.add_argument("--images", type=int, default=32, help="of each block, for the table (32)")
    parser.add_argument("--schedules", nargs="+", choices=BETA_SCHEDULES, default=list(BETA_SCHEDULES))
    parser.add_argument("--prediction_types", nargs="+", choices=PREDICTION_TYPES, default=list(PREDICTION_TYPES))
    parser.add_argument("--cache_dir")
    parser.add_argument("--cpu_threads", type=int, default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.cpu_threads)
    digits = load_images(DataOptions(dataset_name="digits", resolution=SIDE, image_channels=1, cache_dir=args.cache_dir))
    images = torch.from_numpy(digits.fetch(torch.arange(len(digits)).numpy())) / 127.5 - 1
    real = sample_statistics(images)
    columns = [*SAMPLERS, UNCLIPPED]
    rows = {"real digits": [to_uint8(images[:SHOWN])] * len(columns)}
    figures = [f"| real digits | {' | '.join([_cell(real)] * len(columns))} |"]
    header = [f"| saturated, standard deviation | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    start = time.perf_counter()
    for prediction_type in args.prediction_types:
        for beta_schedule in args.schedules:
            noise_scheduler = make_noise_scheduler(beta_schedule=beta_schedule, prediction_type=prediction_type)
            unet, name = train(images, noise_scheduler, args.updates), f"{prediction_type}, {beta_schedule}"
            blocks = [
                sample(unet, SamplePlan(scheduler, steps, (1, SIDE, SIDE), 0, args.images, "cpu"), torch.arange(args.images))
                for scheduler, steps in samplers(noise_scheduler).values()
            ]
            rows[name] = [to_uint8(block[:SHOWN]) for block in blocks]
            figures.append(f"| {name} | {' | '.join(_cell(sample_statistics(block)) for block in blocks)} |")
            print(f"{figures[-1]} {time.perf_counter() - start:.0f} s", flush=True)
            save_png(draw_grid(rows, columns), args.output_dir / "grid.png")
            (args.output_dir / "table.md").write_text("\n".join([*header, *figures]) + "\n")
    print(f"{args.output_dir / 'grid.png'}, {args.output_dir / 'table.md'}")


def _cell(statistics: dict) -> str:
    return f"{100 * statistics['saturated']:.1f} %, {statistics['std']:.3f}"


if __name__ == "__main__":
    main()

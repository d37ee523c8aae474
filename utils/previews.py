"""What a run shows of itself while it trains: sample grids of raw and EMA weights, and the way from noise to image."""

import math
from contextlib import nullcontext
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from utils.doctor import Doctor
from utils.ema import EMA
from utils.images import denoising_path, save_png, side_by_side
from utils.launch import on_main_process
from utils.probe import sample_statistics
from utils.sampling import full_precision, make_sampler, path_steps, sample_sharded, set_timesteps, to_uint8
from utils.tracking import Trackers

PATH_TIMESTEPS = (999, 750, 500, 250, 100, 50, 0)
PATH_IMAGES = 4
PROCESS = (
    "prediction_type",
    "beta_schedule",
    "num_train_timesteps",
    "rescale_betas_zero_snr",
)  # what training and sampling share


def sampling_steps(sampler: str, requested: int | None, noise_scheduler) -> int:
    """Steps to sample with: `requested`, else 50, which DDIM needs for good images, or all of them for the full DDPM chain.

    Raises UserError, before any training, for a number that `sampler` cannot do on this schedule.
    """
    num_train_timesteps = noise_scheduler.config.num_train_timesteps
    steps = requested or (num_train_timesteps if sampler == "ddpm" else min(50, num_train_timesteps))
    set_timesteps(make_sampler(sampler, noise_scheduler), steps)
    return steps


def save_previews(
    accelerator: Accelerator,
    unet: nn.Module,
    ema: EMA | None,
    noise_scheduler,
    output_dir: Path,
    trackers: Trackers,
    doctor: Doctor,
    step: int,
    *,
    sampler: str,
    num_inference_steps: int,
    num_images: int,
    seed: int,
    shape: tuple[int, int, int],
    should_stop,
) -> Path | None:
    """Writes samples/<step>.png (raw | EMA from the same noise) and samples/<step>-path.png, and logs both.

    `unet` is the unwrapped network; its weights and the training's random numbers are left as they were. Every process must
    call it and takes its share of the `num_images` images. Returns the grid's path, or None when told to stop halfway.
    Raises UserError when the disk does not take them.
    """
    scheduler = make_sampler(sampler, noise_scheduler)
    timesteps = [t for t in PATH_TIMESTEPS if t < noise_scheduler.config.num_train_timesteps]
    grids = []
    for weights in (nullcontext(), ema.swapped_into_model() if ema is not None else None):
        if weights is None:
            continue
        with weights, full_precision(unet):
            result = sample_sharded(
                accelerator,
                unet,
                scheduler,
                num_images=num_images,
                num_inference_steps=num_inference_steps,
                seed=seed,
                shape=shape,
                batch_size=math.ceil(num_images / accelerator.num_processes),
                should_stop=should_stop,
                record_timesteps=timesteps,
            )
        if result is None:
            return None
        grids.append(result)
    grid_path = output_dir / "samples" / f"{step:07d}.png"
    path_png = grid_path.with_name(f"{step:07d}-path.png")

    def write() -> None:
        left, right = to_uint8(grids[0][0]), to_uint8(grids[-1][0])
        shown = [t for _, t in path_steps(scheduler, timesteps)]  # where the chain really passed: DDIM-50 starts at 980
        captions = ("raw weights", "EMA weights" if ema is not None else "raw weights")
        save_png(side_by_side(left, right, captions), grid_path)
        save_png(denoising_path(to_uint8(grids[-1][1][:PATH_IMAGES]), shown), path_png)
        trackers.log_image("samples/raw_and_ema", grid_path, step)
        trackers.log_image("samples/denoising_path", path_png, step)
        statistics = {"raw": sample_statistics(grids[0][0]), "ema": sample_statistics(grids[-1][0])}
        configs = {"sampler": dict(scheduler.config), "trained": dict(noise_scheduler.config)}
        kept = {name: {key: config[key] for key in PROCESS if key in config} for name, config in configs.items()}
        doctor.record(step, {"samples": statistics | kept})

    on_main_process(accelerator, write)
    return grid_path

"""What a run shows of itself while it trains: sample grids of raw and EMA weights, and the way from noise to image."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from utils.data import ImageSet
from utils.doctor import Doctor
from utils.ema import EMA
from utils.images import denoising_path, save_png, side_by_side
from utils.launch import if_memory_allows, on_main_process
from utils.probe import examine_network, sample_statistics
from utils.sampling import full_precision, make_sampler, path_steps, sample_sharded, to_uint8
from utils.tracking import Trackers
from utils.training_samples import TrainingSamples

PATH_TIMESTEPS = (999, 750, 500, 250, 100, 50, 0)
PATH_IMAGES = 4
PROCESS = (
    "prediction_type",
    "beta_schedule",
    "num_train_timesteps",
    "rescale_betas_zero_snr",
)  # what training and sampling share


class Previews:
    """Makes the pictures of a run, and examines its network.

    What is particular to DDPM stands in the methods that `edm_previews.EDM2Previews` replaces.

    Args:
        unet: the unwrapped network; its weights and the training's random numbers are left as they were.
        sampler, num_inference_steps: how to sample; see `sampling.sampling_steps`.
        num_images: in a grid, shared out over the processes.
        should_stop: asked during sampling; a stop then leaves the pictures out.

    Attributes:
        newest: path of the newest grid, None before the first.
        newest_step: the updates it was made after.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        unet: nn.Module,
        ema: EMA | None,
        noise_scheduler,
        output_dir: Path,
        *,
        samples: TrainingSamples,
        held_out: ImageSet,
        trackers: Trackers,
        doctor: Doctor,
        sampler: str,
        num_inference_steps: int,
        num_images: int,
        should_stop: Callable[[], bool],
    ):
        self._accelerator, self._unet, self._ema, self._noise_scheduler = accelerator, unet, ema, noise_scheduler
        self._folder, self._samples, self._held_out = output_dir / "samples", samples, held_out
        self._trackers, self._doctor, self._should_stop = trackers, doctor, should_stop
        self._scheduler = make_sampler(sampler, noise_scheduler)
        self._timesteps = self._path_timesteps()
        self._num_inference_steps, self._num_images = num_inference_steps, num_images
        self.newest: Path | None = None
        self.newest_step: int | None = None

    def make(self, step: int) -> None:
        """Writes samples/<step>.png (raw | EMA from the same noise) and samples/<step>-path.png, and logs both.

        Records what they are like. Every process must call it. Raises UserError when the disk does not take the pictures or
        memory runs out.
        """
        averaged = self._ema.swapped_into_model if self._ema is not None else None
        results = [self._sample(weights) for weights in (nullcontext, averaged) if weights is not None]
        if None not in results:  # else told to stop
            path = self._folder / f"{step:07d}.png"
            on_main_process(self._accelerator, self._write, path, step, raw=results[0], ema=results[-1])
            self.newest, self.newest_step = path, step

    def examine(self, step: int) -> None:
        """Records what the network is like. Every process must call it. Raises UserError when memory runs out."""
        advice = "set a smaller --train_batch_size, by which the images are shared out"
        with if_memory_allows(self._accelerator, "examining the network", advice):
            if self._accelerator.is_main_process:
                with full_precision(self._unet):
                    found = self._examine()
                self._doctor.record(step, {"probe": found})

    predict = None  # what the sampler asks in place of the network, see `sampling.sample`

    def _path_timesteps(self) -> list[float]:
        """Where to look at the way from noise to image."""
        return [t for t in PATH_TIMESTEPS if t < self._noise_scheduler.config.num_train_timesteps]

    def _caption(self, timestep: float) -> str:
        return f"t={timestep}"

    def _examine(self) -> dict:
        return examine_network(self._unet, self._noise_scheduler, self._samples, self._held_out)

    def _sample(self, weights: Callable):
        """(images, denoising paths) of the main process, from the same noise every time; None when told to stop halfway."""
        with weights(), full_precision(self._unet):
            return sample_sharded(
                self._accelerator,
                self._unet,
                self._scheduler,
                num_images=self._num_images,
                num_inference_steps=self._num_inference_steps,
                seed=self._samples.seed,
                shape=self._samples.images.shape,
                batch_size=math.ceil(self._num_images / self._accelerator.num_processes),
                should_stop=self._should_stop,
                record_timesteps=self._timesteps,
                predict=self.predict,
            )

    def _write(self, path: Path, step: int, *, raw, ema) -> None:
        path_png = path.with_name(f"{step:07d}-path.png")
        # Where the chain really passed: DDIM-50 starts at 980.
        shown = [self._caption(timestep) for _, timestep in path_steps(self._scheduler, self._timesteps)]
        captions = ("raw weights", "EMA weights" if self._ema is not None else "raw weights")
        save_png(side_by_side(to_uint8(raw[0]), to_uint8(ema[0]), captions), path)
        save_png(denoising_path(to_uint8(ema[1][:PATH_IMAGES]), shown), path_png)
        self._trackers.log_image("samples/raw_and_ema", path, step)
        self._trackers.log_image("samples/denoising_path", path_png, step)
        statistics = {"raw": sample_statistics(raw[0]), "ema": sample_statistics(ema[0])}
        configs = {"sampler": dict(self._scheduler.config), "trained": dict(self._noise_scheduler.config)}
        kept = {name: {key: config[key] for key in PROCESS if key in config} for name, config in configs.items()}
        self._doctor.record(step, {"samples": statistics | kept})

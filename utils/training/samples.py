"""What a run shows of itself while it trains: sample grids, the way from noise to image, and the pipeline with its card."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from utils.core.distributed import from_all, on_main_process, together
from utils.core.images import denoising_path, save_png, side_by_side
from utils.diagnostics.probe import sample_statistics
from utils.diffusion import export
from utils.diffusion.model_card import facts_of_run, model_card
from utils.diffusion.sampling import (
    SamplePlan,
    full_precision,
    make_sampler,
    path_steps,
    sample,
    sampling_steps,
    to_uint8,
)
from utils.evaluation.feature_sets import sharded
from utils.training.run import Run

ImagesAndPaths = tuple[torch.Tensor, torch.Tensor]  # [B, C, H, W] and [B, T, C, H, W]

PATH_IMAGES = 4
ADVICE = "set a smaller --eval_batch_size"


def plan_of(run: Run, batch_size: int) -> SamplePlan:
    """How the run samples, so many images at once in each process."""
    options, scheduler, data = run.options, run.objective.noise_scheduler, run.data
    steps = sampling_steps(options.sampler, options.sampling_steps, scheduler)
    sampler, device = make_sampler(options.sampler, scheduler), run.accelerator.device
    return SamplePlan(sampler, steps, data.samples.shape, options.seed, batch_size, device, data.autoencoder)


class SampleGrids:
    """Makes the pictures of a run, and examines its network. The training's weights and random numbers are left as they were.

    Attributes:
        newest: path of the newest grid, None before the first.
        newest_step: the updates it was made after.
        stopped: whether the last one was left out because the run was told to stop, on every process alike.
    """

    def __init__(self, run: Run):
        self._run = run
        self._plan = plan_of(run, math.ceil(run.options.eval_batch_size / run.accelerator.num_processes))
        self.newest: Path | None = None
        self.newest_step: int | None = None
        self.stopped = False

    def make(self) -> None:
        """Writes and logs samples/<step>.png (raw | EMA from the same noise) and <step>-path.png, and records what they are
        like. Every process must call it."""
        run, step = self._run, self._run.state.step
        kinds = [nullcontext, run.averaged] if run.ema is not None else [nullcontext]
        steps = len(kinds) * self._plan.denoising_steps(self._plan.batch_size)  # no process has more than one batch
        with run.progress.part("sampling", steps, "denoising steps", afterwards="writing the samples") as bar:

            def should_stop() -> bool:  # asked before every step
                bar.update()
                return run.stopping()

            with self._plan.decoding(run.accelerator):
                results = [self._sample(weights, should_stop) for weights in kinds]
        self.stopped = None in results
        if not self.stopped:
            path = run.output_dir / "samples" / f"{step:07d}.png"
            on_main_process(run.accelerator, "writing the samples", self._write, path, step, raw=results[0], ema=results[-1])
            self.newest, self.newest_step = path, step

    def probe(self) -> None:
        """Records what the network is like. Every process must call it."""
        run = self._run
        advice = "set a smaller --train_batch_size, by which the images are shared out"
        with together(run.accelerator, "examining the network", advice, alike=False):
            if run.accelerator.is_main_process:
                with full_precision(run.objective.exported), run.progress.part("examining the network"):
                    found = run.objective.probe(run.data)
                run.doctor.record(run.state.step, {"probe": found})

    def _sample(self, weights: Callable[[], AbstractContextManager], should_stop: Callable[[], bool]) -> ImagesAndPaths | None:
        """(images, denoising paths) on every process, from the same noise every time; None when any was told to stop."""
        accelerator, plan, objective = self._run.accelerator, self._plan, self._run.objective
        network, count, timesteps = objective.exported, self._run.options.eval_batch_size, objective.path()
        stopped = torch.zeros(1, device=accelerator.device)

        def make(numbers: torch.Tensor) -> list[torch.Tensor]:
            made = sample(
                network, plan, numbers, should_stop=should_stop, record_timesteps=timesteps, predict=objective.predict
            )
            if made is None:  # the other processes wait for as many images, whatever they show
                stopped.fill_(1)
                images = torch.zeros(len(numbers), *plan.image_shape, device=accelerator.device)
                return [images, torch.stack([images] * len(timesteps), dim=1)]
            return list(made)

        with weights(), full_precision(network):
            chunks = [made for _, made in sharded(accelerator, count, plan.batch_size, make, "making samples", ADVICE)]
        if any(from_all(accelerator, stopped)):
            return None
        images, paths = map(torch.cat, zip(*chunks))
        return images, paths

    def _write(self, path: Path, step: int, *, raw: ImagesAndPaths, ema: ImagesAndPaths) -> None:
        run, objective = self._run, self._run.objective
        path_png = path.with_name(f"{step:07d}-path.png")
        # Where the chain really passed: DDIM-50 starts at 980.
        shown = [objective.caption(timestep) for _, timestep in path_steps(self._plan.scheduler, objective.path())]
        captions = ("raw weights", "EMA weights" if run.ema is not None else "raw weights")
        save_png(side_by_side(to_uint8(raw[0]), to_uint8(ema[0]), captions), path)
        save_png(denoising_path(to_uint8(ema[1][:PATH_IMAGES]), shown), path_png)
        run.trackers.log_image("samples/raw_and_ema", path, step)
        run.trackers.log_image("samples/denoising_path", path_png, step)
        real = run.data.samples.first_pictures(run.options.eval_batch_size)
        statistics = {"raw": sample_statistics(raw[0]), "ema": sample_statistics(ema[0]), "data": sample_statistics(real)}
        run.doctor.record(step, {"samples": statistics})


class Export:
    """At the top of the run's folder. Call the methods on every process; UserError where the disk does not take it."""

    def __init__(self, run: Run, grids: SampleGrids):
        self._run, self._grids = run, grids

    def make(self) -> None:
        run = self._run
        network, scheduler = run.objective.exported, run.objective.noise_scheduler
        arguments = network, scheduler, run.output_dir, self._card()
        carried = {"class_names": run.data.images.class_names, "autoencoder": run.data.autoencoder}
        with run.averaged():
            on_main_process(run.accelerator, "exporting the pipeline", export.export_pipeline, *arguments, **carried)

    def write_card(self) -> None:
        """Again, with the newest picture."""
        run = self._run
        on_main_process(run.accelerator, "writing the model card", export.write_card, run.output_dir, self._card())

    def _card(self) -> str:
        run, options, newest = self._run, self._run.options, self._grids.newest
        facts = {
            "title": run.output_dir.resolve().name,
            "updates": run.state.step,
            "samples_seen": run.state.step * run.length.global_batch_size,
            "ema_decay": run.ema_decay(run.state.step) if run.ema else None,
            "ema_width": options.ema_widths[0] if run.ema and options.ema_type == "power" else None,
            "metrics": run.state.metrics,
            "pipeline": options.hub_model_id or run.output_dir.resolve().name,
            "grid": newest and newest.relative_to(run.output_dir),
        }
        shared = facts_of_run(options, run.facts, run.objective.noise_scheduler, run.data.images.class_names)
        return model_card(shared | facts | run.objective.card())

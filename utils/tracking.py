"""What a run reports: figures accumulated on the device, trackers, and the one progress bar."""

import resource
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm

QUARTILES = 4


class StepStatistics:
    """Sums on the device between two reports, so that the training path never waits for the host.

    Loss figures are means over samples, over micro steps, updates and (in `report`) processes; samples whose loss is not
    finite are left out and show in `skipped_updates`. The quartiles are of the timestep: 1 is the least noise.
    """

    def __init__(self, device: torch.device, num_train_timesteps: int, skipped_updates: int = 0):
        self._num_timesteps = num_train_timesteps
        self._loss_sum = torch.zeros(QUARTILES, device=device)
        self._loss_count = torch.zeros(QUARTILES, device=device)
        self._norm_sum = torch.zeros((), device=device)
        self._updates = torch.zeros((), device=device)
        self._skipped = torch.full((), float(skipped_updates), device=device)  # since the run began
        self._bad_in_a_row = torch.zeros((), device=device)
        self._worst_in_a_row = torch.zeros((), device=device)

    @torch.no_grad()
    def add_losses(self, losses: torch.Tensor, timesteps: torch.Tensor) -> None:
        """Adds one micro batch: `losses` and `timesteps` are [B]."""
        finite = torch.isfinite(losses)
        quartiles = timesteps * QUARTILES // self._num_timesteps
        self._loss_sum.index_add_(0, quartiles, losses.detach().float().where(finite, 0.0))
        self._loss_count.index_add_(0, quartiles, finite.float())

    @torch.no_grad()
    def add_update(self, grad_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """Adds one update: norm of the gradient before clipping, and whether it was finite (0-dim tensors)."""
        self._norm_sum += grad_norm.where(finite, 0.0)
        self._updates += finite
        self._skipped += ~finite
        self._bad_in_a_row = (self._bad_in_a_row + 1) * ~finite
        self._worst_in_a_row = torch.maximum(self._worst_in_a_row, self._bad_in_a_row)

    @property
    def skipped_updates(self) -> int:
        """Updates turned down since the run began. The host waits for the device."""
        return int(self._skipped.item())

    def report(self, accelerator: Accelerator) -> dict[str, float]:
        """Means since the last report, over all processes; empties the sums. The host waits for the device here only."""
        losses = accelerator.reduce(torch.cat([self._loss_sum, self._loss_count]), "sum")
        updates = torch.stack([self._norm_sum, self._updates, self._skipped, self._worst_in_a_row])
        values = torch.cat([losses, updates]).tolist()
        sums, counts = values[:QUARTILES], values[QUARTILES : 2 * QUARTILES]
        norm_sum, updates, skipped, worst_in_a_row = values[2 * QUARTILES :]
        report = {"train/loss": sum(sums) / max(sum(counts), 1.0)}
        for i, (loss_sum, count) in enumerate(zip(sums, counts)):
            if count:
                report[f"train/loss_timestep_quartile_{i + 1}"] = loss_sum / count
        if updates:
            report["train/grad_norm"] = norm_sum / updates
        report |= {"train/skipped_updates": skipped, "train/bad_updates_in_a_row": worst_in_a_row}
        for tensor in (self._loss_sum, self._loss_count, self._norm_sum, self._updates):
            tensor.zero_()
        self._worst_in_a_row = self._bad_in_a_row.clone()
        return report


class Stopwatch:
    """Wall time since the last report that went into training, and the part of it that the loop waited for data."""

    def __init__(self, step: int):
        self._restart(step)

    def _restart(self, step: int) -> None:
        self._step, self._start, self._waited = step, time.perf_counter(), 0.0

    @contextmanager
    def waiting_for_data(self):
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def paused(self):
        """Leaves out what happens inside: validation, sampling, checkpoints."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def report(self, step: int, global_batch_size: int) -> dict[str, float]:
        """Images per second and the share of time spent waiting for data, since the last report."""
        elapsed_seconds = max(time.perf_counter() - self._start, 1e-9)
        samples = (step - self._step) * global_batch_size
        report = {"perf/images_per_second": samples / elapsed_seconds, "perf/data_wait": self._waited / elapsed_seconds}
        self._restart(step)
        return report


def peak_memory_gib(device: torch.device) -> float:
    """Most memory that this process ever held on its device, in GiB; on a CPU its resident memory."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    return torch.accelerator.max_memory_allocated(device) / 2**30


def init_trackers(accelerator: Accelerator, run_name: str, logger: str, first_step: int) -> None:
    """Starts the tracker. TensorBoard hides what a killed run had logged after `first_step`: one value per tag and step."""
    purge = {"tensorboard": {"purge_step": first_step + 1}} if logger == "tensorboard" else {}
    accelerator.init_trackers(run_name, init_kwargs=purge)


def log_image(accelerator: Accelerator, tag: str, path: Path, step: int) -> None:
    """Shows the PNG at `path` in every tracker that takes images. Main process only."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))[None]
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.log_images({tag: pixels}, step=step, dataformats="NHWC")
        elif hasattr(tracker, "log_images"):
            tracker.log_images({tag: list(pixels)}, step=step)


class PackingBar:
    """Shows how far decoding the images has come, in the process that does it; gone when done, unseen when quick."""

    def __init__(self):
        self._bar = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, unit="image", desc="packing images", delay=2, leave=False, dynamic_ncols=True)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()


class ProgressBar:
    """The only bar of a run, on the main process: updates done, speed and ETA by tqdm; loss, LR and images/s when reported."""

    def __init__(self, enabled: bool, first_step: int, total_steps: int):
        self._bar = tqdm(
            initial=first_step,
            total=total_steps,
            unit="update",
            disable=not enabled,
            dynamic_ncols=True,
            smoothing=0.05,
        )

    def update(self) -> None:
        self._bar.update()

    def show(self, report: dict[str, float]) -> None:
        self._bar.set_postfix_str(
            f"loss {report['train/loss']:.4f}, lr {report['train/lr']:.2e}, {report['perf/images_per_second']:.0f} images/s",
            refresh=False,
        )

    def say(self, message: str) -> None:
        """Prints a line above the bar, on the main process."""
        if not self._bar.disable:
            self._bar.write(message)

    def close(self) -> None:
        self._bar.close()

"""What a run writes to its disk, counted before the first update."""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from utils.core.errors import UserError
from utils.optim.optimizers import state_bytes
from utils.options.flags import RunOptions
from utils.runs.ema_snapshots import DTYPES, Snapshots
from utils.training.length import preview_steps

MIB, GIB = 2**20, 2**30
PATH_IMAGES = 28  # in a picture of the way from noise to image, at most
FRAME = 8192  # bytes of a picture beside its images: captions, borders


@dataclass(frozen=True)
class DiskPlan:
    """`network` is the bytes of its parameters and buffers in fp32. Counts what is foreseen: checkpoints, EMA snapshots, the
    pipeline and previews; no logs, which are small, and no checkpoint of a stop."""

    options: RunOptions
    network: int
    updates: int | None = None  # of the whole run; None where they depend on how many images there are
    epoch_steps: int | None = None  # updates of an epoch
    step: int = 0  # updates that are done
    checkpoints: int = 0  # that are there
    autoencoder: int = 0  # bytes of the one that the pipeline carries

    def parts(self) -> dict[str, int]:
        """What there will be -> the most bytes that it takes at once, a file being written beside the one that it replaces."""
        options = self.options
        one = self.network * (1 + options.num_averages) + state_bytes(options, self.network)
        found = {}
        if count := self._checkpoints():
            found[f"{count} checkpoint{'s'[: count > 1]} of {shown(one)}, one of them being written"] = count * one
        if options.use_ema and options.ema_type == "power":
            every = options.ema_snapshot_steps or max(1, (self.updates or 0) // Snapshots.PER_RUN)
            times = self.updates // every + 1 if self.updates else Snapshots.PER_RUN
            share = DTYPES[options.ema_snapshot_dtype].itemsize / 4
            found[f"{times * options.num_averages} EMA snapshots"] = int(times * options.num_averages * self.network * share)
        found["the pipeline"] = 2 * (self.network + self.autoencoder)
        found[f"{self._previews()} previews"] = self._previews() * self._preview_bytes()
        return found

    def _checkpoints(self) -> int:
        options = self.options
        judged = bool(options.validation_images or options.best_metric != "loss")
        kept = max(options.checkpoints_total_limit or 0, 2) + judged
        if self.updates is None:
            return kept + 1 if options.checkpoints_total_limit else 1
        every = options.checkpointing_steps
        to_come = self.updates // every - self.step // every + judged
        if options.checkpoints_total_limit is None:
            return self.checkpoints + to_come
        return min(self.checkpoints + to_come, kept + 1)

    def _previews(self) -> int:
        options = self.options
        steps = preview_steps(options, self.epoch_steps) if self.epoch_steps else options.save_images_steps
        if steps:
            return 1 + (self.updates or 0) // steps
        epochs = self.updates / self.epoch_steps if self.updates and self.epoch_steps else options.num_epochs
        return 1 + math.ceil(epochs / options.save_images_epochs)

    def _preview_bytes(self) -> int:
        """Of the two pictures, in samples/ and for a tracker. PNG hardly shrinks photographs."""
        images = 2 * self.options.eval_batch_size + PATH_IMAGES
        return 2 * (images * math.prod(self.options.image_shape) + 2 * FRAME)

    def line(self, folder: Path, there: int = 0) -> str:
        """Returns what is needed, beside what is free and what to set; `there` are bytes of the run in the folder, which this
        one replaces or goes on with."""
        parts, free = self.parts(), free_bytes(folder)
        needed = ", ".join(f"{name} {shown(size)}" if "being written" not in name else name for name, size in parts.items())
        text = f"the run will need {shown(sum(parts.values()))} of disk ({needed}); {shown(free + there)} are free for {folder}"
        if self.updates is None and self.options.checkpoints_total_limit is None:
            text += ". How many checkpoints there will be depends on the data: set --checkpoints_total_limit to keep few"
        return text if sum(parts.values()) <= free + there else f"{text}: {self._advice(free + there)}"

    def _advice(self, room: int) -> str:
        """What to set."""
        fewer = replace(self, options=replace(self.options, checkpoints_total_limit=2))
        if sum(fewer.parts().values()) <= room < sum(self.parts().values()):
            return "set --checkpoints_total_limit 2, make room, or set another --output_dir"
        return "make room, or set another --output_dir"

    def check(self, folder: Path, there: int = 0) -> None:
        """Raises UserError where the disk of `folder` has no room for it."""
        if sum(self.parts().values()) > free_bytes(folder) + there:
            raise UserError(self.line(folder, there))


def free_bytes(folder: Path) -> int:
    """Of the file system that the folder is on, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def shown(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"

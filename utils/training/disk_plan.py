"""What a run writes to its disk, counted before the first update."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from utils.core.errors import UserError
from utils.optim.optimizers import state_bytes
from utils.options.flags import RunOptions
from utils.runs.ema_snapshots import DTYPES, Snapshots

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class DiskPlan:
    """`network` is the bytes of its parameters and buffers in fp32. Counts what is large and foreseen: checkpoints, EMA
    snapshots and the pipeline; no pictures, no logs and no checkpoint of a stop."""

    options: RunOptions
    network: int
    updates: int  # of the whole run
    step: int = 0  # updates that are done
    checkpoints: int = 0  # that are there
    autoencoder: int = 0  # bytes of the one that the pipeline carries

    def parts(self) -> dict[str, int]:
        """What there will be -> the most bytes at once, a file being written beside the one that it replaces."""
        options, count = self.options, self._checkpoints()
        one = self.network * (1 + options.num_averages) + state_bytes(options, self.network)
        found = {f"{count} checkpoint{'s' * (count > 1)}": count * one, "the pipeline": 2 * (self.network + self.autoencoder)}
        if options.use_ema and options.ema_type == "power":
            every = options.ema_snapshot_steps or max(1, self.updates // Snapshots.PER_RUN)
            count = options.num_averages * (self.updates // every + 1)
            found[f"{count} EMA snapshots"] = count * self.network * DTYPES[options.ema_snapshot_dtype].itemsize // 4
        return found

    def _checkpoints(self) -> int:
        """One that is being written beside those that are kept, of which one may be the best."""
        options = self.options
        judged = bool(options.validation_images or options.best_metric != "loss")
        most = max(options.checkpoints_total_limit or 0, 2) + judged + 1
        every = options.checkpointing_steps
        in_all = self.checkpoints + self.updates // every - self.step // every + judged
        return in_all if options.checkpoints_total_limit is None else min(in_all, most)

    def line(self, folder: Path, there: int = 0) -> str:
        """Returns what is needed and what is free; `there`: bytes of the run in the folder, which is replaced or goes on."""
        parts = self.parts()
        needed = ", ".join(f"{name} {shown(size)}" for name, size in parts.items() if size)
        free = f"{shown(free_bytes(folder) + there)} are free for {folder}"
        return f"the run will need {shown(sum(parts.values()))} of disk ({needed}); {free}"

    def check(self, folder: Path, there: int = 0) -> None:
        """Raises UserError where the disk of `folder` has no room for it."""
        if sum(self.parts().values()) > free_bytes(folder) + there:
            advice = "make room, set a smaller --checkpoints_total_limit (2 at least), or set another --output_dir"
            raise UserError(f"{self.line(folder, there)}\n{advice}")


def free_bytes(folder: Path) -> int:
    """Of the file system that the folder is on, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def shown(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"

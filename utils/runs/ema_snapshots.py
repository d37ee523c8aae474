"""Snapshots of a run's averages on disk, and the weights of an EMA of any length that they add up to.

One safetensors file per time and width, complete or absent like a checkpoint; its metadata say what it is and of which run.
"""

import json
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from utils.core.distributed import on_main_process
from utils.core.errors import UserError
from utils.core.files import sync, whole_file
from utils.optim.ema import EMA, UNIT_VECTORS
from utils.optim.power_ema import PowerEMA, reconstruction_weights
from utils.runs.state import TrainState

FOLDER, PUBLISHED = "ema_snapshots", "[0-9]*-*.safetensors"
LARGEST_ERROR = 0.05  # of the profile; 40 snapshots of widths 0.05 and 0.1 stay below it from 0.02 to 0.25
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Snapshot:
    path: Path
    step: int  # updates averaged
    width: float  # relative
    fingerprint: str  # of the run


class Snapshots:
    """Takes snapshots of a run's `ema`: every `every` updates (None: a fortieth of the run) and where the run ends.

    A run that was stopped or has failed has not ended: it goes on from its checkpoint, which holds the averages, and takes the
    snapshots of a run that nobody stopped.
    Reconstruction is good with 30 or more over the training, of two widths (Karras et al. 2024, appendix C).
    """

    PER_RUN = 40

    def __init__(
        self, accelerator: Accelerator, ema: EMA | None, output_dir: Path, state: TrainState, *, every: int | None, dtype: str
    ):
        """Only a `PowerEMA` has any; with another `ema`, or none, nothing is ever due."""
        self._accelerator, self._ema, self._output_dir, self._state, self._dtype = accelerator, ema, output_dir, state, dtype
        self._every = every or max(1, state.max_train_steps // self.PER_RUN)
        self._newest: int | None = None  # update of the newest one of this start

    def due(self, step: int, ended: bool = False) -> bool:
        """Whether there should be one after `step` updates, with which the run may have `ended`, and is none yet."""
        return isinstance(self._ema, PowerEMA) and step != self._newest and (ended or step % self._every == 0)

    def save(self, step: int) -> None:
        """`save_snapshots`, to be called on every rank. Raises UserError when the disk does not take them."""
        what = {"fingerprint": self._state.fingerprint, "dtype": self._dtype}
        doing = "saving the averaged weights"
        on_main_process(self._accelerator, doing, save_snapshots, self._ema, self._output_dir, step, **what)
        self._newest = step


def save_snapshots(ema: PowerEMA, output_dir: Path, step: int, *, fingerprint: str, dtype: str) -> None:
    """Writes a file for each width of `ema`, its parameters in `dtype` ("fp16" or "fp32"), on the main process. Raises OSError
    or SafetensorError where the disk does not take them; what is there stays whole."""
    folder = output_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)
    trained = {name for name, _ in ema.model.named_parameters()}  # buffers are small, and keep their precision
    for width, average in ema.averages.items():
        tensors = {n: (t.to(DTYPES[dtype]) if n in trained else t).contiguous() for n, t in average.shadow.items()}
        path = folder / f"{step:08d}-{width}.safetensors"
        about = {"step": step, "width": width, "fingerprint": fingerprint}
        with whole_file(path, durable=True) as draft:
            save_file(tensors, draft, {"snapshot": json.dumps(about)})  # one key: safetensors writes several in random order
    sync(folder)


def remove_snapshots_beyond(output_dir: Path, step: int) -> None:
    """On the main process: removes those of the branch that a run leaves which goes on from `step`. Raises OSError."""
    for path in (output_dir / FOLDER).glob(PUBLISHED):
        if int(path.name.split("-")[0]) > step:
            path.unlink()


def list_snapshots(run: Path) -> list[Snapshot]:
    """All snapshots of a run, oldest first. Raises UserError when there are none, or one is damaged or of another run."""
    found = []
    for path in sorted((run / FOLDER).glob(PUBLISHED)):
        try:
            with safe_open(path, "pt") as file:
                found.append(Snapshot(path, **json.loads((file.metadata() or {})["snapshot"])))
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"{path} is damaged, or it is not a snapshot: {error}\nremove this file to continue without it"
            ) from None
    if not run.is_dir():
        raise UserError(f"{run}: no such folder\ngive the folder of a run")
    if not found:
        raise UserError(f"{run} has no EMA snapshots\ntrain with --ema_type power, which saves them")
    if len({snapshot.fingerprint for snapshot in found}) > 1:
        raise UserError(f"{run / FOLDER} has snapshots of several runs\nremove those of the other runs")
    return sorted(found, key=lambda snapshot: (snapshot.step, snapshot.width))


@dataclass(frozen=True)
class Recipe:
    """What an average is made of."""

    snapshots: list[Snapshot]
    weights: np.ndarray  # of each, sum 1
    error: float  # of the profile that they add up to, relative


def recipe(snapshots: list[Snapshot], width: float, step: int | None = None) -> Recipe:
    """For the EMA of relative `width` at `step` (the last snapshot's), from all snapshots up to it. Raises UserError for a
    step outside of the snapshots, and where they add up to another average."""
    times = sorted({snapshot.step for snapshot in snapshots})
    step = times[-1] if step is None else step
    if not times[0] <= step <= times[-1]:
        raise UserError(f"--step {step}: there are no snapshots there\nset a step from {times[0]} to {times[-1]}")
    used = [snapshot for snapshot in snapshots if snapshot.step <= step]
    weights, error = reconstruction_weights([s.step for s in used], [s.width for s in used], step, width)
    if error > LARGEST_ERROR:
        if step in times:
            tracked = " and ".join(f"{tracked:g}" for tracked in sorted({s.width for s in used}))
            advice = (
                f"take a --width nearer to those that were tracked ({tracked}), or train with a smaller --ema_snapshot_steps"
            )
        else:
            after = bisect(times, step)
            advice = f"step {step} lies between the snapshots at {times[after - 1]} and {times[after]}, take one of these"
        raise UserError(
            f"cannot make an EMA of width {width:g} at step {step} from {len(used)} snapshots: "
            f"its weights over time would be wrong by {100 * error:.0f} %\n{advice}"
        )
    return Recipe(used, weights, error)


@torch.no_grad()
def reconstruct(snapshots: list[Snapshot], width: float, step: int | None = None) -> dict[str, torch.Tensor]:
    """Weights of the average that `recipe` is for, float32 on the CPU, from float64 sums over one tensor of one file at a
    time. What EMA copies, counters and singular vectors, is the last snapshot's. Raises UserError as `recipe` does."""
    sums: dict[str, torch.Tensor] = {}
    made_of = recipe(snapshots, width, step)
    for snapshot, weight in zip(made_of.snapshots, made_of.weights.tolist()):
        with safe_open(snapshot.path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dict
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point() or name.endswith(UNIT_VECTORS):
                    sums[name] = tensor
                elif name in sums:
                    sums[name].add_(tensor.double(), alpha=weight)
                else:
                    sums[name] = tensor.double() * weight
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in sums.items()}

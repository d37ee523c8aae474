"""Checkpoints that are complete or absent: saved by all ranks, hashed, published by one rename, verified before loading.

`save_checkpoint` writes `.tmp-checkpoint-<step>` from every rank; then the main process hashes each file, writes
MANIFEST.json last, flushes everything to the disk, renames the folder to `checkpoint-<step>`, and only then prunes. A kill at
any moment leaves the earlier checkpoints as they were. Weights, EMA and the run's state are safetensors and JSON with clean
names, so that any number of processes can load them; the optimizer's state is torch's own file, read with weights_only.
"""

import contextlib
import json
import os
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils.constants import SCALER_NAME
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from utils.core.distributed import agree, made_on_main_process, on_main_process
from utils.core.errors import UserError, disk_problem, one_line
from utils.core.files import sync
from utils.optim.ema import EMA
from utils.optim.optimizers import change_settings, match_layouts, settings_of
from utils.runs.checkpoint_files import (
    FORMAT,
    MANIFEST,
    MODEL_WEIGHTS,
    REPLACED,
    file_sha256,
    find_checkpoint,
    list_checkpoints,
)
from utils.runs.folder import RunFolder, as_spelled_now, check_options
from utils.runs.state import STATE, TrainState, read_state

EMA_WEIGHTS = "ema.safetensors"


def attach_state_hooks(accelerator: Accelerator, ema: EMA | None, state: TrainState) -> None:
    """Makes `save_state` / `load_state` handle the model, the EMA and `state` as safetensors and JSON with clean names.
    Accelerate alone would store DDP's `module.` prefix, and further objects as a pickle that is loaded without
    restrictions."""

    def save(models: list[nn.Module], weights: list[dict], output_dir: str) -> None:
        weights.clear()  # tells Accelerate that the models are dealt with
        if accelerator.is_main_process:
            model = accelerator.unwrap_model(models[0])
            save_file(_contiguous(model.state_dict()), Path(output_dir, MODEL_WEIGHTS))
            if ema is not None:
                save_file(_contiguous(ema.state_dict()), Path(output_dir, EMA_WEIGHTS))
            Path(output_dir, STATE).write_text(json.dumps(asdict(state), indent=2))

    def load(models: list[nn.Module], input_dir: str) -> None:
        model = accelerator.unwrap_model(models.pop())
        model.load_state_dict(load_file(Path(input_dir, MODEL_WEIGHTS)))
        if ema is not None:
            averaged = Path(input_dir, EMA_WEIGHTS)  # absent if the run so far had none: then it starts from these weights
            if averaged.exists():
                ema.load_state_dict(load_file(averaged))
            else:
                ema.restart()
        loaded = read_state(Path(input_dir))
        for name in (f.name for f in fields(TrainState) if f.name not in ("options", "max_train_steps")):
            setattr(state, name, getattr(loaded, name))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def save_checkpoint(
    accelerator: Accelerator, output_dir: Path, state: TrainState, *, total_limit: int | None = None
) -> str | None:
    """Publishes `output_dir/checkpoint-<state.step>`, on all ranks. Returns None, or one line that says why nothing was
    published: a failed save (disk full, say) harms nothing that is there. The `total_limit` newest checkpoints and the best
    one are kept; never fewer than two, since the newest can be lost to a disk."""
    temporary = output_dir / f".tmp-checkpoint-{state.step}"
    final = output_dir / f"checkpoint-{state.step}"
    what = f"saving {final.name}"

    def why_not(error: Exception) -> str:
        free = shutil.disk_usage(output_dir).free / 1e6  # of which torch.save says nothing
        return disk_problem(error) or f"{one_line(error)} ({free:.0f} MB free on the disk)"

    def clear() -> None:
        for leftover in output_dir.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def publish() -> None:
        try:
            _publish(temporary, final, state.step)
        except Exception as exception:
            raise UserError(why_not(exception)) from exception
        with contextlib.suppress(OSError):  # the next save tries again
            prune_checkpoints(output_dir, total_limit, newest_step=state.step, keep_step=state.best_step)

    try:
        on_main_process(accelerator, what, clear)
        problem = None
        try:
            accelerator.save_state(str(temporary))  # makes the folder
        except Exception as exception:  # a full disk arrives as OSError, RuntimeError or SafetensorError
            problem = f"rank {accelerator.process_index}: {why_not(exception)}"
        agree(accelerator, what, problem)  # the main process writes the most
        on_main_process(accelerator, what, publish)
    except UserError as error:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
        return str(error)
    return None


def _publish(temporary: Path, final: Path, step: int) -> None:
    files = {}
    for path in sorted(p for p in temporary.rglob("*") if p.is_file()):
        files[path.relative_to(temporary).as_posix()] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
        sync(path)
    manifest = temporary / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=2))
    sync(manifest)
    sync(temporary)
    replaced = final.with_name(REPLACED + final.name)
    if final.exists():  # a run resumed from an earlier checkpoint comes by again
        os.rename(final, replaced)  # a kill before the next line: `find_checkpoint` undoes this one
    try:
        os.rename(temporary, final)
    except OSError:
        if replaced.exists():
            os.rename(replaced, final)
        raise
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def load_checkpoint(accelerator: Accelerator, path: Path) -> None:
    """Loads a verified checkpoint into everything that was prepared and attached. Call on all ranks."""
    scaler = accelerator.scaler
    if not (path / SCALER_NAME).is_file():
        accelerator.scaler = None  # of a run in another precision: the scale begins anew
    try:
        accelerator.load_state(str(path))
    finally:
        accelerator.scaler = scaler
    for optimizer in accelerator._optimizers:
        match_layouts(optimizer.optimizer)
    # Accelerate restores its count of micro steps, which would put another accumulation out of phase; updates are whole here.
    accelerator.step = 0


def prune_checkpoints(output_dir: Path, total_limit: int | None, newest_step: int, keep_step: int | None = None) -> None:
    """Keeps the newest max(total_limit, 2) checkpoints up to `newest_step` and `checkpoint-<keep_step>`; removes the others.
    Those beyond `newest_step` are of a branch that was left when the run went on from an earlier checkpoint."""
    by_step = {int(path.name.removeprefix("checkpoint-")): path for path in list_checkpoints(output_dir)}
    kept = [step for step in by_step if step <= newest_step]
    if total_limit is not None:
        kept = [*kept[-max(total_limit, 2) :], keep_step]
    for step, path in by_step.items():
        if step not in kept:  # renamed first, so that a kill leaves no half of one under its final name
            doomed = path.with_name(f".tmp-discarded-{path.name}")
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def resume(
    accelerator: Accelerator, output_dir: Path, wanted: str | None, state: TrainState, allowed_changes: list[str]
) -> tuple[Path | None, list[str]]:
    """Loads the checkpoint that `wanted` means (see `find_checkpoint`; None: none) into `state` and all that was prepared.

    Returns the checkpoint that was loaded, and lines for the user. Raises UserError, on every rank, when there is no such
    checkpoint or when it was made with options that shape the result and differ from those of `state`, unless they are in
    `allowed_changes`.
    """
    if not wanted:
        return None, []

    def find() -> tuple[Path | None, list[str]]:
        path, notes = find_checkpoint(output_dir, wanted)
        if path is not None:
            unfit = misfit(accelerator.unwrap_model(accelerator._models[0]), path)
            of_the_run = RunFolder(path.parent)
            saved = as_spelled_now(read_state(path).options, state.options, of_the_run.record(), of_the_run.path)
            notes += check_options(saved, state.options, allowed_changes, unfit)
        return path, notes

    checkpoint, notes = made_on_main_process(accelerator, "reading the checkpoint", find)
    if checkpoint is None:
        return None, [*notes, f"no checkpoint in {output_dir} yet: starting a new run"]
    saved = read_state(checkpoint)
    laid_out_for, optimizers = saved.max_train_steps, [optimizer.optimizer for optimizer in accelerator._optimizers]
    asked = [settings_of(optimizer) for optimizer in optimizers]
    load_checkpoint(accelerator, checkpoint)
    for optimizer, settings in zip(optimizers, asked):
        change_settings(optimizer, settings, allowed_changes)
    before, now = (options.get("optimizer", "adamw") for options in (saved.options, state.options))
    if before != now and not {before, now} <= {"adam", "adamw"}:
        for optimizer in optimizers:
            optimizer.state.clear()
        notes.append(f"the optimizer was {before} and is now {now}: it starts without averages of earlier gradients")
    if laid_out_for != state.max_train_steps:
        notes.append(
            f"the length of the run changes from {laid_out_for} to {state.max_train_steps} updates: "
            "from now on, the learning rate follows the curve of the new length"
        )
    notes.append(f"resumed from {checkpoint.name}: {state.step} of {state.max_train_steps} updates done")
    return checkpoint, notes


def misfit(network: nn.Module, checkpoint: Path) -> str | None:
    """Returns the first tensor of a checkpoint that `network` lacks, or has in another shape; None where all fit."""
    now = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    with safe_open(checkpoint / MODEL_WEIGHTS, "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
    for name in sorted(saved.keys() | now.keys()):
        shapes = saved.get(name), now.get(name)
        if shapes[0] != shapes[1]:
            was, to = ("absent" if shape is None else "x".join(map(str, shape)) or "a number" for shape in shapes)
            return f"{name}: {was} in the checkpoint, {to} now"
    return None


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}  # safetensors wants plain layouts

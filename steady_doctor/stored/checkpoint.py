"""Files that a run writes for later: is everything as a checkpoint's files say after a resume, and do they hold what the run
has when they are saved? They are read here, without the code that saves and loads them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steady_doctor.found import Found
from steady_doctor.stored.tensors import Stored, difference, few, same, unwrapped

MOVED = 2e-6  # of its size, by which a weight and its average differ where it was trained: above what rounding leaves
OF_SCALER = ("scale", "_growth_tracker")


@dataclass(frozen=True)
class State:
    """What a run goes on from, or saves."""

    step: int  # updates made
    weights: Mapping[str, Tensor]  # state_dict of what the optimizer trains
    optimizer: torch.optim.Optimizer | None = None  # None: another one than that of the checkpoint
    averages: Mapping[str, Tensor] | None = None  # state_dict of the averaged weights; None: there are none
    scaler: torch.amp.GradScaler | None = None
    norm_mean: float | None = None  # running mean of the gradient's norm
    keeps_norm_mean: bool = False


def kept(checkpoint: Path, state: State, only: int | None = None) -> Iterator[Found]:
    """What the files of `checkpoint` and the run's state have not in common: right after a resume, or right after a save.

    `only`: the values of a few tensors are compared, others for each number; None: of all.
    """
    stored, weights = Stored(checkpoint / "model.safetensors"), unwrapped(state.weights)
    chosen = None if only is None else few(weights, only)
    told = json.loads((checkpoint / "state.json").read_text())
    file, update = checkpoint.name, state.step
    if told["step"] != state.step:
        yield Found("state-step", update, {"file": file, "stored": told["step"], "own": state.step})
    if others := difference(stored, weights, only=chosen):
        yield Found("state-weights", update, {"file": file, "what": "weights", **others.figures})
    if state.optimizer is not None:
        yield from _moments(checkpoint, told, state, weights, chosen)
    if state.scaler is not None and state.scaler.is_enabled() and (checkpoint / "scaler.pt").exists():
        both = torch.load(checkpoint / "scaler.pt", weights_only=True), state.scaler.state_dict()
        before, now = ([float(values[key]) for key in OF_SCALER] for values in both)
        if before != now:
            yield Found("state-loss-scale", update, {"file": file, "stored": before, "own": now})
    if state.averages is not None:
        yield from _averages(checkpoint, stored, state, chosen)
    if state.keeps_norm_mean:
        mean, counted = (
            told["grad_norm_mean"],
            told["options"].get("adaptive_clipping") and told["step"] > told["skipped_updates"],
        )
        if mean != state.norm_mean or (mean is None and counted):
            yield Found("state-norm-mean", update, {"file": file, "stored": str(mean), "own": str(state.norm_mean)})


def snapshots(
    folder: Path, step: int, averages: Mapping[float, Mapping[str, Tensor]], only: int | None = None
) -> Iterator[Found]:
    """Whether the snapshots of averages that were just saved in `folder` hold those of the run, in the precision of the files.
    `averages`: by their relative widths; `only`: as of `kept`."""
    for width, live in averages.items():
        path = folder / f"{step:08d}-{width}.safetensors"
        stored = Stored(*[path] * path.exists())
        chosen = set(live) if only is None else few(live, only)
        rounded = {name: live[name].to(stored[name].dtype) for name in chosen & stored.keys()}
        if others := difference({**live, **rounded}, stored, only=chosen):
            yield Found("ema-snapshot", step, {"file": path.name, **others.figures})


def _in(names: Mapping, name: str) -> str | None:
    """The name in `names` that is `name`, or `name` without the module around it."""
    return next((part for part in (name, name.partition(".")[2]) if part in names), None)


def _averages(checkpoint: Path, weights: Stored, state: State, only: set[str] | None) -> Iterator[Found]:
    path, live = checkpoint / "ema.safetensors", unwrapped(state.averages or {})
    if path.exists():
        stored: Mapping[str, Tensor] = Stored(path)
    else:  # a run that had no average begins it at its weights, which may have no buffers that are not saved
        stored = {part: weights[name] for name in weights if (part := _in(live, name))}
        live = {name: tensor for name, tensor in live.items() if name in stored}
    # Of several averages each has its own names, that end in those of the network.
    chosen = None if only is None else {name for name in live if any(one.endswith(name.rpartition("/")[2]) for one in only)}
    if others := difference(stored, live, only=chosen):
        yield Found("state-weights", state.step, {"file": checkpoint.name, "what": "averaged weights", **others.figures})


def _moments(checkpoint: Path, told: dict, state: State, weights: Mapping, only: set[str] | None) -> Iterator[Found]:
    optimizer: Any = getattr(state.optimizer, "optimizer", state.optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names_of = {tensor.data_ptr(): name for name, tensor in weights.items()}
    names = [names_of.get(parameter.data_ptr()) for parameter in parameters]
    try:
        file = torch.load(checkpoint / "optimizer.bin", map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # of an optimizer that keeps other things than tensors
        return
    looked = {index for index, name in enumerate(names) if only is None or name in only}
    if lost := _lost(checkpoint, file, {index: names[index] for index in looked}, told, only is None):
        figures = {"file": checkpoint.name, "lost": len(lost), "of": len(looked), "such_as": str(names[lost[0]])}
        yield Found("state-moments-lost", state.step, figures)
    now = _by_name({index: optimizer.state.get(parameters[index], {}) for index in looked})
    before = _by_name({index: values for index, values in file["state"].items() if index in looked})
    now = {name: tensor for name, tensor in now.items() if name in before or tensor.any()}  # what begins at zero is new
    if others := difference(before, now):
        yield Found("state-moments", state.step, {"file": checkpoint.name, **others.figures})


def _by_name(state: Mapping[int, Mapping]) -> dict[str, Tensor]:
    return {
        f"{key} of parameter {index}": torch.as_tensor(value)
        for index, values in state.items()
        for key, value in values.items()
        if isinstance(value, Tensor | int | float)
    }


def _lost(checkpoint: Path, file: dict, names: dict[int, str | None], told: dict, are_all: bool) -> list[int]:
    """The parameters that were trained and have no moments in a checkpoint: one whose average is not its weight has moved not
    long ago; without an average, one of all must have moments. `names`: by the numbers of the parameters."""
    plain = all("betas" not in group and not group.get("momentum") and "alpha" not in group for group in file["param_groups"])
    if plain or told["step"] <= told.get("skipped_updates", 0) + told.get("scaler_skips", 0):
        return []  # it keeps none, or no update was made
    path = checkpoint / "ema.safetensors"
    weights, averages = Stored(checkpoint / "model.safetensors"), Stored(*[path] * path.exists())
    without, moved = set(names), set()
    for index in names.keys() & file["state"].keys():
        if any(isinstance(value, Tensor) and value.any() for value in file["state"][index].values()):
            without.remove(index)
    for index in without:
        average = _in(averages, str(names[index])) if names[index] in weights else None
        if average is not None and not same(weights[str(names[index])], averages[average], MOVED):
            moved.add(index)
    return sorted(names if are_all and len(without) == len(names) else moved)

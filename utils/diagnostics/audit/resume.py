"""Files that a run writes for later: is everything as a checkpoint's files say after a resume, and do they hold what the run
has when they are saved? They are read here, without the code that saves and loads them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from utils.diagnostics.audit.tensors import Stored, clean, difference, same, unwrapped
from utils.diagnostics.audit.verdict import Check, not_observed

MOVED = 2e-6  # of its size, by which a weight and its average differ where it was trained: above what rounding leaves
AS_STORED = "as in the checkpoint"


def check_resumed(
    checkpoint: Path,
    *,
    network_state: Mapping[str, torch.Tensor],
    optimizer: Any,
    step: int,
    ema_state: Mapping[str, torch.Tensor] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> list[Check]:
    """What was resumed against the files of `checkpoint`, before the first update that follows.

    `network_state` is the state_dict of what the optimizer trains, `optimizer` None where it is another one than before,
    `ema_state` the state_dict of the average (None: the run has none).
    """
    checkpoint = Path(checkpoint)
    stored = Stored(checkpoint / "model.safetensors")
    checks = [_step(checkpoint, step), _weights(stored, unwrapped(network_state), checkpoint)]
    if optimizer is not None:
        checks += _optimizer(checkpoint, getattr(optimizer, "optimizer", optimizer), unwrapped(network_state))
    if scaler is not None and scaler.is_enabled():
        checks.append(_scaler(checkpoint / "scaler.pt", scaler.state_dict()))
    if ema_state is not None:
        checks.append(_ema(checkpoint / "ema.safetensors", stored, unwrapped(ema_state)))
    return checks


def check_saved(checkpoint: Path, **state: Any) -> list[Check]:
    """Whether a checkpoint that was just saved holds what the run has; `state` as of `check_resumed`."""
    return [_just_saved(check, checkpoint.name) for check in check_resumed(checkpoint, **state)]


def check_snapshots(folder: Path, step: int, averages: Mapping[float, Mapping[str, torch.Tensor]]) -> list[Check]:
    """Whether the snapshots of averages that were just saved in `folder` hold those of the run, in the precision of the files.
    `averages`: by their relative widths."""
    checks = []
    for width, live in averages.items():
        path = folder / f"{step:08d}-{width}.safetensors"
        if not path.exists():
            text = f"the average of width {width:g} was not saved: there is no {path.name}"
            checks.append(Check("ema", f"snapshot of EMA {width}", "the run's", "none", False, text))
            continue
        stored = Stored(path)
        found = difference({name: t.to(stored[name].dtype) if name in stored else t for name, t in live.items()}, stored)
        said = found.names() or f"{len(found.different)} of {found.compared} tensors differ, by {found.distance:.2g}"
        text = f"{path.name} does not hold the average of width {width:g}: {said}"
        checks.append(Check("ema", f"snapshot of EMA {width}", "the run's", said if found else "the same", not found, text))
    return checks


def _just_saved(check: Check, checkpoint: str) -> Check:
    name = check.name.replace("after the resume", "as saved")
    if name == check.name:
        return check
    declared = "those of the run" if check.declared == AS_STORED else check.declared
    text = f"{checkpoint} does not hold what the run has: {name}: {check.observed}"
    return replace(check, name=name, declared=declared, message=text if check.healthy is False else "")


def _step(checkpoint: Path, step: int) -> Check:
    declared = json.loads((checkpoint / "state.json").read_text())["step"]
    message = f"the run goes on from update {step}, but {checkpoint.name} was made after update {declared}"
    return Check("state", "step after the resume", str(declared), str(step), step == declared, message * (step != declared))


def check_norm_mean(checkpoint: Path, mean: float | None) -> Check:
    """Of a run with adaptive clipping: whether the running `mean` of the gradient's norm goes on as the checkpoint has it."""
    stored = json.loads((checkpoint / "state.json").read_text())
    declared = stored["grad_norm_mean"]
    counted = stored["options"].get("adaptive_clipping") and stored["step"] > stored["skipped_updates"]
    why = ""
    if declared is None and counted:
        why = f"{checkpoint.name} does not have the running mean of the gradient's norm: it begins anew"
    elif declared != mean:
        why = f"the running mean of the gradient's norm goes on from {mean}, the checkpoint has {declared}"
    return Check("state", "mean of the gradient's norm after the resume", str(declared), str(mean), not why, why)


def _weights(stored: Stored, live: dict[str, torch.Tensor], checkpoint: Path) -> Check:
    name = "weights after the resume"
    found = difference(stored, live)
    if not found:
        return Check("state", name, AS_STORED, "the same", True)
    if names := found.names():
        observed, message = names, f"names of tensors in the checkpoint are not those of the network: {names}"
        if found.missing and all(clean(name) in live for name in found.missing):
            message = f"the checkpoint has the names of a wrapped network ({found.missing[0]}), so that they were not loaded"
        return Check("state", name, AS_STORED, observed, False, message)
    observed = f"{len(found.different)} of {found.compared} tensors differ, by {found.distance:.2g}"
    averaged = checkpoint / "ema.safetensors"
    if averaged.exists() and _is(live, Stored(averaged)):
        observed, why = "the averaged weights", "the training goes on from the averaged weights, not from the raw ones"
    elif len(found.different) < found.compared:
        why = f"some weights are not those of the checkpoint: {', '.join(found.different[:3])}"
    else:
        why = f"the weights are not those of the checkpoint: they differ by {found.distance:.2g} of their size"
    return Check("state", name, AS_STORED, observed, False, why)


def _is(live: Mapping[str, torch.Tensor], averages: Mapping[str, torch.Tensor]) -> bool:
    """Whether the network holds these averages; the average may be of a part of the network."""
    pairs = [(tensor, averages[part]) for name, tensor in live.items() if (part := _in(averages, name))]
    return bool(pairs) and all(tensor.shape == other.shape and same(tensor.cpu(), other.cpu()) for tensor, other in pairs)


def _in(names: Mapping, name: str) -> str | None:
    """The name in `names` that is `name`, or `name` without the module around it."""
    return next((part for part in (name, name.partition(".")[2]) if part in names), None)


def _optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer, network_state: Mapping[str, torch.Tensor]) -> list[Check]:
    path, parameters = checkpoint / "optimizer.bin", [p for group in optimizer.param_groups for p in group["params"]]
    live = _by_name({index: optimizer.state.get(parameter, {}) for index, parameter in enumerate(parameters)})
    try:
        file = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of an optimizer that keeps other things than tensors
        return [not_observed("optimizer", "moments after the resume", AS_STORED, f"{path.name}: {str(error).splitlines()[0]}")]
    stored = _by_name(file["state"])
    names = {tensor.data_ptr(): name for name, tensor in network_state.items()}
    checks = [_kept(checkpoint, file, [names.get(parameter.data_ptr()) for parameter in parameters])]
    for what in ("moments", "counts of updates"):
        pair = ({k: v for k, v in part.items() if k.startswith("step ") == (what != "moments")} for part in (stored, live))
        checks.append(_state_of_optimizer(what, *pair))
    return checks


def _kept(checkpoint: Path, file: dict, names: list[str | None]) -> Check:
    """Whether the checkpoint has moments of each parameter that was trained. One whose average is not its weight has moved not
    long ago; without an average, some parameter must have moments. `names`: of the optimizer's parameters, in its order."""
    what, wanted = "moments in the checkpoint", "of each parameter that was trained"
    state = json.loads((checkpoint / "state.json").read_text())
    path = checkpoint / "ema.safetensors"
    weights, averages = Stored(checkpoint / "model.safetensors"), Stored(path) if path.exists() else {}
    plain = all("betas" not in group and not group.get("momentum") and "alpha" not in group for group in file["param_groups"])
    if plain or state["step"] <= state.get("skipped_updates", 0) + state.get("scaler_skips", 0):
        return not_observed("optimizer", what, wanted, "the optimizer keeps none" if plain else "no update was made")
    have = {
        index for index, kept in file["state"].items() if any(isinstance(v, torch.Tensor) and v.any() for v in kept.values())
    }
    moved = set()
    for index, name in enumerate(names):
        average = None if name is None or name not in weights else _in(averages, name)
        if average is not None and not same(weights[name], averages[average], MOVED):
            moved.add(index)
    lost = sorted(moved - have)
    if not have:
        why = f"the optimizer's moments are not in {checkpoint.name}: they were not saved, or were cleared before"
    elif lost:
        why = f"{checkpoint.name} has no moments of {len(lost)} of {len(moved)} parameters that were trained: {names[lost[0]]}"
    else:
        why = ""
    return Check("optimizer", what, wanted, f"of {len(have)} of {len(names)} parameters", not why, why)


def _by_name(state: Mapping[int, Mapping]) -> dict[str, torch.Tensor]:
    return {
        f"{key} of parameter {index}": torch.as_tensor(value)
        for index, values in state.items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor | int | float)
    }


def _state_of_optimizer(what: str, stored: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> Check:
    live = {name: tensor for name, tensor in live.items() if name in stored or tensor.any()}  # what begins at zero is new
    found, why = difference(stored, live), ""
    observed = found.names() or f"{len(found.different)} of {found.compared} differ, by {found.distance:.2g}"
    if found.missing:
        why = f"the optimizer's {what} were not loaded ({found.names()}): it starts anew"
    elif found.different and not any(live[name].any() for name in found.different):
        why = f"the optimizer's {what} are zero: it starts anew"
    elif found:
        why = f"the optimizer's {what} are not those of the checkpoint: {observed}"
    return Check("optimizer", f"{what} after the resume", AS_STORED, observed if found else "the same", not found, why)


def _scaler(path: Path, now: dict) -> Check:
    name, keys = "loss scale after the resume", ("scale", "_growth_tracker")
    try:
        stored = torch.load(path, weights_only=True)
    except OSError as error:
        return not_observed("optimizer", name, AS_STORED, str(error))
    declared, observed = (", ".join(f"{float(values[key]):g}" for key in keys) for values in (stored, now))
    healthy = declared == observed
    why = f"the loss scale and its count of good updates are {observed}; the checkpoint has {declared}"
    return Check("optimizer", name, declared, observed, healthy, "" if healthy else why)


def _ema(path: Path, weights: Stored, live: dict[str, torch.Tensor]) -> Check:
    name, fresh = "average after the resume", not path.exists()
    stored = {} if fresh else Stored(path)
    if fresh:  # a run that had no average begins it at its weights, which may have no buffers that are not saved
        stored = {part: weights[name] for name in weights if (part := _in(live, name))}
        live = {name: tensor for name, tensor in live.items() if name in stored}
    declared = "the checkpoint's weights" if fresh else AS_STORED
    found = difference(stored, live)
    if not found:
        return Check("ema", name, declared, "the same", True)
    observed = found.names() or f"{len(found.different)} of {found.compared} tensors differ, by {found.distance:.2g}"
    if found.names():
        why = f"names of the stored average are not those of the run's: {found.names()}"
    elif not fresh and _is(weights, live):
        observed, why = "the raw weights", "the average was not restored: it begins again at the raw weights"
    else:
        why = f"the average is not that of the checkpoint: it differs by {found.distance:.2g} of its size"
    return Check("ema", name, declared, observed, False, why)

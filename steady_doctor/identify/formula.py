"""Whether an optimizer's step is what torch's own formula gives, of the same state and gradient, in float64."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steady_doctor.record.by_hand import ByHand
from steady_doctor.record.recorded import Recorded
from steady_doctor.record.samples import Samples

BY_ELEMENT = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "SGD"}  # each number moves by itself
PLAIN = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
ROUNDING = 1.5 * 2.0**-24  # of float32 weights


def off_formula(recorded: Recorded) -> float | None:
    """The size of what is not as by the formula, over that of the step; None where nothing can be said."""
    optimizer = recorded.optimizer
    if isinstance(optimizer, ByHand):
        return None
    kind = type(optimizer)
    if kind.__name__ not in BY_ELEMENT or not kind.__module__.startswith("torch.optim") or not recorded.gradients.finite:
        return None
    if any(parameter.dtype != torch.float32 for parameter in recorded.parameters):
        return None
    before, after = recorded.weights[-2:]
    start, moved = before.rows[before.within], (after.rows - before.rows)[before.within]
    again = before.rows.clone()
    try:
        for group, places in _alike(recorded):
            again[places] = _stepped(recorded, kind, group, places)
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):  # settings that torch's own class has not
        return None
    should = (again - before.rows)[before.within]
    rounding = ROUNDING * float(start.norm()) + 1e-30
    off, size = float((moved - should).norm()), float(should.norm())
    if off <= 5 * rounding:
        return 0.0
    return off / size if size else math.inf


def _alike(recorded: Recorded) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Each group of the optimizer's, and the places of its parameters that have a gradient and the same counts."""
    counts = [samples.rows[:, 0].tolist() for samples in recorded.state.values() if _is_count(samples)]
    has = [samples.there.tolist() for samples in recorded.state.values()]
    places = iter(range(len(recorded.parameters)))
    there = recorded.at_step.there.tolist()
    for group in recorded.optimizer.param_groups:
        alike: dict[tuple, list[int]] = {}
        for k in [next(places) for _ in group["params"]]:
            if there[k]:
                alike.setdefault((*(one[k] for one in counts), *(one[k] for one in has)), []).append(k)
        for those in alike.values():
            yield group, torch.tensor(those)


def _is_count(samples: Samples) -> bool:
    return bool((samples.sizes <= 1).all())


def _stepped(recorded: Recorded, kind: type[Optimizer], group: dict[str, Any], places: Tensor) -> Tensor:
    """The rows of these parameters after torch's own step, as if they were one parameter."""
    rows = recorded.weights[-2].rows[places]
    within = recorded.weights[-2].within[places]
    parameter = torch.nn.Parameter(rows[within])
    parameter.grad = recorded.at_step.rows[places][within]
    names = ("lr", "betas", "eps", "momentum", "alpha", "weight_decay")
    judge = kind([parameter], **{name: group[name] for name in names if name in group})  # type: ignore[call-arg]
    judge.param_groups = [group | {"params": [parameter]} | PLAIN]
    state = {name: samples for name, samples in recorded.state.items() if bool(samples.there[places[0]])}
    if state:
        judge.state[parameter] = {
            name: _as_count(name, samples.rows[places[0], 0]) if _is_count(samples) else samples.rows[places][within]
            for name, samples in state.items()
        }
    type(judge).step.__wrapped__(judge)  # type: ignore[attr-defined]  # without torch's hooks of optimizers, the doctor's among them
    rows[within] = parameter.detach()
    return rows


def _as_count(name: str, value: Tensor) -> Tensor:
    """Torch keeps steps in float32."""
    return value.float() if name == "step" else value.clone()

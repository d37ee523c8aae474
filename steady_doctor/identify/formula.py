"""Whether an optimizer's step is what torch's own formula gives, of the same state and gradient, in float64."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steady_doctor.record.recorded import Recorded

BY_ELEMENT = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "SGD"}  # each number moves by itself
PLAIN = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
ROUNDING = 1.5 * 2.0**-24  # of float32 weights


def off_formula(recorded: Recorded) -> float | None:
    """The size of what is not as by the formula, over that of the step; None where nothing can be said."""
    optimizer = recorded.optimizer
    kind = type(optimizer)
    if kind.__name__ not in BY_ELEMENT or not kind.__module__.startswith("torch.optim") or not recorded.gradients.finite:
        return None
    if any(parameter.dtype != torch.float32 for parameter in recorded.parameters) or not recorded.state:
        return None
    before, after = recorded.weights[-2:]
    again = [torch.nn.Parameter(one.clone()) for one in before]
    places = iter(range(len(again)))
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        mine = [again[next(places)] for _ in group["params"]]
        groups.append({name: value for name, value in group.items() if name != "params"} | {"params": mine} | PLAIN)
    try:
        judge = _formula(kind, groups)
        for parameter, gradient, state in zip(again, recorded.at_step, recorded.state):
            parameter.grad = None if gradient is None else gradient.clone()
            if state:
                judge.state[parameter] = {name: _as_state(name, value) for name, value in state.items()}
        type(judge).step.__wrapped__(judge)  # type: ignore[attr-defined]  # without torch's hooks of optimizers, the doctor's among them
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):  # settings that torch's own class has not
        return None
    moved, should = torch.cat(after) - torch.cat(before), torch.cat([p.detach() for p in again]) - torch.cat(before)
    rounding = ROUNDING * float(torch.cat(before).norm()) + 1e-30
    off, size = float((moved - should).norm()), float(should.norm())
    if off <= 5 * rounding:
        return 0.0
    return off / size if size else math.inf


def _formula(kind: type[Optimizer], groups: list[dict[str, Any]]) -> Optimizer:
    names = ("lr", "betas", "eps", "momentum", "alpha", "weight_decay")
    first = {name: groups[0][name] for name in names if name in groups[0]}
    judge = kind([group["params"][0] for group in groups if group["params"]], **first)  # type: ignore[call-arg]
    judge.param_groups = groups
    return judge


def _as_state(name: str, value: Any) -> Any:
    """A sample of a state; counts are single numbers, which torch keeps in float32 on the host."""
    if isinstance(value, Tensor):
        return value.reshape(()).float().cpu().clone() if name == "step" else value.clone()
    return value

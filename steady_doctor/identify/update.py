"""What one update does around its passes: gradients, the order of events, averages, writes to the weights. Figures alone."""

from dataclasses import dataclass, field
from typing import Any

import torch

from steady_doctor.identify.averages import Average, far, identify_averages, written_by_itself
from steady_doctor.identify.gradient import Gradient, identify_gradient
from steady_doctor.record.recorded import Recorded
from steady_doctor.record.tape import sample

SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum")
NETWORKS_OWN = 4  # weights that no optimizer has, of which some numbers are kept


@dataclass
class Optimized:
    """The optimizer's step. Settings are those of each group."""

    kind: str  # its class
    settings: list[dict[str, Any]]
    size: float = 0.0  # the median over layers: change of the weights over their size
    stuck: float | None = None  # of weights in half precision that have a gradient: the share that does not move


@dataclass
class Update:
    number: int
    gradient: Gradient
    averages: list[Average] = field(default_factory=list)
    weights_moved: float = 0.0  # outside of the optimizer's step: the distance over the size, of the parameter that moved most
    weights_written_by: tuple[str, ...] = ()
    normalized: bool = False  # what was written has rows of one size
    by_itself: tuple[str, ...] = ()  # operations that mix weights with themselves
    optimized: Optimized | None = None
    network: tuple[float, ...] = ()  # where the losses depend on weights that the optimizer does not have: numbers of these


def identify_update(recorded: Recorded) -> Update:
    update = Update(recorded.update, identify_gradient(recorded))
    roots = [root for roots in recorded.roots for root in roots]
    loss = {op.index for root in roots for op in recorded.tape.upstream(root)}
    update.averages = identify_averages(recorded, loss)
    update.by_itself = written_by_itself(recorded)
    update.normalized = recorded.normalized
    _weights(recorded, update)
    update.optimized = _optimized(recorded)
    own = [parameter for parameter in recorded.tape.unowned if (op := recorded.tape.origin(parameter)) and op.index in loss]
    update.network = tuple(float(sample(parameter).abs().sum()) for parameter in own[:NETWORKS_OWN])
    if recorded.copies is not None:
        recorded.copies.look(recorded.tape, loss)
    return update


def _weights(recorded: Recorded, update: Update) -> None:
    """What changed the weights outside of the step."""
    step = next((at for at, what in recorded.events if what == "step"), len(recorded.tape.ops))
    at_step = recorded.weights[-2] if len(recorded.weights) > 1 else recorded.at_start
    update.weights_moved = max((far(now, old) for old, now in zip(recorded.at_start, at_step)), default=0.0)
    writers = (op.name for op in recorded.tape.ops[:step] if "trained" in op.changes)
    update.weights_written_by = tuple(dict.fromkeys(writers))


def _optimized(recorded: Recorded) -> Optimized:
    optimizer = recorded.optimizer
    settings = [{name: group[name] for name in SETTINGS if name in group} for group in optimizer.param_groups]
    found = Optimized(type(optimizer).__name__, settings)
    if len(recorded.weights) < 2:
        return found
    sizes, stuck = [], []
    for parameter, before, after, got in zip(recorded.parameters, *recorded.weights[-2:], recorded.at_step):
        if parameter.ndim > 1 and not torch.equal(before, after):
            own = max(float(before.square().mean()), len(parameter) / (3 * parameter.numel()))
            sizes.append((float((after - before).square().mean()) / own) ** 0.5)
        if parameter.dtype in (torch.float16, torch.bfloat16) and got is not None:
            stuck.append((before == after)[(got != 0) & (before != 0)].double())
    found.size = sorted(sizes)[len(sizes) // 2] if sizes else 0.0
    found.stuck = float(torch.cat(stuck).mean()) if stuck and sum(map(len, stuck)) else None
    return found

"""What one update does around its passes: gradients, the order of events, averages, writes to the weights. Figures alone."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steady_doctor.identify.averages import Average, Named, identify_averages, identify_named, written_by_itself
from steady_doctor.identify.formula import off_formula
from steady_doctor.identify.gradient import Gradient, identify_gradient
from steady_doctor.record.recorded import Recorded
from steady_doctor.record.samples import SAMPLED, Samples, far

SETTINGS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "amsgrad",
    "nesterov",
    "centered",
    "maximize",
    "dampening",
    "alpha",
)
NETWORKS_OWN = 4  # weights that no optimizer has, of which some numbers are kept


@dataclass
class Optimized:
    """The optimizer's step. Settings are those of each group."""

    kind: str  # its class
    settings: list[dict[str, Any]]
    size: float = 0.0  # the median over layers: change of the weights over their size
    off: float | None = None  # of the change of the weights: what is not what torch's own formula gives with these settings
    counted: tuple[int, ...] = ()  # steps that it has counted before this one, the different ones of all parameters
    stuck: float | None = None  # of weights in half precision that have a gradient: the share that does not move


@dataclass
class ToldUpdate:
    """Of a loop that tells; each of weights is a distance over the size, of the parameter that moved most."""

    limit: float | None  # that the gradient's norm is to be clipped to; 0: none; None: not known
    limit_taken: float | None  # the one that the loop takes; None: not told
    norm: float | None  # of the gradient before it is clipped, as the loop has it
    before_pass: float  # moved before the first backward pass
    before_step: float  # and between that and the step
    after_step: float  # and from the step to the end
    written: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # by which operations, in these three parts
    after_step_in_rows: float  # and from there, without the lengths of the rows of matrices
    rows: float  # how far the root mean square of a row of a matrix is from 1
    trained: tuple[str, ...]  # names of the parameters that want a gradient
    frozen: tuple[str, ...]  # and of those that do not
    in_groups: tuple[int, ...]  # of each parameter that wants one: the optimizer's group; -1: none
    matrices: tuple[bool, ...]  # and whether it has two dimensions or more
    dtypes: tuple[torch.dtype, ...]  # of the weights
    dropout: float  # the largest share that a layer leaves out
    training: bool  # the mode of the network


@dataclass
class Update:
    number: int
    gradient: Gradient
    averages: list[Average] = field(default_factory=list)
    teachers: list[Average] = field(default_factory=list)  # those that a loss depends on
    named: list[Named] = field(default_factory=list)  # averages that the loop tells
    told: "ToldUpdate | None" = None
    weights_moved: float = 0.0  # outside of the optimizer's step: the distance over the size, of the parameter that moved most
    weights_put_back: bool = False  # all of that to what they were before training
    weights_written_by: tuple[str, ...] = ()
    normalized: bool = False  # what was written has rows of one size
    by_itself: tuple[str, ...] = ()  # operations that mix weights with themselves
    optimized: Optimized | None = None
    network: tuple[float, ...] = ()  # where the losses depend on weights that the optimizer does not have: numbers of these


def identify_update(recorded: Recorded) -> Update:
    update = Update(recorded.update, identify_gradient(recorded))
    roots = [root for roots in recorded.roots for root in roots]
    loss = {op.index for root in roots for op in recorded.tape.upstream(root)}
    for average in identify_averages(recorded, loss):
        (update.teachers if average.in_loss else update.averages).append(average)
    update.by_itself = written_by_itself(recorded)
    update.normalized = recorded.normalized
    update.named = identify_named(recorded)
    update.told = _told(recorded)
    _weights(recorded, update)
    update.optimized = _optimized(recorded)
    own = [parameter for parameter in recorded.tape.unowned if (op := recorded.tape.origin(parameter)) and op.index in loss]
    update.network = tuple(Samples(own[:NETWORKS_OWN]).rows.abs().sum(1).tolist())
    if recorded.copies is not None:
        recorded.copies.look(recorded.tape, loss)
    return update


def _weights(recorded: Recorded, update: Update) -> None:
    """What changed the weights outside of the step. Numbers without a gradient are not trained, such as averages among the
    parameters."""
    step = next((at for at, what in recorded.events if what == "step"), len(recorded.tape.ops))
    at_step = recorded.weights[-2] if len(recorded.weights) > 1 else recorded.at_start
    if recorded.has_closure:  # whose passes move them, within the step
        return
    start, now, trained = recorded.at_start.rows, at_step.rows, recorded.at_step.rows != 0
    update.weights_moved = far(now.where(trained, start), start)
    if recorded.copies is not None and len(recorded.copies.starts) == len(now):
        update.weights_put_back = bool((now == recorded.copies.starts)[now != start].all())
    update.weights_written_by = _writers(recorded, 0, step)


def _writers(recorded: Recorded, begin: int, end: int) -> tuple[str, ...]:
    """The operations that wrote to weights, whether any number is another one then or not."""
    return tuple(dict.fromkeys(op.name for op in recorded.tape.ops[begin:end] if "trained" in op.changes))


def _told(recorded: Recorded) -> ToldUpdate | None:
    if recorded.told is None or recorded.at_end is None:
        return None
    start, first, at_step, after = recorded.at_start, recorded.weights[0], *recorded.weights[-2:]
    steps = [(start, first), (first, at_step), (after, recorded.at_end)]
    places = [at for at, _ in recorded.events]
    moved = [far(now.rows, old.rows) for old, now in steps]
    own = {id(p): number for number, group in enumerate(recorded.optimizer.param_groups) for p in group["params"]}
    every = recorded.all_parameters
    trained = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
    matrices = [p.detach() for p in trained.values() if p.ndim > 1]
    lengths = [torch.linalg.vector_norm(m.flatten(1).float(), dim=1) * (len(m) / m.numel()) ** 0.5 for m in matrices]
    rows = torch.cat(lengths) if lengths else torch.ones(1)
    return ToldUpdate(
        limit=recorded.told.limit,
        limit_taken=recorded.told.limit_taken,
        norm=recorded.told.norm,
        before_pass=moved[0],
        before_step=moved[1],
        after_step=moved[2],
        written=(
            _writers(recorded, 0, places[0]),
            _writers(recorded, places[0], places[-2]),
            _writers(recorded, places[-1], len(recorded.tape.ops)),
        ),
        after_step_in_rows=_far_in_rows(recorded, after.rows, recorded.at_end.rows),
        rows=float((rows - 1).abs().max()),
        trained=tuple(trained),
        frozen=tuple(name for name in every if name not in trained),
        in_groups=tuple(own.get(id(parameter), -1) for parameter in trained.values()),
        matrices=tuple(parameter.ndim > 1 for parameter in trained.values()),
        dtypes=tuple(dict.fromkeys(parameter.dtype for parameter in every.values())),
        dropout=recorded.dropout,
        training=recorded.training,
    )


def _far_in_rows(recorded: Recorded, before: Tensor, after: Tensor) -> float:
    """How far the numbers of a sample went, each row of a matrix being made as long as it is afterwards."""
    strides = [max(1, parameter.numel() // SAMPLED) for parameter in recorded.parameters]
    lengths = [parameter.numel() // max(1, len(parameter)) if parameter.ndim > 1 else 0 for parameter in recorded.parameters]
    stride, length = torch.tensor(strides)[:, None], torch.tensor(lengths)[:, None]
    row = torch.arange(SAMPLED) * stride // length.clamp(min=1)
    row = (row.diff(dim=1, prepend=row[:, :1]) != 0).cumsum(1)  # counted among those that a number is of
    sums = (torch.zeros_like(before).scatter_add(1, row, before * other) for other in (after, before))
    products, squares = (one.gather(1, row) for one in sums)
    return far(after, torch.where(length > 0, before * products / squares.clamp(min=1e-30), before))


def _optimized(recorded: Recorded) -> Optimized:
    optimizer = recorded.optimizer
    settings = [{name: group[name] for name in SETTINGS if name in group} for group in optimizer.param_groups]
    found = Optimized(type(optimizer).__name__, settings)
    if len(recorded.weights) < 2:
        return found
    before, after = recorded.weights[-2:]
    gone = (after.rows - before.rows).square().sum(1) / before.sizes
    least = torch.tensor([len(p) / (3 * p.numel()) if p.ndim > 1 and p.numel() else torch.nan for p in recorded.parameters])
    known = (before.rows != after.rows).any(1) & ~least.isnan()
    own = torch.maximum(before.rows.square().sum(1) / before.sizes, least)
    sizes = (gone / own)[known].sqrt().sort().values
    is_half = torch.tensor([p.dtype in (torch.float16, torch.bfloat16) for p in recorded.parameters])
    counts = is_half[:, None] & (recorded.at_step.rows != 0) & (before.rows != 0)
    found.off = off_formula(recorded)
    steps = recorded.state.get("step")
    found.counted = () if steps is None else tuple(sorted({int(step) for step in steps.flat}))
    found.size = float(sizes[len(sizes) // 2]) if len(sizes) else 0.0
    found.stuck = float((before.rows == after.rows)[counts].double().mean()) if bool(counts.any()) else None
    return found

"""What was seen of an update: tensors of the training, detached, and samples and digests of larger ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch


@dataclass
class Call:
    """One forward pass of a module."""

    inputs: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...] = ()
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # of the loss, by the output's place
    training: bool = True
    randomness: torch.Tensor | None = None  # state of torch's generator when it began
    autocast: torch.dtype | None = None  # in which its layers compute; None: no autocast


@dataclass
class MicroStep:
    calls: dict[str, Call] = field(default_factory=dict)  # by the name of the module; the first pass of each
    batch: dict[str, Any] = field(default_factory=dict)  # what the loop told: the loader's batch, what was drawn
    gradient_before: torch.Tensor | None = None  # sampled, [n]; None where no parameter had one
    gradient_after: torch.Tensor | None = None
    finished: bool = False  # its backward pass is over


@dataclass
class Step:
    """The optimizer around its step; vectors are sampled, [n]."""

    gradient: torch.Tensor
    gradient_norm: torch.Tensor  # of all parameters, 0-dim
    before: torch.Tensor
    state_before: dict[str, torch.Tensor]
    groups: list[dict[str, Any]]  # hyperparameters of the parameter groups
    group_of: torch.Tensor  # of each element, int64 [n]; -1: in none
    optimizer: str
    after: torch.Tensor | None = None
    state_after: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: int = 1  # how often a step was made

    @property
    def rate(self) -> float:
        """The learning rate, of the first group."""
        return float(self.groups[0]["lr"])

    @property
    def inside(self) -> torch.Tensor | slice:
        """Which elements the optimizer has, bool [n]; a slice where it has all, which takes no time."""
        inside = self.group_of >= 0
        return slice(None) if bool(inside.all()) else inside


@dataclass
class Update:
    """`step`: updates finished before it. Digests are of all weights, averages sampled."""

    step: int
    micro_steps: list[MicroStep] = field(default_factory=list)
    left_over: torch.Tensor | None = None  # norm of the gradients that stood there before the first forward pass
    digest_begun: torch.Tensor | None = None  # when it began
    digest_first: torch.Tensor | None = None  # at the first forward pass
    optimizer_step: Step | None = None
    told_norm: torch.Tensor | None = None  # of its gradient before it is clipped, as the loop says, 0-dim
    digest_step: torch.Tensor | None = None  # just before the step
    network: dict[str, torch.Tensor] | None = None  # its parameters and buffers in the first forward pass, to ask it again
    not_asked: str = ""  # why not
    digest_stepped: torch.Tensor | None = None  # when the step and what belongs to it are over
    weights: torch.Tensor | None = None  # sampled, then
    row_sizes: torch.Tensor | None = None  # root mean squares of the rows of all matrices, then
    averages_before: dict[str, torch.Tensor] = field(default_factory=dict)
    averages: dict[str, torch.Tensor] = field(default_factory=dict)
    digest_last: torch.Tensor | None = None


def tensors_in(output: Any) -> tuple[torch.Tensor, ...]:
    """Those that a module gives: alone, in a sequence, or in a mapping as diffusers' outputs are."""
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else (output,)
    return tuple(value for value in values if isinstance(value, torch.Tensor))


def on_cpu(value: Any) -> Any:
    """What was seen, with all of its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {name: on_cpu(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_cpu(part) for part in value)
    if isinstance(value, (Update, MicroStep, Call, Step)):
        return replace(value, **{part.name: on_cpu(getattr(value, part.name)) for part in fields(value)})
    return value

"""One recorded update: what happened when, and some numbers of the weights and gradients at each event."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steady_doctor.record.copies import Copies
from steady_doctor.record.modules import Modules
from steady_doctor.record.tape import Op, Tape, sample

ONE_SIZE = 1e-3  # spread of the sizes of rows that are normalized, over their mean


@dataclass
class Whole:
    """Of the whole gradients at the step, not of some numbers of each."""

    zero: list[bool] = field(default_factory=list)  # of each parameter: whether its gradient is zero, or there is none
    norm: float = 0.0
    finite: bool = True
    ends: tuple[float, float] = (0.0, 0.0)  # the smallest and the largest number
    at_ends: tuple[int, int] = (0, 0)  # numbers that are equal to them
    count: int = 0

    @classmethod
    def of(cls, gradients: list[Tensor | None]) -> "Whole":
        known = [g.detach() for g in gradients if g is not None and g.layout is torch.strided and g.numel()]
        if not known:
            return cls([True] * len(gradients))
        device = known[0].device
        each = torch.stack([torch.stack([*torch.aminmax(g), g.float().norm()]).double().to(device) for g in known]).cpu()
        low, high = float(each[:, 0].min()), float(each[:, 1].max())
        at = torch.stack([torch.stack([(g == low).sum(), (g == high).sum()]).to(device) for g in known]).sum(0).tolist()
        rows = iter(each)
        zero = [g is None or g.layout is not torch.strided or not g.numel() or not bool(next(rows).any()) for g in gradients]
        finite = bool(torch.isfinite(each).all())
        count = sum(g.numel() for g in known)
        return cls(zero, float(each[:, 2].norm()), finite, (low, high), (at[0], at[1]), count)


class Recorded:
    """One recorded update: its tape, from the end of the step before to the end of its own step, and some numbers of each
    parameter and gradient at the events between."""

    def __init__(self, tape: Tape, optimizer: Optimizer, update: int, copies: Copies | None = None):
        self.tape, self.optimizer, self.update, self.copies = tape, optimizer, update, copies
        self.parameters = parameters_of(optimizer)
        self.events: list[tuple[int, str]] = []  # (length of the tape, "backward", "step" or "stepped")
        self.at_start = self._weights()
        self.weights: list[list[Tensor]] = []  # before the first forward pass was differentiated, before the step, after it
        self.before: list[list[Tensor | None]] = []  # gradients before each backward pass
        self.after: list[list[Tensor | None]] = []  # and after it
        self.at_step: list[Tensor | None] = []  # what the optimizer got
        self.roots: list[list[Op]] = []  # what each backward pass differentiated
        self.gradients = Whole()
        self.clips: list[bool] = []  # of each call that clips: whether it got a gradient
        self.unowned = 0  # parameters that got a gradient, and that no optimizer has
        self.state: list[dict[str, Any]] = []  # of the optimizer before the step: of each parameter, some numbers
        self.normalized = False  # what was changed outside of the step has rows of one size
        self.left_to_optimizer = False  # to leave out this step where gradients are not finite
        self.no_gradient = 0  # bits of the parameters that want a gradient, and got one of exactly 0 there, or none
        self.finite: list[bool] = []  # of what was differentiated
        self.modules = Modules(self.parameters)
        self.at_end: list[Tensor] | None = None  # weights at the end of an update that its loop ends itself
        self.told: Any = None  # see `driven.Told`; the following are of a loop that tells, too
        self.names: list[str] = []  # of the parameters
        self.averaged: list[bool] = []  # which of them averages are to have
        self.all_parameters: dict[str, Tensor] = {}  # of the network, trained or not
        self.averages: dict[str, tuple[list[Tensor | None], list[Tensor | None]]] = {}  # by name, before and after the update
        self.dropout, self.training = 0.0, True
        self.kept: list[Tensor] = []  # the whole weights at the start, of a small network
        self.handled: list[tuple[Any, int]] = []  # what a dataset did in this process to each batch, and the batch's size
        self.datasets: dict[int, int] = {}  # number of a batch of a loader, of the newest ones: the id of its dataset
        self.loads = self.loaded_at = 0  # batches that loaders have returned so far, and the update before the newest
        tape.known((p.grad for p in self.parameters if p.grad is not None), "gradient")

    def before_backward(self, roots: list[Tensor]) -> None:
        self.events.append((len(self.tape.ops), "backward"))
        self.weights.append(self._weights())
        self.before.append(self._gradients())
        for root in roots:
            self.tape.root(root)
            self.finite.append(bool(torch.isfinite(root).all()))
        self.roots.append([op for root in roots if (op := self.tape.op_of(root)) is not None])

    def after_backward(self) -> None:
        self.after.append(self._gradients())
        if self.at_step:  # a closure's, within the step
            self._look_at_gradients()
        self.tape.known((p.grad for p in self.parameters if p.grad is not None), "gradient")

    def clipped(self, parameters: list[Tensor]) -> None:
        self.clips.append(any(parameter.grad is not None for parameter in parameters))

    def before_step(self, owned: set[int]) -> None:
        """`owned`: ids of the parameters of all optimizers."""
        self.left_to_optimizer = hasattr(self.optimizer, "found_inf")
        self.events.append((len(self.tape.ops), "step"))
        self.weights.append(self._weights())
        self._look_at_gradients()
        wanting = {id(p): p for p in self.tape.unowned if id(p) not in owned and p.grad is not None}
        self.unowned = sum(bool(parameter.grad.any()) for parameter in wanting.values())  # type: ignore[union-attr]
        self.normalized = self._is_normalized()
        self.state = [_numbers(self.optimizer.state.get(parameter, {})) for parameter in self.parameters]
        states = (x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
        self.tape.known(states, "state")

    def after_step(self) -> None:
        self.events.append((len(self.tape.ops), "stepped"))
        self.weights.append(self._weights())

    def _look_at_gradients(self) -> None:
        self.at_step = self._gradients()
        self.gradients = Whole.of([parameter.grad for parameter in self.parameters])
        for place, (parameter, is_zero) in enumerate(zip(self.parameters, self.gradients.zero)):
            if parameter.requires_grad and is_zero:
                self.no_gradient |= 1 << place

    def _is_normalized(self) -> bool:
        """Whether each weight that is no longer the one of the step before has rows of one size, as some networks keep them."""
        pairs = zip(self.parameters, self.at_start, self.weights[-1])
        moved = [parameter for parameter, old, now in pairs if parameter.ndim > 1 and not torch.equal(old, now)]
        rows = [parameter.detach().flatten(1).float().norm(dim=1) for parameter in moved if len(parameter) > 1]
        return bool(rows) and all(float(sizes.std()) < ONE_SIZE * float(sizes.mean()) for sizes in rows)

    def _weights(self) -> list[Tensor]:
        return [sample(parameter) for parameter in self.parameters]

    def _gradients(self) -> list[Tensor | None]:
        return [None if parameter.grad is None else sample(parameter.grad) for parameter in self.parameters]


def _numbers(state: dict[str, Any]) -> dict[str, Any]:
    """Some numbers of each tensor of the optimizer's state of one parameter."""
    return {name: sample(x) if isinstance(x, Tensor) else x for name, x in state.items() if isinstance(x, (Tensor, int, float))}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

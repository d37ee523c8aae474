"""One recorded update: what happened when, and some numbers of the weights and gradients at each event."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steady_doctor.record.by_hand import ByHand
from steady_doctor.record.copies import Copies
from steady_doctor.record.modules import Modules
from steady_doctor.record.samples import Samples
from steady_doctor.record.tape import Op, Tape

ROWS = 4
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
        are_known = [g is None or g.layout is torch.strided for g in gradients]  # sparse ones are not looked at
        if not known:
            return cls(are_known)
        host = len({g.device for g in known}) > 1
        lows, highs = zip(*(torch.aminmax(g) for g in known))
        norms = [torch.linalg.vector_norm(g, dtype=_wide(g.dtype)) for g in known]
        each = torch.stack([x.cpu() if host else x for x in (*lows, *highs, *norms)]).cpu().double().reshape(3, -1)
        low, high = each[0].min(), each[1].max()
        reach = [[g for g, one in zip(known, row.tolist()) if one == end] for row, end in zip(each, (low, high))]
        ends = float(low), float(high)
        at = [_equal(those, end) if end else 0 for those, end in zip(reach, ends)]
        some = iter(each.any(0).tolist())
        zero = [known and (g is None or not g.numel() or not next(some)) for g, known in zip(gradients, are_known)]
        count = sum(g.numel() for g in known)
        return cls(zero, float(each[2].norm()), bool(torch.isfinite(each).all()), ends, (at[0], at[1]), count)


def _equal(gradients: list[Tensor], end: float) -> int:
    """How many numbers are this one; 0 where all stand in a few rows, whose inputs may be the same."""
    are = [gradient == end for gradient in gradients]
    rows = [int(one.reshape(len(one), -1).any(1).sum()) for one in are if one.ndim]
    return sum(int(one.sum()) for one in are) if max(rows, default=0) >= ROWS else 0


@dataclass
class Call:
    """Of the network, with gradients."""

    got: Op | None
    told: dict[str, Tensor]  # numbers among its arguments, [1] or [B]
    gave: Op | None = None


class Recorded:
    """One recorded update: its tape, from the end of the step before to the end of its own step, and some numbers of each
    parameter and gradient at the events between."""

    def __init__(
        self,
        tape: Tape,
        optimizer: Optimizer | ByHand,
        update: int,
        copies: Copies | None = None,
        computing: list[Tensor] | None = None,
    ):
        self.tape, self.optimizer, self.update, self.copies = tape, optimizer, update, copies
        self.parameters = parameters_of(optimizer)
        self.computing = computing or self.parameters  # what the network computes with
        self._given: list[Tensor | None] = [None] * len(self.parameters)  # gradients that the script holds itself
        self.events: list[tuple[int, str]] = []  # (length of the tape, "backward", "step" or "stepped")
        self.at_start = Samples(self.parameters)
        self.weights: list[Samples] = []  # before the first forward pass was differentiated, before the step, after it
        self.before: list[Samples] = []  # gradients before each backward pass
        self.after: list[Samples] = []  # and after it
        self.at_step = Samples([])  # what the optimizer got
        self.roots: list[list[Op]] = []  # what each backward pass differentiated
        self.gradients = Whole()
        self.clips: list[bool] = []  # of each call that clips: whether it got a gradient
        self.unowned = 0  # parameters that got a gradient, and that no optimizer has
        self.state: dict[str, Samples] = {}  # of the optimizer before the step, by name
        self.has_closure = False
        self.normalized = False  # what was changed outside of the step has rows of one size
        self.left_to_optimizer = False  # to leave out this step where gradients are not finite
        self.no_gradient = 0  # bits of the parameters that want a gradient, and got one of exactly 0 there, or none
        self.finite: list[Tensor] = []  # bool: of what was differentiated
        self.modules = Modules(self.computing)
        self.returned = 0  # bits of the parameters that what these return depends on
        self.at_end: Samples | None = None  # weights at the end of an update that its loop ends itself
        self.told: Any = None  # see `driven.Told`; the following are of a loop that tells, too
        self.names: list[str] = []  # of the parameters
        self.averaged: list[bool] = []  # which of them averages are to have
        self.all_parameters: dict[str, Tensor] = {}  # of the network, trained or not
        self.averages: dict[str, list[Samples]] = {}  # by name, before and after the update
        self.dropout, self.training = 0.0, True
        self.kept: list[Tensor] = []  # the whole weights at the start, of a small network
        self.is_over = False  # what was differentiated so far was for the step of another optimizer
        self.calls: list[Call] = []  # of the network
        self.handled: list[tuple[Any, int]] = []  # what a dataset did in this process to each batch, and the batch's size
        self.datasets: dict[int, int] = {}  # number of a batch of a loader, of the newest ones: the id of its dataset
        self.loads = self.loaded_at = 0  # batches that loaders have returned so far, and the update before the newest
        self.stood = Samples([parameter.grad for parameter in self.computing])  # gradients, when the update began
        self._know_gradients()

    def _know_gradients(self) -> None:
        self.tape.known((p.grad for p in self.computing if p.grad is not None), "gradient")

    def copied(self) -> list[Tensor] | None:
        """What the network computes with, in the order of the optimizer's parameters, where it has none of these, but copies of
        them that are made after each step, as in half precision."""
        got_none = not bool(self.at_step.there.any())  # copies that are forgotten, and stand still
        if not self.roots or got_none or any(root.uses for roots in self.roots for root in roots):
            return None
        left = list({id(parameter): parameter for parameter in self.tape.unowned}.values())
        stands = Samples(left).rows
        found: list[Tensor | None] = []
        for parameter, row in zip(self.parameters, self.at_start.rows):
            free = (k for k, p in enumerate(left) if p.shape == parameter.shape and all(p is not other for other in found))
            place = next((k for k in free if torch.equal(_rounded(row, left[k]), stands[k])), None)
            found.append(None if place is None else left[place])
        if 2 * sum(one is not None for one in found) < max(len(left), len(found)):
            return None
        return [parameter if one is None else one for one, parameter in zip(found, self.parameters)]

    def still_copied(self) -> bool:
        """Whether the network computes with what the optimizer's parameters are, as far as its precision goes."""
        if self.computing is self.parameters:
            return True
        known = zip(self.parameters, self.at_start.rows, self.computing, Samples(self.computing).rows)
        return all(own is copy or torch.equal(_rounded(row, copy), stands) for own, row, copy, stands in known)

    def asks_again(self) -> bool:
        """Whether gradients of several losses of one forward pass were asked for: which of them make the step is not known."""
        if len(self.roots) < 2 or all(gradient is None for gradient in self._given):
            return False
        ways = [{op for root in roots for op in self.tape.upstream(root) if op.trained and op.content} for roots in self.roots]
        return any(not ways[i].isdisjoint(other) for i in range(len(ways)) for other in ways[:i])

    def stepped_other(self) -> None:
        """Another optimizer makes a step."""
        self.is_over = bool(self.roots)

    def before_backward(self, roots: list[Tensor], is_held: bool = False) -> None:
        """`is_held`: what it gives will not stand at the parameters."""
        was_held = any(gradient is not None for gradient in self._given)  # then that was no part of the step
        if self.is_over or (was_held and not is_held):  # and another pass begins
            self._given = [None] * len(self.parameters)
            for passes in (self.events, self.weights, self.before, self.after, self.roots, self.tape.roots, self.finite):
                passes.clear()
            self.is_over = False
        self.events.append((len(self.tape.ops), "backward"))
        self.weights.append(Samples(self.parameters))
        self.before.append(Samples(self._given if is_held else self._of(self.computing)))
        for root in roots:
            self.tape.root(root)
            self.finite.append(torch.isfinite(root).all())
        self.roots.append([op for root in roots if (op := self.tape.op_of(root)) is not None])

    def after_backward(self, given: dict[int, Tensor] | None = None) -> None:
        """`given`: by the id of a parameter, gradients that do not stand at it."""
        if given is not None:
            known = [(g, given.get(id(parameter))) for g, parameter in zip(self._given, self.computing)]
            self._given = [new if old is None or new is None else old + new for old, new in known]
            self.tape.known((gradient for gradient in given.values() if gradient is not None), "asked")
        self.after.append(Samples(self._of(self.computing) if given is None else self._given))
        if isinstance(self.optimizer, ByHand) or any(what == "step" for _, what in self.events):  # a closure's, within the step
            self.no_gradient = 0
            self._look_at_gradients()
        self._know_gradients()

    def clipped(self, parameters: list[Tensor]) -> None:
        self.clips.append(any(parameter.grad is not None for parameter in parameters))

    def before_step(self, owned: set[int], has_closure: bool) -> None:
        """`owned`: ids of the parameters of all optimizers. A closure's passes are recorded within the step."""
        self.left_to_optimizer = hasattr(self.optimizer, "found_inf")
        self.has_closure = has_closure
        self.events.append((len(self.tape.ops), "step"))
        self.weights.append(Samples(self.parameters))
        self._look_at_gradients()
        wanting = {id(p): p for p in self.tape.unowned if id(p) not in owned and p.grad is not None}
        given = [p.grad.any() for p in wanting.values()]  # type: ignore[union-attr]
        self.unowned = sum(torch.stack(given).tolist()) if given else 0
        self.normalized = self._is_normalized()
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        names = dict.fromkeys(name for state in states for name, x in state.items() if isinstance(x, (Tensor, int, float)))
        self.state = {name: Samples([_number(state.get(name)) for state in states]) for name in names}
        if has_closure:
            self.tape.known((x for state in states for x in state.values() if isinstance(x, Tensor)), "state")

    def after_step(self) -> None:
        self.events.append((len(self.tape.ops), "stepped"))
        self.weights.append(Samples(self.parameters))

    def stepped_by_hand(self) -> None:
        """The script has written to the weights since the last backward pass."""
        last = self.events[-1][0]
        ops = self.tape.ops
        step = next((place for place in range(last, len(ops)) if "trained" in ops[place].changes), len(ops))
        self.events += [(step, "step"), (len(ops), "stepped")]
        self.at_start = self.weights[0]
        self.weights += [self.weights[-1], Samples(self.parameters)]

    def _look_at_gradients(self) -> None:
        gradients = self._of(self.parameters)
        self.at_step, self.gradients = Samples(gradients), Whole.of(gradients)
        for place, (parameter, is_zero) in enumerate(zip(self.computing, self.gradients.zero)):
            if parameter.requires_grad and is_zero:
                self.no_gradient |= 1 << place

    def _is_normalized(self) -> bool:
        """Whether each weight that is no longer the one of the step before has rows of one size, as some networks keep them."""
        moved = (self.at_start.rows != self.weights[-1].rows).any(1).tolist()
        matrices = [p.detach() for p, is_other in zip(self.parameters, moved) if is_other and p.ndim > 1 and len(p) > 1]
        rows = [torch.linalg.vector_norm(p.flatten(1), dim=1, dtype=_wide(p.dtype)) for p in matrices]
        return bool(rows) and bool(torch.stack([size.std() < ONE_SIZE * size.mean() for size in rows]).all())

    def _of(self, parameters: list[Tensor]) -> list[Tensor | None]:
        """Their gradients."""
        held = self._given if isinstance(self.optimizer, ByHand) else [None] * len(parameters)
        return [parameter.grad if given is None else given for parameter, given in zip(parameters, held)]


def _rounded(row: Tensor, like: Tensor) -> Tensor:
    return row.to(like.dtype).double()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _number(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else torch.tensor(float(value)) if isinstance(value, (int, float)) else None


def parameters_of(optimizer: Optimizer | ByHand) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

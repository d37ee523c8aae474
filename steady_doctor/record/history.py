"""What is noted at each update, recorded or not: a few numbers, in some microseconds."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

MOST_RATES = 4096  # updates whose rates are kept; then only every second one, and so on
MOST_STATES = 1 << 16  # states of a random generator that are kept
MOST_UPDATES = 1024  # that are kept of one kind
MOVED = 2e-5  # of the size of the weights; a merge that is undone changes 1e-7
LENGTHS = ("T_max", "total_iters", "total_steps", "num_training_steps")  # what the length of a schedule is called
PROBED = 16  # numbers of each of the weights that are compared


@dataclass(eq=False)
class Schedule:
    """One of torch's schedules of the learning rate, and how often it was stepped."""

    made: LRScheduler
    kind: str
    length: int | None  # in steps of its own; None where it has no end that is known
    own: bool  # of the optimizer that is watched, not of another one with the same parameters
    steps: int = 0


class History:
    """Of the optimizer that trains the network; updates count from 1."""

    def __init__(self) -> None:
        self.rates: list[tuple[int, tuple[float, ...]]] = []  # update, learning rate of each group
        self.base: tuple[float, ...] = ()  # what a schedule of torch's multiplies, of each group
        self.moved: list[int] = []  # updates before whose step the weights were no longer those of the step before
        self.repeated: list[tuple[int, int]] = []  # an update and an earlier one with its generator state
        self.without_pass: list[int] = []  # updates without a backward pass since the one before
        self.remade: list[int] = []  # updates by another optimizer of the same parameters than the one before
        self.lost: list[int] = []  # updates before which the optimizer's state had gone
        self.got_any = False  # whether any optimizer's step, of this one or another, found a gradient
        self.left_out = (0, 0)  # the most steps in a row that a GradScaler left out, and of how many the loss was not finite
        self._left_out = (0, 0)  # up to now
        self.batches = 0  # of data loaders
        self.epochs = 0  # times that a data loader came to its end
        self.schedules: list[Schedule] = []
        self.accumulation: int | None = None  # micro steps that Accelerate was told
        self._made: list[LRScheduler] = []
        self.probes = True  # whether a few numbers of the weights are compared
        self._stride = 1
        self._probe: _Probe | None = None
        self._left: Tensor | None = None
        self._unknown: list[tuple[int, Tensor]] = []  # of a GPU, which is not waited for
        self._states: dict[int, int] = {}
        self._state = 0
        self._passes = 0
        self._had_state = False

    def of_another(self) -> "History":
        """What is known beside the optimizer, for another one."""
        new = History()
        new.batches, new.epochs, new._made, new.got_any = self.batches, self.epochs, self._made, self.got_any
        return new

    def made(self, schedule: LRScheduler) -> None:
        if all(schedule is not other for other in self._made):
            self._made.append(schedule)

    def passed(self) -> None:
        """After a backward pass."""
        self._passes += 1

    def scaled(self, is_left_out: bool, loss: Tensor | None) -> None:
        """After a step by a GradScaler, which scaled this loss."""
        steps, broken = self._left_out
        is_broken = is_left_out and loss is not None and not bool(torch.isfinite(loss).all())
        self._left_out = (steps + 1, broken + is_broken) if is_left_out else (0, 0)
        self.left_out = max(self.left_out, self._left_out)

    def before_step(self, optimizer: Optimizer, update: int) -> None:
        if self._had_state and not optimizer.state and (not self.remade or self.remade[-1] != update):
            self.lost.append(update)
        if update % self._stride == 0 or update < 64:
            self.rates.append((update, tuple(_number(group.get("lr")) for group in optimizer.param_groups)))
            if len(self.rates) > MOST_RATES:
                del self.rates[1::2]
                self._stride *= 2
        if not self.probes:
            return
        if self._probe is None:
            self._probe = _Probe(parameter for group in optimizer.param_groups for parameter in group["params"])
        elif self._left is not None:
            self._compare(update, self._probe.now(), self._probe.trained())

    def _compare(self, update: int, now: Tensor | None, trained: Tensor | None) -> None:
        if now is None or trained is None or now.shape != self._left.shape:  # type: ignore[union-attr]
            return
        if now.device.type == "cpu":
            if bool(self._is_other(now, trained)) and bool(torch.isfinite(now).all()):
                self._note_moved(update)
        else:
            self._unknown.append((update, self._is_other(now, trained) & now.isfinite().all()))

    def _is_other(self, now: Tensor, trained: Tensor) -> Tensor:
        """By more than the rounding of a merge that is undone, where there is a gradient."""
        left: Tensor = self._left  # type: ignore[assignment]
        return ((now - left) * trained).norm() > MOVED * left.norm()

    def _note_moved(self, update: int) -> None:
        if len(self.moved) < MOST_UPDATES:
            self.moved.append(update)

    def after_step(self, optimizer: Optimizer, update: int) -> None:
        self._had_state = bool(optimizer.state)
        self._left = None if self._probe is None else self._probe.now()
        if self._passes == 0 and len(self.without_pass) < MOST_UPDATES:
            self.without_pass.append(update)
        self._passes = 0
        self._look_at_generator(update)
        for schedule in self.schedules:
            schedule.steps = int(getattr(schedule.made, "last_epoch", 0))
        if self._made:
            self._know_schedules(optimizer)
        if len(self._unknown) > 256:
            self.settle()

    def settle(self) -> None:
        """Waits for a GPU's comparisons."""
        if self._unknown:
            updates, are_moved = zip(*self._unknown)
            for update, is_moved in zip(updates, torch.stack(are_moved).tolist()):
                if is_moved:
                    self._note_moved(update)
        self._unknown = []

    def _look_at_generator(self, update: int) -> None:
        """A state holds all that was drawn: after two equal ones all goes on alike."""
        state = hash(torch.default_generator.get_state().numpy().tobytes())
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            there = torch.cuda.default_generators[torch.cuda.current_device()]
            state ^= hash(there.get_state().numpy().tobytes())
        is_again = state != self._state and state in self._states  # else the last one again: nothing was drawn
        if is_again and len(self.repeated) < MOST_UPDATES:
            self.repeated.append((update, self._states[state]))
        self._state = state
        if len(self._states) < MOST_STATES:
            self._states.setdefault(state, update)

    def _know_schedules(self, optimizer: Optimizer) -> None:
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        inner = {id(part) for made in self._made for part in getattr(made, "_schedulers", ())}
        for made in self._made:
            of = getattr(made, "optimizer", None)
            if of is None or id(made) in inner:
                continue
            theirs = {id(parameter) for group in of.param_groups for parameter in group["params"]}
            if of is optimizer or theirs == mine:
                steps = int(getattr(made, "last_epoch", 0))
                own = of.param_groups[0] is optimizer.param_groups[0]  # also of an optimizer that wraps it
                self.schedules.append(Schedule(made, type(made).__name__, _length(made), own, steps))
        self._made = []
        self.base = tuple(_number(group.get("initial_lr", 0.0)) for group in optimizer.param_groups)


class _Probe:
    """Some numbers of three weights, where they lie."""

    def __init__(self, parameters: Iterable[Tensor]):
        known = [parameter for parameter in parameters if parameter.ndim > 1 and parameter.is_floating_point()]
        known = [p for p in known if (p.dtype, p.device) == (known[0].dtype, known[0].device)]
        largest = max(known, key=Tensor.numel, default=None)
        chosen = [known[0], known[len(known) // 2], largest] if known else []
        self._weights = list({id(weight): weight for weight in chosen if weight is not None}.values())
        self._places: list[int] = []
        self._views: list[Tensor] = []

    def now(self) -> Tensor | None:
        places = [weight.data_ptr() for weight in self._weights]
        if places != self._places:
            self._places, self._views = places, [view for weight in self._weights for view in _some(weight)]
        return torch.cat(self._views) if self._views else None

    def trained(self) -> Tensor | None:
        """Which of these have a gradient other than 0, bool; None where that is not known."""
        parts = []
        for weight in self._weights:
            gradient = weight.grad
            if gradient is None:
                parts += [torch.zeros(len(part), dtype=torch.bool, device=part.device) for part in _some(weight)]
            elif gradient.layout is not torch.strided or gradient.stride() != weight.stride():
                return None
            else:
                parts += [part != 0 for part in _some(gradient)]
        return torch.cat(parts) if parts else None


def _some(weight: Tensor) -> Iterable[Tensor]:
    if weight.layout is torch.strided and weight.untyped_storage().nbytes() >= weight.numel() * weight.itemsize > 0:
        count = min(PROBED, weight.numel())
        yield weight.detach().as_strided((count,), (1,), weight.storage_offset() + (weight.numel() - count) // 2)


def _number(rate: Any) -> float:
    """A rate on a GPU is not waited for."""
    if isinstance(rate, Tensor):
        return float(rate) if rate.device.type == "cpu" else float("nan")
    return float(rate) if rate is not None else float("nan")


def _length(schedule: LRScheduler) -> int | None:
    """In steps of its own, as its settings say. A warm-up alone has none: what follows it is constant."""
    if isinstance(schedule, SequentialLR):
        last = _length(schedule._schedulers[-1])
        return None if last is None else int(schedule._milestones[-1]) + last
    is_rising = isinstance(schedule, LinearLR) and schedule.end_factor >= schedule.start_factor
    if is_rising or hasattr(schedule, "factor"):
        return None
    for known in (vars(schedule), *map(_captured, getattr(schedule, "lr_lambdas", ()))):
        if found := next((known[name] for name in LENGTHS if isinstance(known.get(name), int)), None):
            return int(found)
    return None


def _captured(function: Any) -> dict[str, Any]:
    """The variables that a function was made with."""
    known = dict(getattr(function, "keywords", None) or {})
    inner = getattr(function, "func", function)
    code, cells = getattr(inner, "__code__", None), getattr(inner, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars if code is not None else (), cells):
        try:
            known.setdefault(name, cell.cell_contents)
        except ValueError:  # empty
            continue
    return known

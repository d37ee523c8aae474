"""Makes a tape of some updates, by torch's hooks of optimizers and by wrapping its backward passes and data loaders."""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from steady_doctor.record.loads import Handling, Loads
from steady_doctor.record.modules import Modules
from steady_doctor.record.tape import Tape, sample
from steady_doctor.record.wrapping import compile_, wrap


def recorded_updates() -> Iterator[int]:
    """The Fibonacci numbers from 2 on: often at first, where faults can be cheap, and seldom later."""
    one, two = 2, 3
    while True:
        yield one
        one, two = two, one + two


class Session:
    """Watches the optimizers of this process. `judge` is called with each recorded update, and keeps what it needs of it.

    Nothing here raises into the script: an error of the doctor's is kept in `failure`, ends the recording, and `stopped` is
    called with it. `optimizer`: the one whose updates count, where it is known; else it is the one with most parameters.
    """

    def __init__(
        self,
        judge: Callable[["Recorded"], None],
        stopped: Callable[[BaseException], None] = lambda error: None,
        optimizer: Optimizer | None = None,
    ):
        self.updates = 0
        self.failure: BaseException | None = None
        self.tape: Tape | None = None
        self.loads = Loads()
        self._judge, self._stopped = judge, stopped
        self._due = recorded_updates()
        self._next = next(self._due)
        self._main, self._is_known = optimizer, optimizer is not None
        self._made: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # updates of each
        self._turned_from: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._process = os.getpid()
        self._recorded: Recorded | None = None
        self._seeing = ExitStack()  # hooks of a recorded update

    def install(self) -> ExitStack:
        """Closing the result takes all hooks away."""
        hooks = ExitStack()
        hooks.callback(self._stop)
        hooks.callback(
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._safely(self._before_step, optimizer)).remove
        )
        hooks.callback(
            register_optimizer_step_post_hook(lambda optimizer, *_: self._safely(self._after_step, optimizer)).remove
        )
        wrap(hooks, torch.autograd, "backward", self._backward)
        wrap(hooks, _BaseDataLoaderIter, "__next__", self._load)
        wrap(hooks, torch, "compile", compile_)
        return hooks

    def _safely(self, look: Callable, *arguments: Any) -> None:
        if self.failure is not None or os.getpid() != self._process:
            return
        try:
            with self._pause():
                look(*arguments)
        except Exception as error:
            self.failure = error
            self._stop()
            self._stopped(error)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        tape = self.tape
        if tape is not None:
            tape.paused += 1
        try:
            yield
        finally:
            if tape is not None:
                tape.paused -= 1

    def _stop(self) -> None:
        self._recorded = None
        if self.tape is not None:
            self.tape.__exit__(None, None, None)
            self.tape = None
        self._seeing.close()

    def _backward(self, original: Callable, tensors: Any, *arguments: Any, **options: Any) -> Any:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._safely(self._before_backward, roots)
        try:
            with self._pause():
                return original(tensors, *arguments, **options)
        finally:
            self._safely(self._after_backward)

    def _before_backward(self, roots: list[Tensor]) -> None:
        if self.tape is not None and self._recorded is not None:
            self._recorded.before_backward(roots)

    def _after_backward(self) -> None:
        if self._recorded is not None:
            self._recorded.after_backward()

    def _load(self, original: Callable, iterator: Any) -> Any:
        handling = Handling() if self._recorded is not None else nullcontext()
        with self._pause(), handling:
            batch = original(iterator)
        self._safely(self._after_load, iterator, batch, handling)
        return batch

    def turn(self) -> bool:
        """Goes on with another optimizer, from the largest to the smallest, as this one does not train a denoiser: it may be
        a discriminator's. Returns whether there is one; else the largest one stays."""
        if self._is_known or self._main is None:
            return False
        self._turned_from.add(self._main)
        left = [optimizer for optimizer in self._made if optimizer not in self._turned_from]
        self._main, self._is_known = max(left or self._made, key=_size), not left
        self.updates = self._made[self._main]
        return bool(left)

    def _after_load(self, iterator: Any, batch: Any, handling: Any) -> None:
        number = self.loads.count
        tensors = self.loads.add(iterator, batch, self.updates)
        if self.tape is not None and self._recorded is not None:
            self.tape.known(tensors, "data", number)
            self._recorded.handled.append((handling, max((len(x) for x in tensors if x.ndim > 2), default=0)))

    def _before_step(self, optimizer: Optimizer) -> None:
        if optimizer not in self._made:
            self._made[optimizer] = 0
            if self._main is None or (not self._is_known and _size(optimizer) > _size(self._main)):
                self._main, self.updates = optimizer, 0
        if optimizer is self._main and self._recorded is not None:
            self._recorded.before_step()

    def _after_step(self, optimizer: Optimizer) -> None:
        self._made[optimizer] = self._made.get(optimizer, 0) + 1
        if optimizer is not self._main:
            return
        if self._recorded is not None:
            self._recorded.after_step()
        self.updates = self._made[optimizer]
        if self.tape is not None and self._recorded is not None:
            recorded = self._recorded
            recorded.loads, recorded.loaded_at = self.loads.count, self.loads.last_update
            recorded.datasets = self.loads.datasets
            self._stop()
            self._judge(recorded)
        if self.updates + 1 >= self._next:
            while self.updates + 1 >= self._next:
                self._next = next(self._due)
            self.tape = Tape(parameters_of(self._main))
            self._recorded = Recorded(self.tape, self._main, self.updates + 1)
            for tensor, number in self.loads.alive():
                self.tape.known([tensor], "data", number)
            see = self._recorded.modules.see
            self._seeing.callback(register_module_forward_pre_hook(lambda module, _: self._safely(see, module)).remove)
            self.tape.__enter__()


class Recorded:
    """One recorded update: its tape, from the end of the step before to the end of its own step, and some numbers of each
    parameter and gradient at the events between."""

    def __init__(self, tape: Tape, optimizer: Optimizer, update: int):
        self.tape, self.optimizer, self.update = tape, optimizer, update
        self.parameters = parameters_of(optimizer)
        self.events: list[tuple[int, str]] = []  # (length of the tape, "backward", "step" or "stepped")
        self.at_start = self._weights()
        self.weights: list[list[Tensor]] = []  # before the first forward pass was differentiated, before the step, after it
        self.before: list[list[Tensor | None]] = []  # gradients before each backward pass
        self.after: list[list[Tensor | None]] = []  # and after it
        self.at_step: list[Tensor | None] = []  # what the optimizer got
        self.no_gradient = 0  # bits of the parameters that want a gradient, and got one of exactly 0 there, or none
        self.finite: list[bool] = []  # of what was differentiated
        self.modules = Modules(self.parameters)
        self.handled: list[tuple[Any, int]] = []  # what a dataset did in this process to each batch, and the batch's size
        self.datasets: list[int] = []  # of each batch of a loader: the id of its dataset
        self.loads = self.loaded_at = 0  # batches that loaders have returned so far, and the update before the newest
        tape.known((p.grad for p in self.parameters if p.grad is not None), "gradient")

    def before_backward(self, roots: list[Tensor]) -> None:
        self.events.append((len(self.tape.ops), "backward"))
        self.weights.append(self._weights())
        self.before.append(self._gradients())
        for root in roots:
            self.tape.root(root)
            self.finite.append(bool(torch.isfinite(root).all()))

    def after_backward(self) -> None:
        self.after.append(self._gradients())
        if self.at_step:  # a closure's, within the step
            self.at_step = self._gradients()
        self.tape.known((p.grad for p in self.parameters if p.grad is not None), "gradient")

    def before_step(self) -> None:
        self.events.append((len(self.tape.ops), "step"))
        self.weights.append(self._weights())
        self.at_step = self._gradients()
        for place, parameter in enumerate(self.parameters):
            if parameter.requires_grad and (parameter.grad is None or not bool(parameter.grad.any())):
                self.no_gradient |= 1 << place
        states = (x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
        self.tape.known(states, "state")

    def after_step(self) -> None:
        self.events.append((len(self.tape.ops), "stepped"))
        self.weights.append(self._weights())

    def _weights(self) -> list[Tensor]:
        return [sample(parameter) for parameter in self.parameters]

    def _gradients(self) -> list[Tensor | None]:
        return [None if parameter.grad is None else sample(parameter.grad) for parameter in self.parameters]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _size(optimizer: Optimizer) -> int:
    return sum(parameter.numel() for parameter in parameters_of(optimizer))

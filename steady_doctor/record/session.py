"""Makes a tape of some updates, by torch's hooks of optimizers and by wrapping its backward passes and data loaders."""

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten
from torch.utils.data.dataloader import _BaseDataLoaderIter

from steady_doctor.record.copies import Copies
from steady_doctor.record.history import History
from steady_doctor.record.recorded import Recorded, parameters_of
from steady_doctor.record.tape import Tape


def recorded_updates() -> Iterator[int]:
    """The Fibonacci numbers from 2 on: often at first, where faults can be cheap, and seldom later."""
    one, two = 2, 3
    while True:
        yield one
        one, two = two, one + two


class Session:
    """Watches the optimizers of this process. `judge` is called with each recorded update, and keeps what it needs of it.

    Nothing here raises into the script: an error of the doctor's is kept in `failure`, and ends the recording.
    """

    def __init__(self, judge: Callable[[Recorded], None]):
        self.updates = 0
        self.history = History()
        self.copies: Copies | None = None
        self.failure: BaseException | None = None
        self.tape: Tape | None = None
        self._judge = judge
        self._due = recorded_updates()
        self._next = next(self._due)
        self._main: Optimizer | None = None
        self._process = os.getpid()
        self._recorded: Recorded | None = None
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._inside = 0  # of how many backward passes

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
        _wrap(hooks, torch.autograd, "backward", self._backward)
        _wrap(hooks, _BaseDataLoaderIter, "__next__", self._load)
        _wrap(hooks, Optimizer, "__init__", self._make_optimizer)
        for kind in (lr_scheduler.LRScheduler, lr_scheduler.SequentialLR):
            _wrap(hooks, kind, "__init__", self._make_schedule)
        _wrap(hooks, torch.nn.utils, "clip_grad_norm_", self._clip)
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

    def _backward(self, original: Callable, tensors: Any, *arguments: Any, **options: Any) -> Any:
        if self._inside:  # a checkpoint's, within the script's
            return original(tensors, *arguments, **options)
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._safely(self._before_backward, roots)
        self._inside += 1
        try:
            with self._pause():
                return original(tensors, *arguments, **options)
        finally:
            self._inside -= 1
            self._safely(self._after_backward)

    def _before_backward(self, roots: list[Tensor]) -> None:
        if self.tape is not None and self._recorded is not None:
            self._recorded.before_backward(roots)

    def _after_backward(self) -> None:
        self.history.passed()
        if self._recorded is not None:
            self._recorded.after_backward()

    def _load(self, original: Callable, iterator: Any) -> Any:
        with self._pause():
            try:
                batch = original(iterator)
            except StopIteration:
                self.history.epochs += 1
                raise
            self.history.batches += 1
            if self.tape is not None:
                self.tape.known((x for x in tree_flatten(batch)[0] if isinstance(x, Tensor)), "data")
        return batch

    def _make_optimizer(self, original: Callable, optimizer: Optimizer, *arguments: Any, **options: Any) -> None:
        original(optimizer, *arguments, **options)
        self._optimizers.add(optimizer)

    def _make_schedule(self, original: Callable, schedule: Any, *arguments: Any, **options: Any) -> None:
        original(schedule, *arguments, **options)
        self.history.made(schedule)

    def _clip(self, original: Callable, parameters: Any, *arguments: Any, **options: Any) -> Any:
        recorded = self._recorded
        if recorded is None:
            return original(parameters, *arguments, **options)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._safely(recorded.clipped, parameters)
        return original(parameters, *arguments, **options)

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._main is None or _size(optimizer) > _size(self._main):  # the network's, beside a discriminator's
            self._main = optimizer
        elif optimizer is not self._main and self._is_made_anew(optimizer):
            self._main = optimizer
            self.history.remade.append(self.updates + 1)
            if self._recorded is not None:
                self._recorded.optimizer = optimizer
        if optimizer is not self._main:
            return
        self.history.before_step(optimizer, self.updates + 1)
        if self.copies is None and self.updates == 0:
            self.copies = Copies(parameters_of(optimizer))
        if self._recorded is not None:
            others = (parameter for other in self._optimizers for parameter in parameters_of(other))
            self._recorded.before_step({id(parameter) for parameter in others})

    def _is_made_anew(self, optimizer: Optimizer) -> bool:
        """Whether it has the parameters of the one so far."""
        assert self._main is not None  # noqa: S101
        return [id(p) for p in parameters_of(optimizer)] == [id(p) for p in parameters_of(self._main)]

    def _after_step(self, optimizer: Optimizer) -> None:
        if optimizer is not self._main:
            return
        if self._recorded is not None:
            self._recorded.after_step()
        self.updates += 1
        self.history.after_step(optimizer, self.updates)
        if self.tape is not None and self._recorded is not None:
            recorded = self._recorded
            self._stop()
            self.history.settle()
            self.history.accumulation = _told_micro_steps()
            self._judge(recorded)
        if self.updates + 1 == self._next:
            self._next = next(self._due)
            self.tape = Tape(parameters_of(optimizer))
            self._recorded = Recorded(self.tape, optimizer, self.updates + 1, self.copies)
            self.tape.__enter__()


def _told_micro_steps() -> int | None:
    """What Accelerate was told, where the script has it."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    told = getattr(state, "_shared_state", {}).get("plugin_kwargs", {})
    return told.get("num_steps")


def _size(optimizer: Optimizer) -> int:
    return sum(parameter.numel() for parameter in parameters_of(optimizer))


def _wrap(hooks: ExitStack, owner: Any, name: str, around: Callable) -> None:
    original = vars(owner)[name]

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    setattr(owner, name, wrapped)
    hooks.callback(setattr, owner, name, original)

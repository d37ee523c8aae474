"""Makes a tape of some updates, by torch's hooks of optimizers and by wrapping its backward passes and data loaders."""

import contextlib
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data.dataloader import _BaseDataLoaderIter

from steady_doctor.record.by_hand import ByHand, Weights, asks_of_weights, leaves_of
from steady_doctor.record.copies import Copies
from steady_doctor.record.history import History
from steady_doctor.record.loads import Handling, Loads
from steady_doctor.record.ops import tensors_in
from steady_doctor.record.recorded import Recorded, parameters_of
from steady_doctor.record.stored_weights import StoredWeights
from steady_doctor.record.tape import Tape
from steady_doctor.record.wrapping import compile_, eagerly, hook, without_warning, wrap

SETTLED = 16  # updates, within which Accelerate's settings are read
LATER = 8  # steps of another optimizer, without one of that which is watched, from which on it is what trains now
OBJECTS = 200_000  # Python's, that are new when the garbage collector begins in a recorded update


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

    _looks_for_copies = True
    _forces_eager = True  # in recorded updates

    def __init__(
        self,
        judge: Callable[[Recorded], None],
        stopped: Callable[[BaseException], None] = lambda error: None,
        optimizer: Optimizer | None = None,
    ):
        self.updates = 0
        self.begun = 0  # how often it went on with another optimizer
        self.history = History()
        self.copies: Copies | None = None
        self.went_on = False  # whether an optimizer goes on that another one had taken over from
        # Of the training before this one: its updates, and what is known of them.
        self.earlier: tuple[int, History, Copies | None] | None = None
        self.failure: BaseException | None = None
        self.resting = False  # whether what happens now is no part of the training
        self.tape: Tape | None = None
        self._left: Tape | None = None  # where it is not entered for a while
        self._rests_in_step = False  # as the tape does from before a step to after it
        self.loads = Loads()
        self.stored = StoredWeights()
        self._judge, self._stopped = judge, stopped
        self._due = recorded_updates()
        self._next = next(self._due)
        self._main: Optimizer | ByHand | None = optimizer
        self._is_known = optimizer is not None
        self._may_end = optimizer is None  # whether another training may come after that of the one that is watched
        self._others: weakref.WeakKeyDictionary[Optimizer | ByHand, Copies] = (
            weakref.WeakKeyDictionary()
        )  # before their first step
        self._alone: tuple[int, int] = 0, 0  # the id of the optimizer that made the latest steps, and how many
        self._computing: list[Tensor] | None = None  # what the network has instead of the optimizer's parameters
        self._leaves: list[Tensor] | None = None  # what the newest backward pass asked a gradient of, and as it was then
        self._weights: Weights | None = None
        self._made: weakref.WeakKeyDictionary[Optimizer | ByHand, int] = weakref.WeakKeyDictionary()  # updates of each
        self._before: weakref.WeakSet[Optimizer | ByHand] = weakref.WeakSet()  # that others took over from, the last one
        self._turned_from: weakref.WeakSet[Optimizer | ByHand] = weakref.WeakSet()
        self._process = os.getpid()
        self._recorded: Recorded | None = None
        self._seeing = ExitStack()  # hooks of a recorded update
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._inside = 0  # of how many backward passes
        self._scaled: Tensor | None = None  # the loss that a GradScaler scaled last

    def install(self) -> ExitStack:
        """Closing the result takes all hooks away."""
        hooks = ExitStack()
        hooks.callback(self._stop)
        self._watch_steps(hooks)
        wrap(hooks, _BaseDataLoaderIter, "__next__", self._load)
        wrap(hooks, torch, "compile", compile_)
        without_warning(
            hooks, r"Using `torch\.compile\(module\)` when there are global hooks"
        )  # as there are in recorded updates
        wrap(hooks, Optimizer, "__init__", self._make_optimizer)
        for kind in (lr_scheduler.LRScheduler, lr_scheduler.SequentialLR):
            wrap(hooks, kind, "__init__", self._make_schedule)
        wrap(hooks, torch.nn.utils, "clip_grad_norm_", self._clip)
        wrap(hooks, torch.nn.Module, "load_state_dict", self._load_state)
        wrap(hooks, torch.amp.GradScaler, "scale", self._scale)
        wrap(hooks, torch.amp.GradScaler, "step", self._scaled_step)
        return hooks

    def _watch_steps(self, hooks: ExitStack) -> None:
        """Those of optimizers, and the backward passes before them."""
        for register, look in (
            (register_optimizer_step_pre_hook, self._before_step),
            (register_optimizer_step_post_hook, self._after_step),
        ):
            hook(hooks, register, functools.partial(self._safely, look))
        wrap(hooks, torch.autograd, "backward", self._backward)
        wrap(hooks, torch.autograd, "grad", self._grad)

    def _safely(self, look: Callable, *arguments: Any) -> None:
        if self.failure is not None or self.resting or os.getpid() != self._process:
            return
        try:
            with self._pause():
                look(*arguments)
        except Exception as error:
            self.failure = error
            with contextlib.suppress(Exception):
                self._stop()
            self._stopped(error)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Nothing is recorded within. Where no other mode of torch's stands above the tape, it is left, as each operation takes
        longer there."""
        tape = self.tape
        leaves = tape is not None and not tape.paused and _get_current_dispatch_mode() is tape
        if tape is not None:
            tape.paused += 1
        if tape is not None and leaves:
            tape.__exit__(None, None, None)
            self._left = tape
        try:
            yield
        finally:
            if tape is not None:
                tape.paused -= 1
                if self._left is tape and not tape.paused:  # else it has come to its end within, or rests further
                    self._left = None
                    tape.__enter__()

    def _stop(self) -> None:
        self._recorded = None
        if self.tape is not None:
            if self._left is None:
                self.tape.__exit__(None, None, None)
            self.tape = self._left = None
        self._seeing.close()

    def _backward(self, original: Callable, tensors: Any, *arguments: Any, **options: Any) -> Any:
        if self._inside:  # a checkpoint's, within the script's
            return original(tensors, *arguments, **options)
        tensors = roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._safely(self._before_backward, roots)
        self._inside += 1
        try:
            with self._pause():
                return original(tensors, *arguments, **options)
        finally:
            self._inside -= 1
            self._safely(self._after_backward)

    def _grad(self, original: Callable, outputs: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """The backward pass of a script that holds its gradients itself, and may give them to an optimizer later."""
        outputs, inputs = (list(given) if isinstance(given, Iterator) else given for given in (outputs, inputs))
        roots, weights = (list(given) if isinstance(given, (list, tuple)) else [given] for given in (outputs, inputs))
        creates_graph = bool(options.get("create_graph", arguments[2:3] == (True,)))
        if self._inside or not asks_of_weights(roots, weights, creates_graph) or not self._trains(weights):
            return original(outputs, inputs, *arguments, **options)
        self._safely(self._before_backward, roots, weights)
        self._inside += 1
        try:
            with self._pause():
                gradients = original(outputs, inputs, *arguments, **options)
        finally:
            self._inside -= 1
        self._safely(self._after_backward, {id(weight): gradient for weight, gradient in zip(weights, gradients)})
        return gradients

    def _trains(self, weights: list[Tensor]) -> bool:
        """Whether these are most of what is watched, if anything is: else their gradients are for a weight of a loss."""
        if not isinstance(self._main, Optimizer):
            return True
        given, own = {id(weight) for weight in weights}, self._computing or parameters_of(self._main)
        return 2 * sum(id(one) in given for one in own) > len(own)

    def _before_backward(self, roots: list[Tensor], weights: list[Tensor] | None = None) -> None:
        if self._main is None or isinstance(self._main, ByHand):
            self._look_at_weights(leaves_of(roots) if weights is None else weights)
        if self.tape is not None and self._recorded is not None and not self.tape.waits:
            self._recorded.before_backward(roots, is_held=weights is not None)

    def _after_backward(self, gradients: dict[int, Tensor] | None = None) -> None:
        self.history.passed()
        begun = self._recorded is not None and self.tape is not None and not self.tape.waits
        if begun:
            self._recorded.after_backward(gradients)  # type: ignore[union-attr]
        if isinstance(self._main, ByHand):
            self._weights = Weights(parameters_of(self._main))
            if begun:
                self.tape.over = self._weights.changed  # type: ignore[union-attr]
            else:
                if self.tape is None and self._advance(self.updates + 2):
                    self._record(self.updates + 2)
                if self.tape is not None:
                    self.tape.waits = self._weights.changed  # by the step of this update
        elif self._main is None and self._leaves is not None:
            self._weights = Weights(self._leaves)

    def _look_at_weights(self, leaves: list[Tensor]) -> None:
        """Whether they were written to since the last backward pass, though no optimizer of torch has made a step."""
        if self._main is not None:
            if self._weights is not None and self._weights.changed():
                self._stepped_by_hand()
        elif self._weights is not None and self._weights.are(leaves) and self._weights.changed():
            self._main, self.history.got_any = ByHand(leaves), True
            self._made[self._main] = self.updates = 1
        self._leaves = leaves

    def _stepped_by_hand(self) -> None:
        self.updates += 1
        self._made[self._main] = self.updates  # type: ignore[index]
        if self._recorded is None or self.tape is None:
            return
        if self._recorded.update == self.updates:
            self._recorded.stepped_by_hand()
            self._judge_recorded()
        elif self.tape.waits:  # nothing of this update was drawn by torch, so that it never began
            self._stop()

    def _load(self, original: Callable, iterator: Any) -> Any:
        handling = Handling() if self._recorded is not None else nullcontext()
        with self._pause(), handling:
            try:
                batch = original(iterator)
            except StopIteration:
                self.history.epochs += 1
                raise
        self.history.batches += 1
        self._safely(self._after_load, iterator, batch, handling)
        return batch

    def turn(self) -> bool:
        """Goes on with another optimizer, from the largest to the smallest, as this one does not train a denoiser: it may be
        a discriminator's. Returns whether there is one; else the largest one stays."""
        if self._is_known or self._main is None:
            return False
        self._turned_from.add(self._main)
        left = [optimizer for optimizer in self._made if optimizer not in self._turned_from]
        main, self._is_known = max(left or self._made, key=_size), not left
        if main is not self._main:
            self._begin(main)
        return bool(left)

    def _begin(self, optimizer: Optimizer | ByHand) -> None:
        """With this optimizer in place of another one."""
        self._stop()
        was_trained = isinstance(self._main, Optimizer) and self.updates
        self.earlier = (self.updates, self.history, self.copies) if was_trained else None
        self._main, self.updates, self._computing = optimizer, self._made[optimizer], None
        self.begun += 1
        self.history, self.copies = self.history.of_another(), self._others.pop(optimizer, None)
        self._due = recorded_updates()
        self._next = next(self._due)

    def _after_load(self, iterator: Any, batch: Any, handling: Any) -> None:
        number = self.loads.count
        tensors = self.loads.add(iterator, batch, self.updates)
        if self.tape is not None and self._recorded is not None:
            self.tape.before_draw()
            self.tape.known(tensors, "data", number)
            self._recorded.handled.append((handling, max((len(x) for x in tensors if x.ndim > 2), default=0)))

    def _load_state(self, original: Callable, module: Any, *arguments: Any, **options: Any) -> Any:
        result = original(module, *arguments, **options)
        self._safely(self.stored.loaded, module, arguments[0] if arguments else options["state_dict"], result)
        return result

    def not_loaded(self) -> list[tuple[str, int, str, str]]:
        """As `StoredWeights` has them, of the modules that are trained."""
        return self.stored.without_a_place(parameters_of(self._main) if self._main is not None else [])

    def _scale(self, original: Callable, scaler: Any, outputs: Any, *arguments: Any, **options: Any) -> Any:
        self._scaled = outputs.detach() if isinstance(outputs, Tensor) else None
        return original(scaler, outputs, *arguments, **options)

    def _scaled_step(self, original: Callable, scaler: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        """A GradScaler leaves out the optimizer's step where gradients are not finite."""
        if not isinstance(optimizer, Optimizer):
            return original(scaler, optimizer, *arguments, **options)
        before = self._made.get(optimizer, 0)
        result = original(scaler, optimizer, *arguments, **options)
        if optimizer is self._main or (self._main is None and optimizer in self._optimizers):
            self._safely(self.history.scaled, self._made.get(optimizer, 0) == before, self._scaled)
        self._scaled = None
        return result

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

    def _before_step(self, optimizer: Optimizer, arguments: tuple, options: dict) -> None:
        if self._inside:  # a step for each parameter within the backward pass, where torch has no place for a tape
            return
        if optimizer not in self._made:
            self._meet(optimizer)
        if optimizer in self._before:  # it goes on: the later one was for something beside it
            self._is_known, self._may_end, self.went_on = True, False, True
            if optimizer is not self._main:
                self._begin(optimizer)
        has_closure = any(callable(x) for x in (*arguments[1:], *options.values()))
        if not self.history.got_any:
            self.history.got_any = has_closure or any(parameter.grad is not None for parameter in parameters_of(optimizer))
        if optimizer is not self._main:
            return
        self.history.before_step(optimizer, self.updates + 1)
        if self.copies is None and self.updates == 0 and self._looks_for_copies:
            self.copies = Copies(parameters_of(optimizer))
        if self._recorded is not None:
            others = (parameter for other in self._optimizers for parameter in parameters_of(other))
            self._recorded.before_step({id(parameter) for parameter in others}, has_closure)
            if self.tape is not None and not has_closure:
                self.tape.paused += 1  # what the step does shows in the weights
                self._rests_in_step = True

    def _meet(self, optimizer: Optimizer) -> None:
        """At its first step."""
        self._made[optimizer] = 0
        self._optimizers.add(optimizer)
        if isinstance(self._main, ByHand):  # what wrote to the weights was no step, but a network that normalizes its own
            del self._made[self._main]
            self._begin(optimizer)
        elif self._main is None or optimizer is self._main:  # the only one so far, or the one that was told
            self._main = optimizer
        elif _same_parameters(optimizer, self._main):  # it was made anew
            self._made[optimizer] = self.updates
            self._main = optimizer
            self.history.remade.append(self.updates + 1)
            if self._recorded is not None:
                self._recorded.optimizer = optimizer
        elif self._takes_over(optimizer):
            self._take_over(optimizer)
        elif not self._is_known and _size(optimizer) > _size(self._main):
            self._begin(optimizer)
        elif self._may_end and self._looks_for_copies:
            self._others[optimizer] = Copies(parameters_of(optimizer))

    def _takes_over(self, optimizer: Optimizer) -> bool:
        """Whether it may train a denoiser after one that did not: an autoencoder's, which comes first."""
        is_of_network = all(isinstance(parameter, torch.nn.Parameter) for parameter in parameters_of(optimizer))
        return self._main in self._turned_from and not self._before and is_of_network

    def _take_over(self, optimizer: Optimizer) -> None:
        self._before.clear()
        self._before.add(self._main)  # type: ignore[arg-type]
        self._is_known = False
        self._begin(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._inside:
            return
        self._made[optimizer] = self._made.get(optimizer, 0) + 1
        self._alone = id(optimizer), self._alone[1] + 1 if self._alone[0] == id(optimizer) else 1
        if optimizer is not self._main:
            if self._recorded is not None:
                self._recorded.stepped_other()
            if self._may_end and self._alone[1] == LATER:  # what was watched is over, and this is another training
                self._take_over(optimizer)
            return
        if self._recorded is not None:
            self._recorded.after_step()
        self.updates = self._made[optimizer]
        self.history.after_step(optimizer, self.updates)
        self._between()
        self._rests_in_step = False

    def _between(self) -> None:
        """When an update is over."""
        self._judge_recorded()
        if self.copies is not None:
            self.copies.between(self.updates)
        if self._advance(self.updates + 1):
            self._record(self.updates + 1)

    def _judge_recorded(self) -> None:
        if self.tape is None or self._recorded is None:
            return
        recorded = self._recorded
        recorded.loads, recorded.loaded_at = self.loads.count, self.loads.last_update
        recorded.datasets = self.loads.datasets
        with self._seeing.pop_all():
            self._stop()
            self.history.settle()
            if self.history.accumulation is None and recorded.update <= SETTLED:
                self.history.accumulation = _told_micro_steps(self._main)
            if recorded.tape.failure is not None:
                raise recorded.tape.failure
            copied = recorded.copied() if self._computing is None else None
            if copied is not None or not recorded.still_copied() or recorded.asks_again():
                self._computing = copied  # and what was recorded is of no use
                return
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            # Whatever is repeated, the script's draws go on as they would; it may be within torch.no_grad().
            with torch.random.fork_rng(devices), torch.enable_grad():
                self._judge(recorded)
            del recorded  # before the garbage collector counts as usual

    def _advance(self, update: int) -> bool:
        """Returns whether this update is to be recorded; the next one that is comes later then."""
        due = update >= self._next
        while update >= self._next:
            self._next = next(self._due)
        return due

    def _record(self, update: int) -> None:
        """From here on, until this update is over."""
        assert self._main is not None  # noqa: S101
        self._seeing.enter_context(_seldom_collected())
        if self._forces_eager:
            self._seeing.enter_context(eagerly())
        own = parameters_of(self._main)
        self.tape = Tape(self._computing or own, own if self._computing else ())
        self._recorded = Recorded(self.tape, self._main, update, self.copies, self._computing)
        for tensor, number in self.loads.alive():
            self.tape.known([tensor], "data", number)
        modules = self._recorded.modules
        self._seeing.callback(
            register_module_forward_pre_hook(
                lambda module, _: None if modules.knows(module) else self._safely(modules.see, module)
            ).remove
        )
        self._seeing.callback(
            register_module_forward_hook(
                lambda module, _, result: self._safely(self._see_result, result) if modules.is_outermost(module) else None
            ).remove
        )
        self.tape.__enter__()

    def _see_result(self, result: Any) -> None:
        if self.tape is not None and self._recorded is not None:
            for op in filter(None, map(self.tape.op_of, tensors_in(result))):
                self._recorded.returned |= op.uses


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Has Python's garbage collector begin after more new objects than usual: a tape has many and no cycles, and because of
    them the collector would go through all objects of the script."""
    first, *others = gc.get_threshold()
    gc.set_threshold(max(first, OBJECTS) if first else 0, *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)


def _told_micro_steps(optimizer: Optimizer | ByHand | None) -> int | None:
    """What Accelerate was told, where it has this optimizer."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    told = getattr(state, "_shared_state", {}).get("plugin_kwargs", {}).get("num_steps")
    kind = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    if kind is None or told in (None, 1):
        return None
    has = any(type(thing) is kind and thing.optimizer is optimizer for thing in gc.get_objects())
    return told if has else None


def _same_parameters(one: Optimizer, other: Optimizer | ByHand) -> bool:
    return [id(parameter) for parameter in parameters_of(one)] == [id(parameter) for parameter in parameters_of(other)]


def _size(optimizer: Optimizer | ByHand) -> int:
    return sum(parameter.numel() for parameter in parameters_of(optimizer))

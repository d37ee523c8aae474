"""Makes a tape of some updates, by torch's hooks of optimizers and by wrapping its backward passes and data loaders."""

import contextlib
import functools
import gc
import os
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

from steady_doctor.record.by_hand import asks_of_weights
from steady_doctor.record.calls import Calls, Levels, SamplerStep, Told
from steady_doctor.record.copies import Copies
from steady_doctor.record.history import History
from steady_doctor.record.loads import Handling, Loads
from steady_doctor.record.ops import tensors_in
from steady_doctor.record.options import told_micro_steps
from steady_doctor.record.recorded import Call, Recorded, parameters_of
from steady_doctor.record.stored_weights import StoredWeights
from steady_doctor.record.tape import Tape
from steady_doctor.record.trainings import Trainings
from steady_doctor.record.wrapping import COMPILED, compile_, eagerly, is_in_compiled_code, without_warning, wrap

SETTLED = 16  # updates, within which Accelerate's settings are read
FIRST = 2, 3  # updates that are recorded, before further Fibonacci numbers
OBJECTS = 200_000  # Python's, that are new when the garbage collector begins in a recorded update


class Session:
    """Watches the optimizers of this process. `judge` is called with each recorded update, and keeps what it needs of it.

    Nothing here raises into the script: an error of the doctor's is kept in `failure`, ends the recording, and `stopped` is
    called with it. `optimizer`: the one whose updates count, where it is known. `levels`: see `calls`.
    """

    _looks_for_copies = True
    _reads_samplers = True
    _forces_eager = True  # in recorded updates

    def __init__(
        self,
        judge: Callable[[Recorded], None],
        stopped: Callable[[BaseException], None] = lambda error: None,
        optimizer: Optimizer | None = None,
        levels: Levels = lambda told: None,
    ):
        self.trainings = Trainings(optimizer, self._begin)
        self.begun = 0  # how often it went on with another optimizer
        self.history = History()
        self.copies: Copies | None = None
        # Of the training before this one: its updates, and what is known of them.
        self.earlier: tuple[int, History, Copies | None, list[SamplerStep]] | None = None
        self.failure: BaseException | None = None
        self.resting = False  # whether what happens now is no part of the training
        self.tape: Tape | None = None
        self._left: Tape | None = None  # where it is not entered for a while
        self._rests_in_step = False  # as the tape does from before a step to after it
        self.loads = Loads()
        self._levels = levels
        self.calls = self._new_calls()
        self._compiles = False
        self.stored = StoredWeights()
        self._judge, self._stopped = judge, stopped
        self._due = FIRST
        self._computing: list[Tensor] | None = None  # what the network has instead of the optimizer's parameters
        self._asked = False  # whether any of these asked for a gradient in a backward pass
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
        hooks.callback(lambda: self.calls.hooks.close())
        wrap(hooks, torch, "compile", self._compile)
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
            hooks.callback(register(functools.partial(self._look_at_step, look)).remove)
        wrap(hooks, torch.autograd, "backward", self._backward)
        wrap(hooks, torch.autograd, "grad", self._grad)

    def _look_at_step(self, look: Callable, *arguments: Any) -> None:
        if torch.compiler.is_compiling():  # what is compiled is not looked at, in none of its runs
            return
        if self.tape is None or not is_in_compiled_code():
            self._safely(look, *arguments)
        elif isinstance(self.trainings.main, Optimizer) and self.failure is None:  # its steps are compiled from here on
            self.tape.paused += 1  # until the next batch, as no recording may end here
            self.failure = RuntimeError(COMPILED)
            self._stopped(self.failure)

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
        if self._all_rest():  # as while samples are drawn along the slope of an energy
            with self._pause():
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
        if not isinstance(self.trainings.main, Optimizer):
            return True
        given, own = {id(weight) for weight in weights}, self._computing or parameters_of(self.trainings.main)
        return 2 * sum(id(one) in given for one in own) > len(own)

    def _all_rest(self) -> bool:
        """Whether weights that are watched have asked for gradients before, and none of them does now."""
        if not isinstance(self.trainings.main, Optimizer):
            return False
        asks = any(one.requires_grad for one in self._computing or parameters_of(self.trainings.main))
        self._asked |= asks
        return self._asked and not asks

    def _before_backward(self, roots: list[Tensor], weights: list[Tensor] | None = None) -> None:
        if self.trainings.before_backward(roots, weights):
            self._after_step_by_hand()
        if self.tape is not None and self._recorded is not None and not self.tape.waits:
            self._recorded.before_backward(roots, is_held=weights is not None)

    def _after_backward(self, gradients: dict[int, Tensor] | None = None) -> None:
        self.history.passed()
        begun = self._recorded is not None and self.tape is not None and not self.tape.waits
        if begun:
            self._recorded.after_backward(gradients)  # type: ignore[union-attr]
        weights = self.trainings.after_backward()
        if weights is not None and begun:
            self.tape.over = weights.changed  # type: ignore[union-attr]
        elif weights is not None:
            if self.tape is None and self._advance(self.trainings.updates + 2):
                self._record(self.trainings.updates + 2)
            if self.tape is not None:
                self.tape.waits = weights.changed  # by the step of this update

    def _after_step_by_hand(self) -> None:
        self.history.got_any = True
        if self._recorded is None or self.tape is None:
            return
        if self._recorded.update == self.trainings.updates:
            self._recorded.stepped_by_hand()
            self._judge_recorded()
        elif self.tape.waits:  # nothing of this update was drawn by torch, so that it never began
            self._stop()

    def _load(self, original: Callable, iterator: Any) -> Any:
        if self.failure is not None and self.tape is not None:
            self._stop()
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

    def _begin(self, copies: Copies | None) -> None:
        """With another training in place of this one, of whose weights these copies are known."""
        self._stop()
        was_trained = isinstance(self.trainings.main, Optimizer) and self.trainings.updates
        known = self.trainings.updates, self.history, self.copies, self.calls.steps
        self.earlier = known if was_trained else None
        self.history, self.copies = self.history.of_another(), copies
        self.calls.hooks.close()
        self.calls = self._new_calls()
        self.begun += 1
        self._due, self._computing, self._asked = FIRST, None, False

    def _after_load(self, iterator: Any, batch: Any, handling: Any) -> None:
        number = self.loads.count
        tensors = self.loads.add(iterator, batch, self.trainings.updates)
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
        return self.stored.without_a_place(parameters_of(self.trainings.main) if self.trainings.main is not None else [])

    def _scale(self, original: Callable, scaler: Any, outputs: Any, *arguments: Any, **options: Any) -> Any:
        self._scaled = outputs.detach() if isinstance(outputs, Tensor) else None
        return original(scaler, outputs, *arguments, **options)

    def _scaled_step(self, original: Callable, scaler: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        """A GradScaler leaves out the optimizer's step where gradients are not finite."""
        if not isinstance(optimizer, Optimizer):
            return original(scaler, optimizer, *arguments, **options)
        before = self.trainings.made.get(optimizer, 0)
        result = original(scaler, optimizer, *arguments, **options)
        if optimizer is self.trainings.main or (self.trainings.main is None and optimizer in self._optimizers):
            self._safely(self.history.scaled, self.trainings.made.get(optimizer, 0) == before, self._scaled)
        self._scaled = None
        return result

    def _compile(self, original: Callable, *arguments: Any, **options: Any) -> Any:
        self._compiles = True
        self.calls.hooks.close()  # the compiler would go through what stands around the network
        return compile_(original, *arguments, **options)

    def _new_calls(self) -> Calls:
        return Calls(self._safely, lambda: self._recorded is not None, self._called, self._levels)

    def _called(self, x: Tensor, told: Told | None = None) -> None:
        """`told`: None where x is what the call before gave."""
        if self.tape is not None and self._recorded is not None:
            if told is not None:
                self._recorded.calls.append(Call(self.tape.whole(x), told))
            elif self._recorded.calls:
                self._recorded.calls[-1].gave = self.tape.whole(x)

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
        self._optimizers.add(optimizer)
        if self.trainings.before_step(optimizer):
            self.history.remade.append(self.trainings.updates + 1)
        has_closure = any(callable(x) for x in (*arguments[1:], *options.values()))
        if not self.history.got_any:
            self.history.got_any = has_closure or any(parameter.grad is not None for parameter in parameters_of(optimizer))
        if optimizer is not self.trainings.main:
            return
        self.history.before_step(optimizer, self.trainings.updates + 1)
        if self.copies is None and self.trainings.updates == 0 and self._looks_for_copies:
            self.copies = Copies(parameters_of(optimizer))
        if self._recorded is not None:
            self._recorded.optimizer = optimizer  # where it was made anew, too
            others = (parameter for other in self._optimizers for parameter in parameters_of(other))
            self._recorded.before_step({id(parameter) for parameter in others}, has_closure)
            if self.tape is not None and not has_closure:
                self.tape.paused += 1  # what the step does shows in the weights
                self._rests_in_step = True

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._inside:
            return
        is_watched = optimizer is self.trainings.main
        if self._recorded is not None:
            (self._recorded.after_step if is_watched else self._recorded.stepped_other)()
        self.trainings.after_step(optimizer)
        if not is_watched:
            return
        self.history.after_step(optimizer, self.trainings.updates)
        self._between()
        self._rests_in_step = False

    def _between(self) -> None:
        """When an update is over."""
        self._judge_recorded()
        if self.copies is not None:
            self.copies.between(self.trainings.updates)
        if self._advance(self.trainings.updates + 1):
            self._record(self.trainings.updates + 1)

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
                self.history.accumulation = told_micro_steps(self.trainings.main)
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
        """Returns whether this update is to be recorded; the next one that is comes later then. They are the Fibonacci numbers:
        often at first, where faults can be cheap, and seldom later."""
        due = update >= self._due[0]
        while update >= self._due[0]:
            self._due = self._due[1], sum(self._due)
        return due

    def _record(self, update: int) -> None:
        """From here on, until this update is over."""
        assert self.trainings.main is not None  # noqa: S101
        self._seeing.enter_context(_seldom_collected())
        if self._forces_eager:
            self._seeing.enter_context(eagerly())
        own = parameters_of(self.trainings.main)
        self.tape = Tape(self._computing or own, own if self._computing else ())
        self._recorded = Recorded(self.tape, self.trainings.main, update, self.copies, self._computing)
        for tensor, number in self.loads.alive():
            self.tape.known([tensor], "data", number)
        if self._reads_samplers and not self._compiles:
            self.calls.watch(own)
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

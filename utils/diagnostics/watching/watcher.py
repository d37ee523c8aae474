"""Watches the training loop of a script that tells nothing: finds its network, and looks at some of its updates."""

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from utils.diagnostics.audit.observer import failure_text
from utils.diagnostics.audit.seen import tensors_in
from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching.facts import Facts, find_facts
from utils.diagnostics.watching.judging import Judge
from utils.diagnostics.watching.leaves import check_leaves
from utils.diagnostics.watching.observing import ForeignObserver, is_image, is_like
from utils.diagnostics.watching.optimizing import rates_of
from utils.diagnostics.watching.probes import CopyProbe, Probe
from utils.diagnostics.watching.seen import Noising, Recorder, Seen
from utils.diagnostics.watching.updating import Clip, LastLook

SEARCHES = {1, 20, 609, 10945}  # finished updates after which all objects may be looked through
PATIENCE = 20  # optimizer steps after which no network is looked for any more
IDLE = 3  # steps of an optimizer, of whose parameters none ever had a gradient
MOST_OUTER = 3  # networks that no optimizer trains, which are tried
MOST_OF = 0.9  # of an optimizer's parameters, that a network within a wrapper has
SHARE = 0.3  # of an optimizer's parameters, that a network has at least


class Enough(SystemExit):
    """Ends the script after the updates that were asked for."""


class Candidate:
    """A module whose output has the shape of its input, as a denoiser's has; seen in the first update."""

    def __init__(self, module: nn.Module, shape: torch.Size, depth: int):
        self.module, self.shape, self.depth = module, shape, depth


@dataclass(frozen=True)
class Choice:
    """A network that may be the denoiser."""

    called: nn.Module  # as the script calls it
    inside: list[nn.Module]  # modules in it that may be a raw network
    optimizer: Optimizer
    shape: torch.Size  # of the input
    trained: nn.Module | None = None  # what the optimizer trains, where that is not the network


class Watcher:
    """Its methods are called by the hooks (`hooks.py`). None of them raises, but for `Enough`."""

    def __init__(self, report: Callable[["Watcher"], None], most_updates: int | None = None):
        self.process = os.getpid()
        self.updates = 0  # finished ones of the network that is watched
        self.judge = Judge()
        self.failure = ""
        self.in_step, self._rests_later = False, False  # in a hook of an optimizer's step
        self.exit_status: int | None = None  # of the script
        self.networks: list[tuple[str, str, int]] = []  # (network's class, optimizer's class, parameters)
        self.network: nn.Module | None = None
        self._report, self._most = report, most_updates
        self._observer: ForeignObserver | None = None
        self._recorder = Recorder()
        self._stack: list[nn.Module] = []
        self._candidates: list[Candidate] = []
        self._optimizers: dict[int, Any] = {}
        self._optimizer: Optimizer | None = None
        self._stepping: list[Optimizer] = []  # whose steps are under way, the outer ones first
        self._wrapping: set[int] = set()  # ids of those that make steps of others
        self._former: tuple[Any, int, str] | None = None  # an optimizer, updates until another one went on, and its class
        self._others: set[int] = set()  # ids of parameters of the network that another optimizer has
        self._choice: Choice | None = None  # the network that is watched
        self._choices: list[Choice] = []  # those that come after it
        self._outer: list[Candidate] = []  # which no optimizer trains
        self._hooks: list[Any] = []
        self._beside: tuple = ()  # what a trained network beside the one that is watched was called with
        self._stepped = self._auditing = self._busy = self._searched = False
        self.armed = False  # the network's forward passes are hooked: before, in and after an update that is looked at
        self._in_step = self._closes = False  # `_closes`: the optimizer makes the forward passes, by a closure
        self.steps = 0  # of all optimizers
        self._skipped = 0  # steps in a row that a GradScaler has left out
        self._idle: dict[int, int] = {}  # steps of an optimizer without a gradient
        self._facts = Facts()
        self._next, self._following = 2, 3  # updates that are looked at
        self._noising: list[Noising] = []
        self._reached: set[str] = set()  # by the gradient of the update under way
        self._rows: dict[str, torch.Tensor] = {}  # of embeddings, which it reached
        self._clips: list[Clip] = []
        self._scaler: Any = None
        self._scale = 1.0
        self._probe = Probe([torch.zeros(1)])
        self._copies: dict[str, CopyProbe] = {}  # by the name of the average
        self._encoded: tuple[float, float] | None = None  # the range of images that an autoencoder got
        self._discovering = True
        self._told = Facts()

    # ---- guards

    def safely(self, look: Callable[..., None], *arguments: Any) -> None:
        """Calls `look`. What goes wrong there ends the watching, and not the training."""
        if self._rests_later and not self.in_step:
            self._rests_later = False
            self.rest()
        if self.failure or self._busy or os.getpid() != self.process:
            return
        try:
            look(*arguments)
        except Exception as error:
            self.switch_off(failure_text(error))

    def switch_off(self, why: str) -> None:
        self.failure = why
        print(f"diagnose.py: the watcher stopped, the script goes on: {why}", file=sys.stderr, flush=True)
        if self.in_step:  # torch goes through its hooks, and none of them may be taken away meanwhile
            self._rests_later = True
        else:
            self.rest()

    def rest(self) -> None:
        self._recorder.stop()
        if self._observer is not None:
            self._observer.rest()
        self._end_discovery()
        self._disarm()
        self._auditing = False

    @property
    def discovering(self) -> bool:
        return self._discovering

    # ---- the first update: which module is the network

    def before_any_forward(self, module: nn.Module) -> None:
        if self._discovering and torch.is_grad_enabled():
            self._stack.append(module)

    def after_any_forward(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        if not self._discovering or not torch.is_grad_enabled():
            return
        while self._stack and self._stack.pop() is not module:
            pass
        depth = len(self._stack)
        if depth > 4 or any(c.module is module for c in self._candidates):
            return
        made = next(iter(tensors_in(output)), None)
        if made is None or made.ndim < 2 or not made.requires_grad or next(module.parameters(), None) is None:
            return
        given = next((v for v in inputs if is_like(v, made.shape)), None)
        if given is not None and given.ndim == 2 and sum(isinstance(v, torch.Tensor) for v in inputs) < 2:
            return  # a layer: a denoiser of signals gets a noise level, too
        if given is not None:
            # More channels than it makes: a condition is joined to the image. Fewer: it makes variances too.
            whole = given.ndim == 2 or made.shape[1] in (given.shape[1], 2 * given.shape[1])
            shape = given.shape if whole else made.shape
            if shape[1] <= given.shape[1]:
                self._candidates.append(Candidate(module, shape, depth))

    def before_step(self, optimizer: Optimizer) -> None:
        self.steps += 1
        self._wrapping |= {id(outer) for outer in self._stepping if outer is not optimizer}
        self._stepping.append(optimizer)
        if self._former is not None and self._former[0]() is optimizer:
            self._former = None  # they take turns
        if optimizer is self._optimizer:
            self._probe.again()
            for copies in self._copies.values():
                copies.take()
            self._in_step = True
            if not (self.armed and self._stepped):  # else there was no forward pass since the step before
                self._recorder.stop()
                self._see_reached()
        if self.network is None:
            self._see_idle(optimizer)

    def _see_reached(self) -> None:
        if self._auditing and self._observer is not None:
            self._reached, self._rows = self._observer.reached(), self._observer.rows_reached()

    def _see_optimizer(self, optimizer: Optimizer) -> None:
        """After its first step, whose forward pass is then over in all cases. An optimizer whose network was not found gets one
        at its second step, when all others have made a step."""
        if id(optimizer) in self._optimizers:
            if self.network is None and self._idle.get(id(optimizer), 0) < 0:
                self._choose_untrained(optimizer)
                self.updates = 0 if self.network is None else 1
            return
        if self._idle.get(id(optimizer), 0) > 0:
            if all(p.grad is None for p in _parameters_of(optimizer)):
                return
            self._idle[id(optimizer)] = -PATIENCE  # they have got their gradients in the step, by a closure
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        owned = {id(p): p.numel() for p in _parameters_of(optimizer)}
        count = sum(owned.values())
        mine = [c for c in self._candidates if sum(owned.get(id(p), 0) for p in c.module.parameters()) > SHARE * count]
        self._outer = [c for c in self._candidates if c not in mine and not any(_contains(m.module, c.module) for m in mine)]
        outermost = min(mine, key=lambda c: c.depth) if mine else None
        name = type(unwrapped(outermost.module)).__name__ if outermost else "another network"
        self.networks.append((name, type(optimizer).__name__, count))
        if self._optimizer is not None and owned.keys() == {id(p) for p in _parameters_of(self._optimizer)}:
            if id(optimizer) not in self._wrapping and self._former is None:
                self._former = weakref.ref(self._optimizer), self.updates, type(optimizer).__name__
            self._optimizer = optimizer
            self._probe.moved()  # what the one before has left is over
        elif self._observer is not None and any(id(p) in owned for p in self._observer.parameters.values()):
            self._others |= owned.keys()
            self._install()
        elif outermost is not None and self._discovering:
            self._choices.append(Choice(outermost.module, [c.module for c in mine], optimizer, outermost.shape))
            # Around it may be a module that noises the image itself and gives the errors.
            inner = next(
                (c for c in sorted(mine, key=lambda c: c.depth) if c.depth > outermost.depth and _is_most(c, count)), None
            )
            if inner is not None:
                self._choices.append(Choice(inner.module, [c.module for c in mine], optimizer, inner.shape))
            if self._optimizer is None:
                self._choose()

    def _see_idle(self, optimizer: Optimizer) -> None:
        idle = all(p.grad is None for p in _parameters_of(optimizer))
        self._idle[id(optimizer)] = self._idle.get(id(optimizer), 0) + 1 if idle else -PATIENCE
        if self._idle[id(optimizer)] == IDLE:
            kind = type(optimizer).__name__
            self.networks.append(("nothing", kind, sum(p.numel() for p in _parameters_of(optimizer))))
            networks = [p for candidate in self._candidates for p in candidate.module.parameters()]
            cut = bool(networks) and all(p.grad is None for p in networks)
            text = f"no parameter of {kind} has a gradient"
            text += ", nor has the network's any: is the loss cut off, or are gradients cleared before the step?" if cut else ""
            text += "" if cut else ": are they of a copy of the network or frozen, or is the loss cut off?"
            name, wanted, found = "parameters in the optimizer", "all that get gradients", "none that gets one"
            self.judge.record(self.steps, [Check("gradient" if cut else "optimizer", name, wanted, found, False, text)])

    def _choose(self) -> None:
        """Watches the next of the networks that may be the denoiser."""
        choice = self._choice = self._choices.pop(0)
        self._optimizer, self._recorder.shape, self._others = choice.optimizer, choice.shape, set()
        self._next, self._searched = min(self._next, self.updates + 2), False
        self._install()

    def _choose_untrained(self, optimizer: Optimizer | None) -> None:
        """Watches one of the networks that the optimizer does not train, and the loss is computed with: what is trained acts on
        them from beside, as adapters and control networks do."""
        first, outer = self._choice, self._untrained()
        self._outer = []
        if optimizer is None or not outer:
            return
        trained = holder_of(_parameters_of(optimizer))
        if not any(p.requires_grad for p in trained.parameters()):  # of plain tensors nothing can be watched
            return
        self._choices = [Choice(c.module, [], optimizer, c.shape, trained) for c in sorted(outer, key=_rank)[:MOST_OUTER]]
        self._choices += [] if first is None else [first]  # where none of them is the denoiser
        self._choose()

    def _give_up(self) -> None:
        """None of the networks is a denoiser."""
        self.rest()
        self._choice = self._optimizer = self._observer = self.network = None
        self.updates = 0

    def _untrained(self) -> list[Candidate]:
        """Networks with an output that the loss may depend on, of which no optimizer has a parameter."""
        known = {id(p) for of in self._optimizers.values() if of() is not None for p in _parameters_of(of())}
        outer = [c for c in self._outer if not any(id(p) in known for p in c.module.parameters())]
        return [c for c in outer if not any(o is not c and _contains(o.module, c.module) for o in outer)]

    def _install(self) -> None:
        choice = self._choice
        if choice is None:
            return
        optimizer, network = choice.optimizer, unwrapped(choice.called)
        self.network = network
        inside = set(network.modules()) - {network}
        total = sum(p.numel() for p in network.parameters())
        inner = [m for m in choice.inside if m in inside and sum(p.numel() for p in m.parameters()) >= MOST_OF * total]
        modules = {"network": network} | ({"raw": inner[-1]} if inner else {})
        stepped = frozenset(id(p) for p in _parameters_of(optimizer))
        self._observer = ForeignObserver(modules, stepped, self._others - stepped, choice.trained)
        self._probe = Probe(sorted(self._observer.parameters.values(), key=torch.Tensor.numel)[::-1])
        self._disarm()
        self._arm()
        self.judge.begin(network, choice.trained)

    def _arm(self) -> None:
        """Hooks on the module that is called: a compiled one does not call the hooks of what is inside. Between the updates
        that are looked at there are none, which would cost something in each update and are seen by the compiler."""
        if not self.armed and self._choice is not None:
            self._hooks = [self._choice.called.register_forward_pre_hook(self._before_network, with_kwargs=True)]
            if self._choice.trained is not None:
                self._hooks.append(
                    self._choice.trained.register_forward_pre_hook(partial(self.safely, self._see_beside), with_kwargs=True)
                )
            encoder = getattr(self._facts.autoencoder, "encoder", None)
            if isinstance(encoder, nn.Module):
                self._hooks.append(encoder.register_forward_hook(partial(self.safely, self._see_encoder)))
            self.armed = True
            run_eagerly(True)

    def _disarm(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.armed, self._noising, self._beside = [], False, [], ()
        run_eagerly(False)

    def _see_beside(self, module: nn.Module, inputs: tuple, options: dict) -> None:
        """What is trained beside the network is called with."""
        if torch.is_grad_enabled():
            values = (*inputs, *options.values())
            self._beside = tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in values)

    def _see_encoder(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        """Images are encoded in this update."""
        if inputs and isinstance(inputs[0], torch.Tensor):
            low, high = inputs[0].detach().aminmax()
            self._encoded = float(low), float(high)

    def told(self, network: nn.Module, optimizer: Optimizer, facts: Facts) -> None:
        """By `watch`: nothing is searched for that it names."""
        self._optimizer, self._told = getattr(optimizer, "optimizer", optimizer), facts
        self._choice = Choice(network, [], self._optimizer, torch.Size())
        self.networks.append((type(unwrapped(network)).__name__, type(self._optimizer).__name__, 0))
        self._optimizers[id(self._optimizer)] = weakref.ref(self._optimizer)
        self._install()
        self._end_discovery()

    def _end_discovery(self) -> None:
        if self._discovering:
            self._discovering, self._candidates, self._stack = False, [], []
            if not self.armed:
                run_eagerly(False)

    # ---- later updates

    def _before_network(self, module: nn.Module, inputs: tuple, options: dict | None = None) -> None:
        if options is None:  # a hook that was taken away in this pass comes once more, without them
            return
        if torch.is_grad_enabled() and not self.failure and os.getpid() == self.process:
            self.safely(self._see_network, module, inputs, options)
            if self._most is not None and self.updates >= self._most:
                raise Enough(0)

    def _see_network(self, module: nn.Module, inputs: tuple, options: dict) -> None:
        observer = self._observer
        if observer is None:
            return
        if self._recorder.shape is None:  # of a loop that told its network
            given = (v for v in (*inputs, *options.values()) if isinstance(v, torch.Tensor))
            self._recorder.shape = next((v.shape for v in given if is_image(v.shape) and v.is_floating_point()), None)
        seen = self._recorder.stop() if self._recorder.running else None
        begins = False
        if self._stepped:
            self._stepped = False
            self._end_discovery()
            self._finish()
            self._closes = self._in_step
            if self._observer is not observer:  # this was not the denoiser
                return
            begins = self.updates + 1 >= self._next
        if begins:
            self._begin()
            observer._before_forward("network", module, inputs, options)
            if self._closes:
                observer.begin_closure(self._optimizer)
        if not self._auditing:
            self._disarm()
            return
        given = [v for v in (*inputs, *options.values(), *self._beside) if isinstance(v, torch.Tensor) and v.ndim > 1]
        self._recorder.conditions = {v.shape for v in given} - {self._recorder.shape}
        if self._in_step:
            observer.go_on_in_step()
        facts = {"seen": seen or Seen(), "noising": list(self._noising[-3:]), "beside": self._beside}
        facts |= {"loaded": self.judge.loading.labels, "means": self.judge.loading.means}
        optimizers = (of() for of in self._optimizers.values())
        trained = {id(p) for optimizer in optimizers if optimizer is not None for p in _parameters_of(optimizer)}
        beside = [v for v in (*inputs[1:], *options.values()) if getattr(v, "shape", None) != self._recorder.shape]
        facts["leaves"] = check_leaves(beside, trained)
        observer.begin_micro_step(**facts) if not begins else observer.tell(**facts)
        self._noising = []

    def _begin(self) -> None:
        observer = self._observer
        self._auditing = True
        while self.updates + 1 >= self._next:
            self._next, self._following = _next_looks(self._next, self._following)
        self._clips = []
        self._see_averages()
        observer.begin(self.updates)  # type: ignore[union-attr]

    def _see_averages(self) -> None:
        """They may be other tensors than before."""
        self._observer.averages = {a.name: a.now() for a in self._facts.averages}  # type: ignore[union-attr]

    def _finish(self) -> None:
        """When the next update begins, or none follows."""
        if not self._auditing or self._observer is None:
            return
        self._auditing = False
        self._see_averages()
        update = self._observer.end_update()
        if update is None:
            raise RuntimeError(self._observer.failure or "an update was not seen")
        if self._closes and len(update.micro_steps) > 1:  # a closure that is called several times: what for is not known
            return
        known = type(self._optimizer).__module__.startswith("torch.optim")
        about = (self._observer, self._facts, list(self._clips), self._probe.moved(), self._reached, self._rows, known)
        self._busy = True  # the judge makes optimizer steps of its own
        try:
            others = self._choice.trained is not None or bool(self._choices or self._untrained())  # type: ignore[union-attr]
            self.judge.look(LastLook(update, *about, self._scale), self._encoded, others)
        finally:
            self._busy = False
        self._report(self)
        if not self.judge.mixed and self._choices:
            self._choose()
        elif not self.judge.mixed and self._choice.trained is not None:  # type: ignore[union-attr]
            self._give_up()
        elif not self.judge.mixed:
            self._choose_untrained(self._optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        while self._stepping and self._stepping.pop() is not optimizer:
            pass
        self._see_optimizer(optimizer)
        if self._optimizer is None:
            if self.steps >= PATIENCE:
                self._end_discovery()
            if self._discovering:
                run_eagerly(True)  # what was compiled in the meantime
            if self._most is not None and self.steps >= self._most:
                raise Enough(0)
        if optimizer is not self._optimizer:
            return
        self._in_step = False
        if self.armed and self._stepped:
            return
        self._stepped = True
        self.updates += 1
        again = self.updates in SEARCHES and (self.updates != 20 or not any(a.is_average for a in self._facts.averages))
        if again or not self._searched:
            self._searched = True
            self._facts = find_facts(self._observer.trained, optimizer)  # type: ignore[union-attr]
            self._facts.add(self._told)
            self._probe_copies()
            self._disarm()  # there may be an autoencoder to be watched too
        if self._auditing:
            if self._closes:
                self._see_reached()
            self._observer.end_step()  # type: ignore[union-attr]
        self._probe.take()
        due = self.updates + 1 >= self._next
        if due:
            self._encoded = None
            self._recorder.start()
        if due or (self._most is not None and self.updates >= self._most):
            self._arm()
        self.judge.after_step(self.updates, rates_of(optimizer.param_groups))

    def _probe_copies(self) -> None:
        parameters = self._observer.parameters if self._observer is not None else {}
        for average in self._facts.averages:
            names = [name for name in average.tensors if name in parameters and average.is_average and average.settings is None]
            if names and average.name not in self._copies:
                name = max(names, key=lambda name: parameters[name].numel())
                self._copies[average.name] = CopyProbe(average, name, parameters[name])

    def before_backward(self) -> None:
        if self._auditing and not self._stepped and self._observer is not None:
            if self._scaler is not None:
                scaler = self._scaler()
                self._scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
            self._observer.begin_backward()

    def after_backward(self) -> None:
        if self._auditing and not self._stepped:
            self._recorder.start()

    def scaled(self, scaler: Any) -> None:
        self._scaler = weakref.ref(scaler)

    def scaler_stepped(self, optimizer: Any, skipped: bool) -> None:
        """After GradScaler's step: it makes none where the gradient is not finite."""
        self._skipped = self._skipped + 1 if skipped else 0
        if self._auditing and skipped and not self._stepped and self._optimizer is optimizer:
            self._auditing = False
            self._observer.rest()  # type: ignore[union-attr]
            self._next = min(self._next, self.updates + 1)
            self._stepped = True  # the next forward pass begins an update

    def loaded(self, iterator: Any, batch: Any) -> None:
        """By an iterator of torch's loader."""
        self.judge.loading.see(iterator, batch, self.steps, self._auditing or self.updates + 2 >= self._next)

    def compiled(self) -> None:
        """Something is: with the first of it torch's compiler is imported, which would go through the hooks."""
        if self._discovering or self.armed:
            run_eagerly(True)

    def noised(self, noising: Noising) -> None:
        if self.armed:
            self._noising = [*self._noising[-3:], noising]

    def clipped(self, kind: str, limit: Any, parameters: list[torch.Tensor]) -> None:
        if self._auditing and self._observer is not None:
            micro_steps = self._observer.update.micro_steps if self._observer.update is not None else []
            clipped = {id(p) for p in parameters if p.grad is not None}
            whole = clipped == {id(p) for p in self._observer.parameters.values() if p.grad is not None}
            known = {id(p) for of in self._optimizers.values() if of() is not None for p in _parameters_of(of())}
            given, own = {id(p) for p in parameters}, {id(p) for p in self._observer.parameters.values()}
            elsewhere = bool(given) and not given & known
            if given & own or elsewhere:
                clip = Clip(kind, float(limit), len(micro_steps), self._stepped, whole, elsewhere, not clipped)
                self._clips.append(clip)

    def end(self, ended: bool, last_look: bool = True) -> None:
        """When the script is over; `ended`: by itself, and not by an error, an interruption or `--watch_updates`; `last_look`:
        not in the midst of an update."""
        if self._stepped and self._auditing and last_look:
            self.safely(self._finish)
        self.safely(self._judge_former)
        self.safely(self.judge.end, self.updates, ended, list(self._copies.values()), self._skipped)
        self.rest()

    def _judge_former(self) -> None:
        """In the end, when it is known that an optimizer has made its last step. A new stage may have a new one on purpose."""
        if self._former is not None:
            _, updates, kind = self._former
            text = f"after {updates} updates another {kind} goes on with the same parameters: its state begins anew"
            name, wanted = "optimizer of the parameters", "one for the whole run"
            self.judge.record(updates + 1, [Check("optimizer", name, wanted, "another", False, text, "warning")])


def _next_looks(first: int, second: int) -> tuple[int, int]:
    """2, 3, 5, 8, then 21, 55, 144 and so on: of Fibonacci's numbers, which have no rhythm for a fault to share."""
    third = first + second
    return (second, third) if second <= 8 else (third, second + third)


def run_eagerly(eagerly: bool) -> None:
    """Compiled networks: hooks are called in what runs eagerly."""
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and the import would take a second
        torch.compiler.set_stance("force_eager" if eagerly else "default")


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _contains(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def _is_most(candidate: Candidate, count: int) -> bool:
    """Whether a module has nearly all of `count` parameters."""
    return sum(p.numel() for p in candidate.module.parameters()) >= MOST_OF * count


def _rank(candidate: Candidate) -> tuple[int, int]:
    """Outer networks first, of them the largest."""
    return candidate.depth, -sum(p.numel() for p in candidate.module.parameters())


def holder_of(parameters: Sequence[torch.Tensor]) -> nn.Module:
    """The smallest module that has all of them; where there is none, a list of them. It looks through all objects."""
    wanted = {id(p) for p in parameters}
    found: list[tuple[int, nn.Module]] = []
    for module in [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]:
        with contextlib.suppress(Exception):  # of a module that was not made to the end
            own = {id(p) for p in module.parameters()}
            if wanted <= own:
                found.append((len(own), module))
    if found:
        return unwrapped(min(found, key=lambda one: one[0])[1])
    return nn.ParameterList([p for p in parameters if isinstance(p, nn.Parameter)])


def unwrapped(module: nn.Module) -> nn.Module:
    while type(module).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        inner: Any = getattr(module, "_orig_mod", None) or module.module
        module = inner
    return module

"""Watches the training loop of a script that tells nothing: finds its network, and looks at some of its updates."""

import os
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.watching.facts import Facts, find_facts
from utils.diagnostics.watching.judging import Clip, Judge, LastLook
from utils.diagnostics.watching.seen import Recorder, Seen

SEARCHES = {1, 20, 609, 10945}  # finished updates after which all objects are looked through


class Enough(SystemExit):
    """Ends the script after the updates that were asked for."""


class ForeignObserver(Observer):
    """Of a loop that may clear its gradients between the forward and the backward pass."""

    stepped: frozenset[int] = frozenset()  # ids of the parameters that the optimizer owns

    def _before_forward(self, name: str, module: nn.Module, inputs: tuple, options: dict | None = None) -> None:
        if options is not None:  # a hook that was taken away in this pass comes once more, without them
            super()._before_forward(name, module, inputs, options)

    @torch.no_grad()
    def begin_backward(self) -> None:
        if self.update is None or not self.update.micro_steps or self._has_run_backward:
            return
        gradients = [p.grad for p in self.parameters.values()]
        known = [g for g in gradients if g is not None]
        step = self.update.micro_steps[-1]
        if len(self.update.micro_steps) == 1:
            owned = [p.grad for p in self.parameters.values() if p.grad is not None and id(p) in self.stepped]
            self.update.left_over = torch.stack(torch._foreach_norm(owned)).norm() if owned else torch.zeros(())
        step.gradient_before = self.sample.take(gradients) if known else None


class Candidate:
    """A module whose output has the shape of its input, as a denoiser's has; seen in the first update."""

    def __init__(self, module: nn.Module, shape: torch.Size, depth: int):
        self.module, self.shape, self.depth = module, shape, depth


class Watcher:
    """Its methods are called by the hooks (`hooks.py`). None of them raises, but for `Enough`."""

    def __init__(self, report: Callable[["Watcher"], None], most_updates: int | None = None):
        self.process = os.getpid()
        self.updates = 0  # finished ones of the network that is watched
        self.judge = Judge()
        self.failure = ""
        self.networks: list[tuple[str, str, int]] = []  # (network's class, optimizer's class, parameters)
        self.network: nn.Module | None = None
        self._report, self._most = report, most_updates
        self._observer: ForeignObserver | None = None
        self._recorder = Recorder()
        self._stack: list[nn.Module] = []
        self._candidates: list[Candidate] = []
        self._optimizers: dict[int, Any] = {}
        self._optimizer: Optimizer | None = None
        self._hooks: list[Any] = []
        self._stepped = self._auditing = self._busy = False
        self._facts = Facts()
        self._next, self._following = 2, 3  # updates that are looked at
        self._noising: list[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._clips: list[Clip] = []
        self._scaler: Any = None
        self._scale = 1.0
        self._probe: torch.Tensor | None = None
        self._moved: torch.Tensor | None = None
        self._probed: list[torch.Tensor] = []
        self._encoder: nn.Module | None = None
        self._encoded = False
        self._discovering = True
        self._told = Facts()
        # Networks that may be the denoiser: (what is called, modules in it, optimizer, shape of the input).
        self._choices: list[tuple[nn.Module, list[nn.Module], Optimizer, torch.Size]] = []

    # ---- guards

    def safely(self, look: Callable[..., None], *arguments: Any) -> None:
        """Calls `look`. What goes wrong there ends the watching, and not the training."""
        if self.failure or self._busy or os.getpid() != self.process:
            return
        try:
            look(*arguments)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.switch_off(f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")

    def switch_off(self, why: str) -> None:
        self.failure = why
        print(f"diagnose.py: the watcher stopped, the script goes on: {why}", file=sys.stderr, flush=True)
        self.rest()

    def rest(self) -> None:
        self._recorder.stop()
        if self._observer is not None:
            self._observer.rest()
        for hook in self._hooks:
            hook.remove()
        self._end_discovery()
        _run_eagerly(False)
        self._hooks, self._auditing, self._noising = [], False, []

    @property
    def discovering(self) -> bool:
        return self._discovering

    # ---- the first update: which module is the network

    def before_any_forward(self, module: nn.Module, inputs: tuple) -> None:
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
        given = next((v for v in inputs if isinstance(v, torch.Tensor)), None)
        made = next((v for v in values_of(output) if isinstance(v, torch.Tensor)), None)
        if given is None or made is None or given.ndim < 3 or not given.is_floating_point() or given.ndim != made.ndim:
            return
        alike = given.shape[0] == made.shape[0] and given.shape[2:] == made.shape[2:] and made.requires_grad
        if alike and made.shape[1] in (given.shape[1], 2 * given.shape[1]):
            self._candidates.append(Candidate(module, given.shape, depth))

    def before_step(self, optimizer: Optimizer) -> None:
        if optimizer is self._optimizer:
            self._recorder.stop()
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [c for c in self._candidates if any(id(p) in owned for p in c.module.parameters())]
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        outermost = min(mine, key=lambda c: c.depth) if mine else None
        name = type(unwrapped(outermost.module)).__name__ if outermost else "another network"
        self.networks.append((name, type(optimizer).__name__, count))
        if outermost is not None and self._discovering:
            self._choices.append((outermost.module, [c.module for c in mine], optimizer, outermost.shape))
            if self._optimizer is None:
                self._choose()

    def _choose(self) -> None:
        """Watches the next of the networks that may be the denoiser."""
        called, candidates, self._optimizer, self._recorder.shape = self._choices.pop(0)
        self._install(called, candidates)

    def _install(self, called: nn.Module, candidates: list[nn.Module]) -> None:
        network = self.network = unwrapped(called)
        inside = set(network.modules()) - {network}
        total = sum(p.numel() for p in network.parameters())
        inner = [m for m in candidates if m in inside and sum(p.numel() for p in m.parameters()) >= 0.9 * total]
        modules = {"network": network} | ({"raw": inner[-1]} if inner else {})
        self._observer = ForeignObserver(modules)
        groups = self._optimizer.param_groups  # type: ignore[union-attr]
        self._observer.stepped = frozenset(id(p) for group in groups for p in group["params"])
        trained: list[torch.Tensor] = list(self._observer.parameters.values())
        self._probed = trained[:: max(1, len(trained) // 3)][:3]
        for hook in self._hooks:
            hook.remove()
        # On the module that is called: a compiled one does not call the hooks of what is inside.
        self._hooks = [called.register_forward_pre_hook(self._before_network, with_kwargs=True)]
        self.judge.begin(network)

    def told(self, network: nn.Module, optimizer: Optimizer, facts: Facts) -> None:
        """By `watch`: nothing is searched for that it names."""
        self._optimizer, self._told = getattr(optimizer, "optimizer", optimizer), facts
        self.networks.append((type(unwrapped(network)).__name__, type(self._optimizer).__name__, 0))
        self._optimizers[id(self._optimizer)] = weakref.ref(self._optimizer)
        self._install(network, [])
        self._end_discovery()

    def _end_discovery(self) -> None:
        if self._discovering:
            self._discovering, self._candidates, self._stack = False, [], []
            _run_eagerly(False)

    # ---- later updates

    def _before_network(self, module: nn.Module, inputs: tuple, options: dict) -> None:
        if torch.is_grad_enabled() and not self.failure and os.getpid() == self.process:
            self.safely(self._see_network, module, inputs, options)
            if self._most is not None and self.updates >= self._most:
                raise Enough(0)

    def _see_network(self, module: nn.Module, inputs: tuple, options: dict) -> None:
        observer = self._observer
        if observer is None:
            return
        if self._recorder.shape is None:  # of a loop that told its network
            self._recorder.shape = next((v.shape for v in inputs if isinstance(v, torch.Tensor)), None)
        seen = self._recorder.stop() if self._recorder.running else None
        begins = False
        if self._stepped:
            self._stepped = False
            self._end_discovery()
            self._compare_probe()
            self._finish()
            if self._observer is not observer:  # this was not the denoiser
                return
            begins = self.updates + 1 >= self._next
        if begins:
            self._begin()
            observer._before_forward("network", module, inputs, options)
        if self._auditing:
            facts = {"seen": seen or Seen(), "noising": list(self._noising[-3:])}
            observer.begin_micro_step(**facts) if not begins else observer.tell(**facts)
        self._noising = []

    def _begin(self) -> None:
        observer = self._observer
        self._auditing, self._encoded = True, self._encoded and self._encoder is not None
        while self.updates + 1 >= self._next:
            self._next, self._following = self._following, self._next + self._following
        self._clips = []
        observer.averages = {a.name: a.tensors for a in self._facts.averages}  # type: ignore[union-attr]
        _run_eagerly(True)
        observer.begin(self.updates)  # type: ignore[union-attr]

    def _finish(self) -> None:
        """When the next update begins, or none follows."""
        if not self._auditing or self._observer is None:
            return
        self._auditing = False
        _run_eagerly(False)
        update = self._observer.end_update()
        if update is None:
            raise RuntimeError(self._observer.failure or "an update was not seen")
        look = LastLook(update, self._observer, self._facts, self._scale, list(self._clips), self._moved, self._encoded)
        self._moved = None
        self._busy = True  # the judge makes optimizer steps of its own
        try:
            self.judge.look(look)
        finally:
            self._busy = False
        self._report(self)
        if not self.judge.mixed and self._choices:
            self._choose()

    def after_step(self, optimizer: Optimizer) -> None:
        if self._optimizer is None or optimizer is not self._optimizer:
            return
        if self._stepped:
            return
        self._stepped = True
        self.updates += 1
        if self.updates in SEARCHES:
            self._facts = find_facts(self.network, optimizer)  # type: ignore[arg-type]
            self._facts.add(self._told)
            self._watch_autoencoder()
        if self._auditing:
            self._observer.end_step()  # type: ignore[union-attr]
        self._probe = self._take_probe()
        if self.updates + 1 >= self._next:
            self._recorder.start()
        self.judge.rate(self.updates, [float(group["lr"]) for group in optimizer.param_groups])

    def _watch_autoencoder(self) -> None:
        """Whether images are encoded in an update."""
        encoder = getattr(self._facts.autoencoder, "encoder", None)
        if isinstance(encoder, nn.Module) and self._encoder is None:
            self._encoder = encoder

            def encoded(*arguments: Any) -> None:
                self._encoded = True

            self._hooks.append(encoder.register_forward_hook(encoded))

    @torch.no_grad()
    def _take_probe(self) -> torch.Tensor:
        """Some elements of the weights: whether anything changes them between two updates."""
        return torch.cat([p.detach().reshape(-1)[:4].float() for p in self._probed])

    def _compare_probe(self) -> None:
        if self._probe is not None:
            changed = (self._take_probe() != self._probe).any()
            self._moved = changed if self._moved is None else self._moved | changed

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

    def skipped(self, optimizer: Any, before: int) -> None:
        """After GradScaler's step: the update under way made no step where its gradient was not finite."""
        if self._auditing and before == self.updates and not self._stepped and self._optimizer is optimizer:
            self._auditing = False
            self._observer.rest()  # type: ignore[union-attr]
            self._next = min(self._next, self.updates + 1)
            self._stepped = True  # the next forward pass begins an update

    def noised(self, scheduler: Any, clean: Any, noise: Any, timesteps: Any, result: Any) -> None:
        if all(isinstance(v, torch.Tensor) for v in (clean, noise, timesteps, result)):
            self._noising.append((scheduler, clean.detach(), noise.detach(), timesteps.detach(), result.detach()))
            del self._noising[:-4]

    def clipped(self, kind: str, limit: float) -> None:
        if self._auditing:
            micro_steps = self._observer.update.micro_steps if self._observer.update is not None else []
            self._clips.append(Clip(kind, limit, len(micro_steps), self._stepped))

    def end(self, ended: bool) -> None:
        """When the script is over; `ended`: by itself, and not by an error, an interruption or `--watch_updates`."""
        if self._stepped and self._auditing:
            self.safely(self._finish)
        self.safely(self.judge.end, self.updates, ended)
        self.rest()


def _run_eagerly(eagerly: bool) -> None:
    """Compiled networks: hooks are called in what runs eagerly."""
    torch.compiler.set_stance("force_eager" if eagerly else "default")


def unwrapped(module: nn.Module) -> nn.Module:
    while type(module).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        inner: Any = getattr(module, "_orig_mod", None) or module.module
        module = inner
    return module


def values_of(output: Any) -> tuple[Any, ...]:
    if isinstance(output, torch.Tensor):
        return (output,)
    if hasattr(output, "values"):
        return tuple(output.values())
    return tuple(output) if isinstance(output, (tuple, list)) else ()

"""The network's calls without gradients, of which a sampler is made: what one got and gave, and what the next one got."""

import gc
import inspect
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steady_doctor.record.samples import Samples

MOST = 128  # steps that are kept, the more apart the longer a script samples
NUMBERS = 1 << 14  # of each tensor
ALIKE = 0.5  # the least cosine of a network and its average
Told = dict[str, Tensor]  # arguments that are numbers, by their names: [1], or [B] with one for each image


@dataclass
class SamplerStep:
    """From one call of the network to the next one at another level. Tensors have the same places of the samples, [N], in
    float32, on the host."""

    told: dict[str, float]  # arguments that were one number for all samples
    then: dict[str, float]  # and those of the next call
    x: Tensor  # what the network got
    answer: Tensor  # what it gave
    after: Tensor  # what it got next


class Calls:
    """`watch` begins; closing `hooks` ends it. Of a class that is compiled nothing is known.

    Args:
        safely: calls what it is given, where nothing is recorded and no error reaches the script.
        is_recorded: whether an update is recorded now.
        trained: called in such an update before each call with gradients: what the network gets, and what it is told.
    """

    def __init__(self, safely: Callable, is_recorded: Callable[[], bool], trained: Callable[[Tensor, Told], None]):
        self.steps: list[SamplerStep] = []
        self.hooks = ExitStack()
        self._safely, self._is_recorded, self._notes = safely, is_recorded, trained
        self._begun = False
        self._last: tuple[nn.Module, dict[str, float], Tensor, Tensor] | None = None
        self._count, self._every = 0, 1
        self._row = 0  # calls since the last one with gradients
        self._own: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # see `_is_alike`

    def watch(self, parameters: list[Tensor]) -> None:
        """Once, from the first recorded update on."""
        if self._begun:
            return
        self._begun, module = True, owner_of(parameters)
        if module is None or _is_compiled(module):
            return
        kind, network = type(module), weakref.ref(module)
        del module
        original = kind.__call__
        try:
            names = list(inspect.signature(kind.forward).parameters)[1:]
        except (TypeError, ValueError):  # it is not written in Python
            return

        def called(this: nn.Module, *given: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or not self._is_own(this, network()):
                return original(this, *given, **named)
            arguments = dict(zip(names, given)) | named
            if torch.is_grad_enabled():
                self._row, self._last = 0, None
                if self._is_recorded():
                    self._safely(self._trained, arguments)
                return original(this, *given, **named)
            answer = original(this, *given, **named)
            self._safely(self._sampled, this, arguments, answer)
            return answer

        if "__call__" in vars(kind):
            self.hooks.callback(setattr, kind, "__call__", original)
        else:
            self.hooks.callback(delattr, kind, "__call__")
        kind.__call__ = called  # type: ignore[method-assign]

    def _is_own(self, module: nn.Module, network: nn.Module | None) -> bool:
        try:
            if module not in self._own:
                self._own[module] = _is_alike(module, network)
            return self._own[module]
        except Exception:  # weights of any kind: it must not reach the script
            return False

    def _trained(self, arguments: dict[str, Any]) -> None:
        x = next((one for one in arguments.values() if _is_image(one)), None)
        if x is not None:
            self._notes(x, {name: one.detach().clone() for name, one in _numbers(arguments, len(x)).items()})

    def _sampled(self, module: nn.Module, arguments: dict[str, Any], answer: Any) -> None:
        answer = getattr(answer, "sample", answer)
        answer = answer[0] if isinstance(answer, tuple) else answer
        x = next((one for one in arguments.values() if _is_image(one)), None)
        if x is None or not isinstance(answer, Tensor) or answer.shape != x.shape:
            return
        self._count, self._row = self._count + 1, self._row + 1
        if self._row < 2 or (self._last is None and self._count % self._every):  # one call is none of a sampler
            return
        numbers = {name: one.double().unique().tolist() for name, one in _numbers(arguments, len(x)).items()}
        told = {name: ones[0] for name, ones in numbers.items() if len(ones) == 1}
        now = _some(x)
        if self._last is not None:
            before, told_before, *values = self._last
            if before is module and told_before.keys() == told.keys() and told_before != told and len(values[0]) == len(now):
                self.steps.append(SamplerStep(told_before, told, *(one.float().cpu() for one in (*values, now))))
            if len(self.steps) == MOST:
                self.steps, self._every = self.steps[::2], 2 * self._every
            is_same = before is module and told_before == told  # two calls of one step, as guidance has them
            self._last = None
            if not is_same and self._count % self._every:
                return
        if told:
            self._last = module, told, now, _some(answer)


def owner_of(parameters: list[Tensor]) -> nn.Module | None:
    """The smallest module that has most of these, rather than a list of modules; None where no module has any."""
    trained, best, owner = {id(parameter) for parameter in parameters}, (0, False, 0), None
    for module in gc.get_objects():
        if issubclass(type(module), nn.Module):  # isinstance would ask stand-ins of other libraries, which then import them
            with suppress(Exception):  # one that is not complete
                own = [id(parameter) in trained for parameter in nn.Module.parameters(module)]
                is_list = type(module).__module__ == nn.ModuleList.__module__
                rank = sum(own), not is_list, -len(list(nn.Module.modules(module)))
                if rank[0] and rank > best:
                    best, owner = rank, module
    return owner


def _is_alike(one: nn.Module, network: nn.Module | None) -> bool:
    """Whether it is the network, or a copy or an average of it."""
    if one is network or network is None:
        return one is network
    both = [list(each.parameters()) for each in (one, network)]
    if [parameter.shape for parameter in both[0]] != [parameter.shape for parameter in both[1]]:
        return False
    ours, theirs = (Samples([parameter.detach() for parameter in each if parameter.ndim > 1]).flat for each in both)
    return float(ours @ theirs) > ALIKE * float(ours.norm() * theirs.norm())


def _is_compiled(module: nn.Module) -> bool:
    kinds = (one for one in gc.get_objects() if type(one).__name__ == "OptimizedModule")
    return module._compiled_call_impl is not None or any(vars(one).get("_orig_mod") is module for one in kinds)


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 and value.numel() > len(value)


def _numbers(arguments: dict[str, Any], size: int) -> Told:
    """Those that are one number, or one for each of `size` samples."""
    plain = {name: torch.tensor([float(one)]) for name, one in arguments.items() if type(one) in (int, float)}
    tensors = {name: one.flatten() for name, one in arguments.items() if isinstance(one, Tensor) and one.numel() in (1, size)}
    return plain | tensors


def _some(value: Tensor) -> Tensor:
    """[N]: a copy of some numbers, the same ones of each tensor of this shape."""
    flat = value.detach().flatten()
    return flat[:: -(-len(flat) // NUMBERS)].clone()

"""The network's calls without gradients, of which a sampler is made: what the script makes of an answer, up to the next call.

This is recorded, and computed again with the answer that a perfect network would give to a mixture of an image and noise.
"""

import gc
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _get_current_dispatch_mode

from steady_doctor.record.guidance import Part, flat, parts_of
from steady_doctor.record.modules import drops, owner_of
from steady_doctor.record.ops import Op
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.samples import Samples
from steady_doctor.record.tape import Tape

MOST = 64  # steps that are kept, the more apart the longer a script samples
ALIKE = 0.5  # the least cosine of a network and its average
LONGEST = 1000  # operations and sources between two calls
STARTS = 4096  # numbers of the first input
FAINT = 0.1  # contrast of the image, so that no sampler cuts it off
ROUNDING = 1e-5  # of what the network gets
# Of what the network gets next, and of the step: what may be neither the image nor the noise, such as an earlier answer.
EXACT, OF_STEP = 1e-2, 0.1
Told = dict[str, Tensor]  # arguments that are numbers, by their names: [1], or [B] with one for each image


class Level(NamedTuple):
    """A call of the network gets a x_0 + b noise there, in `channels`, and is to give p x_0 + q noise. Images are from `low` to
    `high`."""

    name: str  # of the argument by which the network is told it
    a: float
    b: float
    p: float
    q: float
    low: float
    high: float
    channels: tuple[int, int]


Levels = Callable[[dict[str, float]], Level | None]  # of arguments that were one number for all images


@dataclass
class SamplerStep:
    """From a x_0 + b noise, with the answer of a perfect network, to image x_0 + noise times this noise; fresh noise aside."""

    name: str  # of the argument by which the network is told the level
    told: float
    then: float  # at the next call
    image: float
    noise: float
    start: Tensor  # float32: some numbers of what the first call of the row got
    fresh: bool  # there was some
    trains: bool  # whether layers that leave something out by chance, or normalize by the batch, were in training mode
    parts: list[Part]  # of two answers, or of both halves of a batch of the same images twice; else none


class _Short(Tape):
    """What follows the last answer of a sampler, such as a measure of the samples, is not recorded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if len(self.ops) > LONGEST:
            self.paused = 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class Calls:
    """`watch` begins; closing `hooks` ends it. Of a class that is compiled nothing is known.

    Args:
        safely: calls what it is given, where nothing else is recorded and no error reaches the script.
        is_recorded: whether an update is recorded now.
        trained: called in such an update before each call with gradients: what the network gets, and what it is told; and with
            what it gave, after it.
        levels: what the training asks for at a level; None where that is not known.
    """

    def __init__(self, safely: Callable, is_recorded: Callable[[], bool], trained: Callable[..., None], levels: Levels):
        self.steps: list[SamplerStep] = []
        self.hooks = ExitStack()
        self.hooks.callback(self._close)
        self._safely, self._is_recorded, self._trained, self._levels = safely, is_recorded, trained, levels
        self._begun = False
        self._looks: _Looks | None = None
        self._tape: Tape | None = None  # from an answer on, up to the next call
        self._got = torch.zeros(0)  # what the network got there
        self._told: dict[str, float] = {}  # and was told
        self._drawn: list[Tensor] = []  # before that, since the step before
        self._trains = False  # and its mode
        self._generators: list[Tensor] = []  # the states of what draws numbers, before it
        self._answers: list[tuple[Tensor, dict[str, Any]]] = []  # with their arguments; several for one step, as guidance has
        self._count, self._every = 0, 1
        self._row = 0  # calls since the last one with gradients
        self._broken = False
        self._start = torch.zeros(0)
        self._names: list[str] = []  # of the network's arguments
        self._network: Callable[[], nn.Module | None] = lambda: None
        self._kind: type[nn.Module] = nn.Module
        self._thread = 0
        self._weights: tuple[list[torch.Size], Samples] = [], Samples([])  # as they were last: the network may be gone
        self._own: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # it, its copies and averages

    def watch(self, parameters: list[Tensor]) -> None:
        """In each recorded update; it begins with the first one."""
        if not self._broken:
            self._quietly(self._watch, parameters)

    def _watch(self, parameters: list[Tensor]) -> None:
        if self._begun:
            self._weights = _weights_of(network) if (network := self._network()) is not None else self._weights
            return
        module = owner_of(parameters) if self._looks is None else self._called()
        is_called = module is None or type(module).forward is not nn.Module.forward
        if module is not None and not is_called and not _is_compiled(module):  # one of its parts is
            self._looks = self.hooks.enter_context(_Looks(module))
            return
        self._begun = True
        if module is None or not is_called or _is_compiled(module) or "__call__" in vars(kind := type(module)):
            return
        self._names = list(inspect.signature(kind.forward).parameters)[1:]
        self._network, self._kind, self._thread = weakref.ref(module), kind, threading.get_ident()
        self._weights = _weights_of(module)
        self.hooks.callback(delattr, kind, "__call__")
        kind.__call__ = _Around(self, kind)  # type: ignore[method-assign]

    def _called(self) -> nn.Module | None:
        looks, self._looks = self._looks, None
        assert looks is not None  # noqa: S101
        looks.close()
        largest, looks.largest = looks.largest, None  # `hooks` would keep it
        return largest

    def around(self, original: Callable, this: nn.Module, given: tuple, named: dict[str, Any]) -> Any:
        """Calls `original`, the network's own call, and looks at what it gets and gives."""
        mode = _get_current_dispatch_mode()  # another one than a tape is the script's, or the compiler's
        is_elsewhere = self._broken or _is_captured() or threading.get_ident() != self._thread
        if is_elsewhere or not (mode is None or isinstance(mode, Tape)) or not self._is_own(this):
            return original(*given, **named)
        arguments = dict(zip(self._names, given)) | named
        if torch.is_grad_enabled():
            self._row = 0
            self._end(self._close)
            if not self._is_recorded():
                return original(*given, **named)
            self._safely(self._quietly, self._note, arguments)
            answer = original(*given, **named)
            self._safely(self._quietly, self._note_answer, answer)
            return answer
        self._row += 1
        if self._row == 1:
            self._safely(self._quietly, self._begin, arguments)
        self._end(self._arrive, arguments)
        self._safely(self._quietly, self._note_generators)
        answer = original(*given, **named)
        if self._row > 1:  # one call is none of a sampler
            self._safely(self._quietly, self._leave, this, arguments, answer)
        return answer

    def _quietly(self, how: Callable, *arguments: Any) -> None:
        """An error ends the reading of samplers alone."""
        try:
            how(*arguments)
        except Exception:
            self._broken = True
            self._close()

    def _is_own(self, module: nn.Module) -> bool:
        try:
            if module not in self._own:
                is_it = module is self._network() or _are_alike(_weights_of(module), self._weights)
                self._own[module] = is_it and type(module) is self._kind  # not one of a class made of it, around it
            return self._own[module]
        except Exception:  # weights of any kind: it must not reach the script
            return False

    def _note(self, arguments: dict[str, Any]) -> None:
        if (x := _image_in(arguments)) is not None:
            self._trained(x, {name: one.detach().clone() for name, one in _numbers(flat(arguments), len(x)).items()})

    def _note_answer(self, answer: Any) -> None:
        if (given := _answer_in(answer)) is not None:
            self._trained(given)

    def _note_generators(self) -> None:
        self._generators = _generators()

    def _end(self, how: Callable, *arguments: Any) -> None:
        if (tape := self._tape) is not None:
            self._safely(self._quietly, how, *arguments)
            if self._tape is tape:  # the doctor has stopped
                self._close()

    def _begin(self, arguments: dict[str, Any]) -> None:
        x = _image_in(arguments)
        self._start = torch.zeros(0) if x is None else x.detach().flatten()[:STARTS].float().clone()

    def _close(self) -> None:
        if (tape := self._tape) is not None and _get_current_dispatch_mode() is tape:
            tape.__exit__(None, None, None)
        elif tape is not None:  # a mode of the script's stands above it
            tape.paused, self._broken = 1, True
        self._tape, self._answers = None, []

    def _arrive(self, arguments: dict[str, Any]) -> None:
        """At the next call."""
        x, tape = _image_in(arguments), self._tape
        answers = self._answers
        self._close()
        if tape is None or self._broken or x is None or (level := self._levels(self._told)) is None:
            return
        part, drawn = x[:, slice(*level.channels)], [tape.values[op.index] for op in tape.ops if op.kind == "drawn"]
        if part.shape == self._got.shape and not torch.equal(part, self._got):
            told = _told_to_all(arguments, len(x))
            if level.name in told and (op := tape.whole(x)) is not None:
                with suppress(NotRecorded, RuntimeError, LookupError):
                    self._add(tape, op, answers, level, told[level.name])
            self._drawn = drawn
        elif part.shape == self._got.shape:  # another call for the same step
            self._answers = answers

    def _leave(self, this: nn.Module, arguments: dict[str, Any], answer: Any) -> None:
        """After a call, with the answer."""
        x, answer = _image_in(arguments), _answer_in(answer)
        if x is None or answer is None or answer.ndim != x.ndim or len(answer) != len(x):
            self._answers = []
            return
        if not self._answers:
            self._count += 1
            told = {} if _scattered(self._count) % self._every else _told_to_all(arguments, len(x))
            if (level := self._levels(told)) is None:
                return
            self._got, self._told = x[:, slice(*level.channels)].detach().clone(), told
            has_drawn = any(not torch.equal(one, other) for one, other in zip(self._generators, _generators()))
            training = [part for part in this.modules() if part.training]
            by_batch = any(isinstance(part, _BatchNorm) and part.running_mean is not None for part in training)
            self._trains = by_batch or (has_drawn and any(map(drops, training)))  # a layer may rest in this call
        if answer.shape != self._got.shape:
            self._answers = []
            return
        self._answers.append((answer, arguments))
        self._tape = _Short([])
        self._tape.__enter__()

    def _add(self, tape: Tape, op: Op, given_out: list[tuple[Tensor, dict[str, Any]]], level: Level, then: float) -> None:
        (name, a, b, p, q, low, high, channels), x = level, self._got
        answers = {made: told for one, told in given_out if (made := tape.origin(one)) and made.content & op.content}
        if not answers:
            return
        half = len(x) // 2 if len(x) % 2 == 0 and torch.equal(x[: len(x) // 2], x[len(x) // 2 :]) else len(x)  # for guidance
        generator = torch.Generator(x.device).manual_seed(0)
        image, noise = (
            torch.randn(half, *x.shape[1:], generator=generator, device=x.device)
            .to(x.dtype)
            .repeat(len(x) // half, *[1] * (x.ndim - 1))
            for _ in range(2)
        )
        image = (low + high) / 2 + FAINT * (high - low) / 2 * image
        given: dict[Op, Tensor] = dict.fromkeys(answers, p * image + q * noise)
        fresh: dict[Op, Tensor] = {}
        for source in tape.sources(op.content):
            value = tape.values.get(source.index)
            if source.kind == "drawn" or (value is not None and any(torch.equal(value, one) for one in self._drawn)):
                fresh[source] = torch.zeros_like(tape.value(source))
            elif source not in answers and value is not None and value.ndim and (times := _times(value, x[: len(value)])):
                given[source] = (a * image + b * noise)[: len(value)] / times  # it is what the network got, or got twice
        change = lambda given: tape.value(op, fresh | given)[:, slice(*channels)].double()  # noqa: E731
        whole = change(given)
        of_answers = change(given | {answer: given[answer] + 1 for answer in answers}) != whole  # elsewhere is what is known
        y, sides = whole[of_answers], torch.stack([image[of_answers], noise[of_answers]]).double()
        shares = torch.linalg.solve(sides @ sides.T, sides @ y)
        step = y - a * sides[0] - b * sides[1]
        if float((y - shares @ sides).norm()) <= min(EXACT * float(y.norm()), OF_STEP * float(step.norm())):
            made, rest, start = float(shares[0]), float(shares[1]), self._start.cpu()
            is_fresh = not torch.equal(whole, change(given | {source: tape.value(source) for source in fresh}))
            parts = parts_of(change, given, answers, half, FAINT**2)
            self.steps.append(SamplerStep(name, self._told[name], then, made, rest, start, is_fresh, self._trains, parts))
        if len(self.steps) == MOST:
            self.steps = [one for place, one in enumerate(self.steps) if _scattered(place) % 2]
            self._every *= 2


class _Looks(ExitStack):
    """Until it is closed: `largest` is the part of a network, which is not called as a whole, that has most parameters of those
    that get a number beside an image, and give something of the image's shape."""

    def __init__(self, whole: nn.Module):
        super().__init__()
        self.largest: nn.Module | None = None
        self._parts, self._size = weakref.WeakSet(whole.modules()), 0
        self.callback(nn.modules.module.register_module_forward_hook(self._look, with_kwargs=True).remove)

    def _look(self, module: nn.Module, given: tuple, named: dict[str, Any], answer: Any) -> None:
        if module not in self._parts or not torch.is_grad_enabled():
            return
        with suppress(Exception):
            arguments = {str(place): one for place, one in enumerate(given)} | named
            x, made = _image_in(arguments), _answer_in(answer)
            is_denoiser = x is not None and made is not None and made.shape == x.shape and _numbers(arguments, len(x))
            size = sum(parameter.numel() for parameter in module.parameters())
            if is_denoiser and size > self._size:
                self.largest, self._size = module, size


class _Around:
    """Stands in a class in the place of the call that it inherits, which torch.fx exchanges for a while. What a script keeps or
    sends elsewhere has nothing of it."""

    def __init__(self, calls: Calls, kind: type[nn.Module]):
        self._calls, self._kind = calls, kind

    def __get__(self, this: nn.Module | None, kind: type | None = None) -> Any:
        return self if this is None else types.MethodType(self, this)

    def __call__(self, this: nn.Module, *given: Any, **named: Any) -> Any:
        return self._calls.around(super(self._kind, this).__call__, this, given, named)  # type: ignore[misc]

    def __reduce__(self) -> tuple:
        return getattr, (nn.Module, "__call__")


def _weights_of(module: nn.Module) -> tuple[list[torch.Size], Samples]:
    """The shapes of the parameters, and numbers of those that do not begin as 0 or 1."""
    parameters = [parameter.detach() for parameter in module.parameters()]
    return [parameter.shape for parameter in parameters], Samples([one for one in parameters if one.ndim > 1])


def _are_alike(one: tuple[list[torch.Size], Samples], other: tuple[list[torch.Size], Samples]) -> bool:
    ours, theirs = one[1].flat, other[1].flat
    return one[0] == other[0] and float(ours @ theirs) > ALIKE * float(ours.norm() * theirs.norm())


def _is_compiled(module: nn.Module) -> bool:
    """Whether it, or a part of it, is."""
    parts = set(module.modules())
    kinds = (one for one in gc.get_objects() if type(one).__name__ == "OptimizedModule")
    return any(part._compiled_call_impl is not None for part in parts) or any(
        vars(one).get("_orig_mod") in parts for one in kinds
    )


def _generators() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _is_captured() -> bool:
    """Whether this call is compiled, traced or put into a graph, and what stands around it would be, too."""
    in_graph = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or in_graph


def _times(value: Tensor, x: Tensor) -> float:
    """k, where x = k value, as a module may scale what it gets before its network gets it; else 0."""
    if value.shape != x.shape or not value.is_floating_point():
        return 0.0
    ours, theirs = value.double().flatten(), x.double().flatten()
    times = float(ours @ theirs / (ours @ ours).clamp(min=1e-30))
    return times if float((times * ours - theirs).norm()) <= ROUNDING * float(theirs.norm()) else 0.0


def _scattered(number: int) -> int:
    """Whole numbers without a rhythm: calls may have one, of two or four in a step."""
    return (number * 2654435761 % 2**32) >> 16


def _image_in(arguments: dict[str, Any]) -> Tensor | None:
    values = (one for one in arguments.values() if isinstance(one, Tensor) and one.is_floating_point() and one.ndim > 1)
    return next((one for one in values if one.numel() > len(one)), None)


def _answer_in(answer: Any) -> Tensor | None:
    answer = getattr(answer, "sample", answer)
    answer = answer[0] if isinstance(answer, tuple) and answer else answer
    return answer if isinstance(answer, Tensor) else None


def _numbers(arguments: dict[str, Any], size: int) -> Told:
    """Those that are one number, or one for each of `size` samples."""
    plain = {name: torch.tensor([float(one)]) for name, one in arguments.items() if type(one) in (int, float)}
    tensors = {name: one.flatten() for name, one in arguments.items() if isinstance(one, Tensor) and one.numel() in (1, size)}
    return plain | tensors


def _told_to_all(arguments: dict[str, Any], size: int) -> dict[str, float]:
    """Those that are one number for all samples."""
    numbers = {name: one.double().unique().tolist() for name, one in _numbers(arguments, size).items()}
    return {name: ones[0] for name, ones in numbers.items() if len(ones) == 1}

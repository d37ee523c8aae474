"""What a script computes between two forward passes: tensors that may be its images, and what it draws at random."""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MOST, FEWEST = 96, 8  # tensors that are kept of one kind
MOST_BYTES = 1 << 28  # of those of the images' size, which would else be free
MOST_LABELS = 100_000  # numbers in a tensor of labels or texts
TOKENS = 4  # of a text, at least
_DRAWS = {"randn", "randn_like", "normal_", "normal", "normal_functional", "rand", "rand_like", "uniform_"}
_NORMAL = {"randn", "randn_like", "normal_", "normal", "normal_functional"}
_INTEGERS = {"randint", "randint_like", "random_", "multinomial", "randperm"}
_CHANGES = {"_to_copy", "clamp", "clamp_min", "clamp_max", "hardtanh", "tanh", "round", "sign"}  # of what was drawn
_WHOLE: dict[str, Any] = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}
_SCALINGS = {"mul", "mul_", "div", "div_"}


@dataclass
class Draw:
    tensor: torch.Tensor
    normal: bool  # else uniform


@dataclass
class Times:
    """Whole numbers drawn, [B], from `lowest` to below `highest`; 0: not known."""

    values: torch.Tensor
    lowest: int = 0
    highest: int = 0


@dataclass(frozen=True)
class Noising:
    """A call of a scheduler's `add_noise`."""

    scheduler: Any
    clean: torch.Tensor
    noise: torch.Tensor
    timesteps: torch.Tensor
    result: torch.Tensor


@dataclass
class Seen:
    """Tensors by reference, in the order in which they came."""

    draws: list[Draw] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)  # floating, [B, C, ...]
    scaled: set[int] = field(default_factory=set)  # ids of those that are another one times a number of each sample
    labels: dict[int, torch.Tensor] = field(default_factory=dict)  # whole numbers, [B] or [B, tokens]
    earlier: dict[int, torch.Tensor] = field(default_factory=dict)  # copies of them, before they were changed in place
    moments: list[torch.Tensor] = field(default_factory=list)  # drawn, floating [B]
    conditions: dict[int, torch.Tensor] = field(default_factory=dict)  # of the shape of what the network gets beside
    bytes_seen: bool = False  # arithmetic of uint8 images
    overflowed: bool = False  # which left 0 to 255
    reversed: int = 0  # images whose channels were flipped
    changed: set[int] = field(default_factory=set)  # where tensors lie that were changed in place

    def labels_of(self, batch: int) -> list[torch.Tensor]:
        """Those of a batch, and not what was drawn at random."""
        drawn = [times.values for times in self.times]
        found = [labels for labels in (*self.labels.values(), *self.earlier.values()) if len(labels) == batch]
        return [labels for labels in found if not any(labels.shape == d.shape and bool((labels == d).all()) for d in drawn)]


class Recorder(TorchDispatchMode):
    """Keeps references to the tensors of certain sizes that pass by, from `start` to `stop`. Changes none of them."""

    def __init__(self):
        super().__init__()
        self.shape: torch.Size | None = None  # of the network's input; None: any
        self.conditions: set[torch.Size] = set()  # shapes of what the network gets beside
        self.seen = Seen()
        self.running = self._entered = False
        self._process = os.getpid()

    def start(self) -> None:
        if not self._entered and not _in_compiled():
            self._entered = True
            self.__enter__()
        self.running = self._entered

    def stop(self) -> Seen:
        """What was seen, which is then forgotten here."""
        self.running = False
        if self._entered and not _in_compiled():
            self._entered = False
            self.__exit__(None, None, None)
        seen, self.seen = self.seen, Seen()
        return seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name.endswith("_") and name not in _INTEGERS and args and isinstance(args[0], torch.Tensor):
            self._safely(self._keep_earlier, args[0])
        result = func(*args, **(kwargs or {}))
        self._safely(self._see, name, args, kwargs or {}, result)
        return result

    def _safely(self, look: Callable[..., None], *arguments: Any) -> None:
        if self.running and os.getpid() == self._process:
            try:
                look(*arguments)
            except Exception:  # what it cannot read it does not know
                self.running = False

    def _see(self, name: str, args: Any, kwargs: dict, result: Any) -> None:
        seen = self.seen
        if name.endswith("_") and args:
            changed = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            seen.changed |= {tensor.data_ptr() for tensor in changed if isinstance(tensor, torch.Tensor)}
        if isinstance(result, torch.Tensor):
            if name in _DRAWS and result.ndim == 1:
                if len(seen.moments) < FEWEST and (self.shape is None or len(result) == self.shape[0]):
                    seen.moments.append(result.clone())
            elif name in _DRAWS and result.ndim > 1:
                if len(seen.draws) < _most(result):
                    seen.draws.append(Draw(result, name in _NORMAL))
            elif name.rstrip("_") in _CHANGES and result.ndim > 1:
                drawn = next((draw for draw in seen.draws if draw.tensor.data_ptr() == args[0].data_ptr()), None)
                if drawn is not None and len(seen.draws) < _most(result):
                    seen.draws.append(Draw(result, drawn.normal))
            elif name in _INTEGERS and result.ndim == 1 and len(seen.times) < MOST:
                bounds = [a for a in args if isinstance(a, int)] if name == "randint" else []
                seen.times.append(Times(result, bounds[0] if len(bounds) > 1 else 0, bounds[-1] if bounds else 0))
            if name in _SCALINGS and self._fits(result) and self._is_scaling(args):
                seen.scaled.add(id(result))
            if (
                name == "flip"
                and result.ndim in (3, 4)
                and result.shape[-3] == 3
                and -3 in {d % result.ndim - result.ndim for d in args[1]}
            ):
                seen.reversed += len(result) if result.ndim == 4 else 1
            if result.dtype is torch.uint8 and result.ndim > 2 and name.rstrip("_") in _WHOLE:
                self._see_bytes(name, args, kwargs)
            self._keep(result)
        for value in args:
            if isinstance(value, torch.Tensor):
                self._keep(value)

    def _see_bytes(self, name: str, args: Any, options: dict) -> None:
        """Before an operation in place the values are no longer known. Tensors of 0 and 1 are masks, and no images."""
        if name.endswith("_"):
            self.seen.bytes_seen = True
        elif any(isinstance(a, torch.Tensor) and a.numel() and int(a.max()) > 1 for a in args[:2]):
            self.seen.bytes_seen = True
            whole = (a.int() if isinstance(a, torch.Tensor) else a for a in args[:2])
            exact = _WHOLE[name](*whole, **{key: value for key, value in options.items() if key == "alpha"})
            self.seen.overflowed |= bool(((exact < 0) | (exact > 255)).any())

    def _is_scaling(self, args: Any) -> bool:
        """By a number for each sample."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        sizes = [math.prod(n for n, stride in zip(t.shape, t.stride()) if stride) for t in tensors]  # that were expanded, too
        return len(sizes) == 2 and min(sizes) < max(sizes)

    def _fits(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and (tensor.ndim >= 3 if self.shape is None else tensor.shape == self.shape)

    def _keep(self, tensor: torch.Tensor) -> None:
        if self._fits(tensor):
            _keep_newest(self.seen.tensors, tensor, _most(tensor))
        if _may_be_labels(tensor):
            _keep_newest(self.seen.labels, tensor, MOST)
        if tensor.shape in self.conditions and tensor.is_floating_point():
            kept = self.seen.conditions
            most = max(2, min(FEWEST, MOST_BYTES // max(tensor.nbytes, 1)))
            if sum(other.shape == tensor.shape for other in kept.values()) < most:  # the first, before layers make others
                kept[id(tensor)] = tensor

    def _keep_earlier(self, tensor: torch.Tensor) -> None:
        """A copy of what is about to be changed in place."""
        if _may_be_labels(tensor) and (self.shape is None or len(tensor) == self.shape[0]):
            _keep_newest(self.seen.earlier, tensor.clone(), FEWEST)


def _may_be_labels(tensor: torch.Tensor) -> bool:
    of_labels = tensor.ndim == 1 or (tensor.ndim == 2 and tensor.shape[1] >= TOKENS)
    return tensor.dtype is torch.int64 and of_labels and tensor.numel() <= MOST_LABELS


def _most(tensor: torch.Tensor) -> int:
    return max(FEWEST, min(MOST, MOST_BYTES // max(tensor.nbytes, 1)))


def _in_compiled() -> bool:
    """Whether a compiled function is under way, which undoes in its end what is entered or left within it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
        frame = frame.f_back
    return frame is not None


def _keep_newest(kept: dict[int, torch.Tensor], tensor: torch.Tensor, most: int) -> None:
    if id(tensor) not in kept:
        while len(kept) >= most:
            del kept[next(iter(kept))]
        kept[id(tensor)] = tensor

"""What a script computes between two forward passes: tensors that may be its images, and what it draws at random."""

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MOST = 96  # tensors that are kept of one kind
_DRAWS = {"randn", "randn_like", "normal_", "normal", "normal_functional", "rand", "rand_like", "uniform_"}
_NORMAL = {"randn", "randn_like", "normal_", "normal", "normal_functional"}
_INTEGERS = {"randint", "randint_like", "random_", "multinomial", "randperm"}
_SCALINGS = {"mul", "mul_", "div", "div_"}


@dataclass
class Draw:
    tensor: torch.Tensor
    normal: bool  # else uniform
    version: int  # of the tensor when it was drawn

    @property
    def changed(self) -> bool:
        return self.tensor._version != self.version


@dataclass
class Seen:
    """Tensors by reference, in the order in which they came."""

    draws: list[Draw] = field(default_factory=list)
    times: list[torch.Tensor] = field(default_factory=list)  # whole numbers drawn, [B]
    highest: list[int] = field(default_factory=list)  # the exclusive bounds that they were drawn below
    lowest: list[int] = field(default_factory=list)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)  # floating, [B, C, ...]
    scaled: set[int] = field(default_factory=set)  # ids of those that are another one times a number of each sample


class Recorder(TorchDispatchMode):
    """Keeps references to the tensors of certain sizes that pass by, from `start` to `stop`. Changes none of them."""

    def __init__(self):
        super().__init__()
        self.shape: torch.Size | None = None  # of the network's input; None: any
        self.seen = Seen()
        self.running = self.paused = False
        self._process = os.getpid()

    def start(self) -> None:
        if not self.running:
            self.seen = Seen()
            self.running = True
            self.__enter__()

    def stop(self) -> Seen:
        if self.running:
            self.running = False
            self.__exit__(None, None, None)
        return self.seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused and os.getpid() == self._process:
            try:
                self._see(func._overloadpacket.__name__, args, kwargs or {}, result)
            except Exception:  # what it cannot read it does not know
                self.paused = True
        return result

    def _see(self, name: str, args: Any, kwargs: dict, result: Any) -> None:
        seen = self.seen
        if isinstance(result, torch.Tensor):
            if name in _DRAWS and result.ndim > 1:
                if len(seen.draws) < MOST:
                    seen.draws.append(Draw(result, name in _NORMAL, result._version))
            elif name in _INTEGERS and result.ndim == 1 and len(seen.times) < MOST:
                seen.times.append(result)
                numbers = [a for a in args if isinstance(a, int)]
                if name == "randint" and numbers:
                    seen.highest.append(numbers[-1])
                    seen.lowest.append(numbers[0] if len(numbers) > 1 else 0)
            if name in _SCALINGS and self._fits(result) and self._is_scaling(args):
                seen.scaled.add(id(result))
            self._keep(result)
        for value in args:
            if isinstance(value, torch.Tensor):
                self._keep(value)

    def _is_scaling(self, args: Any) -> bool:
        """By a number for each sample."""
        sizes = [a.numel() for a in args if isinstance(a, torch.Tensor)]
        return len(sizes) == 2 and min(sizes) < max(sizes)

    def _fits(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tensor.ndim >= 3 and (self.shape is None or tensor.shape == self.shape)

    def _keep(self, tensor: torch.Tensor) -> None:
        if self._fits(tensor):
            tensors = self.seen.tensors
            if id(tensor) not in tensors:
                while len(tensors) >= MOST:
                    oldest = next(iter(tensors))
                    del tensors[oldest]
                tensors[id(tensor)] = tensor

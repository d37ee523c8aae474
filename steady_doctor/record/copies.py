"""Copies of the weights as they were before the first step: averages, most often. Looked for once."""

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from steady_doctor.record.tape import Tape, _key, sample

DIFFERENT = 8  # numbers of a parameter that differ, so that an equal tensor is no chance
SAME_WAY = 0.5  # cosine of two directions; rounding goes no way
CHANGED = 1e-4  # of its size: more than rounding


@dataclass(eq=False)
class Copy:
    parameter: int
    tensor: weakref.ref
    start: Tensor
    moved: bool = False
    shares: bool = False  # it lies where the parameter lies by now
    in_loss: bool = False
    alive: bool = True


class Copies:
    """Of these parameters, before their first step."""

    def __init__(self, parameters: list[Tensor]):
        self.all: list[Copy] = []
        self.changed: set[int] = set()  # parameters that are others than at first
        self.empty_average = False  # an EMAModel without tensors
        self.left_behind = False  # statistics of batches move, and those of the average stay
        self._parameters = parameters
        self._starts = [sample(parameter) for parameter in parameters]
        known: dict[torch.Size, list[int]] = {}
        for k, start in enumerate(self._starts):
            if len(start.unique()) >= DIFFERENT:
                known.setdefault(parameters[k].shape, []).append(k)
        self.eligible = {k for places in known.values() for k in places}
        own = {_key(parameter) for parameter in parameters}
        norms: list[_NormBase] = []
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, Tensor) and thing.shape in known and thing.is_floating_point() and thing.layout is torch.strided:
                if _key(thing) not in own:
                    self._note(thing, known[thing.shape])
            elif issubclass(kind, _NormBase) and thing.running_mean is not None:
                norms.append(thing)
            elif kind.__name__ == "EMAModel":
                self.empty_average |= getattr(thing, "shadow_params", None) == []
        self._note_norms(norms, own)

    def _note(self, tensor: Tensor, places: list[int]) -> None:
        if any(copy.tensor() is not None and _key(copy.tensor()) == _key(tensor) for copy in self.all):
            return  # seen by another name, as views are
        values = sample(tensor).to(self._starts[places[0]])
        for k in places:
            if torch.equal(values, self._starts[k].to(tensor.dtype).to(values)):
                self.all.append(Copy(k, weakref.ref(tensor), values))
                return

    def _note_norms(self, norms: list[_NormBase], own: set[int]) -> None:
        mine = [norm for norm in norms if norm.weight is not None and _key(norm.weight) in own]
        theirs = [norm for norm in norms if norm not in mine]
        is_pair = [norm.num_features for norm in mine] == [norm.num_features for norm in theirs]
        self._pairs: list[tuple[nn.Module, nn.Module]] = list(zip(mine, theirs)) if is_pair else []
        self._statistics = [(_copied(a), _copied(b)) for a, b in self._pairs]

    def look(self, tape: Tape, loss: set[int]) -> None:
        """At a recorded update. `loss`: the indices of operations that a loss depends on."""
        ways = [sample(parameter).to(start) - start for parameter, start in zip(self._parameters, self._starts)]
        self.changed = {k for k, way in enumerate(ways) if float(way.norm()) > 10 * CHANGED * float(self._starts[k].norm())}
        own = {_key(parameter) for parameter in self._parameters}
        for copy in self.all:
            tensor = copy.tensor()
            copy.alive = tensor is not None
            if tensor is None:
                continue
            copy.shares |= _key(tensor) in own
            source = tape.origin(tensor)
            copy.in_loss |= source is not None and source.index in loss
            gone, way = sample(tensor).to(copy.start) - copy.start, ways[copy.parameter]
            far = float(gone.norm()) > CHANGED * float(copy.start.norm())
            copy.moved |= far or float(gone @ way) > SAME_WAY * float(gone.norm() * way.norm()) > 0
        moved = [not torch.equal(_copied(mine), before) for (mine, _), (before, _) in zip(self._pairs, self._statistics)]
        still = [torch.equal(_copied(theirs), before) for (_, theirs), (_, before) in zip(self._pairs, self._statistics)]
        self.left_behind = bool(moved) and all(moved) and all(still)

    def of(self, which: Iterable[Copy]) -> set[int]:
        return {copy.parameter for copy in which}


def _copied(norm: nn.Module) -> Tensor:
    assert isinstance(norm.running_mean, Tensor)  # noqa: S101
    return norm.running_mean.detach().clone()

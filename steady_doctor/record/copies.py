"""Copies of the weights as they were before the first step: averages, most often. Looked for once."""

import gc
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase

from steady_doctor.record.samples import SAMPLED, Samples
from steady_doctor.record.tape import Tape, key_of

DIFFERENT = 8  # numbers of a parameter that differ, so that an equal tensor is no chance
FIRST, SELDOM = 20, 16  # updates, and the share of them after which late ones are looked for
SAME_WAY = 0.5  # cosine of two directions; rounding goes no way
ALIKE = 1e-5  # of its size
CHANGED = 1e-4  # of its size: more than rounding


@dataclass(eq=False)
class Copy:
    parameter: int
    place: StorageWeakRef  # one to the tensor may outlive it: torch keeps some Python objects beyond their end
    dtype: torch.dtype
    device: torch.device
    layout: tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape, stride
    start: Tensor
    key: int  # of its place
    moved: bool = False
    moved_late: bool = False  # seen between two recorded updates, too
    in_losses: int = 0  # recorded updates whose losses depend on it
    looks: int = 0
    alive: bool = True

    @property
    def in_loss(self) -> bool:
        """Whether losses use it, as those with a teacher do; a preview that loads it once is no such use."""
        return 2 * self.in_losses > self.looks

    def tensor(self) -> Tensor | None:
        if self.place.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.place.cdata)
        return None if storage is None else torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, *self.layout)


class Copies:
    """Of these parameters, before their first step."""

    def __init__(self, parameters: list[Tensor]):
        self.all: list[Copy] = []
        self.changed: set[int] = set()  # parameters that are others than at first
        self.empty_average = False  # an EMAModel without tensors
        self._next = FIRST  # update after which it is looked whether they have moved
        self.left_behind = False  # statistics of batches move, and those of the average stay
        self._parameters = parameters
        self.starts = Samples(parameters).rows
        different = (self.starts.sort(1).values.diff(dim=1) != 0).sum(1) + 1
        known: dict[torch.Size, list[int]] = {}
        for k, count in enumerate(different.tolist()):
            # Samples of smaller ones look like copies.
            if parameters[k].requires_grad and parameters[k].numel() > SAMPLED and count >= DIFFERENT:
                known.setdefault(parameters[k].shape, []).append(k)
        self.eligible = {k for places in known.values() for k in places}
        own = {key_of(parameter) for parameter in parameters if parameter.requires_grad}  # an average may be in the optimizer
        norms: list[_NormBase] = []
        may_be: list[Tensor] = []
        gc.collect()  # a network that the script has given up is no average
        for thing in gc.get_objects():
            kind = type(thing)
            if kind is Tensor or issubclass(kind, nn.Parameter):
                if thing.shape in known and _is_plain(thing) and key_of(thing) not in own:  # views lie there, too
                    may_be.append(thing)
            elif issubclass(kind, _NormBase) and thing.running_mean is not None:
                norms.append(thing)
            elif kind.__name__ == "EMAModel":
                self.empty_average |= getattr(thing, "shadow_params", None) == []
        self._note_norms(norms, own)
        places = set()  # storages of copies
        for tensor, values in zip(may_be, Samples(may_be).rows):
            if key_of(tensor) not in places and self._note(tensor, values, known[tensor.shape]):
                places.add(key_of(tensor))

    def _note(self, tensor: Tensor, values: Tensor, places: list[int]) -> bool:
        layout = int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        equal = [k for k in places if torch.equal(values, self.starts[k].to(tensor.dtype).double())]
        if equal:  # layers may begin alike: then each has a copy
            times = [copy.parameter for copy in self.all]
            k = min(equal, key=times.count)
            place = StorageWeakRef(tensor.untyped_storage())
            self.all.append(Copy(k, place, tensor.dtype, tensor.device, layout, values, key_of(tensor)))
        return bool(equal)

    def _note_norms(self, norms: list[_NormBase], own: set[int]) -> None:
        mine = [norm for norm in norms if norm.weight is not None and key_of(norm.weight) in own]
        sizes = {norm.num_features for norm in mine}
        theirs = [norm for norm in norms if norm not in mine and norm.num_features in sizes]  # others are of an encoder, say
        is_pair = [norm.num_features for norm in mine] == [norm.num_features for norm in theirs]
        self._pairs: list[tuple[nn.Module, nn.Module]] = list(zip(mine, theirs)) if is_pair else []
        self._statistics = [(_copied(a), _copied(b)) for a, b in self._pairs]

    def look(self, tape: Tape, loss: set[int]) -> None:
        """At a recorded update. `loss`: the indices of operations that a loss depends on."""
        ways = Samples(self._parameters).rows - self.starts
        is_other = ways.norm(dim=1) > 10 * CHANGED * self.starts.norm(dim=1)
        self.changed = set(torch.nonzero(is_other).flatten().tolist())
        tensors, are_moved = self._see(ways)
        for copy, tensor, is_moved in zip(self.all, tensors, are_moved):
            copy.moved |= is_moved
            copy.alive = tensor is not None
            if tensor is None:
                continue
            source = tape.origin(tensor)
            copy.in_losses += source is not None and source.index in loss
            copy.looks += 1
        moved = [not torch.equal(_copied(mine), before) for (mine, _), (before, _) in zip(self._pairs, self._statistics)]
        still = [torch.equal(_copied(theirs), before) for (_, theirs), (_, before) in zip(self._pairs, self._statistics)]
        self.left_behind = bool(moved) and all(moved) and all(still)

    def between(self, update: int) -> None:
        """After an update that is not recorded: an average of the last part of the training begins late, and may be gone when
        the script is over. Seldom, as the host waits for a device."""
        if update < self._next or all(copy.moved or copy.moved_late for copy in self.all):
            return
        self._next = update + 1 + update // SELDOM
        with suppress(RuntimeError, NotImplementedError):  # weights that are freed
            for copy, is_moved in zip(self.all, self._see(Samples(self._parameters).rows - self.starts)[1]):
                copy.moved_late |= is_moved

    def _see(self, ways: Tensor) -> tuple[list[Tensor | None], list[bool]]:
        """Returns the copies, None for what is gone, and whether each has moved; `ways`: those of the weights, [P, SAMPLED]."""
        tensors, are_moved = [copy.tensor() for copy in self.all], []
        for copy, tensor, now in zip(self.all, tensors, Samples(tensors).rows):
            gone, way = now - copy.start, ways[copy.parameter]
            far = float(gone.norm()) > CHANGED * float(copy.start.norm())
            is_on_the_way = float(gone @ way) > SAME_WAY * float(gone.norm() * way.norm()) > 0
            share = float(now @ copy.start) / max(float(copy.start @ copy.start), 1e-30)
            is_share = float((now - share * copy.start).norm()) <= ALIKE * float(copy.start.norm())  # of what it was
            are_moved.append(tensor is not None and ((far and not is_share) or is_on_the_way))
        return tensors, are_moved

    def of(self, which: Iterable[Copy]) -> set[int]:
        return {copy.parameter for copy in which}


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout is torch.strided and tensor.device.type != "meta"


def _copied(norm: nn.Module) -> Tensor:
    assert isinstance(norm.running_mean, Tensor)  # noqa: S101
    return norm.running_mean.detach().clone()

"""What torch's loaders returned: which tensors came together, where each pass over the data begins, how long they go on."""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from steady_doctor.record.stored import StoredImages

NEWEST = 4096  # batches whose dataset is known
MOST = 32  # passes whose first images are kept
RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
WRAPS = {"add", "sub", "mul", "add_", "sub_", "mul_"}
MOST_BYTES = 1 << 24


class Loads:
    """All batches of all loaders, by number. Costs each batch some microseconds."""

    def __init__(self) -> None:
        self.count = 0
        self.datasets: dict[int, int] = {}  # number of a batch, of the newest ones: the id of its dataset
        self.rows: dict[int, int] = {}  # of each dataset, by its id: 0 where it has no length
        self.begins: dict[int, list[tuple[float, ...]]] = {}  # of each dataset: means of the first images of each pass
        self.stored: dict[int, StoredImages] = {}  # of each dataset that is read a second time
        self.last_update = 0  # at which the newest one came
        self._numbers: dict[int, tuple[weakref.ref, int]] = {}  # by id(tensor)

    def add(self, iterator: Any, batch: Any, updates: int) -> list[Tensor]:
        """Returns the tensors of the batch."""
        tensors = [x for x in tree_flatten(batch)[0] if isinstance(x, Tensor)]
        for tensor in tensors:
            key = id(tensor)
            self._numbers[key] = weakref.ref(tensor, functools.partial(self._forget, key)), self.count
        self.count, self.last_update = self.count + 1, updates
        dataset = id(iterator._dataset)
        self.datasets[self.count - 1] = dataset
        self.datasets.pop(self.count - 1 - NEWEST, None)
        if iterator._num_yielded == 1:
            self._begin(dataset, iterator._dataset, tensors)
        return tensors

    def _forget(self, key: int, _: weakref.ref) -> None:
        self._numbers.pop(key, None)

    def alive(self) -> Iterator[tuple[Tensor, int]]:
        for reference, number in list(self._numbers.values()):
            if (tensor := reference()) is not None:
                yield tensor, number

    def changed(self) -> bool:
        """Whether images that a dataset keeps have changed since it was read a second time."""
        with contextlib.suppress(Exception):
            return any(stored.changed() for stored in self.stored.values())
        return False

    def _begin(self, key: int, dataset: Any, tensors: list[Tensor]) -> None:
        try:
            self.rows[key] = len(dataset)
        except (TypeError, NotImplementedError):
            self.rows[key] = 0
        images = next((x for x in tensors if x.ndim > 2 and len(x) > 1), None)
        begins = self.begins.setdefault(key, [])
        if begins and key not in self.stored:
            with contextlib.suppress(Exception):  # that the script's own dataset raises
                self.stored[key] = StoredImages(dataset)
        if images is not None and len(begins) < MOST:
            images = (images.abs() if images.is_complex() else images).detach().double()
            weights = torch.rand(
                images.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu"
            )
            # Each image may have been brought to a mean of 0, or be mirrored.
            means = (images * (weights + weights.flip(-1)).to(images.device)).flatten(1).mean(1)
            begins.append(tuple(means.tolist()))


class Handling(TorchDispatchMode):
    """What a dataset does to the images of one batch, in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.flipped: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # (shape, axes)
        self.reshaped: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # (shape before, after)
        self.wrapped = False  # bytes left 0 to 255

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.split("::")[-1]
        self.wrapped |= name in WRAPS and wraps(name, *args)
        result = func(*args, **(kwargs or {}))
        if name == "flip":
            self.flipped.append((tuple(args[0].shape), tuple(axis % args[0].ndim for axis in args[1])))
        elif name in RESHAPES:
            self.reshaped.append((tuple(args[0].shape), tuple(result.shape)))
        return result


def wraps(name: str, one: Any, other: Any = 0, *_: Any) -> bool:
    """Whether arithmetic of an image in bytes leaves 0 to 255, and begins anew at the other end."""
    values = [x for x in (one, other) if isinstance(x, Tensor)]
    if not values or any(x.dtype is not torch.uint8 for x in values) or max(x.ndim for x in values) < 3:
        return False
    if not all(isinstance(x, (Tensor, int)) for x in (one, other)) or sum(x.numel() for x in values) > MOST_BYTES:
        return False
    one, other = (x.to(torch.int32) if isinstance(x, Tensor) else x for x in (one, other))
    exact = one + other if name.startswith("add") else one - other if name.startswith("sub") else one * other
    return bool(((exact < 0) | (exact > 255)).any())

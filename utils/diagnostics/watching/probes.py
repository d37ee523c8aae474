"""A few elements of weights and averages, looked at in each update: what the looks at whole updates would miss."""

from collections.abc import Sequence

import torch
from torch.optim.swa_utils import AveragedModel

from utils.diagnostics.watching.facts import Average

MOST = 256  # that are kept until they are compared
SOON = 4  # of averages, which are looked at until they are known to be averages
FEWEST, SELDOM = 20, 0.05  # updates before an average is said to move seldom; some are made in every tenth
MOST_PROBED = 96  # weights of which one element is
PROBED = 16  # elements that are compared
EVERY = 4  # updates, of an average that is known to be one


class _Each:
    """An element of each of some tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors, self._places = list(tensors), [-1] * len(tensors)
        self._views: list[torch.Tensor] = []

    def clone(self) -> torch.Tensor:
        places = [tensor.data_ptr() for tensor in self._tensors]
        if places != self._places:
            self._places = places
            self._views = [t.detach().as_strided((1,), (1,), t.storage_offset() + t.numel() // 2) for t in self._tensors]
        return torch.cat(self._views)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether its storage has a number for each element."""
    room = tensor.untyped_storage().nbytes() // tensor.itemsize if tensor.layout is torch.strided else 0
    return 0 < tensor.numel() <= room - tensor.storage_offset()


class _View:
    """The first elements of a tensor that may be put in another place."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self._place = tensor, -1

    def clone(self) -> torch.Tensor:
        tensor = self._tensor.detach()
        if tensor.data_ptr() != self._place:
            self._place = tensor.data_ptr()
            self._view = tensor.as_strided((min(PROBED, tensor.numel()),), (1,), tensor.storage_offset())
        return self._view.clone()


class Probe:
    """The weights after each step and before the next forward pass: whether anything else changes them."""

    def __init__(self, weights: Sequence[torch.Tensor]):
        alike = [w for w in weights if (w.device, w.dtype) == (weights[0].device, weights[0].dtype) and _is_whole(w)]
        self._weights = _Each(alike[:: -(-len(alike) // MOST_PROBED)] if len(alike) > MOST_PROBED else alike)
        self._left: list[torch.Tensor] = []
        self._found: list[torch.Tensor] = []
        self._moved = False

    def take(self) -> None:
        del self._left[len(self._found) :]
        self._left.append(self._weights.clone())

    def again(self) -> None:
        if len(self._left) > len(self._found):
            self._found.append(self._weights.clone())
        if len(self._found) >= MOST:
            self._moved = self.moved()

    def moved(self) -> bool:
        """Whether it was so since it was last asked."""
        left, found = self._left[: len(self._found)], self._found
        same = not found or torch.equal(torch.stack(left).nan_to_num(), torch.stack(found).nan_to_num())
        moved = self._moved or not same
        self._left, self._found, self._moved = [], [], False
        return moved


class CopyProbe:
    """An average and its weights between updates: whether it becomes something other than a copy, and how often it moves."""

    def __init__(self, average: Average, parameter: str, weights: torch.Tensor):
        self.name, self.begins, self.averages = average.name, average.begins, False
        self.copies = 0  # updates in which it became a copy
        self.moves = 0  # after it first moved
        self._updates = self._begun = self._moved = 0  # made; of them the first in which it moved, and the latest
        self._gaps: set[int] = set()  # updates from one move to the next
        self._average, self._parameter, self._weights = average, parameter, _View(weights)
        self._kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def take(self) -> None:
        self._updates += 1
        if self.averages and self._updates % EVERY:
            return
        average, weights = _View(self._average.now()[self._parameter]).clone(), self._weights.clone()
        self._kept.append((self._updates, average, weights))
        if len(self._kept) >= (MOST if self.averages else SOON):
            self.compare()

    @property
    def since(self) -> int:
        """Updates after it first moved."""
        return self._kept[-1][0] - self._begun if self._kept and self._begun else 0

    @property
    def seldom(self) -> bool:
        """Whether it moves, and in hardly any update."""
        return self.since >= FEWEST and self.moves < SELDOM * self.since

    @property
    def in_rhythm(self) -> bool:
        """Whether all its moves may be as far from each other, as those of each epoch are."""
        return not self._gaps or max(self._gaps) - min(self._gaps) <= EVERY

    def moves_in_each(self, updates: int) -> bool:
        """Whether it moves once in so many updates, from the first on, as far as was seen."""
        gaps = {self._begun, *self._gaps}
        return bool(self._gaps) and all(abs(gap - updates) < EVERY for gap in gaps)

    @property
    def of_epochs(self) -> bool:
        return isinstance(self._average.owner, AveragedModel)

    def compare(self) -> None:
        for (_, before, _), (update, average, weights) in zip(self._kept, self._kept[1:]):
            if not torch.equal(before, average):
                if self._begun:
                    self.moves += 1
                    self._gaps.add(update - self._moved)
                self._begun, self._moved = self._begun or update, update
                copied = torch.equal(average, weights.to(average))
                self.copies, self.averages = self.copies + copied, self.averages or not copied
        del self._kept[:-1]

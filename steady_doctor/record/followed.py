"""A few numbers of the weights and of their averages, followed through every update: what is changed between two of them, or
happens to an average in one that is not recorded, shows at the next look."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

NUMBERS = 64  # of one tensor: each operation of an update costs more than its numbers
ROUNDING = 1.2e-7  # of float32, that each update of an average may leave, as chance has it


class Followed:
    """Costs some small operations in each update, of tensors without gradients, and the host waits for none of them.

    Args:
        parameters: those that are trained, by name.
        averages: name -> {parameter's name: averaged tensor}.
        decays: name -> the decay of the average's n-th update.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        averages: Mapping[str, Mapping[str, Tensor]],
        decays: Mapping[str, Callable[[int], float]],
    ):
        names = [name for name in parameters if all(name in average for average in averages.values())]
        names = [n for n in names if all(t.is_contiguous() for t in (parameters[n], *(a[n] for a in averages.values())))]
        chosen = names[len(names) // 2] if names else None
        self._weights = None if chosen is None else _Few(parameters[chosen])
        self._averages = {key: _Few(average[chosen]) for key, average in averages.items() if key in decays and chosen}
        self._decays = decays
        self.updates = 0  # since the last look
        self.changed: list[tuple[int, int]] = []  # of each look: updates since the one before, and those of them with a change
        self.off: list[tuple[str, int, float]] = []  # average, updates, and how far it is from what they give, over its size
        self.moved: list[tuple[str, float]] = []  # average, and how far something between two updates moved it, over its size
        self._known = 0, 0  # of `changed` and `off`, before the last look
        self.restart()

    def restart(self) -> None:
        """Follows weights and averages from the next update on, as they are then."""
        self._left: Tensor | None = None  # the weights that the newest step left
        self._changed: int | Tensor = 0  # how often they were others later
        self._expected: dict[str, Tensor] = {}
        self._rounding = dict.fromkeys(self._averages, 0.0)
        self.updates = 0

    def forget(self) -> None:
        """The newest update is no longer what it was: nor is what was found at it."""
        if not self.updates:
            del self.changed[self._known[0] :], self.off[self._known[1] :]
        self._known = len(self.changed), len(self.off)
        self.restart()

    def begin(self) -> None:
        """Before an update."""
        if self._weights is None:
            return
        if self._left is None:
            self._left = self._weights.now().clone()
            self._expected = {name: average.now().clone() for name, average in self._averages.items()}
        self._compare(self._weights.now(), self._left)

    def _compare(self, now: Tensor, left: Tensor) -> None:
        if now.device.type != "cpu":
            self._changed = self._changed + (now != left).any()
            left.copy_(now)
        elif not torch.equal(now, left):
            self._changed += 1
            left.copy_(now)

    def stepped(self) -> None:
        """When the weights are those of the next update."""
        if self._left is not None and self._weights is not None:
            self._left.copy_(self._weights.now())

    def end(self, update: int, finite: Tensor) -> None:
        """After the update of that number, its averages among it; `finite`: whether it was made, 0-dim."""
        if self._left is None:
            return
        for name, expected in self._expected.items():
            decay = self._decays[name](update)
            moves = (1 - decay) * (float(finite) if finite.device.type == "cpu" else finite.float())
            expected.lerp_(self._left.to(expected.dtype), moves)
            self._rounding[name] = math.hypot(self._rounding[name] * decay, ROUNDING)
        self.updates += 1

    def note(self, name: str, off: float) -> None:
        """That something between two updates moved an average of that name; the weights: an empty one."""
        if name:
            self.moved.append((name, off))
        else:
            self.changed.append((1, 1))

    def look(self) -> None:
        """At all updates since the last look; the host waits for the device."""
        if not self.updates or self._weights is None or self._left is None:
            return
        self._known = len(self.changed), len(self.off)
        self._compare(self._weights.now(), self._left)
        self.changed.append((self.updates, int(self._changed)))
        for name, expected in self._expected.items():
            now = self._averages[name].now()
            size = float(now.norm())
            room = (8 * self._rounding[name] + 1e-6) * size + 1e-12
            if (off := float((now - expected).norm())) > room:
                self.off.append((name, self.updates, off / max(size, 1e-30)))
            expected.copy_(now)
            self._rounding[name] = 0.0
        self._changed = self.updates = 0


class _Few:
    """The first numbers of a tensor, where they lie."""

    def __init__(self, tensor: Tensor):
        self._tensor, self._view, self._pointer = tensor, torch.empty(0), -1

    def now(self) -> Tensor:
        """A view [n], made anew where the tensor has got other memory."""
        if self._tensor.data_ptr() != self._pointer:
            self._pointer = self._tensor.data_ptr()
            self._view = self._tensor.detach().view(-1)[:NUMBERS]
        return self._view

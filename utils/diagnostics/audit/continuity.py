"""A few elements of the weights and of their averages, followed through every update: what is changed between two updates, or
happens to an average in one that is not looked at, shows at the next look."""

import math
from collections.abc import Callable, Mapping

import torch

from utils.diagnostics.audit.verdict import Check

ELEMENTS = 64  # of one tensor: each operation of an update costs more than its elements
ROUNDING = 1.2e-7  # of fp32, that each update of an average may leave, as chance has it


class Continuity:
    """Costs some small operations in each update, of tensors without gradients, and the host waits for none of them.

    Args:
        parameters: those that are trained, by name.
        averages: name -> {parameter's name: averaged tensor}.
        decays: name -> the decay of the average's n-th update.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        averages: Mapping[str, Mapping[str, torch.Tensor]],
        decays: Mapping[str, Callable[[int], float]],
    ):
        names = [name for name in parameters if all(name in average for average in averages.values())]
        names = [n for n in names if all(t.is_contiguous() for t in (parameters[n], *(a[n] for a in averages.values())))]
        chosen = names[len(names) // 2] if names else None
        self._weights = None if chosen is None else _Few(parameters[chosen])
        self._averages = {key: _Few(average[chosen]) for key, average in averages.items() if key in decays and chosen}
        self._decays = decays
        self.restart()

    def restart(self) -> None:
        """Follows weights and averages from the next update on, as they are then."""
        self._left: torch.Tensor | None = None  # the weights that the newest step left
        self._changed: int | torch.Tensor = 0  # how often they were others at a later look
        self._expected: dict[str, torch.Tensor] = {}
        self._rounding = dict.fromkeys(self._averages, 0.0)
        self._since = 0  # updates since the averages were looked at

    def begin(self) -> None:
        """Before an update."""
        if self._weights is None:
            return
        if self._left is None:
            self._left = self._weights.now().clone()
            self._expected = {name: average.now().clone() for name, average in self._averages.items()}
        self._compare(self._weights, self._left)

    def _compare(self, weights: "_Few", left: torch.Tensor) -> None:
        now = weights.now()
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

    def end(self, number: int, finite: torch.Tensor) -> None:
        """After the update of that `number`, its averages among it; `finite`: whether it was made, 0-dim."""
        if self._left is None or self._weights is None:
            return
        for name, expected in self._expected.items():
            decay = self._decays[name](number)
            moves = (1 - decay) * (float(finite) if finite.device.type == "cpu" else finite.float())
            expected.lerp_(self._left.to(expected.dtype), moves)
            self._rounding[name] = math.hypot(self._rounding[name] * decay, ROUNDING)
        self._since += 1

    def checks(self) -> list[Check]:
        """Of all updates since the last call."""
        if not self._since or self._weights is None or self._left is None:
            return []
        self._compare(self._weights, self._left)
        checks, changed, since = [], int(self._changed), self._since
        text = f"something other than the optimizer changes the weights: after {changed} of {since} updates they had changed"
        found = f"changed after {changed} of {since} updates" if changed else "unchanged"
        checks.append(Check("state", "weights between all updates", "unchanged", found, not changed, text))
        for name, expected in self._expected.items():
            now = self._averages[name].now()
            off, size = float((now - expected).norm()), float(now.norm())
            room = (8 * self._rounding[name] + 1e-6) * size + 1e-12
            text = f"{name} is not what {since} updates since the last look give: it was changed, reset or left out meanwhile"
            said = f"off by {off / max(size, 1e-30):.1e}"
            checks.append(Check("ema", f"{name} over all updates", "each with its decay", said, off <= room, text))
            expected.copy_(now)
            self._rounding[name] = 0.0
        self._changed = self._since = 0
        return checks


class _Few:
    """The first elements of a tensor, where they lie."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self._view, self._pointer = tensor, torch.empty(0), -1

    def now(self) -> torch.Tensor:
        """A view [n], made anew where the tensor has got other memory."""
        if self._tensor.data_ptr() != self._pointer:
            self._pointer = self._tensor.data_ptr()
            self._view = self._tensor.detach().view(-1)[:ELEMENTS]
        return self._view

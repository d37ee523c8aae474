"""A few elements of the weights and of their averages, followed through every update: what is changed between two updates, or
happens to an average in one that is not looked at, shows at the next look."""

import math
from collections.abc import Callable, Mapping

import torch

from utils.diagnostics.audit.verdict import Check

TENSORS, ELEMENTS = 2, 64  # of which the elements are, and how many of each
ROUNDING = 1.2e-7  # of fp32, that each update of an average may leave, as chance has it


class Continuity:
    """Costs some small operations in each update, and the host waits for none of them.

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
        chosen = dict.fromkeys(names[:: max(1, len(names) - 1)][:TENSORS]) if names else {}
        self._weights = [parameters[name] for name in chosen]
        self._averages = {
            key: [average[name] for name in chosen] for key, average in averages.items() if key in decays and chosen
        }
        self._decays = decays
        self._left: torch.Tensor | None = None  # the weights when the newest update was over
        self._changed: int | torch.Tensor = 0  # how often they were changed between two updates
        self._expected: dict[str, torch.Tensor] = {}
        self._rounding = dict.fromkeys(self._averages, 0.0)
        self._since = 0  # updates since the averages were looked at

    @torch.no_grad()
    def begin(self) -> None:
        """Before an update."""
        if not self._weights:
            return
        if self._left is None:
            self._expected = {name: _few(tensors) for name, tensors in self._averages.items()}
        else:
            now = _few(self._weights)
            if now.device.type == "cpu":
                self._changed += not torch.equal(now, self._left)
            else:
                self._changed += (now != self._left).any()

    @torch.no_grad()
    def end(self, number: int, finite: torch.Tensor) -> None:
        """After the update of that `number`, its averages among it; `finite`: whether it was made, 0-dim."""
        if not self._weights:
            return
        self._left = _few(self._weights)
        for name, expected in self._expected.items():
            decay = self._decays[name](number)
            moves = float(finite) if finite.device.type == "cpu" else finite.to(expected)
            expected.lerp_(self._left, (1 - decay) * moves)
            self._rounding[name] = math.hypot(self._rounding[name] * decay, ROUNDING)
        self._since += 1

    @torch.no_grad()
    def checks(self) -> list[Check]:
        """Of all updates since the last call."""
        if not self._since:
            return []
        checks, changed, since = [], int(self._changed), self._since
        text = f"something else than the optimizer changes the weights, between two updates, in {changed} of {since} cases"
        found = f"changed in {changed} of {since} cases" if changed else "unchanged"
        checks.append(Check("state", "weights between all updates", "unchanged", found, not changed, text))
        for name, expected in self._expected.items():
            now = _few(self._averages[name])
            off = float((now - expected).norm())
            room = (8 * self._rounding[name] + 1e-6) * float(now.norm()) + 1e-12
            text = (
                f"{name} is not what the {since} updates since the last look give: it was changed, left out or reset in between"
            )
            said = f"off by {off / max(float(expected.norm()), 1e-30):.1e}"
            checks.append(Check("ema", f"{name} over all updates", "each with its decay", said, off <= room, text))
            self._expected[name], self._rounding[name] = now, 0.0
        self._changed = self._since = 0
        return checks


def _few(tensors: list[torch.Tensor]) -> torch.Tensor:
    """float32 [n], their first elements."""
    return torch.cat([_first(tensor) for tensor in tensors])


def _first(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():  # the same by one call
        few = tensor.as_strided((min(ELEMENTS, tensor.numel()),), (1,), tensor.storage_offset())
    else:
        few = tensor.reshape(-1)[:ELEMENTS]
    return few if few.dtype == torch.float32 else few.float()

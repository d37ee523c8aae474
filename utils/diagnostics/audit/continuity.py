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
        names = [n for n in names if all(t.is_contiguous() for t in (parameters[n], *(a[n] for a in averages.values())))]
        chosen = dict.fromkeys(names[:: max(1, len(names) - 1)][:TENSORS])
        self._weights = _Few([parameters[name] for name in chosen])
        self._averages = {key: _Few([average[name] for name in chosen]) for key, average in averages.items() if key in decays}
        self._decays = decays
        self._left: list[torch.Tensor] = []  # the weights when the newest update was over
        self._changed: int | torch.Tensor = 0  # how often they were changed between two updates
        self._expected: dict[str, list[torch.Tensor]] = {}
        self._rounding = dict.fromkeys(self._averages, 0.0)
        self._since = 0  # updates since the averages were looked at

    @torch.no_grad()
    def begin(self) -> None:
        """Before an update."""
        if not self._left:
            self._left = [few.clone() for few in self._weights.now()]
            self._expected = {name: [few.clone() for few in average.now()] for name, average in self._averages.items()}
            return
        pairs = list(zip(self._weights.now(), self._left))
        if pairs and pairs[0][0].device.type != "cpu":
            self._changed = self._changed + torch.stack([(now != left).any() for now, left in pairs]).any()
        elif not all(torch.equal(now, left) for now, left in pairs):
            self._changed += 1

    @torch.no_grad()
    def end(self, number: int, finite: torch.Tensor) -> None:
        """After the update of that `number`, its averages among it; `finite`: whether it was made, 0-dim."""
        for left, now in zip(self._left, self._weights.now()):
            left.copy_(now)
        for name, parts in self._expected.items():
            decay = self._decays[name](number)
            moves = (1 - decay) * (float(finite) if finite.device.type == "cpu" else finite.float())
            for expected, left in zip(parts, self._left):
                expected.lerp_(left.to(expected.dtype), moves)
            self._rounding[name] = math.hypot(self._rounding[name] * decay, ROUNDING)
        self._since += 1

    @torch.no_grad()
    def checks(self) -> list[Check]:
        """Of all updates since the last call."""
        if not self._since or not self._left:
            return []
        checks, changed, since = [], int(self._changed), self._since
        text = f"something else than the optimizer changes the weights, between two updates, in {changed} of {since} cases"
        found = f"changed in {changed} of {since} cases" if changed else "unchanged"
        checks.append(Check("state", "weights between all updates", "unchanged", found, not changed, text))
        for name, parts in self._expected.items():
            now, expected = torch.cat(self._averages[name].now()), torch.cat(parts)
            off, size = float((now - expected).norm()), float(now.norm())
            room = (8 * self._rounding[name] + 1e-6) * size + 1e-12
            text = f"{name} is not what {since} updates since the last look give: it was changed, reset or left out meanwhile"
            said = f"off by {off / max(size, 1e-30):.1e}"
            checks.append(Check("ema", f"{name} over all updates", "each with its decay", said, off <= room, text))
            for part, few in zip(parts, self._averages[name].now()):
                part.copy_(few)
            self._rounding[name] = 0.0
        self._changed = self._since = 0
        return checks


class _Few:
    """The first elements of tensors, where they lie."""

    def __init__(self, tensors: list[torch.Tensor]):
        self._tensors, self._views = tensors, list[torch.Tensor]()
        self._pointers: list[int] = []

    def now(self) -> list[torch.Tensor]:
        """Views [n]; they are made anew where a tensor has got other memory."""
        pointers = [tensor.data_ptr() for tensor in self._tensors]
        if pointers != self._pointers:
            self._pointers = pointers
            self._views = [tensor.detach().view(-1)[:ELEMENTS] for tensor in self._tensors]
        return self._views

"""Some numbers of tensors. Many at once take one small operation each; the host waits for a device when they are read."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

SAMPLED = 64  # numbers of one tensor
PLAIN = (Tensor, torch.nn.Parameter)


def sample(tensor: Tensor) -> Tensor:
    """Returns some numbers, spread evenly, in float64: at most SAMPLED."""
    with torch.no_grad():
        return _some(tensor).to(torch.float64, copy=True)


def _some(tensor: Tensor) -> Tensor:
    """A view, where the tensor lies in one piece."""
    count = tensor.numel()
    stride = max(1, count // SAMPLED)
    if type(tensor) in PLAIN and tensor.layout is torch.strided and tensor.is_contiguous():
        return tensor.as_strided((min(SAMPLED, -(-count // stride)),), (stride,))
    return tensor.reshape(-1)[::stride][:SAMPLED]


class Samples:
    """Of each of P tensors what `sample` gives, as it was when this was made. None: there is none."""

    def __init__(self, tensors: Sequence[Tensor | None]):
        with torch.no_grad():
            is_known = [tensor is not None and tensor.layout is torch.strided for tensor in tensors]
            parts = [_some(tensor) if known else None for tensor, known in zip(tensors, is_known)]  # type: ignore[arg-type]
        known = [part for part in parts if part is not None]
        self._sizes = [0 if part is None else len(part) for part in parts]
        self._there = [part is not None for part in parts]
        if len({part.device for part in known}) > 1:
            known = [part.cpu() for part in known]
        self._flat = torch.cat(known).detach() if known else torch.zeros(0)

    @cached_property
    def flat(self) -> Tensor:
        """All numbers in one row, in float64, on the host."""
        return self._flat.cpu().double()

    @cached_property
    def rows(self) -> Tensor:
        """[P, SAMPLED] in float64, on the host: 0 beyond the end of a tensor."""
        rows = torch.zeros(len(self._sizes), SAMPLED, dtype=torch.float64)
        rows[self.within] = self.flat
        return rows

    @cached_property
    def within(self) -> Tensor:
        """bool [P, SAMPLED]: which numbers of `rows` are of a tensor."""
        return torch.arange(SAMPLED) < self.sizes[:, None]

    @cached_property
    def sizes(self) -> Tensor:
        """int64 [P]: how many numbers there are of each."""
        return torch.tensor(self._sizes)

    @cached_property
    def there(self) -> Tensor:
        """bool [P]: whether there is a tensor."""
        return torch.tensor(self._there)

    @cached_property
    def some(self) -> Tensor:
        """bool [P]: whether any number is not 0."""
        return self.rows.any(1)


def far(now: Tensor, old: Tensor) -> float:
    """The largest distance of two rows of [P, N], over the size of the old one; 0 where nothing is known."""
    distances = (now - old).norm(dim=-1) / old.norm(dim=-1).clamp(min=1e-12)
    return float(distances.nan_to_num(nan=0.0, posinf=torch.inf).max()) if len(now) else 0.0

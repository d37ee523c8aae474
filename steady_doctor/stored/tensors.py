"""Named tensors beside named tensors: which are missing, which differ, and by how much."""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+|(?<=\.)_orig_mod\.")  # what torch.compile and DDP put into names
FEW = 4  # tensors that stand for all


class Stored(Mapping):
    """The tensors of safetensors files, each read when it is asked for."""

    def __init__(self, *paths: Path):
        self._file_of: dict[str, Any] = {}
        for path in paths:
            file = safe_open(path, framework="pt")
            self._file_of |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


@dataclass(frozen=True)
class Difference:
    missing: list[str]  # names that were expected and not found
    unexpected: list[str]
    different: list[str]  # names of other values or another shape
    compared: int
    distance: float  # ||found - expected|| / ||expected|| over those compared, without those of another shape

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.different)

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "different": len(self.different),
            "compared": self.compared,
            "by": self.distance,
            "missing": len(self.missing),
            "unexpected": len(self.unexpected),
            "such_as": (*self.different, *self.missing, *self.unexpected)[0],
        }


def difference(
    expected: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    *,
    rounded: Set[str] = frozenset(),
    only: Set[str] | None = None,
) -> Difference:
    """The `Difference` of `found` from `expected`, exact but for the names in `rounded`, where the fifth digit may differ.

    `only`: the names whose values are compared; None: all. One tensor after the other is on the CPU: MPS has no float64.
    """
    common = [name for name in expected if name in found and (only is None or name in only)]
    different, apart, size = [], 0.0, 0.0
    for name in common:
        a, b = expected[name].detach().cpu(), found[name].detach().cpu()
        if a.shape != b.shape:
            different.append(name)
            continue
        size += _square(a)
        if not same(a, b, 1e-5 if name in rounded else 0.0):
            different.append(name)
            apart += _square(b.double() - a.double())
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    return Difference(missing, unexpected, different, len(common), (apart / size) ** 0.5 if size else float(apart > 0))


def same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 0.0) -> bool:
    """Whether two tensors of one shape hold the same numbers (NaN is like NaN), or numbers as near as `tolerance` times the
    largest one."""
    if a.dtype != b.dtype:
        a, b = a.double(), b.double()
    if torch.equal(a, b):
        return True
    if tolerance:
        return bool((a - b).abs().max() <= tolerance * a.abs().max())
    return bool((a.isnan() & b.isnan() | (a == b)).all()) if a.is_floating_point() else False


def few(names: Iterable[str], turn: int) -> set[str]:
    """FEW of the names, spread over all; others at the next turn."""
    ordered = sorted(names)
    stride = max(1, -(-len(ordered) // FEW))
    return set(ordered[turn % stride :: stride])


def unwrapped(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names that the network has without wrappers."""
    return {WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())

"""Two answers of the network for one step of a sampler, as guidance has them: what each knew, and how much of it is used."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steady_doctor.record.ops import Op


class Known(NamedTuple):
    """An argument of the network that the two answers do not have alike, in one of them."""

    given: bool
    alike: bool = False  # the same for all samples
    labels: frozenset[float] = frozenset()  # where it is one number for each sample


class Part(NamedTuple):
    """One of the two."""

    weight: float  # of the answer, in what the network gets next
    known: dict[str, Known]  # by the names of arguments


def parts_of(
    change: Callable[[dict[Op, Tensor]], Tensor],
    given: dict[Op, Tensor],
    answers: dict[Op, dict[str, Any]],
    half: int,
    faint: float,
) -> list[Part]:
    """Each answer is changed a little, alone: `change` gives what the network gets next, of these answers. `half`: the size of
    a batch, or half of it where its halves have the same images."""
    calls, size = list(answers.values()), len(given[next(iter(answers))])
    if half < size and len(calls) == 1:
        places = [(op, place) for op in answers for place in (slice(half), slice(half, size))]
        known = _differences(*_halves(calls[0], size), half)
    elif half == size and len(calls) == 2:
        places, known = [(op, slice(size)) for op in answers], _differences(calls[0], calls[1], size)
    else:
        return []
    plain, parts = change(given), []
    for (op, place), of_it in zip(places, known):
        changed = given[op].clone()
        little = faint * torch.linspace(-1, 1, changed[place].numel(), device=changed.device).reshape(changed[place].shape)
        changed[place] += little.to(changed)
        moved = (change(given | {op: changed}) - plain)[:half]
        parts.append(Part(float((moved * little).sum() / little.double().square().sum()), of_it))
    return parts


def _differences(one: dict[str, Any], other: dict[str, Any], size: int) -> tuple[dict[str, Known], dict[str, Known]]:
    """Of two calls with `size` samples each, in their order."""
    one, other = flat(one), flat(other)
    names = [name for name in one | other if _differ(one.get(name), other.get(name))]
    first, second = ({name: _known(call.get(name), size) for name in names} for call in (one, other))
    return first, second


def _halves(call: dict[str, Any], size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the two halves of a batch of `size`."""
    parts = {name: one for name, one in flat(call).items() if isinstance(one, Tensor) and one.ndim and len(one) == size}
    half = size // 2
    return {name: one[:half] for name, one in parts.items()}, {name: one[half:] for name, one in parts.items()}


def flat(call: dict[str, Any]) -> dict[str, Any]:
    """With what stands in arguments that are dictionaries."""
    inner = {f"{name}.{key}": each for name, one in call.items() if isinstance(one, dict) for key, each in one.items()}
    return call | inner


def _differ(one: Any, other: Any) -> bool:
    both = [isinstance(each, Tensor) for each in (one, other)]
    if all(both):
        return one.shape == other.shape and not torch.equal(one, other)
    return any(both) and (one is None or other is None)


def _known(value: Tensor | None, size: int) -> Known:
    if value is None:
        return Known(False)
    labels = frozenset(value.flatten().tolist()) if value.numel() == size else frozenset()
    return Known(True, value.ndim > 0 and len(value) == size and bool((value == value[:1]).all()), labels)

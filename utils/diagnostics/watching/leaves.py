"""What the network is told beside the image may be made of weights of its own, such as an embedding of the classes: whether
some optimizer trains them."""

import gc
from collections.abc import Collection, Sequence
from typing import Any

import torch

from utils.diagnostics.audit.verdict import Check

MOST = 4096  # operations that are gone through
FEW = 8  # weights; a text encoder, which has more, may be kept as it is without being frozen


def leaves_of(values: Sequence[Any]) -> list[torch.Tensor]:
    """The weights, each once, of which tensors (also in lists and dicts) are made with a gradient."""
    waiting, found = _operations(values), {}
    seen: set[Any] = set()
    while waiting and len(seen) < MOST:
        operation = waiting.pop()
        if operation is None or operation in seen:
            continue
        seen.add(operation)
        if isinstance(weight := getattr(operation, "variable", None), torch.Tensor):
            found[id(weight)] = weight
        waiting += [before for before, _ in operation.next_functions]
    return list(found.values())


def _operations(values: Sequence[Any]) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value.grad_fn)  # None of what is given without a gradient
        elif isinstance(value, (dict, list, tuple)):
            found += _operations(list(value.values()) if isinstance(value, dict) else value)
    return found


def check_leaves(values: Sequence[Any], trained: Collection[int]) -> list[Check]:
    """`values`: what the network gets beside the image; `trained`: ids of what optimizers have that have made a step."""
    weights = leaves_of(values)
    if not weights:
        return []
    left = [weight for weight in weights if id(weight) not in trained]
    if left:  # one that has not made a step yet may have them
        optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
        known = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        left = [weight for weight in left if id(weight) not in known]
    few = len(left) <= FEW
    shapes = ", ".join(str(tuple(weight.shape)) for weight in left[:3])
    text = f"weights of which the network's conditions are made get gradients, and no optimizer has them: {shapes}"
    name, wanted, found = "weights of the conditions", "trained, or frozen", f"{len(weights) - len(left)} of {len(weights)}"
    return [Check("optimizer", name, wanted, found, not left, text, "warning" if few else "info")]

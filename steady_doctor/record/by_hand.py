"""Updates without an optimizer of torch: the script asks for gradients, and writes to its weights itself."""

from collections.abc import Iterable

import torch
from torch import Tensor

PROBED = 8  # weights of which one number is compared


class ByHand:
    """Stands for the optimizer of such a script."""

    def __init__(self, weights: Iterable[Tensor]):
        self.param_groups = [{"params": list(weights)}]
        self.state: dict = {}


class Weights:
    """What gradients are asked of, as it was when they were."""

    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors
        self._versions, self._numbers = self._now()

    def changed(self) -> bool:
        """Whether any was written to since: by versions, or by some numbers, as writes by way of `data` count elsewhere."""
        versions, numbers = self._now()
        return versions != self._versions or not all(map(torch.equal, numbers, self._numbers))

    def are(self, others: list[Tensor]) -> bool:
        return [id(one) for one in self.tensors] == [id(other) for other in others]

    def _now(self) -> tuple[list[int], list[Tensor]]:
        some = [t for t in self.tensors if t.numel()][:: max(1, len(self.tensors) // PROBED)]
        return [t._version for t in self.tensors], [t.detach().reshape(-1)[0].clone() for t in some]


def leaves_of(roots: list[Tensor]) -> list[Tensor]:
    """Returns the tensors that want a gradient of these, in the order of the graph."""
    found, waiting, seen = [], [root.grad_fn for root in roots if root.grad_fn is not None], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            found.append(variable)
        waiting += [after for after, _ in node.next_functions if after is not None]
    return found


def asks_of_weights(outputs: list[Tensor], inputs: list[Tensor], creates_graph: bool) -> bool:
    """Whether a call of torch.autograd.grad is the backward pass of an update: of one number, to leaves of the graph, and for
    good; not within torch.func, whose tensors are none of torch's."""
    tensors = [*outputs, *inputs]
    if creates_graph or len(outputs) != 1 or not all(isinstance(t, Tensor) for t in tensors):
        return False
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        return False
    return outputs[0].numel() == 1 and len(inputs) > 1 and all(t.is_leaf and t.requires_grad for t in inputs)

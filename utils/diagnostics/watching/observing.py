"""The audit's observer, for loops that it knows nothing of."""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from utils.diagnostics.audit.elements import ElementSample
from utils.diagnostics.audit.observer import Observer


class ForeignObserver(Observer):
    """Of a loop that may clear its gradients between the forward and the backward pass.

    Args:
        stepped: ids of the parameters that the optimizer has.
        others: ids of those that another optimizer has, which are left out.
    """

    def __init__(self, modules: Mapping[str, nn.Module], stepped: Collection[int], others: Collection[int]):
        super().__init__(modules)
        self._stepped = stepped
        self.parameters = {name: p for name, p in self.parameters.items() if id(p) not in others}
        self.sample = ElementSample(self.parameters)
        self._ids = {id(p): number for number, p in enumerate(self.parameters.values())}

    def reached(self) -> set[str]:
        """Names of the parameters whose gradient is not 0."""
        found = [(name, p.grad) for name, p in self.parameters.items() if p.grad is not None]
        sizes = torch.stack([size.float().cpu() for size in torch._foreach_norm([g for _, g in found])]) if found else ()
        return {name for (name, _), size in zip(found, sizes) if size != 0}

    def _before_forward(self, name: str, module: nn.Module, inputs: tuple, options: dict | None = None) -> None:
        if options is not None:  # a hook that was taken away in this pass comes once more, without them
            super()._before_forward(name, module, inputs, options)

    @torch.no_grad()
    def begin_backward(self) -> None:
        if self.update is None or not self.update.micro_steps or self._has_run_backward:
            return
        gradients = [p.grad for p in self.parameters.values()]
        known = [g for g in gradients if g is not None]
        step = self.update.micro_steps[-1]
        if len(self.update.micro_steps) == 1:
            owned = [p.grad for p in self.parameters.values() if p.grad is not None and id(p) in self._stepped]
            self.update.left_over = torch.stack(torch._foreach_norm(owned)).norm() if owned else torch.zeros(())
        step.gradient_before = self.sample.take(gradients) if known else None

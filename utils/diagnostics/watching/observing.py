"""The audit's observer, for loops that it knows nothing of."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from utils.diagnostics.audit.elements import ElementSample, digest
from utils.diagnostics.audit.observer import Observer, safely
from utils.diagnostics.audit.seen import Update

ROWS = 4096  # of an embedding of labels; larger ones are of words
FEWEST_LOOKS = 3  # before weights are said to be always the same
MOST_VECTORS = 8  # the first that linear layers of the network get
MOST_NUMBERS = 1 << 20  # in one of them
SIGNAL = 64  # values of a signal, at least


def is_image(shape: torch.Size) -> bool:
    """Of a batch of images, or of signals that have no channel."""
    return len(shape) > 2 or (len(shape) == 2 and shape[1] >= SIGNAL)


def is_like(value: Any, shape: torch.Size) -> bool:
    """Whether it is a tensor of images of that shape, with as many channels as it likes."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    if value.ndim == 2:  # signals without a channel, of which the network may make one
        return is_image(value.shape) and tuple(shape) in (tuple(value.shape), (len(value), 1, value.shape[1]))
    return value.ndim == len(shape) and value.shape[0] == shape[0] and value.shape[2:] == shape[2:]


class ForeignObserver(Observer):
    """Of a loop that may clear its gradients between the forward and the backward pass.

    Args:
        stepped: ids of the parameters that the optimizer has.
        others: ids of those that another optimizer has, which are left out.
        trained: the module whose parameters the optimizer has, where it is not the network.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        stepped: Collection[int],
        others: Collection[int],
        trained: nn.Module | None = None,
    ):
        super().__init__(modules, trained=trained)
        self.stepped, self._closes, self._moves_copies = stepped, False, False
        others = {*others, *(set() if trained is None else {id(p) for p in modules["network"].parameters()} - set(stepped))}
        self.parameters = {name: p for name, p in self.parameters.items() if id(p) not in others}
        self.sample = ElementSample(self.parameters)
        self._ids = {id(p): number for number, p in enumerate(self.parameters.values())}
        self._digests: list[int] = []  # of the network's weights at the looks, while an optimizer trains others
        embeddings = {id(m.weight) for m in self.trained.modules() if isinstance(m, nn.Embedding)}
        self.embeds_alone = all(id(p) in embeddings for p in self.parameters.values())  # as in textual inversion
        tables = {id(m.weight) for m in self.trained.modules() if isinstance(m, nn.Embedding) and m.num_embeddings <= ROWS}
        self._tables = {name: p for name, p in self.parameters.items() if id(p) in tables}

    @property
    def trains_copies(self) -> bool:
        """Whether the optimizer has as many numbers as the network, and no module has its parameters: copies, it seems."""
        if not isinstance(self.trained, nn.ParameterList):
            return False
        copies, own = list(self.parameters.values()), [p for p in self.modules["network"].parameters() if p.requires_grad]
        return not {id(p) for p in copies} & {id(p) for p in own} and sum(map(torch.numel, copies)) == sum(
            map(torch.numel, own)
        )

    @property
    def network_follows(self) -> bool | None:
        """Whether the network's weights have changed, of an optimizer that trains copies; None before that is known."""
        return len(set(self._digests)) > 1 if len(self._digests) >= FEWEST_LOOKS else None

    @safely
    def _watch(self) -> None:
        super()._watch()
        for module in self.modules["network"].modules():
            parameters = module._parameters  # and not what is computed of them, which may change it; TorchScript's are no dict
            weight = parameters.get("weight") if isinstance(parameters, dict) else None
            if weight is not None and weight.ndim == 2:
                self._hooks.append(module.register_forward_pre_hook(self._see_vectors))

    @safely
    def _see_vectors(self, module: nn.Module, inputs: tuple) -> None:
        """What linear layers get of each image, such as embeddings of the noise level."""
        given = inputs[0] if inputs else None
        if isinstance(given, torch.Tensor) and given.ndim == 2 and given.is_floating_point() and torch.is_grad_enabled():
            vectors = self._micro_step().batch.setdefault("vectors", [])
            if len(vectors) < MOST_VECTORS and given.numel() <= MOST_NUMBERS:  # not the tokens of all images
                vectors.append(given.detach())

    def reached(self) -> set[str]:
        """Names of the parameters whose gradient is not 0."""
        found = [(name, p.grad) for name, p in self.parameters.items() if p.grad is not None]
        sizes = torch.stack([size.float().cpu() for size in torch._foreach_norm([g for _, g in found])]) if found else ()
        return {name for (name, _), size in zip(found, sizes) if size != 0}

    def rows_reached(self) -> dict[str, torch.Tensor]:
        """Of each embedding of labels, which rows have a gradient that is not 0, bool [rows]; by the parameter's name."""
        known = {name: p.grad for name, p in self._tables.items() if p.grad is not None and not p.grad.is_sparse}
        return {name: gradient.ne(0).any(1).cpu() for name, gradient in known.items()}

    def _before_forward(self, name: str, module: nn.Module, inputs: tuple, options: dict | None = None) -> None:
        if options is not None:  # a hook that was taken away in this pass comes once more, without them
            super()._before_forward(name, module, inputs, options)

    def end_update(self) -> Update | None:
        """With the images first among what a network gets, wherever it takes them."""
        update = super().end_update()
        if update is not None and self._moves_copies:
            self._digests.append(int(digest(p for p in self.modules["network"].parameters() if p.requires_grad)))
        for call in (call for step in update.micro_steps for call in step.calls.values() if call.outputs) if update else ():
            place = next((n for n, v in enumerate(call.inputs) if is_like(v, call.outputs[0].shape)), 0)
            call.inputs = (call.inputs[place], *call.inputs[:place], *call.inputs[place + 1 :])
        return update

    def begin_closure(self, optimizer: Optimizer) -> None:
        """Of an optimizer whose step makes the passes: what it begins with is seen now, and its gradient in the end."""
        self._before_step(optimizer)
        self.go_on_in_step()

    def go_on_in_step(self) -> None:
        """A micro step is made by the optimizer's step: the gradient is that which it ends with."""
        self._closes = True

    def begin(self, *arguments: Any, **options: Any) -> None:
        super().begin(*arguments, **options)
        self._closes = self._moves_copies = False

    @safely
    def _before_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        step = self.update.optimizer_step  # type: ignore[union-attr]
        inner = step is not None and step.after is None  # of an optimizer that makes steps of another one
        if not self._closes and not inner:  # else it is the next update's, whose forward pass comes later
            super()._before_step(optimizer, *arguments)

    @safely
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        step = self.update.optimizer_step  # type: ignore[union-attr]  # `safely` cares for it
        if self._closes and step is not None and self._ours(optimizer):
            gradients = [p.grad for p in self.parameters.values()]
            step.gradient = self.sample.take(gradients)
            step.gradient_norm = torch.stack(torch._foreach_norm([g for g in gradients if g is not None])).norm()
        super()._after_step(optimizer, *arguments)
        if step is not None and self._ours(optimizer) and self.trains_copies:
            network = self.modules["network"].parameters()
            got = any(p.grad is not None and bool(p.grad.any()) for p in network)  # else it is frozen, as a teacher is
            self._moves_copies = got and not torch.equal(step.before, step.after)

    @torch.no_grad()
    def begin_backward(self) -> None:
        if self.update is None or not self.update.micro_steps or self._has_run_backward:
            return
        gradients = [p.grad for p in self.parameters.values()]
        known = [g for g in gradients if g is not None]
        step = self.update.micro_steps[-1]
        if len(self.update.micro_steps) == 1:
            owned = [p.grad for p in self.parameters.values() if p.grad is not None and id(p) in self.stepped]
            self.update.left_over = torch.stack(torch._foreach_norm(owned)).norm() if owned else torch.zeros(())
        step.gradient_before = self.sample.take(gradients) if known else None

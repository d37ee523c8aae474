"""The gradient of a forward pass that was seen, computed once more: what its backward pass should have left."""

from typing import Any

import torch
from torch import nn

from utils.diagnostics.audit.seen import Call, tensors_in

REPLAYED = 1 << 18  # elements of the parameters of a network whose gradient is computed once more; larger ones: too much memory


class Replay:
    """Of `network`, on copies of its `parameters` that no hook, no process group and no compiler knows."""

    def __init__(self, network: nn.Module, parameters: dict[str, nn.Parameter]):
        self._network, self._parameters = network, parameters
        self._device = next(iter(parameters.values())).device
        self._buffers: dict[str, torch.Tensor] = {}
        self._randomness: torch.Tensor | None = None  # state of torch's generator when the pass began
        self.running = False

    def prepare(self) -> None:
        """Just before the forward pass."""
        self._buffers = {name: buffer.detach().clone() for name, buffer in self._network.named_buffers()}
        self._randomness = self._generator_state()

    def gradients(self, call: Call | None) -> list[torch.Tensor | None] | str:
        """Those of the parameters, from the inputs of the pass and the gradient of its outputs; a text says why not."""
        if call is None or not call.gradients or self._randomness is None:
            return "its passes were not seen"
        if sum(p.numel() for p in self._parameters.values()) > REPLAYED:
            return "it would take the memory of two more copies of a large network"
        # All of them: kernels that are asked for the gradients of some alone are not those of a training.
        copies = {name: p.detach().clone().requires_grad_() for name, p in self._parameters.items()}
        now, training = self._generator_state(), self._network.training
        self.running = True
        try:
            self._set_generator(self._randomness)
            batch = len(call.inputs[0])
            total: list[torch.Tensor | None] = [None] * len(copies)
            for rows in torch.arange(batch).chunk(self._chunks(batch)):
                found = self._part(call, copies, slice(int(rows[0]), int(rows[-1]) + 1))
                total = [a if b is None else b if a is None else a + b for a, b in zip(total, found)]
            return total
        except (torch.OutOfMemoryError, MemoryError):
            return "too little memory"
        finally:
            self.running, self._buffers, self._randomness = False, {}, None
            self._network.train(training)
            self._set_generator(now)

    def _part(self, call: Call, copies: dict[str, torch.Tensor], part: slice) -> tuple[torch.Tensor | None, ...]:
        """What some rows of the batch contribute."""
        batch = len(call.inputs[0])
        inputs = tuple(_rows(value, part, batch) for value in call.inputs)
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            again = {name: buffer.clone() for name, buffer in self._buffers.items()}
            outputs = tensors_in(torch.func.functional_call(self._network, copies | again, inputs))
            kept = [outputs[place] for place in call.gradients]
            given = [gradient[part] for gradient in call.gradients.values()]
            return torch.autograd.grad(kept, list(copies.values()), given, allow_unused=True)

    def _chunks(self, batch: int) -> int:
        """In how many parts the batch is taken, so that memory does not hold all activations beside all gradients. In one where
        its samples hang together: by dropout's random numbers, or by batch normalization."""
        for module in self._network.modules():
            rate = vars(module).get("p", vars(module).get("dropout", 0.0))
            if isinstance(module, nn.modules.batchnorm._BatchNorm) or (isinstance(rate, float) and rate > 0):
                return 1
        return min(batch, 4)

    def _generator_state(self) -> torch.Tensor:
        device = self._device
        return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def _set_generator(self, state: torch.Tensor) -> None:
        device = self._device
        torch.set_rng_state(state) if device.type == "cpu" else torch.get_device_module(device).set_rng_state(state, device)


def _rows(value: Any, part: slice, batch: int) -> Any:
    return value[part] if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == batch else value

"""What a training step needs, before it is made: bytes on the device and floating-point operations.

The step is played through with fake tensors, which have shapes, types, devices and storages but no memory: network, loss,
backward pass, clipping, optimizer and EMA are the real ones. What autograd keeps is counted by saved-tensor hooks, and the peak
by following every storage from the operation that makes it to its end, so that nothing here is a rule of thumb but the
workspace of the libraries.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from utils.diffusion.ddpm import loss_per_sample
from utils.optim.ema import EMA

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
GIB = 2**30
SHARE = 0.92  # of the free memory that a prediction may fill: the allocator's fragments take the rest
ALLOCATOR_BLOCK = 512  # bytes; torch's CUDA allocator hands out multiples of it
# Bytes. torch's own choice on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp), 8 MiB before, for each of two threads: the
# backward pass runs in autograd's.
CUBLAS_WORKSPACE = 2 * 32 * 2**20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device of one process. They are not all there at once: gradients come while activations go."""

    micro_batch_size: int
    parameters: int
    buffers: int
    gradients: int
    buckets: int  # DDP's, for the all-reduce of the gradients: there from the start to the end
    optimizer: int
    ema: int
    activations: int  # what the forward pass leaves for the backward pass, each storage once, parameters excluded
    workspace: int  # of the libraries, taken to be the largest output of one operation; on CUDA also cuBLAS's own
    peak: int  # most at any moment of an update, the workspace included


@dataclass(frozen=True)
class UpdateParts:
    """What an update is made of, whatever the size of its batch. `make_network`: as it will be trained (checkpointing,
    layout), on torch's default device. `averages`: how many the EMA has. `distributed`: DDP with `gradient_as_bucket_view`."""

    make_network: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    image_shape: tuple[int, int, int]
    mixed_precision: str = "no"
    averages: int = 1
    distributed: bool = False


def estimate_memory(
    parts: UpdateParts, micro_batch_size: int, device: torch.device | str, *, accumulates: bool = False
) -> MemoryEstimate:
    """Returns what training needs on `device`, which must exist but gives no memory.

    `accumulates`: gradients stay from one micro step to the next. DDP's buckets are as large as all gradients and stay.
    Gradients are freed after each update, so that they are born outside of the buckets; the backward pass that reduces
    copies each into its bucket, which takes its place (mark_variable_ready_dense in torch/csrc/distributed/c10d/reducer.cpp).
    Micro steps before that reduce nothing and have both. A compiled network usually needs less.
    """
    device = torch.device(device)
    live = _LiveMemory(ALLOCATOR_BLOCK if device.type == "cuda" else 1)
    with FakeTensorMode(), device, live:
        step = TrialStep(parts)
        live.restart()
        activations = step.run(micro_batch_size, 1 + accumulates)

    states = (value for state in step.optimizer.state.values() for value in state.values())
    workspace = live.largest + (CUBLAS_WORKSPACE if device.type == "cuda" else 0)
    return MemoryEstimate(
        micro_batch_size=micro_batch_size,
        parameters=storage_bytes(step.network.parameters()),
        buffers=storage_bytes(step.network.buffers()),
        gradients=sum(p.numel() * p.element_size() for p in step.parameters),
        buckets=storage_bytes(step.buckets.values()),
        optimizer=storage_bytes(value for value in states if isinstance(value, torch.Tensor)),
        ema=storage_bytes(tensor for average in step.averages for tensor in average.shadow.values()),
        activations=activations,
        workspace=workspace,
        peak=live.most + workspace,
    )


class TrialStep:
    """Network, optimizer and EMA to be tried out on torch's default device, with fake tensors for a prediction."""

    def __init__(self, parts: UpdateParts):
        self.image_shape, self.mixed_precision = parts.image_shape, parts.mixed_precision
        self.network = parts.make_network().train()
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.averages = [EMA(self.network) for _ in range(parts.averages)]
        self.optimizer = parts.make_optimizer(self.network)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # makes its state, so that what follows is like every update but the first
        self.optimizer.zero_grad()
        self.buckets = {p: torch.zeros_like(p) for p in self.parameters} if parts.distributed else {}

    def run(self, micro_batch_size: int, micro_steps: int) -> int:
        """Makes one update as in training. Returns the bytes that one forward pass left for its backward pass."""
        device = self.parameters[0].device
        for micro_step in range(micro_steps):
            clean_images, noise, noisy_images = (torch.randn(micro_batch_size, *self.image_shape) for _ in range(3))
            timesteps = torch.zeros(micro_batch_size, dtype=torch.int64)
            with SavedTensors(self.network.parameters()) as saved:
                with autocast(device, self.mixed_precision):
                    prediction = self.network(noisy_images, timesteps).sample.float()
                loss = loss_per_sample(prediction, noise, torch.ones(micro_batch_size)).mean()
            activations = saved.bytes
            saved.forget()
            with self._reducing() if micro_step == micro_steps - 1 else contextlib.nullcontext():
                loss.backward()
        del clean_images, noise, noisy_images, prediction, loss
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        del gradients
        torch.nn.utils.clip_grads_with_norm_(self.parameters, 1.0, norm)
        before = [p.detach().clone() for p in self.parameters]  # as utils.diagnostics.dynamics does for a report
        self.optimizer.step()
        torch._foreach_sub_(before, [p.detach() for p in self.parameters])
        del before
        self.optimizer.zero_grad()
        # On a CPU an EMA makes no tensors, but asks for the flag's value, which fake tensors do not have.
        for average in self.averages if device.type != "cpu" else ():
            average.update(0.9999, torch.isfinite(norm))
        return activations

    @contextlib.contextmanager
    def _reducing(self) -> Iterator[None]:
        """A backward pass in it leaves the gradients in DDP's buckets, where there are some."""

        def move(parameter: nn.Parameter) -> None:
            self.buckets[parameter].copy_(cast(torch.Tensor, parameter.grad))
            parameter.grad = self.buckets[parameter]

        with contextlib.ExitStack() as hooks:
            for parameter in self.buckets:
                hooks.callback(parameter.register_post_accumulate_grad_hook(move).remove)
            yield


def flops_per_image(
    make_network: Callable[[], nn.Module],
    image_shape: tuple[int, int, int],
) -> int:
    """Floating-point operations of the forward and backward pass of one image: convolutions and matrix products, two for each
    multiply-add, nothing for what gradient checkpointing computes again."""
    # Attention by plain matrix products: the same operations, and torch's counter knows not every fused kernel.
    with FakeTensorMode(), torch.device("cpu"), sdpa_kernel(SDPBackend.MATH):
        network = make_network().train()
        for module in network.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # type: ignore[assignment]  # a switch of diffusers
        with FlopCounterMode(display=False) as counter:
            network(torch.randn(1, *image_shape), torch.zeros(1, dtype=torch.int64)).sample.sum().backward()
    return counter.get_total_flops()


def autocast(device: torch.device, mixed_precision: str) -> torch.autocast:
    """Returns the autocast of a training step, which is off for "no"."""
    return torch.autocast(device.type, AUTOCAST.get(mixed_precision), enabled=mixed_precision != "no")


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of the storages of `tensors`, each counted once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd keeps for the backward pass: `bytes` of storages, each once, without `excluded`; of blocks with
    gradient checkpointing their inputs alone."""

    def __init__(self, excluded: Iterable[torch.Tensor] = ()):
        super().__init__(self._pack, lambda tensor: tensor)
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded}
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def __enter__(self) -> "SavedTensors":  # type: ignore[override]  # torch's own returns nothing
        super().__enter__()
        return self

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._excluded:
            self._storages[storage._cdata] = storage
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def forget(self) -> None:
        self._storages.clear()


class _LiveMemory(TorchDispatchMode):
    """Bytes of the storages that live, the most that ever did since `restart`, and the largest output of one operation."""

    def __init__(self, block: int):
        super().__init__()
        self._block = block
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._now = self.most = self.largest = 0

    def restart(self) -> None:
        self.most, self.largest = self._now, 0

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = 0
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                made += self._add(tensor.untyped_storage())
        self.most, self.largest = max(self.most, self._now), max(self.largest, made)
        return result

    def _add(self, storage: torch.UntypedStorage) -> int:
        if storage in self._known:
            return 0
        self._known.add(storage)
        size = -(-storage.nbytes() // self._block) * self._block
        self._now += size
        weakref.finalize(storage, self._remove, size)
        return size

    def _remove(self, size: int) -> None:
        self._now -= size

"""Whether a compiled network has the gradients of the same network run eagerly.

Compilers have been wrong without a word: pytorch issue 140913 tells of weight gradients that were off by more than 25, of group
norms in bf16 with channels last.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import nn

from utils.errors import UserError, one_line, out_of_memory
from utils.launch import agree, if_memory_allows

# Of a layer's gradient, relative and in the L2 norm. Two orders of the same sums differ by roundings (2^-24, 2^-11, 2^-9) that
# add up over the layers there and back: in the worst layer of digits16, cifar10 and EDM2's digits16 other kernels differ by
# 1.2e-5 in fp32 and 0.07 in bf16 (a CPU, batches of 1 and 8), 200 and 35 roundings. A wrong kernel is off by a large share.
TOLERANCES = {"no": 1e-4, "tf32": 0.06, "fp16": 0.06, "bf16": 0.25}
LOSS_SCALE = 1024.0  # as a GradScaler's: without it small gradients in fp16 would be 0


def check_compiled(
    accelerator: Accelerator,
    model: nn.Module,
    compiled: nn.Module,
    loss: Callable[[], torch.Tensor],
    say: Callable[[str], None],
) -> bool:
    """Whether `compiled`, a module that was compiled in place, stays so; it runs eagerly from here on where its gradients are
    wrong or it cannot be compiled.

    Every process must call it, and all decide alike. Weights, buffers, gradients, modes and random numbers are left as they
    were. What is compiled here is what trains, but for a network with dropout, which is compiled without for the comparison.

    Args:
        model: what trains, as `accelerator.prepare` gave it; `compiled` is it or a part of it.
        loss: gives the mean loss of a micro batch by `model`, the same one in every call.
        say: prints a line for the user.
    """
    raw, problem, error = accelerator.unwrap_model(model), None, 0.0
    tolerance = TOLERANCES[_arithmetic(accelerator)]
    with _comparable(raw):
        try:
            with if_memory_allows(accelerator, "--compile is not checked", "the updates need less"):
                eager = _gradients(accelerator, model, raw, loss, eagerly=True)
            with if_memory_allows(accelerator, "--compile is not checked", "set a smaller --train_batch_size"):
                try:
                    error, layer = _largest_error(eager, _gradients(accelerator, model, raw, loss, eagerly=False))
                    if not error <= tolerance:  # NaN is no small error
                        problem = f"the gradient of {layer} is {error:.2g} of the eager one off it (rounding: {tolerance:g})"
                except Exception as exception:
                    if out_of_memory(exception):
                        raise
                    problem = one_line(exception)[:300]
        except UserError as failed:
            unknown = str(failed)
        else:
            unknown = None
    eager = None
    clear_device_cache(garbage_collection=True)
    if unknown is not None:
        say(unknown)
        return True
    try:
        agree(accelerator, problem)
    except UserError as found:
        compiled._compiled_call_impl = None
        say(f"--compile is off: {found}")
        return False
    say(f"--compile: gradients are those of the eager network (largest relative difference of a layer {error:.1e})")
    return True


def _arithmetic(accelerator: Accelerator) -> str:
    if accelerator.mixed_precision != "no" or accelerator.device.type != "cuda":
        return accelerator.mixed_precision
    return "tf32" if torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest" else "no"


@contextmanager
def _comparable(raw: nn.Module) -> Iterator[None]:
    """Inside it no dropout, whose random numbers compiled code draws otherwise, and no parameter of zeros, behind which all
    gradients are 0."""
    with ExitStack() as after:
        for module in raw.modules():
            for name in ("p", "dropout") if isinstance(module, nn.Dropout) else ("dropout",):
                if isinstance(value := vars(module).get(name), float) and value > 0:
                    after.callback(setattr, module, name, value)
                    setattr(module, name, 0.0)
        generator = torch.Generator().manual_seed(0)
        for parameter in raw.parameters():
            if parameter.requires_grad and not parameter.any():
                after.callback(parameter.data.copy_, parameter.detach().clone())
                scale = (parameter.numel() / max(len(parameter), 1)) ** -0.5 if parameter.ndim > 1 else 1.0
                values = torch.randn(parameter.shape, generator=generator) * scale if parameter.ndim else torch.tensor(1.0)
                parameter.data.copy_(values)
        yield


def _gradients(
    accelerator: Accelerator, model: nn.Module, raw: nn.Module, loss: Callable[[], torch.Tensor], *, eagerly: bool
) -> dict[str, torch.Tensor]:
    """Those of the loss, on the CPU, by the names of the parameters. Nothing is reduced over the processes."""
    buffers = [(buffer, buffer.clone()) for buffer in raw.buffers()]  # spectral norms move theirs in each forward pass
    device = accelerator.device
    model.zero_grad()
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager") if eagerly else nullcontext(),
            accelerator.no_sync(model),
        ):
            (loss() * (LOSS_SCALE if accelerator.mixed_precision == "fp16" else 1.0)).backward()
        return {name: p.grad.detach().cpu() for name, p in raw.named_parameters() if p.grad is not None}
    finally:
        model.zero_grad()
        for buffer, before in buffers:
            buffer.copy_(before)


def _largest_error(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> tuple[float, str]:
    """(largest relative difference of a layer's gradient, name of the layer).

    Of all parameters of a layer together: the gradient of a bias before a norm is 0, and what there is of it is rounding.
    """
    differences: dict[str, list[torch.Tensor]] = {}
    sizes: dict[str, list[torch.Tensor]] = {}
    for name, gradient in expected.items():
        layer = name.rpartition(".")[0] or name
        other = found.get(name)
        differences.setdefault(layer, []).append((gradient - other if other is not None else gradient).norm())
        sizes.setdefault(layer, []).append(gradient.norm())
    errors = {}
    for layer, parts in differences.items():
        difference, size = (torch.stack(norms).norm().item() for norms in (parts, sizes[layer]))
        if math.isfinite(size):  # else there is nothing to compare with
            errors[layer] = 0.0 if difference == 0 else difference / max(size, 1e-30)
    worst = max(errors, key=lambda layer: math.inf if math.isnan(errors[layer]) else errors[layer], default="")
    return errors.get(worst, 0.0), worst

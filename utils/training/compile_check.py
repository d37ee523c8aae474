"""Whether a compiled network has the gradients of the eager one: compilers have been wrong without a word (pytorch issue
140913: weight gradients off by more than 25)."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from utils.core.distributed import agree, together
from utils.core.errors import UserError, one_line, out_of_memory
from utils.training.memory_plan import NO_ACTIVATIONS
from utils.training.monitor import Monitor
from utils.training.run import Run

ROUNDINGS = {"no": 2**-24, "tf32": 2**-11, "fp16": 2**-11, "bf16": 2**-8}  # relative, at most, of one operation
# Of a layer's gradient, relative and in the L2 norm. Two orders of the same sums differ by roundings that add up over the
# layers there and back: in the worst layer of digits16, cifar10 and EDM2's digits16 other kernels differ by 1.2e-5 in fp32 and
# 0.07 in bf16 (a CPU, batches of 1 and 8), 200 and 18 roundings. A wrong kernel is off by a large share.
TOLERANCES = {"no": 1e-4, "tf32": 0.06, "fp16": 0.06, "bf16": 0.25}
EAGERLY = "Updates run eagerly and need more memory: set a smaller --train_batch_size if they do not fit"
LOSS_SCALE = 1024.0  # as a GradScaler's: without it small gradients in fp16 would be 0


def check_compiled(
    accelerator: Accelerator,
    model: nn.Module,
    compiled: nn.Module,
    loss: Callable[[], torch.Tensor],
    print_line: Callable[[str], None],
) -> bool:
    """Whether `compiled`, a module that was compiled in place, stays so; it runs eagerly from here on where its gradients are
    wrong or it cannot be compiled.

    Every process must call it, and all decide alike. Weights, buffers, gradients, modes and random numbers are left as they
    were. What is compiled here is what trains, but for a network with dropout, which is compiled without for the comparison.

    Args:
        model: what trains, as `accelerator.prepare` gave it; `compiled` is it or a part of it.
        loss: gives the mean loss of a micro batch, the same one in every call, by the unwrapped `model`. It may fail on one
            process alone, so it must not call the others: DDP's forward pass would, to send buffers.
        print_line: prints a line for the user.
    """
    raw, problem = accelerator.unwrap_model(model), None
    arithmetic = _arithmetic(accelerator)
    tolerance = TOLERANCES[arithmetic]
    smallest = 8 * ROUNDINGS[arithmetic] / tolerance  # differences of 8 roundings of its largest sibling are none of a layer
    with _comparable(raw):
        try:
            with together(accelerator, "checking --compile", "set a smaller --train_batch_size"):
                eager = _gradients(accelerator, model, raw, loss, eagerly=True)
                try:
                    found = _gradients(accelerator, model, raw, loss, eagerly=False)
                    error, layer = _largest_error(eager, found, smallest)
                    if layer is not None and not error <= tolerance:  # NaN is no small error
                        problem = (
                            f"the gradient of {layer} differs from the eager one by {error:.2g} of its size; "
                            f"rounding explains {tolerance:g}"
                        )
                except Exception as exception:
                    if out_of_memory(exception):
                        raise
                    problem = one_line(exception)[:300]
        except UserError as failed:
            print_line(f"--compile is not checked: {failed}")
            return True
        finally:
            eager = found = None
            clear_device_cache(garbage_collection=True)
    try:
        agree(accelerator, "checking --compile", problem, alike=True)
    except UserError as agreed:
        compiled._compiled_call_impl = None
        print_line(f"--compile is off: {agreed}. {EAGERLY}")
        return False
    if layer is None:
        print_line("--compile is not checked: the eager gradients are not finite")
        return True
    print_line(f"--compile: gradients are those of the eager network (largest relative difference of a layer {error:.1e})")
    return True


def check_first_batch(run: Run, model: nn.Module, monitor: Monitor) -> None:
    """`check_compiled` of the next update's first micro batch; where compiling is given up, reports know it."""
    objective, samples, step = run.objective, run.data.samples, run.state.step
    drawn = objective.draw(samples.on_device(next(samples.batches(step, step + 1))))

    def loss() -> torch.Tensor:
        samples.seed_dropout(step, 0)
        return objective.losses(objective.network, **drawn).trained.mean()

    if not check_compiled(run.accelerator, model, objective.exported, loss, run.print_line):
        monitor.measure_eagerly()
    elif not monitor.measures_eagerly:
        run.print_line(NO_ACTIVATIONS)


def _arithmetic(accelerator: Accelerator) -> str:
    if accelerator.mixed_precision != "no" or accelerator.device.type != "cuda":
        return accelerator.mixed_precision
    return "tf32" if torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest" else "no"


@contextmanager
def _comparable(raw: nn.Module) -> Iterator[None]:
    """No dropout, which compiled code draws otherwise, and no parameter of zeros, behind which all gradients are 0."""
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
    """Those of the loss, on the CPU, by the names of the parameters. Nothing is exchanged between the processes; as in a
    forward pass of DDP the compiler splits its graphs at the buckets, for these graphs will train."""
    buffers = [(buffer, buffer.clone()) for buffer in raw.buffers()]  # spectral norms move theirs in each forward pass
    device = accelerator.device
    model.zero_grad()
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager") if eagerly else nullcontext(),
            model._inside_ddp_forward() if isinstance(model, DistributedDataParallel) else nullcontext(),
        ):
            (loss() * (LOSS_SCALE if accelerator.mixed_precision == "fp16" else 1.0)).backward()
        return {name: p.grad.detach().cpu() for name, p in raw.named_parameters() if p.grad is not None}
    finally:
        model.zero_grad()
        for buffer, before in buffers:
            buffer.copy_(before)


def _largest_error(
    expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], smallest: float
) -> tuple[float, str | None]:
    """(largest relative difference of a layer's gradient, name of the layer); (0, None) where no layer's is finite.

    Of all parameters of a layer together: the gradient of a bias before a norm is 0, and what there is of it is rounding.
    The same is true of whole layers: with a single token the gradients of queries and keys are 0, by differences that cancel,
    and a few roundings of what flows back through the values are left. So a layer counts as no smaller than `smallest` of the
    largest one in the same module. The largest of the network is no measure: others are 1e-5 of it in deep networks.
    """
    layers: dict[str, list[str]] = {}
    for name in expected:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    sizes = {layer: get_total_norm([expected[name] for name in names]).item() for layer, names in layers.items()}
    sizes = {layer: size for layer, size in sizes.items() if math.isfinite(size)}  # else there is nothing to compare with
    largest: dict[str, float] = {}
    for layer, size in sizes.items():
        module = layer.rpartition(".")[0]
        largest[module] = max(size, largest.get(module, 0.0))
    errors = {}
    for layer, size in sizes.items():
        difference = get_total_norm([expected[name] - found.get(name, 0.0) for name in layers[layer]]).item()
        errors[layer] = difference / max(size, smallest * largest[layer.rpartition(".")[0]], 1e-30)
    worst = max(errors, key=lambda layer: math.inf if math.isnan(errors[layer]) else errors[layer], default=None)
    return 0.0 if worst is None else errors[worst], worst

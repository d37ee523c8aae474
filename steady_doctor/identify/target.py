"""What the network is trained to give: from the loss as a function of the output, as the tape repeats it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steady_doctor.identify.mixture import Mixture
from steady_doctor.record.tape import NotRecorded, Op, Tape

COMPARES = {"sub", "rsub", "sub_", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
QUADRATIC = 1e-2  # by how much the slope of the gradient may change between two steps


@dataclass
class Target:
    """output -> loss. For squared errors the gradient is c (output - target), whatever the loss is made of."""

    output: Op
    layers: frozenset[Op]  # that end in it
    kind: str  # "squared", "operand" or "none"
    value: Tensor | None = None  # [B, ...], in the shape of the input
    slope: Tensor | None = None  # c [B, ...] of each element
    p: Tensor | None = None  # target = p clean + q noise, [B]
    q: Tensor | None = None
    rest: Tensor | None = None  # the share of the target that is neither, [B]
    seen: Tensor | None = None  # samples of which enough elements count, [B]


def find_output(tape: Tape, root: Op, mixture: Mixture) -> Op | None:
    """The output of the network that got the mixture: the last layer before the loss, of its size.

    Where several layers end the network, as with low-rank adapters, it is the first value that all that follows goes through.
    """
    noise, size = mixture.noise.content, mixture.value.numel()
    layers = [op for op in root.fronts if op.content & noise and torch.Size(op.shape).numel() >= size]
    if len(layers) == 1 and layers[0].trained:
        return layers[0]
    if not layers:
        return None
    followed: dict[Op, int] = {}  # the last operation that reads this one
    inside = set(layers)
    for op in tape.upstream(root, layers):
        if op in inside or any(need in inside for need in op.needs):
            inside.add(op)
            for need in op.needs:
                followed[need] = op.index
    path = sorted(inside, key=lambda op: op.index)
    for op in path:
        is_cut = all(followed.get(before, 0) <= op.index for before in path if before.index < op.index)
        if op.index >= max(layer.index for layer in layers) and is_cut and op.trained and torch.Size(op.shape).numel() >= size:
            return op
    return None


def find_target(tape: Tape, root: Op, mixture: Mixture) -> Target | None:
    output = find_output(tape, root, mixture)
    if output is None:
        return None
    layers = root.fronts & set(tape.upstream(output))
    try:
        value = tape.value(output)
        value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value  # the loss again, without rounding
        gradients = [_gradient(tape, root, output, v) for v in (value, value + _step(value), value - _step(value))]
    except (NotRecorded, RuntimeError):
        return Target(output, layers, "none")
    if any(gradient is None for gradient in gradients):
        return Target(output, layers, "none")
    here, above, below = (gradient.double() for gradient in gradients)  # type: ignore[union-attr]
    step = _step(value).double()
    slope, before = (above - here) / step, (here - below) / step
    largest = float(slope.abs().max())
    if largest > 0 and float((slope - before).abs().max()) <= QUADRATIC * largest:
        counts = slope.abs() > 1e-7 * largest
        wanted = torch.where(counts, value.double() - here / torch.where(counts, slope, 1.0), torch.nan)
        found = Target(output, layers, "squared", wanted, torch.where(counts, slope, 0.0))
    else:
        wanted = _compared(tape, root, output, value)
        if wanted is None:
            return Target(output, layers, "none")
        found = Target(output, layers, "operand", wanted)
    _as_images(tape, root, mixture, found, wanted)
    if found.value is not None and found.value.shape == mixture.value.shape and mixture.clean_value is not None:
        _shares(mixture.clean_value, mixture, found.value, found)
    return found


def _step(value: Tensor) -> Tensor:
    signs = torch.randint(0, 2, value.shape, generator=torch.Generator().manual_seed(0)).to(value.device) * 2 - 1
    return 0.5 * value.float().std().clamp(min=1e-3) * signs.to(value)


def _gradient(tape: Tape, root: Op, output: Op, value: Tensor) -> Tensor | None:
    leaf = value.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        loss = tape.value(root, {output: leaf * 1}, grad=True)
    if not loss.requires_grad:
        return None
    return torch.autograd.grad(loss.sum(), leaf, allow_unused=True)[0]


def _compared(tape: Tape, root: Op, output: Op, value: Tensor) -> Tensor | None:
    """The output at which there is no error: where what was made of it, which is a line in it, is what it is compared with."""
    for op in reversed(tape.upstream(root, [output])):
        pair = [last for _, last in op.reads][:2]
        if op.name not in COMPARES or len(pair) < 2 or pair[0].trained == pair[1].trained:
            continue
        ours, other = sorted(pair, key=lambda last: not last.trained)
        if torch.Size(ours.shape).numel() < value.numel() // 2 or ours.shape != other.shape:
            continue
        step = _step(value)
        here, there = (tape.value(ours, {output: v}).double() for v in (value, value + step))
        wanted = tape.value(other).double()
        if here.shape != value.shape:
            here, there, wanted = (v.reshape(value.shape) for v in (here, there, wanted)) if here.numel() == value.numel() else (here, there, wanted)
        if here.shape != value.shape:
            return None
        return value.double() + (wanted - here) * step.double() / (there - here)
    return None


def _as_images(tape: Tape, root: Op, mixture: Mixture, target: Target, value: Tensor) -> None:
    """Puts a transformer's patches back as the script does, and leaves out channels of a learned variance."""
    shape = mixture.value.shape
    if value.shape == shape:
        return
    if value.numel() == mixture.value.numel():
        later = [op for op in tape.upstream(root) if op.index > target.output.index and op.shape == tuple(shape)]
        after = next((op for op in later if target.output in tape.upstream(op)), None)
        if after is not None and target.kind == "squared":
            like = torch.float32 if not value.is_floating_point() else value.dtype
            target.value = tape.value(after, {target.output: value.to(like)}).double()
            if target.slope is not None:
                target.slope = tape.value(after, {target.output: target.slope.to(like)}).double()
    elif value.ndim == len(shape) and value.shape[1] == 2 * shape[1]:
        target.value = value[:, : shape[1]]
        target.slope = None if target.slope is None else target.slope[:, : shape[1]]


def _shares(clean: Tensor, mixture: Mixture, value: Tensor, target: Target) -> None:
    """Least squares of the target's `value` by the clean image and the noise, for each sample, where there is noise."""
    known = (torch.isfinite(value) & (mixture.where > 0)).flatten(1).double()
    y = torch.nan_to_num(value).double().flatten(1) * known
    sides = torch.stack([v.double().flatten(1) * known for v in (clean, mixture.noise_value)], -1)
    solution = torch.linalg.lstsq(sides, y.unsqueeze(-1)).solution
    target.seen = known.mean(1) > 0.02
    target.rest = ((sides @ solution).squeeze(-1) - y).norm(dim=1) / y.norm(dim=1).clamp(min=1e-12)
    target.p, target.q = solution[:, 0, 0], solution[:, 1, 0]

"""A pass of a loop that tells its images, noise and noise levels: what the network got of them, and what the loss makes of
each level. Figures alone."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steady_doctor.identify.conditions import sums_of_rows
from steady_doctor.identify.fit import fit
from steady_doctor.identify.mixed import Given, Mixture, Nothing, given_to_network, numel
from steady_doctor.identify.target import Target, gradient_of
from steady_doctor.identify.told_level import find_told
from steady_doctor.record.driven import Told
from steady_doctor.record.ops import Op
from steady_doctor.record.recorded import Recorded
from steady_doctor.record.samples import sample
from steady_doctor.record.tape import Tape

PRODUCTS = {"addmm", "mm", "bmm", "baddbmm", "addbmm", "linear", "matmul"}


@dataclass
class Learned:
    """u of each sample, where the loss of each is divided by exp(u), float64 [B]."""

    value: Tensor
    slope: Tensor  # of the loss with respect to it; NaN where it gets none
    slope_beyond: Tensor  # the same where all u are greater by 1
    own: bool  # that of a sample changes with the level of this sample, and of no other


@dataclass
class Drawn:
    """Float64 [B] each, where nothing else is said."""

    levels: Tensor
    labels: Tensor | None  # int64
    numbers: Tensor | None  # [B, 2], as of a `Condition`'s rows
    noise: dict[str, tuple[float, int]]  # sums over the noise, and of how many numbers; see `sums_of`
    marks: list[int]  # equal ones mean the same noise, also of another sign or order
    generator: int  # the state of the random generator before the pass
    loss_scale: float
    rest: Tensor = field(default_factory=lambda: torch.zeros(0))  # share of the input that is neither image nor noise
    learned: Learned | None = None
    layers: tuple[torch.dtype, ...] = ()  # in which convolutions compute
    products: tuple[torch.dtype, ...] = ()  # in which other layers and attention compute
    penalty: dict[int, Tensor] | None = None  # gradients of the loss by parameters, the output being fixed; None: not known

    @property
    def conditions(self) -> int:
        """How many were told."""
        return (self.labels is not None) + (self.numbers is not None)


def drawn_of(told: Told, place: int) -> Drawn:
    clean, noise, labels = told.clean[place], told.noise[place], told.labels[place] if told.labels else None
    levels = told.levels[place].reshape(-1).double().cpu()
    labels = None if labels is None else labels.reshape(-1).long().cpu()
    numbers = sums_of_rows(told.numbers[place]) if told.numbers else None
    return Drawn(levels, labels, numbers, sums_of(noise, clean), marks_of(noise), told.generators[place], told.loss_scale)


def told_mixture(recorded: Recorded, forward: list[Op], place: int) -> tuple[Mixture, Tensor]:
    """What the network is given, as shares of the image and the noise that were told; and the share of it that is neither, [B].

    Raises Nothing.
    """
    tape, told = recorded.tape, recorded.told
    clean, noise, level = (tape.origin(tensors[place]) for tensors in (told.clean, told.noise, told.levels))
    of_image = told.clean[place]
    everything = given_to_network(tape, forward)
    if clean is None or noise is None:
        raise Nothing("told-not-used")
    input_ = _input(tape, everything, numel(clean), clean.content, noise.content)
    value = tape.value(input_)
    found, rest = fit(value.reshape(of_image.shape).flatten(1), of_image.flatten(1), told.noise[place].flatten(1))
    a, b = found.cpu().unbind(1)
    levels = () if level is None else (level,)
    mixture = Mixture(input_, value, noise, told.noise[place], [noise], b, torch.ones_like(value))
    mixture.clean, mixture.clean_value, mixture.a, mixture.levels, mixture.given = clean, of_image, a, levels, input_
    find_told(tape, mixture, everything)
    return mixture, rest.cpu()


def _input(tape: Tape, given: list[Given], size: int, clean: int, noise: int) -> Op:
    """What meets the network's first layer, in the size of the image: constant channels may stand beside it. Raises Nothing."""
    may_be = [op for each in given for op in (each.value, *reversed(tape.upstream(each.value)))]
    may_be = [op for op in may_be if op.floating and numel(op) == size and not op.fronts and not op.name.endswith("_like")]
    ranks = [bool(op.content & noise) + bool(op.content & clean) for op in may_be]
    if not may_be:
        raise Nothing("nothing-given")
    return may_be[ranks.index(max(ranks))]


def learned_of(tape: Tape, root: Op, mixture: Mixture, target: Target) -> Learned | None:
    """The output of a layer with one number for each sample, which knows the level alone, and enters the loss."""
    barred = mixture.noise.content | (mixture.clean.content if mixture.clean is not None else 0)
    levels = sum(1 << source.index for source in mixture.levels)
    u = next(
        (
            op
            for op in tape.upstream(root, [target.output])
            if op in op.fronts and op.content & levels and not op.content & barred and numel(op) == mixture.size
        ),
        None,
    )
    if u is None:
        return None
    value = tape.value(u)
    slopes = [gradient_of(tape, root, u, at) for at in (value, value + 1)]
    known = [torch.full_like(value, torch.nan) if slope is None else slope for slope in slopes]
    u_value, here, beyond = (part.double().flatten().cpu() for part in (value, *known))
    return Learned(u_value, here, beyond, _is_own(tape, u, mixture.levels[0]))


def _is_own(tape: Tape, u: Op, level: Op) -> bool:
    levels = tape.value(level).clone()
    levels.view(-1)[0] *= 1.5
    changed = (tape.value(u, {level: levels}, anew=True) != tape.value(u, anew=True)).flatten()
    return bool(changed[0]) and not bool(changed[1:].any())


def penalty_of(recorded: Recorded, root: Op, target: Target) -> dict[int, Tensor]:
    """Some numbers of the gradient by each parameter that the loss depends on beside the output."""
    tape = recorded.tape
    beside = [op for op in tape.upstream(root, [target.output, *root.fronts]) if op.kind == "trained"]
    if not beside:
        return {}
    values = ((op, tape.values[op.index].detach()) for op in beside)
    # An absolute value has no slope at 0, where some layers begin.
    leaves = {op: value.masked_fill(value == 0, 1.0).requires_grad_(True) for op, value in values}
    held = {target.output: tape.value(target.output)}
    with torch.enable_grad():
        loss = tape.value(root, held | {op: leaf * 1 for op, leaf in leaves.items()}, grad=True)
    slopes = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
    scale = recorded.told.loss_scale
    return {op.uses.bit_length() - 1: sample(slope) / scale for op, slope in zip(beside, slopes) if slope is not None}


def layers_of(forward: list[Op]) -> tuple[torch.dtype, ...]:
    """In which convolutions compute."""
    return _precisions(op for op in forward if op.name == "convolution")


def products_of(forward: list[Op]) -> tuple[torch.dtype, ...]:
    """In which other layers and attention compute; a layer may be kept in full precision on purpose."""
    return _precisions(op for op in forward if op.name in PRODUCTS or "attention" in op.name)


def _precisions(ops: Iterable[Op]) -> tuple[torch.dtype, ...]:
    return tuple(sorted({op.dtype for op in ops if op.trained and op.dtype is not None}, key=str))


def sums_of(noise: Tensor, images: Tensor) -> dict[str, tuple[float, int]]:
    """Of noise [B, C, H, W]: name -> (sum, of how many). Each mean tells of one way in which it may not be white and normal."""
    values = noise.detach().float()
    batch, size = len(values), values[0].numel()
    totals = {
        "values": values,
        "squares": values.square(),
        "fourth powers": values.pow(4),
        "rows": values[:, :, 1:] * values[:, :, :-1],
        "columns": values[..., 1:] * values[..., :-1],
        "channels": values[:, 1:] * values[:, :-1],
        # The sum of the images has the variance `batch` in each pixel, and the mean of each one the variance 1 / size.
        "sum of images": values.sum(0).square() / batch if batch > 1 else values.new_zeros(0),
        "means of images": values.flatten(1).mean(1).square() * size,
        "variances of images": (values.flatten(1).square().mean(1) - 1).square() * (size / 2),
        "shares of the image": _shares_of_image(values, images),
    }
    sums = torch.stack([total.sum() for total in totals.values()]).tolist()
    return {name: (one, total.numel()) for (name, total), one in zip(totals.items(), sums)}


def _shares_of_image(noise: Tensor, images: Tensor) -> Tensor:
    """Squares of the noise's component along each image that is not black, [n]; 1 in the mean where they are independent."""
    lines = images.detach().float().flatten(1)
    sizes = lines.norm(dim=1)
    clear = sizes > 1e-3 * lines.shape[1] ** 0.5
    return ((noise.flatten(1) * lines).sum(1)[clear] / sizes[clear]).square()


def marks_of(noise: Tensor) -> list[int]:
    """Of the numbers of each sample, without their signs and their order."""
    rows = noise.detach().float().flatten(1).abs().sort(1).values.cpu().numpy()
    return [hash(row.tobytes()) for row in rows]

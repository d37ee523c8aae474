"""What the network is trained to give: from the loss as a function of the output, as the tape repeats it."""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from steady_doctor.identify.fit import fit
from steady_doctor.identify.mixed import LINEAR, Mixture, numel
from steady_doctor.identify.rows import FORMS
from steady_doctor.record.ops import PARAMETERS, Op
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.tape import Tape

CUTS = {"slice", "select"}
COMPARES = {"sub", "rsub", "sub_", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
LEAST_STEP = 0.1  # of the output, above the rounding of what it is compared with; networks begin with outputs of nearly 0
SAME_WEIGHT = 1e-3  # of a weight, which is a quotient of differences
MOST = 0.75  # of a target, that several together leave of the own one
BOUNDS = {"tanh": (-1.0, 1.0), "sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "relu": (0.0, torch.inf)}  # of what it gives
BESIDE, UNEVEN = 1e-3, 0.1  # of the target's spread; and of the gradient at the output
CLOSE = 1e-2  # of an output's bounds
QUADRATIC = 1e-2  # by how much the slope of the gradient may change between two steps


@dataclass
class Target:
    """output -> loss. For squared errors the gradient is c (output - target), whatever the loss is made of."""

    output: Op
    layers: frozenset[Op]  # that end in it
    kind: str  # "squared", "operand", "flat", "none", or "unknown": the loss cannot be computed again
    value: Tensor | None = None  # [B, ...], in the shape of the input
    slope: Tensor | None = None  # c [B, ...] of each element
    p: Tensor | None = None  # target = p clean + q noise, [B]
    q: Tensor | None = None
    rest: Tensor | None = None  # the share of the target that is neither, [B]
    skips: bool = False  # an image is added to the output before it is compared, or the noised one is taken off the target
    seen: Tensor | None = None  # samples of which enough elements count, [B]
    by_variance: bool = False  # how much its errors count depends on a variance that the network gives, too
    noised: bool = True  # any of what counts has noise in the input
    wanted: Tensor | None = None  # `value` in the shape of the output; NaN where nothing counts


def find_output(tape: Tape, root: Op, mixture: Mixture) -> Op | None:
    """The output of the network that got the mixture: the last layer before the loss, of its size.

    Where several layers end the network, as with low-rank adapters, it is the first value that all that follows goes through;
    of heads that end in terms of their own in the loss, the one that gives images.
    """
    noise, size = mixture.noise.content, mixture.value.numel()
    layers = [op for op in root.fronts if op.content & noise and torch.Size(op.shape).numel() >= size]
    output = _where_all_end(tape, root, mixture, layers) if layers else None
    heads = [layer for layer in layers if layer.trained]
    of_size = next((those for times in (1, 2) if (those := [head for head in heads if numel(head) == times * size])), [])
    if output is None and len(of_size) == 1:
        output = _with_gates(tape, root, mixture, of_size[0])
    return output and _without_others(tape, root, size, output)


def _without_others(tape: Tape, root: Op, size: int, output: Op) -> Op:
    """Where tokens of a condition stand among those of the image, what is left of the output when they were cut off."""
    if numel(output) in (size, 2 * size):
        return output
    inside = {output}
    for op in tape.upstream(root, [output]):
        if op.name in FORMS | CUTS and any(need in inside for need in op.needs):
            inside.add(op)
            if numel(op) == size:
                return op
    return output


def _where_all_end(tape: Tape, root: Op, mixture: Mixture, layers: list[Op]) -> Op | None:
    size = mixture.value.numel()
    if len(layers) == 1 and layers[0].trained:
        return _with_gates(tape, root, mixture, layers[0])
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
        if op.index < max(layer.index for layer in layers) or not is_cut or not op.trained or numel(op) < size:
            continue
        sides = [last for _, last in op.reads if last in inside]
        ours = [last for last in sides if _learns(tape, last, layers)]
        if op.name in COMPARES and len(ours) == 1 < len(sides):  # two networks are compared
            way = set(tape.upstream(ours[0]))
            own = [layer for layer in layers if layer in way]
            # The same ones where a network is compared with what it gave itself.
            return _where_all_end(tape, root, mixture, own) if len(own) < len(layers) else None
        return _with_gates(tape, root, mixture, op)
    return None


def _learns(tape: Tape, op: Op, layers: list[Op]) -> bool:
    """Whether a gradient comes back from here to the layers."""
    way = [op, *tape.upstream(op, layers)]
    return op.trained and all(each.with_grad and each.name != "detach" for each in way if each.trained and each.kind == "op")


def _with_gates(tape: Tape, root: Op, mixture: Mixture, layer: Op) -> Op:
    """What else the network does to its last layer: it multiplies and adds what other layers made, and adds what it gets."""
    inside, output, noise = {layer}, layer, mixture.noise.content
    gets = {op for op in tape.upstream(layer) if not op.content & noise} - set(tape.upstream(mixture.input))
    for op in (op for op in tape.upstream(root, [layer]) if any(need in inside for need in op.needs)):
        others = [last for _, last in op.reads if last not in inside]
        own = {mixture.input, mixture.given} | gets if op.name == "add" else set()  # what is taken off is so for the loss
        is_network = all(
            last in own or last.kind in PARAMETERS or (last.trained and not last.content & noise) for last in others
        )
        if not is_network or torch.Size(op.shape).numel() != torch.Size(layer.shape).numel():
            break
        inside.add(op)
        output = op if others else output
    return output


def find_target(tape: Tape, root: Op, mixture: Mixture) -> Target | None:
    output = find_output(tape, root, mixture)
    if output is None:
        return None
    layers = root.fronts & set(tape.upstream(output))
    try:
        value = tape.value(output).double()  # the loss again, without rounding
        step, beside = step_of(value), None
        if with_variance(value, mixture):
            step[:, mixture.value.shape[1] :] = 0  # what else is learned of a number changes how much its error counts
            beside = gradient_of(tape, root, output, value + step_of(value) - step)
        gradients = [gradient_of(tape, root, output, v) for v in (value, value + step, value - step)]
    except (NotRecorded, RuntimeError):
        return Target(output, layers, "unknown")
    known = [gradient for gradient in gradients if gradient is not None]
    if len(known) < len(gradients):
        return Target(output, layers, "none")
    if not any(bool(gradient.any()) for gradient in known):
        return Target(output, layers, "flat")
    here, above, below = known
    slope, before = (torch.where(step == 0, 0.0, difference / step) for difference in (above - here, here - below))
    largest = slope.abs().flatten(1).amax(1).reshape(-1, *[1] * (slope.ndim - 1)) if slope.ndim > 1 else slope.abs()
    counts = slope.abs() > 1e-4 * largest  # of its own sample: weights may span many orders
    wanted = torch.where(counts, value - here / torch.where(counts, slope, 1.0), torch.nan)
    is_quadratic = bool(largest.any()) and bool(((slope - before).abs() <= QUADRATIC * largest).all())
    if is_quadratic and _is_least(tape, root, output, torch.where(counts, wanted, value), here * counts):
        found = Target(output, layers, "squared", wanted, torch.where(counts, slope, 0.0))
    else:
        wanted = _compared(tape, root, output, value)
        wanted = None if wanted is None else _where_least(tape, root, output, wanted, here)
        if wanted is None:
            return Target(output, layers, "none")
        found = Target(output, layers, "operand", wanted)
    found.wanted = wanted
    if with_variance(value, mixture) and beside is not None:
        ours, others = (one[:, : mixture.value.shape[1]] for one in (here, beside))
        found.by_variance = bool((ours - others).norm() > SAME_WEIGHT * ours.norm())
    found.skips = _skips(tape, root, output, mixture)
    _as_images(tape, root, mixture, found, wanted)
    if found.value is not None and found.value.shape == mixture.value.shape and mixture.clean_value is not None:
        _shares(tape, mixture, found.value, found)
        is_known = found.rest is not None and float(found.rest.max()) <= LINEAR
        if not is_known and _is_one_of_several(tape, root, output, mixture, found.value):
            found.p = found.q = found.rest = None
    return found


def _is_one_of_several(tape: Tape, root: Op, output: Op, mixture: Mixture, wanted: Tensor) -> bool:
    """Whether the output is compared with several values, of which one is made of its own image and noise: the others pull it
    there or push it away, such as those of other samples."""
    others = {other for _, other in _comparisons(tape, root, output) if numel(other) == mixture.value.numel()}
    if len(others) < 2:
        return False
    shares = fitted(mixture, wanted, mixture.noise_value)[0]
    for other in others:
        own, rest, _ = fitted(mixture, tape.value(other).reshape(mixture.value.shape), mixture.noise_value)
        if float(rest.max()) < LINEAR:  # what is asked for in all has most of it
            return bool(((shares * own).sum(-1) > MOST * own.square().sum(-1)).all())
    return False


def beyond(tape: Tape, root: Op, output: Op) -> tuple[str, float]:
    """The operation that ends the network, and the share of what is asked for that it can never give."""
    for ours, other in _comparisons(tape, root, output):
        while ours.name in FORMS and ours.reads:
            ours = ours.reads[0][1]
        name = ours.name.strip("_")
        if name in BOUNDS:
            low, high = BOUNDS[name]
            with contextlib.suppress(NotRecorded):
                wanted = tape.value(other)
                return name, float(((wanted < low - CLOSE) | (wanted > high + CLOSE)).double().mean())
        break
    return "", 0.0


def with_variance(value: Tensor, mixture: Mixture) -> bool:
    shape = mixture.value.shape
    return len(shape) > 2 and value.shape == (shape[0], 2 * shape[1], *shape[2:])


def step_of(value: Tensor) -> Tensor:
    signs = torch.randint(0, 2, value.shape, generator=torch.Generator().manual_seed(0)).to(value.device) * 2 - 1
    return 0.5 * value.float().std().clamp(min=LEAST_STEP) * signs.to(value)


def gradient_of(tape: Tape, root: Op, output: Op, value: Tensor, instead: dict[Op, Tensor] | None = None) -> Tensor | None:
    """Of the loss by the output, at `value`; in float64, as near the images errors are differences of nearly equal numbers."""
    leaf = value.detach().double().clone().requires_grad_(True)
    with torch.enable_grad():
        loss = tape.value(root, {output: leaf * 1} | (instead or {}), grad=True, exact=True)
    if not loss.requires_grad:
        return None
    return torch.autograd.grad(loss.sum(), leaf, allow_unused=True)[0]


def _compared(tape: Tape, root: Op, output: Op, value: Tensor) -> Tensor | None:
    """The output at which there is no error: where what was made of it, which is a line in it, is what it is compared with."""
    for ours, other in _comparisons(tape, root, output):
        step = step_of(value)
        here, there = (tape.value(ours, {output: v}, exact=True).double() for v in (value, value + step))
        wanted = tape.value(other, exact=True).double()
        if here.shape != value.shape:
            here, there, wanted = (
                (v.reshape(value.shape) for v in (here, there, wanted))
                if here.numel() == value.numel()
                else (here, there, wanted)
            )
        if here.shape != value.shape:
            continue
        found = value + (wanted - here) * step / (there - here)
        counts = torch.isfinite(found)
        again = tape.value(ours, {output: torch.where(counts, found, value)}, exact=True).double().reshape(wanted.shape)
        if float((again - wanted)[counts].norm()) <= BESIDE * float((wanted - here)[counts].norm()):
            return found  # else it is no line, number by number: a spectrum, say
    return None


def _is_least(tape: Tape, root: Op, output: Op, value: Tensor, here: Tensor) -> bool:
    """Whether the gradient is 0 there, beside that at the output: else an error counts in its neighbors', too, as in a loss of
    edges."""
    there = gradient_of(tape, root, output, value)
    return there is not None and bool((there * (here != 0)).norm() <= 2 * QUADRATIC * here.norm())


def _where_least(tape: Tape, root: Op, output: Op, wanted: Tensor, here: Tensor) -> Tensor | None:
    """`wanted` where the loss is as large on both sides of it, NaN in other samples: their errors count in another way, as the
    last step of a variational bound does. None where there are too few of the former."""
    if wanted.ndim < 2 or not bool(torch.isfinite(wanted).all()):
        return wanted
    slopes = [gradient_of(tape, root, output, wanted + side * BESIDE * wanted.std()) for side in (1, -1)]
    if slopes[0] is None or slopes[1] is None:
        return wanted
    off = (slopes[0] + slopes[1]).flatten(1).norm(dim=1) > UNEVEN * here.flatten(1).norm(dim=1)
    return None if 2 * int(off.sum()) > len(off) else torch.where(off.reshape(-1, *[1] * (wanted.ndim - 1)), torch.nan, wanted)


def _comparisons(tape: Tape, root: Op, output: Op) -> list[tuple[Op, Op]]:
    """What was made of the output, and what is taken off it: what has most numbers first, then the last on the way to the loss.
    A part may be asked for, such as the last step of a walk, and not just a number of each sample."""
    found = []
    for op in reversed(tape.upstream(root, [output])):
        pair = [last for _, last in op.reads][:2]
        if op.name in COMPARES and len(pair) > 1 and pair[0].trained != pair[1].trained and pair[0].shape == pair[1].shape:
            ours, other = sorted(pair, key=lambda last: not last.trained)
            if numel(ours) > output.shape[0]:
                found.append((ours, other))
    return sorted(found, key=lambda one: -numel(one[0]))


def _skips(tape: Tape, root: Op, output: Op, mixture: Mixture) -> bool:
    noised = {op for op in tape.upstream(mixture.input) if op.content & mixture.noise.content and op.content & mixture.image}
    for ours, other in _comparisons(tape, root, output):
        if noised & set(tape.upstream(other)):
            return True
        size = torch.Size(ours.shape).numel()
        after = [op for op in tape.upstream(ours, [output]) if op.index > output.index and op.trained]
        beside = [last for op in after for _, last in op.reads if not last.trained]
        return any(last.content and torch.Size(last.shape).numel() == size for last in beside)
    return False


def _as_images(tape: Tape, root: Op, mixture: Mixture, target: Target, value: Tensor) -> None:
    """Puts a transformer's patches back as the script does, and leaves out channels of a learned variance."""
    shape = tuple(mixture.value.shape)
    with_variance = (shape[0], 2 * shape[1], *shape[2:])
    if value.shape not in (shape, with_variance) and target.kind == "squared":
        forms = [_without_ones(form) for form in (shape, with_variance) if torch.Size(form).numel() == value.numel()]
        later = [op for op in tape.upstream(root) if op.index > target.output.index and _without_ones(op.shape) in forms]
        later = [op for op in later if target.output in tape.upstream(op)]
        if not later:
            _put_together(tape, root, mixture, target, value)
            return
        put_back = [op for op in later if _is_rearranged(tape, op, target.output)]  # tokens may have an image's size, too
        after = (put_back or later[:1])[-1]
        form = with_variance if value.numel() > mixture.value.numel() else shape
        like = torch.float32 if not value.is_floating_point() else value.dtype
        target.value = value = tape.value(after, {target.output: value.to(like)}).double().reshape(form)
        if target.slope is not None:
            target.slope = tape.value(after, {target.output: target.slope.to(like)}).double().reshape(form)
    if value.shape == with_variance:
        target.value = value[:, : shape[1]]
        target.slope = None if target.slope is None else target.slope[:, : shape[1]]


def _put_together(tape: Tape, root: Op, mixture: Mixture, target: Target, value: Tensor) -> None:
    """Where the script cuts what it asks for into patches, in place of putting those of the output together: they go back to
    where they were cut off."""
    shape, count = tuple(mixture.value.shape), mixture.value.numel()
    for _, other in _comparisons(tape, root, target.output):
        image = other
        while image.name in FORMS and image.reads and tuple(image.shape) != shape:
            image = image.reads[0][1]
        if tuple(image.shape) == shape and numel(other) == value.numel() == count:
            places = tape.value(other, {image: torch.arange(count, dtype=torch.float64).reshape(shape)}).flatten().long().cpu()
            back = torch.argsort(places)
            if not torch.equal(places[back], torch.arange(count)):  # rounded on the way, as to half precision
                continue
            target.value = value.flatten()[back].reshape(shape)
            target.slope = None if target.slope is None else target.slope.flatten()[back].reshape(shape)
            return


def _is_rearranged(tape: Tape, op: Op, output: Op) -> bool:
    """Whether it has the numbers of the output in another order or form."""
    return all(each.name in FORMS for each in tape.upstream(op, [output]) if each.index > output.index)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _shares(tape: Tape, mixture: Mixture, value: Tensor, target: Target) -> None:
    """Least squares of the target's `value` by the clean image and the noise, for each sample, where there is noise. Of noise
    that several draws were added up to, some of them may be asked for."""
    parts = [op for op in tape.upstream(mixture.noise) if op.floating and op.content and numel(op) == value.numel()]
    of_size = [tape.value(op).reshape(value.shape) for op in parts] if len(mixture.draws) > 1 else []
    for noise in (mixture.noise_value, *reversed(of_size)):
        if target.rest is not None and float(target.rest.max()) < LINEAR:
            break
        found, rest, known = fitted(mixture, value, noise)
        target.seen, target.noised = known.mean(1) > 0.02, bool(known.any())
        if target.rest is None or float(rest.max()) < 0.1 * float(target.rest.max()):
            target.rest, target.p, target.q = rest, found[:, 0], found[:, 1]


def fitted(mixture: Mixture, value: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the shares of the clean image and this noise in `value` [B, 2], the share that is neither [B], and which of its
    numbers were counted [B, N]: those that are noised and not NaN."""
    is_noised = (mixture.where > 0) & (mixture.b != 0).to(value.device).reshape(-1, *[1] * (value.ndim - 1))
    known = (torch.isfinite(value) & is_noised).flatten(1).double()
    y = torch.nan_to_num(value).double().flatten(1) * known
    return *fit(y, *(v.double().flatten(1) * known for v in (mixture.clean_value, noise) if v is not None)), known

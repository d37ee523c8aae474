"""Of what a network's input is mixed: x = a x_0 + b noise, found by least squares among the tensors that were seen."""

from dataclasses import dataclass, replace

import torch

from utils.diagnostics.audit.fitting import constant, fit, flat, worst
from utils.diagnostics.watching.seen import Noising, Seen

EXACT = 1e-4  # of a fit's residual: arithmetic in fp32 leaves 1e-7
ROUNDED = 2e-2  # in half precision
MOVED = 1e-3  # of the noise, by a number that was added


@dataclass
class Mixture:
    """Of one micro step; float64, [B, N] and [B]."""

    clean: torch.Tensor
    noise: torch.Tensor
    of_clean: torch.Tensor  # a
    of_noise: torch.Tensor  # b
    residual: torch.Tensor
    clean_tensor: torch.Tensor  # as the script has them, [B, C, ...]
    noise_tensor: torch.Tensor
    drawn: bool = True  # the noise was seen when it was drawn
    extra: float = 0.0  # a second noise in the input alone, as a share of the first ("input perturbation")
    offset: float = 0.0  # of one more number for each channel that was added to the noise ("offset noise")
    constant: float = 0.0  # that is added to all values
    moved: bool = False  # numbers for each channel were added to the noise that are not drawn as it is

    def of_strength(self, c: float) -> "Mixture":
        """With c times the noise as its noise."""
        return replace(self, noise=self.noise * c, noise_tensor=self.noise_tensor * c, of_noise=self.of_noise / c)


def family(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-3) -> str:
    """What kind of mixture the coefficients are of."""
    if worst(a**2 + b**2 - 1) < tolerance:
        return "variance-preserving"
    if worst(a + b - 1) < tolerance:
        return "flow"
    if worst(a - 1) < tolerance and constant(b) is None:
        return "variance-exploding"
    sigma = b / a
    if constant(b) is None and constant(1 / a**2 - sigma**2, 1e-2) is not None and bool((a > 0).all()):
        return "preconditioned"
    return "other"


def strength(a: torch.Tensor, b: torch.Tensor) -> float:
    """c, where the coefficients are those of a known process but for noise that is c times the one that was drawn; else 1."""
    used = (a > 1e-3) & ((a - 1).abs() > 1e-3)
    if family(a, b) != "other" or int(used.sum()) < 4:
        return 1.0
    a, b = a[used], b[used]
    if (found := constant(b / (1 - a))) is not None:  # a + b / c = 1
        return found
    # 1 / a^2 = p + (sigma / c)^2, of variance-preserving processes and EDM's.
    columns = torch.stack([torch.ones_like(a), (b / a) ** 2], 1) * a[:, None] ** 2
    sizes = columns.norm(dim=0)
    p, q = (torch.linalg.lstsq(columns / sizes, torch.ones_like(a)[:, None]).solution[:, 0] / sizes).tolist()
    return q**-0.5 if p > 0 and q > 0 and worst(columns @ torch.tensor([p, q]).to(a) - 1) < 1e-3 else 1.0


def find(x: torch.Tensor, seen: Seen, told: Noising | None = None) -> Mixture | None:
    """None where nothing that was seen makes up `x`."""
    limit = EXACT if x.dtype in (torch.float32, torch.float64) else ROUNDED
    values = flat(x)
    if not torch.isfinite(values).all() or values.shape[1] < 8:
        return None
    if told is not None and told.clean.shape == told.noise.shape == x.shape:
        return _with_extras(_mixture(values, told.clean, told.noise), values, seen, limit)
    noises = noises_of(x, seen)
    images = images_of(values, x, seen)
    found: list[tuple[int, int, Mixture]] = []
    rounded: list[Mixture] = []
    for noise in noises:
        for place, image in enumerate(images):
            mixture = _mixture(values, image, noise)
            left = worst(mixture.residual)
            # A negative share: the noise that an image has, taken off again.
            if left <= ROUNDED and worst(mixture.of_clean) > 1e-3 and float(mixture.of_noise.max()) > 1e-3:
                rounded.append(mixture)
                if left > limit:
                    continue
                rank = ("variance-preserving", "flow", "variance-exploding", "preconditioned", "other")
                kind = rank.index(family(mixture.of_clean, mixture.of_noise))
                found.append((kind if id(image) not in seen.scaled else 9, place, mixture))
        if found:
            break
    if found:
        return _with_offset(min(found, key=lambda one: one[:2])[2], seen)
    for noise in noises:
        alone = _mixture(values, torch.zeros_like(noise), noise)
        if worst(alone.residual) < 1e-6:  # nothing of an image
            return alone
    for noise in noises[:3]:  # with a constant
        for image in images:
            parts = flat(image), flat(noise)
            coefficients, residual = fit(values, *parts, torch.ones_like(values))
            a, b, c = coefficients.T
            if worst(residual) <= limit and worst(a) > 1e-3 and float(b.max()) > 1e-3 and constant(c, 1e-2) is not None:
                return Mixture(*parts, a, b, residual, image, noise, constant=float(c.mean()))
    for noise in noises[:3]:  # to which one number for each channel was added
        for image in images:
            if (mixture := _with_steps(values, image, noise, seen, limit)) is not None:
                return mixture
    for noise in noises[:3]:  # of two noises
        for image in images:
            first = _mixture(values, image, noise)
            if worst(first.residual) < 0.5 and float(first.of_noise.max()) > 1e-3:
                mixed = _with_extras(first, values, seen, limit)
                if worst(mixed.residual) <= limit:
                    return _with_offset(mixed, seen)
    if rounded:
        return min(rounded, key=lambda mixture: worst(mixture.residual))
    undrawn = _undrawn(values, images, limit)
    return None if undrawn is None else _with_offset(undrawn, seen)


def axis_of_factors(x: torch.Tensor, seen: Seen) -> int | None:
    """The axis of an input [B, C, ...] with B places, of which each has its own factor of the noise, the same in all samples;
    None where nothing that was seen makes up `x` so. Frames with noise levels of their own have others in each sample."""
    if not torch.isfinite(x).all():
        return None
    limit = EXACT if x.dtype in (torch.float32, torch.float64) else ROUNDED
    for axis in [axis for axis in range(2, x.ndim) if x.shape[axis] == len(x) > 1]:
        for noise in noises_of(x, seen)[:3]:
            for image in images_of(flat(x), x, seen):
                rows = [part.detach()[:8].movedim(axis, 1).flatten(0, 1).flatten(1).double() for part in (x, image, noise)]
                coefficients, residual = fit(*rows)
                of_noise = coefficients[:, 1].view(-1, len(x))  # [samples, places]
                alike = worst(of_noise - of_noise[:1]) < 1e-3 < worst(of_noise - of_noise[:, :1])
                if rows[0].shape[1] >= 8 and worst(residual) <= limit and worst(coefficients[:, 0]) > 1e-3 and alike:
                    return axis
    return None


def _mixture(values: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor) -> Mixture:
    parts = flat(clean), flat(noise.expand(clean.shape))
    (a, b), residual = (lambda result: (result[0].T, result[1]))(fit(values, *parts))
    return Mixture(*parts, a, b, residual, clean, noise.expand(clean.shape))


def noises_of(x: torch.Tensor, seen: Seen) -> list[torch.Tensor]:
    """What was drawn and has the size of `x`, or is spread over it: the newest first."""
    found = []
    for draw in reversed(seen.draws):
        tensor = draw.tensor
        per_channel = x.shape[0] * (x.shape[1] if x.ndim > 2 else 1)
        if tensor.numel() > max(per_channel, 16) and tensor.device == x.device:
            if tensor.shape == x.shape:
                found.append(tensor)
            else:
                try:
                    found.append(tensor.expand(x.shape))
                except RuntimeError:
                    continue
    return found[:8]


def images_of(values: torch.Tensor, x: torch.Tensor, seen: Seen) -> list[torch.Tensor]:
    """Tensors that may be the clean images, in the order in which they came."""
    drawn = {draw.tensor.data_ptr() for draw in seen.draws}
    found = []
    for tensor in seen.tensors.values():
        if tensor.shape == x.shape and tensor.device == x.device and tensor.data_ptr() not in drawn:
            other = flat(tensor)
            if other.any() and torch.isfinite(other).all():
                _, alone = fit(values, other)
                if worst(alone) > 1e-6:
                    found.append(tensor)
    return found[:24]


def _with_extras(mixture: Mixture, values: torch.Tensor, seen: Seen, limit: float) -> Mixture:
    """With a second noise that only the input got, where that explains what is left."""
    if worst(mixture.residual) <= limit:
        return _with_offset(_undone(mixture, seen), seen)
    shape, pointer = mixture.clean_tensor.shape, mixture.noise_tensor.data_ptr()
    for draw in seen.draws:
        if draw.tensor.shape == shape and draw.tensor.data_ptr() != pointer and draw.normal:
            second = flat(draw.tensor)
            coefficients, residual = fit(values, mixture.clean, mixture.noise, second)
            a, b, c = coefficients.T
            share = constant(c / b, 1e-2)
            if worst(residual) <= limit and share is not None and abs(share) < 1:
                mixture.of_clean, mixture.of_noise, mixture.residual, mixture.extra = a, b, residual, abs(share)
                return _with_offset(mixture, seen)
            if worst(residual) <= limit and share is not None:
                noise, extra = draw.tensor, abs(1 / share)
                return _with_offset(
                    Mixture(mixture.clean, second, a, c, residual, mixture.clean_tensor, noise, extra=extra), seen
                )
    return mixture


def _undone(mixture: Mixture, seen: Seen) -> Mixture:
    """Where the noise told is itself a sum of two that were drawn (perturbed input), the larger one is the noise."""
    shape, told = mixture.clean_tensor.shape, mixture.noise_tensor
    draws = [draw.tensor for draw in seen.draws if draw.tensor.shape == shape and draw.normal][:6]
    if any(tensor.data_ptr() == told.data_ptr() for tensor in draws):
        return mixture
    for place, first in enumerate(draws):
        for second in draws[place + 1 :]:
            coefficients, residual = fit(mixture.noise, flat(first), flat(second))
            sizes = coefficients.abs().mean(0)
            if worst(residual) < EXACT and bool((sizes > 1e-3).all()):
                main = first if sizes[0] > sizes[1] else second
                mixture.noise, mixture.noise_tensor = flat(main), main
                mixture.extra = float(sizes.min() / sizes.max())
                return mixture
    return mixture


def _with_steps(values: torch.Tensor, image: torch.Tensor, noise: torch.Tensor, seen: Seen, limit: float) -> Mixture | None:
    """Of an image and a noise that is the sum of the one that was drawn and of one number for each channel."""
    for draw in seen.draws if noise.ndim > 3 else ():
        if draw.normal and draw.tensor.shape == (*noise.shape[:2], *(1,) * (noise.ndim - 2)):
            steps = draw.tensor.expand(noise.shape)
            coefficients, residual = fit(values, flat(image), flat(noise), flat(steps))
            a, b, c = coefficients.T
            share = constant(c / b, 1e-2)
            if worst(residual) <= limit and worst(a) > 1e-3 and share is not None:
                whole = noise + share * steps
                return Mixture(flat(image), flat(whole), a, b, residual, image, whole, offset=share)
    return None


def _with_offset(mixture: Mixture, seen: Seen) -> Mixture:
    noise = mixture.noise_tensor
    if noise.ndim < 4:
        return mixture
    means = noise.detach().double().flatten(2).mean(2)
    moved = next((draw.tensor for draw in seen.draws if draw.normal and _is_moved(noise, draw.tensor)), None)
    added = None if moved is None else (noise - moved).detach().double().flatten(2).mean(2)
    for draw in seen.draws:
        of_each = draw.tensor.numel() == means.numel() and draw.tensor.shape[:2] == noise.shape[:2]
        of_image = draw.tensor.numel() == len(noise) == len(draw.tensor)  # the same for all channels
        if draw.normal and (of_each or of_image):
            steps = draw.tensor.detach().double().reshape(len(noise), -1).expand(means.shape)
            found = means if added is None else added
            share = float((found * steps).sum() / steps.square().sum().clamp(min=1e-30))
            exact = added is not None and float((added - share * steps).abs().amax()) < EXACT
            if exact or (added is None and abs(share) > 4 / (means.numel() * noise[0, 0].numel()) ** 0.5):
                mixture.offset = share
    mixture.moved = not mixture.offset and moved is not None
    return mixture


def _is_moved(noise: torch.Tensor, drawn: torch.Tensor) -> bool:
    """Whether noise [B, C, ...] is the drawn one and a number for each channel."""
    if drawn.shape != noise.shape or drawn.data_ptr() == noise.data_ptr():
        return False
    steps = (noise - drawn).detach().double().flatten(2)
    return bool(steps.abs().amax() > MOVED) and float((steps - steps.mean(2, keepdim=True)).abs().amax()) < EXACT


def _undrawn(values: torch.Tensor, images: list[torch.Tensor], limit: float) -> Mixture | None:
    """Of noise that torch did not draw in this update: two of the tensors seen, of which one looks like noise."""
    for noise in images:
        drawn = flat(noise)
        if abs(float(drawn.mean())) > 0.1 or not 0.9 < float(drawn.var()) < 1.1 or abs(_neighbors(noise)) > 0.05:
            continue
        for image in images:
            if image is not noise:
                mixture = _mixture(values, image, noise)
                if worst(mixture.residual) <= limit and worst(mixture.of_noise) > 1e-3 and worst(mixture.of_clean) > 1e-3:
                    mixture.drawn = False
                    return mixture
    return None


def _neighbors(tensor: torch.Tensor) -> float:
    values = tensor.detach().double()
    return float((values[..., 1:] * values[..., :-1]).mean() / values.square().mean().clamp(min=1e-30))

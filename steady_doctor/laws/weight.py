"""Whether errors count by the noise level of their image alone, as one of the known weightings has it."""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from steady_doctor.found import Found
from steady_doctor.identify.step import EVEN
from steady_doctor.laws.paths import levels
from steady_doctor.laws.target import asks
from steady_doctor.seen import Seen

VARIES = 0.05  # of the logarithm of the weight
NEAR, JUMP, SELDOM = 0.05, 0.2, 0.1  # in logarithms, of the SNR and of the weight; and a share of the neighbors
STEEPEST = {
    "vp": 1.5,
    "edm": 1.5,
    "ve": 1.5,
    "flow": 2.1,
}  # growth of the weight of the image's error with the SNR, in logarithms


class Weights:
    """How much an error counts, and at which signal-to-noise ratio, of the samples in the order of the latter.

    Of batches of the most usual size: in the mean over a smaller one, such as the last of an epoch, each error counts more.
    """

    def __init__(self, seen: Seen):
        rows: dict[int, list[Tensor]] = defaultdict(list)  # by the size of the batch
        for _, one in seen.mixed():
            mixture, target = one.mixture, one.target
            if mixture.a is None or target is None or target.slope is None or target.p is None or target.by_network:
                continue  # what is compared is another network's, or what another network sees in the output
            if target.even is not None and target.even > EVEN:
                snr = (mixture.a / mixture.b.clamp(min=1e-12)).square()
                growth = torch.full_like(snr, torch.nan) if mixture.growth is None else mixture.growth
                rows[mixture.size].append(torch.stack([snr, target.slope, growth])[:, mixture.b != 0])
        columns = torch.cat(max(rows.values(), key=len), 1) if rows else torch.zeros(3, 0)
        self.snr, self.slope, self.growth = columns[:, torch.argsort(columns[0])]
        self.log_snr, self.log_weight = self.snr.clamp(1e-8, 1e8).log(), self.slope.clamp(min=1e-30).log()

    def __len__(self) -> int:
        return len(self.snr)

    @property
    def range(self) -> float:
        return float(self.log_weight.max() - self.log_weight.min()) if len(self) else 0.0


def by_level(seen: Seen) -> Iterator[Found]:
    """The level of the same sample decides what an error counts, if any level does."""
    for update, one in seen.mixed():
        if one.target is not None and one.target.by_others:
            yield Found("weight-not-of-level", update)


def form(seen: Seen) -> Iterator[Found]:
    """No level counts more the less it tells, seen from the error in the image."""
    weights, asked, found = Weights(seen), asks(seen), levels(seen)
    if asked is None or found is None or not asked[1].fits or asked[1].scaled or len(weights) < 12 or any(by_level(seen)):
        return
    update, fits = asked[0], asked[1].fits[0]
    factor = of_image(fits, weights.snr, found.kind, found.scale)
    if factor is None or weights.range < VARIES:
        return
    in_image = weights.log_weight + factor.log()
    if is_likelihood(weights, in_image):
        return
    if not _is_of_level(weights.log_snr, in_image):
        return
    slope = _steepness(weights.log_snr, in_image)
    name = _known_slip(fits, weights)
    if name:
        yield Found("weight-min-snr", update, {"name": name, "target": fits})
    elif slope[0] < -0.1 or slope[1] > (2.1 if "score" in fits else STEEPEST.get(found.kind, 2.1)):  # scores may be unweighted
        yield Found("weight-form", update, {"slope": slope, "target": fits})


def is_likelihood(weights: Weights, in_image: Tensor) -> bool:
    """Whether the error in the image counts as in the bound of the likelihood: as the SNR changes with the time that is drawn.

    Args:
        in_image: logarithm of the weight of that error, [samples].
    """
    ratio = in_image - (weights.snr * weights.growth.abs()).log()
    return bool(torch.isfinite(ratio).all()) and float(ratio.max() - ratio.min()) < VARIES


def of_image(target: str, snr: Tensor, kind: str, scale: float) -> Tensor | None:
    """The square of the target's error over that of the image."""
    one = torch.ones_like(snr)
    if target == "sample":
        return one
    if target in ("epsilon", "minus noise"):
        return snr
    if target in ("v", "edm", "turned v"):
        return snr + 1 / scale**2 if kind == "edm" else snr + 1
    if target in ("velocity", "backward"):
        return (1 + snr.sqrt()).square()
    if target in ("score", "minus score"):
        return {"vp": snr * (snr + 1), "ve": snr.square()}.get(kind)
    return None


def _is_of_level(x: Tensor, y: Tensor) -> bool:
    """Whether samples of almost one level count alike; else there is more that decides, such as the set that an image is of."""
    near = x.diff() < NEAR
    return not bool(near.any()) or float((y.diff()[near].abs() > JUMP).double().mean()) < SELDOM


def _steepness(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The smallest and the largest growth of y with x, over thirds of the range of x."""
    found = []
    for part in torch.linspace(float(x.min()), float(x.max()), 4).unfold(0, 2, 1):
        inside = (x >= part[0]) & (x <= part[1])
        if int(inside.sum()) >= 4 and float(x[inside].max() - x[inside].min()) > 0.5:
            u, v = x[inside] - x[inside].mean(), y[inside] - y[inside].mean()
            found.append(float((u @ v) / (u @ u)))
    return (min(found), max(found)) if found else (0.0, 0.0)


def _known_slip(target: str, weights: Weights) -> str:
    """Min-SNR with the larger of the two, or with the divisor of another target."""
    snr = weights.snr
    slips: dict[str, Tensor] = {}
    for gamma in (2, 3, 5, 10, 20):
        bounded = snr.clamp(max=gamma)
        if target == "epsilon":
            slips |= {f"max(SNR, {gamma}) / SNR": snr.clamp(min=gamma) / snr, f"min(SNR, {gamma})": bounded}
            slips[f"min(SNR, {gamma}) / (SNR + 1)"] = bounded / (snr + 1)
        if target == "v":
            slips |= {
                f"min(SNR, {gamma}) / SNR": bounded / snr,
                f"max(SNR, {gamma}) / (SNR + 1)": snr.clamp(min=gamma) / (snr + 1),
            }
    for name, slip in slips.items():
        ratio = weights.log_weight - slip.clamp(min=1e-30).log()
        if float(ratio.max() - ratio.min()) < 0.02:
            return name
    return ""


def left_out(seen: Seen) -> Iterator[Found]:
    """An image counts if those of the next levels on both sides do; at an end of the path a weight may come down to nothing."""
    for update, one in seen.mixed():
        mixture, target = one.mixture, one.target
        if target is None or target.slope is None or target.by_network or mixture.a is None:
            continue
        slope = target.slope[torch.argsort(mixture.a / mixture.b.clamp(min=1e-12))]
        without = slope <= 1e-6 * slope.max()
        inner = [
            place for place in range(len(slope)) if without[place] and not (without[:place].all() or without[place:].all())
        ]
        few = target.masked and int(without.sum()) <= mixture.size / 2  # of which a mask leaves nothing
        if inner and not few and not target.chosen:
            yield Found("weight-none", update, {"without": int(without.sum()), "size": mixture.size})


def summed(seen: Seen) -> Iterator[Found]:
    """A sum over the batch grows with its size. A GradScaler's factor, which is taken off again, may be as large."""
    if any(update.gradient.unscaled for update in seen.recorded(first=1)):
        return
    for update, one in seen.mixed():
        if one.target is None or one.target.slope is None or one.target.kind != "squared" or one.mixture.size < 3:
            continue
        # As many samples as channels, say: which of them is summed cannot be told; nor by how many numbers a mask divides.
        is_clear = not one.target.masked and one.mixture.size not in one.mixture.input.shape[1:]
        for over, expected in (("everything", 2.0), ("the batch", 2.0 / one.target.each))[: 1 + is_clear]:
            if bool((one.target.slope / expected - 1).abs().max() < 1e-2):
                yield Found("weight-summed", update, {"over": over})


def square(seen: Seen) -> Iterator[Found]:
    for update, one in seen.mixed():
        if one.squares:
            yield Found("weight-square", update, {"shape": one.squares[0]})


def by_image(seen: Seen) -> Iterator[Found]:
    for update, one in seen.mixed():
        if one.target is not None and one.target.by_image:
            yield Found("weight-of-image", update)


LAWS = (by_image, by_level, form, left_out, summed, square)

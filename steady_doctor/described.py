"""What a script was seen to do, in one line, and the figures of each recorded update."""

from collections.abc import Iterable

import torch
from torch import Tensor

from steady_doctor.identify.step import Pass, Step
from steady_doctor.laws.paths import Levels, levels
from steady_doctor.laws.target import asks
from steady_doctor.laws.weight import VARIES, Weights, is_likelihood, of_image
from steady_doctor.seen import Seen
from steady_doctor.words import not_identified

PATHS = {
    "vp": "variance-preserving path",
    "flow": "straight path from images to noise",
    "ve": "images + sigma noise",
    "sub-vp": "sub-variance-preserving path",
    "edm": "images + sigma noise, scaled for sigma_data {scale:.3g}",
    "": "unknown path",
}
TARGETS = {
    "epsilon": "epsilon",
    "sample": "the image",
    "score": "the score",
    "minus score": "the score with its sign changed",
    "v": "v",
    "turned v": "v",
    "edm": "EDM's target",
    "edm outside": "EDM's target",
    "velocity": "the velocity to noise",
    "backward": "the velocity to images",
    "minus noise": "the score times sigma",
}
GAMMAS = (1, 2, 3, 5, 10, 20)  # of min-SNR
ZERO = 1e-5  # of the shares
SAME = 0.02  # of the logarithm of a weight
COLUMNS = ("update", "share of the image", "of the noise", "mean of the noise", "its spread")
COLUMNS += ("image in the target", "noise in it", "rest of it", "gradient over that of the passes", "averages")
RISES = 0.9  # of 1 less a decay, from one recorded update to the next
HALF, MANY = 0.5, 100  # of an average; and updates, after which it should be of trained weights
FEW = 0.2  # of the averages of an update, that have a decay which is said


def described(seen: Seen) -> str:
    if not seen.updates:
        return "no optimizer step was seen: nothing was judged"
    of = f" of {seen.network}" if seen.network else ""
    updates = f"{seen.updates} update{'s' * (seen.updates != 1)}{of}{', after another training' * seen.is_later}"
    parts = [updates, _passes(seen), seen.optimizer, _averages(seen)]
    return "; ".join(part for part in parts if part)


def _passes(seen: Seen) -> str:
    """Path, target and weight, or why there are none."""
    if not seen.mixed():
        passes = [one for _, one in seen.passes()]
        if not passes:
            return "no backward pass was recorded: nothing was judged"
        return f"no mixture of image and noise was identified: {not_identified(passes[-1].why_not)}"
    found, asked = levels(seen), asks(seen)
    if found is None:
        return "the network gets noise, but the image in its input was not identified"
    target = TARGETS.get(asked[1].fits[0], asked[1].fits[0]) if asked is not None and asked[1].fits else "an unknown target"
    weight = _weight(seen, found, asked[1].fits if asked is not None else [])
    return ", ".join([PATHS[found.kind].format(scale=found.scale), target, *weight])


def _weight(seen: Seen, path: Levels, fits: list[str]) -> list[str]:
    weights = Weights(seen)
    if not len(weights):
        return []
    if weights.range < VARIES:
        return ["errors weighed equally"]
    divisor = {"epsilon": weights.snr, "v": weights.snr + 1, "sample": torch.ones_like(weights.snr)}.get("".join(fits[:1]))
    for gamma in GAMMAS if divisor is not None else ():
        ratio = weights.log_weight - (weights.snr.clamp(max=gamma) / divisor).clamp(min=1e-30).log()
        if float(ratio.max() - ratio.min()) < SAME:
            return [f"min-SNR {gamma}"]
    factor = of_image(fits[0], weights.snr, path.kind, path.scale) if fits else None
    if factor is not None and is_likelihood(weights, weights.log_weight + factor.log()):
        return ["errors weighed as in the likelihood"]
    return ["errors weighed unequally"]


def _averages(seen: Seen) -> str:
    """Those of the last recorded update; a decay that rises, as with a warm-up, is another one later."""
    said = [_said(step) for step in seen.steps[-2:]]
    if not said or not said[-1]:
        return ""
    single = [float(decays[0]) for decays in said if len(decays) == 1]
    rises = len(single) == 2 and 1 - single[1] < RISES * (1 - single[0])
    from_begin = len(single) == len(said) and all(step.update.averages for step in seen.steps)
    left = single[-1] ** seen.updates if single and not rises and from_begin else 0.0
    begin = f" ({left:.0%} of them is still the network before training)" * (left > HALF and seen.updates >= MANY)
    return f"averages of {' and '.join(said[-1])}{' so far' * rises}{begin}"


def _said(step: Step) -> list[str]:
    decays = [_decay(one.keep) for one in step.update.averages if 0 < one.keep < 1]
    return [decay for decay in dict.fromkeys(decays) if decays.count(decay) > FEW * len(decays)]


def _decay(keep: float) -> str:
    """What is left of 1 has two digits."""
    return f"{1 - float(f'{1 - keep:.2g}'):.8g}"


def figures(seen: Seen) -> Iterable[list[str]]:
    """The figures of each recorded pass, as COLUMNS has them."""
    for step in seen.steps:
        for one in step.passes:
            yield [str(step.update.number), *_of_pass(one), *_of_update(step)]


def _of_pass(one: Pass) -> list[str]:
    mixture, target = one.mixture, one.target
    if mixture is None:
        return [not_identified(one.why_not), *[""] * 6]
    noise = [f"{mixture.noise.mean:.3f}", f"{mixture.noise.std:.3f}"]
    asked = [""] * 3
    if target is not None and target.p is not None and target.q is not None and target.rest is not None:
        asked = [_range(values[target.seen]) for values in (target.p, target.q, target.rest)]
    return [_range(mixture.a), _range(mixture.b), *noise, *asked]


def _of_update(step: Step) -> list[str]:
    ratio = step.update.gradient.ratio
    return ["" if ratio is None else f"{ratio:.3g}", ", ".join(dict.fromkeys(_decay(one.keep) for one in step.update.averages))]


def _range(values: Tensor | None) -> str:
    if values is None or not len(values):
        return ""
    ends = dict.fromkeys(f"{float(end):.3g}" if abs(end) > ZERO else "0" for end in torch.aminmax(values))
    return " to ".join(ends)

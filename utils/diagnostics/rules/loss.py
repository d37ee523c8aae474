"""Findings about what is learned: the losses."""

import math
from statistics import median
from typing import Any

from utils.diagnostics.finding import Finding, Found
from utils.diagnostics.rules.optimizer import typical_update
from utils.runs.record import RunRecord

# Two sets of 32 images of one kind differed by up to a quarter in how hard they are; known by heart, by a factor of 2 to 4.
HELD_OUT_RATIO, MIN_IMAGES = 1.5, 16


def overfitting(record: RunRecord) -> Found:
    steps, validation = record.finite("validation/loss")
    best = min(validation, default=0.0)
    best_step = steps[validation.index(best)] if validation else 0
    train_steps, losses = record.finite("train/loss")
    later = [loss for step, loss in zip(train_steps, losses) if step > best_step]
    then = [loss for step, loss in zip(train_steps, losses) if step <= best_step]
    harder = _validation_ratio(record)
    if len(validation) >= 3 or harder is not None:
        yield "overfitting"
    # Held-out loss on fixed noise moves by a per cent or so; the last two must both stand well above the best. Where training
    # images became as hard, it is something else.
    rose = len(validation) >= 3 and min(validation[-2:]) > 1.15 * best
    if rose and (harder is None or harder > 1.05) and later and then and median(later[-5:]) <= median(then[-5:]):
        what = f"held-out loss {validation[-1]:.3g} after {best:.3g} at update {best_step}"
        what += f", training loss {median(later[-5:]):.3g}"
        yield Finding("overfitting", "critical" if validation[-1] > 1.5 * best else "warning", what, steps[-1])
    elif harder is not None and harder > HELD_OUT_RATIO:  # this sees it before the held-out loss rises
        what = f"held-out images are up to {harder:.2g} times as hard as training images under the same noise"
        yield Finding("overfitting", "warning", what, record.known("probe")[-1][0])


def _validation_ratio(record: RunRecord) -> float | None:
    """How much harder held-out images are, at the level where that is most, of those where the noise hides part of the image.

    It is the same network under the same noise, so that only the images differ.
    """
    for _, probe in record.known("probe")[-1:]:
        # Single images differ by far more than sets of them; by how much 32 do stands at HELD_OUT_RATIO.
        if min(probe.get(name) or 0 for name in ("images", "held_out_images")) < MIN_IMAGES:
            return None
        trained, others = probe.get("error") or {}, probe.get("held_out_error") or {}
        ratios = [others[t] / trained[t] for t in list(trained)[1:-1] if t in others and trained[t] > 0]
        return max(ratios, default=None)
    return None


def not_learning(record: RunRecord) -> Found:
    """A network that does no better than to answer the same for every image, at every noise level, after a fair chance."""
    known = [r for r in record.history if "train/loss_timestep_quartile_4" in r]
    steps, count = [0, *(r["step"] for r in known)], -(-len(known) // 4)
    reports = known[-count:]
    seen = (steps[-1] - steps[-count - 1]) * (record.resolved.get("global_batch_size") or 0)
    warmup = record.options.get("lr_warmup_steps") or 0
    # 400 are a hundred samples in each quartile.
    if not has_had_a_chance(record) or seen < 400 or reports[-1]["step"] < warmup + 100:
        return
    ratios, before = _shares_of_a_constant(record, reports), _shares_of_a_constant(record, known[-2 * count : -count])
    if ratios:
        yield "not-learning"
    quartile = min(ratios, key=lambda quartile: ratios[quartile], default=0)
    both = ratios.keys() & before.keys()
    # It began far from a constant, is below one now and still falls: it learns, and later than others.
    falls = both and sum(before[q] - ratios[q] for q in both) > 0.015 * len(both) and ratios[quartile] < 0.97
    if ratios and ratios[quartile] > 0.85 and not falls:
        what = f"at best, in quartile {quartile}, the loss is {ratios[quartile]:.2f} of that of a constant prediction"
        yield Finding("not-learning", "critical", what, reports[-1]["step"])


def _shares_of_a_constant(record: RunRecord, reports: list[dict[str, Any]]) -> dict[int, float]:
    """Quartile of the timesteps -> mean loss over that of the best constant prediction."""
    ratios = {}
    for quartile, constant in errors_of_a_constant(record).items():
        losses = [r.get(f"train/loss_timestep_quartile_{quartile}") for r in reports]
        losses = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        if losses and constant > 0:
            ratios[quartile] = sum(losses) / len(losses) / constant
    return ratios


def has_had_a_chance(record: RunRecord) -> bool:
    """Whether the weights have gone far enough for a healthy network to have learned something of the images."""
    moves = [(step, move or 0.0) for step, move in record.derived("layers", typical_update)]
    path = sum(move * (step - before) for (step, move), (before, _) in zip(moves, [(0, 0.0), *moves]))
    return path >= MIN_PATH.get(str(record.options.get("prediction_type")), 0.55)


def error_impossible(record: RunRecord) -> Found:
    """A network that knows what its input does not show: it is told the noise or the image another way."""
    checks = record.known("data")
    variety, (_, stds) = (checks[-1][1].get("variety") if checks else None), record.finite("data/std")
    variety = None if record.options.get("vae") else variety  # that of images is not that of latents
    for step, probe in record.known("probe")[-1:]:
        kind, errors, targets = probe.get("prediction_type"), probe.get("error") or {}, probe.get("target_std") or {}
        levels = [level for level in errors if targets.get(level)]
        if kind not in MIN_PATH or len(levels) < 2:
            return
        first, last = levels[0], levels[-1]
        yield "error-impossible"
        # There the noise is about one level of 8 bits. Healthy networks had 0.97 to 1.3 of a target of noise, however long they
        # were trained; plain areas let them see some of it.
        share = errors[first] / targets[first] ** 2
        if kind != "sample" and share < 0.02:
            what = f"at timestep {first}, where the noise is hardly more than rounding, {share:.1e} of it is not predicted"
            yield Finding("error-impossible", "warning", what, step)
            return
        # Where nothing is left of the image, no prediction of it is better than the mean image.
        signal = (record.alphas_cumprod or [1.0])[-1] * math.prod(checks[0][1].get("shape") or [1]) if checks else 1.0
        variance = (variety * median(stds)) ** 2 if variety and stds else 0.0
        if kind != "epsilon" and signal < 0.1 and errors[last] < 0.5 * variance:
            what = f"at timestep {last} the error is {errors[last]:.2g}, that of the mean image {variance:.2g}"
            yield Finding("error-impossible", "warning", what, step)


def edm2_denoiser(record: RunRecord) -> Found:
    """EDM2's loss by noise level, beside that of no network."""
    options, total = record.options, record.resolved.get("max_train_steps") or 0
    for step, probe in record.known("probe")[-1:]:
        losses = probe.get("weighted_loss") or {}
        if not losses or step < max(200, 0.5 * total) or not options.keys() >= {"sigma_data", "P_mean", "P_std"}:
            return
        trained = [level for level in losses if abs(math.log(float(level)) - options["P_mean"]) < 1.5 * options["P_std"]]
        worse = {level: losses[level] / none for level in trained if (none := _loss_of_zeros(record, float(level)))}
        if worse and has_had_a_chance(record):
            yield "worse-than-none"
            level = max(worse, key=lambda level: worse[level])
            # Healthy networks had 0.01 to 0.9; below 200 updates they may stand at 1.
            if worse[level] > 1.3:
                what = f"at sigma {level} the loss is {worse[level]:.2g} times that of a network that answers 0"
                yield Finding("worse-than-none", "warning", what, step)
            elif min(worse.values()) > 0.9:
                what = f"at best, at sigma {min(worse, key=lambda level: worse[level])}, the loss is {min(worse.values()):.2f}"
                yield Finding("not-learning", "critical", f"{what} of that of a network that answers 0", step)


def _loss_of_zeros(record: RunRecord, sigma: float) -> float | None:
    """lambda times the mean squared error of D(x) = c_skip x; None where the images' mean and spread are not known."""
    for _, data in record.known("data")[-1:]:
        means, stds = data.get("mean") or [], data.get("std") or []
        if not means or len(means) != len(stds):
            return None
        square = sum(mean**2 + std**2 for mean, std in zip(means, stds)) / len(means)
        wide = record.options["sigma_data"] ** 2
        skip = wide / (sigma**2 + wide)
        return (sigma**2 + wide) / (sigma**2 * wide) * ((1 - skip) ** 2 * square + (skip * sigma) ** 2)
    return None


# How far the weights have gone, in their own size, added up. The noise stands in the input, and healthy networks that went so
# far had 0.1 to 0.6 of a constant's loss; where the target holds the image they need longer, and had 0.8 after half of this.
MIN_PATH = {"epsilon": 0.11, "sample": 0.55, "v_prediction": 0.55}


def errors_of_a_constant(record: RunRecord) -> dict[int, float]:
    """Quartile of the timesteps -> least mean squared error of a prediction that is the same for all images and noises.

    It is the target's variance: 1 for eps, V for x_0 and abar + (1 - abar) V for v, where V is the variance of pixels around
    the mean image. Quartiles in which the loss is weighted are left out.
    """
    alphas_cumprod, (_, stds) = record.alphas_cumprod, record.finite("data/std")
    varieties = [data.get("variety") for _, data in record.known("data")[-1:]]
    kind, gamma = record.options.get("prediction_type"), record.options.get("snr_gamma")
    if alphas_cumprod is None or not stds or not varieties or not varieties[0] or kind is None:
        return {}
    if record.options.get("vae"):  # the variety of images is not that of latents
        return {}
    variance = (varieties[0] * median(stds)) ** 2

    def weighted(snr: float) -> bool:
        """Whether `ddpm.loss_weights` gives far other weights than 1."""
        return (kind == "sample" and snr > 1.5) if gamma is None else (kind != "epsilon" or snr > 1.5 * gamma)

    errors: dict[int, list[float]] = {}
    for place, alpha in enumerate(alphas_cumprod):
        quartile = min(4 * place // len(alphas_cumprod) + 1, 4)
        error = {"epsilon": 1.0, "sample": variance, "v_prediction": alpha + (1.0 - alpha) * variance}[kind]
        errors.setdefault(quartile, []).append(error)
        errors[quartile] += [math.nan] if weighted(alpha / max(1.0 - alpha, 1e-12)) else []
    means = {quartile: sum(values) / len(values) for quartile, values in errors.items()}
    return {quartile: mean for quartile, mean in means.items() if mean == mean}

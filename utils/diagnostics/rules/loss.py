"""Findings about what is learned: the losses."""

import math
from statistics import median

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
    ratios = {}
    for quartile, constant in errors_of_a_constant(record).items():
        losses = [r.get(f"train/loss_timestep_quartile_{quartile}") for r in reports]
        losses = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        if losses and constant > 0:
            ratios[quartile] = sum(losses) / len(losses) / constant
    if ratios:
        yield "not-learning"
    if ratios and min(ratios.values()) > 0.85:
        quartile = min(ratios, key=lambda quartile: ratios[quartile])
        what = f"at best, in quartile {quartile}, the loss is {ratios[quartile]:.2f} of that of a constant prediction"
        yield Finding("not-learning", "critical", what, reports[-1]["step"])


def has_had_a_chance(record: RunRecord) -> bool:
    """Whether the weights have gone far enough for a healthy network to have learned something of the images."""
    moves = [(step, move or 0.0) for step, move in record.derived("layers", typical_update)]
    path = sum(move * (step - before) for (step, move), (before, _) in zip(moves, [(0, 0.0), *moves]))
    return path >= MIN_PATH.get(str(record.options.get("prediction_type")), 0.55)


# How far the weights have gone, in their own size, added up. The noise stands in the input, and healthy networks that went so
# far had 0.1 to 0.6 of a constant's loss; where the target holds the image they need longer, and had 0.8 after half of this.
MIN_PATH = {"epsilon": 0.11, "sample": 0.55, "v_prediction": 0.55}


def errors_of_a_constant(record: RunRecord) -> dict[int, float]:
    """Quartile of the timesteps -> least mean squared error of a prediction that is the same for all images and noises.

    It is the target's variance: 1 for eps, V for x_0 and abar + (1 - abar) V for v, where V is the variance of pixels around
    the mean image. Quartiles in which the loss is weighted are left out.
    """
    alphas_cumprod, (_, stds) = record.alphas_cumprod, record.finite("data/std")
    varieties = [data.get("variety") for _, data in record.known("data")[:1]]
    kind, gamma = record.options.get("prediction_type"), record.options.get("snr_gamma")
    if alphas_cumprod is None or not stds or not varieties or not varieties[0] or kind is None:
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

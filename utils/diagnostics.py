"""From recorded figures to findings: pure functions of a `RunRecord`, one rule per symptom.

Each rule looks for the trace that one cause leaves where no healthy run has it, and says in a comment why its threshold stands
where it does. What is told by the data, the options or the schedule alone comes first, because it explains the rest; among
findings of one severity that order is kept.
"""

import math
from collections.abc import Callable, Iterator
from statistics import median

from utils.findings import SEVERITIES, Finding
from utils.run_record import RunRecord

Found = Iterator[Finding]


def diagnose(record: RunRecord) -> list[Finding]:
    """What is wrong with the run, the most severe first; empty for a healthy one. Works on a run of any length."""
    findings = [finding for rule in RULES for finding in rule(record)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))  # stable: the rules' order stays


# ---- the data


def data_range(record: RunRecord) -> Found:
    steps, lows = _finite(*record.series("data/min"))
    _, highs = _finite(*record.series("data/max"))
    if not lows or not highs:
        return
    low, high = min(lows), max(highs)
    seen = f"seen from {low:.3g} to {high:.3g}"
    # Scaling uint8 gives [-1, 1] exactly, and jitter clamps: anything beyond by more than rounding is another scale.
    if low < -1.02 or high > 1.02:
        yield Finding("data-range", "critical", seen, steps[-1])
        return
    checks = record.records("data")
    files = _mean_and_std(checks[0][1]) if checks else None
    _, means = _finite(*record.series("data/mean"))
    _, stds = _finite(*record.series("data/std"))
    if files is None or not means or not stds:
        return
    # What the network sees has the mean and spread of what the files hold. Flips change neither, jitter of 0.5 the spread by
    # a quarter, balanced sampling and small batches less; the usual mistakes, [0, 1] among them, halve the spread or more.
    mean, std = median(means), median(stds)
    if not 0.6 < std / max(files[1], 1e-6) < 1.7:
        what = f"{seen}, mean {mean:.2f}, spread {std:.2g}; in the files mean {files[0]:.2f}, spread {files[1]:.2g}"
        yield Finding("data-range", "critical", what, steps[-1])


def _mean_and_std(data: dict) -> tuple[float, float] | None:
    """Over all pixels and channels of the files, from the figures per channel."""
    means, stds = data.get("mean"), data.get("std")
    if not means or not stds:
        return None
    mean = sum(means) / len(means)
    return mean, math.sqrt(sum(std**2 + (m - mean) ** 2 for m, std in zip(means, stds)) / len(means))


def data_alike(record: RunRecord) -> Found:
    for step, data in record.records("data")[:1]:
        copies, near = data.get("copies") or {}, data.get("near_copies") or {}
        share, near_share = copies.get("share", 0.0), near.get("share", 0.0)
        # Collections from the web have a few per cent of copies (CIFAR-10 has 3.3 % near-duplicates of test images).
        if share > 0.1 or near_share > 0.3:
            worst = max(share, near_share)
            what = f"{share:.0%} are exact copies of another, {near_share:.0%} nearly so"
            yield Finding("data-alike", "critical" if worst > 0.5 else "warning", what, step)


def data_blank(record: RunRecord) -> Found:
    for step, data in record.records("data")[:1]:
        share, rows = data.get("constant_share") or 0.0, data.get("constant_rows") or []
        # A network that learns its data makes blanks as often as it is shown them: below one in a hundred few will notice.
        severity = "critical" if share > 0.5 else "warning" if share > 0.01 else "info"
        if share > 0:
            yield Finding("data-blank", severity, f"{share:.2%} of the images{_listed(', rows', rows)}", step)


def data_damaged(record: RunRecord) -> Found:
    for step, data in record.records("data")[:1]:
        damaged = data.get("damaged") or {}
        count, share = damaged.get("images", 0), damaged.get("share", 0.0)
        # Who said that they be replaced knows of them; not that it is one in twenty, which is no accident of a few files.
        expected = record.options.get("on_bad_image") == "replace" and share < 0.05
        names = [f"{file['file']}: {file['reason']}" for file in damaged.get("files") or ()]
        if count:
            what = f"{count} of them, {share:.2%}{_listed(', such as', names)}"
            yield Finding("data-damaged", "info" if expected else "warning", what, step)


def data_enlarged(record: RunRecord) -> Found:
    for step, data in record.records("data")[:1]:
        sizes, side = data.get("sizes") or {}, (data.get("shape") or [0])[-1]
        share, least = sizes.get("enlarged_share") or 0.0, sizes.get("shorter_side_min")
        if share > 0:  # for information alone: thumbnails may be all that there is
            what = f"{share:.0%} of the files have a side below {side} pixels, the least {least}"
            yield Finding("data-enlarged", "info", what, step)


def _listed(before: str, names: list) -> str:
    """The first three of them, for the end of a sentence."""
    return f"{before} {', '.join(map(str, names[:3]))}" if names else ""


def class_imbalance(record: RunRecord) -> Found:
    if record.options.get("balanced_sampling"):
        return
    for step, data in record.records("data")[:1]:
        classes = data.get("classes") or {}
        share, number = classes.get("largest_share", 0.0), classes.get("number", 0)
        # Of three or more classes, one has more than all others together thrice over.
        if (number >= 3 and share > 0.75) or (number == 2 and share > 0.95):
            yield Finding("class-imbalance", "warning", f"{share:.0%} of the images are of one of {number} classes", step)


# ---- the process that is trained, and the one that is sampled


def schedule(record: RunRecord) -> Found:
    alphas_cumprod = _alphas_cumprod(record)
    if alphas_cumprod is None:
        return
    signal = math.sqrt(alphas_cumprod[-1])
    # Stable Diffusion's leftover of 0.068 already shows in its samples (Lin et al. 2023, table 1); 0.1 is beyond any in use.
    if signal > 0.1:
        yield Finding("schedule-leaves-signal", "critical", f"{signal:.1%} of the image is left at the last timestep", None)
    # Below an SNR of 1e-4 nothing can be learned but the mean; the linear schedule spends 5 % there, the cosine one 1 %.
    lost = sum(a / max(1.0 - a, 1e-12) < 1e-4 for a in alphas_cumprod) / len(alphas_cumprod)
    if lost > 0.3:
        yield Finding("schedule-destroys-early", "critical", f"{lost:.0%} of the timesteps have an SNR below 1e-4", None)


def timesteps_uneven(record: RunRecord) -> Found:
    tags = [f"train/timestep_share_quartile_{i}" for i in (1, 2, 3, 4)]
    reports = [r for r in record.history if tags[0] in r]
    seen = sum(r.get("train/timesteps_drawn", 0) for r in reports)
    if seen < 400:  # of a uniform 400, fewer than 40 fall into a quarter with a probability below 1e-11
        return
    shares = [sum(r[tag] * r.get("train/timesteps_drawn", 0) for r in reports) / seen for tag in tags]
    if min(shares) < 0.1:
        what = "shares of the four quarters: " + ", ".join(f"{share:.2f}" for share in shares)
        yield Finding("timesteps-uneven", "critical", what, reports[-1]["step"])


def sampler_mismatch(record: RunRecord) -> Found:
    compared = ("prediction_type", "beta_schedule", "num_train_timesteps", "rescale_betas_zero_snr")
    for step, samples in record.records("samples")[-1:]:
        sampler, trained = samples.get("sampler", {}), samples.get("trained", {})
        different = [name for name in compared if name in sampler and sampler[name] != trained.get(name, sampler[name])]
        if different:
            what = ", ".join(f"{name} {sampler[name]} instead of {trained[name]}" for name in different)
            yield Finding("sampler-mismatch", "critical", what, step)
            return
    for step, probe in record.records("probe")[-1:]:
        errors, claimed = probe.get("errors_as", {}), probe.get("prediction_type")
        others = [(name, by_level) for name, by_level in errors.items() if name != claimed]
        for name, by_level in others if claimed in errors else ():
            levels = [(by_level[t], errors[claimed][t]) for t in by_level if by_level[t] > 0 and t in errors[claimed]]
            if not levels:
                continue
            learned = median(error for error, _ in levels)
            # What a network was trained to predict it predicts best at some noise level at least; this one is better read as
            # something else at all of them (but for rounding), half as wrong at the typical one, and better than zeros (1).
            worse = median(as_claimed / error for error, as_claimed in levels)
            if learned < 0.8 and worse > 1.5 and all(as_claimed > 0.98 * error for error, as_claimed in levels):
                what = f"as {name} the output has a relative error of {learned:.2g}, as {claimed} {worse:.2g} times that"
                yield Finding("sampler-mismatch", "critical", what, step)
                return


# ---- the network


def timestep_ignored(record: RunRecord) -> Found:
    for step, probe in record.records("probe")[-1:]:
        response = probe.get("timestep_response")
        # Rounding gives 1e-7; networks that see it gave 1e-2 to 0.8 after as few as 8 updates.
        if response is not None and response < 1e-4:
            yield Finding("timestep-ignored", "critical", f"another timestep changes the output by {response:.1e} of it", step)


def no_gradient(record: RunRecord) -> Found:
    records = record.records("layers")
    if len(records) < 3:  # at update 1 a zero output layer hides all other gradients
        return
    newest = records[-3:]
    weights = [name for name, layer in newest[-1][1].items() if "gradient" in layer]
    dead = [n for n in weights if all(layers.get(n, {}).get("gradient", 1.0) == 0.0 for _, layers in newest)]
    if dead:
        names = ", ".join(dead[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
        yield Finding("no-gradient", "critical", f"exactly 0 in the last {len(newest)} reports: {names}", newest[-1][0])


# ---- the arithmetic


def non_finite(record: RunRecord) -> Found:
    steps, skipped = record.series("train/skipped_updates")
    if not steps or not skipped[-1] > 0:
        return
    _, rows = record.series("train/bad_updates_in_a_row")
    often = skipped[-1] > max(2.0, 0.02 * steps[-1]) or max(rows, default=0) >= 3
    first = next(step for step, value in zip(steps, skipped) if value > 0)
    what = f"{skipped[-1]:.0f} of {steps[-1]} updates, the first by update {first}"
    yield Finding("non-finite", "critical" if often else "warning", what, first)


def fp16_scale(record: RunRecord) -> Found:
    steps, scales = record.series("train/loss_scale")
    # It starts at 65536 and halves with each overflow; below 1 it would shrink what fp16 can hold instead of lifting it.
    if steps and scales[-1] < 1.0:
        yield Finding("fp16-scale-collapse", "critical", f"the scale is {scales[-1]:.3g}", steps[-1])


# ---- the optimizer


def gradients_exploding(record: RunRecord) -> Found:
    steps, norms = _finite(*record.series("train/grad_norm"))
    if len(norms) < 6:
        return
    early, late = median(norms[: max(2, len(norms) // 4)]), median(norms[-max(2, len(norms) // 4) :])
    # The norm of a healthy run falls, or rises a few times over as the loss gets small.
    if late > 50 * early and late > 10.0:
        yield Finding("gradients-exploding", "critical", f"the norm rose from {early:.3g} to {late:.3g}", steps[-1])


def clip_too_tight(record: RunRecord) -> Found:
    steps, norms = _finite(*record.series("train/grad_norm"))
    clips = dict(zip(*record.series("train/clip_value")))
    ratios = sorted(norm / clips[step] for step, norm in zip(steps, norms) if clips.get(step))
    # The usual limit of 1 meets norms from 0.01 to 10 or so, to 100 where predicted images are weighted by the SNR. Three
    # quarters of the reports must be beyond 300: where the norms grow to that, it is they that are wrong and not the limit.
    if len(ratios) >= 2 and ratios[len(ratios) // 4] > 300:
        yield Finding("clip-too-tight", "critical", f"the norm is {median(ratios):.3g} times the limit", steps[-1])


def learning_rate(record: RunRecord) -> Found:
    """How far an update moves the weights, in units of the weights: about 1e-3 in healthy runs (Karpathy's rule of thumb)."""
    options = record.options
    warmup = options.get("lr_warmup_steps") or 0
    moves = [(step, _typical_update(layers)) for step, layers in record.records("layers")]
    moves = [(step, move) for step, move in moves if move is not None]
    if not moves:
        return
    _, losses = _finite(*record.series("train/loss"))
    top_step, top = max(moves, key=lambda pair: pair[1])
    diverged = _diverged(losses)
    if top > HIGHEST_UPDATE or (diverged and top > HIGHEST_UPDATE / 3):
        what = f"an update changes a typical layer by {top:.1%} (update {top_step})"
        if diverged:
            what += f"; the loss rose from {min(losses):.3g} to {losses[-1]:.3g}"
        if warmup < 10 and top_step <= 0.2 * (record.resolved.get("max_train_steps") or moves[-1][0]):
            yield Finding("no-warmup", "critical", f"--lr_warmup_steps {warmup}; {what}", top_step)
        yield Finding("lr-too-high", "critical", what, top_step)
    after_warmup = [move for step, move in moves if step > warmup]
    if len(after_warmup) >= 3 and max(after_warmup) < LOWEST_UPDATE:
        what = f"an update changes a typical layer by at most {max(after_warmup):.1e} of it"
        yield Finding("lr-too-low", "warning", what, moves[-1][0])


# An update of 1e-3 is usual; at 5 % the weights turn over in twenty updates. Below 5e-5 it takes 20,000 in one direction.
HIGHEST_UPDATE, LOWEST_UPDATE = 0.05, 5e-5


def _typical_update(layers: dict) -> float | None:
    """Median over the layers of change over size of the weight; None where nothing moved (the first step of a warm-up)."""
    updates = [layer["update"] for name, layer in layers.items() if "update" in layer and name.endswith("weight")]
    updates = [u for u in updates if math.isfinite(u) and u > 0]
    return median(updates) if updates else None


# ---- learning


def overfitting(record: RunRecord) -> Found:
    steps, held_out = _finite(*record.series("validation/loss"))
    best = min(held_out, default=0.0)
    best_step = steps[held_out.index(best)] if held_out else 0
    train_steps, losses = _finite(*record.series("train/loss"))
    later = [loss for step, loss in zip(train_steps, losses) if step > best_step]
    then = [loss for step, loss in zip(train_steps, losses) if step <= best_step]
    # Held-out loss on fixed noise moves by a per cent or so; the last two must both stand well above the best.
    if len(held_out) >= 3 and later and then and min(held_out[-2:]) > 1.15 * best and median(later[-5:]) <= median(then[-5:]):
        what = f"held-out loss {held_out[-1]:.3g} after {best:.3g} at update {best_step}"
        what += f", training loss {median(later[-5:]):.3g}"
        yield Finding("overfitting", "critical" if held_out[-1] > 1.5 * best else "warning", what, steps[-1])
        return
    for step, probe in record.records("probe")[-1:]:  # this sees it before the held-out loss rises
        trained, others = probe.get("error") or {}, probe.get("held_out_error") or {}
        # At the levels where the noise hides part of the image; the same network and noise, so that only the images differ.
        pairs = [(others[t], trained[t]) for t in list(trained)[1:-1] if t in others and trained[t] > 0]
        ratio = max((other / own for other, own in pairs), default=0.0)
        if ratio > HELD_OUT_RATIO:
            what = f"held-out images are up to {ratio:.2g} times as hard as training images under the same noise"
            yield Finding("overfitting", "warning", what, step)


# Two sets of 32 images of one kind differed by up to a quarter in how hard they are; known by heart, by a factor of 2 to 4.
HELD_OUT_RATIO = 1.5


def ema_frozen(record: RunRecord) -> Found:
    steps, norms = record.series("train/ema_norm")
    still = [step for step, norm in zip(steps, norms) if norm == norms[-1]]
    if len(still) < 4 or steps[-len(still) :] != still:
        return
    moves = [(s, _typical_update(layers) or 0.0) for s, layers in record.records("layers") if s in still[1:]]
    moved = sum(move * (step - before) for before, (step, move) in zip(still, moves))
    # Averages of weights that went a way of a hundredth of their size cannot keep their norm to the last bit. A learning rate
    # near zero, as at the end of a run, goes no such way.
    if moved > 0.01:
        what = (
            f"its norm has stood at {norms[-1]:.6g} since update {still[0]}, while the weights went {moved:.2g} of their size"
        )
        yield Finding("ema-frozen", "critical", what, steps[-1])


def ema_too_long(record: RunRecord) -> Found:
    steps, decays = record.series("train/ema_decay")
    total = record.resolved.get("max_train_steps") or 0
    if len(steps) < 4 or not total:
        return
    # The share of the average at the end of the run that comes from its first tenth: the product of the decays of all later
    # updates, of which the reports are samples and the last stands for those to come.
    start = total / 10
    spans = [max(b - max(a, start), 0.0) for a, b in zip([0, *steps], steps)]
    logs = [math.log(max(decay, 1e-300)) for decay in decays]
    share = math.exp(sum(span * log for span, log in zip(spans, logs)) + max(total - max(steps[-1], start), 0) * logs[-1])
    # The usual warm-up (power 3/4) leaves 7 % even in a run of 8 updates, and less in longer ones.
    if share > 0.15:
        what = f"after {total} updates {share:.0%} of it would be weights of the first tenth of the run"
        severity = "critical" if share > 0.3 else "warning"
        yield Finding("ema-too-long", severity, f"{what} (decay {decays[-1]:.6g})", steps[-1])


# ---- speed


def data_starved(record: RunRecord) -> Found:
    steps, waits = _finite(*record.series("perf/data_wait"))
    # The first reports include the start of the workers.
    if len(waits) >= 3 and median(waits[1:]) > 0.3:
        yield Finding("data-starved", "warning", f"{median(waits[1:]):.0%} of the time goes into waiting for data", steps[-1])


# Causes before what can follow from them: a learning rate that tears the network apart leaves it blind to the timestep, without
# gradients, or with NaN.
RULES: tuple[Callable[[RunRecord], Found], ...] = (
    *(data_range, schedule, timesteps_uneven, sampler_mismatch, learning_rate, timestep_ignored, no_gradient),
    *(fp16_scale, non_finite, clip_too_tight, ema_frozen, ema_too_long, data_damaged, data_blank, data_alike),
    *(overfitting, class_imbalance, gradients_exploding, data_starved, data_enlarged),
)


def _finite(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    kept = [(step, value) for step, value in zip(steps, values) if math.isfinite(value)]
    return [step for step, _ in kept], [value for _, value in kept]


def _diverged(losses: list[float]) -> bool:
    """Whether the newest quarter of the losses stands far above an earlier one. Where predicted images are weighted by the SNR,
    single reports of healthy runs differ by a factor of thirty, medians of a quarter by less than three."""
    if len(losses) < 8:
        return False
    size = len(losses) // 4
    windows = [median(losses[i : i + size]) for i in range(len(losses) - size + 1)]
    return windows[-1] > 3.0 * min(windows) and windows[-1] > 0.1


def _alphas_cumprod(record: RunRecord) -> list[float] | None:
    """Of the schedule that was trained, from the recorded figures; None where there are none."""
    schedules = record.records("schedule")
    values = (schedules[0][1].get("alphas_cumprod") if schedules else None) or []
    return values if values and all(0.0 <= value <= 1.0 for value in values) else None

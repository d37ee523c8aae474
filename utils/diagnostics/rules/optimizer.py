"""Findings about gradients, updates, the learning rate and the averaged weights."""

import math
from statistics import median

from utils.diagnostics.finding import Finding, Found
from utils.optim.ema import ema_decay
from utils.runs.record import RunRecord


def non_finite(record: RunRecord) -> Found:
    steps, skipped = record.finite("train/skipped_updates")
    if not steps:
        return
    yield "non-finite"
    if not skipped[-1] > 0:
        return
    _, rows = record.finite("train/bad_updates_in_a_row")
    often = skipped[-1] > max(2.0, 0.02 * steps[-1]) or max(rows, default=0) >= 3
    reported = next(step for step, value in zip(steps, skipped) if value > 0)
    exact = dict(zip(*record.finite("train/first_skipped_update"))).get(reported)  # runs of earlier versions have none
    first = reported if exact is None else int(exact)
    what = f"{skipped[-1]:.0f} of {steps[-1]} updates, the first {'by update' if exact is None else 'was update'} {first}"
    precision = record.resolved.get("mixed_precision")
    yield Finding("non-finite", "critical" if often else "warning", what, first, mixed_precision=precision)


def fp16_scale(record: RunRecord) -> Found:
    steps, scales = record.finite("train/loss_scale")
    if steps:
        yield "fp16-scale-collapse"
    # It starts at 65536 and halves with each overflow; below 1 it would shrink what fp16 can hold instead of lifting it.
    if steps and scales[-1] < 1.0:
        yield Finding("fp16-scale-collapse", "critical", f"the scale is {scales[-1]:.3g}", steps[-1])


def gradients_exploding(record: RunRecord) -> Found:
    steps, norms = record.finite("train/grad_norm")
    if len(norms) < 6:
        return
    yield "gradients-exploding"
    early, late = median(norms[: max(2, len(norms) // 4)]), median(norms[-max(2, len(norms) // 4) :])
    # The norm of a healthy run falls, or rises a few times over as the loss gets small.
    if late > 50 * early and late > 10.0:
        yield Finding("gradients-exploding", "critical", f"the norm rose from {early:.3g} to {late:.3g}", steps[-1])


def clip_too_tight(record: RunRecord) -> Found:
    steps, norms = record.finite("train/grad_norm")
    clips = dict(zip(*record.series("train/clip_value")))
    ratios = sorted(norm / clips[step] for step, norm in zip(steps, norms) if clips.get(step))
    # The usual limit of 1 meets norms from 0.01 to 10 or so, to 100 where predicted images are weighted by the SNR. Three
    # quarters of the reports must be beyond 300: where the norms grow to that, it is they that are wrong and not the limit.
    if len(ratios) >= 2:
        yield "clip-too-tight"
    if len(ratios) >= 2 and ratios[len(ratios) // 4] > 300:
        yield Finding("clip-too-tight", "critical", f"the norm is {median(ratios):.3g} times the limit", steps[-1])


def learning_rate(record: RunRecord) -> Found:
    """How far an update moves the weights, in units of the weights: about 1e-3 in healthy runs (Karpathy's rule of thumb)."""
    options = record.options
    warmup = options.get("lr_warmup_steps") or 0
    moves = [(step, move) for step, move in record.derived("layers", typical_update) if move is not None]
    thrown = _rate_beside_weights(record)
    if not moves:
        if thrown is not None:
            yield "lr-too-high"
            yield Finding("lr-too-high", "critical", thrown[1], thrown[0])
        return
    yield from ("lr-too-high", "no-warmup")
    steps, losses = record.finite("train/loss")
    if len(losses) >= MIN_LOSSES:
        yield "loss-unstable"
    top_step, top = max(moves, key=lambda pair: pair[1])
    torn = _diverged(record)
    if top > HIGHEST_UPDATE or (torn and top > HIGHEST_UPDATE / 3):
        what = f"an update changes a typical layer by {top:.1%} (update {top_step})"
        if torn:
            what += f"; the loss rose from {min(losses):.3g} to {losses[-1]:.3g}"
        if warmup < 10 and top_step <= 0.2 * (record.resolved.get("max_train_steps") or moves[-1][0]):
            yield Finding("no-warmup", "critical", f"--lr_warmup_steps {warmup}; {what}", top_step)
        yield Finding("lr-too-high", "critical", what, top_step)
    elif thrown is not None:
        yield Finding("lr-too-high", "critical", thrown[1], thrown[0])
    elif torn:
        yield Finding("loss-unstable", "warning", f"it rose from {min(losses):.3g} to {losses[-1]:.3g}", steps[-1])
    elif spikes := _spikes(record):
        what = f"{len(spikes)} reports stand three times above their neighbors, first at update {spikes[0]}"
        yield Finding("loss-unstable", "warning", what, spikes[-1])
    after_warmup = [move for step, move in moves if step > warmup]
    if len(after_warmup) >= 3:
        yield "lr-too-low"
    if len(after_warmup) >= 3 and max(after_warmup) < LOWEST_UPDATE:
        what = f"an update changes a typical layer by at most {max(after_warmup):.1e} of it"
        yield Finding("lr-too-low", "warning", what, moves[-1][0])


def _rate_beside_weights(record: RunRecord) -> tuple[int, str] | None:
    """(when it was seen, what) of a learning rate that is far too high, whatever became of the updates: all skipped, as nothing
    is finite any more, or tiny, as Adam divides by the gradients of the explosion.

    Adam and RMSprop move each weight by about the learning rate: in healthy runs a tenth of a typical layer's weights at most.
    Those are 1 in EDM2 and below 0.3 elsewhere to begin with: what has grown to 10 was thrown there.
    """
    steps, rates = record.finite("train/lr")
    peak, sizes = max(rates, default=0.0), [size for _, size in record.derived("layers", typical_weight) if size is not None]
    size, optimizer = max(sizes, default=1.0), record.options.get("optimizer")
    if optimizer in ("adam", "adamw", "adamw8bit", "rmsprop") and peak > 0.5 * min(size, 1.0):
        what = f"{optimizer} moves each weight by about the learning rate, {peak:.3g}, in each update"
        return steps[-1], f"{what}; the weights of a typical layer are {size:.2g}"
    if peak > 0 and size > 10.0:
        return steps[-1], f"the weights of a typical layer have grown to {size:.3g}, with learning rates up to {peak:.3g}"
    return None


# An update of 1e-3 is usual; at 5 % the weights turn over in twenty updates. Below 5e-5 it takes 20,000 in one direction.
HIGHEST_UPDATE, LOWEST_UPDATE = 0.05, 5e-5


def typical_update(layers: dict) -> float | None:
    """Median over the layers of change over size of the weight; None where nothing moved (the first step of a warm-up)."""
    updates = [update for _, update in _of_matrices(layers, "update") if update > 0]
    return median(updates) if updates else None


def typical_weight(layers: dict) -> float | None:
    """Median over the layers of the size of the weight, its root mean square."""
    sizes = [size for _, size in _of_matrices(layers, "weight") if size > 0]
    return median(sizes) if sizes else None


MIN_LOSSES = 8  # of which a quarter is two
QUARTILES = [f"train/loss_timestep_quartile_{i}" for i in (1, 2, 3, 4)]


def _diverged(record: RunRecord) -> bool:
    """Whether the newest quarter of the losses stands far above an earlier one, at three of the four noise levels at least.

    A median over a quarter of the reports leaves out single ones. It is not enough where predicted images are weighted by the
    SNR: there the few samples with the least noise make the loss of healthy runs differ by a factor of six, in one quartile.
    """

    def rose(losses: list[float]) -> bool:
        size = len(losses) // 4
        starts = range(len(losses) - size, -1, -max(1, size // 8))  # not all of them, in a run of many reports
        windows = [median(losses[start : start + size]) for start in starts]
        return windows[0] > 3.0 * min(windows)

    series = [record.finite(tag)[1] for tag in QUARTILES]
    return sum(len(losses) >= MIN_LOSSES and rose(losses) for losses in series) >= 3


def _spikes(record: RunRecord) -> list[int]:
    """Updates of the reports after warm-up in which the loss at most noise levels stands far above the neighboring reports.

    The median over the quartiles leaves out what one hard sample does to one of them; their ratios to the neighbors leave out
    the weights of the loss, and the slow fall. Fewer than three, or a twentieth of the reports, are accidents.
    """
    warmup = record.options.get("lr_warmup_steps") or 0
    above: dict[int, list[float]] = {}
    for tag in QUARTILES:
        steps, losses = record.finite(tag)
        for place, (step, loss) in enumerate(zip(steps, losses)):
            usual = median(losses[max(0, place - 4) : place + 5])
            if step > warmup and usual > 0:
                above.setdefault(step, []).append(loss / usual)
    spikes = [step for step, ratios in above.items() if len(ratios) >= 3 and median(ratios) > 3.0]
    return spikes if len(spikes) >= max(3, 0.05 * len(above)) else []


def weights_shrinking(record: RunRecord) -> Found:
    records = record.records("layers")
    if len(records) < 3:
        return
    yield "weights-shrinking"
    first, newest = (dict(_of_matrices(layers, "weight")) for _, layers in (records[0], records[-1]))
    ratios = [newest[name] / size for name, size in first.items() if name in newest and size > 0]
    ratio = median(ratios) if ratios else 1.0
    # Weights grow or keep their size in healthy runs; a decay in balance with Adam's steps leaves sqrt(lr / (2 decay)) per
    # weight, which at 1e-4 and 0.01 is 0.07, the size that layers start from (Kosson et al. 2023).
    if ratio < 0.25:
        what = f"a typical layer has {ratio:.2g} of the size that it had at update {records[0][0]}"
        decay = record.options.get("adam_weight_decay")
        what += f" (--adam_weight_decay {decay:g})" if decay else ""
        yield Finding("weights-shrinking", "critical", what, records[-1][0])


def _of_matrices(layers: dict, figure: str) -> list[tuple[str, float]]:
    """Name and `figure` of the layers' weights, under spectral norm too, but not of norms and biases: these are spared from
    decay, and start at one and zero, which an update moves far less and far more."""
    weights = {name: layer for name, layer in layers.items() if name.endswith(("weight", ".weight.original"))}
    named = [(name, layer.get(figure)) for name, layer in weights.items() if "norm" not in name]
    return [(name, value) for name, value in named if value is not None and math.isfinite(value)]


def ema_too_long(record: RunRecord) -> Found:
    steps, decays = record.finite("train/ema_decay")
    total = record.resolved.get("max_train_steps") or 0
    measured = len(steps) >= 4
    if not measured:
        steps, decays = _planned_decays(record.options, total)
    if not steps or not total:
        return
    yield "ema-too-long"
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
        yield Finding("ema-too-long", severity, f"{what} (decay {decays[-1]:.6g})", steps[-1] if measured else None)


def _planned_decays(options: dict, total: int) -> tuple[list[int], list[float]]:
    """(updates, decays at them) by the options, before reports have them; empty for other averages than the exponential one."""
    names = ("ema_max_decay", "ema_inv_gamma", "ema_power")
    if not (options.get("use_ema") and options.get("ema_type") == "exponential" and options.keys() >= set(names)):
        return [], []
    steps = [max(1, total * i // 200) for i in range(1, 201)]
    return steps, [ema_decay(step, *(options[name] for name in names)) for step in steps]

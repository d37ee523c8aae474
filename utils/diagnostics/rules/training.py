"""Findings about updates: the recorded training step, gradients, learning rate, losses, slow ranks, devices that err."""

import math
from collections import Counter
from statistics import median

from utils.diagnostics.finding import Finding, Found
from utils.runs.ledger import HASHES
from utils.runs.record import RunRecord

TEXTS = ("declared", "observed", "stage", "title", "cause")


def recorded_updates(record: RunRecord) -> int:
    """Returns how many updates were looked at."""
    return len({step for step, audit in record.records("audit") if audit.get("measured")})


def measured(record: RunRecord) -> list[str]:
    """Returns the stages of which something was measured in any of them."""
    return list(dict.fromkeys(stage for _, audit in record.records("audit") for stage in audit.get("measured", ())))


def step_deviates(record: RunRecord) -> Found:
    newest: dict[str, dict] = {}
    failed: dict[str, int] = {}  # errors, and when each came last
    for step, audit in record.records("audit"):
        if "failed" in audit:
            failed[audit["failed"]] = step
        newest |= {one["code"]: one for one in audit.get("found", ())}
        for code in audit.get("withdrawn", ()):  # of an update that was made again
            newest.pop(code, None)
    for error, step in failed.items():
        yield Finding("rule-failed", "info", f"the look at the training step: {error}", step)
    for code, one in newest.items():
        texts = {name: one[name] for name in TEXTS}
        evidence = f"{one['observed']}; declared: {one['declared']}"
        yield Finding(code, one["severity"], evidence, one["step"], fixes=list(one["fixes"]), **texts)


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
    exact = dict(zip(*record.finite("train/first_skipped_update"))).get(reported)  # none if a resume came between
    first = reported if exact is None else int(exact)
    what = f"{skipped[-1]:.0f} of {steps[-1]} updates, the first {'by update' if exact is None else 'was update'} {first}"
    yield Finding("non-finite", "critical" if often else "warning", what, first)


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


def learning_rate(record: RunRecord) -> Found:
    """How far an update moves the weights, in units of the weights: about 1e-3 in healthy runs (Karpathy's rule of thumb)."""
    warmup = record.options.get("lr_warmup_steps") or 0
    moves = [(step, move) for step, move in record.derived("layers", typical_update) if move is not None]
    if not moves:
        return
    yield "lr-too-high"
    steps, losses = record.finite("train/loss")
    if len(losses) >= MIN_LOSSES:
        yield "loss-unstable"
    top_step, top = max(moves, key=lambda pair: pair[1])
    torn = _diverged(record)
    rose = f"the loss rose from {min(losses):.3g} to {losses[-1]:.3g}" if torn else ""
    if top > HIGHEST_UPDATE or (torn and top > HIGHEST_UPDATE / 3):
        what = f"an update changes a typical layer by {top:.1%} (update {top_step}){'; ' * torn}{rose}"
        yield Finding("lr-too-high", "critical", what, top_step)
    elif torn:
        yield Finding("loss-unstable", "warning", rose, steps[-1])
    after_warmup = [move for step, move in moves if step > warmup]
    if len(after_warmup) >= 3:
        yield "lr-too-low"
    if len(after_warmup) >= 3 and max(after_warmup) < LOWEST_UPDATE:
        what = f"an update changes a typical layer by at most {max(after_warmup):.1e} of it"
        yield Finding("lr-too-low", "warning", what, moves[-1][0])


# An update of 1e-3 is usual; at 5 % the weights turn over in twenty updates. Below 5e-5 it takes 20,000 in one direction.
HIGHEST_UPDATE, LOWEST_UPDATE = 0.05, 5e-5


def typical_update(layers: dict) -> float | None:
    """Median over the layers of change over size of the weight; None where nothing moved (the first step of a warm-up)."""
    updates = [update for _, update in _of_matrices(layers, "update") if update > 0]
    return median(updates) if updates else None


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


REPORTS = 8  # the newest ones, which are judged together
STAGES = {"own gradient": "the gradient", "gradient": "the gradient, after it was averaged and clipped"}  # of an update
STAGES |= HASHES


def slow_rank(record: RunRecord) -> Found:
    if record.resolved.get("num_processes") == 1:
        yield "slow-rank"  # there is no other to wait for it
        return
    seen = record.known("ranks")[1:]  # the first report includes what is made once: kernels that are chosen, workers
    if len(seen) < 3:
        return
    yield "slow-rank"
    own = [[compute + data for compute, data in zip(times["compute"], times["data"])] for _, times in seen[-REPORTS:]]
    rank, times_seen = Counter(max(range(len(each)), key=each.__getitem__) for each in own).most_common(1)[0]
    spread = median(each[rank] / max(_others(each, rank), 1e-9) for each in own)
    # Ranks that share a busy machine are slow in turn, and seldom by so much; one with half the speed always is.
    if spread < 1.4 or times_seen < 0.75 * len(own):
        return
    step, newest = seen[-1]
    part = max(("compute", "data"), key=lambda part: newest[part][rank] - _others(newest[part], rank))
    what = f"rank {rank} takes {spread:.1f} times as long as the median of the other ranks, in {part}"
    yield Finding("slow-rank", "warning", what, step)


def device_errs(record: RunRecord) -> Found:
    """Of updates that were made again (--rerun_steps)."""
    made = record.known("rerun")
    if not made:
        return
    yield from ("device-errs", "update-not-repeatable")
    wrong = [(step, each) for step, each in made if each["outcome"] == "wrong"]
    if wrong:
        step, each = wrong[0]
        ranks = " or ".join(f"rank {rank}" for rank in each["ranks"])
        what = f"update {step}, made again from the same weights and batches, has other bits, first in {STAGES[each['stage']]}"
        if record.resolved.get("num_processes") != 1:
            what += f", on {ranks}"
        yield Finding("device-errs", "critical", f"{what}; {len(wrong)} of {len(made)} updates that were looked at", step)
    apart = [(step, each) for step, each in made if each["outcome"] == "not repeatable"]
    if apart:
        step, each = apart[0]
        what = f"first in {STAGES[each['stage']]} of update {step}; {len(apart)} of {len(made)} updates that were looked at"
        yield Finding("update-not-repeatable", "info", what, step)


def _others(times: list[float], rank: int) -> float:
    return median(times[:rank] + times[rank + 1 :])

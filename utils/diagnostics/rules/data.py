"""Findings about the images themselves and about how they reach the network."""

import math
from statistics import fmean, median, pvariance

from utils.diagnostics.finding import Finding, Found
from utils.runs.record import RunRecord


def data_range(record: RunRecord) -> Found:
    steps, lows = record.finite("data/min")
    _, highs = record.finite("data/max")
    if not lows or not highs:
        return
    low, high = min(lows), max(highs)
    seen = f"seen from {low:.3g} to {high:.3g}"
    if _out_of_range(low, high):
        yield Finding("data-range", "critical", seen, steps[-1])
        return
    checks = record.known("data")
    files = _mean_and_std(checks[0][1]) if checks else None
    _, means = record.finite("data/mean")
    _, stds = record.finite("data/std")
    if files is None or not means or not stds:
        return
    # The mean squares of single images differ by about as much as they are, so that those of 32 are known to a sixth or so.
    if _images_seen(record, len(means)) < 32:
        return
    # What the network sees has the mean and spread of what the files hold. Flips change neither, jitter of 0.5 the spread by
    # a quarter, balanced sampling and small batches less; the usual mistakes, [0, 1] among them, halve the spread or more.
    # Of batches of one or two images most of the spread may lie between them.
    yield "data-range"
    mean, std = fmean(means), math.sqrt(fmean(s * s for s in stds) + pvariance(means))
    if not 0.6 < std / max(files[1], 1e-6) < 1.7:
        what = f"{seen}, mean {mean:.2f}, spread {std:.2g}; in the files mean {files[0]:.2f}, spread {files[1]:.2g}"
        yield Finding("data-range", "critical", what, steps[-1])


def _out_of_range(low: float, high: float) -> bool:
    """Scaling uint8 gives [-1, 1] exactly, and jitter clamps: anything beyond by more than rounding is another scale."""
    return low < -1.02 or high > 1.02


def _images_seen(record: RunRecord, reports: int) -> int:
    """By this process, in the updates that so many reports are of."""
    return reports * (record.resolved.get("global_batch_size") or 0) // (record.resolved.get("num_processes") or 1)


def data_changed(record: RunRecord) -> Found:
    """Images that come to the network darker or brighter than they are in the files: inverted, or badly normalized."""
    checks = record.known("data")
    files = _mean_and_std(checks[0][1]) if checks else None
    steps, means = record.finite("data/mean")
    # The means of single images lie within about one spread of the whole, so that of 100 images has a standard error below a
    # tenth of it, and half a spread is five of those. Balanced sampling shows other images than the files hold on average.
    if files is None or _images_seen(record, len(means)) < 100 or record.options.get("balanced_sampling"):
        return
    _, lows = record.finite("data/min")
    _, highs = record.finite("data/max")
    if lows and highs and _out_of_range(min(lows), max(highs)):  # of which another mean is a part: `data_range` tells it
        return
    yield "data-changed"
    mean = sum(means) / len(means)
    # Jitter of strength s darkens white by s / 2 on average, because what it would brighten is clamped.
    if abs(mean - files[0]) > 0.5 * files[1] + 0.5 * (record.options.get("color_jitter") or 0.0):
        what = f"their mean is {mean:.2f} as the network sees them, {files[0]:.2f} in the files (spread {files[1]:.2g})"
        yield Finding("data-changed", "critical", what, steps[-1])


def data_stuck(record: RunRecord) -> Found:
    """The figures of one batch again and again, although there are others."""
    seen = [record.finite(f"data/{name}") for name in ("mean", "std")]
    images, batch = record.resolved.get("training_images") or 0, record.resolved.get("global_batch_size") or 0
    copies = [(data.get("copies") or {}).get("share", 0.0) for _, data in record.known("data")[:1]]
    if not batch or images < 2 * batch or max(copies, default=0.0) > 0.5 or any(len(values) < 4 for _, values in seen):
        return
    yield "data-stuck"
    # Means of different batches differ by hundredths; of the same images in another order or mirrored, by float rounding.
    if all(max(values) - min(values) < 1e-5 for _, values in seen):
        steps, means = seen[0]
        what = f"{len(steps)} batches had the same mean, {means[0]:.6g}, of {images} training images"
        yield Finding("data-stuck", "critical", what, steps[-1])


def _mean_and_std(data: dict) -> tuple[float, float] | None:
    """Over all pixels and channels of the files, from the figures per channel."""
    means, stds = data.get("mean"), data.get("std")
    if not means or not stds:
        return None
    mean = sum(means) / len(means)
    return mean, math.sqrt(sum(std**2 + (m - mean) ** 2 for m, std in zip(means, stds)) / len(means))


def data_alike(record: RunRecord) -> Found:
    for step, data in record.known("data")[:1]:
        copies, near = data.get("copies") or {}, data.get("near_copies") or {}
        if copies:
            yield "data-alike"
        share, near_share = copies.get("share", 0.0), near.get("share", 0.0)
        # Collections from the web have a few per cent of copies (CIFAR-10 has 3.3 % near-duplicates of test images).
        if share > 0.1 or near_share > 0.3:
            worst = max(share, near_share)
            what = f"{share:.0%} are exact copies of another, {near_share:.0%} nearly so"
            yield Finding("data-alike", "critical" if worst > 0.5 else "warning", what, step)


def data_blank(record: RunRecord) -> Found:
    for step, data in record.known("data")[:1]:
        share, rows = data.get("constant_share") or 0.0, data.get("constant_rows") or []
        if data.get("constant_share") is not None:
            yield "data-blank"
        # A network that learns its data makes blanks as often as it is shown them: below one in a hundred few will notice.
        severity = "critical" if share > 0.5 else "warning" if share > 0.01 else "info"
        if share > 0:
            yield Finding("data-blank", severity, f"{share:.2%} of the images{_listed(', rows', rows)}", step)


def data_damaged(record: RunRecord) -> Found:
    for step, data in record.known("data")[:1]:
        damaged = data.get("damaged") or {}
        if damaged:
            yield "data-damaged"
        count, share = damaged.get("images", 0), damaged.get("share", 0.0)
        # Who said that they be replaced knows of them; not that it is one in twenty, which is no accident of a few files.
        expected = record.options.get("on_bad_image") == "replace" and share < 0.05
        names = [f"{file['file']}: {file['reason']}" for file in damaged.get("files") or ()]
        if count:
            what = f"{count} of them, {share:.2%}{_listed(', such as', names)}"
            yield Finding("data-damaged", "info" if expected else "warning", what, step)


def data_enlarged(record: RunRecord) -> Found:
    for step, data in record.known("data")[:1]:
        sizes, side = data.get("sizes") or {}, (data.get("shape") or [0])[-1]
        if sizes:
            yield "data-enlarged"
        share, least = sizes.get("enlarged_share") or 0.0, sizes.get("shorter_side_min")
        if share > 0:  # for information alone: thumbnails may be all that there is
            what = f"{share:.0%} of the files have a side below {side} pixels, the least {least}"
            yield Finding("data-enlarged", "info", what, step)


def _listed(before: str, names: list) -> str:
    """The first three of them, for the end of a sentence."""
    return f"{before} {', '.join(map(str, names[:3]))}" if names else ""


def class_imbalance(record: RunRecord) -> Found:
    for step, data in record.known("data")[:1]:
        classes = data.get("classes") or {}
        if classes:
            yield "class-imbalance"
        share, number = classes.get("largest_share", 0.0), classes.get("number", 0)
        # Of three or more classes, one has more than all others together thrice over; of two, which may well be a thing and its
        # rare exception, 19 times over.
        uneven = (number >= 3 and share > 0.75) or (number == 2 and share >= 0.95)
        if uneven and not record.options.get("balanced_sampling"):
            yield Finding("class-imbalance", "warning", f"{share:.0%} of the images are of one of {number} classes", step)


def data_starved(record: RunRecord) -> Found:
    steps, waits = record.finite("perf/data_wait")
    if len(waits) < 3:
        return
    yield "data-starved"
    # On a GPU the host waits for data while the device works on what it was given before: only where little but waiting is left
    # has the device nothing to do.
    on_cpu = record.resolved.get("device", "cpu") == "cpu"
    share = median(waits[1:])  # the first reports include the start of the workers
    if share > (0.3 if on_cpu else 0.8):
        what = f"{share:.0%} of the time goes into waiting for data"
        yield Finding("data-starved", "warning", what + ("" if on_cpu else ", in part of which the device may work"), steps[-1])

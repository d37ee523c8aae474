"""Findings about the images themselves and about how they reach the network."""

from statistics import median

from utils.diagnostics.finding import Finding, Found
from utils.runs.record import RunRecord


def data_range(record: RunRecord) -> Found:
    """The audit sets a few images beside their files; here is every one of the reported updates."""
    steps, lows = record.finite("data/min")
    _, highs = record.finite("data/max")
    if not lows or not highs or record.options.get("vae"):  # latents have no range
        return
    yield "data-range"
    low, high = min(lows), max(highs)
    # Scaling uint8 gives [-1, 1] exactly, and jitter clamps: anything beyond by more than rounding is another scale.
    if low < -1.02 or high > 1.02:
        yield Finding("data-range", "critical", f"seen from {low:.3g} to {high:.3g}", steps[-1])


REPEATS = 0.01  # of the images: what a network is shown so often, it makes as often


def data_alike(record: RunRecord) -> Found:
    for step, data in record.known("data")[-1:]:
        copies, near = data.get("copies") or {}, data.get("near_copies") or {}
        if copies:
            yield "data-alike"
        share, near_share = copies.get("share", 0.0), near.get("share", 0.0)
        # Collections from the web have a few per cent of copies (CIFAR-10 has 3.3 % near-duplicates of test images).
        if share > 0.1 or near_share > 0.3:
            worst = max(share, near_share)
            what = f"{share:.0%} are exact copies of another, {near_share:.0%} nearly so"
            yield Finding("data-alike", "critical" if worst > 0.5 else "warning", what, step)
            continue
        read, repeated, following = data.get("images_read", 0), copies.get("repeated", 0), copies.get("following", 0)
        # Other copies lie anywhere: next to each other only as often as in a random order.
        if following > max(REPEATS * read, 8 + 3 * copies.get("following_by_chance", 0.0)):
            what = f"{following / read:.1%} are equal to the image before them, as where a loader repeats one for a bad file"
            yield Finding("data-alike", "warning", what, step)
        elif repeated > max(2 * REPEATS * read, 8):
            what = f"one and the same image stands there {repeated} times, {repeated / read:.1%} of all"
            yield Finding("data-alike", "warning", what, step)


def data_blank(record: RunRecord) -> Found:
    for step, data in record.known("data")[-1:]:
        share, rows = data.get("constant_share") or 0.0, data.get("constant_rows") or []
        if data.get("constant_share") is not None:
            yield "data-blank"
        # A network that learns its data makes blanks as often as it is shown them: below one in a hundred few will notice.
        severity = "critical" if share > 0.5 else "warning" if share > 0.01 else "info"
        if share > 0:
            yield Finding("data-blank", severity, f"{share:.2%} of the images{_listed(', rows', rows)}", step)


def data_damaged(record: RunRecord) -> Found:
    for step, data in record.known("data")[-1:]:
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


DIGITS_SIDE = 16  # the built-in digits are scans of 8x8, of which there are no larger ones: twice their size is expected


def data_enlarged(record: RunRecord) -> Found:
    for step, data in record.known("data")[-1:]:
        sizes, size = data.get("sizes") or {}, (data.get("shape") or [0])[1:]
        if sizes:
            yield "data-enlarged"
        share, least = sizes.get("enlarged_share") or 0.0, sizes.get("shorter_side_min")
        expected = record.options.get("dataset_name") == "digits" and max(size, default=0) <= DIGITS_SIDE
        if share > 0 and not expected:  # for information alone: thumbnails may be all that there is
            below = " x ".join(map(str, dict.fromkeys(size)))
            what = f"{share:.0%} of the files have a side below {below} pixels, the least {least}"
            yield Finding("data-enlarged", "info", what, step)


def _listed(before: str, names: list) -> str:
    """The first three of them, for the end of a sentence."""
    return f"{before} {', '.join(map(str, names[:3]))}" if names else ""


def data_checks(record: RunRecord) -> Found:
    """What the checks of utils/diagnostics/data_checks saw at the start."""
    for step, checks in record.known("data_checks")[-1:]:
        yield from checks.get("judged") or ()
        for seen in checks.get("findings") or ():
            yield Finding(seen["code"], seen["severity"], seen["evidence"], step, picture=seen.get("picture") or "")
        for message in checks.get("failed") or ():
            yield Finding("rule-failed", "info", message, step)


def class_empty(record: RunRecord) -> Found:
    for step, data in record.known("data")[-1:]:
        classes = data.get("classes") or {}
        if classes:
            yield "class-empty"
        counts, empty = classes.get("counts") or {}, classes.get("empty", 0)
        if empty:
            names = [name for name, count in counts.items() if count == 0]
            what = f"{empty} of {classes.get('number')}{_listed(', such as', names)}"
            # The first N images may be of some classes alone, which matters to a network that is told the classes.
            chosen = record.options.get("max_train_images") and not record.options.get("class_conditional")
            yield Finding("class-empty", "info" if chosen else "warning", what, step)
            continue
        usual = median(counts.values()) if counts else 0
        few = [f"{name} ({count})" for name, count in counts.items() if count < 0.03 * usual]
        if few:  # for information alone: the world has rare things
            what = f"{len(few)} with less than 3% of the usual number, such as {', '.join(few[:3])}"
            yield Finding("class-empty", "info", what, step)


def class_imbalance(record: RunRecord) -> Found:
    for step, data in record.known("data")[-1:]:
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

"""Whether the network gets a mixture of one image and noise, on one path from images to noise."""

from collections.abc import Iterator

from steady_doctor.found import Found
from steady_doctor.laws.paths import levels
from steady_doctor.seen import Seen

MUCH_SIGNAL = 0.3  # the image's share at the last row of a table, that a network which begins at pure noise has never seen without
NO_SIGNAL = 0.01  # the share below which nothing of the image is left
TOO_MANY = 0.4  # of a table's rows without any image
SECOND_NOISE = 0.3  # of the clean image: an encoder's latents have some hundredths


def path(seen: Seen) -> Iterator[Found]:
    found = levels(seen)
    if found is not None and not found.kind:
        pairs = [(round(float(a), 3), round(float(b), 3)) for a, b in list(zip(found.a, found.b))[:4]]
        yield Found("input-path", seen.mixed()[0][0], {"pairs": pairs})


def nothing(seen: Seen) -> Iterator[Found]:
    for update, one in seen.mixed():
        if one.mixture.clean is None and float(one.mixture.input.std) > 0 and one.mixture.only_noise:
            yield Found("input-no-image", update)


def signs(seen: Seen) -> Iterator[Found]:
    found = levels(seen)
    if found is not None and (float(found.a.min()) < -1e-4 or float(found.b.min()) < -1e-4):
        yield Found("input-negative", seen.mixed()[0][0], {"a": float(found.a.min()), "b": float(found.b.min())})


def changed(seen: Seen) -> Iterator[Found]:
    """The mixture is clamped, or rounded, on its way to the network."""
    for update, one in seen.mixed():
        if set(one.mixture.changed_by) & {"clamp", "clamp_", "clamp_min", "clamp_max", "round", "tanh", "hardtanh", "clip"}:
            yield Found("input-clamped", update, {"by": one.mixture.changed_by})


def twice(seen: Seen) -> Iterator[Found]:
    for update, one in seen.mixed():
        if one.mixture.noised > SECOND_NOISE:
            yield Found("input-noised-twice", update, {"share": one.mixture.noised})


def schedule(seen: Seen) -> Iterator[Found]:
    """The rows of a table of variances, from first to last."""
    for update, one in seen.mixed():
        table = one.mixture.table
        if table is None or one.mixture.a is None:
            continue
        _, a, b = table
        if bool((a[1:] > a[:-1] + 1e-4).any()) and bool((a[1:] < a[:-1] - 1e-4).any()):
            continue
        first, last = (0, -1) if a[0] > a[-1] else (-1, 0)
        if first == -1 and float(a[-1] - a[0]) > 0.05 and levels(seen) is not None and levels(seen).kind == "vp":
            yield Found("input-exchanged", update, {"first": float(b[0]), "last": float(b[-1])})
        if float(a[last]) > MUCH_SIGNAL:
            yield Found("input-signal-left", update, {"share": float(a[last])})
        if float((a.abs() < NO_SIGNAL).double().mean()) > TOO_MANY:
            yield Found("input-all-noise", update, {"share": float((a.abs() < NO_SIGNAL).double().mean())})


LAWS = (path, nothing, signs, changed, twice, schedule)

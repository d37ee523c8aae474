"""The clean images: their range, their order, and whether they are whole."""

from collections.abc import Iterator

import torch

from steady_doctor.found import Found
from steady_doctor.identify.figures import Figures
from steady_doctor.identify.step import Pass
from steady_doctor.laws.paths import factors, levels
from steady_doctor.seen import Seen

BYTES = 20  # images beyond it were not divided by 255
FAR = 1.2  # beyond the range of images
NARROW = 0.1  # between the darkest and the brightest number of a batch of images, which no photographs have
HALF = 0.42, 0.52  # what images of a batch reach on both sides when their bytes are divided by 255 and 0.5 is taken off
WHOLE, FAINT = 100, 1e-3  # signals of whole numbers up to that were not scaled; those with less spread hold nothing
STANDARD = 0.3  # from the mean 0 and the spread 1, that batches may be
TAILS = 3.0  # spreads from the mean that numbers without a range reach on both sides
RAW = 10.0  # of signals and coordinates in units of their own, over the noise or sigma_data
WIDE = 0.25, 4.0  # between these the spread of latents may be
ROUGH = 1.7  # times as rough as they would be otherwise
LOOKS = 5  # recorded updates


def _clean(seen: Seen) -> list[tuple[int, Pass, Figures]]:
    return [(update, one, m.clean) for update, one in seen.passes() if (m := one.mixture) is not None and m.clean is not None]


def _is_image(one: Pass, clean: Figures) -> bool:
    encoded = one.batch is not None and one.batch.encoded
    film = len(clean.shape) == 5 and 3 in clean.shape[1:3]
    return (film or (len(clean.shape) == 4 and clean.shape[1] in (1, 3))) and not encoded


def range_(seen: Seen) -> Iterator[Found]:
    """Of images -1 to 1; of masks, which have two numbers, any."""
    looks = [look for look in _clean(seen) if _is_image(*look[1:])]
    if not looks:
        return
    update = looks[0][0]
    low, high = min(clean.low for _, _, clean in looks), max(clean.high for _, _, clean in looks)
    figures = {"low": low, "high": high}
    path = levels(seen)
    is_known = path is None or path.kind in ("vp", "flow", "edm") or factors(path.a, path.b) is not None
    spread = max(clean.std for _, _, clean in looks)
    if high > BYTES and low > -2:
        yield Found("data-bytes", update, figures)
    elif max(high, -low) > FAR * 2 and not _has_no_range([clean for _, _, clean in looks]):
        yield Found("data-range", update, figures)
    elif high - low < NARROW and (path is None or not path.single) and sum(clean.shape[0] for _, _, clean in looks) > 4:
        yield Found("data-nearly-one", update, figures | {"std": spread})
    elif low >= -1e-3 and _is_top(high) and is_known and any(len(look[2].head.unique()) > 2 for look in looks):
        yield Found("data-unsigned", update, figures)
    elif HALF[0] < -low < HALF[1] and HALF[0] < high < HALF[1]:
        yield Found("data-halved", update, figures)


def _is_top(high: float) -> bool:
    """Of images whose bytes were divided by 255, or by 127.5: 1 was not taken off."""
    return 0.5 < high <= 1 + 1e-3 or abs(high - 2) < 1e-3


def _has_no_range(looks: list[Figures]) -> bool:
    """Fields and spectra: they are brought to the mean and the spread of the noise, or have tails on both sides."""
    if all(abs(clean.mean) < STANDARD and abs(clean.std - 1) < STANDARD for clean in looks):
        return True
    mean, std = (sum(getattr(clean, name) for clean in looks) / len(looks) for name in ("mean", "std"))
    tail = min(max(clean.high for clean in looks) - mean, mean - min(clean.low for clean in looks))
    return abs(mean) < STANDARD * std and tail > TAILS * std


def signals(seen: Seen) -> Iterator[Found]:
    """Of signals, sequences and coordinates the scale of the noise, or that which the network's scales are made for."""
    looks = [look for look in _clean(seen) if len(look[2].shape) < 4 and look[2].count > 1]
    if not looks:
        return
    update, one, clean = looks[0]
    path, spread = levels(seen), max(clean.std for _, _, clean in looks)
    unit = path.scale if path is not None and path.kind == "edm" else one.mixture.noise.std  # type: ignore[union-attr]
    if spread > RAW * unit and path is not None and path.kind in ("vp", "flow", "edm"):
        yield Found("data-not-scaled", update, {"std": spread})
    elif spread < FAINT and len(looks) > 1 and clean.shape[0] > 1:
        yield Found("data-nearly-one", update, {"low": clean.low, "high": clean.high, "std": spread})


def latents(seen: Seen) -> Iterator[Found]:
    looks = [look for look in _clean(seen) if len(look[2].shape) == 4 and not _is_image(*look[1:])]
    path = levels(seen)
    if not looks or path is None or path.kind not in ("vp", "flow"):
        return
    spread = torch.tensor([clean.std for _, _, clean in looks]).median().item()
    if not WIDE[0] < spread < WIDE[1]:
        yield Found("data-latents", looks[0][0], {"std": spread})


def whole(seen: Seen) -> Iterator[Found]:
    """What was done to the images on the way."""
    looks = [(update, one.batch) for update, one in seen.mixed() if one.batch is not None]
    for update, batch in looks:
        if batch.reshaped:
            yield Found("data-reshaped", update)
        if batch.wrapped:
            yield Found("data-wrapped", update)
        count, of = batch.colors_flipped
        if 0 < count < of:
            yield Found("data-colors-flipped", update, {"count": count, "of": of})
        if batch.one_row:
            yield Found("data-one-image", update, {"size": len(batch.marks)})
    rougher = [batch.rougher for _, batch in looks if batch.rougher is not None]
    if rougher and min(rougher) > ROUGH:
        yield Found("data-reshaped", looks[0][0], {"rougher": min(rougher)})


def again(seen: Seen) -> Iterator[Found]:
    """Other images in each update, where there are others."""
    looks = [(update, one.batch) for update, one in seen.mixed() if one.batch is not None]
    if len({update for update, _ in looks}) < LOOKS:
        return
    rows = max(max(batch.rows, seen.dataset_rows.get(batch.dataset, 0)) for _, batch in looks)
    marks = torch.cat([batch.marks for _, batch in looks])
    size = len(looks[0][1].marks)
    different = len(torch.unique(_rounded(marks), dim=0))
    per_update = size * len(looks) // len({update for update, _ in looks})
    if size >= 4 and different <= per_update and rows >= 2 * per_update:
        yield Found("data-same-batch", looks[0][0], {"different": different, "rows": rows, "updates": len(looks)})
    update, last = looks[-1]
    passes = len(looks) / len({number for number, _ in looks})
    stopped = last.loads > 1 and update - last.loaded_at > last.loads / passes
    if stopped and last.load >= 0 and update * passes > 1.5 * last.loads:
        yield Found("data-kept-batches", update, {"batches": last.loads})


def _rounded(marks: torch.Tensor) -> torch.Tensor:
    return (marks * 1e5).round()


def order(seen: Seen) -> Iterator[Found]:
    """Each pass over the data begins with other images."""
    for key in {one.batch.dataset for _, one in seen.mixed() if one.batch is not None} & set(seen.begins):
        begins = seen.begins[key]
        if len(begins) < 2:  # none where the batches hold no images, but signals
            continue
        first, *others = begins
        size, rows = len(first), seen.dataset_rows.get(key, 0)
        if rows < 2 * size or len(set(first)) < 2:
            continue
        alike = all(len(one) == size and torch.allclose(torch.tensor(one), torch.tensor(first), 1e-5, 1e-7) for one in others)
        if alike and size >= 4:
            yield Found("data-not-shuffled", 1, {"passes": len(begins)})


def written(seen: Seen) -> Iterator[Found]:
    """What a dataset keeps stays as it is."""
    if seen.data_changed:
        yield Found("data-changed", seen.updates)


OF_IMAGES = (range_, signals, latents, whole)
LAWS = (*OF_IMAGES, again, order, written)

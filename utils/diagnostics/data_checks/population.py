"""A second kind of images among the rest."""

from collections.abc import Iterator

import numpy as np

from utils.diagnostics.data_checks.sample import NEARLY_PLAIN, Sample, Seen, color_codes

NAMES = {
    "brightness": "brightness",
    "white": "their brightest parts",
    "black": "their darkest parts",
    "spread": "contrast",
    "edges": "the strength of edges",
    "border": "the brightness of their border",
    "roughness": "fine grain",
    "two": "the share of their two most frequent colors",
    "color": "strength of color",
    "warmth": "red over blue",
}


def features(sample: Sample) -> dict[str, np.ndarray]:
    """Figures of each image [N], so scaled that one kind of images spreads about evenly."""
    gray = sample.gray
    flat = gray.reshape(len(gray), -1)
    values = sample.images.reshape(len(gray), -1, sample.images.shape[-1]).astype(np.int64)
    codes = np.sort(color_codes(sample.images).reshape(len(gray), -1), 1)
    low, high = np.quantile(flat, (0.02, 0.98), axis=1)
    edges = (np.abs(np.diff(gray, axis=1)).mean((1, 2)) + np.abs(np.diff(gray, axis=2)).mean((1, 2))) / 2
    border = np.concatenate([gray[:, 0], gray[:, -1], gray[:, :, 0], gray[:, :, -1]], 1).mean(1)
    steps = (np.diff(gray, axis=1) ** 2).mean((1, 2)) + (np.diff(gray, axis=2) ** 2).mean((1, 2))
    found = {
        "brightness": np.log(flat.mean(1) + 4),
        "white": np.log(high + 4),
        "black": np.log(255 - low + 4),
        "spread": np.log(flat.std(1) + 1),
        "edges": np.log(edges + 0.5),
        "border": border / 40,
        "roughness": np.minimum(steps / (4 * flat.var(1) + 1), 1) * 4,
        "two": np.array([_two_most(row) for row in codes]) * 3,
    }
    if values.shape[-1] == 3:
        found["color"] = np.log(np.ptp(values, -1).mean(1) + 2)
        red, blue = values[..., 0].mean(1), values[..., 2].mean(1)
        found["warmth"] = 4 * (red - blue) / (red + blue + 16)
    return found


def _two_most(codes: np.ndarray) -> float:
    """The share of the two most frequent of sorted values."""
    ends = np.flatnonzero(np.diff(codes, append=-1)) + 1
    counts = np.sort(np.diff(ends, prepend=0))
    return counts[-2:].sum() / len(codes)


def split(values: np.ndarray) -> tuple[float, float, float]:
    """The best division in two: (its threshold, distance of the means over the sum of the spreads, share in the gap)."""
    x = np.sort(values.astype(np.float64))
    n = len(x)
    k = np.arange(1, n)
    sums, squares = np.cumsum(x)[:-1], np.cumsum(x**2)[:-1]
    low, high = sums / k, (x.sum() - sums) / (n - k)
    spreads = (squares / k - low**2, ((x**2).sum() - squares) / (n - k) - high**2)
    score = (high - low) / (sum(np.sqrt(np.maximum(part, 0)) for part in spreads) + 0.05)
    least = max(8, round(0.01 * n))
    score[: least - 1], score[n - least :] = 0, 0
    best = int(score.argmax())
    a, b = low[best], high[best]
    gap = ((x > a + 0.3 * (b - a)) & (x < b - 0.3 * (b - a))).sum() / min(best + 1, n - best - 1)
    return (x[best] + x[best + 1]) / 2, float(score[best]), float(gap)


def strangers(sample: Sample) -> Iterator[Seen]:
    """A smaller part of the images, no class of theirs, far from the rest in one figure or several, with hardly any between."""
    figures = features(sample)
    severity, what, members = _apart(sample, np.flatnonzero(~sample.plain), figures)
    dim = sample.gray.std((1, 2)) < NEARLY_PLAIN
    if severity and np.median(dim[members]) == 1:
        what = f"{what}: nearly plain ones, such as the dark corners of scans"
        yield Seen("data-mixed", "info", what, sample.shown(members, "nearly plain"))
        severity, what, members = _apart(sample, np.flatnonzero(~dim), figures)  # what lies apart among the rest
    if severity:
        yield Seen("data-mixed", severity, what, sample.shown(members, "apart from the rest"))


def _apart(sample: Sample, kept: np.ndarray, all_figures: dict[str, np.ndarray]) -> tuple[str, str, np.ndarray]:
    """(severity or "", what is said of them, which images) of those among `kept` that lie apart."""
    if len(kept) < 60:
        return "", "", kept[:0]
    figures = {name: values[kept] for name, values in all_figures.items()}
    # In drawings of a few colors the extremes have a few values alone, with nothing between.
    drawn = np.median([len(np.unique(codes)) for codes in color_codes(sample.images[kept[:256]])]) < 24
    parts = []
    for name, values in figures.items():
        if drawn and name in ("white", "black"):
            continue
        threshold, score, gap = split(values)
        if score > 2.4 and gap < 0.1:
            above = values > threshold
            smaller = above if above.mean() <= 0.5 else ~above
            parts += [] if sample.is_labeled(kept, smaller) else [(score, name, smaller)]
    severity, what, members = "", "", np.zeros(len(kept), bool)
    best = 0.0
    for score, _, part in parts:
        names = [name for _, name, other in parts if (part == other).mean() > 1 - 0.1 * part.mean()]
        strength = score + 10 * (len(names) > 1)  # two figures that part the same images are more than a single one
        if strength > max(best, 3.5):
            best, members = strength, part
            severity = "warning" if strength > 5 else "info"
            what = f"lie apart in {', '.join(NAMES[name] for name in names)}"
    if severity != "warning":
        for known, which, sure in _kinds(sample.images[kept], figures):
            told = which.sum() >= 6 and 0.03 <= which.mean() <= 0.5 and (sure or not severity)
            if told and not sample.is_labeled(kept, which):
                severity, what, members = "warning" if sure else "info", known, which
                break
    return severity, f"{members.mean():.1%} of the images {what}", kept[members]


def _kinds(images: np.ndarray, figures: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray, bool]]:
    """(what they are, which, whether that is hardly meant) of kinds that are known, told by one trait of their own."""
    two, rough = figures["two"] / 3, figures["roughness"] / 4
    if np.median(two) < 0.3:
        yield "consist of two colors nearly throughout, as masks and drawings do", two > 0.9, True
    plain = two > 0.35
    if np.median(two) < 0.1 and ((two > 0.15) & ~plain).sum() < 0.1 * plain.sum():
        yield "have a background of one color or two, as drawings do", plain, True
    if np.median(rough) < 0.4:
        yield "are noise from pixel to pixel", rough > 0.8, True
    if images.shape[-1] == 3:
        gray = (images == images[..., :1]).all((1, 2, 3))
        if 0 < gray.sum() < len(gray):
            apart = [
                abs(np.median(v[gray]) - np.median(v[~gray])) / (v[gray].std() + v[~gray].std() + 0.05)
                for name, v in figures.items()
                if name != "color"
            ]
            yield "are gray, among colored ones", gray, max(apart) > 1
    for ends, name in ((images.max((1, 2, 3)), "brightest"), (255 - images.min((1, 2, 3)).astype(np.int64), "darkest")):
        yield (
            f"have their {name} pixel at one and the same level, and others beyond it: they were made darker or paler",
            *_ceiling(ends),
        )


def _ceiling(ends: np.ndarray) -> tuple[np.ndarray, bool]:
    """Images whose largest value is one and the same below 255: pixels that were saturated before all values were reduced."""
    counts = np.bincount(ends, minlength=256)
    near = np.convolve(counts, np.ones(17), "same") - np.convolve(counts, np.ones(3), "same")
    piled = (counts > 6 * (near / 14 + 0.5)) & (np.arange(256) < 240)
    place = int(np.where(piled, counts, 0).argmax())
    fair = counts[255] > 0.02 * len(ends) and (counts > 0).sum() > 40
    return (ends == place) & bool(piled[place] and fair), True

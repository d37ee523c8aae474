"""Findings about samples: what kind of collapse it is, if any. Pure functions of an evaluation's or a preview's figures (JSON).

The thresholds stand between what planted collapses and held-out real images gave (benchmarks/quality/RESULTS.md). The order is
that of the explanations: where all samples are alike, missing modes follow from it and are not told as well.
"""

import math
from collections.abc import Iterator

from utils.diagnostics.finding import SEVERITIES, Finding, Found
from utils.runs.evaluations import settings_of
from utils.runs.record import RunRecord, finite_part

SIGNIFICANCE = 0.05  # of the test of each bin, as in Richardson & Weiss 2018
MIN_ACCURACY = 0.7  # of a classifier whose verdict on missing classes is believed
ALIKE = 0.02  # of the images' variance: differences of a seventh of theirs
_MIN_EXPECTED = 20  # images: of so many expected, chance leaves fewer than a fifth with a probability of 3e-6
_CHANCE = 1e-5
_LEAST_GAP = 0.015  # share of the images: less is no part of the data
_RIPE = 1000  # updates: healthy runs of 120 had samples among which no image could be
MIN_VARIED = 100  # images: real sets of 100 gave a variance ratio above 0.74 in 4,000 of 4,000, of 20 below 0.7 in 2 of 100


def evaluated_samples(record: RunRecord) -> Found:
    """The newest evaluation in a run, once half of it is done: before that samples are not meant to be good, and nor are those
    of a short run."""
    total = record.resolved.get("max_train_steps") or 0
    for step, figures in record.known("evaluation")[-1:] if total >= _RIPE else ():
        if step >= 0.5 * total:
            yield from _judged(figures, step)


def separately_evaluated_samples(record: RunRecord) -> Found:
    """What evaluate.py measured of the run and of its checkpoints. Of the same evaluation of several states the newest state
    counts: samples of earlier ones are not meant to be as good."""
    newest: dict[str, dict] = {}
    for result in sorted(record.evaluations, key=_state_of):
        newest[settings_of(result)] = result
    found: dict[str, list[tuple[Finding, dict]]] = {}
    for result in newest.values():
        for item in _judged(finite_part(result["figures"]), result.get("step")):
            if isinstance(item, str):
                yield item
            else:
                found.setdefault(item.code, []).append((item, result))
    updates = max((entry["step"] for entry in record.history), default=0)
    for each in found.values():
        worst, result = min(each, key=lambda pair: SEVERITIES.index(pair[0].severity))
        made = f"{result['sampler']} {result['num_inference_steps']} steps, " if result.get("sampler") else ""
        which = f" on {result['state']}" if result.get("state") else ""
        what = f"{worst.evidence}; evaluate.py{which}: {result.get('images')} samples, {made}{result.get('features')}"
        what += f"; so in {len(each)} of {len(newest)} evaluations" * (len(newest) > 1)
        if not which and updates > (worst.step or updates):
            what += f"; the run has gone on to update {updates} since: evaluate it again"
        yield Finding(worst.code, worst.severity, what, worst.step, source="evaluate.py")


def _state_of(result: dict) -> tuple[float, float]:
    """(its update, when it was evaluated); what is exported has no known update while the run goes on, and is the newest."""
    step = result.get("step")
    return math.inf if step is None else step, result["time"]


def previewed_samples(record: RunRecord) -> Found:
    """The newest preview: a look at few images, which tells whether all are one, gray or not, and nothing finer."""
    total = record.resolved.get("max_train_steps") or 0
    for step, samples in record.known("samples")[-1:] if total >= _RIPE else ():
        distances = {kind: (samples.get(kind) or {}).get("pair_distance") for kind in ("raw", "ema", "data")}
        real = distances.pop("data")
        ratios = {kind: distance / real for kind, distance in distances.items() if real and distance is not None}
        # Before half of the run samples are not meant to be good; healthy ones that were judged after that had 0.7 to 1.3.
        if step < 0.5 * total or not ratios:
            return
        yield "samples-alike"
        if alike := {kind: ratio for kind, ratio in ratios.items() if ratio**2 < ALIKE}:
            said = ", ".join(f"{ratio:.2g} ({kind} weights)" for kind, ratio in alike.items())
            yield Finding("samples-alike", "critical", f"their distance from each other over that of the images: {said}", step)


def collapse(figures: dict) -> list[Finding]:
    """Returns the findings about the figures that `Evaluation.measure` gives."""
    return [item for item in _judged(figures, None) if isinstance(item, Finding)]


def _judged(figures: dict, step: int | None) -> Found:
    """Of an evaluation's figures: the codes that can be judged by them, and the findings. What stands first hides the rest."""
    measured = {"variance_ratio", "precision", "rows", "modes"} <= figures.keys()
    if not measured or "precision" not in figures.get("floor", {}):
        return
    yield "samples-alike"
    ratio = figures["variance_ratio"]
    if ratio < ALIKE:
        what = f"the variance of their features is {ratio:.2g} of the real images'"
        yield Finding("samples-alike", "critical", what, step)
        return
    yield "samples-unlike-data"
    copies = figures.get("memorisation") or {}
    if {"images", "near_duplicates", "near_duplicates_real"} <= copies.keys():
        yield "samples-copied"
        share, real = copies["near_duplicates"], copies["near_duplicates_real"]
        # Among real images near-duplicates are a few per cent at most, unless the data is full of them.
        if share > 0.05 + 2 * real:
            what = f"{share:.0%} of {copies['images']} samples are near-duplicates of a training image"
            what += f", {real:.1%} of real images are"
            yield Finding("samples-copied", "critical" if share > 0.5 else "warning", what, step)
    # Half the variance leaves 0.6, a strong blur 0.2, noise 0.
    if figures["precision"] < 0.4 * figures["floor"]["precision"]:
        among_real = f"{figures['precision']:.0%} of them lie among the real images"
        what = f"{among_real}, {figures['floor']['precision']:.0%} of other real images do"
        yield Finding("samples-unlike-data", "critical", what, step)
        return  # which modes they are in means nothing
    yield from ("modes-missing", "mode-dominates")
    if figures["rows"] >= MIN_VARIED:
        yield "samples-lack-variety"
        # Real sets of 900 gave 0.95 to 1.07, a mode five times too large 0.82, half the variance in the pixels 0.43 to 0.52.
        if ratio < 0.7:
            distances = f"distances {figures['distance_ratio']:.2g}"
            what = f"variance {ratio:.2g} and {distances} of those of the real images, in features"
            yield Finding("samples-lack-variety", "critical" if ratio < 0.3 else "warning", what, step)
    of_bins = [*_missing(figures, step), *_dominant(figures, step)]
    yield from of_bins or _regions(figures, step)


def _bins(figures: dict) -> Iterator[tuple[str, dict]]:
    """Classes, where they are known well enough, and modes, where the images are good enough: what puts an image into a cluster
    may else be its blur or its noise, as in a model after a quarter of its training."""
    complete = {"number", "generated", "real", "different"}
    classes, modes = figures.get("classes") or {}, figures["modes"]
    if complete <= classes.keys() and classes.get("accuracy", 0.0) >= MIN_ACCURACY:
        yield "class", classes
    if complete <= modes.keys() and figures["precision"] > 0.9 * figures["floor"]["precision"]:
        yield "mode", modes


def _shares(bins: dict) -> Iterator[tuple[int, float, float, float]]:
    """(bin, generated images, generated images expected from the real share, real share) of each."""
    total, real_total = sum(bins["generated"]), sum(bins["real"])
    for number, (count, real) in enumerate(zip(bins["generated"], bins["real"])):
        yield number, count, total * real / real_total, real / real_total


def _name(kind: str, bins: dict, number: int) -> str:
    return f"{kind} {bins['names'][number] if 'names' in bins else number}"


def _missing(figures: dict, step: int | None) -> Iterator[Finding]:
    for kind, bins in _bins(figures):
        # Of a class that is gone, a judge still sees the others that it takes for it.
        limit = 0.2 + 1 - bins.get("accuracy", 1.0)
        missing = [
            (number, share)
            for number, count, wanted, share in _shares(bins)
            if wanted >= _MIN_EXPECTED and count < limit * wanted
        ]
        if missing:
            names = ", ".join(_name(kind, bins, number) for number, _ in missing[:5]) + (" ..." if len(missing) > 5 else "")
            share = sum(share for _, share in missing)
            what = f"absent or nearly so: {names}, {share:.0%} of the real images ({len(missing)} of {bins['number']})"
            yield Finding("modes-missing", "critical" if share > 0.3 else "warning", what, step)
            return


def _is_gap(share: float, by_chance: float, limit: float) -> bool:
    """Whether so many images have nearly none of the other set around them that a part of the data is missing there."""
    return share > limit and share - by_chance > _LEAST_GAP


def _regions(figures: dict, step: int | None) -> Iterator[Finding]:
    """Without classes: parts of the data that are no cluster either."""
    regions = figures.get("regions")
    if not regions or not figures["precision"] > 0.9 * figures["floor"]["precision"]:
        return
    missing, crowded = regions["missing"], regions["crowded"]
    # Where one part is far too frequent, all others are too rare, and the other way round: the larger is the cause.
    if crowded["share"] > missing["share"] and _is_gap(**crowded):
        what = f"{crowded['share']:.0%} of the samples have nearly no real image among those around them"
        yield Finding("mode-dominates", "warning", f"{what} ({crowded['by_chance']:.1%} by chance)", step)
    elif _is_gap(**missing):
        what = f"{missing['share']:.0%} of the real images have nearly no sample among those around them"
        severity = "critical" if missing["share"] > 0.3 else "warning"
        yield Finding("modes-missing", severity, f"{what} ({missing['by_chance']:.1%} by chance)", step)


def _dominant(figures: dict, step: int | None) -> Iterator[Finding]:
    for kind, bins in _bins(figures):
        excess = [
            (count / wanted, number, share)
            for number, count, wanted, share in _shares(bins)
            if wanted >= _MIN_EXPECTED and count > 2.5 * wanted
        ]
        if excess:
            times, number, share = max(excess)
            what = f"{_name(kind, bins, number)} is {times:.1f} times as frequent as in the real images ({share:.0%} of them)"
            yield Finding("mode-dominates", "critical" if times > 5 else "warning", what, step)
            return
    for kind, bins in _bins(figures):
        # Of alike sets each bin differs with the probability of the test.
        if kind == "mode" and _tail(bins["different"], bins["number"]) < _CHANCE:
            what = f"{bins['different']} of {bins['number']} modes have another share than in the real images"
            yield Finding("mode-dominates", "warning", what, step)


def _tail(successes: int, trials: int) -> float:
    """Probability of at least so many of `trials` bins being found different by chance."""
    terms = range(successes, trials + 1)
    return sum(math.comb(trials, k) * SIGNIFICANCE**k * (1 - SIGNIFICANCE) ** (trials - k) for k in terms)

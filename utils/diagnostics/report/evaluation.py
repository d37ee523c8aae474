"""What a report shows of evaluated samples: distances over time, and which classes and modes of the data they cover."""

import json

from utils.diagnostics.report.curves import columns
from utils.diagnostics.report.plots import Curve, bars, number, plot
from utils.diagnostics.report.samples import LARGE, picture
from utils.diagnostics.report.tables import card, table
from utils.runs.record import RunRecord

FOLDER = "evaluation"  # of a run: evaluation.json and nearest.png of evaluate.py, nearest.png of the training
MAX_BARS = 40
FIGURES = {
    "fd": "Fréchet distance",
    "kd": "kernel distance",
    "precision": "precision",
    "recall": "recall",
    "density": "density",
    "coverage": "coverage",
    "variance_ratio": "variance / real",
    "distance_ratio": "pairwise distance / real",
    "vendi": "Vendi score",
}


def evaluation_section(record: RunRecord) -> str:
    newest = newest_figures(record)
    if newest is None:
        return ""
    what, figures = newest
    sheet = picture(record.output_dir / FOLDER / "nearest.png", "samples beside their nearest training images", LARGE)
    reading = "Beside each figure what real images give against other real ones: that is as good as it gets."
    return (
        evaluation_plots(record, figures)
        + table(f"Figures ({what})", reading, ["", "samples", "real images"], evaluation_rows(figures))
        + card(
            "Closest pairs",
            "The samples that are nearest to a training image, and these images. Healthy: similar subjects, but other details.",
            sheet,
        )
    )


def newest_figures(record: RunRecord) -> tuple[str, dict] | None:
    """(what they are of, the figures as of `Evaluation.measure`): those of evaluate.py on this run or of the training itself,
    whichever are newer."""
    trained = next((entry for entry in reversed(record.history) if isinstance(entry.get("evaluation"), dict)), None)
    try:
        path = record.output_dir / FOLDER / "evaluation.json"
        if trained is None or path.stat().st_mtime > trained.get("time", 0):
            result = json.loads(path.read_text())["results"][0]
            sampler = f"{result['sampler']} {result['num_inference_steps']} steps"
            made = f"{result['images']:,} samples, {result['features']}, {sampler}"
            return f"evaluate.py: {made}", result["figures"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        pass  # never evaluated, or damaged
    if trained is None:
        return None
    figures = trained["evaluation"]
    return f"update {trained['step']:,}: {figures['images']:,} samples", figures


def evaluation_rows(figures: dict) -> list[list[str]]:
    """Figure, samples, real images beside other real ones."""
    floor = figures["floor"]
    rows = [[name, number(figures[key]), number(floor[key])] for key, name in FIGURES.items()]
    copies = figures.get("memorisation")
    if copies is not None:
        shares = (100 * copies["near_duplicates"], 100 * copies["near_duplicates_real"])
        rows.append(["near-duplicates of training images", *(f"{number(share)} %" for share in shares)])
    return rows


def evaluation_plots(record: RunRecord, figures: dict) -> str:
    """HTML: the curves of the evaluations in training, and bars of the shares of classes and modes."""
    evaluations = record.records("evaluation")

    def curves(kind: str) -> list[Curve]:
        tags = sorted({tag for entry in record.history for tag in entry if tag.startswith(f"eval/{kind}_")})
        drawn = [Curve(tag.removeprefix("eval/"), *record.series(tag), style) for style, tag in enumerate(tags[:4], start=1)]
        if drawn and evaluations:  # the floor of the training's own: `figures` may be of another extractor and number
            steps, floor = drawn[0].steps, evaluations[-1][1]["floor"][kind]
            drawn.append(Curve("real/real floor", [steps[0], steps[-1]], [floor] * 2, "limit"))
        return drawn

    distances = [
        plot(
            title,
            curves(kind),
            unit=unit,
            reading="Healthy: the distance falls towards that of real images among themselves. If it rises, the "
            "training went on too long, or something is wrong.",
        )
        for kind, title, unit in (
            ("fd", "Fréchet distance of the samples", "squared distance, EMA weights"),
            ("kd", "Kernel distance of the samples", "squared distance, EMA weights; can be below 0"),
        )
    ]
    shares = [
        plot(
            "Precision, recall and coverage",
            [
                Curve(name, *record.series(f"eval/{name}"), style)
                for style, name in enumerate(("precision", "recall", "coverage"), start=1)
            ],
            unit="share of the images",
            scale="zero",
            reading="Healthy: all three are near those of real images (about 0.95). If recall or coverage falls "
            "while precision rises, the samples lose variety.",
        )
    ]
    return columns(*distances) + columns(
        *shares, *(_coverage(kind, figures[kind]) for kind in ("classes", "modes") if kind in figures)
    )


def _coverage(kind: str, bins: dict) -> str:
    """Bars of how often each class or mode is generated, in % of its share of the real images; the rarest first where there are
    too many to show."""
    total, real_total = sum(bins["generated"]), sum(bins["real"])
    names = bins.get("names") or [f"mode {number}" for number in range(bins["number"])]
    ratios = [
        (name, 100 * (count / total) / (real / real_total))
        for name, count, real in zip(names, bins["generated"], bins["real"])
        if real
    ]
    left_out = len(ratios) - MAX_BARS
    if left_out > 0:
        ratios = sorted(ratios, key=lambda pair: pair[1])[:MAX_BARS]
    what = {"classes": "class, as a classifier of the labels sees them", "modes": "cluster of the real images"}[kind]
    reading = "Healthy: near 100 %, except for chance. 0: never generated." + (
        f" The {MAX_BARS} least covered; {left_out} more are not shown." if left_out > 0 else ""
    )
    return bars(
        {"classes": "Coverage per class", "modes": "Coverage per cluster"}[kind],
        [str(name) for name, _ in ratios],
        [ratio for _, ratio in ratios],
        unit=f"share of the samples in % of the real share, by {what}",
        reading=reading,
    )

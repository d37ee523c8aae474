"""What a report shows of evaluated samples: their figures, and which classes and modes of the data they cover."""

from utils.diagnostics.report.page import number
from utils.runs.record import RunRecord

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


def newest_figures(record: RunRecord) -> tuple[str, dict] | None:
    """(what they are of, the figures as of `Evaluation.measure`): those of evaluate.py or of the training itself, whichever are
    newer."""
    trained = next((entry for entry in reversed(record.history) if isinstance(entry.get("evaluation"), dict)), None)
    if record.evaluations and (trained is None or record.evaluations[-1]["time"] > trained.get("time", 0)):
        result = record.evaluations[-1]
        on, made = f" on {result['state']}" * bool(result.get("state")), f"{result['sampler']} {result['num_inference_steps']}"
        return f"evaluate.py{on}: {result['images']:,} samples, {result['features']}, {made} steps", result["figures"]
    return trained and (f"update {trained['step']:,}: {trained['evaluation']['images']:,} samples", trained["evaluation"])


def evaluation_rows(figures: dict) -> list[list[str]]:
    """Figure, samples, real images beside other real ones."""
    rows = [[name, number(figures[key]), number(figures["floor"][key])] for key, name in FIGURES.items() if key in figures]
    copies = figures.get("memorisation")
    if copies is not None:
        shares = (100 * copies["near_duplicates"], 100 * copies["near_duplicates_real"])
        rows.append(["near-duplicates of training images", *(f"{number(share)} %" for share in shares)])
    return rows


def covered(bins: dict) -> tuple[list[tuple[str, float]], int]:
    """(name of each class or mode, how often it is generated, in % of its share of the real images; how many are left out). The
    rarest first where there are too many to show."""
    total, real_total = sum(bins["generated"]), sum(bins["real"])
    names = bins.get("names") or [f"mode {number}" for number in range(bins["number"])]
    ratios = [
        (str(name), 100 * (count / total) / (real / real_total))
        for name, count, real in zip(names, bins["generated"], bins["real"])
        if real
    ]
    left_out = len(ratios) - MAX_BARS
    return (sorted(ratios, key=lambda pair: pair[1])[:MAX_BARS], left_out) if left_out > 0 else (ratios, 0)

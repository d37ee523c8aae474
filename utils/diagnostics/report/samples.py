"""The samples of a run in report.html: pictures of them over time, their figures beside the data's, and evaluations."""

import base64
import io
from pathlib import Path

from markupsafe import Markup, escape
from PIL import Image

from utils.diagnostics.report.page import cell, number
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
STRIP = 6  # earlier sample grids shown
# A PNG of more bytes becomes a JPEG of at most so many pixels a side: what a page shows on a dense screen.
LARGE, SMALL = (900_000, 1600), (150_000, 800)


def grids_of(record: RunRecord) -> dict[int, Path]:
    """Update -> the picture of its samples."""
    return {int(path.stem): path for path in (record.output_dir / "samples").glob("*.png") if path.stem.isdigit()}


def strip(grids: dict[int, Path]) -> list[tuple[int, str]]:
    """(update, image) of a few grids that are spread over the run; empty where there is but one."""
    steps = sorted(grids)
    chosen = [steps[i] for i in sorted({i * (len(steps) - 1) // (STRIP - 1) for i in range(STRIP)})] if len(steps) > 1 else []
    images = [(step, picture(grids[step], f"samples after {step:,} updates", SMALL)) for step in chosen]
    return [(step, image) for step, image in images if image]


def picture(path: Path, text: str, limits: tuple[int, int] = LARGE) -> Markup:
    """Returns the image as it is, or as a JPEG within `limits` (bytes, pixels); "" where the file is no image."""
    max_bytes, max_side = limits
    try:
        content, kind = path.read_bytes(), "png"
        with Image.open(io.BytesIO(content)) as image:
            size = image.size
            small = image.convert("RGB") if len(content) > max_bytes else None
    except (OSError, SyntaxError, Image.DecompressionBombError):  # Pillow reports a broken PNG chunk as a SyntaxError
        return Markup()
    if small is not None:
        kind = "jpeg"
        small.thumbnail((max_side, max_side))
        while True:
            buffer = io.BytesIO()
            small.save(buffer, "JPEG", quality=85)
            if len(buffer.getvalue()) <= max_bytes:
                break
            small = small.resize([max(1, side * 7 // 10) for side in small.size])
        content = buffer.getvalue()
    source = base64.b64encode(content).decode()
    alt, (width, height) = escape(text), size
    return Markup(f'<img alt="{alt}" width="{width}" height="{height}" src="data:image/{kind};base64,{source}">')


def sample_rows(newest: dict) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of the table of what was measured on the `newest` samples, beside the same of as many training images."""
    titles = {"raw": "raw", "ema": "EMA", "data": "training data"}
    kinds = [kind for kind in titles if isinstance(newest.get(kind), dict)]
    names = list(dict.fromkeys(name for kind in kinds for name in newest[kind]))
    rows = [[name.replace("_", " "), *(cell(newest[kind].get(name)) for kind in kinds)] for name in names]
    return ["", *(titles[kind] for kind in kinds)], rows


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

"""The samples of a run in report.html: grids over time, the way from noise to image, and their figures beside the data's."""

import base64
import io
import math
from html import escape
from pathlib import Path

from PIL import Image

from utils.diagnostics.report.curves import columns
from utils.diagnostics.report.tables import card, cell, table
from utils.runs.record import RunRecord

STRIP = 6  # earlier sample grids shown
# A PNG of more bytes becomes a JPEG of at most so many pixels a side: what a page shows on a dense screen.
LARGE, SMALL = (900_000, 1600), (150_000, 800)


def samples_section(record: RunRecord) -> str:
    folder = record.output_dir / "samples"
    grids = {int(path.stem): path for path in folder.glob("*.png") if path.stem.isdigit()}
    steps = sorted(grids)
    if not steps:
        return _sample_figures(record)
    newest, strip = steps[-1], ""
    chosen = [steps[i] for i in sorted({i * (len(steps) - 1) // (STRIP - 1) for i in range(STRIP)})]
    for step in chosen if len(chosen) > 1 else ():
        image = picture(grids[step], f"samples after {step:,} updates", SMALL)
        strip += f"<figure>{image}<figcaption>update {step:,}</figcaption></figure>" if image else ""
    path = folder / f"{grids[newest].stem}-path.png"
    sides = (
        "Left: raw weights. Right: EMA weights. Both start from the same noise. Healthy: they are "
        "similar, and the EMA is cleaner. If the raw side is good and the EMA side is gray or blurred, "
        "the average is too long."
    )
    if record.options.get("use_ema") is False:
        sides = "Both sides show the raw weights. Healthy: varied images, without grain and without color casts."
    return (
        card(f"After {newest:,} updates", sides, picture(grids[newest], f"samples after {newest:,} updates", LARGE))
        + card(
            "Over time",
            "The noise is the same every time. Healthy: first the shapes become clear, then the details. "
            "Each place keeps its image.",
            strip and f'<div class="strip">{strip}</div>',
        )
        + columns(
            card(
                "From noise to image",
                "The newest samples at different timesteps, from left to right. Healthy: large shapes at high "
                "timesteps, details at low ones. If the last image still has noise, the schedule or the "
                "prediction type does not fit.",
                picture(path, "from noise to image", LARGE) if path.exists() else "",
            ),
            _sample_figures(record),
        )
    )


def picture(path: Path, text: str, limits: tuple[int, int]) -> str:
    """Returns the image as it is, or as a JPEG within `limits` (bytes, pixels); "" where the file is no image."""
    max_bytes, max_side = limits
    try:
        content, kind = path.read_bytes(), "png"
        with Image.open(io.BytesIO(content)) as image:
            size = image.size
            small = image.convert("RGB") if len(content) > max_bytes else None
    except (OSError, SyntaxError, Image.DecompressionBombError):  # Pillow reports a broken PNG chunk as a SyntaxError
        return ""
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
    return f'<img alt="{escape(text)}" width="{size[0]}" height="{size[1]}" src="data:image/{kind};base64,{source}">'


def _sample_figures(record: RunRecord) -> str:
    """The table of what was measured on the newest samples, beside the same of the data."""
    records = record.records("samples")
    if not records:
        return ""
    step, newest = records[-1]
    checks = record.records("data")
    of_all = _like_samples(checks[-1][1]) if checks else {}
    newest = newest | {"data": (newest.get("data") or {}) | of_all or None}
    kinds = [kind for kind in ("raw", "ema", "data") if isinstance(newest.get(kind), dict)]
    names = list(dict.fromkeys(name for kind in kinds for name in newest[kind]))
    rows = [[name.replace("_", " "), *(cell(newest[kind].get(name)) for kind in kinds)] for name in names]
    titles = {"raw": "raw", "ema": "EMA", "data": "training data"}
    reading = "Healthy: close to the data in every row. If the spread of the samples is smaller, they have too little variety."
    return table(f"Figures of the samples after {step:,} updates", reading, ["", *(titles[kind] for kind in kinds)], rows)


def _like_samples(data: dict) -> dict:
    """Those figures of the data check that are also measured on samples, by their names there."""
    names = {"min": "min", "max": "max", "pair_distance": "pairwise_distance"}
    figures = {name: data[key] for name, key in names.items() if data.get(key) is not None}
    means, stds = data.get("mean"), data.get("std")  # per channel
    if isinstance(means, list) and isinstance(stds, list) and means:
        mean = sum(means) / len(means)
        spread = sum(std**2 + (m - mean) ** 2 for m, std in zip(means, stds)) / len(means)
        figures |= {"mean": mean, "std": math.sqrt(spread)}
    return figures

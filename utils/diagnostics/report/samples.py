"""The samples of a run in report.html: pictures of them over time, and their figures beside the data's."""

import base64
import io
from pathlib import Path

from markupsafe import Markup, escape
from PIL import Image

from utils.diagnostics.report.page import cell
from utils.runs.record import RunRecord

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

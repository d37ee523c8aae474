"""Cards, pictures and tables of a report, as HTML fragments; "" where there is nothing to show."""

import base64
import io
from html import escape
from pathlib import Path

from PIL import Image

from utils.plots import number, prose

# A PNG of more bytes becomes a JPEG of at most so many pixels a side: what a page shows on a dense screen.
LARGE, SMALL = (900_000, 1600), (150_000, 800)
LONG = 40  # entries of a dict, such as classes, beyond which they are not listed
SHORT_CELL = 10  # characters: such a cell of a table is not broken into lines


def card(title: str, reading: str, body: str) -> str:
    """A titled figure around `body`; "" without one."""
    caption = (f"<h3>{escape(title)}</h3>" if title else "") + (f"<p>{prose(reading)}</p>" if reading else "")
    return f'<figure class="plot"><figcaption>{caption}</figcaption>{body}</figure>' if body else ""


def picture(path: Path, text: str, limits: tuple[int, int]) -> str:
    """The image as it is, or as a JPEG within `limits` (bytes, pixels); "" where the file is no image."""
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


def cell(value) -> str:
    """A figure as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ": ".join(cell(item) for item in value.values())
    if not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def table(title: str, reading: str, head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    header = f"<thead><tr>{cells}</tr></thead>" if any(head) else ""
    body = "".join("<tr>" + "".join(map(_table_cell, row)) + "</tr>" for row in rows)
    return card(title, reading, f"<table>{header}<tbody>{body}</tbody></table>" if rows else "")


def _table_cell(text: str) -> str:
    return f"<td{' class=short' if len(text) <= SHORT_CELL else ''}>{prose(text)}</td>"


def flatten(values: dict, prefix: str = "") -> dict:
    """Nested dicts as one, keys joined by a slash; lists as text, of long ones the beginning, and of long dicts the length."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and len(value) > LONG:
            flat[f"{prefix}{key}"] = f"{len(value)} of them"
        elif isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            flat[f"{prefix}{key}"] = ", ".join(cell(item) for item in value[:6]) + (" ..." if len(value) > 6 else "")
        else:
            flat[f"{prefix}{key}"] = value
    return flat

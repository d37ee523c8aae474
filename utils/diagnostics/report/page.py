"""HTML pages of plots and tables that need no network: their templates, and figures as text."""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from utils.core.files import whole_file

HERE = Path(__file__).parent
LONG = 40  # entries of a dict, such as classes, beyond which they are not listed


def write_page(path: Path, *, title: str, header: str, sections: Sequence[tuple[str, str]], source: str) -> None:
    """Writes a page of `sections` (title, HTML; empty ones are left out) under `header` (HTML) to `path`, complete or not at
    all.

    `source` is what it was made from. Raises OSError where the disk does not take it.
    """
    page = TEMPLATES.get_template("page.html").render(
        title=title,
        header=Markup(header),
        sections=[(name, Markup(body)) for name, body in sections if body],
        source=source,
        now=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        style=Markup((HERE / "report.css").read_text()),
        script=Markup((HERE / "report.js").read_text()),
    )
    with whole_file(Path(path), shared=True) as draft:
        draft.write_text(page, encoding="utf-8", errors="replace")


def part(name: str, **values: Any) -> Markup:
    """Returns what a macro of parts.html makes of the values."""
    return Markup(getattr(TEMPLATES.get_template("parts.html").module, name)(**values).strip())


def prose(text: str) -> Markup:
    """Escapes text and sets flags as code, so that no line breaks within them."""
    return Markup(re.sub(r"--[a-z]\w*", r"<code>\g<0></code>", str(escape(" ".join(str(text).split())))))


def number(value: float, digits: int = 3) -> str:
    """Returns a number for people: 0.0208, 2e-5, 1.5k, 35.7M."""
    if not math.isfinite(value):
        return str(value)
    value = float(f"{value:.{digits}g}")
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit <= abs(value) < 1000 * limit:
            return f"{value / limit:.{digits}g}{suffix}"
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.{digits}g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def cell(value: object) -> str:
    """Returns a figure as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ": ".join(cell(item) for item in value.values())
    if not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


# What figures of a probe are called.
PROBE_WORDS = {
    "errors_as/": "error if the output is read as ",
    "timestep_response": "change of the output for another timestep",
    "batch_response": "change of an output when its image is alone in the batch",
}


def figure_name(key: str) -> str:
    """Returns what a figure of a probe or a dataset is called, of which `flatten` gives the key."""
    for name, words in PROBE_WORDS.items():
        key = key.replace(name, words)
    return key.replace("_", " ").replace("v prediction", "v_prediction")


def by_timestep(values: object) -> bool:
    """Returns whether a value of a probe is a dict of numbers whose keys are timesteps."""
    if not isinstance(values, dict) or len(values) < 2:
        return False
    return all(str(key).isdigit() and isinstance(value, (int, float)) for key, value in values.items())


def flatten(values: dict, prefix: str = "") -> dict:
    """Nested dicts as one, keys joined by a slash; what is known by timestep, and lists, as text; nothing of what is empty."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, (dict, list)) and not value:
            continue
        if by_timestep(value):
            flat[f"{prefix}{key}"] = ", ".join(f"{t}: {cell(figure)}" for t, figure in value.items())
        elif isinstance(value, dict) and len(value) > LONG:
            flat[f"{prefix}{key}"] = f"{len(value)} of them"
        elif isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            flat[f"{prefix}{key}"] = ", ".join(cell(item) for item in value[:6]) + (" ..." if len(value) > 6 else "")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
TEMPLATES.filters |= {"prose": prose, "number": number, "cell": cell, "anchor": lambda title: title.lower().replace(" ", "-")}

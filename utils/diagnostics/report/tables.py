"""Tables and cards of report.html, and figures as text."""

from html import escape

from utils.diagnostics.report.curves import by_timestep
from utils.diagnostics.report.plots import number, prose

LONG = 40  # entries of a dict, such as classes, beyond which they are not listed
SHORT_CELL = 10  # characters: such a cell of a table is not broken into lines


def card(title: str, reading: str, body: str) -> str:
    """Returns a titled figure around `body`; "" without one."""
    caption = (f"<h3>{escape(title)}</h3>" if title else "") + (f"<p>{prose(reading)}</p>" if reading else "")
    return f'<figure class="plot"><figcaption>{caption}</figcaption>{body}</figure>' if body else ""


def cell(value: object) -> str:
    """Returns a figure as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ": ".join(cell(item) for item in value.values())
    if not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def table(title: str, reading: str, head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    header = f"<thead><tr>{cells}</tr></thead>" if any(head) else ""
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return card(title, reading, f"<table>{header}<tbody>{body}</tbody></table>" if rows else "")


def _cell(text: str) -> str:
    return f"<td{' class=short' if len(text) <= SHORT_CELL else ''}>{prose(text)}</td>"


# What figures of a probe are called.
PROBE_WORDS = {
    "errors_as/": "error if the output is read as ",
    "timestep_response": "change of the output for another timestep",
    "batch_response": "change of an output when its image is alone in the batch",
    "training_error": "error in training mode, dropout included",
    "ideal_denoiser_gap_held_out": "error minus that of the ideal denoiser, held-out images (below 0: better than it)",
    "ideal_denoiser_gap": "squared distance to the ideal denoiser",
}


def figure_name(key: str) -> str:
    """Returns what a figure of a probe or a dataset is called, of which `flatten` gives the key."""
    for name, words in PROBE_WORDS.items():
        key = key.replace(name, words)
    return key.replace("_", " ").replace("v prediction", "v_prediction")


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

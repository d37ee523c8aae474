"""An HTML page of plots and tables that needs no network."""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from utils.core.files import whole_file


def write_page(path: Path, *, title: str, header: str, sections: Sequence[tuple[str, str]], source: str) -> None:
    """Writes a page of `sections` (title, HTML; empty ones are left out) under `header` (HTML) to `path`, complete or not at
    all.

    `source` is what it was made from. Raises OSError where the disk does not take it.
    """
    here = Path(__file__).parent
    sections = [(name, body) for name, body in sections if body]
    links = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name, _ in sections)
    # The policy makes the promise of the first lines one that the browser keeps.
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{(here / "report.css").read_text()}</style>
</head>
<body>
{header}
<nav>{links}</nav>
<main>
{"".join(f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{body}</section>' for name, body in sections)}
</main>
<footer>Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from {escape(source)}.</footer>
<script>
{(here / "report.js").read_text()}</script>
</body>
</html>
"""
    with whole_file(Path(path), shared=True) as draft:
        draft.write_text(page, encoding="utf-8", errors="replace")


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


# ---- title

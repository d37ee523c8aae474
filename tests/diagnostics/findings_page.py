"""The tables of docs/findings.md: `python tests/diagnostics/findings_page.py` writes them anew."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "findings.md"


def tables() -> list[str]:
    """Markdown: of all findings, in the order in which the doctor ranks them, and of what is compared of the options."""
    from utils.diagnostics.finding import CATALOG
    from utils.diagnostics.rules.options import ROWS

    findings = [[f"`{code}`", entry["title"], entry["cause"], "; ".join(entry["fixes"])] for code, entry in CATALOG.items()]
    options = []
    for row in ROWS:
        texts = CATALOG[row.code][row.figure.__name__]
        info = f"{row.info:g}" if row.info < row.warning else ""
        compared = f"{texts['compared']} (`{row.code}`)"
        options.append([compared, info, f"{row.warning:g}", texts["reason"], texts.get("source", "")])
    return [
        _table(["code", "what it says", "likely cause", "what to try"], findings),
        _table(["compared", "for information", "warning", "why", "source"], options),
    ]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [" | ".join(cells) for cells in (head, *rows)]
    return "\n".join([f"| {lines[0]} |", "|---" * len(head) + "|", *(f"| {line} |" for line in lines[1:])]) + "\n"


def main() -> None:
    page = PAGE.read_text()
    for old, new in zip(re.findall(r"(?:^\|.*\n)+", page, re.M), tables(), strict=True):
        page = page.replace(old, new)
    PAGE.write_text(page)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()

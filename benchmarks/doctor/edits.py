"""Edits of source text that match by tokens: comments, white space and line breaks are left out of the comparison."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

TOKEN = re.compile(
    r"""
    (?P<skipped> \s+ | \\\n | \#[^\n]* )
    | (?:[rbfuRBFU]{1,2})? (?: \"\"\".*?\"\"\" | '''.*?''' | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
    | \w+ | .
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Edit:
    """`new` takes the place of `old`, which occurs once in `file`; both as if their first line stood at the left edge."""

    file: str
    old: str
    new: str


@lru_cache(maxsize=256)
def tokens(text: str) -> list[tuple[str, int, int]]:
    """(token, start, end) of names, numbers, whole strings, and operators of one character each."""
    return [(match[0], *match.span()) for match in TOKEN.finditer(text) if match["skipped"] is None]


def place(text: str, edit: Edit) -> tuple[int, int]:
    """Start and end of what `edit.old` matches. Raises ValueError where that is not one place."""
    of_text, wanted = tokens(text), [token for token, *_ in tokens(edit.old)]
    words, size = [token for token, *_ in of_text], len(wanted)
    starts = [i for i, word in enumerate(words) if wanted and word == wanted[0] and words[i : i + size] == wanted]
    if len(starts) != 1:
        raise ValueError(f"{edit.file} has {len(starts)} times, not once: {edit.old.strip()!r}")
    return of_text[starts[0]][1], of_text[starts[0] + size - 1][2]


def edited(text: str, edits: Iterable[Edit]) -> str:
    """`text` with all edits of one file. Raises ValueError as `place` does, where two edits overlap, and where the place of a
    further line of `new` could not be told."""
    after = len(text)
    for start, end, edit in sorted(((*place(text, edit), edit) for edit in edits), key=lambda found: -found[0]):
        if end > after:
            raise ValueError(f"{edit.file}: two edits of one place: {edit.old.strip()!r}")
        line = text[text.rfind("\n", 0, start) + 1 : start]
        indent = line[: len(line) - len(line.lstrip())]
        lowest = min(
            (len(one) - len(one.lstrip()) for one in text[start:end].split("\n")[1:] if one.strip()), default=len(indent)
        )
        if lowest < len(indent) and "\n" in edit.new.strip():
            raise ValueError(f"{edit.file}: begin further up, `old` ends less indented than it begins: {edit.old.strip()!r}")
        first, *others = edit.new.strip("\n").split("\n")
        new = "\n".join([first.lstrip(), *(indent + other if other.strip() else "" for other in others)])
        text, after = text[:start] + new + text[end:], start
    return text


def changed_files(edits: Iterable[Edit], folder: Path) -> dict[str, str]:
    """The new text of each file that is edited. Raises ValueError, OSError, and SyntaxError where it would be no Python."""
    by_file: dict[str, list[Edit]] = {}
    for edit in edits:
        by_file.setdefault(edit.file, []).append(edit)
    texts = {}
    for file, of_file in by_file.items():
        before = (folder / file).read_text()
        texts[file] = edited(before, of_file)
        compile(texts[file], file, "exec")
        if texts[file] == before:
            raise ValueError(f"{file} stays as it is")
    return texts

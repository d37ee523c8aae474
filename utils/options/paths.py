"""Relative paths among the options of a run: they count from the folder in which the run was started, wherever that is now."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

WORKING_DIR = "working_dir"  # in options.json: where the run was started last; absent in those of earlier versions


def located(record: Mapping[str, Any], folder: Path, names: Collection[str]) -> dict[str, Any]:
    """Returns the options of an options.json in `folder`, with the relative paths that lead elsewhere from here made absolute.

    Args:
        record: the content of options.json.
        names: options whose values may be paths. What is not there, such as a name on the Hub, stays as it is.
    """
    options = dict(record["options"])
    for name in names:
        value: Any = options.get(name)
        for start in _starts(record, folder) if isinstance(value, str) and not os.path.isabs(value) else ():
            place = os.path.normpath(start / value)
            if os.path.exists(place):
                options[name] = value if same_place(value, place) else place
                break
    return options


def same_place(value: Any, other: Any) -> bool:
    """Returns whether two values are the same path, or lead to the same file or folder from here."""
    if value == other:
        return True
    both = isinstance(value, str) and isinstance(other, str)
    return both and os.path.exists(value) and os.path.exists(other) and os.path.samefile(value, other)


def _starts(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """The folders in which the run may have been started, the likeliest first: where it lies now if it was moved together with
    the run, and where it was."""
    start, output_dir = record.get(WORKING_DIR), record["options"].get("output_dir")
    if not isinstance(start, str) or not isinstance(output_dir, str):
        return []
    way = os.path.relpath(start, os.path.realpath(os.path.join(start, output_dir)))
    return [Path(os.path.normpath(folder.resolve() / way)), Path(start)]

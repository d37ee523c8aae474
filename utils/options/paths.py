"""Paths among the options of a run: relative ones count from where the run was started, and all may have moved with the run."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

DIGITS = "digits"  # the dataset that scikit-learn carries
WORKING_DIR = "working_dir"  # in options.json: where the run was started last; absent in those of earlier versions


def located(record: Mapping[str, Any], folder: Path, names: Collection[str]) -> dict[str, Any]:
    """Returns the options of an options.json in `folder`, with the paths that do not lead there from here made absolute.

    Args:
        record: the content of options.json.
        names: options whose values may be paths. What is not there, such as a name on the Hub, stays as it is.
    """
    options = dict(record["options"])
    for name in names:
        value: Any = options.get(name)
        if name == "dataset_name" and value == DIGITS:  # a folder may be called so, but it is not meant
            continue
        if not isinstance(value, str) or (os.path.isabs(value) and os.path.exists(value)):
            continue
        place = next((place for place in _places(value, record, folder) if os.path.exists(place)), value)
        options[name] = value if same_place(value, place) else place
    return options


def same_place(value: Any, other: Any) -> bool:
    """Returns whether two values are the same path, or lead to the same file or folder from here."""
    if value == other:
        return True
    both = isinstance(value, str) and isinstance(other, str)
    return both and os.path.exists(value) and os.path.exists(other) and os.path.samefile(value, other)


def _places(value: str, record: Mapping[str, Any], folder: Path) -> list[str]:
    """Where the path may be, the likeliest first: moved together with the run, if that lies elsewhere now, or as it was."""
    start, output_dir = record.get(WORKING_DIR), record["options"].get("output_dir")
    if not isinstance(start, str) or not isinstance(output_dir, str):
        return []
    was, run = os.path.normpath(os.path.join(start, value)), os.path.realpath(os.path.join(start, output_dir))
    now = str(folder.resolve())
    moved = [os.path.normpath(os.path.join(now, os.path.relpath(was, run)))] if Path(now).name == Path(run).name else []
    return [*moved, was]

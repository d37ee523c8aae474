"""What a run records of itself, beside the trackers: history.jsonl, one JSON object per line, from which the doctor reads."""

import contextlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from utils.core.files import append, whole_file

HISTORY = "history.jsonl"
MOST = 20_000  # lines of a kind that are read
_LAST = 1000  # of them the newest, with none between left out
_SHORTEST = 20  # bytes of a line
_STEP = re.compile(rb'\{"step": (\d+)[,}]')


class History:
    """Appends to `output_dir/history.jsonl`; on the main process only (`enabled`). What a full disk does not
    take follows with a later line; it ends no run."""

    def __init__(self, output_dir: Path, *, first_step: int, enabled: bool = True, name: str = HISTORY):
        """Keeps what was recorded up to `first_step` updates, and drops what a killed run recorded beyond; 0 keeps nothing."""
        self.path, self.enabled = output_dir / name, enabled
        self.records: list[dict] = []
        self._unwritten = b""
        if not enabled:
            return
        if any(not _remains(line, first_step) for line in _lines(self.path)):
            with whole_file(self.path) as draft, open(draft, "wb") as file:
                file.writelines(line for line in _lines(self.path) if _remains(line, first_step))
        self.records = read_history(self.path)

    def add(self, step: int, values: dict) -> None:
        """Records `values` (JSON types) of the moment when `step` updates were finished."""
        if not self.enabled:
            return
        self.records.append({"step": step, "time": time.time(), **values})
        self._unwritten += json.dumps(to_json(self.records[-1])).encode() + b"\n"
        with contextlib.suppress(OSError):  # the checkpoint that the same disk does not take is reported
            append(self.path, self._unwritten)
            self._unwritten = b""


def read_history(path: Path, most: int | None = MOST) -> list[dict]:
    """The records of a history file, in order; none where it is absent. Damaged lines are left out, and a last one that a kill
    cut short. Of a kind with more than `most` lines the newest are read, and of the others one in so many."""
    return read_and_count(path, most)[0]


def read_and_count(path: Path, most: int | None = MOST) -> tuple[list[dict], int]:
    """`read_history`, and how many lines of those that were read are damaged."""
    counts: Counter[bytes] = Counter()
    if most is not None and path.exists() and path.stat().st_size > _SHORTEST * most:
        counts.update(map(_kind, _lines(path)))
    met: Counter[bytes] = Counter()
    records, damaged = [], 0
    for line in _lines(path):
        if most is not None and counts:
            kind = _kind(line)
            met[kind] += 1
            older = counts[kind] - _LAST
            if counts[kind] > most and met[kind] <= older and met[kind] % -(-older // (most - _LAST)):
                continue
        record = _record(line)
        if record is not None:
            records.append(record)
        else:
            damaged += line.endswith(b"\n")
    return records, damaged


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from file
    except FileNotFoundError:
        return


def _record(line: bytes) -> dict | None:
    try:
        record = _from_json(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _remains(line: bytes, first_step: int) -> bool:
    """Whether a line is whole, and of what was done when `first_step` updates were finished."""
    found = _STEP.match(line)
    return line.endswith(b"\n") and found is not None and int(found[1]) <= first_step > 0


def _kind(line: bytes) -> bytes:
    """What a line is of: its third word."""
    start = line.find(b",", 20) + 3
    return line[start : line.find(b'"', start)]


def to_json(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes "nan", "inf" or "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value

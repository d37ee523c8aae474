"""What a run records of itself, beside the trackers: history.jsonl, one JSON object per line, from which the doctor reads."""

import json
import math
import time
from pathlib import Path
from typing import Any

from utils.core.files import whole_file

HISTORY = "history.jsonl"


class History:
    """Appends to `output_dir/history.jsonl`; on the main process only (`enabled`). A full disk loses lines, not the run."""

    def __init__(self, output_dir: Path, *, first_step: int, enabled: bool = True, name: str = HISTORY):
        """Keeps what was recorded up to `first_step` finished updates and drops what a killed run recorded beyond them. A run
        that begins anew (0) keeps nothing."""
        self.path, self.enabled = output_dir / name, enabled
        self.records: list[dict] = []
        if not enabled:
            return
        everything = read_history(self.path)
        self.records = [record for record in everything if record["step"] <= first_step > 0]
        cut_short = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        if len(self.records) < len(everything) or cut_short:
            with whole_file(self.path) as draft:
                draft.write_text("".join(_line(record) for record in self.records))

    def add(self, step: int, values: dict) -> None:
        """Records `values` (JSON types) of the moment when `step` updates were finished."""
        if not self.enabled:
            return
        self.records.append({"step": step, "time": time.time(), **values})
        try:
            with open(self.path, "a") as file:
                file.write(_line(self.records[-1]))
        except OSError:
            pass  # the checkpoint that the same disk does not take is reported


def read_history(path: Path) -> list[dict]:
    """The records of a history file, in order; none where it is absent. A last line that a kill cut short is left out."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            record = _from_json(json.loads(line))
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def _line(record: dict) -> str:
    return json.dumps(to_json(record)) + "\n"


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

"""A run as its folder records it: what the doctor and the report look at, whether the run goes on, ended or crashed."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.core.errors import UserError
from utils.runs.evaluations import read_evaluations
from utils.runs.folder import EXIT_STATUS
from utils.runs.history import HISTORY, read_and_count


@dataclass
class RunRecord:
    """Flags, facts and figures of one run; `history` as in utils/runs/history.py."""

    output_dir: Path
    options: dict = field(default_factory=dict)  # every flag
    resolved: dict = field(default_factory=dict)  # what followed from them, such as max_train_steps
    history: list[dict] = field(default_factory=list)
    command: str = ""  # that of the newest start
    starts: list[str] = field(default_factory=list)  # when it was started and resumed, ISO 8601, oldest first
    git_commit: str | None = None
    versions: dict = field(default_factory=dict)
    exit_status: int | None = None  # None while the run goes on, and after a crash
    evaluations: list[dict] = field(default_factory=list)  # by evaluate.py, see utils/runs/evaluations.py
    unreadable: int = 0  # lines of the history that are damaged and left out
    _derived: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def read(cls, output_dir: Path) -> "RunRecord":
        """Raises UserError where there is no run."""
        try:
            recorded = json.loads((output_dir / "options.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{output_dir} is not the folder of a run: it has no options.json\ncheck the path") from None
        except ValueError as error:
            raise UserError(f"{output_dir}/options.json is damaged: {error}\nrestore this file from a copy") from None
        history, damaged = read_and_count(output_dir / HISTORY)
        return cls(
            output_dir,
            recorded.get("options", {}),
            recorded.get("resolved", {}),
            history,
            command=recorded.get("command") or "",
            starts=[s["started"] for s in (*recorded.get("earlier_starts", []), recorded) if s.get("started")],
            git_commit=recorded.get("git_commit"),
            versions=recorded.get("versions") or {},
            exit_status=_exit_status(output_dir),
            evaluations=read_evaluations(output_dir),
            unreadable=damaged,
        )

    def series(self, tag: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a logged scalar, oldest first; empty where it was never recorded."""
        points = [(record["step"], record[tag]) for record in self.history if isinstance(record.get(tag), (int, float))]
        return [step for step, _ in points], [value for _, value in points]

    def finite(self, tag: str) -> tuple[list[int], list[float]]:
        """`series` without what is not finite."""
        kept = [(step, value) for step, value in zip(*self.series(tag)) if math.isfinite(value)]
        return [step for step, _ in kept], [value for _, value in kept]

    @property
    def alphas_cumprod(self) -> list[float] | None:
        """Of the schedule that is trained, at evenly spread timesteps; None where it was not recorded."""
        schedules = self.records("schedule")
        values = (schedules[-1][1].get("alphas_cumprod") if schedules else None) or []
        return values if values and all(0.0 <= value <= 1.0 for value in values) else None

    def records(self, key: str) -> list[tuple[int, dict]]:
        """(step, record) of one of the kinds that are dicts: "layers", "data", "probe", "samples"; oldest first."""
        return [(record["step"], record[key]) for record in self.history if isinstance(record.get(key), dict)]

    def known(self, key: str) -> list[tuple[int, dict]]:
        """The `finite_part` of `records`: no rule can judge by the rest."""
        return [(step, finite_part(record)) for step, record in self.records(key)]

    def derived(self, key: str, function: Callable[[dict], float | None]) -> list[tuple[int, float | None]]:
        """(step, `function` of the record) of each of `records(key)`, each computed once: a history is only added to."""
        records = self.records(key)
        known = self._derived.setdefault((key, function), [])
        known += [function(record) for _, record in records[len(known) :]]
        return [(step, value) for (step, _), value in zip(records, known)]


def finite_part(value: Any) -> Any:
    """Returns a record without what is not finite in it and in its parts."""
    if isinstance(value, dict):
        return {k: finite_part(v) for k, v in value.items() if not (isinstance(v, float) and not math.isfinite(v))}
    return value


def _exit_status(output_dir: Path) -> int | None:
    try:
        return int((output_dir / EXIT_STATUS).read_text())
    except (FileNotFoundError, ValueError):
        return None

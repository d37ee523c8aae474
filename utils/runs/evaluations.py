"""What evaluate.py measured of a run: a file for each evaluation, so that several may be written at once and none is lost."""

import hashlib
import json
import time
from pathlib import Path

from utils.core.files import write_json

RESULTS = Path("evaluation") / "results"  # in the folder of a run; each file is one that evaluate.py --compare reads
# Of a result, what does not make it another evaluation: what came out, how things are called, and which state it was.
_NOT_SETTINGS = {"figures", "name", "reference", "validation_split", "made_by", "state", "step", "time"}


def run_of(pipeline: str) -> tuple[Path, str] | None:
    """Returns (folder of the run, name of the checkpoint or "") of a `pipeline` that is one of these; None for others."""
    path = Path(pipeline)
    candidates = [(path, ""), *([(path.parent, path.name)] if path.name.startswith("checkpoint-") else [])]
    return next(((run, state) for run, state in candidates if (run / "options.json").is_file()), None)


def settings_of(result: dict) -> str:
    """Returns what two results must have in common to be the same evaluation, of two states of a run perhaps."""
    return json.dumps({key: value for key, value in result.items() if key not in _NOT_SETTINGS}, sort_keys=True)


def write_evaluation(run: Path, state: str, step: int | None, result: dict) -> None:
    """Puts a result of evaluate.py into the folder of the run, in the place of one of the same evaluation and `state`: name of
    a checkpoint, "" for the exported pipeline. `step`: its update, where that is known. Raises OSError."""
    about = {"state": state, "step": step, "time": time.time()}
    name = hashlib.sha256(f"{state} {settings_of(result)}".encode()).hexdigest()[:16]
    folder = run / RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", {"results": [result | about]}, shared=True)


def read_evaluations(run: Path) -> list[dict]:
    """Returns the results that `write_evaluation` wrote, the oldest first. Damaged files are left out."""
    found = []
    for path in (run / RESULTS).glob("[!.]*.json"):
        try:
            [result] = json.loads(path.read_text())["results"]
            if isinstance(result["figures"], dict) and isinstance(result["time"], float):
                found.append(result)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda result: result["time"])

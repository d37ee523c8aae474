"""The ledger of a run, ledger.jsonl: for many updates one line with hashes of what went in and of what it left."""

from pathlib import Path

from utils.runs.history import read_history

LEDGER = "ledger.jsonl"
VERSION = 3  # of the hashes, in each line: raise it when the same tensors give others
# What a line holds, in the order in which one follows from the other, and what it is called.
OF_THE_UPDATE = {"samples": "the sample numbers", "batch": "the images, noise and noise levels", "loss": "the loss"}
OF_THE_STATE = {"optimizer": "the optimizer's state", "weights": "the weights", "ema": "the EMA"}
HASHES = OF_THE_UPDATE | OF_THE_STATE


def read_ledger(run: Path) -> dict[int, dict[str, str]]:
    """Returns hashes by update and by the names of `HASHES`; of an update that was made again, those of the last time. Lines
    of another `VERSION` are left out; empty where the run has no ledger."""
    lines = [line for line in read_history(run / LEDGER, most=None) if line.get("version") == VERSION]
    return {line["step"]: {name: line[name] for name in HASHES if isinstance(line.get(name), str)} for line in lines}

"""What the doctor says of a finding, whatever the run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    title: str
    cause: str
    fixes: tuple[str, ...]
    in_fp16: tuple[str, str] | None = None  # one more cause and fix, where the run is in fp16
    stage: str = ""  # of a training step

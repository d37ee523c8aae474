"""What a law finds: a code and figures, no sentence. The sentences are in findings.toml."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Found:
    """`figures` fill the places of the sentences of that code; `update` is the one at which it was first seen."""

    code: str  # a table of findings.toml
    update: int
    figures: dict[str, Any] = field(default_factory=dict, hash=False)

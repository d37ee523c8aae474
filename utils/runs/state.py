"""The state of a run: what it cannot compute from its options, kept in each checkpoint as JSON."""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

STATE = "state.json"


@dataclass
class TrainState:
    """What a run cannot compute from its options. `step` counts finished updates and is the only clock."""

    step: int = 0
    skipped_updates: int = 0  # of those, turned down because a gradient was not finite
    scaler_skips: int = 0  # of those, by the GradScaler while it looked for its scale
    bad_in_a_row: int = 0  # the newest updates, as many as were skipped without a good one between
    grad_norm_mean: float | None = None  # of --adaptive_clipping
    best_step: int | None = None
    best_value: float | None = None
    best_metric: str = "validation loss"  # what it is a value of
    validations_without_improvement: int = 0
    copying_since: int | None = None  # of the evaluations, the first since which more samples than real images are copies
    evaluated_step: int | None = None  # the newest update whose samples were evaluated
    metrics: dict = field(default_factory=dict)  # the last figures, for the model card
    fingerprint: str = ""  # of the run, from the options that it was started with
    max_train_steps: int = 0  # length that the learning rate was laid out for
    options: dict = field(default_factory=dict)  # the flags that shape the result, compared on resume

    def __post_init__(self):
        if not self.fingerprint:
            self.fingerprint = hashlib.sha256(json.dumps(self.options, sort_keys=True).encode()).hexdigest()[:16]

    def record(self, name: str, value: float, *, decides: bool) -> bool:
        """Notes a figure, the lower the better. True where it `decides`, and is the best; NaN and copies never are."""
        self.metrics[name] = value
        if not decides:
            return False
        if self.best_metric != name:  # another --best_metric than before a resume: nothing to compare with
            self.best_metric, self.best_value = name, None
        improved = self.copying_since is None and value < (math.inf if self.best_value is None else self.best_value)
        if improved:
            self.best_step, self.best_value, self.validations_without_improvement = self.step, value, 0
        else:
            self.validations_without_improvement += 1
        return improved

    def stopped_early(self, patience: int) -> bool:
        """Returns whether `patience` validations in a row (0 = never) brought no gain."""
        return 0 < patience <= self.validations_without_improvement


def read_state(path: Path) -> TrainState:
    """The run's state as stored in the checkpoint `path`. Raises OSError, ValueError or TypeError when it is not one."""
    return TrainState(**json.loads((path / STATE).read_text()))

"""A run whose training step nobody measures: with --doctor off, or in a checkout without `steady_doctor`."""

from collections.abc import Sequence
from typing import Any


class Unwatched:
    """What a run tells its doctor, which does nothing with it; see `steady_doctor.declared_run`."""

    looks = False  # at the update under way; then the host waits for the device
    counters: Sequence[object] = ()

    def begin(self, update: int, reported: bool, loss_scale: Any) -> None: ...

    def add(self, samples: Any, images: Any, noise: Any, levels: Any, labels: Any, numbers: Any = None) -> None: ...

    def stepped(self, norm: Any, finite: Any, limit_taken: Any, turned_down: Any) -> None: ...

    def count(self, norm: Any) -> None: ...

    def end(self, made: int, between: bool, reported: bool) -> None: ...

    def forget_update(self) -> None: ...

    def measure_eagerly(self) -> None: ...

    def check(self, what: str) -> None:
        """On the main process: "sampler" before the first pictures, or "exported", "saved", "snapshots" after those were."""

    def close(self) -> None: ...

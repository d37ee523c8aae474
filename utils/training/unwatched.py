"""A run whose training step nobody measures: with --doctor off, or in a checkout without `steady_doctor`."""

from typing import Any

import torch

from utils.optim.clipping import Gradients


class Unwatched:
    """What a run tells its doctor, which does nothing with it. The methods are to be called on every process, in this order."""

    looks = False  # at the update under way; then the host waits for the device

    def counters(self) -> list[object]:
        """What gathers something of each update, also when it is made again."""
        return []

    def begin(self, step: int, reported: bool) -> None:
        """Before the update that follows `step` finished ones, which is `reported` or not."""

    def begin_micro_step(self, batch: dict[str, Any]) -> None:
        """The loader's batch."""

    def add(self, drawn: dict[str, torch.Tensor]) -> None:
        """What a micro step is of, before the network's pass."""

    def end_step(self, gradients: Gradients) -> None:
        """When the weights are those of the next update; `gradients`: those of this one, before they were clipped."""

    def count(self, gradients: Gradients) -> None:
        """After `end_step`, and when an update is made again."""

    def end_update(self, between: bool, reported: bool) -> None:
        """After all of an update; `between`: whether anything is made before the next one that may touch the weights."""

    def forget_update(self) -> None:
        """The newest update erred, and was replaced: what was seen of its weights and averages is no longer true."""

    def measure_eagerly(self) -> None:
        """From here on the network runs eagerly in each update, as compiling was given up."""

    def check_sampler(self) -> None:
        """Before the first pictures, on the main process; so are the next three, after something was written."""

    def check_exported(self) -> None: ...

    def check_saved(self) -> None: ...

    def check_snapshots(self) -> None: ...

    def close(self) -> None:
        """At the end of the run, where no update follows."""

"""All that was measured of a script so far. Laws read it, and nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from steady_doctor.identify.step import Pass, Step
from steady_doctor.identify.update import Update
from steady_doctor.record.copies import Copies
from steady_doctor.record.history import History


@dataclass
class Seen:
    steps: list[Step] = field(default_factory=list)  # the recorded updates, the oldest first
    updates: int = 0  # all that were made
    ended: bool = False  # the script came to its own end: what has not happened by now will not

    history: History = field(default_factory=History)  # of each update, recorded or not
    copies: Copies | None = None  # of the weights before training

    def recorded(self, first: int = 2) -> list[Update]:
        """From this update on."""
        return [step.update for step in self.steps if step.update.number >= first]

    def passes(self) -> Iterator[tuple[int, Pass]]:
        """Number of the update, and each of its backward passes."""
        for step in self.steps:
            for one in step.passes:
                yield step.update.number, one

    def mixed(self) -> list[tuple[int, Pass]]:
        """Those in which the network got a mixture of noise and something."""
        return [(update, one) for update, one in self.passes() if one.mixture is not None]

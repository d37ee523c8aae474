"""All that was measured of a script so far. Laws read it, and nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from steady_doctor.declare.declaration import Declaration
from steady_doctor.identify.levels import Levels
from steady_doctor.identify.step import Pass, Step
from steady_doctor.identify.update import Update
from steady_doctor.record.calls import SamplerStep
from steady_doctor.record.copies import Copies
from steady_doctor.record.followed import Followed
from steady_doctor.record.history import History


@dataclass
class Seen:
    steps: list[Step] = field(default_factory=list)  # the recorded updates, the oldest first
    updates: int = 0  # all that were made
    network: str = ""  # the class of what is trained; empty where it is not known
    optimizer: str = ""  # and that of the optimizer
    is_later: bool = False  # another denoiser was trained before
    by_hand: bool = False  # by the script, without an optimizer of torch
    begins: dict[int, list[tuple[float, ...]]] = field(default_factory=dict)  # of each dataset: how each pass over it begins
    dataset_rows: dict[int, int] = field(default_factory=dict)  # of each dataset
    data_changed: bool = False  # images that a dataset keeps are others than when it was read a second time
    not_loaded: list[tuple[str, int, str, str]] = field(default_factory=list)  # class, stored weights, a key of each side
    ranks: dict[int, list[dict[str, str]]] = field(default_factory=dict)  # of updates: digests of what each process had
    options: dict[str, Any] = field(default_factory=dict)  # that the user gave the script, by name
    asked_numbers: set[float] = field(default_factory=set)  # among them, and on the command line
    asked_words: str = ""  # all that, and the command line, in small letters and digits alone
    predictions: set[str] = field(default_factory=set)  # prediction types of the script's noise schedulers (diffusers')
    alphas_cumprod: list[Tensor] = field(default_factory=list)  # their different tables, [T] each, in float64
    ended: bool = False  # the script came to its own end: what has not happened by now will not

    declared: Declaration | None = None  # of a script that says what it is to do; the next two are of such a one alone
    levels: Levels | None = None  # of all samples
    followed: Followed | None = None

    sampled: list[SamplerStep] = field(default_factory=list)  # some steps of the script's own sampler
    history: History = field(default_factory=History)  # of each update, recorded or not
    copies: Copies | None = None  # of the weights before training

    def recorded(self, first: int = 2) -> list[Update]:
        """From this update on."""
        return [step.update for step in self.steps if step.update.number >= first]

    def passes(self) -> Iterator[tuple[int, Pass]]:
        """Number of the update, and each of its backward passes."""
        for step in self.steps:
            for one in step.micro_steps:
                yield step.update.number, one

    def mixed(self) -> list[tuple[int, Pass]]:
        """Those in which the network got a mixture of noise and something."""
        return [(update, one) for update, one in self.passes() if one.mixture is not None]

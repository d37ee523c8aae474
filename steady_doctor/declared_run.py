"""A training that declares what it does, from start to end: which updates are recorded, what is told of them, and found."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from steady_doctor.data.judge import DataJudge
from steady_doctor.declare.declaration import Declaration
from steady_doctor.declare.processes import AdaptiveLimit
from steady_doctor.declared_doctor import DeclaredDoctor
from steady_doctor.found import Found
from steady_doctor.words import finding


def audited_updates(count: int) -> set[int]:
    """Numbers of the updates of a run that are looked at: 1, 2, 3, 5, 8, 13, 20, 34, 60, 89, 100 and so on. They have no rhythm
    for a fault to share, but every second one from 20 on is round: so is what comes once in so many updates."""
    numbers = [1, 2]
    while numbers[-1] <= count:
        numbers.append(sum(numbers[-2:]))
    rounded = {
        int(float(f"{number:.0e}")) if number > 20 and place % 2 == 0 else number for place, number in enumerate(numbers)
    }
    return {number for number in rounded if number <= count}


@dataclass(frozen=True)
class Trained:
    """See `DeclaredDoctor`."""

    optimizer: Optimizer
    network: nn.Module
    averaged: nn.Module
    averages: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Plan:
    """Of the updates. `limit`: what the gradient's norm is clipped to; 0: not at all; or the rule that the limit follows."""

    first: int  # number of the next update
    last: int
    limit: float | AdaptiveLimit


class DeclaredRun:
    """The methods are to be called on every process, in this order. An error of the doctor's is told, and reaches nobody.

    Args:
        tell: takes the number of updates made, and what is said of them: findings as JSON, and the stages that were measured.
        gather: gives the lists of all processes as one, to all of them.
    """

    looks = False  # at the update under way; then the host waits for the device

    def __init__(
        self,
        declaration: Declaration,
        trained: Trained,
        plan: Plan,
        data: DataJudge,
        tell: Callable[[int, dict[str, Any]], None],
        gather: Callable[[list], list],
    ):
        self._doctor = DeclaredDoctor(declaration, **vars(trained), stopped=self._say_failed)
        self._session = self._doctor.session
        self._session.resting = True  # until the first update begins
        self._hooks = self._doctor.install()
        self._made, self._data, self._tell, self._gather = plan.first - 1, data, tell, gather
        self._due = audited_updates(plan.last) | {plan.first}
        self._limit = plan.limit
        self._others: list[Found] = []  # of files, of data and of other processes
        self._told: set[str] = set()  # codes
        # Samples of each micro step, their images, and what the network is told of these.
        self._batches: list[tuple[Tensor, Tensor, Tensor | None]] = []
        # What a repeated update changes.
        self.counters: Sequence[object] = [plan.limit] if isinstance(plan.limit, AdaptiveLimit) else []

    # ---- an update

    def begin(self, update: int, eager: bool, loss_scale: Callable[[], float]) -> None:
        """Before the update of this number. `eager`: whether no compiled network runs in it; only such updates are looked at.
        `loss_scale`: what the loss is multiplied by; the host may wait."""
        due = {number for number in self._due if number <= update}
        self.looks = eager and bool(due)
        if self.looks:
            self._due -= due
        self._made = update - 1
        self._session.resting = False
        self._session.begin(update, self.looks, loss_scale() if self.looks else 1.0)

    def add(
        self,
        samples: Tensor,
        images: Tensor,
        noise: Tensor,
        levels: Tensor,
        labels: Tensor | None,
        numbers: Tensor | None = None,
    ) -> None:
        """What a micro step is of, before the network's pass: `samples` by their numbers in the run. `numbers` [B, N] that the
        network is told of each image, see `Declaration`; an image of which they are all 0 is to be as in its file."""
        self._session.tell(images, noise, levels, labels, numbers)
        self._data.begin_micro_step(samples)
        self._find(lambda: self._data.add(images, labels, numbers))
        if self.looks:
            self._batches.append((samples, images, numbers))

    def stepped(self, norm: Tensor, finite: Tensor, limit_taken: Tensor | float, turned_down: Callable[[], int]) -> None:
        """When the weights are those of the next update. `norm`: the gradient's, before it was clipped to `limit_taken`;
        `finite`: whether a step was made; `turned_down`: updates so far without one; the host may wait."""
        self._finite = finite
        if self.looks:
            limit = self._limit.limit() if isinstance(self._limit, AdaptiveLimit) else self._limit
            self._session.stepped(limit, norm, turned_down(), limit_taken)
        else:
            self._session.stepped()

    def count(self, norm: Tensor) -> None:
        """After `stepped`, and when an update is made again."""
        if isinstance(self._limit, AdaptiveLimit):
            self._limit.count(norm)

    def end(self, made: int, between: bool, reported: bool) -> None:
        """After all of an update, with the number of updates `made`; `between`: whether anything is made before the next one
        that may touch the weights."""
        self._made = made
        self._session.end(made, self._finite)
        if between or self.looks:
            self._session.leave()
        if self.looks:
            parts = list(zip(*self._batches))
            self._find(lambda: self._data.found(made - 1, *parts))
            self._batches = []
            self._add(self._gather(self._of_this_process()))
        if reported and isinstance(self._limit, AdaptiveLimit):
            self._limit.mean()  # the host waits for the device now anyway
        if self.looks or reported:
            self._judge()
        self._session.resting = True  # until the next one begins: what is made again, and between updates, is no part of it
        self.looks = False

    def forget_update(self) -> None:
        """The newest update erred, and was replaced: what was seen and found in it alone is not true."""
        before = self._codes()
        self._doctor.forget()
        if gone := before - self._codes():
            self._told -= gone
            self._tell(self._made, {"found": [], "withdrawn": sorted(gone)})

    def _codes(self) -> set[str]:
        """Of all that is found now; none where a law fails, which must not end the training."""
        try:
            return {one.code for one in [*self._doctor.findings(), *self._others]}
        except Exception as error:
            self._say_failed(error)
            return set()

    def close(self) -> None:
        """At the end of the run, where no update follows."""
        self._session.close()
        self._judge()
        self._hooks.close()

    # ---- what was found

    def look(self, look: Callable[[], Iterable[Found]]) -> None:
        """Adds what is found in files, on the main process."""
        self._find(look)
        self._judge()

    def norm_mean_deviates(self, file: str, stored: float | None) -> Iterator[Found]:
        """The mean of the gradient's norms that an adaptive limit follows, beside the one that a checkpoint has `stored`."""
        mean = self._limit.mean() if isinstance(self._limit, AdaptiveLimit) else None
        if mean is not None and (stored is None or not abs(stored - mean) <= 1e-3 * mean):
            yield Found("state-norm-mean", self._made, {"file": file, "stored": stored, "own": mean})

    def _judge(self) -> None:
        """Tells what was found, where there is something new, or the update was looked at."""
        try:
            found = [*self._doctor.findings(), *self._others]
            said = {one.code: finding(one).to_json() for one in found}
        except Exception as error:  # a law that fails must not end the training
            self._say_failed(error)
            return
        if self.looks or said.keys() - self._told:
            self._told |= said.keys()
            measured = ["data"] * (self._data.compared > 0) + self._doctor.measured()
            self._tell(self._made, {"found": list(said.values()), "measured": measured})

    def _of_this_process(self) -> list[Found]:
        """For the main one, which has its own."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            return []
        self._find(self._doctor.findings)
        return self._others

    def _add(self, found: list[Found]) -> None:
        known = {one.code for one in self._others}
        self._others += [one for one in found if one.code not in known]

    def _say_failed(self, error: BaseException) -> None:
        self._tell(self._made, {"found": [], "failed": f"{type(error).__name__}: {' '.join(str(error).split())}"})

    def _find(self, look: Callable[[], Iterable[Found]]) -> None:
        """A look that fails must not end the training."""
        try:
            self._add(list(look()))
        except Exception as error:
            self._say_failed(error)

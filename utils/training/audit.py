"""The doctor in the loop: which updates it records, what it is told of them, and where its findings go."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from steady_doctor.declare.processes import AdaptiveLimit
from steady_doctor.declared_doctor import DeclaredDoctor
from steady_doctor.found import Found
from steady_doctor.words import finding
from utils.core.distributed import objects_from_all
from utils.optim.clipping import Gradients
from utils.optim.power_ema import PowerEMA
from utils.training.data_audit import data_judge
from utils.training.declared import declared_by, process_of
from utils.training.file_audit import FileAudit
from utils.training.run import Run
from utils.training.unwatched import Unwatched


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


class StepAudit(Unwatched):
    """Measures the training step; see `Unwatched` for when each method is called."""

    def __init__(self, run: Run, eager: bool, turned_down: Callable[[], int]):
        """`eager`: whether the network runs eagerly in each update. `turned_down`: how many updates the run has turned down so
        far; the host may wait."""
        self._run, self._eager, self._turned_down = run, eager, turned_down
        objective, options = run.objective, run.options
        process = process_of(options, run.facts)
        self._doctor = DeclaredDoctor(
            declared_by(options, run.facts, process, run.resumed_from),
            getattr(run.accelerator._optimizers[0], "optimizer", run.accelerator._optimizers[0]),
            objective.network,
            objective.exported,
            self._averages(),
            self._say_failed,
        )
        self._session = self._doctor.session
        self._session.resting = True  # until the first update begins
        self._hooks: ExitStack = self._doctor.install()
        self._numbers = audited_updates(run.length.max_train_steps) | {run.state.step + 1}
        self._limit = AdaptiveLimit(run.state.grad_norm_mean) if options.adaptive_clipping else None
        self._stored_mean = run.state.grad_norm_mean
        self._others: list[Found] = []  # of files and of other processes
        self._told: set[str] = set()  # codes
        self._files, self._data = FileAudit(run, process), data_judge(run)
        self._batches: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # samples and images of each micro step
        if run.accelerator.is_main_process:
            self._look(self._files.started)
            self._look(self._files.network)

    def _averages(self) -> dict[str, dict[str, torch.Tensor]]:
        ema = self._run.ema
        if ema is None:
            return {}
        several = ema.averages if isinstance(ema, PowerEMA) else {None: ema}
        return {"EMA" if width is None else f"EMA {width}": average.shadow for width, average in several.items()}

    def counters(self) -> list[object]:
        """What gathers something of each update, also when it is made again."""
        return [] if self._limit is None else [self._limit]

    # ---- an update

    def begin(self, step: int, reported: bool) -> None:
        """Before the update that follows `step` finished ones. Compiled networks are looked at in updates that are `reported`,
        which run eagerly anyway, so that a look changes no number."""
        self.looks = step + 1 in self._numbers if self._eager else reported and self._is_due(step)
        scaler = self._run.accelerator.scaler
        self._session.resting = False
        self.check_norm_mean()
        self._session.begin(step + 1, self.looks, 1.0 if scaler is None or not self.looks else scaler.get_scale())

    def _is_due(self, step: int) -> bool:
        """The first report from each of the chosen updates on."""
        due = {number for number in self._numbers if number <= step + 1}
        self._numbers -= due
        return bool(due)

    def begin_micro_step(self, batch: dict[str, Any]) -> None:
        self._data.begin_micro_step(batch["sample_numbers"])
        if self.looks:
            self._batches.append((batch["sample_numbers"], None))

    def add(self, drawn: dict[str, torch.Tensor]) -> None:
        """What a micro step is of, before the network's pass."""
        images, level, labels = drawn["clean_images"], drawn[self._run.objective.level], drawn.get("labels")
        self._session.tell(images, drawn["noise"], level, labels)
        self._find(lambda: self._data.add(images, labels))
        if self.looks:
            self._batches[-1] = self._batches[-1][0], images

    def end_step(self, gradients: Gradients) -> None:
        """When the weights are those of the next update; `gradients`: those of this one, before they were clipped."""
        self._finite = gradients.finite
        limit: float | None = self._run.options.max_grad_norm
        if self._limit is not None:
            limit = self._limit.limit() if self.looks else None
        facts = (limit, gradients.norm, self._turned_down(), self._run.clipping.value) if self.looks else ()
        self._session.stepped(*facts)

    def check_norm_mean(self) -> None:
        """Of the gradient, that adaptive clipping follows: what a checkpoint has just stored of it."""
        stored, before = self._run.state.grad_norm_mean, self._stored_mean
        if self._limit is not None and stored != before:
            self._stored_mean, mean, step = stored, self._limit.mean(), self._run.state.step
            if stored is None or mean is None or not abs(stored - mean) <= 1e-3 * mean:
                self.add_found([Found("state-norm-mean", step, {"file": f"checkpoint-{step}", "stored": stored, "own": mean})])

    def count(self, gradients: Gradients) -> None:
        """After `end_step`, and when an update is made again."""
        if self._limit is not None:
            self._limit.count(gradients.norm)

    def end_update(self, between: bool, reported: bool) -> None:
        """After all of an update; `between`: whether anything is made before the next one that may touch the weights."""
        self._session.end(self._run.state.step, self._finite)
        if between or self.looks:
            self._session.leave()
        if self.looks:
            numbers, images = zip(*self._batches)
            self._find(lambda: self._data.found(self._run.state.step - 1, numbers, images))
            self._batches = []
            self._gather()
        if reported and self._limit is not None:
            self._limit.mean()  # the host waits for the device now anyway
        if self.looks or reported:
            self.judge()
        self._session.resting = True  # until the next one begins: what is made again, and between updates, is no part of it
        self.looks = False

    def forget_update(self) -> None:
        """The newest update erred, and was replaced: what was seen and found in it alone is not true."""
        before = self._codes()
        self._doctor.forget()
        if gone := before - self._codes():
            self._told -= gone
            self._run.doctor.record(self._run.state.step, {"audit": {"found": [], "withdrawn": sorted(gone)}})

    def _codes(self) -> set[str]:
        """Of all that is found now; none where a law fails, which must not end the training."""
        try:
            return {one.code for one in [*self._doctor.findings(), *self._others]}
        except Exception as error:
            self._say_failed(error)
            return set()

    def measure_eagerly(self) -> None:
        """From here on the network runs eagerly in each update, as compiling was given up."""
        self._eager = True

    # ---- what was found

    def judge(self) -> None:
        """Records what was found, where there is something new, or the update was looked at."""
        try:
            found = [*self._doctor.findings(), *self._others]
            said = {one.code: finding(one).to_json() for one in found}
        except Exception as error:  # a law that fails must not end the training
            self._say_failed(error)
            return
        if self.looks or said.keys() - self._told:
            self._told |= said.keys()
            measured = ["data"] * (self._data.compared > 0) + self._doctor.measured()
            self._run.doctor.record(self._run.state.step, {"audit": {"found": list(said.values()), "measured": measured}})

    def _gather(self) -> None:
        """What other processes found in this update, on the main one."""
        accelerator = self._run.accelerator
        if accelerator.num_processes > 1:
            mine: list[Found] = []
            if not accelerator.is_main_process:
                self._find(self._doctor.findings)
                mine = self._others
            self.add_found([one for part in objects_from_all([mine]) for one in part])

    def add_found(self, found: list[Found]) -> None:
        """Of files, or of other processes."""
        known = {one.code for one in self._others}
        self._others += [one for one in found if one.code not in known]

    def _say_failed(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self._run.doctor.record(self._run.state.step, {"audit": {"found": [], "failed": text}})

    def close(self) -> None:
        """At the end of the run, where no update follows."""
        self._session.close()
        self.judge()
        self._hooks.close()

    # ---- files

    def check_sampler(self) -> None:
        self._look(self._files.sampler)

    def check_exported(self) -> None:
        self._look(self._files.exported)

    def check_saved(self) -> None:
        self._look(self._files.saved)

    def check_snapshots(self) -> None:
        self._look(self._files.snapshots)

    def _look(self, look: Callable[[], Iterable[Found]]) -> None:
        self._find(look)
        self.judge()

    def _find(self, look: Callable[[], Iterable[Found]]) -> None:
        """A look that fails must not end the training."""
        try:
            self.add_found(list(look()))
        except Exception as error:
            self._say_failed(error)

"""What a run can do without: a validation, pictures, an evaluation, a pipeline. Whatever fails in it costs itself alone."""

import contextlib
import copy
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache

from utils.core.distributed import needs_all
from utils.core.errors import FailedElsewhere, LostProcess, UserError, one_line
from utils.core.files import write_text
from utils.core.waiting import Meeting
from utils.runs.state import TrainState

FOLDER = "errors"  # in the folder of a run, with tracebacks


class Outcome(NamedTuple):
    """What a process tells the others at the end of an attempt."""

    problem: str | None  # None: it succeeded here
    file: str  # with the traceback, in FOLDER; "" for none
    first_hand: bool  # whether it failed here, and not because another process had failed
    collectives: int  # calls so far in the group in which the processes train


class Attempts:
    """Its methods are to be called on every process.

    The processes agree on the outcome over a group of their own. What fails inside `together` or `on_main_process` fails on all
    of them at the same place. If something fails elsewhere, the others may wait in a collective call that this process never
    makes, at most for `collective_timeout`; or they have made one that it has not. Then the run ends, for the processes would
    never meet again.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        output_dir: Path,
        state: TrainState,
        print_line: Callable[[str], None],
        collective_timeout: float = 600.0,
    ):
        """`print_line`: prints a line for the user."""
        self._accelerator, self._folder, self._state, self._print_line = accelerator, output_dir / FOLDER, state, print_line
        timeout = timedelta(seconds=collective_timeout)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if accelerator.num_processes > 1 else None
        self._failed: Counter[str] = Counter()  # how often what was left out
        self._said: set[str] = set()  # on the main process
        self._written: set[str] = set()  # here

    def make(self, what: str, action: Callable[..., object], *arguments: Any) -> bool:
        """Calls `action`; returns whether it succeeded on every process. If not, training goes on as if it had not been called:
        random numbers and the state are those before it. Why is said once for each cause, with the traceback in a file where it
        is no mistake that a user can mend. Signals, and what ends a process, pass through.

        Raises RuntimeError or LostProcess where the processes cannot go on together.
        """
        before = _Before(self._state, self._accelerator.device)
        problem, file, first_hand = None, "", True
        needs_all(what)
        try:
            action(*arguments)
        except LostProcess:  # there is nobody to agree with
            raise
        except Exception as error:
            problem, file = self._described(what, error)
            first_hand = not isinstance(error, FailedElsewhere)
        outcomes = self._exchanged(what, Outcome(problem, file, first_hand, self._collectives()))
        failures = [outcome for outcome in outcomes if outcome.problem is not None]
        if not failures:
            return True
        before.restore(self._state)
        clear_device_cache(garbage_collection=True)  # what the failed action held, for the updates to come
        self._failed[what] += 1
        failure = next((outcome for outcome in failures if outcome.first_hand), failures[0])
        if _is_new(f"{what}: {failure.problem}", self._said):
            where = f" (see {FOLDER}/{failure.file})" if failure.file else ""
            self._print_line(f"left out: {what} after {self._state.step} updates: {failure.problem}{where}")
        return False

    def summary(self) -> str | None:
        """One line about what was left out more often than was said; None where there is nothing to add."""
        if not any(times > 1 for times in self._failed.values()):
            return None
        counts = (f"{what} {times} time{'s' * (times > 1)}" for what, times in self._failed.items())
        return f"left out in all: {', '.join(counts)}"

    def _described(self, what: str, error: Exception) -> tuple[str, str]:
        """(what to say of it, the file with its traceback), which is written at once: nothing that follows may lose it."""
        if isinstance(error, FailedElsewhere) or (isinstance(error, UserError) and error.__cause__ is None):
            return str(error), ""
        rank, step = self._accelerator.process_index, self._state.step
        problem = str(error) if isinstance(error, UserError) else one_line(error)
        problem = f"rank {rank}: {problem}" if self._accelerator.num_processes > 1 else problem
        if not _is_new(f"{what}: {problem}", self._written):
            return problem, ""
        path = self._folder / f"{what.removeprefix('the ').replace(' ', '-')}-{step}-rank{rank}.txt"
        text = f"{what} after {step} updates, on rank {rank}\n\n" + "".join(traceback.format_exception(error))
        try:
            path.parent.mkdir(exist_ok=True)
            write_text(path, text)
        except OSError:  # a full disk
            return problem, ""
        return problem, path.name

    def _collectives(self) -> int:
        if self._group is None:
            return 0
        with contextlib.suppress(RuntimeError):  # not every backend counts them
            group: Any = dist.distributed_c10d._get_default_group()
            return group._get_sequence_number_for_group()
        return 0

    def _exchanged(self, what: str, mine: Outcome) -> list[Outcome]:
        """Those of all processes."""
        if self._group is None:
            return [mine]
        outcomes: list[Any] = [None] * self._accelerator.num_processes
        problem = mine.problem or "another process did not come to its end"
        try:
            with Meeting():
                dist.all_gather_object(outcomes, mine, group=self._group)
        except Exception as lost:
            raise RuntimeError(f"{what} after {self._state.step} updates: {problem}") from lost
        if len({outcome.collectives for outcome in outcomes}) > 1:
            told = next((outcome.problem for outcome in outcomes if outcome.problem is not None), problem)
            raise RuntimeError(
                f"{what} after {self._state.step} updates failed where other processes waited, so they cannot go on: {told}"
            )
        return outcomes


def _is_new(text: str, known: set[str]) -> bool:
    """Whether nothing alike is among the `known`, which it then is: the numbers in a message differ from time to time."""
    before = len(known)
    known.add(re.sub(r"\d+", "#", text))
    return len(known) > before


class _Before:
    """Random numbers and state of a run at some moment."""

    def __init__(self, state: TrainState, device: torch.device):
        self._device, self._state = device, copy.deepcopy(vars(state))
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self, state: TrainState) -> None:
        vars(state).update(self._state)
        python, of_numpy, of_torch = self._random
        random.setstate(python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)

"""Hangs: a thread of each rank sees when its main thread no longer moves on, says where it is, and ends the process."""

import contextlib
import faulthandler
import math
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from utils.core.entrypoint import HANG, first_to_say, leave_now
from utils.core.waiting import Meeting

LEAST, FACTOR = 30.0, 10.0  # seconds; times the longest update so far
LEAST_STREAMING = 300.0  # seconds, in which the reader of a shard has given up
PERIOD = 1.0  # seconds between two looks
GRACE = 4.0  # seconds in which the others, which began to wait a little later, write their stacks
PLACES = {
    "compute": "computing",
    "data": "waiting for data",
    "collectives": "waiting in a collective",
    "between": "at work between two updates",
}
_UNUSUAL = 2  # updates that may take any time: they compile, try kernels and start workers


class Place(NamedTuple):
    """Where the main thread of a rank is."""

    kind: str  # of PLACES
    step: int  # the update under way
    changes: int  # of place so far
    meetings: int = 0  # between two updates so far, where it is in one


class HangWatch:
    """Of runs with several ranks; else its methods do nothing. `now` is told by the main thread where it is.

    The ranks ask each other nothing. One that hangs while it computes or waits for data says so itself and ends, and with it
    the others, which wait for it in a collective. Before a collective gives up, those that wait say so.
    """

    def __init__(
        self,
        output_dir: Path,
        rank: int,
        num_processes: int,
        hang_timeout: float | None,
        collective_timeout: float,
        least: float = LEAST,
    ):
        """`hang_timeout`: in seconds; None: learned from the updates, and not below `least`, but so far below
        `collective_timeout` that the stacks are written before the collectives give up; 0: nothing is watched."""
        self._folder, self._timeout, self._least = output_dir / "hang", hang_timeout, least
        self._rank, self._most = rank, collective_timeout
        self._last = max(collective_timeout - 2 * (GRACE + PERIOD), 0.8 * collective_timeout)
        self._place, self._step, self._began, self._longest, self._updates = Place("between", 0, 0), 0, 0.0, 0.0, 0
        self._closed = threading.Event()
        if num_processes > 1 and hang_timeout != 0:
            threading.Thread(target=self._watch, name="hang watch", daemon=True).start()

    def begin(self, step: int) -> None:
        """Before the update that follows `step` finished ones."""
        self._step, self._began = step + 1, time.monotonic()

    def now(self, kind: str | None) -> None:
        """From here on the main thread is there: one of PLACES; None: between two updates."""
        self._place = Place(kind or "between", self._step, self._place.changes + 1)

    def end(self) -> None:
        self._updates += 1
        if self._updates > _UNUSUAL:
            self._longest = max(self._longest, time.monotonic() - self._began)

    def close(self) -> None:
        self._closed.set()

    def _where(self) -> Place:
        if Meeting.active and self._place.kind == "between":
            return self._place._replace(kind="collectives", meetings=Meeting.number)
        return self._place

    def _limits(self, place: Place) -> tuple[float, float]:
        """Seconds after which the stacks are written, and after which the process ends."""
        if place.kind == "between":
            return math.inf, math.inf
        if place.meetings:
            return self._last, self._last
        limit = self._limit()
        return (min(limit, self._last), self._last) if place.kind == "collectives" else (limit, limit + GRACE)

    def _limit(self) -> float:
        """Seconds, in an update; inf while updates may take any time."""
        if self._updates < _UNUSUAL + (self._timeout is None):
            return math.inf
        if self._timeout is not None:
            return self._timeout
        in_time = self._most - self._longest - 2 * (GRACE + PERIOD)  # a collective may have begun an update ago
        return min(max(self._least, FACTOR * self._longest), max(in_time, self._most / 2, 2 * self._longest))

    def _watch(self) -> None:
        place, seconds, written, before = self._place, 0.0, False, time.monotonic()
        while not self._closed.wait(PERIOD):
            here, now = self._where(), time.monotonic()
            # A process that was suspended, and so are all of a job, has not waited meanwhile.
            seconds = seconds + min(now - before, 2 * PERIOD) if place == here else 0.0
            written, place, before = written and place == here, here, now
            write, leave = self._limits(here)
            if seconds > write and not written:
                written = True
                self._write_stacks()
            if seconds > leave:
                self._leave(here, seconds)

    def _leave(self, place: Place, seconds: float) -> None:
        """Whatever fails."""
        try:
            if first_to_say(HANG) or place.kind != "collectives":
                when = "after" if self._place.kind == "between" else "in"
                said = f"rank {self._rank} has been {PLACES[place.kind]} for {seconds:.0f} s, {when} update {place.step}"
                print(f"\nerror: {HANG}: {said}. The Python stacks are in {self._folder}", file=sys.stderr, flush=True)
        finally:
            leave_now(1)

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / f"rank-{self._rank}.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)

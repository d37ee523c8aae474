"""Ranks that are slow or hang: how each spends its time, and a thread that sees when they no longer meet, and ends them."""

import contextlib
import faulthandler
import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.autograd import Variable

from utils.core.distributed import from_all
from utils.core.entrypoint import leave_now, within
from utils.core.waiting import Meeting

KINDS = ("compute", "data", "collectives")
RING = 256  # marks at most; what lies half as many marks back is over: a GPU's queue holds about 1,000 kernels


class RankTimes:
    """Of runs with several ranks; else it does nothing. On an accelerator by events, so that the host waits for none."""

    def __init__(self, accelerator: Accelerator, tells: Callable[[str | None], None]):
        """`tells` gets each kind when its time begins."""
        self._accelerator, self._tells, self._on = accelerator, tells, accelerator.num_processes > 1
        self._marks: list[tuple[str | None, Any]] = []
        self._own = dict.fromkeys(KINDS, 0.0)  # seconds between earlier marks
        self._unused: list[Any] = []  # events of earlier marks

    def now(self, kind: str | None) -> None:
        """From here on time is of that one of KINDS, or of none of them (what is made between updates)."""
        if self._on:
            if len(self._marks) == RING:
                self._add_up(RING // 2)
            self._marks.append((kind, self._moment()))
            self._tells(kind)

    def before_backward(self, loss: Tensor, now: Callable[[str | None], None]) -> None:
        """Has `now` told of the end of this rank's own backward pass, from which on it waits: DDP awaits what it sent."""
        if self._on:
            # Callbacks run once the pass is over, in their order; DDP adds the one that waits for its collectives after this.
            queue = Variable._execution_engine.queue_callback
            loss.register_hook(lambda gradient: queue(lambda: now("collectives")))

    def wait_for_device(self) -> None:
        """Until all is done that was begun before the newest mark, the collectives of an update among it."""
        if self._marks and not isinstance(self._marks[-1][1], float):
            self._marks[-1][1].synchronize()

    def _moment(self) -> Any:
        if self._accelerator.device.type == "cpu":
            return time.perf_counter()
        event = self._unused.pop() if self._unused else torch.Event(self._accelerator.device.type, enable_timing=True)
        event.record()
        return event

    def _add_up(self, last: int) -> None:
        """The times between the oldest marks, up to number `last`, once the device has come there."""
        marks, self._marks = self._marks[: last + 1], self._marks[last:]
        if marks and not isinstance(marks[-1][1], float):
            marks[-1][1].synchronize()
            self._unused += [event for _, event in marks[:-1]]
        for (kind, start), (_, end) in itertools.pairwise(marks):
            if kind is not None:
                self._own[kind] += end - start if isinstance(start, float) else start.elapsed_time(end) / 1000.0

    def report(self) -> "Shares | None":
        """Those since the last report, once the device is done with it; None in one process. Every rank must call it."""
        if not self._on:
            return None
        self._add_up(len(self._marks) - 1)
        self._unused += [event for _, event in self._marks if not isinstance(event, float)]
        self._marks, own, self._own = [], self._own, dict.fromkeys(KINDS, 0.0)
        rows = torch.tensor([list(own.values())], dtype=torch.float32).to(self._accelerator.device)
        return Shares(*zip(*from_all(self._accelerator, rows)))


class Shares(NamedTuple):
    """Seconds of each rank."""

    compute: tuple[float, ...]
    data: tuple[float, ...]
    collectives: tuple[float, ...]

    def figures(self) -> dict[str, float]:
        """The rank that takes longest for its own part (computing, data), and its time over the median of the others."""
        own = [compute + data for compute, data in zip(self.compute, self.data)]
        slowest = max(range(len(own)), key=own.__getitem__)
        usual = statistics.median(own[:slowest] + own[slowest + 1 :])
        return {"perf/slowest_rank": slowest, "perf/rank_spread": own[slowest] / max(usual, 1e-9)}


LEAST, FACTOR = 30.0, 10.0  # seconds; times the longest update so far
LEAST_STREAMING = 300.0  # seconds, in which the reader of a shard has given up
PERIOD = 1.0  # seconds, in which each rank tells the others where it is
SILENT = 4  # periods without news
PLACES = {
    "compute": "computing",
    "data": "waiting for data",
    "collectives": "waiting in a collective",
    "between": "at work between two updates",
}


class Place(NamedTuple):
    """Where the main thread of a rank is."""

    kind: str  # of PLACES
    step: int  # the update under way
    changes: int  # of place so far
    meetings: int = 0  # between two updates so far, where it is in one


class News(NamedTuple):
    """What a rank tells the others, as JSON."""

    tick: int  # grows with each one
    kind: str  # of PLACES
    step: int
    seconds: float  # since the main thread moved on


_UNUSUAL = 2  # updates that may take any time: they compile, try kernels and start workers


class HangWatch:
    """Of runs with several ranks; else its methods do nothing. `now` is told by the main thread where it is."""

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
        self._rank, self._ranks, self._most = rank, range(num_processes), collective_timeout
        self._last = max(collective_timeout - 2 * (SILENT + 1) * PERIOD, 0.8 * collective_timeout)  # in time to be heard
        self._place, self._step, self._began, self._longest, self._updates = Place("between", 0, 0), 0, 0.0, 0.0, 0
        self._waited = self._place, 0.0  # where the main thread was at the newest tick, and the seconds since it moved there
        self._silent = 0  # ticks since the store answered
        self._first: News | None = None  # the newest of rank 0, which may work alone between two updates
        self._closed = threading.Event()
        self._on = num_processes > 1 and hang_timeout != 0
        if self._on:
            self._store = _connected_anew(dist.distributed_c10d._get_default_store())
            for task in (self._count, self._exchange):
                threading.Thread(target=task, name="hang watch", daemon=True).start()

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

    # ---- in a thread that waits for nobody

    def _where(self) -> Place:
        if Meeting.active and self._place.kind == "between":
            return self._place._replace(kind="collectives", meetings=Meeting.number)
        return self._place

    def _limit_here(self) -> float:
        """Seconds that the main thread may be where it is. Before a collective call gives up, it is said who is missing."""
        place, _ = self._waited
        if place.kind == "between":
            return math.inf
        if place.kind == "collectives":
            return self._last if place.meetings else min(self._limit(), self._last)
        return self._limit()

    def _limit(self) -> float:
        """Seconds, in an update; inf while updates may take any time."""
        if self._updates < _UNUSUAL + (self._timeout is None):
            return math.inf
        if self._timeout is not None:
            return self._timeout
        in_time = self._most - self._longest - 2 * (SILENT + 1) * PERIOD  # a collective may have begun an update ago
        return min(max(self._least, FACTOR * self._longest), max(in_time, self._most / 2, 2 * self._longest))

    def _count(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(PERIOD):
            (place, seconds), here, now = self._waited, self._where(), time.monotonic()
            # A process that was suspended, and so are all of a job, has not waited meanwhile.
            self._waited = here, seconds + min(now - before, 2 * PERIOD) if place == here else 0.0
            before, self._silent = now, self._silent + 1
            works = self._first is not None and self._first.kind == "between"
            limit = max(self._limit_here(), self._most) if works else self._limit_here()
            if self._silent > max(SILENT, limit / PERIOD) and self._waited[1] > limit:
                self._end_alone()

    def _end_alone(self) -> None:
        """The ranks cannot talk: their store lies in a process that hangs, or that no network leads to."""
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        silent = "the launcher of the first host, through which the ranks talk," if agents else "rank 0"
        own = where(self._rank, self._own_news(0))
        said = f"hang: {silent} does not answer; {own}. Nothing is known of the other ranks. {stacks_in(self._folder)}"
        self._leave(said, tells=False)

    # ---- in a thread that asks the store, which may take for ever

    def _exchange(self) -> None:
        tick, asked, lost = 0, 0, False
        earlier: dict[int, News] = {}  # what the ranks told when this one first had waited for too long
        while not self._closed.wait(PERIOD):
            tick += 1
            try:
                self._store = _connected_anew(self._store) if lost else self._store
                lost = False
                self._store.set(f"hang/{self._rank}", json.dumps(self._own_news(tick)))
                if self._store.check(["hang/verdict"]):
                    self._leave()
                self._first = self._news([0]).get(0)
                if self._waited[1] <= self._limit_here():
                    earlier = {}
                elif not earlier:
                    earlier, asked = self._news(self._ranks), tick
                elif tick >= asked + SILENT:
                    self._judge(earlier, self._news(self._ranks))
                    earlier = {}
                self._silent = 0
            except RuntimeError:  # the connection is lost, or the store is gone: then so is the run, and its holder says why
                lost = True

    def _own_news(self, tick: int) -> News:
        place, seconds = self._waited
        return News(tick, place.kind, place.step, seconds)

    def _news(self, ranks: Iterable[int]) -> dict[int, News]:
        keys = {rank: f"hang/{rank}" for rank in ranks}
        return {rank: News(*json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])}

    def _judge(self, earlier: dict[int, News], newest: dict[int, News]) -> None:
        alive = {rank: news for rank, news in newest.items() if rank not in earlier or news.tick > earlier[rank].tick}
        place, seconds = self._waited
        speakers = list(alive)
        if place.kind == "collectives" and seconds > self._last:  # it is about to give up
            speakers = [r for r, news in alive.items() if news.kind == "collectives" and news.seconds > self._last]
        else:
            works = any(news.kind == "between" for news in newest.values())  # maybe alone, and out of touch for a while
            if works or any(news.seconds <= self._limit() / 2 for news in alive.values()):
                return
        if self._rank != min(speakers, default=self._rank):  # the first of those that are there speaks
            return
        said = verdict({rank: alive.get(rank) for rank in self._ranks}, self._folder)
        self._store.set("hang/verdict", said)
        self._leave(said, until=alive)

    def _leave(self, said: str | None = None, tells: bool = True, until: Iterable[int] = ()) -> None:
        """Whatever fails. `tells`: tells the other ranks, and waits a while until those of `until` have told it."""
        try:
            if said is not None:
                print(f"\nerror: {said}", file=sys.stderr, flush=True)
        finally:
            try:
                self._write_stacks()
                if tells:
                    within(6 * PERIOD, lambda: self._tell(until))
            finally:
                leave_now(1)

    def _tell(self, until: Iterable[int]) -> None:
        """The store may end with this process: not before the others have read the verdict."""
        self._store.set(f"hang/left/{self._rank}", "1")
        deadline = time.monotonic() + 5 * PERIOD
        while time.monotonic() < deadline and not all(self._store.check([f"hang/left/{rank}"]) for rank in until):
            self._silent = 0
            time.sleep(PERIOD / 10)

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / f"rank-{self._rank}.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)


def _connected_anew(store: Any) -> Any:
    return store.clone() if hasattr(store, "clone") else store


def verdict(places: dict[int, News | None], folder: Path) -> str:
    """Says which ranks are missing, and where the others wait; None: a rank that does not answer."""
    missing = {rank: news for rank, news in places.items() if news is None or news.kind != "collectives"}
    there = [rank for rank in places if rank not in missing]
    waiting = f"{_ranks(there)} {'waits' if len(there) == 1 else 'wait'} in a collective"
    if not missing:
        first = next(news for news in places.values() if news is not None)
        return (
            f"all ranks have waited in collectives since update {first.step}, for {first.seconds:.0f} s: the network between "
            f"them may be down. {stacks_in(folder)}"
        )
    each = "; ".join(where(rank, news) for rank, news in missing.items())
    return f"hang: {each}; {waiting if there else 'no rank waits'}. {stacks_in(folder)}"


def where(rank: int, news: News | None) -> str:
    if news is None:
        return f"rank {rank} does not answer"
    when = "after" if news.kind == "between" else "in"
    return f"rank {rank} has been {PLACES[news.kind]} for {news.seconds:.0f} s, {when} update {news.step}"


def stacks_in(folder: Path) -> str:
    return f"The Python stacks of the ranks are in {folder}"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))

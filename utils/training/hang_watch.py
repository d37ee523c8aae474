"""Hangs: a thread of each rank sees when the ranks no longer meet, writes where each of them is, and ends them all."""

import contextlib
import faulthandler
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from utils.core.entrypoint import leave_now

LEAST, FACTOR = 30.0, 10.0  # seconds; times the longest update so far
LEAST_STREAMING = 300.0  # seconds, in which the reader of a shard has given up
PERIOD = 1.0  # seconds, in which each rank tells the others where it is
SILENT = 4  # periods without news
PLACES = {"compute": "computing", "data": "waiting for data", "collectives": "waiting in a collective"}


class Place(NamedTuple):
    """Where the main thread of a rank is."""

    kind: str | None  # of PLACES; None between two updates, where other limits hold
    step: int  # the update under way
    changes: int  # of place so far


class News(NamedTuple):
    """What a rank tells the others."""

    tick: int  # grows with each one
    kind: str  # of PLACES, or "between"
    step: int
    seconds: float  # since the main thread moved on

    @classmethod
    def read(cls, text: bytes) -> "News":
        tick, kind, step, seconds = text.decode().split()
        return cls(int(tick), kind, int(step), float(seconds))


_UNUSUAL = 2  # updates that may take any time: they compile, try kernels and start workers


class HangWatch:
    """Of runs with several ranks; else its methods do nothing. `now` is told by the main thread where it is."""

    def __init__(
        self, output_dir: Path, hang_timeout: float | None, process_index: int, num_processes: int, least: float = LEAST
    ):
        """`hang_timeout`: in seconds; None: learned from the updates, and not below `least`; 0: nothing is watched."""
        self._folder, self._timeout, self._least = output_dir / "hang", hang_timeout, least
        self._rank, self._ranks = process_index, range(num_processes)
        self._place, self._step, self._began, self._longest, self._updates = Place(None, 0, 0), 0, 0.0, 0.0, 0
        self._closed = threading.Event()
        self._on = num_processes > 1 and hang_timeout != 0
        if self._on:
            store = dist.distributed_c10d._get_default_store()
            self._store: Any = store.clone() if hasattr(store, "clone") else store
            threading.Thread(target=self._watch, name="hang watch", daemon=True).start()

    def begin(self, step: int) -> None:
        """Before the update that follows `step` finished ones."""
        self._step, self._began = step + 1, time.monotonic()

    def now(self, kind: str | None) -> None:
        """From here on the main thread is there: one of PLACES, or between two updates."""
        self._place = Place(kind, self._step, self._place.changes + 1)

    def end(self) -> None:
        self._updates += 1
        if self._updates > _UNUSUAL:
            self._longest = max(self._longest, time.monotonic() - self._began)

    def close(self) -> None:
        self._closed.set()

    # ---- in the thread

    def _limit(self) -> float | None:
        """Seconds; None while updates may take any time."""
        if self._updates < _UNUSUAL + (self._timeout is None):
            return None
        return self._timeout if self._timeout is not None else max(self._least, FACTOR * self._longest)

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the run, and whoever holds it says why
            self._look_until_closed()

    def _look_until_closed(self) -> None:
        place, seconds, tick, before = self._place, 0.0, 0, time.monotonic()
        earlier: dict[int, News] = {}  # what the ranks told when this one first had waited for too long
        asked = 0
        while not self._closed.wait(PERIOD):
            tick, now = tick + 1, time.monotonic()
            # A process that was suspended, and so are all of a job, has not waited meanwhile.
            seconds = seconds + min(now - before, 2 * PERIOD) if place == self._place else 0.0
            before, place = now, self._place
            self._store.set(f"hang/{self._rank}", f"{tick} {place.kind or 'between'} {place.step} {seconds:.0f}")
            if self._store.check(["hang/verdict"]):
                self._leave()
            limit = self._limit()
            if limit is None or place.kind is None or seconds <= limit:
                earlier = {}
            elif not earlier:
                earlier, asked = self._news(), tick
            elif tick >= asked + SILENT:
                self._judge(earlier, self._news(), limit)
                earlier = {}

    def _news(self) -> dict[int, News]:
        keys = {rank: f"hang/{rank}" for rank in self._ranks}
        return {rank: News.read(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _judge(self, earlier: dict[int, News], newest: dict[int, News], limit: float) -> None:
        alive = {rank: news for rank, news in newest.items() if rank not in earlier or news.tick > earlier[rank].tick}
        moves = any(news.kind == "between" or news.seconds <= limit / 2 for news in alive.values())
        if moves or self._rank != min(alive, default=self._rank):  # the first of those that are there speaks
            return
        said = verdict({rank: alive.get(rank) for rank in self._ranks}, self._folder)
        self._store.set("hang/verdict", said)
        print(f"\nerror: {said}", file=sys.stderr, flush=True)
        self._write_stacks()
        deadline = time.monotonic() + 5 * PERIOD  # the store may end with this process: until the others have read it
        while time.monotonic() < deadline and not all(self._store.check([f"hang/left/{rank}"]) for rank in alive):
            time.sleep(PERIOD / 10)
        leave_now(1)

    def _leave(self) -> None:
        self._write_stacks()
        leave_now(1)

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / f"rank-{self._rank}.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        self._store.set(f"hang/left/{self._rank}", "1")


def verdict(places: dict[int, News | None], folder: Path) -> str:
    """Says which ranks are missing, and where the others wait; None: a rank that does not answer."""
    missing = {rank: news for rank, news in places.items() if news is None or news.kind != "collectives"}
    there = [rank for rank in places if rank not in missing]
    waiting = f"{_ranks(there)} {'waits' if len(there) == 1 else 'wait'} in a collective"
    if not missing:
        first = next(news for news in places.values() if news is not None)
        return (
            f"all ranks have waited in collectives since update {first.step}, for {first.seconds:.0f} s: the network between "
            f"them may be down. The Python stacks of the ranks are in {folder}"
        )
    where = "; ".join(
        f"rank {rank} does not answer"
        if news is None
        else f"rank {rank} has been {PLACES[news.kind]} for {news.seconds:.0f} s, in update {news.step}"
        for rank, news in missing.items()
    )
    return f"hang: {where}; {waiting if there else 'no rank waits'}. The Python stacks of the ranks are in {folder}"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))

"""How far a piece of work has come, on stderr: a bar on a terminal, elsewhere plain lines without carriage returns."""

import contextlib
import os
import sys
import threading
import time
from typing import Any

FIRST_SECONDS = 3.0  # work that is done sooner shows nothing
LINE_SECONDS = 10.0  # between two lines where there is no terminal


def on_terminal() -> bool:
    """Returns whether stderr is a terminal that has a width: on others (of `script` or of containers) tqdm shows nothing."""
    if not sys.stderr.isatty():
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:  # it does not say
        return True


def print_progress(line: str) -> None:
    """Prints a line about progress where there is no terminal. A log that its disk does not take ends no run."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Returns for instance 0:07, 12:30 or 3:25:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Bar:
    """Shows a piece of work inside a `with` block while it goes on, even if its next step takes long.

    Args:
        what: the name of the work.
        total: how many `unit` there are; None where nothing can be counted: then the time alone is shown.
        shown: False on processes that are not the main one, and with --quiet.
        done: how many of them were done before.
        afterwards: the name of the work that goes on when all are done.
    """

    active = 0  # of this process

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "images",
        *,
        shown: bool = True,
        done: float = 0,
        afterwards: str | None = None,
    ):
        self.what, self.total, self.done = what, total, done
        self._unit, self._shown, self._afterwards, self._first = unit, shown, afterwards or what, done
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        self._tqdm: Any = None

    def update(self, count: float = 1) -> None:
        self.done += count

    def set(self, done: int, total: int) -> None:
        """For work whose length is known only when it begins. What is done at the first call was done before."""
        if self.total is None:
            self._first = done
        self.done, self.total = done, total

    def __enter__(self) -> "Bar":
        self._start = time.time()
        Bar.active += 1
        if self._shown:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        Bar.active -= 1
        self._finished.set()
        if self._thread is not None:
            self._thread.join()
        if self._tqdm is not None:
            self._tqdm.close()

    def line(self) -> str:
        """Returns the state of the work in one line."""
        seconds = time.time() - self._start
        if not self.total or self.done >= self.total:
            return f"{self._afterwards if self.total else self.what}: {duration(seconds)} so far"
        left = ""
        if self.done > self._first:
            left = f", {duration(seconds / (self.done - self._first) * (self.total - self.done))} left"
        return f"{self.what}: {int(self.done):,} of {self.total:,} {self._unit}{left}"

    def _watch(self) -> None:
        terminal = on_terminal()
        wait = FIRST_SECONDS
        while not self._finished.wait(wait):
            wait = 1.0 if terminal else LINE_SECONDS
            if terminal:
                self._draw()
            else:
                print_progress(self.line())

    def _draw(self) -> None:
        if self._tqdm is None:
            from tqdm import tqdm  # here, so that a script can say which packages are missing

            self._tqdm = tqdm(file=sys.stderr, bar_format="{desc}", leave=False, dynamic_ncols=True)
        self._tqdm.set_description_str(self.line())

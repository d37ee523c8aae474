"""Stopping on a signal: every rank stops after the same update, saves once and exits with a documented code."""

import contextlib
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from utils.core.entrypoint import LAUNCHER_BESIDE, leave_now, said_of_launcher
from utils.core.launcher import launcher_words

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run the same command again to continue
EXIT_DIVERGED = 3  # too many updates in a row were not finite
_OF_TERMINALS = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # nohup ignores it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *_OF_TERMINALS)


def leave_on_signal() -> None:
    """Before the loop there is nothing to save: a stop signal ends the process at once, with the status of a stop."""
    below = f"\n{LAUNCHER_BESIDE}" * bool(launcher_words())

    def leave(number: int, frame: FrameType | None) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _tell(f"{signal.Signals(number).name}: stopped before the first update: nothing was saved{below}")
        leave_now(EXIT_STOPPED)

    for number in STOP_SIGNALS:
        signal.signal(number, leave)


def _tell(message: str) -> None:
    """Prints a line on stderr at once, from a signal handler: a stream may be in the middle of another line."""
    with contextlib.suppress(OSError):  # a terminal that is gone
        os.write(2, f"\n{message}\n".encode())


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delays signals until the block ends; processes started in it begin with them blocked, so that no gap is left."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopSignal:
    """Remembers SIGTERM, SIGINT, SIGUSR1 or SIGHUP (a terminal that was closed); a second SIGINT ends the process at once. The
    ranks agree by an all-reduce of one byte over a gloo group of their own, while the next update computes: nobody waits, and
    the answer is one update late, on all ranks alike."""

    def __init__(self, num_processes: int, collective_timeout: float = 600.0, *, tells: bool = True):
        """`tells`: whether this process prints that a signal came."""
        self.received: str | None = None
        self._tells = tells
        below = bool(launcher_words())
        # No second Ctrl-C comes from a launcher: `accelerate launch` has ended, and torchrun makes a SIGTERM of it.
        another = f"kill -INT {os.getpid()}" if below else "a second Ctrl-C"
        self._again = f"; {another} ends it now, without saving" + f"\n{LAUNCHER_BESIDE}" * below
        timeout = timedelta(seconds=collective_timeout)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if num_processes > 1 else None
        self._pending = None

    def listen(self) -> None:
        """To be called when the updates begin: until then, `leave_on_signal` ends the process at once."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            os._exit(128 + number)  # published checkpoints are complete whenever this happens
        if self._tells and self.received is None:
            again = self._again if number == signal.SIGINT else ""
            said_of_launcher.update([LAUNCHER_BESIDE] if LAUNCHER_BESIDE in again else [])
            _tell(f"{signal.Signals(number).name}: the run stops after this update and saves a checkpoint{again}")
        self.received = signal.Signals(number).name

    def agreed(self) -> bool:
        """True once any rank was told to stop. Call once per update on every rank."""
        if self._group is None:
            return self.received is not None
        stop = self._answer()
        self._flag = torch.tensor([self.received is not None], dtype=torch.uint8)
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return stop

    def _answer(self) -> bool:
        if self._pending is None:
            return False
        self._pending.wait()
        self._pending = None
        return bool(self._flag.item())

    def close(self) -> None:
        """Finishes the exchange under way. The signals stay handled: one that comes now must not spoil the exit status."""
        self._answer()

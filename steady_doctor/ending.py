"""What ends a process without the end of its script: a signal, and os._exit. What was seen is told before."""

import contextlib
import functools
import os
import signal
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")  # those of them that a system has


def tell_before_death(tell: Callable[[int | None], int]) -> None:
    """Has `tell` called before a signal or os._exit ends this process, which then ends as it would have.

    It is called with the exit status (None of a signal), and returns the status to end with. Signals that the script handles or
    ignores are left to it. Processes that this one forks are not its business.
    """
    process = os.getpid()

    def die(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == process:
            tell(None)
        os.kill(os.getpid(), number)

    for name in STOP_SIGNALS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            with contextlib.suppress(ValueError):  # in another thread than the main one
                signal.signal(number, die)
    leave = os._exit

    @functools.wraps(leave)
    def _exit(status: int) -> None:
        leave(tell(status) if os.getpid() == process else status)

    os._exit = _exit  # type: ignore[assignment]

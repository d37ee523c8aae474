"""Calls that may never return, with a deadline."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns `call()`, or raises what it raises, or TimeoutError once it has taken so long; its thread stays behind. torch's
    store waits for ever for one whose process is stopped, whatever its own timeout is."""
    future: Future[T] = Future()

    def answer() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    return future.result(seconds)

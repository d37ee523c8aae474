import os
import signal

import pytest

from utils.core.signals import STOP_SIGNALS, StopSignal


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_at_once_and_remembered(handlers, capfd, number):
    stop = StopSignal(1)
    os.kill(os.getpid(), number)
    line = f"{number.name}: the run stops after this update and saves a checkpoint"
    line += "; a second Ctrl-C ends it now, without saving" if number == signal.SIGINT else ""
    assert capfd.readouterr().err.split("\n") == ["", line, ""]
    assert stop.received == number.name and stop.agreed()


def test_the_other_processes_do_not_repeat_it(handlers, capfd):
    stop = StopSignal(1, tells=False)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received == "SIGTERM" and capfd.readouterr().err == ""

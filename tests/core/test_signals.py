import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

from utils.core import signals
from utils.core.signals import STOP_SIGNALS, StopSignal


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, *({signal.SIGHUP} & set(STOP_SIGNALS))])  # not under nohup
def test_a_signal_is_answered_at_once_and_remembered(handlers, capfd, number):
    stop = StopSignal(1)
    stop.listen()
    os.kill(os.getpid(), number)
    line = f"{number.name}: the run stops after this update and saves a checkpoint"
    line += "; a second Ctrl-C ends it now, without saving" if number == signal.SIGINT else ""
    assert capfd.readouterr().err.split("\n") == ["", line, ""]
    assert stop.received == number.name and stop.agreed()


def test_below_a_launcher_a_second_stop_reaches_the_run(handlers, capfd, monkeypatch):
    """`accelerate launch` ends at once, and then Ctrl-C reaches the shell alone; torchrun passes a second one on as SIGTERM."""
    monkeypatch.setattr(signals, "launcher_words", lambda: ["accelerate", "launch", "train_ddpm.py"])
    StopSignal(1).listen()
    os.kill(os.getpid(), signal.SIGINT)
    first, second = capfd.readouterr().err.strip().splitlines()
    assert first.endswith(f"saves a checkpoint; kill -INT {os.getpid()} ends it now, without saving")
    assert second == "(you can ignore the traceback of the launcher)"


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_is_a_stop_and_nohup_is_not(ignored):
    code = f"import signal; signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if ignored else 'SIG_DFL'})\n"
    code += "from utils.core.signals import STOP_SIGNALS; print([number.name for number in STOP_SIGNALS])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ("SIGHUP" in found) is not ignored and "SIGTERM" in found


def test_the_other_processes_do_not_repeat_it(handlers, capfd):
    stop = StopSignal(1, tells=False)
    stop.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received == "SIGTERM" and capfd.readouterr().err == ""

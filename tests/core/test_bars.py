import fcntl
import io
import os
import pty
import struct
import termios
import threading
from types import SimpleNamespace

import pytest

from utils.core import bars, entrypoint
from utils.core.bars import Bar, duration


class Stream(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal, self.written = terminal, threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


@pytest.fixture
def stream(request, monkeypatch):
    stream = Stream(request.param)
    monkeypatch.setattr(bars, "sys", SimpleNamespace(stderr=stream))  # pytest has its own as the real one
    monkeypatch.setattr(bars, "FIRST_SECONDS", 0.01)
    return stream


@pytest.mark.parametrize("stream", [False], indirect=True)
def test_work_that_lasts_prints_plain_lines_while_its_first_step_goes_on(stream):
    with Bar("validating", 640):
        assert stream.written.wait(10)
    assert stream.getvalue().splitlines()[0] == "validating: 0 of 640 images"
    assert "\r" not in stream.getvalue()


@pytest.mark.parametrize("stream", [True], indirect=True)
def test_a_terminal_has_a_bar_that_is_gone_afterwards(stream):
    with Bar("validating", 640):
        assert stream.written.wait(10)
    assert "validating: 0 of 640 images" in stream.getvalue()
    assert stream.getvalue().endswith("\r")


@pytest.mark.parametrize("columns", [0, 80])
def test_a_terminal_without_a_width_has_plain_lines(monkeypatch, columns):
    """tqdm shows nothing there."""
    kernel, ours = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(kernel, "rb", buffering=0), open(ours, "w") as stream:
        monkeypatch.setattr(bars, "sys", SimpleNamespace(stderr=stream))
        assert bars.on_terminal() == (columns > 0)


@pytest.mark.parametrize("stream", [False, True], indirect=True)
def test_quick_quiet_and_other_processes_show_nothing(stream, monkeypatch):
    with Bar("validating", 640, shown=False) as quiet:
        assert quiet._thread is None
    monkeypatch.setattr(bars, "FIRST_SECONDS", 3.0)
    with Bar("validating", 640):
        pass
    assert stream.getvalue() == ""


def test_a_line_tells_the_time_left_of_what_was_done_now(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.time", lambda: now)
    with Bar("making images", 100, shown=False, done=60, afterwards="writing the grid") as bar:
        now = 30.0
        assert bar.line() == "making images: 60 of 100 images"  # nothing of it was made now
        bar.update(10)
        assert bar.line() == "making images: 70 of 100 images, 1:30 left"
        bar.update(30)
        assert bar.line() == "writing the grid: 0:30 so far"
    with Bar("reading the images", shown=False) as bar:
        now = 42.0
        assert bar.line() == "reading the images: 0:12 so far"
        bar.set(2, 8)  # done before
        assert bar.line() == "reading the images: 2 of 8 images"
        bar.set(5, 8)
        assert bar.line() == "reading the images: 5 of 8 images, 0:12 left"


@pytest.mark.parametrize("quiet", [False, True])
def test_other_libraries_show_no_bars_without_a_terminal_and_with_quiet(monkeypatch, quiet):
    names = ["HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"]
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(entrypoint, "sys", SimpleNamespace(stderr=Stream(terminal=True)))
    entrypoint.leave_progress_to_us(SimpleNamespace(quiet=quiet))
    assert [os.environ.get(name) for name in names] == (["1", "1"] if quiet else [None, None])
    monkeypatch.setattr(entrypoint, "sys", SimpleNamespace(stderr=Stream(terminal=False)))
    entrypoint.leave_progress_to_us(SimpleNamespace())
    assert [os.environ.get(name) for name in names] == ["1", "1"]


def test_durations():
    assert [duration(s) for s in (0.4, 59.6, 750, 12300)] == ["0:00", "1:00", "12:30", "3:25:00"]


@pytest.mark.parametrize("stream", [False], indirect=True)
@pytest.mark.parametrize(("quiet", "rank", "said"), [(False, "0", True), (True, "0", False), (False, "1", False)])
def test_libraries_that_load_slowly_are_told_of_between_the_flags_and_the_training(stream, monkeypatch, quiet, rank, said):
    monkeypatch.setenv("RANK", rank)
    entrypoint.parse_early(lambda: SimpleNamespace(quiet=quiet))
    assert stream.written.wait(10 if said else 0.05) == said
    with pytest.raises(SystemExit):
        entrypoint.run_script(lambda options: 0, SimpleNamespace)
    assert stream.getvalue().startswith("loading the libraries: 0:00 so far") == said

"""Processes that wait for one that works alone: longer than a collective call would, but not for one that is lost."""

import ast
import signal
import time

import pytest

from utils.core.waiting import _names

WAITS = "tests/launch/waits.py"
GRACE = 25  # seconds, on a busy machine


@pytest.fixture
def start(server, tmp_path):
    """Starts both processes; `works` is the one that works."""

    def both(kind: str, works: int = 0, **options) -> list:
        return server.start([WAITS, kind, tmp_path / "told", works], 2, **options)

    return both


def last_line(run) -> str:
    return run.text().strip().splitlines()[-1]


def test_one_process_works_longer_than_a_collective_call_waits(start):
    runs = start("long")
    assert [run.wait(60) for run in runs] == [0, 0], runs[1].text()
    said = [line for run in runs for line in run.text().splitlines() if line.startswith("waiting for")]
    assert said == ["waiting for the main process: hashing (0:00 so far)"]
    times = [dict(line.split() for line in run.text().splitlines() if line.startswith("load")) for run in runs]
    assert float(times[0]["loaded"]) <= float(times[1]["loads"])  # the main process first
    # Both get the problem of the first process that has one, and stay in step.
    expected = [f"rank {int(n % 3 == 0)} at {n} \\udce9" for n in range(200)]
    for run in runs:
        problems, _, value = last_line(run).rpartition(" ")
        assert ast.literal_eval(problems) == expected and value == "0"


@pytest.mark.parametrize(
    ("works", "lost"),
    [(0, "the main process has ended, or cannot be reached"), (1, "rank 1 has ended")],
)
@pytest.mark.parametrize("own_store", [False, True])  # else what the processes have found each other through lives on
def test_a_process_that_is_killed_while_the_others_wait_is_named(start, works, lost, own_store):
    runs = start("dies", works, own_store=own_store)
    assert runs[works].wait(60) == -signal.SIGKILL
    killed, other = time.monotonic(), runs[1 - works]
    assert other.wait(60) == 1
    assert time.monotonic() - killed < 2.0 + GRACE
    assert f"error: {lost}; the others waited for this: packing the images" in other.text().splitlines()
    assert len(other.text().splitlines()) == 2, other.text()  # the other one is that it waits


@pytest.mark.parametrize("own_store", [False, True])
@pytest.mark.parametrize("works", [0, 1])
def test_an_error_reaches_those_that_wait(start, works, own_store):
    runs = start("fails", works, own_store=own_store)
    assert [run.wait(60) for run in runs] == [1, 1]
    assert last_line(runs[works]) == "ValueError: broken"
    said = runs[1 - works].text().splitlines()
    assert [line for line in said if not line.startswith("waiting for ")] == []  # the one that failed says why
    runs = start("refuses", works)
    assert [run.wait(60) for run in runs] == [2, 2]
    said = [line for run in runs for line in run.text().splitlines() if not line.startswith("waiting for ")]
    assert said == ["error: no room", "make room"]


def test_a_process_that_was_stopped_is_not_waited_for(start):
    runs = start("leaves")
    assert runs[0].wait(60) == 75 and "SIGTERM: stopped before the first update" in runs[0].text()
    assert runs[1].wait(60) == 1
    assert last_line(runs[1]) == "error: the main process has ended; the others waited for this: packing the images"


def test_stop_signals_are_heard_while_waiting(start, tmp_path):
    runs = start("works", works=1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "told").exists():
        assert time.monotonic() < deadline, runs[0].text()
        time.sleep(0.01)
    runs[0].send_signal(signal.SIGTERM)
    assert runs[0].wait(60) == 75
    runs[1].kill()


@pytest.mark.parametrize(("kind", "seconds", "what"), [("hangs", 1, "packing the images"), ("lags", 8, "a validation")])
def test_a_process_that_hangs_is_ended_after_the_longest_time(start, kind, seconds, what):
    """Of work that all do alike, the timeout of a collective call."""
    runs = start(kind, works=1)
    assert [run.wait(60) for run in runs] == [1, 1]
    said = f"error: rank 1 took {seconds} s longer than the other processes; the others waited for this: {what}"
    assert last_line(runs[0]) == said
    assert "the Python stacks of rank 1, for which the others waited:" in runs[1].text() and "in work" in runs[1].text()


def test_names():
    assert (
        _names([0]) == "the main process" and _names([2, 3]) == "ranks 2, 3" and _names([0, 4]) == "the main process and rank 4"
    )

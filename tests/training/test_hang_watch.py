"""Hangs: the rank says where it is, the stacks of all are written, and all end. What is only slow goes on."""

import contextlib
import itertools
import os
import signal
import time

import pytest

from utils.core.waiting import Meeting
from utils.training import hang_watch, monitor
from utils.training.audit import StepAudit
from utils.training.hang_watch import PLACES, HangWatch
from utils.training.rank_times import RankTimes

INJECT = "tests/faults/inject.py"
TIMEOUT = 6  # seconds


class Left(BaseException):
    """The process has ended."""


class Periods:
    """Stands for what a thread waits for: so many periods go by at once."""

    def __init__(self, number: int):
        self._left = number

    def wait(self, seconds: float) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """The watch of rank 1, whose limit is 10 s; no thread of it runs. `watch(place, seconds)` is where it was for so long."""

    def leave(status):
        raise Left(status)

    monkeypatch.setattr(hang_watch, "leave_now", leave)
    seconds = itertools.count()
    monkeypatch.setattr(hang_watch, "time", type("", (), {"monotonic": lambda: float(next(seconds))}))
    made = HangWatch(tmp_path, 1, 1, hang_timeout=10.0, collective_timeout=600.0)
    made._updates = 9

    def look(kind: str | None, seconds: int) -> bool:
        made.begin(6)
        made.now(kind)
        made._closed = Periods(seconds)
        made._watch()
        return (tmp_path / "hang/rank-1.txt").exists()

    return look


@pytest.mark.parametrize(
    ("kind", "seconds", "stacks", "ends"),
    [
        ("compute", 10, False, False),
        ("compute", 13, True, False),  # in which the others write theirs
        ("compute", 17, True, True),
        ("data", 17, True, True),
        ("collectives", 17, True, False),  # it is not this rank that hangs
        ("collectives", 593, True, True),
        (None, 5000, False, False),  # it may save a checkpoint
    ],
)
def test_what_a_rank_does_where_it_no_longer_moves_on(watch, kind, seconds, stacks, ends, capsys, tmp_path):
    with pytest.raises(Left) if ends else contextlib.nullcontext():
        assert watch(kind, seconds) is stacks
    assert (tmp_path / "hang/rank-1.txt").exists() is stacks
    assert (f"hang: rank 1 has been {PLACES[kind]} for" in capsys.readouterr().err if ends else True) is True


@pytest.mark.parametrize(("seconds", "ends"), [(593, True), (589, False)])
def test_before_a_collective_between_updates_gives_up_it_is_said(watch, capsys, seconds, ends):
    """Rank 1 reads what all validated, another one never came: after 600 s the call would fail without saying so."""
    with Meeting(), pytest.raises(Left) if ends else contextlib.nullcontext():
        watch(None, seconds)
    said = "hang: rank 1 has been waiting in a collective for 591 s, after update 7"
    assert (said in capsys.readouterr().err) is ends


def test_a_rank_that_is_to_leave_leaves_whatever_fails(watch, monkeypatch):
    """The store ended with another process; so does what stderr leads to."""

    def broken(*arguments):
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr("sys.stderr", type("", (), {"write": broken, "flush": broken}))
    with pytest.raises(Left):
        watch("compute", 20)


def test_where_the_host_first_waits_for_the_device_it_waits_in_a_collective(train, tiny_flags, tmp_path, monkeypatch):
    """A collective call of NCCL returns at once. In an update that is reported, the host first waits for the other ranks when
    it waits for the device: before the audit looks, or where the report reads."""
    places, watches = [], []
    begin, read, audit = HangWatch.begin, monitor.read_together, StepAudit.end

    class Event:
        """As of a device."""

        def synchronize(self) -> None:
            places.append(("device", watches[-1]._where().kind))

    def began(watch, step):
        watches.append(watch)
        begin(watch, step)

    def reading(tensors):
        places.append(("report", watches[-1]._where().kind))
        return read(tensors)

    def auditing(*arguments):
        places.append(("audit", watches[-1]._where().kind))
        audit(*arguments)

    monkeypatch.setattr(HangWatch, "begin", began)
    monkeypatch.setattr(monitor, "read_together", reading)
    monkeypatch.setattr(StepAudit, "end", auditing)
    monkeypatch.setattr(RankTimes, "now", lambda times, kind: times._marks.append((kind, Event())))
    flags = ["--max_train_steps", 4, "--logging_steps", 4, "--logger", "none", "--save_images_epochs", 999]
    assert train([*tiny_flags, *flags, "--output_dir", tmp_path]) == 0
    device, work = ("device", "collectives"), ("audit", "between")
    assert places[:2] == [device, work]  # the first update is audited
    assert places[-3:] == [device, work, ("report", "collectives")]


@pytest.mark.parametrize(
    ("collective_timeout", "longest", "limit"),
    [(600, 1.0, 30.0), (600, 10.0, 100.0), (600, 100.0, 490.0), (40, 1.0, 29.0), (20, 1.0, 10.0), (600, 400.0, 800.0)],
)
def test_the_stacks_are_written_before_the_collectives_give_up(tmp_path, collective_timeout, longest, limit):
    """Unless updates take so long that a limit below would end healthy ones."""
    watch = HangWatch(tmp_path, 0, 1, None, collective_timeout)
    watch._updates, watch._longest = 9, longest
    assert watch._limit() == limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "where", "own", "others"),
    [
        ("hang", 1, "computing", "tests/faults/inject.py", "backward"),
        # Rank 1: the images that rank 0 fetches for its checks before the first update are fetches, too.
        ("hang-data", 1, "waiting for data", "in slow", "backward"),
        # As with NCCL, where an update's collectives do not wait: the report's reduction is the first that does.
        ("hang-unseen", 1, "computing", "tests/faults/inject.py", " in report"),
        ("hang-repeated", 1, "computing", "tests/faults/inject.py", "backward"),
    ],
)
def test_a_rank_that_hangs_is_named_and_all_end(server, tiny_flags, tmp_path, fault, rank, where, own, others):
    flags = ["--train_batch_size", 4, "--max_train_steps", 500, "--hang_timeout", TIMEOUT, "--output_dir", tmp_path]
    flags += ["--rerun_steps", 7] if fault == "hang-repeated" else []
    command = [INJECT, "train_ddpm.py", fault, "--rank", rank, "--step", 6, "--", *tiny_flags, *flags]
    printed = server.run(command, 2, ends=1)
    [said] = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert f"error: hang: rank {rank} has been {where} for" in said and "Traceback" not in printed
    assert own in (tmp_path / "hang" / f"rank-{rank}.txt").read_text()
    assert others in (tmp_path / "hang" / f"rank-{1 - rank}.txt").read_text()
    assert not (tmp_path / "exit_status").exists()


def test_a_rank_that_is_stopped_for_a_while_ends_nothing(server, tiny_flags, tmp_path):
    runs = server.start(endless(tiny_flags, tmp_path), 2)
    wait_for_updates(tmp_path, runs)
    os.kill(runs[1].pid, signal.SIGSTOP)
    time.sleep(2)
    assert runs[0].poll() is None, runs[0].text()
    os.kill(runs[1].pid, signal.SIGCONT)
    runs[0].send_signal(signal.SIGTERM)
    assert [run.wait() for run in runs] == [75, 75], runs[1].text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])  # the store is in rank 0
def test_of_a_rank_that_is_stopped_in_an_update_the_others_say_that_they_wait(server, tiny_flags, tmp_path, rank):
    flags = ["--train_batch_size", 4, "--max_train_steps", 500, "--collective_timeout", 20, "--output_dir", tmp_path]
    command = [INJECT, "train_ddpm.py", "stop", "--rank", rank, "--step", 6, "--", *tiny_flags, *flags]
    runs = server.start(command, 2, own_store=True)
    try:
        assert runs[1 - rank].wait(120) == 1
        said = f"hang: rank {1 - rank} has been waiting in a collective for", "the main process does not answer"
        assert any(words in runs[1 - rank].text() for words in said)
    finally:
        os.kill(runs[rank].pid, signal.SIGCONT)
    assert runs[rank].wait() == 1, runs[rank].text()


def endless(flags: list, folder) -> list:
    """A run in which updates alone are made: what comes between them has other limits."""
    never = ["--max_train_steps", 100_000, "--logging_steps", 100_000, "--checkpointing_steps", 100_000]
    flags = [*flags, *never, "--train_batch_size", 4, "--hang_timeout", TIMEOUT, "--logger", "none", "--output_dir", folder]
    return [INJECT, "train_ddpm.py", "none", "--record", folder / "record", "--", *flags]


def wait_for_updates(folder, runs) -> None:
    """Until 22 are made: the doctor, for which ranks wait too, looks at number 20 and at number 34."""
    deadline = time.monotonic() + 180
    while not (folder / "record").exists() or (folder / "record").read_text().count("\n") < 2 * 22:
        assert time.monotonic() < deadline, runs[0].text()
        time.sleep(0.02)

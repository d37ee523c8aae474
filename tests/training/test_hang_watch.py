"""Hangs: which rank is missing and where the others wait is said, the stacks of all are written, and all end. What is only slow
goes on."""

import contextlib
import json
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from utils.core.waiting import Meeting
from utils.training import monitor, ranks
from utils.training.audit import StepAudit
from utils.training.ranks import HangWatch, News, RankTimes, verdict

INJECT = "tests/faults/inject.py"
TIMEOUT = 6  # seconds


def test_the_ranks_that_are_missing_are_named(tmp_path):
    waits = News(9, "collectives", 7, 31.0)
    said = verdict({0: waits, 1: News(9, "data", 7, 32.0), 2: waits}, tmp_path)
    assert said.startswith("hang: rank 1 has been waiting for data for 32 s, in update 7; ranks 0, 2 wait in a collective")
    assert "rank 1 does not answer; rank 0 waits" in verdict({0: waits, 1: None}, tmp_path)
    assert verdict({0: waits, 1: waits}, tmp_path).startswith("all ranks have waited in collectives since update 7")


def test_a_store_that_does_not_answer_is_said(tmp_path, monkeypatch, capsys):
    """It lies in rank 0: that one is stopped, and each call to it takes for ever."""
    ended = threading.Event()

    class Store:
        set = check = get = lambda *arguments: threading.Event().wait()

    def leave(status):
        assert status == 1
        ended.set()
        watch.close()

    monkeypatch.setattr(ranks, "PERIOD", 0.01)
    monkeypatch.setattr(ranks, "leave_now", leave)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Store)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    watch = HangWatch(tmp_path, 1, 2, hang_timeout=0.02, collective_timeout=600.0)
    for step in range(3):
        watch.begin(step)
        watch.now("collectives")
        watch.end()
    assert ended.wait(30)
    said = "hang: rank 0 does not answer; rank 1 has been waiting in a collective for 0 s, in update 3. Nothing is known"
    assert said in capsys.readouterr().err
    assert "test_hang_watch.py" in (tmp_path / "hang/rank-1.txt").read_text()


class Left(BaseException):
    """The process has ended."""


class Periods:
    """Stands for what a thread waits for: so many periods go by at once, before each of which `between` is called."""

    def __init__(self, number: int, between=lambda number: None):
        self.passed, self._number, self._between = 0, number, between

    def wait(self, seconds: float) -> bool:
        self._between(self.passed)
        self.passed += 1
        return self.passed > self._number


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """The watch of rank 1 of 2, whose limit is 10 s, while rank 1 waits in a collective; no thread of it runs."""

    def leave(status):
        raise Left(status)

    monkeypatch.setattr(ranks, "leave_now", leave)
    watch = HangWatch(tmp_path, 1, 1, hang_timeout=10.0, collective_timeout=600.0)
    watch._ranks, watch._updates = range(2), 9
    watch.now("collectives")
    return watch


@pytest.mark.parametrize(
    ("place", "periods", "silent", "ends"),
    [
        ("compute", 100, 12, True),
        ("compute", 100, 8, False),  # it was silent for a moment
        ("compute", 8, 8, False),  # and nobody has waited for too long
        ("between", 500, 500, False),  # it may save a checkpoint
        ("between", 620, 620, True),
        ("between", 620, 590, False),
    ],
)
def test_a_store_that_is_silent_ends_nothing_while_rank_0_may_work(waiting, monkeypatch, place, periods, silent, ends):
    clock = iter(range(10_000))
    monkeypatch.setattr(ranks, "time", type("", (), {"monotonic": lambda: float(next(clock))}))
    waiting._first = News(9, place, 9, 0.0)

    def answer(passed):
        waiting._silent = 0 if passed <= periods - silent else waiting._silent

    waiting._closed = Periods(periods, answer)
    with pytest.raises(Left) if ends else contextlib.nullcontext():
        waiting._count()


def test_a_connection_that_is_lost_is_made_anew_once(waiting):
    told, made = [], []

    class Store:
        def __init__(self, breaks):
            self.breaks = breaks

        def set(self, key, value):
            if self.breaks and len(told) == 2:
                raise RuntimeError("Connection reset by peer")
            told.append(News(*json.loads(value)).tick)

        def check(self, keys):
            return keys == ["hang/0"]

        def get(self, key):
            return json.dumps(News(5, "between", 9, 0.0)).encode()

        def clone(self):
            if len(told) == 2 and waiting._closed.passed < 6:
                raise RuntimeError("Connection refused")
            made.append(Store(breaks=False))
            return made[-1]

    waiting._store, waiting._closed = Store(breaks=True), Periods(8)
    waiting._exchange()
    assert told == [1, 2, 6, 7, 8] and len(made) == 1 and waiting._first == News(5, "between", 9, 0.0)


@pytest.mark.parametrize("silent", [{}, {0: News(5, "between", 7, 0.0)}, {0: News(5, "compute", 7, 0.0)}])
def test_a_rank_that_works_between_updates_is_not_accused_because_it_is_out_of_touch(waiting, silent):
    waiting._store = type("", (), {"set": lambda *arguments: None, "check": lambda *arguments: True})()
    ends = silent.get(0) is None or silent[0].kind != "between"
    with pytest.raises(Left) if ends else contextlib.nullcontext():
        waiting._judge(silent | {1: News(5, "collectives", 7, 11.0)}, silent | {1: News(9, "collectives", 7, 15.0)})


@pytest.mark.parametrize(("seconds", "ends"), [(591.0, True), (589.0, False)])
def test_before_a_collective_between_updates_gives_up_it_is_said_who_is_missing(waiting, capsys, seconds, ends):
    """Rank 1 reads what all validated, rank 0 never came: after 600 s the call would fail without saying so."""
    waiting._step = 7
    waiting.now(None)
    with Meeting():
        waiting._waited = waiting._where(), seconds
    store = {"set": lambda *arguments: None, "check": lambda *arguments: True}
    waiting._store, limit = type("", (), store)(), waiting._limit_here()
    assert limit == 590.0 and waiting._where().kind == "between"
    with pytest.raises(Left) if ends else contextlib.nullcontext():
        waiting._judge({}, {0: News(9, "between", 7, 300.0), 1: News(9, "collectives", 7, seconds)})
    said = "hang: rank 0 has been at work between two updates for 300 s, after update 7; rank 1 waits in a collective"
    assert (said in capsys.readouterr().err) is ends


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


def broken(*arguments):
    raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("fault", [broken, lambda *arguments: threading.Event().wait()])
@pytest.mark.parametrize("speaks", [True, False])
def test_a_rank_that_is_to_leave_leaves_whatever_fails(waiting, monkeypatch, fault, speaks):
    """The store ended with the process of the rank that spoke, or hangs; so does what stderr leads to."""
    monkeypatch.setattr(ranks, "PERIOD", 0.01)
    monkeypatch.setattr("sys.stderr", type("", (), {"write": broken, "flush": broken}))
    store = {"set": lambda self, key, value: fault() if "left" in key else None, "check": lambda self, keys: True}
    waiting._store, waiting._closed = type("", (), store)(), Periods(1)
    with pytest.raises(Left):
        if speaks:
            waiting._judge({}, {1: News(9, "collectives", 7, 15.0)})
        else:
            waiting._exchange()


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
    [said] = [line for line in printed.splitlines() if "error: hang" in line]
    assert f"rank {rank} has been {where} for" in said and f"rank {1 - rank} waits in a collective" in said
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
def test_a_rank_that_is_stopped_in_an_update_is_named(server, tiny_flags, tmp_path, rank):
    flags = ["--train_batch_size", 4, "--max_train_steps", 500, "--hang_timeout", TIMEOUT, "--output_dir", tmp_path]
    command = [INJECT, "train_ddpm.py", "stop", "--rank", rank, "--step", 6, "--", *tiny_flags, *flags]
    runs = server.start(command, 2, own_store=True)
    try:
        assert runs[1 - rank].wait(120) == 1
        said = f"hang: rank {rank} does not answer; rank {1 - rank} "
        assert said + ("has been waiting in a collective" if rank == 0 else "waits in a collective") in runs[1 - rank].text()
        assert "backward" in (tmp_path / f"hang/rank-{1 - rank}.txt").read_text()
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

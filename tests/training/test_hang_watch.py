"""Hangs: which rank is missing and where the others wait is said, the stacks of all are written, and all end. What is only slow
goes on."""

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist
from conftest import slow_turns

from utils.training import hang_watch
from utils.training.hang_watch import HangWatch, News, verdict

INJECT = "tests/faults/inject.py"
TIMEOUT = 6  # seconds


def test_the_ranks_that_are_missing_are_named(tmp_path):
    waits = News(9, "collectives", 7, 31.0)
    said = verdict({0: waits, 1: News(9, "data", 7, 32.0), 2: waits}, tmp_path)
    assert said.startswith("hang: rank 1 has been waiting for data for 32 s, in update 7; ranks 0, 2 wait in a collective")
    assert "rank 1 does not answer; rank 0 waits" in verdict({0: waits, 1: None}, tmp_path)
    assert verdict({0: waits, 1: waits}, tmp_path).startswith("all ranks have waited in collectives since update 7")
    news = News(3, "between", 12, 40.0)
    assert News.read(news.text().encode()) == news


def test_a_store_that_does_not_answer_is_said(tmp_path, monkeypatch, capsys):
    """It lies in rank 0: that one is stopped, and each call to it takes for ever."""
    ended = threading.Event()

    class Store:
        set = check = get = lambda *arguments: threading.Event().wait()

    def leave(status):
        assert status == 1
        ended.set()
        watch.close()

    monkeypatch.setattr(hang_watch, "PERIOD", 0.01)
    monkeypatch.setattr(hang_watch, "leave_now", leave)
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
@pytest.mark.parametrize(("fault", "rank", "where"), [("hang", 1, "computing"), ("hang-data", 1, "waiting for data")])
def test_a_rank_that_hangs_is_named_and_all_end(server, script, script_flags, tmp_path, fault, rank, where):
    # Rank 1: the images that rank 0 fetches for its checks before the first update are fetches, too.
    flags = ["--train_batch_size", 4, "--max_train_steps", 500, "--hang_timeout", TIMEOUT, "--checkpointing_steps", 2]
    command = [INJECT, script, fault, "--rank", rank, "--step", 6, "--", *script_flags, *flags, "--output_dir", tmp_path]
    runs = server.start(command, 2)
    assert [run.wait(120) for run in runs] == [1, 1], runs[0].text()
    [said] = [line for run in runs for line in run.text().splitlines() if "error: hang" in line]
    assert f"rank {rank} has been {where} for" in said and f"rank {1 - rank} waits in a collective" in said
    stacks = (tmp_path / "hang" / f"rank-{rank}.txt").read_text()
    assert "in stuck" in stacks if fault == "hang-data" else "tests/faults/inject.py" in stacks
    assert "backward" in (tmp_path / "hang" / f"rank-{1 - rank}.txt").read_text()
    assert not (tmp_path / "exit_status").exists()


@pytest.mark.parametrize(("seconds", "ends"), [*slow_turns((TIMEOUT + 30, True)), (2.0, False)])
def test_a_rank_that_is_stopped_for_a_while(server, tiny_flags, tmp_path, seconds, ends):
    runs = server.start(endless(tiny_flags, tmp_path), 2)
    try:
        wait_for_updates(tmp_path, runs)
        os.kill(runs[1].pid, signal.SIGSTOP)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and runs[0].poll() is None:
            time.sleep(0.05)
        assert (runs[0].poll() == 1) is ends, runs[0].text()
        if ends:
            assert "rank 1 does not answer; rank 0 waits in a collective" in runs[0].text()
    finally:
        os.kill(runs[1].pid, signal.SIGCONT)
        if not ends:
            runs[0].send_signal(signal.SIGTERM)
    assert [run.wait() for run in runs] == ([1, 1] if ends else [75, 75]), runs[1].text()


@pytest.mark.slow
def test_rank_0_is_stopped_and_the_store_with_it(server, tiny_flags, tmp_path):
    runs = server.start(endless(tiny_flags, tmp_path), 2, own_store=True)
    try:
        wait_for_updates(tmp_path, runs)
        os.kill(runs[0].pid, signal.SIGSTOP)
        assert runs[1].wait(120) == 1
        assert "hang: rank 0 does not answer; rank 1 has been waiting in a collective for" in runs[1].text()
        assert "train_ddpm.py" in (tmp_path / "hang/rank-1.txt").read_text()
    finally:
        os.kill(runs[0].pid, signal.SIGCONT)
    assert runs[0].wait() == 1, runs[0].text()


def endless(flags: list, folder) -> list:
    """A run in which updates alone are made: what comes between them has other limits."""
    never = ["--max_train_steps", 100_000, "--logging_steps", 100_000, "--checkpointing_steps", 100_000]
    flags = [*flags, *never, "--train_batch_size", 4, "--hang_timeout", TIMEOUT, "--logger", "none", "--output_dir", folder]
    return [INJECT, "train_ddpm.py", "none", "--record", folder / "record", "--", *flags]


def wait_for_updates(folder, runs) -> None:
    """Until 22 are made: the step audit, for which ranks wait too, looks at number 20 and at number 34."""
    deadline = time.monotonic() + 180
    while not (folder / "record").exists() or (folder / "record").read_text().count("\n") < 2 * 22:
        assert time.monotonic() < deadline, runs[0].text()
        time.sleep(0.02)

"""What a run says of processors that it has to share, by made-up clocks of its threads."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from utils.core import control_groups, processors
from utils.core.processors import thread_times
from utils.training.shared_cpu import SharedCPU


@pytest.fixture
def said_by(monkeypatch, tmp_path):
    """What is said of 40 updates of a second each, in which thread by thread ran and waited for these shares of the time."""

    def find(threads: list[tuple[float, float]], *, device="cpu", main=True, limit=None, told=True) -> list[str]:
        now, said = 0.0, []
        monkeypatch.setattr("time.monotonic", lambda: now)
        monkeypatch.setattr(processors, "THREADS", tmp_path)
        monkeypatch.setattr("utils.training.shared_cpu.processor_limit", lambda: limit)
        monkeypatch.setattr(torch, "get_num_threads", lambda: len(threads))
        accelerator = SimpleNamespace(device=SimpleNamespace(type=device), is_main_process=main)
        shared = SharedCPU(SimpleNamespace(accelerator=accelerator, print_line=said.append))
        for update in range(40):
            now += 1.0
            for number, (ran, waited) in enumerate([*threads, (0.0, 0.0)] if told else []):
                folder = tmp_path / str(100 + number)
                folder.mkdir(exist_ok=True)
                # What came before the first update, and is of no interest, is much.
                (folder / "schedstat").write_text(f"{int(7e9 + ran * now * 1e9)} {int(9e9 + waited * now * 1e9)} {update}\n")
            shared.after_update()
        return said

    return find


def test_a_cpu_that_others_use_is_told_once_with_fewer_threads(said_by):
    start, together = "warning: in 15 s, ", "threads of this run together computed for"
    others = " s for a processor: other processes use this CPU, too. Try: "
    assert said_by([(0.2, 0.8), (0.2, 0.8)]) == [
        f"{start}the 2 {together} 6 s and waited 24{others}--cpu_threads 1 instead of 2, also on resume"
    ]
    assert said_by([(0.75, 0.25)] * 8) == [
        f"{start}the 8 {together} 90 s and waited 30{others}--cpu_threads 6 instead of 8, also on resume"
    ]
    assert said_by([(0.4, 0.6)]) == [f"{start}this run computed for 6 s and waited 9{others}end other programs"]


def test_a_control_group_that_allows_less_than_the_threads_need_is_told_as_that(said_by):
    limited = "the control group of this run (a container, or a job) may use 1.5 processors. Try: "
    (line,) = said_by([(0.375, 0.6)] * 4, limit=1.5)
    assert line.endswith(limited + "--cpu_threads 1 instead of 4, also on resume")
    (line,) = said_by([(0.5, 0.5)], limit=0.5)
    assert line.endswith("may use 0.5 processors. Try: give it more processors")
    (line,) = said_by([(0.2, 0.8), (0.2, 0.8)], limit=1.5)  # others take what it could use
    assert "other processes use this CPU, too" in line


@pytest.mark.parametrize(
    ("threads", "given"),
    [
        ([(1.0, 0.02), (0.9, 0.05)], {}),  # busy alone
        ([(0.05, 0.0), (0.05, 0.0)], {}),  # sleeps: waits for data, for a disk, for other ranks
        ([(0.02, 0.02), (0.02, 0.01)], {}),  # the same, and each look at the data waits a moment for a processor
        ([(1.0, 0.0), (1.0, 0.0)], {"limit": 2.0}),
        ([(0.2, 0.8), (0.2, 0.8)], {"device": "cuda"}),
        ([(0.2, 0.8), (0.2, 0.8)], {"main": False}),
        ([(0.2, 0.8), (0.2, 0.8)], {"told": False}),  # a system that does not tell
    ],
)
def test_nothing_is_said_of_other_runs(said_by, threads, given):
    assert said_by(threads, **given) == []


@pytest.mark.skipif(not thread_times(), reason="the system does not tell how long threads wait")
def test_the_system_s_own_clocks_agree_with_those_of_python():
    """In a process that never sleeps, a thread's processor time and its waiting are all of the time."""
    code = """
import os, time
from utils.core.processors import thread_times
def now():
    return time.perf_counter_ns(), time.thread_time_ns(), thread_times()[str(os.getpid())]
clock, processor, before = now()
while time.perf_counter_ns() - clock < 2e8:
    pass
later, processor_later, after = now()
print(later - clock, processor_later - processor, after.ran - before.ran, after.waited - before.waited)
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    clock, processor, ran, waited = map(int, found.stdout.split())
    tick = 1e9 / 100  # the coarsest of the clocks that Linux counts by
    assert abs(ran - processor) < 2 * tick and abs(ran + waited - clock) < 2 * tick


@pytest.mark.parametrize(
    ("own", "groups", "limit"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/job\n", {"cpu.max": "400000 100000", "job/cpu.max": "max 100000"}, 4.0),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/\n", {}, None),
    ],
)
def test_the_limit_of_control_groups(own, groups, limit, monkeypatch, tmp_path):
    for name, text in groups.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    assert processors.processor_limit() == limit


@pytest.mark.parametrize(("limit", "cores"), [(None, 8), (0.5, 1), (1.5, 1), (3.9, 3), (64.0, 8)])
def test_a_run_has_no_more_threads_than_its_control_group_lets_run(limit, cores, monkeypatch):
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda process: range(8), raising=False)
    monkeypatch.setattr(processors, "processor_limit", lambda: limit)
    assert processors.usable_cores() == cores

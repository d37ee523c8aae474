"""Processes that fail alone: what one rank meets, all of them answer, within the time that they were given."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, end_group, logged_scalars, script_environment, slow_turns, start_command
from kills import BYTES, newest, same

from utils.runs.checkpoint_files import list_checkpoints, verify_checkpoint

INJECT = "tests/faults/inject.py"
TIMEOUT, GRACE = 10, 25  # seconds: for a collective; for the others to notice and leave, on a busy machine
HALVES = ["--train_batch_size", 4]
LEAVES_SOON = ["--collective_timeout", TIMEOUT]  # for tests that lose a rank: elsewhere a slow machine would be taken for one


def all_valid(folder: Path) -> bool:
    return all(verify_checkpoint(path) is None for path in list_checkpoints(folder))


def state_of(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "state.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, *slow_turns(0)])
def test_a_nan_on_one_rank_changes_nothing_on_any(server, script, script_flags, tmp_path, rank):
    flags = [*script_flags, *HALVES, "--checkpointing_steps", 1, "--output_dir", tmp_path / "nan"]
    runs = server.start([INJECT, script, "nan", "--rank", rank, "--step", 5, "--", *flags], 2)
    runs += server.start([script, *script_flags, *HALVES, "--output_dir", tmp_path / "whole"], 2)
    assert [run.wait() for run in runs] == [0] * 4, runs[0].text()
    before, after, later = (tmp_path / "nan" / f"checkpoint-{step}" for step in (4, 5, 6))
    assert all(same(before / name, after / name) for name in BYTES[:2])
    assert not any(same(before / name, later / name) for name in BYTES)
    assert [state_of(checkpoint)["skipped_updates"] for checkpoint in (before, after, later)] == [0, 1, 1]
    curves = [logged_scalars(tmp_path / name, "train/lr") for name in ("nan", "whole")]
    assert curves[0] == curves[1]
    assert logged_scalars(tmp_path / "nan", "train/skipped_updates")[8] == 1


@pytest.mark.parametrize(("rank", "fault"), [(1, "SIGKILL"), *slow_turns((0, "SIGKILL"), (1, "oom"))])
def test_the_others_leave_when_a_rank_is_lost(server, script, script_flags, tmp_path, rank, fault):
    """Forked processes, which no launcher ends: they have to notice by themselves."""
    flags = [*script_flags, *HALVES, *LEAVES_SOON, "--checkpointing_steps", 2, "--output_dir", tmp_path]
    options = ["oom"] if fault == "oom" else ["signal", "--value", fault]
    runs = server.start([INJECT, script, *options, "--rank", rank, "--step", 5, "--", *flags], 2)
    lost, other = runs[rank], runs[1 - rank]
    assert lost.wait() == (1 if fault == "oom" else -signal.SIGKILL), lost.text()
    assert other.wait(TIMEOUT + GRACE) not in (0, 2, 3, 75), other.text()
    assert newest(tmp_path) == 4 and all_valid(tmp_path)
    if fault == "oom":
        messages = [line for run in runs for line in run.text().splitlines() if line.startswith("error: ")]
        assert messages == ["error: out of memory on rank 1: CUDA out of memory. Tried to allocate 20.00 GiB."]
        assert not any("Traceback" in run.text() for run in runs)
        assert "asked: 4 images of 1x16x16 in each of 1 micro steps" in lost.text()
        assert "set --train_batch_size 2 --gradient_accumulation_steps 2" in lost.text()
        assert "predicted: " in lost.text() and "predicted: " not in other.text()


@pytest.mark.parametrize(
    ("processes", "number", "rank", "workers"),
    [
        *((1, "SIGTERM", 0, 0), (2, "SIGTERM", 1, 0)),
        *slow_turns((1, "SIGINT", 0, 2), (2, "SIGUSR1", 0, 2), (2, "SIGINT", 1, 2), (2, "SIGUSR1", 1, 0)),
    ],
)
def test_a_signal_to_any_rank_stops_all_at_the_same_update(
    server, script, script_flags, tmp_path, processes, number, rank, workers
):
    flags = [*script_flags, "--train_batch_size", 8 // processes, "--dataloader_num_workers", workers]
    fault = ["signal", "--value", number, "--rank", rank, "--step", 5]
    record = [] if workers else ["--record", tmp_path / "trace"]  # workers fetch ahead
    run = ["--max_train_steps", 1000, "--output_dir", tmp_path]
    said = server.run([INJECT, script, *fault, *record, "--", *flags, *run], processes, ends=75)
    [checkpoint] = list_checkpoints(tmp_path)
    stopped = newest(tmp_path)
    assert verify_checkpoint(checkpoint) is None
    assert 5 <= stopped <= 4 + processes  # the ranks' answer comes one update late
    assert f"stopped after {stopped} updates; continue with the same command and --resume_from_checkpoint latest" in said
    if record:
        ranks = [line[0] for line in (tmp_path / "trace").read_text().splitlines()]
        assert [ranks.count(str(each)) for each in range(processes)] == [stopped] * processes


def test_two_interrupts_leave_at_once(server, script, script_flags, tmp_path):
    flags = [*script_flags, "--max_train_steps", 1000, "--checkpointing_steps", 2, "--output_dir", tmp_path]
    [run] = server.start([INJECT, script, "signal", "--value", "SIGINT,SIGINT", "--step", 5, "--", *flags])
    assert run.wait() == 128 + signal.SIGINT, run.text()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"] and all_valid(tmp_path)


# ---- launched as users do


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs/cpu.yaml"]


def members(folder: Path) -> dict[int, list[str]]:
    """The processes that have `folder` in their command line, zombies left out."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended just now
            words = (path / "cmdline").read_bytes().decode().split("\0")
            if str(folder) in words and int(path.name) != os.getpid():
                found[int(path.name)] = words
    return found


def training(folder: Path) -> list[int]:
    launchers = ("torch.distributed.run", "accelerate.commands.launch")
    return [pid for pid, words in members(folder).items() if not set(words) & set(launchers)]


@contextlib.contextmanager
def launched(launcher: list, script_and_flags: list, folder: Path):
    """A launcher and its processes, of which none is left in the end."""
    command = [sys.executable, *launcher, *script_and_flags, "--output_dir", folder]
    process = start_command(command, script_environment(2))
    try:
        yield process
    finally:
        end_group(process)
        for pid in members(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_until(condition, seconds: float, process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        pytest.param(TORCHRUN, "SIGKILL", id="torchrun-SIGKILL"),
        pytest.param(ACCELERATE, "SIGTERM", id="accelerate-SIGTERM"),
        *slow_turns((ACCELERATE, "SIGKILL"), (TORCHRUN, "SIGTERM"), ids=["accelerate-SIGKILL", "torchrun-SIGTERM"]),
    ],
)
def test_a_launcher_that_ends_leaves_no_process_and_a_checkpoint(script, script_flags, tmp_path, launcher, number):
    batch = 4 if launcher is TORCHRUN else 8
    flags = [*script_flags, "--train_batch_size", batch, "--max_train_steps", 100_000, "--checkpointing_steps", 10]
    with launched(launcher, [ROOT / script, *flags], tmp_path) as process:
        wait_until(lambda: newest(tmp_path) >= 10, 90, process)
        assert len(training(tmp_path)) == 8 // batch
        os.kill(process.pid, getattr(signal, number))
        process.wait(GRACE)
        wait_until(lambda: not training(tmp_path), GRACE)
        assert all_valid(tmp_path)
        assert (tmp_path / "exit_status").read_text() == "75\n"
        assert not list(tmp_path.glob(".tmp-checkpoint*"))


@pytest.mark.slow
def test_an_automatic_batch_size_is_the_same_on_all_ranks(server, script, script_flags, tmp_path):
    flags = [*script_flags, "--train_batch_size", "auto", "--global_batch_size", 24, "--max_train_steps", 2]
    server.run([script, *flags, "--output_dir", tmp_path], 2)
    resolved = json.loads((tmp_path / "options.json").read_text())["resolved"]
    assert (resolved["micro_batch_size"], resolved["gradient_accumulation_steps"], resolved["num_processes"]) == (12, 1, 2)
    runs = server.start([script, *flags, "--dry_run", "--output_dir", tmp_path / "none"], 2)
    assert [run.wait() for run in runs] == [0, 0], runs[0].text()
    assert sum("predicted peak" in run.text() for run in runs) == 1 and not (tmp_path / "none").exists()

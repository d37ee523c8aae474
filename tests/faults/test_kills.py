"""SIGKILL at random moments, and before each touch of the disk while a checkpoint is saved, published and pruned."""

import shutil
import signal

import pytest
from conftest import end_group, slow_turns, start_script
from kills import differences, invalid_checkpoints, kill_at_random, newest

from utils.runs.checkpoints import find_checkpoint, list_checkpoints

FREQUENT = ["--max_train_steps", 24, "--checkpointing_steps", 3]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, *slow_turns(20)])
def test_random_kills_cost_nothing_but_time(server, script, script_flags, tmp_path, kills):
    tally = kill_at_random(server, script, [*script_flags, *FREQUENT], tmp_path, kills=kills, seed=1)
    assert (tally.invalid, tally.different) == ([], [])
    assert tally.kills == kills and tally.finished > 0
    if kills == 20:  # half of them aim at a save, which on a quick disk is over before some of them strike
        assert 3 <= tally.in_save < 20
    assert max(tally.updates_lost) <= 4  # a checkpoint every 3, and the update whose batch had just been fetched


@pytest.mark.slow
def test_killed_before_each_touch_of_the_disk_in_a_save(server, script, script_flags, tmp_path):
    """The save replaces an older checkpoint of the same step and prunes another: all that publishing can have to do."""
    flags = [*script_flags, "--output_dir", tmp_path / "run", "--max_train_steps", 6, "--checkpointing_steps", 2]
    [run] = server.start([script, *flags])
    assert run.wait() == 0, run.text()
    original, folder = tmp_path / "original", tmp_path / "run"
    shutil.copytree(folder, original)
    resume = [*flags, "--resume_from_checkpoint", "checkpoint-4", "--checkpoints_total_limit", 2]
    states = set()
    for moment in range(1, 100):
        shutil.copytree(original / "checkpoint-2", folder / "checkpoint-2", dirs_exist_ok=True)  # to be pruned again
        fault = ["kill-in-save", "--step", 6, "--value", moment]
        [run] = server.start(["tests/faults/inject.py", script, *fault, "--", *resume])
        if run.wait() != -signal.SIGKILL:
            break
        states.add(tuple(sorted(path.name for path in folder.glob("*checkpoint-*"))))
        assert invalid_checkpoints(folder, original) == [], moment
        path, skipped = find_checkpoint(folder, "latest")
        assert (path.name, skipped) == ("checkpoint-6", []), moment
    assert run.status == 0, run.text()
    assert moment > 30
    kinds = {name.rstrip("0123456789") for state in states for name in state}
    assert kinds >= {".tmp-checkpoint-", ".tmp-replaced-checkpoint-", ".tmp-discarded-checkpoint-", "checkpoint-"}
    assert any("checkpoint-6" not in state for state in states)  # between the two renames, and it came back
    assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-4", "checkpoint-6"]
    assert not list(folder.glob(".tmp-*"))  # the save that came through has cleared what the others left
    assert differences(folder, original) == []


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, *slow_turns(2)])
def test_kill_9_of_a_run_started_as_users_do(server, script, script_flags, tmp_path, processes):
    """A process of its own, with all its imports and a loader's worker; and two under torchrun."""
    flags = [*script_flags, *FREQUENT, "--train_batch_size", 8 // processes]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    runs = server.start([script, *flags, "--output_dir", whole], processes)
    assert [run.wait() for run in runs] == [0] * processes, runs[0].text()
    process = start_script(script, [*flags, "--dataloader_num_workers", 1, "--output_dir", killed], processes)
    try:
        while newest(killed) < 6:
            assert process.poll() is None, process.communicate()
    finally:
        end_group(process)  # SIGKILL
    assert newest(killed) < 24
    assert invalid_checkpoints(killed, whole) == []
    runs = server.start([script, *flags, "--output_dir", killed, "--resume_from_checkpoint", "latest"], processes)
    assert [run.wait() for run in runs] == [0] * processes, runs[0].text()
    assert differences(killed, whole) == []

"""SIGKILL in each phase of a run, and before each touch of the disk while a checkpoint is saved, published and pruned; ranks
that are suspended, clocks that are set back, disks that take nothing for a while."""

import shutil
import signal

import pytest
from kills import DELAYS, PHASED, PHASES, Killer, Tally, differences, invalid_checkpoints

from utils.runs.checkpoint_files import find_checkpoint, list_checkpoints


@pytest.fixture(scope="module")
def killer(server, script, script_flags, tmp_path_factory) -> Killer:
    return Killer(server, script, [*script_flags, *PHASED], tmp_path_factory.mktemp("runs"), seed=1)


@pytest.fixture(scope="module")
def killer_of_two(server, script, script_flags, tmp_path_factory) -> Killer:
    flags = [*script_flags, *PHASED, "--train_batch_size", 4]
    return Killer(server, script, flags, tmp_path_factory.mktemp("runs"), seed=1, processes=2)


def assert_costs_nothing_but_time(killer: Killer, phase: str, kills: int) -> None:
    tally, rounds = Tally(), 0
    while not tally.hits and rounds < 5:  # the others came when the phase was over, which is short on a quick disk
        tally, rounds = tally + killer.kill_by_phase({phase: kills})[phase], rounds + 1
    assert (tally.invalid, tally.different) == ([], [])
    assert tally.kills >= kills and tally.ends > 0 and tally.hits > 0
    assert max(tally.updates_lost) <= 4  # a checkpoint every 3, and the update whose batch had just been fetched


def test_kills_in_the_first_save_cost_nothing_but_time(server, script, script_flags, tmp_path):
    flags = [*script_flags, "--max_train_steps", 4, "--checkpointing_steps", 3, "--save_images_steps", 9]
    assert_costs_nothing_but_time(Killer(server, script, flags, tmp_path, seed=1), "the first save of a run", 1)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_kills_cost_nothing_but_time(killer, phase):
    assert_costs_nothing_but_time(killer, phase, 2)


@pytest.mark.slow
def test_kills_while_the_other_rank_saves(killer_of_two):
    assert_costs_nothing_but_time(killer_of_two, "a save", 2)


@pytest.mark.slow
@pytest.mark.parametrize("delay", DELAYS)
def test_delays_cost_nothing_but_time(killer_of_two, tmp_path, delay):
    assert DELAYS[delay](killer_of_two, tmp_path / "run") == []


@pytest.mark.slow
def test_killed_before_each_touch_of_the_disk_in_a_save(server, script, script_flags, tmp_path):
    """The save replaces an older checkpoint of the same step and prunes another: all that publishing can have to do."""
    flags = [*script_flags, "--output_dir", tmp_path / "run", "--max_train_steps", 6, "--checkpointing_steps", 2]
    server.run([script, *flags])
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

"""SIGKILL in each phase of a run; ranks that are suspended, clocks that are set back, disks that take nothing for a while."""

import pytest
from kills import DELAYS, PHASED, PHASES, Killer, Tally


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

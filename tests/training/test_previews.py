"""When a run makes sample grids, and what it leaves out once it is told to stop."""

from types import SimpleNamespace

import pytest

from train_ddpm import parse_args
from utils.training.between_updates import Periodic
from utils.training.length import RunLength, preview_steps


@pytest.mark.parametrize(
    ("per_epoch", "given", "due"),
    [
        (2, [], [100]),  # 24 photos: an epoch is too short
        (2, ["--save_images_epochs", "10"], [2, 22, 42, 62, 82, 102]),
        (2, ["--save_images_steps", "40"], [40, 80]),
        (30, [], [30]),
    ],
    ids=["a small set", "epochs that were asked for", "updates that were asked for", "a larger set"],
)
def test_sample_grids_of_a_small_set_are_some_updates_apart(per_epoch, given, due):
    words = ["--dataset_name", "a/b", *given]
    run = SimpleNamespace(options=parse_args(words), state=SimpleNamespace(step=0), length=RunLength(16, per_epoch, 120))
    periodic = Periodic.__new__(Periodic)
    periodic._run, periodic._preview_steps, found = run, preview_steps(run.options, per_epoch), []
    for run.state.step in range(1, 121):
        if periodic._previews():
            found.append(run.state.step)
    assert found == due


@pytest.mark.parametrize(("stopped", "made"), [(False, ["grid", "look"]), (True, ["grid"])])
def test_a_stop_while_samples_are_made_also_leaves_out_the_look_at_the_network(stopped, made):
    """Which takes minutes for a large network on a CPU."""
    done = []
    grids = SimpleNamespace(newest="a.png", stopped=stopped)
    grids.make, grids.probe = lambda: done.append("grid"), lambda: done.append("look")
    attempts = SimpleNamespace(make=lambda what, action: action())
    periodic = Periodic.__new__(Periodic)
    periodic._run, periodic._grids = SimpleNamespace(attempts=attempts), grids
    periodic._show()
    assert done == made

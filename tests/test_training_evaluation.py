"""Evaluation in the training loop: the same figures on two processes, no trace in the training, the best checkpoint by it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import logged_scalars, run_script
from diffusers import DDPMScheduler
from safetensors.torch import load_file
from test_sampling import tiny_unet

from utils.checkpoints import TrainState, list_checkpoints, read_state
from utils.data import load_images
from utils.errors import UserError
from utils.history import HISTORY, read_history
from utils.training_evaluation import TrainingEvaluation

EVALUATED = ["--eval_steps", "4", "--eval_images", "30", "--eval_batch_size", "8"]


@pytest.fixture(scope="module")
def runs(tiny_flags, tmp_path_factory):
    """The same training without evaluation, with it, and with it on two processes of half the batch."""
    folder = tmp_path_factory.mktemp("runs")
    flags = [*tiny_flags, "--max_train_steps", "8", "--checkpointing_steps", "8"]
    return folder, flags


def test_two_processes_log_the_figures_of_one_and_the_training_is_as_without(runs, train, capsys):
    folder, flags = runs
    assert train([*flags, "--output_dir", folder / "without"]) == 0
    assert train([*flags, *EVALUATED, "--best_metric", "fd", "--output_dir", folder / "one"]) == 0
    said = capsys.readouterr()
    assert "evaluation after 4 updates: fd_randconv " in said.out + said.err and "it took " in said.out + said.err
    for name in ("model", "ema"):
        first, second = (load_file(folder / run / "checkpoint-8" / f"{name}.safetensors") for run in ("without", "one"))
        assert all(torch.equal(first[key], second[key]) for key in first)

    result = run_script("train_ddpm.py", [*flags, *EVALUATED, "--train_batch_size", "4", "--output_dir", folder / "two"], 2)
    assert result.returncode == 0, result.stderr[-3000:]
    for tag in ("eval/fd_randconv", "eval/coverage", "eval/variance_ratio"):
        one, two = (logged_scalars(folder / run, tag) for run in ("one", "two"))
        assert sorted(one) == [4, 8]
        # The weights agree to rounding (Adam enlarges it), and so do the samples.
        np.testing.assert_allclose(list(one.values()), list(two.values()), rtol=0.01)

    # What the record keeps, and the best checkpoint.
    records = [record for record in read_history(folder / "one" / HISTORY) if "evaluation" in record]
    assert [record["step"] for record in records] == [4, 8]
    figures = records[-1]["evaluation"]
    assert figures["images"] == 30 and figures["reference_images"] == 1797 and figures["floor"]["images"] == 30
    assert (folder / "one" / "evaluation" / "nearest.png").stat().st_size > 1000
    state = read_state(list_checkpoints(folder / "one")[-1])
    best = min(records, key=lambda record: record["evaluation"]["fd"])
    assert (state.best_metric, state.best_step) == ("fd_randconv", best["step"])
    assert state.best_value == best["evaluation"]["fd"] and state.metrics["kd_randconv"] == figures["kd"]


def test_mistakes_are_told_before_the_first_update(train, tiny_flags, tmp_path):
    for flags, message in (
        (["--best_metric", "fd"], "set --eval_steps"),
        (["--eval_steps", "4", "--eval_images", "9"], "--eval_images must be at least 10"),
        (["--eval_steps", "0"], None),
    ):
        with pytest.raises(UserError if message else SystemExit, match=message):
            train([*tiny_flags, *flags, "--output_dir", tmp_path / "run"])
    assert not list(tmp_path.glob("run/checkpoint-*"))


def test_a_stop_leaves_the_evaluation_out(tmp_path, tmp_path_factory):
    digits = load_images("digits", resolution=8, image_channels=1, cache_dir=str(tmp_path_factory.mktemp("cache")))
    process = SimpleNamespace(
        process_index=0, num_processes=1, device=torch.device("cpu"), is_main_process=True, gather=lambda tensor: tensor
    )
    asked, recorded = [], []
    unet, scheduler = tiny_unet().eval(), DDPMScheduler(num_train_timesteps=20)
    evaluation = TrainingEvaluation(
        process,
        unet,
        scheduler,
        tmp_path,
        training=digits,
        held_out=digits.subset([]),
        trackers=SimpleNamespace(log=lambda *args, **kwargs: recorded.append(args)),
        doctor=SimpleNamespace(record=lambda *args: recorded.append(args)),
        every=5,
        best_metric="fd",
        num_images=40,
        batch_size=10,
        sampler="ddim",
        num_inference_steps=3,
        seed=0,
        cache_dir=str(tmp_path),
        should_stop=lambda: asked.append(0) or len(asked) > 4,  # in the second chunk
        say=recorded.append,
    )
    assert [step for step in range(1, 13) if evaluation.due(step, 12)] == [5, 10, 12]
    assert not evaluation.make(TrainState(step=5))
    assert len(asked) == 5 and recorded == [] and list(tmp_path.glob("evaluation/*")) == []

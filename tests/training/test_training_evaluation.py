"""Evaluation in the training loop: the same figures on two processes, no trace in the training, the best checkpoint by it."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import logged_scalars
from diffusers import DDPMScheduler
from safetensors.torch import load_file
from test_sampling import tiny_unet

from utils.core.signals import EXIT_STOPPED
from utils.data.dataset import load_images
from utils.options.flags import DataOptions, DDPMOptions
from utils.runs.checkpoint_files import list_checkpoints
from utils.runs.history import HISTORY, read_history
from utils.runs.state import TrainState, read_state
from utils.training.attempts import Attempts
from utils.training.evaluation import SampleEvaluation
from utils.training.length import RunLength
from utils.training.progress import ProgressBar

EVALUATED = ["--eval_steps", "4", "--eval_images", "30", "--eval_batch_size", "8"]


@pytest.mark.slow
def test_two_processes_log_the_figures_of_one_and_the_training_is_as_without(server, tiny_flags, train, tmp_path, capsys):
    folder, flags = tmp_path, [*tiny_flags, "--checkpointing_steps", "8"]
    assert train([*flags, "--output_dir", folder / "without"]) == 0
    assert train([*flags, *EVALUATED, "--best_metric", "fd", "--output_dir", folder / "one"]) == 0
    said = capsys.readouterr()
    assert "evaluation after 4 updates: fd_randconv " in said.out + said.err and "it took " in said.out + said.err
    for name in ("model", "ema"):
        first, second = (load_file(folder / run / "checkpoint-8" / f"{name}.safetensors") for run in ("without", "one"))
        assert all(torch.equal(first[key], second[key]) for key in first)

    server.run(["train_ddpm.py", *flags, *EVALUATED, "--train_batch_size", "4", "--output_dir", folder / "two"], 2)
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


@pytest.mark.slow
def test_an_evaluation_that_a_stop_left_out_is_made_on_resume(train_script, script_flags, tmp_path, monkeypatch):
    flags = [*script_flags, "--checkpointing_steps", "4", *EVALUATED, "--best_metric", "fd", "--output_dir", tmp_path]
    sampled = SampleEvaluation._sample

    def evaluated() -> list[int]:
        return [record["step"] for record in read_history(tmp_path / HISTORY) if "evaluation" in record]

    def stopped_at_the_end(self, numbers):
        if len(list_checkpoints(tmp_path)) > 0:  # the one of update 4 is made after its evaluation
            os.kill(os.getpid(), signal.SIGTERM)
        return sampled(self, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(SampleEvaluation, "_sample", stopped_at_the_end)
        assert train_script(flags) == EXIT_STOPPED
        assert read_state(list_checkpoints(tmp_path)[-1]).evaluated_step == 4
        assert train_script([*flags, "--resume_from_checkpoint", "latest"]) == EXIT_STOPPED  # and again
    assert evaluated() == [4]
    for _ in range(2):  # once
        assert train_script([*flags, "--resume_from_checkpoint", "latest"]) == 0
        assert evaluated() == [4, 8]
        state = read_state(list_checkpoints(tmp_path)[-1])
        assert (state.step, state.evaluated_step, state.best_metric) == (8, 8, "fd_randconv")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return load_images(
        DataOptions(dataset_name="digits", resolution=8, image_channels=1, cache_dir=str(tmp_path_factory.mktemp("cache")))
    )


@pytest.fixture
def evaluate_in(tmp_path):
    """A SampleEvaluation of one process, and the lists of what it recorded and said."""

    def make(training, validation, stopping=lambda: False, seed=0):
        process = SimpleNamespace(
            process_index=0, num_processes=1, device=torch.device("cpu"), is_main_process=True, gather=lambda tensor: tensor
        )
        recorded, said = [], []
        options = DDPMOptions(eval_steps=5, eval_images=40, best_metric="fd", evaluation_batch_size=10, seed=seed)
        options.cache_dir, options.ddpm_num_inference_steps = str(tmp_path), 3
        state = TrainState(step=5)
        run = SimpleNamespace(
            options=options,
            accelerator=process,
            output_dir=tmp_path,
            data=SimpleNamespace(
                training=training, validation=validation, samples=SimpleNamespace(shape=training.shape), autoencoder=None
            ),
            objective=SimpleNamespace(
                exported=tiny_unet().eval(), noise_scheduler=DDPMScheduler(num_train_timesteps=20), predict=None
            ),
            state=state,
            attempts=Attempts(process, tmp_path, state, said.append),
            length=RunLength(8, 1, 12),
            progress=ProgressBar(False, 0, 1),
            trackers=SimpleNamespace(log=lambda *args, **kwargs: None),
            doctor=SimpleNamespace(record=lambda *args: recorded.append(args)),
            stopping=stopping,
            print_line=said.append,
        )
        return SampleEvaluation(run), recorded, said

    return make


def test_a_stop_leaves_the_evaluation_out(digits, evaluate_in, tmp_path):
    asked = []
    should_stop = lambda: asked.append(0) or len(asked) > 4  # noqa: E731  in the second chunk
    evaluation, recorded, said = evaluate_in(digits, digits.subset([]), stopping=should_stop)
    due = []
    for evaluation._run.state.step in range(13):
        due += [evaluation._run.state.step] * evaluation.due()
    assert due == [5, 10, 12]
    evaluation._run.state.step = 5
    evaluation.make()
    assert evaluation.due()
    assert len(asked) == 5 and recorded == said == [] and list(tmp_path.glob("evaluation/*")) == []


def test_held_out_images_are_what_copies_are_judged_by(digits, evaluate_in, monkeypatch):
    monkeypatch.setattr("utils.training.evaluation.MAX_COMPARED_BYTES", 500 * 64)
    evaluation, recorded, _ = evaluate_in(digits.subset(range(1500)), digits.subset(range(1500, 1797)))
    evaluation.make()
    ((_, record),) = recorded
    found = record["evaluation"]["memorisation"]
    assert found["compared_with"] == "held-out images"
    assert found["training_images"] == 500  # of 1,500: as much as the others have patience for


def test_any_seed_will_do(digits, evaluate_in):
    evaluation, recorded, said = evaluate_in(digits, digits.subset([]), seed=-1)
    evaluation.make()
    assert len(recorded) == 1 and not any("left out" in line for line in said)


def test_copies_are_told_once_and_are_never_the_best(digits, evaluate_in, monkeypatch):
    training, shown = digits.subset(range(1500)), torch.from_numpy(digits.fetch(range(40)))
    evaluation, _, said = evaluate_in(training, digits.subset(range(1500, 1797)))
    state, samples = evaluation._run.state, [torch.randint_like(shown, 256), shown, shown]
    for state.step, images in zip((5, 10, 12), samples):
        monkeypatch.setattr(evaluation, "_sample", lambda numbers, images=images: images[numbers])
        evaluation.make()
    copying = [line for line in said if "copies" in line]
    assert len(copying) == 1 and copying[0].startswith(
        "from update 10 on, more samples are copies of training images than held-out"
    )
    assert state.copying_since == 10 and state.best_step == 5
    assert not state.record("validation loss", 0.0, decides=True) and state.validations_without_improvement
    state.copying_since = None
    assert state.record("validation loss", 0.0, decides=True)

"""What a run can do without: whatever fails there, the run goes on, and its training is as if it had not been tried."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import same_bytes

from utils.core.distributed import from_main_process, on_main_process, waited_for
from utils.core.errors import LostProcess, UserError
from utils.runs.state import TrainState
from utils.training.attempts import Attempts
from utils.training.evaluation import Validation
from utils.training.samples import SampleGrids

FLAGS = """
    --max_train_images 40 --max_train_steps 6 --validation_images 8 --validation_steps 2 --save_images_steps 2
    --eval_steps 2 --eval_images 12 --checkpointing_steps 5 --dropout 0.2 --adaptive_clipping
"""


def fail(*arguments, **keywords):
    """As a fault of a library would, having touched all that a training has in common with what is made beside it."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    raise LookupError(f"planted, of {random.random()}")  # other digits each time


def plant(monkeypatch) -> None:
    """Validation, evaluation, pictures and the look at the network fail, as late as they can."""
    mean_loss = Validation.mean_loss

    def validated(self):
        mean_loss(self)
        self._run.state.best_step = self._run.state.metrics["planted"] = 1
        fail()

    monkeypatch.setattr(Validation, "mean_loss", validated)
    monkeypatch.setattr("utils.training.evaluation.save_png", fail)
    monkeypatch.setattr(SampleGrids, "_write", fail)
    monkeypatch.setattr("train_ddpm.examine_network", fail)


def test_a_run_whose_validation_samples_and_evaluation_fail_trains_on_bit_for_bit(
    train, tiny_flags, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as alone:
        alone.setattr(Attempts, "make", lambda self, what, action, *arguments: what == "the pipeline" and action() is None)
        assert train([*tiny_flags, *FLAGS.split(), "--output_dir", tmp_path / "alone"]) == 0
    capsys.readouterr()
    with monkeypatch.context() as planted:
        plant(planted)
        assert train([*tiny_flags, *FLAGS.split(), "--output_dir", tmp_path / "run"], fails=True) == 0
    said = "".join(capsys.readouterr()).splitlines()

    alone, run = (tmp_path / name / "checkpoint-5" for name in ("alone", "run"))
    assert {path.name for path in alone.iterdir()} >= {"model.safetensors", "ema.safetensors", "optimizer.bin", "state.json"}
    for path in alone.iterdir():
        if path.name not in ("MANIFEST.json", "state.json"):
            assert same_bytes(run / path.name, path), path.name
    states = [json.loads((folder / "state.json").read_text()) for folder in (alone, run)]
    assert states[0] == states[1] and states[1]["best_step"] is None and states[1]["evaluated_step"] == 4

    lines = [line for line in said if line.startswith("left out: ")]
    names = {
        "the validation": "validated",
        "the evaluation": "_evaluate",
        "the samples": "fail",
        "the look at the network": "fail",
    }
    assert len(lines) == len(names)  # each three times
    for what, function in names.items():
        name = f"{what.removeprefix('the ').replace(' ', '-')}-2-rank0.txt"
        [line] = [line for line in lines if line.startswith(f"left out: {what} after 2 updates: LookupError: planted, of 0.")]
        assert line.endswith(f"(see errors/{name})")
        text = (tmp_path / "run" / "errors" / name).read_text()
        assert "Traceback (most recent call last)" in text and f"in {function}\n" in text
        assert any(line.startswith("left out in all: ") and f"{what} 3 times" in line for line in said)
    assert len(list((tmp_path / "run" / "errors").iterdir())) == len(names)


PROCESS = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"), is_main_process=True)


@pytest.fixture
def attempts(tmp_path):
    """(an Attempts of one process, what it said)."""
    said: list[str] = []
    return Attempts(PROCESS, tmp_path, TrainState(step=3), said.append), said


@pytest.mark.parametrize("passes", [KeyboardInterrupt, SystemExit, LostProcess("rank 1 has ended")])
def test_what_ends_a_process_is_not_held_up(attempts, passes, tmp_path):
    def ended():
        raise passes

    with pytest.raises(passes if isinstance(passes, type) else type(passes)):
        attempts[0].make("the samples", ended)
    assert attempts[1] == [] and not (tmp_path / "errors").exists()


def test_what_is_said_of_a_failure(attempts, tmp_path):
    """Of a mistake of the user one line; of a failure behind such a line, and of any other, the traceback too."""
    made, said = attempts

    def raises(error, cause=None):
        raise error from cause

    assert made.make("the samples", lambda: None) and said == [] and made.summary() is None
    assert not made.make("the samples", raises, UserError("No space left on device: a.png"))
    assert said == ["left out: the samples after 3 updates: No space left on device: a.png"]
    assert made.summary() is None and not (tmp_path / "errors").exists()
    assert not made.make("the evaluation", raises, UserError("no figures"), ValueError("NaN"))
    assert said[1:] == ["left out: the evaluation after 3 updates: no figures (see errors/evaluation-3-rank0.txt)"]
    assert "ValueError: NaN" in (tmp_path / "errors" / "evaluation-3-rank0.txt").read_text()
    for number in range(3):
        assert not made.make("the samples", raises, UserError(f"No space left on device: {number}.png"))
        assert not made.make("the samples", raises, ValueError(f"{number} values"))
    assert said[2:] == [
        "left out: the samples after 3 updates: No space left on device: 0.png",
        "left out: the samples after 3 updates: ValueError: 0 values (see errors/samples-3-rank0.txt)",
    ]
    assert made.summary() == "left out in all: the samples 7 times, the evaluation 1 time"


def test_a_folder_that_takes_no_file_costs_the_traceback_alone(attempts, tmp_path):
    (tmp_path / "errors").write_text("in the way")
    assert not attempts[0].make("the samples", fail)
    assert attempts[1][0].startswith("left out: the samples after 3 updates: LookupError: planted")


FAULT = "tests/faults/inject.py"


@pytest.mark.slow
def test_a_failure_on_one_process_is_left_out_by_both(server, tiny_flags, tmp_path):
    flags = ["--train_batch_size", 4, "--max_train_steps", 4, "--save_images_epochs", 999, "--validation_steps", 2]
    flags += ["--validation_images", 8, "--collective_timeout", 60, "--output_dir", tmp_path]
    fault = ["fail-between", "--rank", 1, "--value", "alone"]
    printed = server.run([FAULT, "train_ddpm.py", *fault, "--", *tiny_flags, *flags], 2)
    [said] = [line for line in printed.splitlines() if "left out: " in line]
    assert said == "left out: the validation after 2 updates: rank 1: LookupError: planted (see errors/validation-2-rank1.txt)"
    assert [path.name for path in (tmp_path / "errors").iterdir()] == ["validation-2-rank1.txt"]


@pytest.mark.slow
def test_a_failure_while_the_others_meet_ends_the_run_in_time(server, tiny_flags, tmp_path):
    """Rank 1 never makes the collective call in which rank 0 waits."""
    flags = ["--train_batch_size", 4, "--max_train_steps", 4, "--save_images_epochs", 999, "--cpu_threads", 1]
    flags += ["--validation_images", 8, "--validation_steps", 2, "--collective_timeout", 5, "--output_dir", tmp_path]
    fault = ["fail-between", "--rank", 1, "--value", "apart"]
    runs = server.start([FAULT, "train_ddpm.py", *fault, "--", *tiny_flags, *flags], 2)
    assert [run.wait(60) for run in runs] == [1, 1]
    assert "RuntimeError: the validation after 2 updates" in runs[1].text() and "planted" in runs[1].text()
    assert "in planted\n" in (tmp_path / "errors" / "validation-2-rank1.txt").read_text()


SCRIPT = """
import os, sys
sys.path.insert(0, {root!r})
import torch
from utils.core.distributed import make_accelerator, on_main_process, together
from utils.core.entrypoint import leave_now
from utils.core.errors import UserError
accelerator = make_accelerator(cpu_threads=1)
rank = accelerator.process_index

def fails(where, error):
    if rank in where:
        raise error

def outcome(call):
    try:
        call()
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"

def in_turn(*failures):
    with together(accelerator, "shopping", "buy more"):
        for where, error in failures:
            fails(where, error)

memory = torch.OutOfMemoryError("CUDA out of memory")
found = [
    outcome(lambda: in_turn(([1], ValueError("v")))),
    outcome(lambda: in_turn(([1], UserError("u")))),
    outcome(lambda: in_turn(([1], memory))),
    outcome(lambda: in_turn(([0], UserError("u")), ([1], ValueError("v")))),
    outcome(lambda: in_turn(([0], UserError("first")), ([1], UserError("second")))),
    outcome(lambda: on_main_process(accelerator, "shopping", fails, [0], ValueError("v"))),
    outcome(lambda: on_main_process(accelerator, "shopping", fails, [0], UserError("two\\nlines"))),
    outcome(lambda: on_main_process(accelerator, "shopping", fails, [0], OSError(28, "full", "a.png"))),
    outcome(lambda: in_turn()),
]
print(repr(found), flush=True)
leave_now(0)
"""


@pytest.mark.slow
def test_two_processes_fail_together(server, tmp_path):
    script = tmp_path / "together.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parent.parent.parent)))
    first, second = server.start([script], 2)
    assert [first.wait(60), second.wait(60)] == [0, 0], first.text() + second.text()
    of_user = ["UserError: u", "UserError: out of memory (CUDA out of memory); buy more"]
    disk = ["UserError: two\nlines", "UserError: full: a.png", None]
    elsewhere = "FailedElsewhere: rank {}: ValueError: v"
    assert eval(first.text().splitlines()[-1]) == [
        *(elsewhere.format(1), *of_user, elsewhere.format(1), "UserError: first", "ValueError: v", *disk),
    ]
    assert eval(second.text().splitlines()[-1]) == [
        *("ValueError: v", *of_user, "ValueError: v", "UserError: first", elsewhere.format(0), *disk),
    ]


def test_what_needs_all_processes_is_refused_where_each_works_alone(attempts):
    """Also in one process, where it would do no harm: in several, those that wait would never come."""
    for meeting in (
        lambda: attempts[0].make("the profile", print),
        lambda: on_main_process(PROCESS, "writing", print),
        lambda: from_main_process(1),
    ):
        with pytest.raises(RuntimeError, match="needs all processes, inside 'packing'"), waited_for(PROCESS, "packing"):
            meeting()
        with pytest.raises(RuntimeError, match="needs all processes, inside 'hashing'"):
            on_main_process(PROCESS, "hashing", meeting)
        meeting()  # and outside it is none

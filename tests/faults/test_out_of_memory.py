"""Memory that runs out between two updates costs what ran out of it: not the run, not its pipeline, not another rank."""

import json

import pytest
from conftest import slow_turns

from utils.runs.state import read_state

LEFT_OUT = {
    "sample": ("a preview of 4 samples", "--eval_batch_size", 2),
    "validation": ("a validation", "--train_batch_size", 2),
    "probe": ("examining the network", "--train_batch_size", 2),
}


@pytest.mark.parametrize(
    ("processes", "rank", "fails"), [(1, 0, "sample,validation,probe"), *slow_turns((2, 1, "sample,validation"))]
)
def test_what_runs_out_of_memory_between_updates_is_left_out_by_all(
    server, script, script_flags, tmp_path, processes, rank, fails
):
    flags = [*script_flags, "--output_dir", tmp_path, "--train_batch_size", 8 // processes, "--validation_images", 8]
    flags += ["--checkpointing_steps", 8]
    flags += ["--validation_steps", 4, "--save_images_steps", 4, "--early_stopping_patience", 1]
    flags += ["--eval_steps", 4, "--eval_images", 30, "--evaluation_batch_size", 8, "--collective_timeout", 60]
    fault = ["oom-between", "--rank", rank, "--value", fails]
    runs = server.start(["tests/faults/inject.py", script, *fault, "--", *flags], processes)
    assert [run.wait(120) for run in runs] == [0] * processes, runs[rank].text()[-3000:]
    said = [line for run in runs for line in run.text().splitlines() if "left out: " in line]
    for name in fails.split(","):
        what, flag, times = LEFT_OUT[name]
        lines = [line for line in said if what in line]
        assert len(lines) == times and all("out of memory (CUDA out of memory. Tried" in line for line in lines), said
        assert all(f"set a smaller {flag}" in line for line in lines)
    evaluations = [line for line in said if "the evaluation after" in line]
    assert len(evaluations) == 2 and all("--evaluation_batch_size" in line for line in evaluations)
    assert len(said) == sum(LEFT_OUT[name][2] for name in fails.split(",")) + 2
    assert json.loads((tmp_path / "model_index.json").read_text())["unet"]
    assert "samples/" not in (tmp_path / "README.md").read_text()
    state = read_state(tmp_path / "checkpoint-8")
    assert state.best_step is None and state.validations_without_improvement == 0

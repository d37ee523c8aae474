"""Memory that runs out between two updates costs what ran out of it: not the run, not its pipeline, not another rank."""

import json

import pytest
from conftest import slow_turns

from utils.runs.state import read_state

LEFT_OUT = {  # twice, and said once
    "sample": ("the samples after 4 updates", "--eval_batch_size"),
    "validation": ("the validation after 4 updates", "--train_batch_size"),
    "probe": ("the look at the network after 4 updates", "--train_batch_size"),
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
        what, flag = LEFT_OUT[name]
        [line] = [line for line in said if what in line]
        assert "out of memory (CUDA out of memory. Tried" in line and f"set a smaller {flag}" in line
        assert f"{what.removesuffix(' after 4 updates')} 2 times" in runs[0].text()
    [evaluation] = [line for line in said if "the evaluation after" in line]
    assert "--evaluation_batch_size" in evaluation
    assert len(said) == len(fails.split(",")) + 1 and not (tmp_path / "errors").exists()
    assert json.loads((tmp_path / "model_index.json").read_text())["unet"]
    assert "samples/" not in (tmp_path / "README.md").read_text()
    state = read_state(tmp_path / "checkpoint-8")
    assert state.best_step is None and state.validations_without_improvement == 0

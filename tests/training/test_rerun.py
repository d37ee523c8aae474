"""Updates that are made again: the same bits, or it is said where a device has erred; the training goes on as if it had not."""

import json

import pytest
from conftest import logged_scalars, same_bytes, slow_turns

INJECT = "tests/faults/inject.py"
WEIGHTS = "checkpoint-8/model.safetensors"


def outcomes(run) -> list[dict]:
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    return [line["rerun"] for line in lines if "rerun" in line]


def findings(run) -> list[dict]:
    return [each for each in json.loads((run / "diagnosis.json").read_text()) if each["code"] == "device-errs"]


@pytest.mark.slow
def test_updates_made_again_leave_the_training_as_it_was(server, script, script_flags, tmp_path):
    flags = [*script_flags, "--gradient_accumulation_steps", 2, "--train_batch_size", 4, "--max_train_steps", 8]
    for name, more in (("plain", []), ("again", ["--rerun_steps", 3])):
        server.run([script, *flags, *more, "--checkpointing_steps", 4, "--output_dir", tmp_path / name])
    assert outcomes(tmp_path / "again") == [{"outcome": "same"}] * 2 and not findings(tmp_path / "again")
    for step in (4, 8):
        for file in ("model.safetensors", "optimizer.bin", "ema.safetensors"):
            place = f"checkpoint-{step}/{file}"
            assert same_bytes(tmp_path / "plain" / place, tmp_path / "again" / place), place
    plain, again = (logged_scalars(tmp_path / name, "train/loss") for name in ("plain", "again"))
    assert plain == again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "stage"),
    [("gradient:3", "gradient"), *slow_turns(("weights:5", "own gradient"), ("activation:12", "loss"), ("batch:20", "batch"))],
)
def test_a_bit_that_flips_is_named_and_changes_nothing(server, script, script_flags, tmp_path, where, stage):
    flags = [*script_flags, "--max_train_steps", 8, "--checkpointing_steps", 8]
    server.run([script, *flags, "--output_dir", tmp_path / "plain"])
    faulty = [INJECT, script, "flip", "--value", where, "--step", 4, "--"]
    server.run([*faulty, *flags, "--rerun_steps", 2, "--output_dir", tmp_path / "flipped"])
    expected = [{"outcome": "same"}] * 4
    expected[1] = {"outcome": "wrong", "first": True, "stage": stage, "ranks": [0]}
    assert outcomes(tmp_path / "flipped") == expected
    [found] = findings(tmp_path / "flipped")
    assert found["severity"] == "critical" and found["step"] == 4
    assert same_bytes(tmp_path / "plain" / WEIGHTS, tmp_path / "flipped" / WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "outcome"), [(4, "wrong"), (0, "ranks differ")])
def test_the_rank_that_errs_is_named(server, tiny_flags, tmp_path, step, outcome):
    """Once, or each time in the same way; of three, since of two neither is known to be right."""
    flags = [*tiny_flags, "--train_batch_size", 4, "--max_train_steps", 6, "--rerun_steps", 4, "--output_dir", tmp_path]
    faulty = [INJECT, "train_ddpm.py", "flip", "--value", "activation:22", "--step", step, "--rank", 1, "--"]
    server.run([*faulty, *flags], 3)
    [found] = outcomes(tmp_path)
    assert (found["outcome"], found["stage"], found["ranks"]) == (outcome, "loss", [1])
    assert "rank 1" in findings(tmp_path)[0]["evidence"]

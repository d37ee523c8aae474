"""Updates that are made again: the same bits, or it is said where a device has erred; the training goes on as if it had not."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import logged_scalars, same_bytes, slow_turns

from utils.diagnostics.audit.continuity import Continuity
from utils.diagnostics.audit.elements import digest
from utils.optim.clipping import clip_gradients
from utils.optim.nonfinite import BadUpdates
from utils.training.rerun import STAGES, Execution, Rerun

INJECT = "tests/faults/inject.py"
WEIGHTS = "checkpoint-8/model.safetensors"


def outcomes(run) -> list[dict]:
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    return [line["rerun"] for line in lines if "rerun" in line]


def findings(run) -> list[dict]:
    return [each for each in json.loads((run / "diagnosis.json").read_text()) if each["code"] == "device-errs"]


def test_a_digest_is_that_of_the_numbers_wherever_they_lie():
    numbers = torch.randn(9001)
    for view in (numbers[1:], numbers[1:-1], numbers[2:], numbers[::2], numbers[1:].view(-1, 9)[:, 1:]):
        assert digest([view]) == digest([view.clone()])
    assert digest([numbers[1:]]) == 3 * numbers[1:].clone().view(torch.int64).sum()  # what earlier ledgers hold


@pytest.mark.parametrize(
    ("ranks", "device", "made_again"), [(1, "cuda", True), (2, "cuda", True), (3, "cuda", False), (3, "cpu", True)]
)
def test_sums_that_ddp_makes_in_another_order_are_not_compared(monkeypatch, ranks, device, made_again):
    """Its buckets are sorted after the first update of a process."""
    monkeypatch.setattr("utils.training.rerun.State", lambda run: None)
    run = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=ranks, device=torch.device(device)),
        state=SimpleNamespace(step=4),
        options=SimpleNamespace(rerun_steps=1),
        objective=SimpleNamespace(network=torch.nn.Linear(2, 1)),
    )
    rerun, due = Rerun(run), []
    for step in (4, 5):
        rerun.begin(step)
        due.append(rerun.due)
    assert due == [made_again, True]


@pytest.mark.parametrize(
    ("errors", "repeats", "outcome", "first", "kept"),
    [
        ([5.0, 0, 0, 0], False, "wrong", True, (1, 2, 3)),
        ([0, 5.0, 0, 0], False, "wrong", False, (0, 2, 3)),
        ([0, 0, 0, 5.0], False, "wrong", False, (0, 1, 2)),
        ([torch.nan, 0, 0, 0], False, "wrong", True, (1, 2, 3)),
        ([0, torch.nan, 0, 0], False, "wrong", False, (0, 2, 3)),
        ([torch.inf, torch.nan, 0, 0], False, "wrong", True, (2, 3)),
        ([0, 0, 0, 0], False, "not repeatable", True, (0,)),
        ([1.0, 0, 0, 0], True, "wrong", True, (1,)),
        ([0, 1.0, 0, 0], True, "wrong", False, (0,)),
        ([1.0, 0, 2.0, 0], True, "wrong", True, (1,)),  # two errors
        ([0, 1.0, 0, 1.0], True, "wrong", False, (0,)),
        ([9.0, 0, 1.0, 1.001], True, "wrong", True, (2, 3)),  # all differ: one of those that are nearest to each other
    ],
)
def test_an_execution_that_errs_is_not_the_one_to_go_on_from(errors, repeats, outcome, first, kept):
    """`repeats`: whether the device makes the same bits each time."""
    torch.manual_seed(0)
    restored: list[int] = []

    def execution(place: int, error: float) -> Execution:
        weights = torch.linspace(-1, 1, 1000) + (0 if repeats else 1e-6 * torch.randn(1000))
        weights[3] += error
        after = SimpleNamespace(weights=lambda: [weights], restore=lambda: restored.append(place))
        return Execution([[int(digest([weights]))] * len(STAGES)], after)

    accelerator = SimpleNamespace(num_processes=1, device=torch.device("cpu"), gather=lambda tensor: tensor)
    rerun = Rerun(SimpleNamespace(accelerator=accelerator, state=SimpleNamespace(step=0)))
    rerun._repeats, rerun._executions = repeats, [execution(*each) for each in enumerate(errors)]
    found = rerun._compare()
    assert (found["outcome"], found["first"], found["ranks"]) == (outcome, first, [0])
    assert len(restored) == 1 and restored[0] in kept


@pytest.mark.parametrize("eager", [True, False])
def test_an_update_that_ran_eagerly_is_repeated_eagerly(monkeypatch, eager):
    monkeypatch.setattr("utils.training.rerun.State", lambda run: SimpleNamespace(restore=lambda: None))
    monkeypatch.setattr(Rerun, "_digests", lambda rerun: [[0] * len(STAGES)])
    run = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu")),
        state=SimpleNamespace(step=1),
        options=SimpleNamespace(rerun_steps=1),
        objective=SimpleNamespace(network=torch.nn.Linear(2, 1)),
        doctor=SimpleNamespace(record=lambda step, record: None),
    )
    compiled = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")
    rerun = Rerun(run)
    rerun.begin(0, eager)
    assert compiled(torch.zeros(())) == 1 and rerun.again()
    assert compiled(torch.zeros(())) == (0 if eager else 1) and not rerun.again()
    assert compiled(torch.zeros(())) == 1


def test_what_was_seen_of_an_update_that_was_replaced_is_forgotten():
    weight = torch.nn.Parameter(torch.zeros(9))
    weight.grad = torch.ones(9)
    followed = Continuity({"weight": weight}, {}, {})
    bad_updates = BadUpdates(Accelerator(cpu=True), num_parameters=1)
    before = bad_updates.counts()
    for replaced in (True, False):
        followed.begin()
        followed.stepped()
        followed.end(1, torch.tensor(True))
        bad_updates.add_losses(torch.zeros(3))
        bad_updates.add(1, clip_gradients(Accelerator(cpu=True), [weight], 1.0)._replace(finite=torch.tensor(not replaced)))
        if replaced:
            weight.data += 1
            followed.restart()
            bad_updates.restore(before)
    assert all(check.healthy for check in followed.checks())
    assert bad_updates.totals() == (0, 0, 0) and "train/first_skipped_update" not in bad_updates.report()


@pytest.mark.slow
def test_reported_updates_of_a_compiled_network_are_the_same_again(server, script, script_flags, tmp_path):
    """They run eagerly; the compiled code has other bits."""
    inject = [INJECT, script, "wrong-compiler", "--value", "1.000001", "--"]
    flags = [*script_flags, "--compile", "--max_train_steps", 3, "--logging_steps", 2, "--rerun_steps", 1]
    server.run([*inject, *flags, "--output_dir", tmp_path])
    assert outcomes(tmp_path) == [{"outcome": "same"}] * 3


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
    [
        ("gradient:3", "gradient"),
        ("gradient:30", "gradient"),
        *slow_turns(("weights:5", "own gradient"), ("activation:12", "loss"), ("batch:20", "batch")),
    ],
)
def test_a_bit_that_flips_is_named_and_changes_nothing(server, script, script_flags, tmp_path, where, stage):
    flags = [*script_flags, "--max_train_steps", 8, "--checkpointing_steps", 8]
    server.run([script, *flags, "--output_dir", tmp_path / "plain"])
    faulty = [INJECT, script, "flip", "--value", where, "--step", 4, "--"]
    server.run([*faulty, *flags, "--rerun_steps", 2, "--output_dir", tmp_path / "flipped"])
    expected = [{"outcome": "same"}] * 4
    expected[1] = {"outcome": "wrong", "first": True, "stage": stage, "ranks": [0]}
    assert outcomes(tmp_path / "flipped") == expected
    found = json.loads((tmp_path / "flipped" / "diagnosis.json").read_text())
    assert [(each["code"], each["step"]) for each in found if each["severity"] == "critical"] == [("device-errs", 4)]
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

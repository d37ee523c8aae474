"""Updates that are made again: the same bits, or it is said where a device has erred; the training goes on as if it had not."""

import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import same_bytes, slow_turns, step_seen

import train_ddpm
from steady_doctor.record.followed import Followed
from utils.core.digests import digest
from utils.optim.clipping import Limit
from utils.runs.ledger import read_ledger
from utils.training.monitor import Monitor
from utils.training.rerun import STAGES, Rerun, State

INJECT = "tests/faults/inject.py"
WEIGHTS = "checkpoint-8/model.safetensors"


def history(run) -> list[dict]:
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def outcomes(run) -> list[dict]:
    return [line["rerun"] for line in history(run) if "rerun" in line]


def findings(run) -> list[dict]:
    return [each for each in json.loads((run / "diagnosis.json").read_text()) if each["code"] == "device-errs"]


def test_a_digest_is_that_of_the_numbers_wherever_they_lie():
    numbers = torch.randn(9001)
    for view in (numbers[1:], numbers[1:-1], numbers[2:], numbers[::2], numbers[1:].view(-1, 9)[:, 1:]):
        assert digest([view]) == digest([view.clone()])
    assert digest([numbers[1:]]) == 3 * numbers[1:].clone().view(torch.int64).sum()  # what earlier ledgers hold


@pytest.mark.parametrize(
    ("ranks", "device", "deterministic", "made_again"),
    [
        (1, "cuda", False, True),
        (2, "cuda", False, True),
        (3, "cuda", False, False),
        (3, "cuda", True, True),
        (3, "cpu", False, True),
    ],
)
def test_sums_that_ddp_makes_in_another_order_are_not_compared(monkeypatch, ranks, device, deterministic, made_again):
    """Its buckets are sorted after the first update of a process, unless they were sorted before."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr("utils.training.rerun.State", lambda *arguments: None)
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
    ("made", "outcome", "kept"),
    [
        ("aa", {"outcome": "same"}, None),
        ("baa", {"outcome": "wrong", "first": True, "stage": "batch", "ranks": [0]}, "a"),
        ("aba", {"outcome": "wrong", "first": False, "stage": "batch", "ranks": [0]}, "a"),
        ("aab", {"outcome": "same"}, None),
        ("abb", {"outcome": "wrong", "first": True, "stage": "batch", "ranks": [0]}, "b"),
        ("abc", {"outcome": "not repeatable", "stage": "batch", "ranks": [0]}, "a"),
    ],
)
def test_an_execution_that_errs_is_not_the_one_to_go_on_from(made, outcome, kept, monkeypatch):
    """`made`: a letter for the bits that each execution would give."""
    turns, restored, recorded = iter(made), [], []
    monkeypatch.setattr(Rerun, "_digests", lambda rerun: [[ord(newest[0])] * len(STAGES)])
    monkeypatch.setattr(
        "utils.training.rerun.State",
        lambda *_: SimpleNamespace(restore=lambda made=newest[0]: restored.append(made), restore_counters=lambda: None),
    )
    run = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1, device=torch.device("cuda")),
        state=SimpleNamespace(step=1),
        options=SimpleNamespace(rerun_steps=1),
        objective=SimpleNamespace(network=torch.nn.Linear(2, 1)),
        doctor=SimpleNamespace(record=lambda step, record: recorded.append(record["rerun"]), look=lambda: None),
    )
    newest = ["before"]
    rerun = Rerun(run)
    rerun.begin(0)
    newest[0] = next(turns)
    while rerun.again():
        newest[0] = next(turns)
    assert recorded == [outcome] and [each for each in restored if each != "before"] == ([kept] if kept else [])
    assert rerun.replaced == outcome.get("first", False)


def test_weights_that_were_replaced_are_followed_anew():
    weight = torch.nn.Parameter(torch.zeros(9))
    followed = Followed({"weight": weight}, {}, {})
    for replaced in (True, False):
        followed.begin()
        followed.stepped()
        followed.end(1, torch.tensor(True))
        if replaced:
            weight.data += 1
            followed.restart()
    followed.look()
    assert followed.changed == [(1, 0)]  # one update since the restart, and no change in it


def test_equal_states_are_kept_once(train, tiny_flags, tmp_path, monkeypatch):
    kept, made = [], []
    init = State.__init__
    monkeypatch.setattr(
        State, "__init__", lambda state, *arguments: (kept.append(weakref.ref(state)), init(state, *arguments))[1]
    )
    again = Rerun.again
    monkeypatch.setattr(Rerun, "again", lambda rerun: (again(rerun), made.append(sum(s() is not None for s in kept)))[0])
    flags = ["--max_train_steps", 2, "--rerun_steps", 2, "--logger", "none", "--save_images_epochs", 999]
    assert train([*tiny_flags, *flags, "--output_dir", tmp_path]) == 0
    assert outcomes(tmp_path) == [{"outcome": "same"}] and made == [2, 0]


def test_what_is_counted_of_an_update_that_erred_is_that_of_a_good_one(train, tiny_flags, tmp_path, monkeypatch):
    """Loss, norms, bad updates, the mean that gradients are clipped by, magnitudes by layer, hashes; the doctor's own mean."""
    runs = {}
    clip = Limit.clip

    def erring(limit, *arguments):
        gradients = clip(limit, *arguments)
        if armed and monitor._run.state.step == 1 and not monitor.rerun.repeating:
            vars(limit)["_mean"] += 1e9
            for parameter in arguments[1]:
                parameter.grad += 1e9
            gradients = gradients._replace(norm=gradients.norm + 1e9, norms=gradients.norms + 1e9)
        return gradients

    class Noted(Monitor):
        def __init__(self, *arguments):
            nonlocal monitor
            monitor = self
            super().__init__(*arguments)

    monkeypatch.setattr(Limit, "clip", erring)
    monkeypatch.setattr(train_ddpm, "Monitor", Noted)
    flags = ["--max_train_steps", 4, "--rerun_steps", 2, "--logging_steps", 1, "--save_images_epochs", 999, "--logger", "none"]
    for name in ("plain", "erred"):
        armed, monitor = name == "erred", None
        assert train([*tiny_flags, *flags, "--adaptive_clipping", "--output_dir", tmp_path / name]) == 0
        lines = [json.loads(line) for line in (tmp_path / name / "history.jsonl").read_text().splitlines()]
        reports = [line for line in lines if "train/loss" in line]
        runs[name] = (
            [{key: value for key, value in line.items() if key != "time" and not key.startswith("perf/")} for line in reports],
            read_ledger(tmp_path / name),
            (monitor.audit._limit.mean(), float(monitor._run.clipping._mean)),
        )
        assert armed or step_seen(tmp_path / name)[1] == {}
    assert [each["outcome"] for each in outcomes(tmp_path / "erred")] == ["wrong", "same"]
    assert runs["plain"] == runs["erred"]


@pytest.mark.slow
def test_reported_updates_of_a_compiled_network_are_the_same_again(server, script, script_flags, tmp_path):
    """They run eagerly; the compiled code has other bits."""
    inject = [INJECT, script, "wrong-compiler", "--value", "1.000001", "--"]
    flags = [*script_flags, "--compile", "--max_train_steps", 3, "--logging_steps", 2, "--rerun_steps", 1]
    server.run([*inject, *flags, "--output_dir", tmp_path])
    assert outcomes(tmp_path) == [{"outcome": "same"}] * 3


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
    if where.startswith("activation") and outcomes(tmp_path / "flipped")[1].get("stage") == "own gradient":
        expected[1]["stage"] = "own gradient"  # a network whose output gain is still small may round it away in the loss
    assert outcomes(tmp_path / "flipped") == expected
    found = json.loads((tmp_path / "flipped" / "diagnosis.json").read_text())
    assert [(each["code"], each["step"]) for each in found if each["severity"] == "critical"] == [("device-errs", 4)]
    assert same_bytes(tmp_path / "plain" / WEIGHTS, tmp_path / "flipped" / WEIGHTS)


@pytest.mark.slow
def test_what_the_doctor_found_in_an_update_that_erred_is_withdrawn(server, tiny_flags, tmp_path):
    faulty = [INJECT, "train_ddpm.py", "flip", "--value", "weights:5", "--step", 8, "--"]
    server.run([*faulty, *tiny_flags, "--max_train_steps", 8, "--rerun_steps", 4, "--output_dir", tmp_path])
    withdrawn = [line["audit"]["withdrawn"] for line in history(tmp_path) if "withdrawn" in line.get("audit", {})]
    assert withdrawn == [["state-changed-in-update"]]
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert [each["code"] for each in found if each["severity"] == "critical"] == ["device-errs"]


@pytest.mark.slow
def test_the_rank_that_errs_is_named(server, tiny_flags, tmp_path):
    flags = [*tiny_flags, "--train_batch_size", 4, "--max_train_steps", 6, "--rerun_steps", 4, "--output_dir", tmp_path]
    faulty = [INJECT, "train_ddpm.py", "flip", "--value", "activation:22", "--step", 4, "--rank", 1, "--"]
    server.run([*faulty, *flags], 3)
    [found] = outcomes(tmp_path)
    assert (found["outcome"], found["stage"], found["ranks"]) == ("wrong", "loss", [1])
    assert "rank 1" in findings(tmp_path)[0]["evidence"]

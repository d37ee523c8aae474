"""A training that declares itself: when it is looked at, and what is told of it. What is found stands in test_declared.py."""

from types import SimpleNamespace

import pytest
import torch

from steady_doctor import declared_run
from steady_doctor.declare.processes import AdaptiveLimit
from steady_doctor.declared_run import DeclaredRun, Plan, Trained
from steady_doctor.found import Found

LOST = Found("state-norm-mean", 7, {"file": "checkpoint-7", "stored": None, "own": 1.0})


@pytest.fixture
def make(monkeypatch):
    """A run whose updates nobody records: a function of its plan and of what takes that which is told."""
    session = SimpleNamespace(begin=lambda *_: None, end=lambda *_: None, leave=lambda: None, stepped=lambda *_: None)
    doctor = SimpleNamespace(session=session, install=lambda: None, findings=list, measured=lambda: ["noise"])
    monkeypatch.setattr(declared_run, "DeclaredDoctor", lambda *arguments, **named: doctor)

    def made(plan: Plan, told: list | None = None) -> DeclaredRun:
        data = SimpleNamespace(compared=0, found=lambda *_: [], add=lambda *_: [], begin_micro_step=lambda *_: None)
        tell = (told if told is not None else []).append
        return DeclaredRun(None, Trained(None, None, None, {}), plan, data, lambda *said: tell(said), lambda own: own)

    return made


def looked_at(run: DeclaredRun, updates: range, every: int) -> list[int]:
    def looks(update: int) -> bool:
        run.begin(update, update % every == 0, lambda: 1.0)  # eager in each such one
        return run.looks

    return [update for update in updates if looks(update)]


@pytest.mark.parametrize(
    ("every", "first", "looks"),
    [
        (1, 1, [1, 2, 3, 5, 8, 13, 20, 34]),
        (1, 6, [6, 8, 13, 20, 34]),  # the first one after a resume
        (10, 1, [10, 20, 40]),  # those of a compiled network that run eagerly: for 1 to 8, for 13 and 20, for 34
        (10, 6, [10, 20, 40]),
        (100, 1, []),
    ],
)
def test_which_updates_are_looked_at(make, every, first, looks):
    assert looked_at(make(Plan(first, 60, 1.0)), range(first, 41), every) == looks


def test_a_run_that_gives_up_compiling_is_looked_at_as_others_are(make):
    run = make(Plan(1, 60, 1.0))
    assert looked_at(run, range(1, 11), 10) == [10]
    assert looked_at(run, range(11, 41), 1) == [13, 20, 34]


def test_what_is_found_is_told_once_and_a_look_that_fails_is_told_too(make):
    told = []
    run = make(Plan(8, 60, 1.0), told)
    run.look(lambda: [LOST, LOST])
    run.look(lambda: [LOST])
    run.look(lambda: 1 / 0)
    (_, found), (made, failed) = told
    assert [one["code"] for one in found["found"]] == ["state-norm-mean"] and found["measured"] == ["noise"]
    assert (made, failed) == (7, {"found": [], "failed": "ZeroDivisionError: division by zero"})


def test_a_law_that_fails_is_told_and_ends_nothing(make):
    told = []
    run = make(Plan(1, 60, 1.0), told)
    run.look(lambda: [Found("of-no-table", 1)])
    assert [said["failed"] for _, said in told] == ["KeyError: 'of-no-table'"]


@pytest.mark.parametrize(("stored", "is_said"), [(1.02, False), (1.0205, False), (1.04, True), (None, True)])
def test_a_mean_of_norms_that_a_checkpoint_stores(make, stored, is_said):
    limit = AdaptiveLimit(None)
    run = make(Plan(1, 60, limit))
    assert run.counters == [limit]
    for norm in (1.0, 3.0):  # 0.99 x 1 + 0.01 x 3
        run.count(torch.tensor(norm))
    assert bool([*run.norm_mean_deviates("checkpoint-2", stored)]) == is_said
    assert [*make(Plan(1, 60, 1.0)).norm_mean_deviates("checkpoint-2", stored)] == []

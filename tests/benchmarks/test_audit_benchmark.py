"""benchmarks/doctor/audit.py: its edits apply, its commands are understood, answers are judged right; and some of its runs."""

import importlib
import json

import pytest
from conftest import slow_turns

from benchmarks.doctor import audit
from benchmarks.doctor.more_step_faults import STEP_FAULTS
from benchmarks.doctor.step_faults import DDPM, EDM2
from benchmarks.doctor.step_kinds import healthy_runs
from benchmarks.doctor.trials import Edit, edited
from utils.diagnostics.audit.verdict import STAGES

DATASETS = list(audit.CHANNELS)


def test_every_edit_applies_to_the_code_as_it_is():
    """Where this fails a line has moved: write the edit anew, so that it is the same fault."""
    assert audit.problems(STEP_FAULTS, audit.ROOT) == []


def test_there_are_faults_of_every_stage_and_script():
    expected = [stage for fault in STEP_FAULTS.values() for stage in fault.stages]
    assert set(expected) == set(STAGES)
    assert {stage for fault in audit.OLDER_FAULTS.values() for stage in fault.stages} <= set(STAGES)
    assert len(audit.OLDER_FAULTS) >= 40 and audit.OLDER_FAULTS.keys().isdisjoint(STEP_FAULTS)
    assert sum(fault.script == EDM2 for fault in STEP_FAULTS.values()) > 60 and len(healthy_runs()) > 60


def test_an_edit_must_occur_once():
    assert edited("a b c", [Edit("x", "c", "a"), Edit("x", "a", "c b")]) == "c b b a"
    for text in ("b b", "c"):
        with pytest.raises(ValueError, match="not once"):
            edited(text, [Edit("x", "b", "a")])


@pytest.mark.slow
@pytest.mark.parametrize("script", [DDPM, EDM2])
def test_every_command_is_understood(script, tmp_path, monkeypatch):
    parse_args = importlib.import_module(script.removesuffix(".py")).parse_args
    chosen = audit.cases([*STEP_FAULTS, *audit.OLDER_FAULTS], 1000, [0], DATASETS)
    assert {case.name for case in chosen} == STEP_FAULTS.keys() | audit.OLDER_FAULTS.keys() | healthy_runs().keys()
    chosen += audit.cases(["EMA decay squared", "lambda missing", "never mirrored"], 0, [1, 2, 3], DATASETS, every_dataset=True)
    for case in (case for case in chosen if case.script == script):
        words = audit.command(case, tmp_path, tmp_path / "run", {})
        first = next(
            number for number, word in enumerate(words) if word.startswith("--") and word not in ("--", "--standalone")
        )
        first += words[first].startswith("--nproc")
        while not words[first].startswith("--"):
            first += 1
        options = parse_args(words[first:])
        assert options.resolution in (8, 16, "16x24", "24x16") and options.output_dir == str(tmp_path / "run")


def test_answers_are_judged(tmp_path):
    """By the stage of the first two findings above info; a healthy run must have none."""
    found = [{"code": code, "severity": severity, "evidence": ""} for code, severity in (("a", "info"), ("b", "warning"))]
    found += [{"code": "c", "severity": "critical", "stage": "ema"}, {"code": "d", "severity": "warning", "stage": "state"}]
    (tmp_path / "diagnosis.json").write_text(json.dumps(found))
    findings = audit.findings_of(tmp_path)
    assert [finding["code"] for finding in findings] == ["b", "c", "d"]

    def right(*stages: str, code: str | None = None) -> bool:
        return audit.Result("x", "new", DDPM, "digits", 0, stages, code, findings, 0).right

    assert right("ema") and right("state", "ema") and right("data", code="b") and right("data", code="c")
    assert not (right("state") or right("data") or right("data", code="d") or right())
    assert audit.findings_of(tmp_path / "nowhere") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "fault"),
    [(0, "block without gradient"), *slow_turns((1, "learning rate x 100"), (2, "betas too small"), (3, "EMA frozen"))],
)
def test_the_doctor_names_faults_and_finds_none_in_healthy_runs(number, fault):
    """Each fault with another seed, which is its variant, and on another data set."""
    chosen = audit.cases([fault], 0, [number], DATASETS[number:] + DATASETS[:number]) + audit.cases([], 1, [], DATASETS)
    for case in chosen:
        case.flags.update({"max_train_steps": 96, "validation_steps": 48})
    assert [audit.line(result) for result in audit.run_all(chosen) if not result.right] == []

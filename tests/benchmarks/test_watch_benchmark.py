"""benchmarks/doctor/watch.py without its watcher: its edits apply, its scripts train, answers are judged right."""

import os
import subprocess
import sys

import pytest

from benchmarks.doctor import watch
from benchmarks.doctor.blind_watch_faults import ACCELERATED, MINIMAL
from benchmarks.doctor.newest_watch_faults import NOTEBOOK, POLICY, SIT
from benchmarks.doctor.trials import Edit, problems, words_of
from benchmarks.doctor.watch import COURSE, SCRIPTS, TUTORIAL
from benchmarks.doctor.watch_faults import AMP, HAND, PUBLIC, WATCH_FAULTS
from utils.diagnostics.audit.verdict import STAGES

SHIPPED = [script for script in SCRIPTS if script != PUBLIC]
TWO_UPDATES = {  # where it is not `--steps 2`
    NOTEBOOK: {"train_num_steps": 2},
    SIT: {"max-steps": 2},
    POLICY: {"num_demos": 4, "batch_size": 64},
    MINIMAL: {"steps": 2, "log_every": 1},
    ACCELERATED: {"steps": 2, "log_every": 1},
    TUTORIAL: {"updates": 2},
    COURSE: {"num_updates": 2},
}


def test_every_edit_applies_to_the_scripts_as_they_are():
    """Those of the script that is not shipped are tried by `watch.py --unconditional FILE --check`."""
    shipped = {name: fault for name, fault in WATCH_FAULTS.items() if fault.script != PUBLIC}
    assert problems(shipped, watch.FOREIGN) == []
    broken = watch.WATCH_FAULTS[f"{HAND.removesuffix('.py')}: stepped twice"]
    assert len(problems({"x": broken.__class__(HAND, ("data",), (Edit(HAND, "nowhere", ""),))}, watch.FOREIGN)) == 1


def test_there_are_faults_of_every_stage_but_one_and_of_every_script():
    expected = {stage for fault in WATCH_FAULTS.values() for stage in fault.stages}
    assert expected == set(STAGES) - {"export"}  # what is exported is not seen in a loop
    assert {fault.script for fault in WATCH_FAULTS.values()} == set(SCRIPTS) == set(watch.BASES)
    assert sum(not fault.unfair for fault in WATCH_FAULTS.values()) > 160


def test_cases_are_chosen():
    names = [name for name in WATCH_FAULTS if name.startswith("mixed_precision")]
    chosen = watch.cases(names, 2, [AMP])
    assert len(chosen) == len(names) + 2 and {case.script for case in chosen} == {AMP}
    assert [case.stages for case in chosen[-2:]] == [(), ()]
    assert len({case.name for case in watch.cases([], 1000, list(SCRIPTS))}) == len(watch.HEALTHY) > 20


def test_lines_with_losses_are_recognized(tmp_path):
    log = tmp_path / "log"
    losses = ["12 0.1234", "0: 12 0.1234 2.04e-07", "[1] 12 0.1234 lr 0.001", "loss: 0.12", "samples nan", "[0] evaluation 0.5"]
    log.write_text("\n".join([*losses, "step-ema: the average", "watching ddpm_by_hand.py"]))
    assert watch.trained(log, tmp_path) == sorted(losses)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "weights.safetensors").write_bytes(b"x")
    assert len(watch.trained(log, tmp_path)) == len(losses) + 1


def test_answers_are_judged():
    """By the stages of the first two findings; a healthy run has none, and the same losses."""
    findings = [{"stage": "ema"}, {"stage": "state"}, {"stage": "data"}]
    assert watch.Result("x", HAND, ("state",), False, findings, status=0).right
    assert not watch.Result("x", HAND, ("data",), False, findings, status=0).right
    assert not watch.Result("x", HAND, (), False, findings, status=0).right
    for same, watched, right in ((True, True, True), (None, True, True), (False, True, False), (True, False, False)):
        assert watch.Result("x", HAND, (), False, [], watched, 0, same=same).right is right


@pytest.mark.slow
@pytest.mark.parametrize("script", SHIPPED)
def test_each_script_trains(script, tmp_path):
    """Two updates, whose losses are printed."""
    words = [sys.executable, str(watch.FOREIGN / script), *words_of(TWO_UPDATES.get(script, {"steps": 2}))]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(words, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True)
    log = tmp_path / "log"
    log.write_text(run.stdout)
    assert len(watch.trained(log, tmp_path)) == 2


def test_the_tables_are_made():
    found = [{"code": "step-ema", "stage": "ema"}]
    results = [
        watch.Result(name, fault.script, fault.stages, fault.unfair, found, status=0) for name, fault in WATCH_FAULTS.items()
    ]
    results.append(watch.Result("healthy", HAND, (), False, [], True, 0, 2.0, 1.0, True))
    right = sum("ema" in fault.stages and not fault.unfair for fault in WATCH_FAULTS.values())
    text = watch.summary(results)
    assert f"naming the stage: {right} of" in text and "+100%" in text and "only the command line tells: 1 of 3" in text

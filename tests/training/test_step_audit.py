"""The doctor in our own runs: it finds nothing in healthy ones, changes no number, and says what a wrong step does."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, same_bytes, script_environment, step_seen

from benchmarks.shared.replace import replace_everywhere
from steady_doctor.declared_run import audited_updates
from utils.core.errors import UserError

OF_EACH = {"data", "noise", "timestep", "input", "network", "target", "weight", "gradient", "optimizer", "learning_rate"}
OF_EACH |= {"ema", "state"}
OF_SCRIPT = {"train_ddpm.py": OF_EACH, "train_edm2.py": OF_EACH | {"condition"}}  # which is class-conditional


def codes(folder: Path) -> set[str]:
    return set(step_seen(folder)[1])


def test_audits_become_rarer_and_no_number_divides_all_others():
    assert sorted(audited_updates(300)) == [1, 2, 3, 5, 8, 13, 20, 34, 60, 89, 100, 233]
    assert len(audited_updates(3600)) == 17


RHYTHM = ["--validation_images", "16", "--validation_steps", "4", "--save_images_steps", "4", "--checkpointing_steps", "4"]


@pytest.mark.slow
def test_the_numbers_of_transforms_are_a_condition(train_script, script, script_flags, tmp_path):
    assert train_script([*script_flags, *RHYTHM, "--augment_probability", "0.3", "--output_dir", tmp_path]) == 0
    assert step_seen(tmp_path) == (OF_SCRIPT[script] | {"condition"}, {})


@pytest.mark.slow
def test_a_compiled_run_is_looked_at_in_its_reports_and_runs_compiled_between_them(train, tiny_flags, tmp_path, monkeypatch):
    runs, compile_in_place = [], torch.nn.Module.compile

    def counted(graph, inputs):
        def run(*arguments):
            runs.append(graph)
            return graph.forward(*arguments)

        return run

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_in_place(module, backend=counted))
    flags = ["--compile", "--max_train_steps", "7", "--logging_steps", "3", "--output_dir", tmp_path]
    assert train([*tiny_flags, *flags]) == 0
    assert step_seen(tmp_path) == (OF_EACH, {})
    assert len(runs) == 1 + 4 and len(set(runs)) == 1  # the check, and updates 1, 2, 4 and 5; the others are reported
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_resumed_run_is_compared_with_its_checkpoint(train_script, script_flags, tmp_path, monkeypatch):
    flags = [*script_flags, "--output_dir", tmp_path, "--checkpointing_steps", "4", "--lr_scheduler", "constant"]
    assert train_script([*flags, "--max_train_steps", "4"]) == 0
    monkeypatch.setattr("torch.optim.Optimizer.load_state_dict", lambda self, state: None)
    assert train_script([*flags, "--resume_from_checkpoint", "latest"]) == 0
    assert {"state-moments"} <= codes(tmp_path) <= {"state-moments", "state-moments-lost", "optimizer-count"}


def test_every_stage_is_measured_and_the_bits_are_those_without_it(train_script, script, script_flags, tmp_path):
    flags = [*script_flags, *RHYTHM, "--dropout", "0.1"]
    for doctor in ("on", "off"):
        assert train_script([*flags, "--doctor", doctor, "--output_dir", tmp_path / doctor]) == 0
    assert step_seen(tmp_path / "on") == (OF_SCRIPT[script], {}) and step_seen(tmp_path / "off") == (set(), {})
    for file in ("model.safetensors", "ema.safetensors", "optimizer.bin"):
        assert same_bytes(tmp_path / "on/checkpoint-8" / file, tmp_path / "off/checkpoint-8" / file)


@pytest.mark.slow
def test_without_the_folder_of_the_doctor_a_run_trains_and_is_judged_by_its_figures(tiny_flags, tmp_path):
    checkout, run = tmp_path / "checkout", tmp_path / "run"
    for name in ("models", "utils"):
        shutil.copytree(ROOT / name, checkout / name)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, checkout)

    def said(script: str, *flags: object) -> str:
        command = [sys.executable, str(checkout / script), *map(str, flags)]
        result = subprocess.run(command, cwd=tmp_path, env=script_environment(), capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    told = said("train_ddpm.py", *tiny_flags, "--output_dir", run)
    assert told.count("steady_doctor") == 1
    assert "the folder steady_doctor/ is missing: nobody measures what an update of this run does\n" in told
    assert step_seen(run) == (set(), {}) and (run / "model_index.json").exists()
    assert "0 critical" in said("diagnose.py", run)


def test_a_recording_that_fails_ends_neither_the_run_nor_the_looks_at_files(train, tiny_flags, tmp_path, monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("a law with a mistake")

    monkeypatch.setattr("steady_doctor.declared_doctor.identify", broken)
    assert train([*tiny_flags, "--output_dir", tmp_path]) == 0
    [failed] = [f for f in json.loads((tmp_path / "diagnosis.json").read_text()) if f["code"] == "rule-failed"]
    assert "ZeroDivisionError: a law with a mistake" in failed["evidence"]


def test_weights_that_a_validation_leaves_behind_are_named(train_script, script_flags, tmp_path, monkeypatch, capsys):
    def swap_once(run):
        run.ema._swap()
        raise UserError("a validation that was interrupted")

    monkeypatch.setattr("utils.training.evaluation.Validation.make", lambda self: swap_once(self._run))
    flags = ["--validation_images", "16", "--validation_steps", "3", "--output_dir", tmp_path]
    assert train_script([*script_flags, *flags]) == 0
    assert {"state-changed-between", "ema-changed-between"} <= codes(tmp_path)
    assert "state-changed-between" in capsys.readouterr().out


def test_a_wrong_step_is_said_with_what_is_declared_and_observed(train, tiny_flags, tmp_path, monkeypatch):
    from utils.diffusion.ddpm import training_target

    replace_everywhere("utils.diffusion.ddpm.training_target", lambda *a: -training_target(*a), monkeypatch)
    assert train([*tiny_flags, "--output_dir", tmp_path]) == 0
    assert codes(tmp_path) == {"target-not-declared"}
    [finding, *_] = json.loads((tmp_path / "diagnosis.json").read_text())
    assert (finding["code"], finding["severity"], finding["stage"]) == ("target-not-declared", "critical", "target")
    assert finding["declared"].startswith("0 image + 1 noise at level ") and "-1 noise" in finding["observed"]
    page = (tmp_path / "report.html").read_text()
    assert finding["declared"] in page and finding["observed"] in page


@pytest.mark.slow
def test_a_resume_is_compared_with_the_checkpoint_that_was_loaded(train, tiny_flags, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    flags = [*tiny_flags, "--checkpointing_steps", "4", "--lr_scheduler", "constant"]
    assert train([*flags, "--max_train_steps", "4", "--output_dir", first]) == 0
    assert train([*flags, "--max_train_steps", "4", "--seed", "1", "--output_dir", second]) == 0
    assert train([*flags, "--output_dir", second, "--resume_from_checkpoint", first / "checkpoint-4"]) == 0
    assert codes(second) == set()

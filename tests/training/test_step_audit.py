"""The step audit in real runs: it finds nothing in healthy ones, changes no number, and says what a wrong step does."""

import json
from pathlib import Path

import pytest
import torch
from conftest import slow_turns
from safetensors.torch import load_file
from utils.diagnostics.audit.verdict import STAGES

from benchmarks.shared.replace import replace_everywhere
from utils.core.errors import UserError
from utils.optim.clipping import AdaptiveLimit
from utils.training import audit as step_audit
from utils.training.audit import StepAudit, audited_updates


def checks_of(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert not [line["audit"]["failed"] for line in lines if "failed" in line.get("audit", {})]
    return [check for line in lines for check in line.get("audit", {}).get("checks", ())]


def found_in(folder) -> list[dict]:
    return [f for f in json.loads((folder / "diagnosis.json").read_text()) if f["code"].startswith("step-")]


def test_audits_become_rarer_and_no_number_divides_all_others():
    assert sorted(audited_updates(300)) == [1, 2, 3, 5, 8, 13, 20, 34, 60, 89, 100, 233]
    assert len(audited_updates(3600)) == 17


HEALTHY = {
    "plain": [],
    "bf16, accumulation": ["--mixed_precision", "bf16", "--gradient_accumulation_steps", "2", "--train_batch_size", "4"],
    "penalty, adaptive clipping": ["--l1_weight", "1e-4", "--adaptive_clipping"],
    "flips, jitter": ["--random_flip", "--color_jitter", "0.2", "--gradient_checkpointing"],
    "SGD": ["--optimizer", "sgd", "--learning_rate", "1e-2"],
    "RMSprop": ["--optimizer", "rmsprop"],
    "no averages": ["--no-use_ema"],
    "dropout": ["--dropout", "0.3", "--gradient_accumulation_steps", "2", "--train_batch_size", "4"],
    "dropout, checkpointing": ["--dropout", "0.3", "--gradient_checkpointing"],
    "workers, no clipping": ["--dataloader_num_workers", "1", "--max_grad_norm", "0"],
}


@pytest.mark.parametrize("kind", ["plain", *slow_turns(*list(HEALTHY)[1:], ids=list(HEALTHY)[1:])])
def test_a_healthy_run_has_no_deviation_and_every_stage_is_seen(train_script, script_flags, tmp_path, kind):
    flags = ["--validation_images", "16", "--validation_steps", "4", "--save_images_steps", "4", "--checkpointing_steps", "4"]
    assert train_script([*script_flags, *flags, *HEALTHY[kind], "--output_dir", tmp_path]) == 0
    checks = checks_of(tmp_path)
    assert [check for check in checks if check["healthy"] is False] == []
    seen = {check["stage"] for check in checks if check["healthy"]}
    absent = {"ranks", "condition", *(["ema"] if kind == "no averages" else [])}
    assert set(STAGES) - seen - absent == set()
    assert [check["name"] for check in checks if check["declared"] == "the slope of the loss" and check["healthy"]]


def test_a_healthy_run_with_spectral_norm_has_no_deviation(train, tiny_flags, tmp_path):
    assert train([*tiny_flags, "--spectral_norm", "--output_dir", tmp_path]) == 0
    checks = checks_of(tmp_path)
    assert [check for check in checks if check["healthy"] is False] == []
    assert [check["name"] for check in checks if check["declared"] == "the slope of the loss" and check["healthy"]]


@pytest.mark.slow
def test_a_compiled_run_is_looked_at_in_its_reports_and_runs_compiled_between_them(train, tiny_flags, tmp_path):
    flags = ["--compile", "--max_train_steps", "4", "--logging_steps", "2", "--output_dir", tmp_path]
    assert train([*tiny_flags, *flags]) == 0
    checks = checks_of(tmp_path)
    assert [check for check in checks if check["healthy"] is False] == []
    assert {"input", "target", "optimizer", "ema"} <= {check["stage"] for check in checks if check["healthy"]}
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_resumed_run_is_compared_with_its_checkpoint(train_script, script_flags, tmp_path, monkeypatch):
    flags = [*script_flags, "--output_dir", tmp_path, "--checkpointing_steps", "4"]
    assert train_script([*flags, "--max_train_steps", "4", "--lr_scheduler", "constant"]) == 0
    resumed = [*flags, "--resume_from_checkpoint", "latest", "--lr_scheduler", "constant"]
    assert train_script([*resumed, "--max_train_steps", "8"]) == 0
    assert any("after the resume" in check["name"] for check in checks_of(tmp_path))
    assert not found_in(tmp_path)


def test_weights_of_a_resumed_run_are_not_taken_for_first_ones_where_its_count_is_lost(
    train, tiny_flags, tmp_path, monkeypatch
):
    fresh, begin, built = [], StepAudit.begin, step_audit.built.built
    monkeypatch.setattr(step_audit.built, "built", lambda *given: fresh.append(given[2]) or built(*given))
    flags = [*tiny_flags, "--output_dir", tmp_path, "--checkpointing_steps", "2", "--lr_scheduler", "constant"]
    assert train([*flags, "--max_train_steps", "2"]) == 0
    monkeypatch.setattr(StepAudit, "begin", lambda self, step, reported: begin(self, 0, reported))
    assert train([*flags, "--max_train_steps", "4", "--resume_from_checkpoint", "latest"]) == 0
    assert fresh == [True, False]


def test_the_same_bits_with_and_without_it(train_script, script_flags, tmp_path, monkeypatch):
    flags = [*script_flags, "--checkpointing_steps", "8", "--dropout", "0.1"]
    assert train_script([*flags, "--output_dir", tmp_path / "with"]) == 0
    checks = ("check_sampler", "check_exported", "check_saved", "check_snapshots")
    for name in ("begin", "begin_micro_step", "add", "end_step", "end_update", "close", *checks):
        monkeypatch.setattr(StepAudit, name, lambda *arguments: None)
    assert train_script([*flags, "--output_dir", tmp_path / "without"]) == 0
    assert checks_of(tmp_path / "with") and not checks_of(tmp_path / "without")
    for file in ("model.safetensors", "ema.safetensors"):
        a, b = (load_file(tmp_path / name / "checkpoint-8" / file) for name in ("with", "without"))
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_check_that_fails_ends_neither_the_run_nor_the_other_checks(train_script, script_flags, tmp_path, monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("an audit with a mistake")

    monkeypatch.setattr(step_audit, "check_gradients", broken)
    assert train_script([*script_flags, "--output_dir", tmp_path]) == 0
    findings = json.loads((tmp_path / "diagnosis.json").read_text())
    assert [f["severity"] for f in findings if f["code"] == "rule-failed"] == ["info"]
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    checks = [check for line in lines for check in line.get("audit", {}).get("checks", ())]
    seen = {check["stage"] for check in checks if check["healthy"]}
    assert {"input", "target", "weight", "optimizer", "ema", "state"} <= seen


def test_weights_that_a_validation_leaves_behind_are_named(train_script, script_flags, tmp_path, monkeypatch, capsys):
    def swap_once(run):
        run.ema._swap()
        raise UserError("a validation that was interrupted")

    monkeypatch.setattr("utils.training.validation.Validation.make", lambda self: swap_once(self._run))
    flags = ["--validation_images", "16", "--validation_steps", "3", "--output_dir", tmp_path]
    assert train_script([*script_flags, *flags]) == 0
    assert "state" in [finding["stage"] for finding in found_in(tmp_path)[:2]]
    assert "step-state" in capsys.readouterr().out


def test_a_wrong_step_is_said_with_what_is_declared_and_observed(train, tiny_flags, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        from utils.diffusion.ddpm import training_target

        replace_everywhere("utils.diffusion.ddpm.training_target", lambda *a: -training_target(*a), patch)
        assert train([*tiny_flags, "--output_dir", tmp_path]) == 0
    (finding,) = [f for f in found_in(tmp_path) if f["stage"] == "target"]
    assert finding["severity"] == "critical" and "minus the noise" in finding["observed"]
    assert finding["declared"] == "squared error of the epsilon prediction"
    assert "declared" in (tmp_path / "report.html").read_text()


def told_halved(self, accelerator, parameters, old=AdaptiveLimit.clip):
    gradients = old(self, accelerator, parameters)
    return gradients._replace(norm=gradients.norm / 2)


def counted_when_clipped(self, gradients, old=AdaptiveLimit.add):
    old(self, gradients._replace(norm=gradients.norm.clamp(max=2.0)))


CLIPPING_FAULTS = {  # parts of the limit that are replaced
    "none": {},
    "once the mean": {"FACTOR": 1.0},
    "too fast": {"RATE": 0.5},
    "too low": {"HIGHEST": 0.2},
    "never counted": {"add": lambda self, gradients: None},
    "counted when it is clipped": {"add": counted_when_clipped},
    "another norm is told": {"clip": told_halved},
}


@pytest.mark.parametrize("fault", ["too fast", *slow_turns("none", *list(CLIPPING_FAULTS)[3:], "once the mean")])
def test_adaptive_clipping_that_does_not_follow_its_rule_is_named(train, tiny_flags, tmp_path, fault, monkeypatch):
    for name, value in CLIPPING_FAULTS[fault].items():
        monkeypatch.setattr(AdaptiveLimit, name, value)
    assert train([*tiny_flags, "--adaptive_clipping", "--output_dir", tmp_path]) == 0
    assert {finding["stage"] for finding in found_in(tmp_path)} == ({"gradient"} if fault != "none" else set())


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["not restored", "none", "not stored"])
def test_the_mean_of_adaptive_clipping_that_a_resume_loses_is_named(train, tiny_flags, tmp_path, fault, monkeypatch):
    flags = [*tiny_flags, "--adaptive_clipping", "--checkpointing_steps", "4", "--lr_scheduler", "constant"]
    with monkeypatch.context() as patch:
        if fault == "not stored":
            patch.setattr(AdaptiveLimit, "mean", None)
        assert train([*flags, "--max_train_steps", "4", "--output_dir", tmp_path]) == 0
    if fault == "not restored":
        monkeypatch.setattr(AdaptiveLimit, "__init__", lambda self, device, mean, old=AdaptiveLimit.__init__: old(self, device))
    assert train([*flags, "--resume_from_checkpoint", "latest", "--output_dir", tmp_path]) == 0
    assert ("state" in {finding["stage"] for finding in found_in(tmp_path)}) == (fault != "none")


@pytest.mark.slow
def test_kinks_of_the_activation_are_no_deviation(train, tiny_flags, tmp_path):
    """ReLU's, within which the slope of the loss changes."""
    assert train([*tiny_flags, "--activation", "relu", "--max_train_steps", "8", "--output_dir", tmp_path]) == 0
    assert found_in(tmp_path) == []
    assert [check for check in checks_of(tmp_path) if check["declared"] == "the slope of the loss" and check["healthy"]]


@pytest.mark.slow
@pytest.mark.parametrize("changed", [[], ["--momentum", "0.9", "--allow_option_change", "momentum"]])
def test_rmsprop_without_momentum_goes_on(train, tiny_flags, tmp_path, changed):
    flags = [*tiny_flags, "--optimizer", "rmsprop", "--checkpointing_steps", "4", "--output_dir", tmp_path]
    assert train([*flags, "--momentum", "0", "--max_train_steps", "4"]) == 0
    assert train([*flags, *(changed or ["--momentum", "0"]), "--resume_from_checkpoint", "latest"]) == 0
    assert found_in(tmp_path) == []


@pytest.mark.slow
def test_a_resume_is_compared_with_the_checkpoint_that_was_loaded(train, tiny_flags, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    flags = [*tiny_flags, "--checkpointing_steps", "4", "--lr_scheduler", "constant"]
    assert train([*flags, "--max_train_steps", "4", "--output_dir", first]) == 0
    assert train([*flags, "--max_train_steps", "4", "--seed", "1", "--output_dir", second]) == 0
    assert train([*flags, "--output_dir", second, "--resume_from_checkpoint", first / "checkpoint-4"]) == 0
    assert found_in(second) == []


@pytest.mark.slow
def test_a_dropout_that_the_network_does_not_have_is_named(train, tiny_flags, tmp_path, monkeypatch):
    config, out = tmp_path / "config.json", tmp_path / "run"
    network = json.loads(Path(tiny_flags[tiny_flags.index("--model_config_name_or_path") + 1], "config.json").read_text())
    config.write_text(json.dumps(network | {"dropout": 0.2}))
    flags = [*tiny_flags, "--max_train_steps", "2", "--model_config_name_or_path", str(tmp_path), "--output_dir", out]
    assert train([*flags, "--dropout", "0.2"]) == 0 and found_in(out) == []
    monkeypatch.setattr(
        "torch.nn.Dropout.__init__", lambda self, p=0.5, inplace=False, old=torch.nn.Dropout.__init__: old(self, p / 2)
    )
    assert train([*flags, "--dropout", "0.2", "--overwrite_output_dir"]) == 0
    assert [(f["stage"], f["observed"]) for f in found_in(out)] == [("network", "0.1")]

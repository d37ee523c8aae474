"""diagnose.py and the doctor in the loop, on runs that the training script made."""

import json
from pathlib import Path

import findings_page
import numpy as np
import pytest
import torch
from conftest import logged_scalars, run_script, without_progress
from PIL import Image
from synthetic_run import synthetic_run

import diagnose
import utils.diagnostics.probe
import utils.training.doctor
from benchmarks.shared.replace import replace_everywhere
from utils.core.errors import UserError
from utils.diagnostics.finding import Finding
from utils.runs.history import HISTORY, read_history


@pytest.fixture(scope="module")
def flags(tiny_flags) -> list[str]:
    short = "--max_train_steps 60 --logging_steps 10 --lr_warmup_steps 10 --train_batch_size 16"
    return [*tiny_flags, *short.split()]


def codes(folder: Path) -> list[str]:
    return [finding["code"] for finding in json.loads((folder / "diagnosis.json").read_text())]


@pytest.fixture
def healthy(train, flags, tmp_path) -> Path:
    assert train([*flags, "--output_dir", tmp_path / "healthy", "--checkpointing_steps", "30"]) == 0
    return tmp_path / "healthy"


def run_doctor(capsys, *arguments) -> tuple[int, str]:
    capsys.readouterr()
    status = diagnose.main(diagnose.parse_args([str(argument) for argument in arguments]))
    return status, capsys.readouterr().out


def test_a_healthy_run_has_no_findings_and_a_report(healthy, train, flags, capsys):
    assert codes(healthy) == []
    assert "<svg" in (healthy / "report.html").read_text()
    status, output = run_doctor(capsys, healthy)
    assert status == 0
    lines = output.splitlines()
    assert len(lines) < 10 and lines[-1] == "0 critical, 0 warnings: nothing found"
    status, output = run_doctor(capsys, healthy, "--all")
    assert status == 0 and output.splitlines()[-1] == lines[-1]  # the findings last
    assert "OK    data-range" in output and "FAIL" not in output and "WARN" not in output
    stages = "data, noise, timestep, input, network, target, weight, gradient, optimizer, learning rate, ema, state"
    assert f"the training step was measured in 9 updates: {stages}\n" in output  # 1, 2, 3, 5, 8, 13, 20, 34 and 60
    # A pipeline that this project's training did not record, on the data that it was made from.
    cache = flags[flags.index("--cache_dir") + 1]
    status, output = run_doctor(capsys, "--pipeline", healthy, "--dataset_name", "digits", "--cache_dir", cache, "--json")
    found = json.loads(output)
    assert status == 0 and "timestep-ignored" in found["healthy"]
    assert found["probe"]["linear_error"].keys() == found["probe"]["error"].keys()
    assert found["data"]["images"] == 1797
    # Resuming halfway repeats nothing in the record.
    resume = [*flags, "--output_dir", healthy, "--resume_from_checkpoint", "checkpoint-30"]
    assert train(resume) == 0
    steps = [record["step"] for record in read_history(healthy / HISTORY) if "train/loss" in record]
    assert steps == [10, 20, 30, 40, 50, 60]
    assert sum("data" in record for record in read_history(healthy / HISTORY)) == 1


def test_a_fault_is_said_once_recorded_and_can_end_the_run(train, flags, tmp_path, monkeypatch, capsys):
    import utils.data.augmentation

    monkeypatch.setattr(utils.data.augmentation, "to_unit_range", lambda images, max_value: images.to(torch.float32))
    assert train([*flags, "--output_dir", tmp_path / "on"]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("critical: data-range") == 1
    assert codes(tmp_path / "on")[:2] == ["data-rescaled", "data-range"]
    assert logged_scalars(tmp_path / "on", "diagnosis/data-range") == {10: 2.0}
    status, output = run_doctor(capsys, tmp_path / "on", "--no_report")
    found = json.loads((tmp_path / "on" / "diagnosis.json").read_text())
    severities = [finding["severity"] for finding in found]
    critical, warnings = severities.count("critical"), severities.count("warning")
    place = output.splitlines().index(f"{critical} critical, {warnings} warnings")
    assert status == 1 and output.splitlines()[place + 1].startswith("FAIL  data-rescaled")
    assert output.splitlines()[-1] == f"      try: {found[-1]['fixes'][-1]}"
    assert output.startswith(f"{tmp_path / 'on'}: finished, 60 of 60 updates, 6 reports")
    assert train([*flags, "--output_dir", tmp_path / "off", "--stop_on", "critical", "--checkpointing_steps", "50"]) == 3
    assert (tmp_path / "off" / "checkpoint-10").is_dir() and not (tmp_path / "off" / "model_index.json").exists()


@pytest.mark.slow
def test_what_only_the_last_look_finds_is_said_even_where_the_report_fails(train, flags, tmp_path, monkeypatch, capsys):
    plain = utils.diagnostics.probe.examine_network
    blind = {"timestep_response": 0.0}
    replace_everywhere("utils.diagnostics.probe.examine_network", lambda *arguments: plain(*arguments) | blind, monkeypatch)
    monkeypatch.setattr(utils.training.doctor, "write_report", lambda *arguments: {}["no such figure"])
    assert train([*flags, "--output_dir", tmp_path / "run", "--max_train_steps", "20"]) == 0
    said = "".join(capsys.readouterr())
    assert said.count("critical: timestep-ignored") == 1
    assert "report.html was not written: KeyError: 'no such figure'" in said


def test_damaged_lines_of_the_history_are_counted_and_left_out(tmp_path, capsys):
    history = synthetic_run(tmp_path / "run", reports=20, samples=0) / HISTORY
    lines = history.read_text().splitlines()
    history.write_text("\n".join([*lines[:3], lines[3][:50], "\0" * 20, *lines[4:]]) + '\n{"step": 70, "train/lo')
    _, output = run_doctor(capsys, tmp_path / "run")
    assert output.splitlines()[1] == "2 damaged lines of history.jsonl are left out"


def test_what_earlier_versions_recorded_is_still_shown(tmp_path, capsys):
    """Codes of findings, and figures, that no rule knows any more."""
    run = synthetic_run(tmp_path / "run", reports=20, samples=0)
    (run / "diagnosis.json").write_text('[{"code": "ema-frozen", "severity": "critical"}]')
    with open(run / HISTORY, "a") as file:
        file.write('{"step": 1000, "noise/variance": 4.0, "samples": {"sampler": {"prediction_type": "sample"}}}\n')
    _, output = run_doctor(capsys, run)
    assert "20 reports" in output and "rule-failed" not in output
    assert "ema-frozen" not in codes(run) and "</html>" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("severity", "statuses"),
    [("critical", (1, 1, 1)), ("warning", (1, 0, 1)), ("info", (0, 0, 0)), (None, (0, 0, 0))],
)
def test_the_exit_status_is_of_the_severity_asked_for(tmp_path, capsys, monkeypatch, severity, statuses):
    """Without --fail_on, with critical, with warning."""
    found = [] if severity is None else [Finding("lr-too-high", severity, "made up")]
    monkeypatch.setattr("utils.diagnostics.diagnose.judge", lambda record: (found, set()))
    run = synthetic_run(tmp_path / "run", reports=4, samples=0)
    asked = ([], ["--fail_on", "critical"], ["--fail_on", "warning"])
    assert tuple(run_doctor(capsys, run, "--no_report", *flags)[0] for flags in asked) == statuses


def test_findings_are_counted_and_a_few_reports_are_said_to_be(tmp_path, capsys, monkeypatch):
    found = [Finding("lr-too-high", "critical", "a"), Finding("lr-too-low", "warning", "b"), Finding("data-blank", "info", "c")]
    monkeypatch.setattr("utils.diagnostics.diagnose.judge", lambda record: (found, set()))
    _, output = run_doctor(capsys, synthetic_run(tmp_path / "run", reports=3, samples=0))
    assert "\n\n1 critical, 1 warning, 1 for information\nFAIL  lr-too-high: " in output
    assert "with fewer than 4 reports, what is OK now may still go wrong" in output
    assert "1 critical, 1 warning, 1 for information" in (tmp_path / "run" / "report.html").read_text()


def test_a_run_that_cannot_be_written_is_diagnosed_all_the_same(tmp_path, capsys):
    run = synthetic_run(tmp_path / "run", reports=4, samples=0)
    (run / "report.html").mkdir()  # in the place of a read-only folder, which stops no root
    status = diagnose.main(diagnose.parse_args([str(run)]))
    said = capsys.readouterr()
    assert status in (0, 1) and " critical, " in said.out and "report:" not in said.out
    assert said.err.splitlines()[-1] == f"note: no report: cannot write {run}: Is a directory"


def test_the_folder_of_a_report_is_made_or_refused_before_the_data_is_read(tmp_path, monkeypatch):
    class Read(Exception):
        pass

    def records_of(args):
        raise Read

    monkeypatch.setattr(diagnose, "records_of", records_of)
    asked = ["--dataset_name", "digits", "--report_dir"]
    with pytest.raises(Read):
        diagnose.main(diagnose.parse_args([*asked, str(tmp_path / "new" / "er")]))
    assert (tmp_path / "new" / "er").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to --report_dir .*file/x: Not a directory\nchoose another --report_dir"):
        diagnose.main(diagnose.parse_args([*asked, str(tmp_path / "file" / "x")]))


def test_json_is_valid_whatever_the_figures(tmp_path, capsys):
    with open(synthetic_run(tmp_path / "run", reports=3, samples=0) / HISTORY, "a") as file:
        file.write('{"step": 150, "probe": {"error": {"0": 1.0, "500": "inf"}}}\n')
    _, output = run_doctor(capsys, tmp_path / "run", "--json")

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(output, parse_constant=refuse)["probe"]["error"]["500"] == "inf"


@pytest.mark.parametrize("cache_images", ["yes", "no"])
def test_damaged_blank_and_small_files_of_a_folder_are_named(capsys, tmp_path, cache_images):
    chance = np.random.default_rng(0)
    for number in range(40):
        side = 8 if number == 5 else 16
        Image.fromarray(chance.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(tmp_path / f"{number:02d}.png")
    Image.new("RGB", (16, 16), "white").save(tmp_path / "20.png")
    for name in ("07.png", "31.png"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:300])
    (tmp_path / "32.png").write_text("no picture")
    flags = ["--train_data_dir", tmp_path, "--resolution", "16", "--cache_dir", tmp_path / "cache", "--max_bad_images", "1"]
    status, output = run_doctor(capsys, *flags, "--cache_images", cache_images, "--json")
    found = {finding["code"]: finding for finding in json.loads(output)["findings"]}
    assert status == 1 and set(found) == {"data-damaged", "data-blank", "data-enlarged"}
    assert all(name in found["data-damaged"]["evidence"] for name in ("3 of them, 7.50%", "07.png", "31.png", "32.png"))
    assert found["data-blank"]["severity"] == "warning" and "2.50% of the images, rows 20" in found["data-blank"]["evidence"]
    assert found["data-enlarged"]["severity"] == "info" and "the least 8" in found["data-enlarged"]["evidence"]
    assert "data-alike" in json.loads(output)["healthy"]  # stand-ins are no copies


def test_what_cannot_be_diagnosed_ends_with_status_2(tmp_path):
    for arguments in ([], ["somewhere", "--dataset_name", "digits"], ["--pipeline", "x"]):
        with pytest.raises(UserError, match="what to diagnose"):
            diagnose.parse_args(arguments)
    with pytest.raises(UserError, match="--watch_updates has no effect without --watch\nleave it out"):
        diagnose.parse_args(["somewhere", "--watch_updates", "5"])
    (tmp_path / "file.json").touch()
    with pytest.raises(UserError, match=r"file\.json is not the folder of a run"):
        diagnose.main(diagnose.parse_args([str(tmp_path / "file.json")]))
    result = run_script("diagnose.py", [tmp_path / "nothing"])
    assert (result.returncode, len(without_progress(result.stderr))) == (2, 2)
    assert "is not the folder of a run" in result.stderr
    with pytest.raises(UserError, match="has not recorded anything yet"):
        diagnose.main(diagnose.parse_args([str(synthetic_run(tmp_path / "run", reports=0, samples=0))]))


def test_every_finding_and_every_comparison_of_options_is_documented():
    page = findings_page.PAGE.read_text()
    assert all(table in page for table in findings_page.tables())

"""What is said of options before the first update: faults and recipes that were written down before the table was made."""

import json
from pathlib import Path

import pytest

from benchmarks.doctor.sets import asked
from utils.diagnostics.diagnose import diagnose
from utils.diagnostics.finding import Finding
from utils.diagnostics.rules.options import ROWS, Facts, UnknownFact
from utils.runs.record import RunRecord
from utils.training.doctor import foretold

CASES = {case.name.removeprefix("healthy: "): case for case in asked.option_cases()}
FAULTS = {name: case for name, case in CASES.items() if case.codes}
RECIPES = {name: case for name, case in CASES.items() if not case.codes}
FAST = 6  # one in so many is asked in the fast tests


def record_of(case) -> RunRecord:
    options, resolved, first = asked.record_of(case)
    return RunRecord(Path(), options=options, resolved=resolved, history=[first])


def above_info(case) -> list[Finding]:
    return [finding for finding in diagnose(record_of(case)) if finding.severity != "info"]


def some(names):
    return [pytest.param(name, marks=[pytest.mark.slow] * bool(i % FAST)) for i, name in enumerate(names)]


@pytest.mark.parametrize("name", some(FAULTS))
def test_a_bad_combination_is_named(name):
    case = FAULTS[name]
    assert {finding.code for finding in above_info(case)[:2]} & set(case.codes)


@pytest.mark.parametrize("name", some(RECIPES))
def test_a_published_recipe_is_not(name):
    assert above_info(RECIPES[name]) == []


def test_each_row_can_speak():
    codes = {code for case in FAULTS.values() for code in case.codes}
    assert {row.code for row in ROWS} - codes == {"option-clip-range", "option-latent-scale"}  # which no flag changes
    healthy = record_of(RECIPES["digits16 of train_ddpm.py"])
    (row,) = (row for row in ROWS if row.code == "option-clip-range")
    assert row.figure(Facts(healthy))[0] <= row.info
    healthy.history[0]["schedule"]["clip_range"] = 0.5
    assert row.figure(Facts(healthy))[0] > row.warning
    (row,) = (row for row in ROWS if row.code == "option-latent-scale")
    healthy.history[0]["data"] = {"latent_spread": [1.1, 0.9]}
    assert row.figure(Facts(healthy))[0] <= row.info
    healthy.history[0]["data"] = {"latent_spread": [1.0, 0.18]}
    assert row.figure(Facts(healthy))[0] > row.warning
    healthy.options["pretrained"] = "p"
    with pytest.raises(UnknownFact):
        row.figure(Facts(healthy))


@pytest.mark.slow
def test_a_run_says_it_before_its_first_update(train, tiny_flags, tmp_path, capsys):
    bad = [*tiny_flags, "--adam_beta1", "0.999", "--adam_beta2", "0.9", "--max_train_steps", "1", "--lr_warmup_steps", "9"]
    assert train([*bad, "--output_dir", tmp_path]) == 0
    said = "".join(capsys.readouterr())
    assert said.count("warning: option-betas") == said.count("warning: option-warmup") == 1
    codes = [finding["code"] for finding in json.loads((tmp_path / "diagnosis.json").read_text())]
    assert {"option-betas", "option-warmup"} <= set(codes)
    assert train([*bad, "--dry_run"]) == 0
    assert "WARN  option-betas" in capsys.readouterr().out


def test_what_the_options_say_alone():
    options = {"lr_warmup_steps": 50, "max_train_steps": 60, "lr_scheduler": "cosine"}
    assert foretold(options, {}, None)[0].startswith("WARN  option-warmup")
    assert foretold(options | {"max_train_steps": 600}, {}, None) == ["options: nothing found (the images were not read)"]

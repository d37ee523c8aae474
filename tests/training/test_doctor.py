"""The doctor in the loop: when it looks, what it says and records, and when it has a run stopped."""

import json
from pathlib import Path

import pytest
from made_up_runs import DATA, EVERY, REPORTS, SCHEDULE, report, run

from utils.runs.evaluations import write_evaluation
from utils.runs.record import RunRecord
from utils.training.doctor import Doctor

TOTAL = REPORTS * EVERY


def doctor(folder: Path, first_step: int = 0, reports: int = REPORTS, said: list | None = None) -> Doctor:
    healthy = run()
    return Doctor(
        folder,
        options=healthy.options,
        resolved=healthy.resolved | {"max_train_steps": reports * EVERY},
        first_step=first_step,
        expected_reports=reports,
        enabled=True,
        print_line=(said if said is not None else []).append,
    )


def tell(watching: Doctor, number: int, **changes) -> bool:
    """The `number`-th report. Whether anything is critical."""
    figures = report(number) | changes
    return watching.record_report(figures.pop("step"), figures, figures.pop("layers"))


def test_what_another_tool_found_stays_in_the_file_and_stops_nothing(tmp_path):
    """evaluate.py, while the run goes on and before it is resumed."""
    said: list[str] = []
    figures = {"precision": 0.0, "variance_ratio": 0.97, "rows": 400, "modes": {}, "floor": {"precision": 0.96}}
    watching = doctor(tmp_path, said=said)
    assert not tell(watching, 1)
    write_evaluation(tmp_path, "checkpoint-20", 20, {"features": "randconv", "images": 40, "figures": figures})
    assert not any(tell(watching, number) for number in (2, 3))
    resumed = doctor(tmp_path, first_step=3 * EVERY, said=said)
    assert not tell(resumed, 4)
    assert said == []
    (found,) = json.loads((tmp_path / "diagnosis.json").read_text())
    assert (found["code"], found["severity"], found["source"]) == ("samples-unlike-data", "critical", "evaluate.py")
    # The run's own finding of the same code is told all the same, and counts.
    resumed.record(REPORTS * EVERY - 1, {"evaluation": figures})
    assert len(said) == 1 and said[0].startswith("critical: samples-unlike-data") and "evaluate.py" not in said[0]
    assert tell(resumed, REPORTS)


@pytest.mark.parametrize("fault", [{"data/max": 255.0}, {"train/skipped_updates": 40.0}])
def test_a_fault_that_was_mended_does_not_stop_the_resumed_run(tmp_path, fault):
    first = doctor(tmp_path)
    first.record(0, {"data": DATA | {"copies": {"share": 0.9}}, "schedule": SCHEDULE})
    assert all(tell(first, number, **fault) for number in range(1, 9))
    # The count of skipped updates goes on from that of the checkpoint; that the data is full of copies is accepted.
    counted = {name: value for name, value in fault.items() if name == "train/skipped_updates"}
    resumed = doctor(tmp_path, first_step=8 * EVERY)
    assert not any(tell(resumed, number, **counted) for number in range(9, 15))
    worse = fault if not counted else {"train/skipped_updates": 80.0}
    assert tell(resumed, 15, **worse)
    assert {"data-range" if not counted else "non-finite"} <= {finding.code for finding in resumed.findings}


@pytest.mark.parametrize(
    "content",
    ["[", "{}", "[1]", '[{"code": "x"}]', '[{"code": "x", "severity": "bad"}]', '[{"code": "x", "severity": "info"}]'],
)
def test_what_was_told_before_may_stand_in_a_damaged_file_or_an_older_one(content, tmp_path):
    tell(doctor(tmp_path), 1)
    (tmp_path / "diagnosis.json").write_text(content)
    assert not tell(doctor(tmp_path, first_step=EVERY), 2)


def test_the_beginning_of_a_long_run_is_examined_at_every_report(tmp_path):
    said: list[str] = []
    watching = doctor(tmp_path, reports=20_000, said=said)
    watching.record(0, {"data": DATA, "schedule": SCHEDULE})
    assert not tell(watching, 1)
    assert tell(watching, 2, **{"data/max": 255.0}) and "data-range" in said[0]
    layers = [number for number, record in enumerate(watching._history.records) if "layers" in record]
    assert layers == [1]  # what fills the disk stays thinned


@pytest.mark.parametrize("fault", [{"probe": {"timestep_response": 0.0}}, {"validation/loss": 9.0}])
def test_a_probe_or_validation_late_in_a_long_run_is_examined_at_once(tmp_path, monkeypatch, fault):
    monkeypatch.setattr("utils.training.doctor.FIRST_REPORTS", 2)
    said: list[str] = []
    watching = doctor(tmp_path, reports=20_000, said=said)
    for number in range(1, 12):
        watching.record(number * EVERY, {"validation/loss": 0.5})
        assert not tell(watching, number)
    watching.record(11 * EVERY + 1, fault)
    watching.record(11 * EVERY + 2, fault)
    assert len(said) == 1 and tell(watching, 12)  # which is not examined by itself


def test_what_follows_from_other_options_is_told_on_a_resume_and_nothing_else(tmp_path):
    """A warm-up that took a twentieth of the run takes most of it once the run is shorter."""
    said: list[str] = []
    first = doctor(tmp_path, said=said)
    first.record(0, {"data": DATA, "schedule": SCHEDULE})
    first.look()
    for number in range(1, 4):
        tell(first, number)
    assert said == []
    healthy = run()
    options, long = (
        healthy.options | {"lr_scheduler": "cosine", "lr_warmup_steps": TOTAL // 20},
        healthy.resolved | {"max_train_steps": TOTAL},
    )
    short = long | {"max_train_steps": TOTAL // 18}
    common = {"options": options, "first_step": 3 * EVERY, "expected_reports": REPORTS, "enabled": True}
    for resolved, told in ((long, []), (short, ["option-warmup"]), (short, []), (long, []), (short, ["option-warmup"])):
        said = []
        Doctor(tmp_path, resolved=resolved, print_line=said.append, **common).look()
        assert [line.split(": ")[1] for line in said] == told


@pytest.mark.slow
def test_a_resume_with_other_options_says_what_a_new_run_would_and_looks_at_its_data(train, tiny_flags, tmp_path, capsys):
    flags = [*tiny_flags, "--output_dir", tmp_path, "--checkpointing_steps", 4, "--lr_warmup_steps", 8]
    assert train([*flags, "--max_train_steps", 80, "--max_train_images", 80]) == 0
    capsys.readouterr()
    resume = [*flags, "--resume_from_checkpoint", "checkpoint-4", "--max_train_steps", 10, "--max_train_images", 120]
    assert train([*resume, "--allow_option_change", "max_train_images", "data_fingerprint"]) == 0
    assert (
        "option-warmup: the warm-up is long for this run (--lr_warmup_steps 8, and the run has 10 updates)"
        in capsys.readouterr().out
    )
    records = RunRecord.read(tmp_path).records("data")
    assert [(step, data["images"]) for step, data in records] == [(0, 80), (4, 120)]

"""The run's own record: whole after kills, cut back on resume, readable with NaN in it."""

import itertools
import json
import math

import pytest

from utils.runs.history import HISTORY, History, read_history
from utils.runs.record import RunRecord
from utils.training.doctor import Doctor


def test_records_come_back_with_what_json_has_no_word_for(tmp_path):
    history = History(tmp_path, first_step=0)
    history.add(1, {"train/loss": math.nan, "layers": {"a": {"gradient": math.inf, "update": -math.inf}}})
    history.add(2, {"train/loss": 0.5})
    for line in (tmp_path / HISTORY).read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    first, second = read_history(tmp_path / HISTORY)
    assert math.isnan(first["train/loss"])
    assert first["layers"]["a"] == {"gradient": math.inf, "update": -math.inf}
    assert (second["step"], second["train/loss"]) == (2, 0.5)


def test_a_resumed_run_drops_what_it_does_again(tmp_path):
    history = History(tmp_path, first_step=0)
    for step in (10, 20, 30):
        history.add(step, {"train/loss": float(step)})
    with open(tmp_path / HISTORY, "a") as file:
        file.write('{"step": 40, "train/lo')  # killed while it wrote
    history = History(tmp_path, first_step=20)
    history.add(30, {"train/loss": 31.0})
    record = RunRecord(tmp_path, history=read_history(tmp_path / HISTORY))
    assert record.series("train/loss") == ([10, 20, 30], [10.0, 20.0, 31.0])
    assert record.series("absent") == ([], [])


def test_a_run_that_begins_anew_keeps_nothing_of_one_that_was_killed_before_its_first_checkpoint(tmp_path):
    history = History(tmp_path, first_step=0)
    history.add(0, {"data": 1})
    history.add(1, {"train/loss": 1.0})
    again = History(tmp_path, first_step=0)
    assert again.records == [] and read_history(tmp_path / HISTORY) == []


def test_a_line_that_a_kill_cut_short_does_not_spoil_the_next(tmp_path):
    (tmp_path / HISTORY).write_text('{"step": 1, "a": 1}\n{"step": 2, "a')
    History(tmp_path, first_step=5).add(6, {"a": 6})
    assert [record["step"] for record in read_history(tmp_path / HISTORY)] == [1, 6]


def test_what_a_full_disk_does_not_take_follows_with_a_later_line(tmp_path, files_no_larger_than):
    history = History(tmp_path, first_step=0)
    history.add(1, {"a": 1})
    with files_no_larger_than((tmp_path / HISTORY).stat().st_size + 10):
        history.add(2, {"a": 2})
        history.add(3, {"a": 3})
        assert [record["step"] for record in read_history(tmp_path / HISTORY)] == [1]
    history.add(4, {"a": 4})
    assert read_history(tmp_path / HISTORY) == history.records and len(history.records) == 4


def test_other_processes_write_nothing(tmp_path):
    History(tmp_path, first_step=0, enabled=False).add(1, {"a": 1})
    assert not (tmp_path / HISTORY).exists()


def test_a_long_run_records_its_layers_now_and_then(tmp_path):
    def start(first_step: int) -> Doctor:
        options = {"options": {}, "resolved": {}, "expected_reports": 1000, "enabled": True, "print_line": print}
        return Doctor(tmp_path, first_step=first_step, **options)

    doctor = start(0)
    for step in range(1, 1001):
        if step == 501:
            doctor = start(500)  # resumed
        doctor.record_report(step, {"train/loss": 1.0}, {"a.weight": {"update": 1e-3}})
    records = read_history(tmp_path / HISTORY)
    assert len(records) == 1000
    assert [record["step"] for record in records if "layers" in record] == list(range(1, 1001, 5))


def test_a_long_history_is_thinned_as_it_is_read_and_kept_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.runs.history._LAST", 50)
    history = History(tmp_path, first_step=0)
    for step in range(1, 1001):
        history.add(step, {"train/loss": 1.0})
        if step % 100 == 0:
            history.add(step, {"samples": {"raw": {"mean": 0.0}}})
            history.add(step, {"validation/loss": 1.0})
    path = tmp_path / HISTORY
    written = path.read_bytes()
    assert len(read_history(path)) == 1020
    records = read_history(path, most=200)
    reports = [record["step"] for record in records if "train/loss" in record]
    for kind in ("samples", "validation/loss"):
        assert [record["step"] for record in records if kind in record] == list(range(100, 1001, 100))
    assert reports[-50:] == list(range(951, 1001)) and 150 <= len(reports) <= 200
    gaps = {later - earlier for earlier, later in itertools.pairwise(reports[:-50])}
    assert len(gaps) == 1
    assert [record["step"] for record in records] == sorted(record["step"] for record in records)
    History(tmp_path, first_step=1000)
    assert path.read_bytes() == written
    History(tmp_path, first_step=600)
    assert path.read_bytes() == b"".join(line for line in written.splitlines(True) if json.loads(line)["step"] <= 600)

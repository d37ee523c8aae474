"""The updates that fit into some seconds, by a short run."""

import json
from itertools import accumulate

import pytest

from benchmarks.quality import rivals
from benchmarks.quality.time_to_quality import TIMED, Trials
from steady_doctor.declared_run import audited_updates


@pytest.mark.parametrize("seconds", [15, 60])
def test_what_comes_often_at_first_is_no_price_of_every_update(seconds, tmp_path, monkeypatch):
    """Updates of 0.1 s; of 0.4 s, the doctor records them; the first one takes 2 s."""
    looks = audited_updates(1000)
    times = list(accumulate(2 if number == 1 else 0.4 if number in looks else 0.1 for number in range(1, 1001)))
    monkeypatch.setattr(rivals, "register_optimizer_step_post_hook", lambda hook: None)
    monkeypatch.setattr(rivals.atexit, "register", lambda function: None)
    clock = rivals.Clock(tmp_path / "told.json", None)
    clock.times = times[: rivals.WARM + TIMED]
    clock._tell()
    trials = object.__new__(Trials)
    trials.timing = tmp_path
    trials.train = lambda *_: json.loads((tmp_path / "told.json").read_text())
    updates = trials.updates_in("train_ddpm.py, few", seconds, 60)
    assert times[updates - 1] - times[0] == pytest.approx(seconds, rel=0.1)

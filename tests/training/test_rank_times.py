"""Slow ranks: named, with the part in which they are slow; and what the others' waiting does to the images per second."""

import json
import time

import pytest
from conftest import slow_turns

from utils.core.signals import StopSignal
from utils.training.rank_times import Shares

INJECT = "tests/faults/inject.py"


def test_the_slowest_rank_is_set_beside_the_median_of_the_others():
    """The wait of the others for it is no work of theirs."""
    figures = Shares((1.0, 2.0, 1.0, 1.2), (0.0, 0.4, 0.1, 0.0), (1.4, 0.0, 1.3, 1.2)).figures()
    assert figures == {"perf/slowest_rank": 1, "perf/rank_spread": pytest.approx(2.4 / 1.1)}


@pytest.mark.slow
@pytest.mark.parametrize(("part", "rank"), [*slow_turns(("data", 0)), ("compute", 1)])
def test_a_slow_rank_is_named(server, script, script_flags, tmp_path, part, rank):
    fault = [f"slow-{part}", "--rank", rank, "--step", 3, "--value", 0.2]
    flags = ["--train_batch_size", 4, "--max_train_steps", 12, "--logging_steps", 2, "--save_images_epochs", 999]
    runs = server.start([INJECT, script, *fault, "--", *script_flags, *flags, "--output_dir", tmp_path], 2)
    assert [run.wait() for run in runs] == [0, 0], runs[0].text()
    [found] = [each for each in json.loads((tmp_path / "diagnosis.json").read_text()) if each["code"] == "slow-rank"]
    assert f"rank {rank} takes" in found["evidence"] and found["evidence"].endswith(f"in {part}")
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    newest = [record for record in history if "ranks" in record][-1]
    other = 1 - rank
    assert newest["perf/slowest_rank"] == rank and newest["perf/rank_spread"] > 1.1  # the other one waits for a core, too
    assert newest["ranks"]["collectives"][other] > 2 * newest["ranks"]["collectives"][rank]
    assert newest["perf/images_per_second"] < 8 / 0.2  # a batch of 8 takes at least as long as the slow rank does


def test_the_wait_until_all_ranks_agree_counts_in_the_images_per_second(train, tiny_flags, tmp_path, monkeypatch):
    monkeypatch.setattr(StopSignal, "agreed", lambda self: time.sleep(0.1))
    flags = ["--max_train_steps", 3, "--logging_steps", 2, "--logger", "none", "--save_images_epochs", 999]
    assert train([*tiny_flags, *flags, "--output_dir", tmp_path]) == 0
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    speeds = [record["perf/images_per_second"] for record in history if "perf/images_per_second" in record]
    assert speeds[-1] < 8 / 0.1

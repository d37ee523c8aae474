"""Slow ranks: named, with the part in which they are slow; and what the others' waiting does to the images per second."""

import itertools
import json
import random
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import slow_turns

from utils.core.signals import StopSignal
from utils.training import ranks
from utils.training.ranks import RING, RankTimes, Shares

INJECT = "tests/faults/inject.py"


def test_the_slowest_rank_is_set_beside_the_median_of_the_others():
    """The wait of the others for it is no work of theirs."""
    figures = Shares((1.0, 2.0, 1.0, 1.2), (0.0, 0.4, 0.1, 0.0), (1.4, 0.0, 1.3, 1.2)).figures()
    assert figures == {"perf/slowest_rank": 1, "perf/rank_spread": pytest.approx(2.4 / 1.1)}


class Stream:
    """A device's, which comes to an event only when the host waits for it; a moment lasts a second, or as long as is drawn."""

    def __init__(self):
        self.draw, self.made, self.recorded, self.reached, self.now = random.Random(0), 0, 0, 0, 0.0

    def event(self, device, enable_timing):
        assert (device, enable_timing) == ("accelerator", True)
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.stream.recorded += 1
        self.stream.now += self.stream.draw.random()
        self.number, self.seconds = self.stream.recorded, self.stream.now

    def synchronize(self):
        self.stream.reached = max(self.stream.reached, self.number)
        self.behind = self.stream.recorded - self.number

    def elapsed_time(self, end):
        assert max(self.number, end.number) <= self.stream.reached, "the device has not come there"
        return 1000 * (end.seconds - self.seconds)


class OnHost(str):
    """A device that is called otherwise, and whose tensors lie on the host."""

    type = "accelerator"


def test_the_events_of_a_report_are_a_ring(monkeypatch):
    """However many updates there are between two reports; the host never waits for an event of now."""
    stream, told = Stream(), []
    monkeypatch.setattr(ranks.torch, "Event", stream.event)
    accelerator = SimpleNamespace(num_processes=2, device=OnHost("cpu"), gather=lambda rows: torch.cat([rows, 0 * rows]))
    times = RankTimes(accelerator, told.append)
    for marks in (3, RING - 1, RING, RING + 1, 5000):
        expected, began, before = dict.fromkeys(ranks.KINDS, 0.0), stream.now, None
        for kind in itertools.islice(itertools.cycle(["data", "compute", "collectives", None]), marks):
            reached = stream.reached
            times.now(kind)
            assert stream.reached == reached or stream.reached <= stream.recorded - RING // 2 + 1
            if before is not None:
                expected[before] += stream.now - began
            before, began = kind, stream.now
        shares = times.report()
        assert {kind: getattr(shares, kind)[0] for kind in expected} == pytest.approx(expected, rel=1e-6)
    assert stream.made <= RING and len(told) == stream.recorded
    assert times.report().compute == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "rank"), [*slow_turns(("data", 0)), ("compute", 1)])
def test_a_slow_rank_is_named(server, script, script_flags, tmp_path, part, rank):
    fault = [f"slow-{part}", "--rank", rank, "--step", 3, "--value", 0.2]
    flags = ["--train_batch_size", 4, "--max_train_steps", 12, "--logging_steps", 2, "--save_images_epochs", 999]
    server.run([INJECT, script, *fault, "--", *script_flags, *flags, "--output_dir", tmp_path], 2)
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

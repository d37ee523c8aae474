from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import logged_scalars

from utils.tracking import StepStatistics, Stopwatch, init_trackers

ALONE = SimpleNamespace(reduce=lambda tensor, reduction: tensor)
FINITE, BAD = torch.tensor(True), torch.tensor(False)


def test_means_are_over_samples_by_quartile_of_the_timestep():
    statistics = StepStatistics(torch.device("cpu"), 1000)
    statistics.add_losses(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 249, 250]))
    statistics.add_losses(torch.tensor([9.0]), torch.tensor([999]))
    statistics.add_update(torch.tensor(3.0), FINITE)
    statistics.add_update(torch.tensor(5.0), FINITE)
    report = statistics.report(ALONE)
    assert report["train/loss"] == 4.0
    assert [report.get(f"train/loss_timestep_quartile_{i}") for i in (1, 2, 3, 4)] == [1.5, 4.0, None, 9.0]
    assert report["train/grad_norm"] == 4.0
    statistics.add_losses(torch.tensor([7.0]), torch.tensor([600]))
    assert statistics.report(ALONE)["train/loss"] == 7.0  # the sums were emptied


def test_two_processes_report_the_mean_of_all_samples():
    statistics = StepStatistics(torch.device("cpu"), 4)
    statistics.add_losses(torch.tensor([1.0, 3.0]), torch.tensor([0, 1]))
    other = torch.tensor([5.0, 0, 0, 0, 1.0, 0, 0, 0])  # one sample of loss 5 in the first quartile
    report = statistics.report(SimpleNamespace(reduce=lambda tensor, reduction: tensor + other))
    assert report["train/loss"] == 3.0
    assert report["train/loss_timestep_quartile_1"] == 3.0


def test_bad_updates_are_counted_and_stay_out_of_the_means():
    statistics = StepStatistics(torch.device("cpu"), 1000, skipped_updates=2)
    for finite in (BAD, BAD, BAD, FINITE, BAD):
        statistics.add_losses(torch.tensor([1.0 if finite else float("nan")]), torch.tensor([3]))
        statistics.add_update(torch.tensor(2.0 if finite else float("inf")), finite)
    report = statistics.report(ALONE)
    assert (report["train/loss"], report["train/grad_norm"]) == (1.0, 2.0)
    assert (report["train/skipped_updates"], statistics.skipped_updates) == (6, 6)
    assert report["train/bad_updates_in_a_row"] == 3
    for _ in range(2):
        statistics.add_update(torch.tensor(float("nan")), BAD)
    assert statistics.report(ALONE)["train/bad_updates_in_a_row"] == 3  # one before the report, two after it


def test_stopwatch_leaves_out_pauses_and_counts_waiting(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    stopwatch = Stopwatch(step=10)
    with stopwatch.waiting_for_data():
        now += 1.0
    now += 3.0
    with stopwatch.paused():
        now += 100.0
    assert stopwatch.report(step=12, global_batch_size=8) == {"perf/images_per_second": 4.0, "perf/data_wait": 0.25}
    now += 2.0
    assert stopwatch.report(step=13, global_batch_size=8)["perf/images_per_second"] == 4.0


def test_after_a_crash_and_a_resume_each_step_has_one_value(tmp_path):
    """The crashed run logged up to 30 and was resumed from 20 with other values."""
    for first_step, last_step, value in ((0, 30, 1.0), (20, 40, 2.0)):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path / "logs"))
        init_trackers(accelerator, "train_ddpm", "tensorboard", first_step)
        for step in range(first_step + 10, last_step + 1, 10):
            accelerator.log({"train/loss": value}, step=step)
        accelerator.trackers[0].writer.close()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert logged_scalars(tmp_path, "train/loss") == pytest.approx({10: 1.0, 20: 1.0, 30: 2.0, 40: 2.0})

import gc
import math
import threading
from types import SimpleNamespace

import torch

from utils.core.bars import duration
from utils.optim.clipping import Gradients
from utils.training import progress as progress_module
from utils.training.progress import QUARTILES, ProgressBar, StepStatistics, Stopwatch, read_together

ALONE = SimpleNamespace(reduce=lambda tensor, reduction: tensor)


def reported(statistics: StepStatistics, accelerator=ALONE) -> dict[str, float]:
    return statistics.report(statistics.sums(accelerator).tolist())


def gradients(norm: float) -> Gradients:
    norm = torch.tensor(norm)
    return Gradients(norm, torch.isfinite(norm), norm[None], None)


def test_means_are_over_samples_by_quartile_of_the_timestep():
    statistics = StepStatistics(torch.device("cpu"), 1000)
    statistics.add_losses(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 249, 250]))
    statistics.add_losses(torch.tensor([9.0]), torch.tensor([999]))
    statistics.add_update(gradients(3.0))
    statistics.add_update(gradients(5.0))
    report = reported(statistics)
    assert report["train/loss"] == 4.0
    assert [report.get(f"train/loss_timestep_quartile_{i}") for i in (1, 2, 3, 4)] == [1.5, 4.0, None, 9.0]
    assert report["train/grad_norm"] == 4.0
    statistics.add_losses(torch.tensor([7.0]), torch.tensor([600]))
    assert reported(statistics)["train/loss"] == 7.0  # the sums were emptied


def test_two_processes_report_the_mean_of_all_samples():
    statistics = StepStatistics(torch.device("cpu"), 4)
    statistics.add_losses(torch.tensor([1.0, 3.0]), torch.tensor([0, 1]))
    other = torch.zeros(2 * QUARTILES)
    other[0], other[QUARTILES] = 5.0, 1.0  # one sample of loss 5 in the first quartile
    report = reported(statistics, SimpleNamespace(reduce=lambda tensor, reduction: tensor + other))
    assert report["train/loss"] == 3.0
    assert report["train/loss_timestep_quartile_1"] == 3.0


def test_bad_updates_stay_out_of_the_means():
    statistics = StepStatistics(torch.device("cpu"), 1000)
    for ok in (False, True, False):
        statistics.add_losses(torch.tensor([1.0 if ok else float("nan")]), torch.tensor([3]))
        statistics.add_update(gradients(2.0 if ok else float("inf")))
    report = reported(statistics)
    assert (report["train/loss"], report["train/grad_norm"]) == (1.0, 2.0)
    statistics.add_losses(torch.tensor([math.nan]), torch.tensor([3]))
    report = reported(statistics)
    assert report.keys() == {"train/loss"} and math.isnan(report["train/loss"])


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


def test_values_read_together_are_exact():
    tensors = [
        torch.tensor([0.1, torch.inf, -0.0]),
        torch.tensor(2**53 + 1),  # no float holds it
        torch.zeros(0),
        torch.tensor([[True, False], [False, True]]),
        torch.tensor(0.1, dtype=torch.float64, requires_grad=True),
        torch.arange(6, dtype=torch.int64).view(2, 3).T,
    ]
    assert read_together(tensors) == [tensor.flatten().tolist() for tensor in tensors]


REPORT = 0.25, 1e-3, 40.0  # loss, learning rate, images per second


def test_without_a_terminal_each_report_is_one_plain_line_with_the_time_left(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = ProgressBar(True, first_step=10, total_steps=60)  # resumed
    now += 5.0
    progress.update()  # the first updates do more
    progress.show(0.5, 1e-4)
    for _ in range(19):
        now += 0.5
        progress.update()
    progress.show(*REPORT)
    for seconds in (6.0, 5.0, 600.0, 56.0, 5.0):  # a line after ten seconds without one; after ten minutes, after one minute
        now += seconds
        progress.update()
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "update 11 of 60: loss 0.5000, lr 1.00e-04, estimating the time left",
        "update 30 of 60: loss 0.2500, lr 1.00e-03, 40 images/s, 0:15 left",  # half a second each
        "update 32 of 60: 0:14 left",
        "update 33 of 60: 0:14 left",
        "update 35 of 60: 0:12 left",
    ]


def test_the_time_left_is_that_of_recent_updates(monkeypatch, capsys):
    """In the order of a run: audits in the first updates, a preview once in so many, and a machine that becomes slower."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = ProgressBar(True, first_step=0, total_steps=1000)
    told = []
    for number in range(1, 501):
        now += 1.0 if number <= 300 else 2.0
        now += 30.0 * (number in (1, 2, 3, 5, 8, 13, 20)) + 200.0 * (number % 50 == 0)
        progress.update()
        capsys.readouterr()
        progress.show(*REPORT)
        told.append(capsys.readouterr().err.split("images/s, ")[1].strip())
    progress.close()
    assert set(told[:19]) == {"estimating the time left"}
    assert told[19:300] == [f"{duration(1000 - number)} left" for number in range(20, 301)]
    assert told[399:] == [f"{duration(2 * (1000 - number))} left" for number in range(400, 501)]


def test_the_bar_of_a_terminal_has_the_loss_from_the_first_update_on_and_the_time_left(monkeypatch, capsys):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(progress_module, "on_terminal", lambda: True)
    progress = ProgressBar(True, first_step=0, total_steps=100)
    assert progress.awaits_loss
    now += 30.0
    progress.update()
    progress.show(0.5, 1e-4)
    assert not progress.awaits_loss
    first = capsys.readouterr().err.split("\r")[-1]
    assert "1/100 [" in first and ", loss 0.5000, lr 1.00e-04, estimating the time left]" in first
    for _ in range(39):
        now += 2.0
        progress.update()
    progress.show(*REPORT)
    later = capsys.readouterr().err.split("\r")[-1]
    assert ", loss 0.2500, lr 1.00e-03, 40 images/s, 2:00 left]" in later
    progress.close()


def test_an_update_that_takes_long_shows_that_it_goes_on(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = ProgressBar(True, first_step=0, total_steps=5)
    for moment in (5.0, 12.0, 14.0):
        now = moment
        progress.look()
    now = 24.0
    progress.update()
    with progress.part("sampling"):
        now = 60.0
        progress.look()  # which has its own lines
    for moment in (66.0, 71.0):
        now = moment
        progress.look()
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "update 1 of 5: 0:12 so far, estimating the time left",
        "update 1 of 5: estimating the time left",
        "update 2 of 5: 0:11 so far, estimating the time left",
    ]


def test_somebody_looks_while_an_update_goes_on(monkeypatch):
    looked = threading.Event()
    monkeypatch.setattr(progress_module, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(ProgressBar, "look", lambda self: looked.set())
    progress = ProgressBar(True, first_step=0, total_steps=5)
    progress.begin()
    assert looked.wait(10)
    watch = progress._watch
    del progress  # of a run that failed
    gc.collect()
    watch.join(10)
    assert not watch.is_alive()
    quiet = ProgressBar(True, first_step=0, total_steps=5, quiet=True)
    quiet.begin()
    assert quiet._watch is None
    quiet.close()


def test_quiet_prints_lines_for_the_user_and_no_progress(capsys):
    progress = ProgressBar(True, first_step=0, total_steps=4, quiet=True)
    assert not progress.awaits_loss  # which the host would wait for
    progress.update()
    progress.show(*REPORT)
    progress.print_line("a finding")
    assert progress.part("sampling")._shown is False
    assert capsys.readouterr() == ("a finding\n", "")


def test_many_micro_batches_and_updates_count_as_often_as_few():
    statistics, finite = StepStatistics(torch.device("cpu"), 1000), torch.tensor(True)
    for number in range(200):  # more than are summed up together
        statistics.add_losses(torch.tensor([float(number), 1.0]), torch.tensor([0, 999]))
        norm = torch.tensor(float(number) if number % 2 else math.nan)
        statistics.add_update(Gradients(norm=norm, norms=norm[None], finite=finite if number % 2 else ~finite, loss_scale=None))
    report = reported(statistics)
    assert (report["train/loss_timestep_quartile_1"], report["train/loss_timestep_quartile_4"]) == (99.5, 1.0)
    assert report["train/grad_norm"] == 100.0  # the mean of 1, 3, ..., 199
    assert not statistics._waiting and not statistics._gradients


def test_an_update_whose_report_follows_has_one_line(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = ProgressBar(True, first_step=0, total_steps=60)
    now, progress.line_follows = 20.0, True
    progress.update()
    progress.show(*REPORT)
    progress.close()
    assert len(capsys.readouterr().err.splitlines()) == 1

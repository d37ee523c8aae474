"""Monitors as a whole; what they are made of is tested with its own modules, and in real runs."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import slow_turns

from utils.checkpoints import TrainState
from utils.gradients import clip_gradients
from utils.monitors import Monitors
from utils.nonfinite import BadUpdates


def test_the_loss_to_show_and_the_loss_that_is_trained():
    """An update is judged by what its gradient is of, and shown by the other."""
    network, accelerator, state = torch.nn.Linear(2, 1), Accelerator(cpu=True), TrainState()
    shown = {}
    monitors = Monitors(
        accelerator,
        network,
        state,
        every=1,
        total_steps=4,
        global_batch_size=3,
        num_noise_levels=20,
        checks_noise=False,
        measures_eagerly=True,
        max_bad_steps=2,
        stop_on_critical=False,
        nan_reports=SimpleNamespace(write=lambda bad, *rest: shown.update(losses=bad.losses.tolist())),
        bad_images=SimpleNamespace(update=dict),
        progress=SimpleNamespace(show=lambda report: None, say=print, attempt=lambda write, *arguments: write(*arguments)),
        trackers=SimpleNamespace(log=lambda report, step: shown.update(report)),
        doctor=SimpleNamespace(record_report=lambda *arguments: False),
    )
    monitors.begin(0)
    images = torch.randn(3, 1, 1, 2)
    monitors.see_images(images)
    (network(images).sum() * torch.nan).backward()
    weighted, trained = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, torch.nan, 7.0])
    monitors.add_losses(weighted, torch.tensor([0, 5, 19]), trained=trained)
    gradients = clip_gradients(accelerator, list(network.parameters()), 1.0)
    monitors.before_step(0, gradients)
    monitors.after_step(gradients)
    state.step = 1
    assert monitors.due and monitors.report({"train/lr": 0.1}) == 0
    assert (shown["train/loss"], shown["train/skipped_updates"], shown["train/samples_seen"]) == (2.0, 1, 3)
    assert (shown["losses"][0], shown["losses"][2]) == (5.0, 7.0) and shown["losses"][1] != shown["losses"][1]
    assert shown["train/first_skipped_update"] == 1
    monitors.store()
    assert (state.skipped_updates, state.bad_in_a_row) == (1, 1)


def test_the_first_bad_update_since_the_last_report_is_told():
    accelerator, weight = Accelerator(cpu=True), torch.nn.Parameter(torch.ones(2))
    bad_updates = BadUpdates(accelerator, num_parameters=1)

    def report(first: int, finite: list[bool]) -> dict:
        for step, ok in enumerate(finite, start=first):
            weight.grad = torch.ones(2) if ok else torch.full((2,), torch.nan)
            bad_updates.add_losses(torch.zeros(3))
            bad_updates.add(step, clip_gradients(accelerator, [weight], 1.0))
        return bad_updates.report()

    assert "train/first_skipped_update" not in report(0, [True, True])
    assert report(2, [True, False, True, False])["train/first_skipped_update"] == 4
    assert report(6, [False])["train/first_skipped_update"] == 7
    assert "train/first_skipped_update" not in report(7, [True])


@pytest.mark.parametrize("rate", [*slow_turns("30"), "1e18"])
def test_a_learning_rate_that_leaves_nothing_finite_is_named(train, tiny_flags, tmp_path, rate):
    """By a report that comes long after the first bad update, which follows the first or second good one."""
    run = ["--learning_rate", rate, "--max_grad_norm", "0", "--lr_warmup_steps", "0", "--logging_steps", "18"]
    train([*tiny_flags, *run, "--max_train_steps", "36", "--output_dir", tmp_path])
    found = {finding["code"]: finding for finding in json.loads((tmp_path / "diagnosis.json").read_text())}
    assert {code for code, finding in found.items() if finding["severity"] != "info"} == {"lr-too-high", "non-finite"}
    assert next(iter(found)) == "lr-too-high"
    assert re.search(r"the first was update [2-5]$", found["non-finite"]["evidence"])
    assert "overflow" not in found["non-finite"]["cause"]

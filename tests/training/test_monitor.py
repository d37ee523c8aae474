"""The monitor as a whole; what they are made of is tested with its own modules, and in real runs."""

import json
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from conftest import slow_turns

from utils.data.bad_images import BadImages
from utils.diffusion.objective import Losses
from utils.optim.clipping import FixedLimit
from utils.options.flags import DDPMOptions
from utils.runs.state import TrainState
from utils.training.length import RunLength
from utils.training.monitor import Monitor


def test_the_loss_to_show_and_the_loss_that_is_trained(tmp_path, monkeypatch):
    """An update is judged by what its gradient is of, and shown by the other."""
    network, accelerator, state = torch.nn.Linear(2, 1), Accelerator(cpu=True), TrainState()
    shown = {}
    objective = SimpleNamespace(network=network, num_bins=20, bins=lambda bins: bins, level="timesteps")
    no_images = SimpleNamespace(bad_images=BadImages(0))
    run = SimpleNamespace(
        options=DDPMOptions(logging_steps=1, max_bad_steps=2),
        accelerator=accelerator,
        output_dir=tmp_path,
        data=SimpleNamespace(training=no_images, validation=no_images),
        objective=objective,
        ema=None,
        clipping=FixedLimit(1.0),
        state=state,
        length=RunLength(3, 4, 4),
        progress=SimpleNamespace(awaits_loss=True, show=mock.Mock()),
        attempts=SimpleNamespace(make=lambda what, write, *arguments: write(*arguments)),
        trackers=SimpleNamespace(log=lambda report, step: shown.update(report)),
        doctor=SimpleNamespace(record_report=lambda *arguments: False),
        print_line=print,
    )
    monkeypatch.setattr("utils.training.monitor.audit_of", lambda *arguments: mock.MagicMock())
    monkeypatch.setattr("utils.training.monitor.Ledger", lambda run: mock.Mock(due=False, parted=False))
    monitor = Monitor(run, measures_eagerly=True)
    monitor._nan_reports = SimpleNamespace(write=lambda bad, *rest: shown.update(losses=bad.losses.tolist()))
    monitor.begin(0)
    images = torch.randn(3, 1, 1, 2)
    monitor._sample_numbers = torch.arange(3)
    monitor.add_drawn({"clean_images": images, "noise": images, "timesteps": torch.arange(3)})
    (network(images).sum() * torch.nan).backward()
    weighted, trained = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, torch.nan, 7.0])
    monitor.add(Losses(trained, weighted), {"bins": torch.tensor([0, 5, 19])})
    gradients = run.clipping.clip(accelerator, list(network.parameters()))
    with monitor.optimizer_step(gradients):
        pass
    state.step = 1
    assert monitor.due and monitor.report(learning_rate=0.1) == 0
    assert (shown["train/loss"], shown["train/skipped_updates"], shown["train/samples_seen"]) == (2.0, 1, 3)
    assert (shown["losses"][0], shown["losses"][2]) == (5.0, 7.0) and shown["losses"][1] != shown["losses"][1]
    assert shown["train/first_skipped_update"] == 1
    monitor.store()
    assert (state.skipped_updates, state.bad_in_a_row) == (1, 1)


@pytest.mark.parametrize("rate", [*slow_turns("30"), "1e18"])
def test_a_learning_rate_that_leaves_nothing_finite_is_named(train, tiny_flags, tmp_path, rate):
    """By a report that comes long after the first bad update, which follows the first or second good one."""
    run = ["--learning_rate", rate, "--max_grad_norm", "0", "--lr_warmup_steps", "0", "--logging_steps", "18"]
    train([*tiny_flags, *run, "--max_train_steps", "36", "--output_dir", tmp_path])
    found = {finding["code"]: finding for finding in json.loads((tmp_path / "diagnosis.json").read_text())}
    said = [code for code, finding in found.items() if finding["severity"] != "info" and code != "lr-too-high"]
    assert said == ["non-finite", "option-learning-rate"]
    assert re.search(r"the first was update [2-5]$", found["non-finite"]["evidence"])

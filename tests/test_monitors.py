"""Monitors as a whole; what they are made of is tested with its own modules, and in real runs."""

from types import SimpleNamespace

import torch
from accelerate import Accelerator

from utils.checkpoints import TrainState
from utils.gradients import clip_gradients
from utils.monitors import Monitors


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
    monitors.store()
    assert (state.skipped_updates, state.bad_in_a_row) == (1, 1)

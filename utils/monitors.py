"""What watches the updates of a run, from their images to the optimizer's step, and reports on them once in so many."""

import math
from contextlib import AbstractContextManager

import torch
from accelerate import Accelerator
from torch import nn

from utils.bad_images import BadImageReport
from utils.checkpoints import TrainState
from utils.doctor import Doctor
from utils.dynamics import Dynamics
from utils.gradients import Gradients
from utils.interrupts import EXIT_DIVERGED
from utils.launch import from_main_process
from utils.nan_report import NanReports
from utils.nonfinite import BadUpdates, advice
from utils.tracking import ProgressBar, StepStatistics, Stopwatch, Trackers, peak_memory_gib, read_together


class Monitors:
    """Its methods are to be called on every process, in the order below; between two reports none makes the host wait.

    Args:
        model: what is trained, unwrapped.
        state: of the run; its `step` is the number of finished updates.
        every, total_steps: updates from one report to the next, and of the whole run, whose last one is reported as well.
        global_batch_size: samples of an update, over all processes.
        num_noise_levels: noise levels are integers from 0, the least noise, to one less than this.
        checks_noise, measures_eagerly: see `Dynamics`.
        max_bad_steps: a run ends after so many updates in a row that were not finite, when a report sees them.
        stop_on_critical: whether it ends when the doctor finds something critical.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        state: TrainState,
        *,
        every: int,
        total_steps: int,
        global_batch_size: int,
        num_noise_levels: int,
        checks_noise: bool,
        measures_eagerly: bool,
        max_bad_steps: int,
        stop_on_critical: bool,
        nan_reports: NanReports,
        bad_images: BadImageReport,
        progress: ProgressBar,
        trackers: Trackers,
        doctor: Doctor,
    ):
        self._accelerator, self._state = accelerator, state
        self._every, self._total_steps, self._global_batch_size = every, total_steps, global_batch_size
        self._max_bad_steps, self._stop_on_critical = max_bad_steps, stop_on_critical
        self._nan_reports, self._bad_images = nan_reports, bad_images
        self._progress, self._trackers, self._doctor = progress, trackers, doctor
        self._stopwatch = Stopwatch(state.step)
        self._statistics = StepStatistics(accelerator.device, num_noise_levels)
        self._dynamics = Dynamics(model, checks_noise, measures_eagerly)
        self._bad_updates = BadUpdates.of_run(accelerator, model, state)
        self.due = False  # whether the update under way is reported

    def measure_eagerly(self) -> None:
        """From here on the updates of reports run eagerly, as all others do once compiling is given up."""
        self._dynamics.eager = True

    def begin(self, step: int) -> None:
        """Before the update that follows `step` finished ones."""
        self.due = (step + 1) % self._every == 0 or step + 1 == self._total_steps
        self._dynamics.begin(self.due)

    def waiting_for_data(self) -> AbstractContextManager:
        """Around what the loop waits for."""
        return self._stopwatch.waiting_for_data()

    def see_images(self, clean_images: torch.Tensor) -> None:
        """What the network is trained on, [B, C, H, W]."""
        self._dynamics.see_images(clean_images)

    def add_losses(self, losses: torch.Tensor, noise_levels: torch.Tensor, trained: torch.Tensor | None = None) -> None:
        """Those of a micro step, [B]; `trained` are what the gradient is of, where that is not the loss to show."""
        self._statistics.add_losses(losses, noise_levels)
        self._bad_updates.add_losses(losses if trained is None else trained)

    def before_step(self, step: int, gradients: Gradients) -> None:
        """Before the optimizer's step."""
        self._bad_updates.add(step, gradients)
        self._dynamics.before_step()

    def after_step(self, gradients: Gradients) -> None:
        """When the weights are those of the next update, and before the gradients are cleared."""
        self._dynamics.end(gradients)
        self._statistics.add_update(gradients)

    def paused(self) -> AbstractContextManager:
        """Around what is no part of an update: its time is left out of the images per second."""
        return self._stopwatch.paused()

    def report(self, figures: dict[str, float | torch.Tensor]) -> int:
        """Logs what was seen since the last report, with the `figures` of the loop ("train/lr" among them), and has the doctor
        look at it.

        Returns 0, or EXIT_DIVERGED where the run must end. The host waits for the device, once: whatever lies there, figures
        of the loop included, is read in one copy.
        """
        accelerator, step = self._accelerator, self._state.step
        if accelerator.scaler is not None:
            scale = accelerator.scaler._scale  # None before its first update; get_scale() would wait a second time
            figures = figures | {"train/loss_scale": accelerator.scaler.get_scale() if scale is None else scale}
        on_device = {name: value for name, value in figures.items() if isinstance(value, torch.Tensor)}
        parts = [self._statistics.sums(accelerator), self._bad_updates.counts(), self._dynamics.measured()]
        sums, counts, measured, *values = read_together([*parts, *on_device.values()])
        figures = figures | {name: value for name, (value,) in zip(on_device, values)}
        report = self._statistics.report(accelerator, sums) | self._bad_updates.report(counts)
        report |= self._stopwatch.report(step, self._global_batch_size) | self._bad_images.update() | figures
        report["train/samples_seen"] = step * self._global_batch_size
        report["perf/peak_memory_gib"] = peak_memory_gib(accelerator.device)
        seen, layers = self._dynamics.report(measured)
        report |= seen
        self._trackers.log(report, step=step)
        critical = self._doctor.record_report(step, report, layers)
        self._progress.show(report)
        if math.isfinite(report["train/loss"]):
            self._state.metrics["training loss"] = report["train/loss"]
        if self._bad_updates.first is not None:
            self._progress.attempt(self._nan_reports.write, self._bad_updates.first, step, report["train/lr"])
        return self._judge(critical)

    def _judge(self, critical: bool) -> int:
        exit_status = 0
        if self._bad_updates.row >= self._max_bad_steps:
            self._progress.say(
                f"stopped: the last {self._bad_updates.row} updates in a row had a loss or gradient that is not finite; "
                f"weights and EMA are those before them. See nan_report/ and {advice(self._accelerator.mixed_precision)}"
            )
            exit_status = EXIT_DIVERGED
        if self._stop_on_critical and from_main_process(critical):
            self._progress.say("stopped: a critical finding, see diagnosis.json (--stop_on critical)")
            exit_status = EXIT_DIVERGED
        return exit_status

    def store(self) -> None:
        """Notes in the state what a resumed run counts on from."""
        state = self._state
        state.skipped_updates, state.scaler_skips, state.bad_in_a_row = self._bad_updates.totals()
        self._bad_images.update()  # what comes after a resume does not list what came before

    def close(self) -> None:
        """An early end comes between two reports."""
        self._bad_images.update()

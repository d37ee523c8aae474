"""What watches the updates of a run, from their images to the optimizer's step, and reports on them once in so many."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from utils.core.distributed import from_main_process, waited_for
from utils.core.signals import EXIT_DIVERGED
from utils.data.bad_images import BadImageReport
from utils.diagnostics.dynamics import Dynamics
from utils.diffusion.objective import Losses
from utils.optim.clipping import Gradients
from utils.optim.nonfinite import BadUpdates, advice
from utils.training.ledger import Ledger
from utils.training.nan_report import NanReports
from utils.training.progress import StepStatistics, Stopwatch, peak_memory_gib, read_together
from utils.training.ranks import LEAST, LEAST_STREAMING, HangWatch, RankTimes
from utils.training.rerun import Rerun
from utils.training.run import Run


class Monitor:
    """Its methods are to be called on every process, in the order below; between two reports none makes the host wait."""

    def __init__(self, run: Run, measures_eagerly: bool):
        """`measures_eagerly`: see `Dynamics`."""
        self._run, self.measures_eagerly, self._compiled = run, measures_eagerly, run.options.compile
        options, objective, state = run.options, run.objective, run.state
        accelerator, limits = run.accelerator, (options.hang_timeout, options.collective_timeout)
        self._stopwatch = Stopwatch(state.step)
        least = LEAST_STREAMING if options.streaming else LEAST
        self._hang = HangWatch(run.output_dir, accelerator.process_index, accelerator.num_processes, *limits, least)
        self._rank_times = RankTimes(accelerator, self._hang.now)
        self._statistics = StepStatistics(accelerator.device, objective.num_bins)
        self._dynamics = Dynamics(objective.network, measures_eagerly)
        num_parameters = sum(parameter.requires_grad for parameter in objective.network.parameters())
        counts = state.skipped_updates, state.scaler_skips, state.bad_in_a_row
        self._bad_updates = BadUpdates(accelerator, num_parameters, *counts)
        self._nan_reports = NanReports(run)
        self.audit = audit_of(run)
        self.ledger = Ledger(run)
        counters = run.clipping, self._statistics, self._bad_updates, self._dynamics, self.ledger, *self.audit.counters
        self.rerun = Rerun(run, counters)
        self._bad_images = BadImageReport(
            run.accelerator,
            run.output_dir / "bad_images.json",
            (run.data.training, run.data.validation),
            gathers=options.on_bad_image == "replace" and not run.data.images.cached,
            print_line=run.print_line,
        )
        self._bad_images.update()
        self.due = False  # whether the update under way is reported
        self._first_losses: list[torch.Tensor] = []  # of the micro steps of the first update of a start

    def _now(self, kind: str | None) -> None:
        """Where the time goes from here on: that of an update which is made again is none of the ranks'."""
        (self._hang if self.rerun.repeating else self._rank_times).now(kind)

    def measure_eagerly(self) -> None:
        """From here on the updates of reports run eagerly, as all others do once compiling is given up."""
        self._dynamics.eager, self._compiled = True, False

    def begin(self, step: int) -> None:
        """Before the update after `step` finished ones. One that is made again is counted anew, but not by audit and clocks."""
        if self.rerun.repeating:
            self._now("compute")
            self._dynamics.begin(self.due)
            return
        self.due = (step + 1) % self._run.options.logging_steps == 0 or step + 1 == self._run.length.max_train_steps
        self._hang.begin(step)
        self._dynamics.begin(self.due)
        scaler = self._run.accelerator.scaler
        eager = self._dynamics.eager and (self.due or not self._compiled)
        self.audit.begin(step + 1, eager, (lambda: 1.0) if scaler is None else scaler.get_scale)
        self.ledger.begin(step, self.due)
        self.rerun.begin(step, self.due and self._dynamics.eager)

    def wait_for(self, batches: Iterator[dict]) -> dict:
        """The next of the loader's batches, for which the loop waits."""
        if self.rerun.repeating:
            batch = next(self.rerun.kept)
        else:
            self._now("data")
            with self._stopwatch.waiting_for_data():
                batch = next(batches)
            self._now("compute")
            self._sample_numbers = batch["sample_numbers"]
            self.rerun.keep(batch)
        self.ledger.add_batch(batch)
        return batch

    def add_drawn(self, drawn: dict[str, torch.Tensor]) -> None:
        """What the network is about to be trained on, as `Objective.draw` gives it."""
        self._dynamics.see_images(drawn["clean_images"])
        if not self.rerun.repeating:
            levels, told = drawn[self._run.objective.level], (drawn.get("labels"), drawn.get("transforms"))
            self.audit.add(self._sample_numbers, drawn["clean_images"], drawn["noise"], levels, *told)

    def before_backward(self, loss: torch.Tensor) -> None:
        """With what the gradient of a micro step is about to be taken of."""
        self._rank_times.before_backward(loss, self._now)

    def add(self, losses: Losses, drawn: dict[str, torch.Tensor]) -> None:
        """Those of a micro step, and what they are of."""
        self._statistics.add_losses(losses.shown, self._run.objective.bins(**drawn))
        self._bad_updates.add_losses(losses.trained)
        if self._run.progress.awaits_loss:
            self._first_losses.append(losses.shown.detach())
        self.ledger.add(losses, drawn)
        self.rerun.add(losses, drawn)
        self._now("compute")

    @contextmanager
    def optimizer_step(self, gradients: Gradients) -> Iterator[None]:
        """Around what makes the weights those of the next update; before the gradients are cleared."""
        self.rerun.see_gradients()
        self._bad_updates.add(self._run.state.step, gradients)
        self._dynamics.before_step()
        yield
        if not self.rerun.repeating:
            limit, norm = self._run.clipping.value, gradients.norm
            self.audit.stepped(norm, gradients.finite, limit, lambda: sum(self._bad_updates.totals()[:2]))
        self.audit.count(gradients.norm)
        self._dynamics.end(gradients)
        self._statistics.add_update(gradients)

    def end_update(self, between: bool) -> None:
        """After the averages are updated; `between`: whether anything is made before the next update that may touch weights."""
        self._now(None)
        if self.rerun.repeating:
            return
        self._hang.end()
        if self.due or self.audit.looks:  # the host waits for the device anyway, and so, with NCCL, for the other ranks
            self._hang.now("collectives")
            self._rank_times.wait_for_device()
            self._hang.now(None)  # the audit's work takes as long as it takes
        self.audit.end(self._run.state.step, between or self.rerun.due, self.due)

    def agreed_to_stop(self) -> bool:
        """Whether all ranks leave after this update: a rank that is slow has the others wait here too."""
        self._rank_times.now("collectives")
        stops = self._run.stop.agreed()
        self._rank_times.now(None)
        return stops

    def paused(self) -> AbstractContextManager:
        """Around what is no part of an update: its time is left out of the images per second."""
        return self._stopwatch.paused()

    def show_first(self, learning_rate: float) -> None:
        """Shows the loss of the first update of a start, of the main process's samples alone, unless that is reported. The host
        waits for the device once in a start, as it does for the audit of this update."""
        if self._run.progress.awaits_loss and not self.due:
            self._run.progress.show(torch.cat(self._first_losses).float().mean().item(), learning_rate)

    def report(self, learning_rate: float) -> int:
        """Logs what was seen since the last report, and has the doctor look at it. Returns 0, or EXIT_DIVERGED where the run
        must end. The host waits for the device, once: whatever lies there is read in one copy."""
        run, accelerator, step = self._run, self._run.accelerator, self._run.state.step
        global_batch_size = run.length.global_batch_size
        figures: dict[str, float | torch.Tensor] = {"train/lr": learning_rate, "train/clip_value": run.clipping.value}
        if run.ema is not None:
            figures |= {"train/ema_decay": run.ema_decay(step)} | run.ema.report()
        if accelerator.scaler is not None:
            scale = accelerator.scaler._scale  # None before its first update; get_scale() would wait a second time
            figures |= {"train/loss_scale": accelerator.scaler.get_scale() if scale is None else scale}
        self._hang.now("collectives")
        tensors = {"sums": self._statistics.sums(accelerator), "counts": self._bad_updates.counts()}
        tensors |= {"dynamics": self._dynamics.measured()} | ({"ledger": self.ledger.measure()} if self.ledger.due else {})
        tensors |= {name: value for name, value in figures.items() if isinstance(value, torch.Tensor)}
        read = dict(zip(tensors, read_together(list(tensors.values()))))
        self._hang.now(None)
        figures |= {name: read[name][0] for name in figures if name in read}
        report: dict[str, Any] = self._statistics.report(read["sums"]) | self._bad_updates.report(read["counts"])
        report |= self._stopwatch.report(step, global_batch_size) | self._bad_images.update() | figures
        report["train/samples_seen"] = step * global_batch_size
        report["perf/peak_memory_gib"] = peak_memory_gib(accelerator.device)
        seen, layers = self._dynamics.report(read["dynamics"])
        report |= seen
        times = self._rank_times.report()
        report |= {} if times is None else times.figures()
        with waited_for(accelerator, "logging the report"):
            run.trackers.log(report, step=step)
            critical = run.doctor.record_report(step, report | ({} if times is None else {"ranks": times._asdict()}), layers)
            run.progress.show(report["train/loss"], report["train/lr"], report["perf/images_per_second"])
        if math.isfinite(report["train/loss"]):
            run.state.metrics["training loss"] = report["train/loss"]
        if self._bad_updates.first is not None:
            what = "the report on a skipped update"
            run.attempts.make(what, self._nan_reports.write, self._bad_updates.first, step, report["train/lr"])
        if self.ledger.due:
            self.ledger.write(read["ledger"])
        return self._judge(critical)

    def _judge(self, critical: bool) -> int:
        run, must_end = self._run, self.ledger.parted
        if self._bad_updates.row >= run.options.max_bad_steps:
            run.print_line(
                f"stopped: the last {self._bad_updates.row} updates in a row had a loss or gradient that is not finite; "
                f"weights and EMA are those before them. See nan_report/ and {advice(run.accelerator.mixed_precision)}"
            )
            must_end = True
        if run.options.stop_on == "critical" and from_main_process(critical):
            run.print_line("stopped: a critical finding, see diagnosis.json (--stop_on critical)")
            must_end = True
        return EXIT_DIVERGED if must_end else 0

    def store(self) -> None:
        """Notes in the state what a resumed run counts on from."""
        state = self._run.state
        state.skipped_updates, state.scaler_skips, state.bad_in_a_row = self._bad_updates.totals()
        self._bad_images.update()  # what comes after a resume does not list what came before

    def close(self) -> None:
        """An early end comes between two reports."""
        self._hang.close()
        self.audit.close()
        self._bad_images.update()


class Unwatched:
    """In place of a `StepAudit`: nobody measures the training step, and each of its methods does nothing."""

    looks, counters = False, ()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


def audit_of(run: Run) -> Any:
    """A `StepAudit`, or what does nothing in its place."""
    if run.options.doctor == "off":
        return Unwatched()
    try:
        from utils.training.audit import StepAudit
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("steady_doctor"):
            raise
        run.print_line("the folder steady_doctor/ is missing: nobody measures what an update of this run does")
        return Unwatched()
    if run.accelerator.device.type == "mps":
        run.print_line("nobody measures what an update of this run does: the doctor computes in float64, which MPS has not")
        return Unwatched()
    return StepAudit(run)

"""What a run makes between two updates: reports, validation, evaluation, pictures, pipelines, snapshots, checkpoints; its end.

Plain calls in one fixed order, not a list of callbacks: the order matters (a validation decides what the checkpoint is called),
and every process must make the same collective calls.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from utils.core.distributed import on_main_process, waited_for
from utils.core.signals import EXIT_DIVERGED, EXIT_STOPPED
from utils.diffusion.hub import push_to_hub
from utils.diffusion.sampling import full_precision
from utils.runs.checkpoints import save_checkpoint
from utils.runs.ema_snapshots import Snapshots
from utils.training.doctor import REPORT
from utils.training.evaluation import SampleEvaluation, Validation
from utils.training.length import preview_steps
from utils.training.monitor import Monitor
from utils.training.run import Run
from utils.training.samples import Export, SampleGrids


class Periodic:
    """Its methods are to be called on every process."""

    def __init__(self, run: Run, monitor: Monitor):
        self._run, self._monitor = run, monitor
        self._validation, self._evaluation, self._grids = Validation(run), SampleEvaluation(run), SampleGrids(run)
        self._export = Export(run, self._grids)
        options, accelerator = run.options, run.accelerator
        every, dtype = options.ema_snapshot_steps, options.ema_snapshot_dtype
        self._snapshots = Snapshots(accelerator, run.ema, run.output_dir, run.state, every=every, dtype=dtype)
        self._exit_status = 0
        self._preview_steps = preview_steps(options, run.length.updates_per_epoch)
        self._repetitions = ExitStack()  # of an update that is made again
        self._reported = False  # whether there is a report.html, on every process alike

    def catch_up(self) -> None:
        """Makes the evaluation that a stop had left out, and pictures by a --pretrained network; the updates begin."""
        self._run.stop.listen()
        if self._evaluation.due():
            with self._monitor.paused():
                self._judge()
            if self._evaluation.due():
                self._exit_status = EXIT_STOPPED
            else:
                self._save()
        if self._run.options.pretrained and self._run.state.step == 0:
            with self._monitor.paused():
                self._show()
        self._run.progress.begin()

    def finished(self) -> bool:
        """Returns whether the run has all its updates, was stopped early, or must end."""
        return self._exit_status != 0 or self.at_end()

    def at_end(self) -> bool:
        """Returns whether the run has all its updates, or was stopped early."""
        run = self._run
        return run.state.step >= run.length.max_train_steps or run.state.stopped_early(run.options.early_stopping_patience)

    def after_update(self, learning_rate: float) -> None:
        """What is due after `state.step` updates, the last of which was made with that learning rate."""
        run, state, options = self._run, self._run.state, self._run.options
        due = self._anything_due()
        self._monitor.end_update(due)
        if self._again():
            return
        run.progress.line_follows = self._monitor.due or run.progress.awaits_loss
        run.progress.update()
        self._monitor.show_first(learning_rate)
        if self._monitor.due:  # here the host waits for the device; else it does after the first update alone
            self._exit_status = self._monitor.report(learning_rate)
        elif self._monitor.ledger.due and not self._monitor.ledger.write():
            self._exit_status = EXIT_DIVERGED
        if self._monitor.ledger.parted:
            return  # nothing that could be made of this is worth keeping
        improved = False
        if due or self._monitor.due or self._snapshots.due(state.step):
            with self._monitor.paused():
                improved = self._make_what_is_due()
        if self._monitor.agreed_to_stop() or self._evaluation.due():  # what a stop leaves of an evaluation is still due
            self._exit_status = self._exit_status or EXIT_STOPPED
        if improved or self._exit_status or state.step % options.checkpointing_steps == 0:
            with self._monitor.paused():
                saved = self._save()
            if self._exit_status == EXIT_STOPPED and not saved:
                self._exit_status = 1  # not "saved, run it again"

    def _judge(self) -> bool:
        """Whether the weights were judged, and are the best so far. First by their samples: copies are never the best."""
        run, state, best = self._run, self._run.state, self._run.state.best_step
        if self._evaluation.due():
            with self._judged_weights():
                self._evaluation.make()
        if self._validation.due() and not self._evaluation.due():  # what a stop leaves out is made after it, in this order
            with self._judged_weights():
                run.attempts.make("the validation", self._validation.make)
        return state.best_step != best

    def _make_what_is_due(self) -> bool:
        """As `_judge`."""
        improved = self._judge()
        if self._previews():
            self._show()
            self._write_report()  # what stays of the run if it is killed
        elif self._monitor.due and not self._reported:
            self._write_report(unless_there=True)
        if self._pipeline_due():
            self._make_pipeline()
        if self._snapshots.due(self._run.state.step):
            self._take_snapshot()
        return improved

    def _take_snapshot(self) -> None:
        with self._run.progress.part("saving the averaged weights"):
            if self._run.attempts.make("the snapshots of averages", self._snapshots.save, self._run.state.step):
                self._check("snapshots", "snapshots")

    def _again(self) -> bool:
        """Whether the update is to be made once more, whose time is left out of the images per second."""
        rerun = self._monitor.rerun
        if not rerun.due:
            return False
        if not rerun.repeating:
            self._repetitions.enter_context(self._monitor.paused())
        if rerun.again():
            return True
        if rerun.replaced:
            self._monitor.audit.forget_update()  # its first time erred
        self._repetitions.close()
        return False

    def finish(self) -> int:
        """The pipeline first, then the last snapshot and pictures; closes all that is open. Returns the exit status."""
        run = self._run
        run.progress.end()
        self._monitor.close()
        if self._exit_status == 0:
            self._finish_well()
        if summary := run.attempts.summary():
            run.print_line(summary)
        if self._exit_status == 0:
            run.print_line("done: " + run.objective.loader.format(path=str(run.output_dir)))
        elif self._exit_status == EXIT_STOPPED:
            updates = f"{run.state.step} update{'s' * (run.state.step != 1)}"
            run.print_line(f"stopped after {updates}; continue with the same command and --resume_from_checkpoint latest")
        run.progress.close()
        run.stop.close()
        on_main_process(run.accelerator, "closing the folder", run.folder.release, self._exit_status)
        self._write_report()
        run.trackers.close()
        if run.options.push_to_hub and self._exit_status == 0 and run.accelerator.is_main_process:
            # Last, so that no process waits for an upload.
            run.print_line(f"pushed to {push_to_hub(run.options)}")
        return self._exit_status

    def _finish_well(self) -> None:
        run = self._run
        if not self._make_pipeline():
            self._save()
            self._exit_status = self._exit_status or 1
            return
        if self._snapshots.due(run.state.step, ended=True):
            self._take_snapshot()
        if self._grids.newest_step != run.state.step:
            self._show()
            if self._grids.newest_step == run.state.step:
                run.attempts.make("the model card", self._export.write_card)

    def _make_pipeline(self) -> bool:
        """Whether it was exported; then it is compared with what was trained."""
        with self._run.progress.part("exporting the pipeline"):
            exported = self._run.attempts.make("the pipeline", self._export.make)
            if exported:
                self._check("the pipeline", "exported")
        return exported

    def _show(self) -> None:
        """Pictures and a look at the network; each may fail alone."""
        attempts = self._run.attempts
        if self._grids.newest is None:
            with self._run.progress.part("checking the sampler"):
                self._check("the sampler", "sampler")
        attempts.make("the samples", self._grids.make)
        if not self._grids.stopped:
            attempts.make("the look at the network", self._grids.probe)

    def _write_report(self, unless_there: bool = False) -> None:
        run, what = self._run, "writing report.html"
        self._reported = True
        with run.progress.part(what), waited_for(run.accelerator, what):
            if not (unless_there and (run.output_dir / REPORT).exists()):
                run.doctor.report()

    def _check(self, what: str, of_audit: str) -> None:
        """On the main process, which reads files for it."""
        run, check = self._run, self._monitor.audit.check
        run.attempts.make(f"the check of {what}", on_main_process, run.accelerator, f"checking {what}", check, of_audit)

    def _save(self) -> bool:
        """Whether a checkpoint was published; why not is said."""
        run = self._run
        limit = run.options.checkpoints_total_limit
        with run.progress.part(f"saving checkpoint-{run.state.step}"):
            if not self._monitor.ledger.write():
                self._exit_status = EXIT_DIVERGED
                return False
            self._monitor.store()
            run.state.grad_norm_mean = run.clipping.mean
            problem = save_checkpoint(run.accelerator, run.output_dir, run.state, total_limit=limit)
        if problem:
            run.print_line(f"checkpoint-{run.state.step} was not saved, earlier ones are whole: {problem}")
        else:
            with run.progress.part(f"reading checkpoint-{run.state.step} back"):
                self._check("the checkpoint", "saved")
        return problem is None

    @contextmanager
    def _judged_weights(self) -> Iterator[None]:
        """The network as it is judged: averaged weights, full precision."""
        with self._run.averaged(), full_precision(self._run.objective.network):
            yield

    def _anything_due(self) -> bool:
        return (
            self._validation.due()
            or self._evaluation.due()
            or self._previews()
            or self._pipeline_due()
            or self._run.state.step % self._run.options.checkpointing_steps == 0
        )

    def _previews(self) -> bool:
        """Whether sample grids are due."""
        run = self._run
        return run.length.is_due(run.state.step, self._preview_steps, run.options.save_images_epochs)

    def _pipeline_due(self) -> bool:
        run = self._run
        return run.length.is_due(run.state.step, run.options.save_model_steps, run.options.save_model_epochs)

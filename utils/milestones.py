"""What a run makes between two updates: validation, evaluation, pictures, pipelines, snapshots, checkpoints; and its end."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from utils.checkpoints import TrainState, save_checkpoint
from utils.doctor import Doctor
from utils.ema_snapshots import Snapshots
from utils.gradients import AdaptiveLimit, FixedLimit
from utils.interrupts import EXIT_STOPPED, StopSignal
from utils.monitors import Monitors
from utils.previews import Previews
from utils.sampling import full_precision
from utils.schedule import is_due
from utils.tracking import ProgressBar, Trackers
from utils.training_evaluation import TrainingEvaluation


class Milestones:
    """Makes each when it is due. The methods are to be called on every process.

    Args:
        unet: the unwrapped network.
        state: of the run.
        total_steps, epoch_steps: updates of the whole run, and of one pass over the images.
        averaged: gives a context in which the network has the averaged weights, where there are any.
        validate: gives the loss on held-out images, asked in that context and in full precision, and raises UserError on all
            processes when memory runs out; None without such images.
        export: writes the pipeline; raises UserError when the disk does not take it.
        write_card: writes its model card again, which shows the newest picture; the same.
        validation_steps, checkpointing_steps, save_images_steps, save_model_steps: updates from one to the next. Where the
            latter two are None, pictures and pipelines come after every save_images_epochs and save_model_epochs.
        checkpoints_total_limit: see `checkpoints.save_checkpoint`.
        best_metric: "loss" where the validation decides which checkpoint is best.
        early_stopping_patience: validations without a gain that end the run; 0 for never.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        unet: nn.Module,
        state: TrainState,
        output_dir: Path,
        *,
        total_steps: int,
        epoch_steps: int,
        averaged: Callable[[], AbstractContextManager],
        validate: Callable[[], float] | None,
        evaluation: TrainingEvaluation,
        previews: Previews,
        export: Callable[[], None],
        write_card: Callable[[], None],
        snapshots: Snapshots,
        clipping: AdaptiveLimit | FixedLimit,
        stop: StopSignal,
        monitors: Monitors,
        progress: ProgressBar,
        trackers: Trackers,
        doctor: Doctor,
        validation_steps: int,
        save_images_steps: int | None,
        save_images_epochs: int,
        save_model_steps: int | None,
        save_model_epochs: int,
        checkpointing_steps: int,
        checkpoints_total_limit: int | None,
        best_metric: str,
        early_stopping_patience: int,
    ):
        self._accelerator, self._unet, self._state, self._output_dir = accelerator, unet, state, output_dir
        self._total_steps, self._epoch_steps, self._averaged = total_steps, epoch_steps, averaged
        self._validate, self._evaluation, self._previews = validate, evaluation, previews
        self._export, self._write_card = export, write_card
        self._snapshots, self._clipping, self._stop, self._monitors = snapshots, clipping, stop, monitors
        self._progress, self._trackers, self._doctor = progress, trackers, doctor
        self._validation_steps, self._checkpointing_steps = validation_steps, checkpointing_steps
        self._save_images = {"steps": save_images_steps, "epochs": save_images_epochs}
        self._save_model = {"steps": save_model_steps, "epochs": save_model_epochs}
        self._total_limit, self._best_metric, self._patience = checkpoints_total_limit, best_metric, early_stopping_patience

    def catch_up(self) -> int:
        """Makes the evaluation that a stop had left out. Returns 0, or EXIT_STOPPED where another stop has."""
        if not self._evaluation.due(self._state, self._total_steps):
            return 0
        with self._monitors.paused(), self._judging():
            self._evaluation.make(self._state)
        if self._evaluation.due(self._state, self._total_steps):
            return EXIT_STOPPED
        self._save()
        return 0

    def at_end(self) -> bool:
        """Whether the run has all its updates, or was stopped early."""
        return self._state.step >= self._total_steps or self._state.stopped_early(self._patience)

    def after_update(self, exit_status: int) -> int:
        """What is due after `state.step` updates, the last ones where `exit_status` is not 0. Returns it, or what a stop
        has made of it."""
        state, progress = self._state, self._progress
        with self._monitors.paused():
            improved = False
            if self._validate and (state.step % self._validation_steps == 0 or state.step == self._total_steps):
                improved = progress.attempt(self._validation) and state.best_step == state.step  # nothing else was judged yet
            if self._evaluation.due(state, self._total_steps):
                with self._judging():
                    improved |= self._evaluation.make(state)
            if self._is_due(**self._save_images):
                self._preview()
            if self._is_due(**self._save_model):
                progress.attempt(self._export)
            if self._snapshots.due(state.step):
                progress.attempt(self._snapshots.save, state.step)
            # By all ranks, so that they leave at the same update; what a stop leaves of an evaluation is still due.
            if self._stop.agreed() or self._evaluation.due(state, self._total_steps):
                exit_status = exit_status or EXIT_STOPPED
            if improved or exit_status or state.step % self._checkpointing_steps == 0:
                saved = self._save()
                if exit_status == EXIT_STOPPED and not saved:
                    exit_status = 1  # not "saved, run it again"
        return exit_status

    def finish(self, exit_status: int) -> int:
        """The pipeline and the last pictures of a run that has come to its end, in this order: no picture may cost it the
        pipeline. Returns the exit status."""
        self._monitors.close()
        if exit_status == 0:
            if not self._progress.attempt(self._export):
                self._save()
                return 1
            if self._previews.newest_step != self._state.step:
                self._preview()
                if self._previews.newest_step == self._state.step:
                    self._progress.attempt(self._write_card)
        return exit_status

    def _preview(self) -> None:
        """Pictures and a look at the network; each may fail alone."""
        self._progress.attempt(self._previews.make, self._state.step)
        self._progress.attempt(self._previews.examine, self._state.step)

    def _validation(self) -> None:
        """One that fails is as if it had not been due: it neither is the best nor counts as one without a gain."""
        with self._judging():
            value = self._validate()
        self._trackers.log({"validation/loss": value}, step=self._state.step)
        self._doctor.record(self._state.step, {"validation/loss": value})
        self._state.record("validation loss", value, decides=self._best_metric == "loss")

    def _save(self) -> bool:
        """Whether a checkpoint was published; why not is said."""
        self._monitors.store()
        self._state.grad_norm_mean = self._clipping.mean
        problem = save_checkpoint(self._accelerator, self._output_dir, self._state, total_limit=self._total_limit)
        if problem:
            self._progress.say(f"checkpoint-{self._state.step} was not saved, earlier ones are whole: {problem}")
        return problem is None

    @contextmanager
    def _judging(self):
        """The network as it is judged: averaged weights, full precision."""
        with self._averaged(), full_precision(self._unet):
            yield

    def _is_due(self, steps: int | None, epochs: int) -> bool:
        return is_due(self._state.step, self._total_steps, steps=steps, epochs=epochs, epoch_steps=self._epoch_steps)

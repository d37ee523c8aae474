"""The pipeline that a run leaves, with its model card."""

from utils.core.distributed import on_main_process
from utils.diffusion import export
from utils.diffusion.model_card import facts_of_run, model_card
from utils.training.run import Run
from utils.training.samples import SampleGrids


class Export:
    """At the top of the run's folder. Call the methods on every process; UserError where the disk does not take it."""

    def __init__(self, run: Run, grids: SampleGrids):
        self._run, self._grids = run, grids

    def make(self) -> None:
        run = self._run
        network, scheduler = run.objective.exported, run.objective.noise_scheduler
        arguments = network, scheduler, run.output_dir, self._card()
        carried = {"class_names": run.data.images.class_names, "autoencoder": run.data.autoencoder}
        with run.averaged():
            on_main_process(run.accelerator, "exporting the pipeline", export.export_pipeline, *arguments, **carried)

    def write_card(self) -> None:
        """Again, with the newest picture."""
        run = self._run
        on_main_process(run.accelerator, "writing the model card", export.write_card, run.output_dir, self._card())

    def _card(self) -> str:
        run, options, newest = self._run, self._run.options, self._grids.newest
        facts = {
            "title": run.output_dir.resolve().name,
            "updates": run.state.step,
            "samples_seen": run.state.step * run.length.global_batch_size,
            "ema_decay": run.ema_decay(run.state.step) if run.ema else None,
            "ema_width": options.ema_widths[0] if run.ema and options.ema_type == "power" else None,
            "metrics": run.state.metrics,
            "pipeline": options.hub_model_id or run.output_dir.resolve().name,
            "grid": newest and newest.relative_to(run.output_dir),
        }
        shared = facts_of_run(options, run.facts, run.objective.noise_scheduler, run.data.images.class_names)
        return model_card(shared | facts | run.objective.card())

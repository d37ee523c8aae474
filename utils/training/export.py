"""The pipeline that a run leaves, with its model card."""

import os
import shlex
from pathlib import Path

from utils.core.distributed import on_main_process
from utils.data.sources import hub_name
from utils.diffusion import export
from utils.diffusion.sampling import sampling_steps
from utils.options.flags import RunOptions
from utils.runs.folder import command_line
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
            "data": shown_data(run),
            "hub_dataset": hub_name(options.dataset_name),
            "command": shown_command(options),
            "pretrained": options.pretrained and local_name(options.pretrained),
            "autoencoder": options.vae and local_name(options.vae),
            "updates": run.state.step,
            "samples_seen": run.state.step * run.length.global_batch_size,
            "resolution": options.resolution,
            "channels": options.image_channels,
            "ema_decay": run.ema_decay(run.state.step) if run.ema else None,
            "ema_width": options.ema_widths[0] if run.ema and options.ema_type == "power" else None,
            "sampler": options.sampler,
            "sampler_steps": sampling_steps(options.sampler, options.sampling_steps, run.objective.noise_scheduler),
            "class_names": run.data.images.class_names if run.facts["classes"] else None,
            "metrics": run.state.metrics,
            "pipeline": options.hub_model_id or run.output_dir.resolve().name,
            "grid": newest and newest.relative_to(run.output_dir),
        }
        return export.model_card(facts | run.objective.card())


def shown_data(run: Run) -> str:
    """The data and how much of it; of a path of this machine its last name alone."""
    source = run.options.dataset_name or run.options.train_data_dir or ""
    return run.data.images.description.replace(source, local_name(source), 1)


def shown_command(options: RunOptions) -> str:
    """`command_line` with the last name alone of each path of this machine, for readers elsewhere."""
    words = (word.rpartition("=") if word.startswith("-") else ("", "", word) for word in shlex.split(command_line(options)))
    return shlex.join(flag + equals + local_name(value) for flag, equals, value in words)


def local_name(word: str) -> str:
    """The last name of a path of this machine; any other word, such as a name on the Hub, as it is."""
    is_local = word.startswith(("/", "~", ".")) or ("/" in word and os.path.exists(word))
    return Path(word).name or "." if is_local else word

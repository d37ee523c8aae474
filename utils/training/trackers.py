"""Where figures and pictures go: the trackers of Accelerate, started before a run has a folder where they need none."""

import contextlib
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from PIL import Image

from utils.core.distributed import waited_for
from utils.core.errors import UserError, one_line
from utils.core.files import read_json, write_json
from utils.options.flags import RunOptions
from utils.runs.checkpoint_files import find_checkpoint, list_checkpoints
from utils.runs.folder import TRACKED

# Trackers that take names: the variables that name project and run for them, and what `init` calls the name of a run.
NAMES = {
    "wandb": ("WANDB_PROJECT", "WANDB_NAME", "name"),
    "mlflow": ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_NAME", "run_name"),
    "trackio": (None, None, "name"),
}
# What they call the run that they log to, and what they are given to log to an earlier one.
IDENTITY: dict[str, Callable[[Any], str]] = {
    "wandb": lambda tracker: tracker.run.id,
    "mlflow": lambda tracker: tracker.active_run.info.run_id,
    "trackio": lambda tracker: tracker.run.name,
}
CONTINUE: dict[str, Callable[[str], dict[str, str]]] = {
    "wandb": lambda identity: {} if "WANDB_RUN_ID" in os.environ else {"id": identity, "resume": "allow"},
    "mlflow": lambda identity: {"run_id": identity},
    "trackio": lambda identity: {"name": identity, "resume": "allow"},
}
FOLDER = "output_dir"  # in TRACKED: of the run that the trackers have
FIRST_GROUPS = ("train/", "validation/")


def start_trackers(accelerator: Accelerator, options: RunOptions) -> None:
    """Starts the trackers that write no files, on the main process. A resumed run goes on in its run of the tracker, where
    that still is. Raises UserError for one that cannot start: without an account or a server, say."""
    earlier = _earlier(options, partial(print, flush=True))
    for name in options.trackers:
        if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory:
            continue
        _, run_variable, run_keyword = NAMES.get(name, (None, None, None))
        run_name = os.environ.get(run_variable or "") or Path(options.output_dir).resolve().name
        fresh = {run_keyword: run_name} if run_keyword else {}
        tracker = None
        if name in earlier:
            try:
                tracker = _started(options, name, fresh | CONTINUE[name](earlier[name]))
            except Exception as error:  # it is gone, or on another server
                print(f"{name}: {one_line(error)[:500]}; a new run starts there", flush=True)
        try:
            tracker = tracker or _started(options, name, fresh)
        except Exception as error:  # each tracker has its own
            raise UserError(
                f"--logger {name} cannot start: {one_line(error)[:500]}\n"
                "check its login and its settings, or use another --logger"
            ) from error
        accelerator.trackers.append(tracker)


def _started(options: RunOptions, name: str, about: dict[str, str]) -> Any:
    project = options.project_name or os.environ.get(NAMES.get(name, ("",))[0] or "") or options.script
    tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]
    tracker = tracker_class(project, **about)
    if options.project_name and name == "mlflow":  # which takes its variable before what it is told
        tracker.experiment_name = project
    tracker.start()
    return tracker


def _earlier(options: RunOptions, tell: Callable[[str], None] = lambda line: None) -> dict[str, str]:
    """The runs that an earlier start of a resumed run had, by the names of the trackers. `tell` gets a line where this start
    does not go on in them: they are of a folder that was copied, or of a newer checkpoint."""
    folder, asked = Path(options.output_dir), options.resume_from_checkpoint
    checkpoints = list_checkpoints(folder)
    if not asked or not checkpoints:
        return {}
    content = read_json(folder / TRACKED)
    runs = {name: run for name, run in content.items() if name in CONTINUE and isinstance(run, str)}
    if not runs:
        return {}
    here = str(folder.resolve())
    if (logged := content.get(FOLDER, here)) != here:
        tell(f"{', '.join(runs)}: {TRACKED} is of {logged}; a new run starts there")
        return {}
    resumed = None if asked == "latest" else find_checkpoint(folder, asked)[0]
    if resumed is not None and resumed.resolve() != checkpoints[-1].resolve():  # wandb drops steps below its newest
        tell(f"{', '.join(runs)}: {checkpoints[-1].name} is newer than {resumed.name}; a new run starts there")
        return {}
    return runs


class Trackers:
    """On all ranks, of which the main one alone writes. A tracker that fails (a full disk, say) is given up, not the run."""

    def __init__(self, accelerator: Accelerator, options: RunOptions, first_step: int, print_line: Callable[[str], None]):
        """Takes those that were started, and starts those that write files. `print_line` is told of one that fails.
        TensorBoard hides what a killed run had logged after `first_step` updates: one value per tag and step."""
        self._accelerator, self._print_line, self._first_step = accelerator, print_line, first_step
        self._continued = _earlier(options) if accelerator.is_main_process else {}
        if accelerator.is_main_process:
            self._remember(Path(options.output_dir))
        for name in options.trackers if accelerator.is_main_process else ():
            tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]
            if tracker_class.requires_logging_directory:
                folder, about = accelerator.logging_dir, {}
                if name == "tensorboard":
                    about = {"purge_step": first_step + 1}
                    _outlive_older_event_files(Path(folder, options.script))
                tracker = tracker_class(options.script, folder, **about)
                tracker.start()
                accelerator.trackers.append(tracker)

    def _remember(self, folder: Path) -> None:
        """Which runs a resume goes on in."""
        runs: dict[str, str] = {}
        for tracker in self._accelerator.trackers:
            with contextlib.suppress(Exception):  # another version of the tracker
                runs[tracker.name] = IDENTITY[tracker.name](tracker)
        if runs:
            with contextlib.suppress(OSError):
                write_json(folder / TRACKED, self._continued | runs | {FOLDER: str(folder.resolve())})
        self._continued = {name: run for name, run in runs.items() if self._continued.get(name) == run}

    def describe(self, settings: dict[str, Any]) -> None:
        """Logs hyperparameters."""
        values = {name: _plain(value) for name, value in settings.items() if value is not None}

        def store(tracker: Any) -> None:
            if tracker.name == "mlflow" and "mlflow" in self._continued:  # which never changes a value
                there, new = tracker.active_run.data.params, {}
                for name, value in values.items():
                    if there.get(name) != str(value):
                        new[f"{name} from update {self._first_step}" if name in there else name] = value
                tracker.store_init_configuration(new)
                return
            if tracker.name != "tensorboard":
                tracker.store_init_configuration(values)
                return
            from torch.utils.tensorboard.summary import hparams

            for summary in hparams(values, {"train/loss": 0.0, "validation/loss": 0.0}):  # in this run, not in one of its own
                tracker.writer.file_writer.add_summary(summary)

        self._each(store, gives_up=False)

    def log(self, values: dict[str, float], step: int) -> None:
        def write(tracker: Any) -> None:
            named = {_shown_tag(tag): value for tag, value in values.items()} if tracker.name == "tensorboard" else values
            tracker.log(named, step=step)

        self._each(write)

    def log_image(self, tag: str, path: Path, step: int) -> None:
        """Shows the PNG at `path` in every tracker that takes images."""
        if not self._accelerator.is_main_process:
            return
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))[None]

        def show(tracker: Any) -> None:
            if tracker.name == "tensorboard":
                tracker.log_images({_shown_tag(tag): pixels}, step=step, dataformats="NHWC")
            elif tracker.name == "trackio":
                import trackio

                tracker.log({tag: trackio.Image(pixels[0])}, step=step)
            elif hasattr(tracker, "log_images"):
                tracker.log_images({tag: list(pixels)}, step=step)
            elif hasattr(tracker, "log_artifact"):  # MLflow
                tracker.log_artifact(str(path), "samples")

        self._each(show)

    def close(self) -> None:
        """Finishes the trackers. Not the process groups, as Accelerator.end_training does: see `entrypoint.run_script`."""
        with waited_for(self._accelerator, "finishing the trackers"):
            self._each(lambda tracker: tracker.finish())
            self._accelerator.trackers.clear()

    def _each(self, action: Callable, gives_up: bool = True) -> None:
        for tracker in list(self._accelerator.trackers) if self._accelerator.is_main_process else ():
            try:
                action(tracker)
            except Exception as error:  # each tracker has its own
                if gives_up:
                    self._accelerator.trackers.remove(tracker)
                what = "nothing more goes" if gives_up else "the settings of the run do not go"
                self._print_line(f"{what} to {tracker.name}: {error}")


def _shown_tag(tag: str) -> str:
    """In TensorBoard, which shows groups in the order of their names: those that matter most are first."""
    return tag if tag.startswith(FIRST_GROUPS) else f"x_{tag}"


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _outlive_older_event_files(folder: Path) -> None:
    """TensorBoard reads event files by their names, which hold seconds, and what a later one purges must be older. The second
    of an earlier start is waited out; if the clock was set back, the files are renamed."""
    found = [(re.fullmatch(r"(events\.out\.tfevents\.)(\d+)(\..*)", path.name), path) for path in folder.glob("events.*")]
    files = sorted((int(match[2]), path, match) for match, path in found if match)
    now = int(time.time())
    if files and files[-1][0] > now:
        for back, (second, path, match) in zip(range(len(files), 0, -1), files):
            path.rename(path.with_name(f"{match[1]}{min(second, now - back)}{match[3]}"))
    elif files and files[-1][0] == now:
        time.sleep(1.0 - time.time() % 1.0)

"""The folder of a run: who may write into it, what it records of its options, and what may change when it is resumed."""

import contextlib
import difflib
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from utils.core.entrypoint import at_end
from utils.core.errors import UserError
from utils.core.files import make_folder, read_json, write_json, write_text
from utils.core.versions import git_commit, library_versions
from utils.options.budget import repeating
from utils.options.config_file import HIDDEN
from utils.options.flags import RunOptions
from utils.options.parser import Options
from utils.options.paths import WORKING_DIR, located, same_place
from utils.runs.history import HISTORY

if TYPE_CHECKING:
    from filelock import FileLock

DATA_SOURCES = (
    *("dataset_name", "dataset_config_name", "dataset_split", "dataset_revision"),
    *("train_data_dir", "image_column", "label_column"),
)
OF_THE_AVERAGES = {"ema_type", "ema_widths"}  # an average of another kind cannot go on from those of a checkpoint
# Flags that earlier versions did not have, and what they did.
WITHOUT: dict[str, Any] = {
    **{"class_conditional": False, "label_dropout": 0.1, "data_range": None, "pretrained": None, "train_only": None},
    **{"streaming": False, "shuffle_window": 10_000, "cache_limit": "50GB"},
    **{"vae": None, "latent_scale": None, "objective": "ddpm", "P_mean": None, "P_std": 1.0},
    **{"augment_probability": 0.0},
}
ABOUT = {  # what is compared beside the flags
    "global_batch_size": "global batch = processes x --train_batch_size x --gradient_accumulation_steps",
    "data_fingerprint": "data_fingerprint: the images themselves, whatever the dataset is called",
    "vae.weights": "vae.weights: the weights of the autoencoder",
}
EXIT_STATUS = "exit_status"  # there only once a run has ended by itself or by a signal: not while it goes on, nor after a crash
PIPELINE_INDEX = "model_index.json"
OPTIONS = "options.json"
TRACKED = "trackers.json"  # the run that each tracker has of it
RUN_FILES = (
    OPTIONS,
    EXIT_STATUS,
    TRACKED,
    PIPELINE_INDEX,
    "guided_pipeline.py",
    "README.md",
    "bad_images.json",
    HISTORY,
    "ledger.jsonl",
    "diagnosis.json",
    "report.html",
)
RUN_FOLDERS = (
    *("unet", "scheduler", "vae", "samples", "logs", "nan_report", "ema_snapshots"),
    *("evaluation", "data_check", "hang", "errors"),
)


class RunFolder:
    """The folder of one run, from the claim on it to its release. The methods are for the main process alone."""

    def __init__(self, output_dir: Path):
        self.path = output_dir
        self._replaces = True
        self._lock: FileLock | None = None
        self._made: list[Path] = []  # by `claim`, the innermost first

    def claim(self, *, replaces: bool, inputs: Mapping[str, str | None] = MappingProxyType({})) -> None:
        """Makes the folder, proves that it can be written, and keeps other runs out until this process ends, however it does.

        `replaces`: a new run begins, and not one that goes on. The exit status of an earlier start goes, but for that of a run
        that is done: it still is if nothing comes of this start. A folder that is made here and gets no run goes at the end.
        Raises UserError when the folder cannot be written, when another run trains here, and when a new run would be made of
        what it replaces: `inputs` are paths or names, by their flags.
        """
        from filelock import FileLock, Timeout  # not above: the command line is looked at before packages are

        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        at_end(lambda status: self._remove_if_empty())
        make_folder(self.path, "--output_dir")
        self._lock = FileLock(self.path / ".lock", is_singleton=True)  # in one process, as in tests, run may follow on run
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"another run is training in --output_dir {self.path}\nwait for it, stop it, or choose another --output_dir"
            ) from None
        except (NotImplementedError, OSError):  # a file system without locks
            self._lock = None
        self._replaces, found = replaces, self.items()
        for name, value in inputs.items() if found and replaces else ():
            path = Path(value or "").resolve()
            if value and (path == self.path.resolve() or any(item.resolve() in (path, *path.parents) for item in found)):
                raise UserError(
                    f"--{name} {value} is part of the run that --overwrite_output_dir deletes\nchoose another --output_dir"
                )
        data = inputs.get("train_data_dir")
        if data and (replaces or not found) and self.path.resolve().is_relative_to(Path(data).resolve()):
            why = f"--output_dir {self.path} is in --train_data_dir: its samples would become images of the data"
            raise UserError(f"{why}\nchoose another --output_dir")
        if not self.is_done():
            (self.path / EXIT_STATUS).unlink(missing_ok=True)

    def is_done(self) -> bool:
        """Returns whether the run in the folder came to its end, and its pipeline is there."""
        with contextlib.suppress(OSError):
            return (self.path / EXIT_STATUS).read_text().strip() == "0" and (self.path / PIPELINE_INDEX).is_file()
        return False

    def record(self) -> dict[str, Any]:
        """Returns the content of options.json, with "options"; empty where there is none, or it is damaged."""
        content = read_json(self.path / OPTIONS)
        return content if isinstance(content.get("options"), dict) else {}

    def _remove_if_empty(self) -> None:
        """Leaves nothing of a start that came to nothing, such as a mistyped command."""
        if self._made and {path.name for path in self.path.glob("*")} <= {".lock"}:
            (self.path / ".lock").unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()

    def begin(self, options: RunOptions, resolved: dict, class_names: Sequence[str] | None = None) -> None:
        """Deletes nothing but the run that a new one replaces, and records the start; once all mistakes were looked for."""
        if self._replaces:
            self._clear(options.logging_dir)
        (self.path / EXIT_STATUS).unlink(missing_ok=True)
        self.write_options(options, resolved, class_names)

    def _clear(self, logging_dir: str) -> None:
        items = self.items()
        logs = (self.path / logging_dir).resolve()
        if items and logs.is_dir() and self.path.resolve() in logs.parents:
            shutil.rmtree(logs)
        for item in (item for item in items if item.exists()):
            shutil.rmtree(item) if item.is_dir() else item.unlink()

    def size(self) -> int:
        """Returns the bytes of the run in the folder."""
        files = (path for item in self.items() for path in (item, *item.rglob("*")))
        return sum(path.stat().st_size for path in files if path.is_file())

    def items(self) -> list[Path]:
        """Returns what a run of ours leaves at the top of its folder; anything else there is the user's."""
        of_a_run = any((self.path / name).exists() for name in (OPTIONS, HISTORY, PIPELINE_INDEX))
        if not of_a_run and not any(self.path.glob("checkpoint-*")):
            return []
        named = [self.path / name for name in (*RUN_FILES, *RUN_FOLDERS)]
        return [p for p in (*named, *self.path.glob("checkpoint-*"), *self.path.glob(".tmp-*")) if p.exists()]

    def write_options(self, options: Options, resolved: dict, class_names: Sequence[str] | None = None) -> None:
        """Writes options.json: every flag, what followed from them (`resolved`), versions, git commit, command line, working
        folder, names of classes. What an earlier start of the same run had recorded of itself moves to `earlier_starts`."""
        path = self.path / OPTIONS
        record: dict[str, Any] = {
            "options": options.recorded(),
            "resolved": resolved,
            **({"class_names": list(class_names)} if class_names else {}),
            "command": command_line(options),
            **({"command_without_budget": repeating(options)} if isinstance(options, RunOptions) and options.budget else {}),
            WORKING_DIR: os.getcwd(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "git_commit": git_commit(),
            "versions": library_versions(),
            "python": platform.python_version(),
            "earlier_starts": [],
        }
        if earlier := read_json(path):
            record["earlier_starts"] = [
                *earlier.get("earlier_starts", []),
                {k: earlier.get(k) for k in ("command", "started", "git_commit", "versions")},
            ]
        write_json(path, record)

    def release(self, exit_status: int) -> None:
        """Records how the run ended, since launchers return 1 whatever their processes return, and lets others in."""
        with contextlib.suppress(OSError):  # a full disk does not turn a finished run into a failed one
            write_text(self.path / EXIT_STATUS, f"{exit_status}\n")
        if self._lock is not None:
            self._lock.release()


def command_line(options: Options) -> str:
    """Returns the command that was given to Python, without secrets."""
    command = shlex.join(sys.argv)
    for name in options.marked("secret"):
        if secret := getattr(options, name):
            command = command.replace(secret, HIDDEN)
    return command


def differences(saved: dict, current: dict) -> list[str]:
    """Returns the names of the options whose values differ, sorted. What one side lacks is None there: flags are added."""
    return [n for n in sorted(saved.keys() | current.keys()) if saved.get(n) != current.get(n)]


def as_spelled_now(saved: dict, current: dict, record: dict, folder: Path) -> dict:
    """Returns `saved` options of the run in `folder`, each path that leads to the same place spelled as `current` has it."""
    names = [n for n in RunOptions.marked("path") if n in saved and n in current]
    places = located({**record, "options": record.get("options", {}) | saved}, folder, names)
    return saved | {n: current[n] for n in names if same_place(places[n], current[n])}


def check_options(saved: dict, current: dict, allowed: list[str], misfit: str | None = None) -> list[str]:
    """Compares the options that shape the result with the checkpoint's, and returns notes for the user.

    Where the data or the network come from may differ, as long as they are the same. `misfit` says where the checkpoint's
    weights do not fit the network of the current options: then none can be allowed. Raises UserError with a diff when other
    options differ and are not `allowed`, and for a name in `allowed` that no option has.
    """
    absent = "(absent)"
    saved = {n: value for n, value in WITHOUT.items() if n in current} | saved
    names = sorted({*saved, *current, *ABOUT})
    if unknown := sorted(set(allowed) - set(names)):
        near = difflib.get_close_matches(unknown[0], names, n=3)
        advice = f"nearest: {', '.join(near)}" if near else "leave it out, or take a name of options.json"
        raise UserError(f"--allow_option_change {unknown[0]}: no option has this name\n{advice}")
    differing = differences(saved, current)
    fixed = [n for n in differing if n in OF_THE_AVERAGES and saved.get("use_ema") and current.get("use_ema")]
    changed = [n for n in differing if misfit or n in fixed or n not in allowed]
    moved = [n for n in changed if n in _same_sources(saved, current)]
    changed = [n for n in changed if n not in moved]
    if changed or misfit:
        lines = [f"  {n}: {saved.get(n, absent)} in the checkpoint, {current.get(n, absent)} now" for n in changed]
        lines += [f"  ({about})" for name, about in ABOUT.items() if name in changed]
        if misfit or fixed:
            why = f"the weights do not fit ({misfit})" if misfit else f"{', '.join(fixed)} cannot change within a run"
            advice = f"{why}: use the checkpoint's values, or start a new run in another --output_dir"
        else:
            advice = f"use the checkpoint's values, or add: --allow_option_change {' '.join(changed)}"
            if "global_batch_size" in changed and "global_batch_size" in saved:
                advice = (
                    f"add --global_batch_size {saved['global_batch_size']}, and leave out --train_batch_size and "
                    f"--gradient_accumulation_steps\n{advice}"
                )
        raise UserError("\n".join(["these options would change the run that is resumed:", *lines, advice]))
    why = dict.fromkeys(differing, "--allow_option_change allows it") | dict.fromkeys(moved, "the content is the same")
    if "pretrained" in moved:
        why["pretrained"] = "the weights are the checkpoint's"
    return [f"{n} was {saved.get(n, absent)} and is now {current.get(n, absent)}: {reason}" for n, reason in why.items()]


def _same_sources(saved: dict, current: dict) -> set[str]:
    """The options that say where the data and the network come from, of those whose content is the same."""
    names: set[str] = set()
    if saved.get("data_fingerprint") is not None and saved["data_fingerprint"] == current.get("data_fingerprint"):
        names.update(DATA_SOURCES)
    networks = [{n: value for n, value in options.items() if n.startswith("network.")} for options in (saved, current)]
    if networks[0] and networks[0] == networks[1]:
        names.add("model_preset")
        if saved.get("pretrained") and current.get("pretrained"):
            names.add("pretrained")  # only a new run takes anything of it but the autoencoder
    if saved.get("vae.weights") is not None and saved["vae.weights"] == current.get("vae.weights"):
        names.add("vae")
    return names

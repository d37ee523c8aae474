"""What a start finds in the folder of its run, compared with what it asks for, before anything is built. Imports no torch.

docs/reliability.md has the table: what `--resume_from_checkpoint` and `--overwrite_output_dir` do in which folder.
"""

import os
from enum import Enum
from pathlib import Path
from typing import Any

from utils.core.errors import UserError
from utils.options.flags import RunOptions
from utils.options.paths import WORKING_DIR, located
from utils.runs.checkpoint_files import list_checkpoints, newest_checkpoint, verify_checkpoint
from utils.runs.folder import DATA_SOURCES, RunFolder, as_spelled_now, check_options, differences
from utils.runs.state import read_state

BY_CONTENT = {*DATA_SOURCES, "model_preset", "pretrained", "vae"}  # a checkpoint knows what these named, not its name alone
LENGTH = ("max_train_steps", "num_epochs")


class Start(Enum):
    NEW = "new"  # in place of what is there
    ON = "on"  # from a checkpoint, or from the beginning where the same run has none yet
    DONE = "done"  # there is nothing to do


def start_of(options: RunOptions, launched: dict[str, Any] | None = None) -> Start:
    """Returns how a start begins, from what its folder holds.

    Args:
        launched: "global_batch_size" and "mixed_precision", once all options have their last values; None: before.

    Raises UserError where the start would replace what it may not, or go on with options that would change the run.
    """
    folder, wanted, replaces = RunFolder(Path(options.output_dir)), options.resume_from_checkpoint, options.overwrite_output_dir
    found = folder.items()
    if not wanted:
        if found and not replaces:
            raise UserError(
                f"--output_dir {folder.path} already has a run ({found[0].name})\n"
                "continue it with --resume_from_checkpoint latest, "
                "replace it with --overwrite_output_dir, or choose another --output_dir"
            )
        return Start.NEW
    record, asked = folder.record(), options.shaping(**(launched or {}))
    _check_paths(options, record, folder.path)
    known = asked.keys() if launched else options.given & asked.keys()  # --pretrained and --vae decide others
    if not launched and options.pretrained is None and options.vae is None:
        known = asked.keys() - {"global_batch_size", "mixed_precision"}
    if list_checkpoints(folder.path) or wanted != "latest":
        checkpoint = _checkpoint(folder.path, wanted)
        if checkpoint is not None:
            names, saved = known - BY_CONTENT, read_state(checkpoint).options
            saved, compared = ({n: values[n] for n in names if n in values} for values in (saved, asked))
            check_options(saved, compared, [n for n in options.allow_option_change if n in names])
        again = wanted == "latest" and folder.is_done() and record and not _changed(options, record, folder.path)
        return Start.DONE if again else Start.ON
    if not found:
        return Start.ON
    if not record:
        if replaces:
            return Start.NEW
        raise UserError(
            f"--output_dir {folder.path} has {found[0].name}, and no options.json that says of which run\n"
            "choose another --output_dir, or replace what is there with --overwrite_output_dir"
        )
    saved = record["options"] | {n: value for n, value in record.get("resolved", {}).items() if n in (launched or {})}
    saved = as_spelled_now({n: saved.get(n) for n in known}, asked, record, folder.path)
    differing = differences(saved, {n: asked[n] for n in known})
    done = folder.is_done()
    if done and _is_longer(options, record):
        differing += [n for n in LENGTH if record["options"].get(n) != getattr(options, n)]
    if differing and replaces:
        return Start.NEW
    if differing:
        now = asked | {n: getattr(options, n) for n in LENGTH}
        lines = [f"  {n}: {record['options'].get(n) if n in LENGTH else saved.get(n)} there, {now[n]} now" for n in differing]
        what = "a finished run" if done else "a run"
        raise UserError(
            "\n".join([f"--output_dir {folder.path} has {what} without checkpoints, of other options:", *lines])
            + "\nuse its options, replace it with --overwrite_output_dir, or choose another --output_dir"
        )
    return Start.DONE if done else Start.ON


def nothing_to_do(options: RunOptions) -> str | None:
    """`done_line` where a start can end before the libraries are loaded. Raises UserError as `start_of` does. A dry run starts
    nothing, and a push of a finished run asks for other things."""
    if options.dry_run or options.push_to_hub or start_of(options) is not Start.DONE:
        return None
    return done_line(options)


def done_line(options: RunOptions) -> str:
    """Returns what to say of a start to which there is nothing to do."""
    return f"finished: the run in {options.output_dir} has come to its end with these options, and stays as it is"


def _checkpoint(output_dir: Path, wanted: str) -> Path | None:
    """The checkpoint whose options are compared early; None where it is not known yet, or damaged, of which more is said later.
    The large files are not read: all options that can be compared here lie beside them."""
    if wanted in ("latest", "best"):
        return newest_checkpoint(output_dir, every_byte=False)[0]
    found = next((path for path in (output_dir / wanted, Path(wanted)) if path.is_dir()), None)
    return found if found is not None and verify_checkpoint(found, every_byte=False) is None else None


def _changed(options: RunOptions, record: dict, folder: Path) -> bool:
    """Whether any option differs from those of the last start, but for those that are of one start alone."""
    asked = options.lasting()
    saved = as_spelled_now({n: record["options"].get(n) for n in asked}, asked, record, folder)
    return bool(differences(saved, asked))


def _is_longer(options: RunOptions, record: dict) -> bool:
    """Whether more updates are asked for than the run that is recorded has made."""
    resolved = record.get("resolved", {})
    asked = options.max_train_steps or options.num_epochs * resolved.get("updates_per_epoch", 0)
    return asked > resolved.get("max_train_steps", 0)


def _check_paths(options: RunOptions, record: dict, folder: Path) -> None:
    """Raises UserError for a relative path that is nothing here, and something from where the run was started."""
    if not record:
        return
    given = {n: getattr(options, n) for n in options.paths() if n != "output_dir"}
    places = located({**record, "options": record["options"] | given}, folder, given.keys())
    for name, value in given.items():
        if places[name] != value and not os.path.exists(value):
            raise UserError(
                f"--{name} {value}: there is no such file or folder in {os.getcwd()}, and the run in {folder} was started in "
                f"{record[WORKING_DIR]}\nset --{name} {places[name]}"
            )

"""What a start finds in the folder of its run, compared with what it asks for, before anything is built. Imports no torch.

docs/reliability.md has the table: what `--resume_from_checkpoint` and `--overwrite_output_dir` do in which folder.
"""

import os
from enum import Enum
from pathlib import Path
from typing import Any

from utils.core.errors import UserError
from utils.options.budget import SETS, chosen_by
from utils.options.flags import AnyRun, RunOptions
from utils.options.paths import WORKING_DIR, located
from utils.runs.checkpoint_files import list_checkpoints, newest_checkpoint, verify_checkpoint
from utils.runs.folder import ABOUT, DATA_SOURCES, OPTIONS, WITHOUT, RunFolder, as_spelled_now, check_options, differences
from utils.runs.state import read_state

BY_CONTENT = {*DATA_SOURCES, "model_preset", "pretrained", "vae"}  # a checkpoint knows what these named
OF_THE_LAUNCH = {"global_batch_size", "mixed_precision"}
_SCRIPTS = {"ddpm_num_steps": "train_ddpm", "force_weight_norm": "train_edm2"}  # by a flag that only one of them has
LENGTH = ("max_train_steps", "num_epochs")


class Start(Enum):
    NEW = "new"  # in place of what is there
    ON = "on"  # from a checkpoint, or from the beginning where the same run has none yet
    DONE = "done"  # there is nothing to do


def start_of(options: RunOptions, launched: dict[str, Any] | None = None) -> Start:
    """Returns how a start begins, from what its folder holds.

    Args:
        launched: values of OF_THE_LAUNCH, once all options have their last values; None: before.

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
    known = set(asked)
    if not launched:
        known -= OF_THE_LAUNCH
        if options.pretrained or options.vae:  # which decide those that were not given
            known &= options.given
    asked = {n: asked[n] for n in known}
    if list_checkpoints(folder.path) or wanted != "latest":
        _compare_with_checkpoint(options, asked, folder, wanted)
        again = wanted == "latest" and folder.is_done() and record and not _changed(options, record, folder.path)
        return Start.DONE if again else Start.ON
    if not found:
        return Start.ON
    problem = (
        _other_run(options, asked, folder, record)
        if record
        else f"has {found[0].name}, and no {OPTIONS} that says of which run"
    )
    if problem and not replaces:
        raise UserError(
            f"--output_dir {folder.path} {problem}\nchoose another --output_dir, or replace what is there with "
            "--overwrite_output_dir"
        )
    done = folder.is_done() and (launched is not None or not _changed(options, record, folder.path))  # else not known yet
    return Start.NEW if problem else Start.DONE if done else Start.ON


def _compare_with_checkpoint(options: RunOptions, asked: dict[str, Any], folder: RunFolder, wanted: str) -> None:
    """Raises UserError where the options that are `asked` for would change the run. What names the data and the network counts
    by its content, which is compared later; but not whether there is such a name."""
    checkpoint = _checkpoint(folder.path, wanted)
    if checkpoint is None:
        return
    saved = read_state(checkpoint).options
    if (was := next((_SCRIPTS[n] for n in _SCRIPTS if n in saved), options.script)) != options.script:
        advice = f"continue it with {was}.py, or choose another --output_dir"
        raise UserError(f"{checkpoint} is of {was}.py, and this is {options.script}.py\n{advice}")
    known = {*saved, *vars(options), *ABOUT}  # or network.*, of which more is said later
    allowed = [n for n in options.allow_option_change if "." not in n and n not in known]
    later = {n for n in BY_CONTENT & asked.keys() if n not in ("pretrained", "vae") or bool(saved.get(n)) == bool(asked[n])}
    names = asked.keys() - later
    saved = {n: saved[n] for n in names if n in saved}
    allowed += [n for n in options.allow_option_change if n in names]
    check_options(saved, {n: asked[n] for n in names}, allowed)


def _other_run(options: RunOptions, asked: dict[str, Any], folder: RunFolder, record: dict) -> str:
    """Returns what to say where the run in the folder, without checkpoints, is another than `asked` for; nothing where not."""
    recorded, resolved = WITHOUT | record["options"], record.get("resolved", {})
    saved = recorded | {n: resolved.get(n) for n in OF_THE_LAUNCH}
    saved = as_spelled_now({n: saved.get(n) for n in asked}, asked, record, folder.path)
    if folder.is_done() and _is_longer(options, record):
        saved |= {n: recorded.get(n) for n in LENGTH}
        asked = asked | {n: getattr(options, n) for n in LENGTH}
    lines = [f"  {n}: {saved.get(n)} there, {asked[n]} now" for n in differences(saved, asked)]
    kind = "finished run" if folder.is_done() else "run"
    return "\n".join([f"has a {kind} without checkpoints, of other options:", *lines]) if lines else ""


def recalled(options: AnyRun) -> AnyRun:
    """Returns `options` with what --budget set in the run that is resumed, if any. Raises UserError for another budget."""
    wanted = options.resume_from_checkpoint
    if options.budget is None or not wanted:
        return options
    folders = (options.output_dir, *([os.path.dirname(wanted)] if os.sep in wanted else []))
    record = next((record for folder in folders if (record := RunFolder(Path(folder)).record())), None)
    if record is None or (record["options"].get("budget") != options.budget and options.overwrite_output_dir):
        return options
    if (there := record["options"].get("budget")) != options.budget:
        other = f"--budget {there}, and not {options.budget}" if there else "no --budget"
        raise UserError(f"the run in {options.output_dir} has {other}: leave --budget out, or choose another --output_dir")
    return chosen_by(options, {name: record["options"][name] for name in SETS})


def nothing_to_do(options: RunOptions) -> str | None:
    """`done_line` where a start can end before the libraries are loaded. Raises UserError as `start_of` does. A dry run starts
    nothing, and a push of a finished run asks for other things."""
    if options.dry_run or options.push_to_hub:
        return None
    try:
        start = start_of(options)
    except OSError as error:
        where = f"--output_dir {options.output_dir}"
        raise UserError(f"cannot use {where}: {error.strerror or error}\nchoose another --output_dir") from None
    several = os.environ.get("WORLD_SIZE", "1") != "1"  # which decide together, once they are connected
    return done_line(options) if start is Start.DONE and not several else None


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
    asked, recorded = options.lasting(), WITHOUT | record["options"]
    saved = as_spelled_now({n: recorded.get(n) for n in asked}, asked, record, folder)
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
    given = {n: getattr(options, n) for n in options.marked("path") if n != "output_dir"}
    places = located({**record, "options": record["options"] | given}, folder, given.keys())
    for name, value in given.items():
        if places[name] != value and not os.path.exists(value):
            raise UserError(
                f"--{name} {value}: there is no such file or folder in {os.getcwd()}, and the run in {folder} was started in "
                f"{record[WORKING_DIR]}\nset --{name} {places[name]}"
            )

"""The checkpoints in the folder of a run, as files: which there are, which are whole, and which one a name means.

Imports no torch: a resume that is refused shall not wait for it.
"""

import hashlib
import json
import os
import re
from pathlib import Path

from utils.core.errors import UserError
from utils.runs.state import STATE, read_state

MANIFEST = "MANIFEST.json"
FORMAT = 1  # of the checkpoint
OF_ANOTHER_SCRIPT = "it was written by another script, such as diffusers' train_unconditional.py"
PRETRAINED = "start from the pipeline of that script with --pretrained, in another --output_dir"
MODEL_WEIGHTS = "model.safetensors"
REPLACED = ".tmp-replaced-"  # a checkpoint on its way out, while a newer one of its name comes in
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def verify_checkpoint(path: Path, *, every_byte: bool = True) -> str | None:
    """None for a complete checkpoint whose every byte is as it was written; otherwise one line saying what is wrong. Without
    `every_byte` the large files are not read: their sizes alone are compared."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        listed = manifest["files"].items()
        for name, expected in listed:
            file = path / name
            if ".." in Path(name).parts or Path(name).is_absolute():
                return f"{MANIFEST} names {name}, outside the checkpoint"
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["size"]:
                return f"{name} has {file.stat().st_size} bytes instead of {expected['size']}"
            if (every_byte or name == STATE) and file_sha256(file) != expected["sha256"]:
                return f"{name} was changed or damaged after it was written (SHA-256 differs)"
        if missing := {STATE, MODEL_WEIGHTS} - dict(listed).keys():
            return f"{MANIFEST} does not list {', '.join(sorted(missing))}"
        if (manifest["format"], manifest["step"]) != (FORMAT, read_state(path).step):
            return f"{MANIFEST} was changed or damaged after it was written, or another version wrote it"
    except FileNotFoundError:
        if (path / "options.json").is_file() or (path / "model_index.json").is_file():
            return "it is no checkpoint, but the folder of a run or of a pipeline"
        if (path / "unet").is_dir():
            return OF_ANOTHER_SCRIPT
        return f"no {MANIFEST}: it was never completed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable: {error}"
    return None


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Folders `checkpoint-<step>` of a run, oldest first, valid or not."""
    found = [(int(m[1]), p) for p in output_dir.glob("checkpoint-*") if (m := CHECKPOINT_NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def newest_checkpoint(output_dir: Path, *, every_byte: bool = True) -> tuple[Path | None, list[str]]:
    """Returns the newest valid checkpoint (see `verify_checkpoint`) and a line per newer one. Changes nothing there."""
    skipped: list[str] = []
    for path in reversed(list_checkpoints(output_dir)):
        if (problem := verify_checkpoint(path, every_byte=every_byte)) is None:
            return path, skipped
        skipped.append(f"skipping {path.name}: {problem}")
    return None, skipped


def find_checkpoint(output_dir: Path, wanted: str) -> tuple[Path | None, list[str]]:
    """Returns the checkpoint meant by `latest`, `best`, `checkpoint-N` or a path, verified, and a line per one passed over.
    `latest` is the newest valid one, or None where there is none yet, so that one command line can start a run and continue
    it. Raises UserError for one that was named and is not valid, and when all of several are damaged."""
    for replaced in output_dir.glob(f"{REPLACED}checkpoint-*"):
        if not (final := output_dir / replaced.name.removeprefix(REPLACED)).exists():
            os.rename(replaced, final)
    candidates = list_checkpoints(output_dir)
    if wanted == "latest":
        path, skipped = newest_checkpoint(output_dir)
        if path is None and candidates:
            foreign = all(OF_ANOTHER_SCRIPT in line for line in skipped)
            again = "start again with --overwrite_output_dir in place of --resume_from_checkpoint"
            advice = PRETRAINED if foreign else f"restore one from a copy, or {again}"
            raise UserError(f"{output_dir} has no valid checkpoint: {'; '.join(skipped)}\n{advice}")
        return path, skipped
    if wanted == "best":
        newest, _ = newest_checkpoint(output_dir)
        best_step = None if newest is None else read_state(newest).best_step
        if best_step is None:
            raise UserError(
                f"{output_dir} has no best checkpoint: a run keeps one if it has --validation_images, or --eval_steps and "
                "--best_metric\nresume from latest"
            )
        path = output_dir / f"checkpoint-{best_step}"
    else:
        path = next((p for p in (output_dir / wanted, Path(wanted)) if p.is_dir()), None)
        if path is None:
            there = ", ".join(p.name for p in candidates)
            hint = f"choose from: {there}" if candidates else "it has none yet: latest starts a new run"
            raise UserError(f"--resume_from_checkpoint {wanted}: {output_dir} has no such checkpoint\n{hint}")
    if problem := verify_checkpoint(path):
        advice = PRETRAINED if problem == OF_ANOTHER_SCRIPT else "resume from another checkpoint, or from latest"
        if (path / "options.json").is_file():
            advice = f"resume that run with --output_dir {path} --resume_from_checkpoint latest"
        elif (path / "model_index.json").is_file():
            advice = f"start from the pipeline with --pretrained {path}"
        raise UserError(f"cannot resume from {path}: {problem}\n{advice}")
    return path, []


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""The folder of a run: who may write into it, what it records of its options, and what may change when it is resumed."""

import argparse
import json
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from utils.errors import UserError

# Flags that leave the trained weights as they are (or change them by float rounding alone): free to differ on resume.
HARMLESS = {
    *(
        "output_dir",
        "overwrite_output_dir",
        "resume_from_checkpoint",
        "allow_option_change",
        "cache_dir",
        "cache_images",
    ),
    *("dataloader_num_workers", "cpu_threads", "compile", "gradient_checkpointing", "max_bad_steps"),
    *(
        "enable_xformers_memory_efficient_attention",
        "logger",
        "logging_dir",
        "logging_steps",
        "eval_batch_size",
        "sampler",
    ),
    *("ddpm_num_inference_steps", "save_images_epochs", "save_images_steps", "save_model_epochs", "save_model_steps"),
    *("checkpointing_steps", "checkpoints_total_limit", "validation_steps", "early_stopping_patience"),
    *("push_to_hub", "hub_token", "hub_model_id", "hub_private_repo"),
    # Their product is compared instead, as global_batch_size: the split over processes may change.
    *("train_batch_size", "gradient_accumulation_steps"),
    # A run may be made longer or shorter; a note says that the learning rate then follows the new curve.
    *("num_epochs", "max_train_steps"),
}
SECRET = {"hub_token"}
RUN_FILES = ("options.json", "model_index.json", "README.md", "diagnosis.json", "report.html")
RUN_FOLDERS = ("unet", "scheduler", "samples", "logs", "ema_snapshots")


def check_output_dir(output_dir: Path, *, resuming: bool, overwrite: bool) -> None:
    """Makes the folder and proves that it can be written. Main process only.

    Raises UserError when it holds a run that is neither resumed nor to be overwritten, or cannot be written.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        probe = output_dir / ".write-test"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to --output_dir {output_dir}: {error.strerror or error}") from None
    found = _run_items(output_dir)
    if found and not resuming and not overwrite:
        raise UserError(
            f"{output_dir} already holds a run ({found[0].name}); continue it with --resume_from_checkpoint latest, "
            "replace it with --overwrite_output_dir, or choose another --output_dir"
        )


def clear_output_dir(output_dir: Path, logging_dir: str = "logs") -> None:
    """Deletes the run in the folder and nothing else. For the main process, once all that could be mistaken was checked."""
    items = _run_items(output_dir)
    logs = (output_dir / logging_dir).resolve()
    if items and logs.is_dir() and output_dir.resolve() in logs.parents:
        shutil.rmtree(logs)
    for item in (item for item in items if item.exists()):
        shutil.rmtree(item) if item.is_dir() else item.unlink()


def _run_items(output_dir: Path) -> list[Path]:
    """What a run of ours leaves at the top of its folder; anything else there is the user's."""
    is_run = (output_dir / "options.json").exists() or any(output_dir.glob("checkpoint-*"))
    if not is_run and not (output_dir / "model_index.json").exists():
        return []
    named = [output_dir / name for name in (*RUN_FILES, *RUN_FOLDERS)]
    return [p for p in (*named, *output_dir.glob("checkpoint-*"), *output_dir.glob(".tmp-*")) if p.exists()]


def write_options(output_dir: Path, args: argparse.Namespace, resolved: dict) -> None:
    """Writes options.json: every flag, what followed from them (`resolved`), versions, git commit and command line.

    What an earlier start of the same run had recorded of itself moves to `earlier_starts`.
    """
    path = output_dir / "options.json"
    record = {
        "options": {k: ("<hidden>" if k in SECRET and v else v) for k, v in sorted(vars(args).items())},
        "resolved": resolved,
        "command": command_line(args),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "versions": {name: version(name) for name in ("torch", "accelerate", "diffusers", "datasets")},
        "python": platform.python_version(),
        "earlier_starts": [],
    }
    if path.exists():
        earlier = json.loads(path.read_text())
        record["earlier_starts"] = [
            *earlier.get("earlier_starts", []),
            {k: earlier.get(k) for k in ("command", "started", "git_commit", "versions")},
        ]
    path.write_text(json.dumps(record, indent=2) + "\n")


def command_line(args: argparse.Namespace) -> str:
    """The command that was given to Python, without secrets."""
    secrets = [getattr(args, name) for name in SECRET if getattr(args, name)]
    command = shlex.join(sys.argv)
    for secret in secrets:
        command = command.replace(secret, "<hidden>")
    return command


def git_commit() -> str | None:
    """Commit of the checkout that runs, with `+changes` when it has uncommitted ones; None outside a checkout."""
    here = Path(__file__).parent
    try:
        describe = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def shaping_options(args: argparse.Namespace, **computed) -> dict:
    """The flags that shape the trained weights, with `computed` facts such as global_batch_size; JSON types only."""
    options = {name: value for name, value in vars(args).items() if name not in HARMLESS}
    return json.loads(json.dumps(options | computed))


def check_options(saved: dict, current: dict, allowed: list[str]) -> None:
    """Raises UserError with a diff when options that shape the result differ from the checkpoint's and are not `allowed`."""
    absent = "(absent)"
    names = sorted(saved.keys() | current.keys())
    changed = [n for n in names if saved.get(n, absent) != current.get(n, absent) and n not in allowed]
    if changed:
        lines = [f"  {n}: {saved.get(n, absent)} in the checkpoint, {current.get(n, absent)} now" for n in changed]
        hint = ""
        if "global_batch_size" in changed:
            hint = "\n  (global batch = processes x --train_batch_size x --gradient_accumulation_steps; keep the product)"
        raise UserError(
            "these options would change the run that is resumed:\n"
            + "\n".join(lines)
            + hint
            + f"\nuse the checkpoint's values, or add: --allow_option_change {' '.join(changed)}"
        )

"""A place for what Hugging Face's libraries keep, where the user's home has none: a container with a numeric user, say."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from utils.core.files import make_folder


def use_a_cache_that_can_be_written(options: Any) -> None:
    """Before these libraries are imported: where the folder of `datasets` cannot be made or written, what they write goes
    below --cache_dir, or beside --output_dir, or into a temporary folder, and that is said once. Temporary files go beside
    --output_dir where the machine has no place for them. Raises UserError for a --cache_dir that cannot be made."""
    beside = os.path.join(os.path.dirname(os.path.abspath(getattr(options, "output_dir", None) or "here")), ".cache")
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # torch cannot be imported then
        make_folder(Path(beside), "TMPDIR")
        os.environ["TMPDIR"] = tempfile.tempdir = beside
    asked = getattr(options, "cache_dir", None)
    if asked and not os.path.isdir(asked):  # packed images can be read where nothing can be written
        make_folder(Path(asked), "--cache_dir")
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface")
    home = os.path.expandvars(os.path.expanduser(os.environ.get("HF_HOME") or default))
    usual = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    if _writable(usual):
        return
    places = [asked or beside, os.path.join(tempfile.gettempdir(), f"steady-diffusion-{os.getuid()}")]
    below = Path(next(filter(_writable, places), places[0])).absolute()
    os.environ["HF_DATASETS_CACHE"] = str(below / "huggingface" / "datasets")
    if not _writable(home) and not os.path.isdir(os.path.join(home, "hub")):  # else what was downloaded can be read there
        os.environ["HF_HOME"] = str(below / "huggingface")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(below / "torchinductor"))  # torch asks for the user's name
    if os.environ.get("RANK", "0") == "0" and not getattr(options, "quiet", False):
        print(f"note: {usual} cannot be written; the cache is {below} (--cache_dir or HF_HOME choose)", file=sys.stderr)


def _writable(folder: str) -> bool:
    if folder.startswith("~"):  # which nobody has who has no name
        return False
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        return os.access(folder, os.W_OK)
    return False

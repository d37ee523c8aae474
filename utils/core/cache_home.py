"""A place for what Hugging Face's libraries keep, where the user's home has none: a container with a numeric user, say."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def use_a_cache_that_can_be_written(options: Any) -> None:
    """Before these libraries are imported: where `~/.cache/huggingface` cannot be made or written, what they write goes
    below --cache_dir, or beside --output_dir, or into a temporary folder, and that is said once."""
    if os.environ.get("HF_HOME"):
        return
    usual = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface")
    is_there = not usual.startswith("~") and _made(usual)  # ~: which nobody has who has no name
    if is_there and os.access(usual, os.W_OK):
        return
    beside = os.path.dirname(os.path.abspath(getattr(options, "output_dir", None) or "here"))
    places = [getattr(options, "cache_dir", None) or os.path.join(beside, ".cache")]
    places.append(os.path.join(tempfile.gettempdir(), f"steady-diffusion-{os.getuid()}"))
    below = Path(next((place for place in places if _made(place) and os.access(place, os.W_OK)), places[0])).absolute()
    if is_there:  # what it holds can be read
        os.environ.setdefault("HF_DATASETS_CACHE", str(below / "huggingface" / "datasets"))
    else:
        os.environ["HF_HOME"] = str(below / "huggingface")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(below / "torchinductor"))  # torch asks for the user's name
    if os.environ.get("RANK", "0") == "0" and not getattr(options, "quiet", False):
        print(f"note: {usual} cannot be written; the cache is {below} (--cache_dir or HF_HOME choose)", file=sys.stderr)


def _made(folder: str) -> bool:
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        return True
    return False

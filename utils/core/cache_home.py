"""A place for what Hugging Face's libraries keep, where the user's home has none: a container with a numeric user, say."""

import os
import sys
from pathlib import Path
from typing import Any

_CHOSEN = ("HF_HOME", "XDG_CACHE_HOME")  # by the user


def use_a_cache_that_can_be_written(options: Any) -> None:
    """Before these libraries are imported: where `~/.cache/huggingface` is not there and cannot be made, their folder is made
    below --cache_dir, or beside --output_dir, and that is said once."""
    if any(map(os.environ.get, _CHOSEN)):
        return
    usual = os.path.expanduser("~/.cache/huggingface")
    if not usual.startswith("~"):  # which nobody has who has no name
        try:
            os.makedirs(usual, exist_ok=True)
            return
        except OSError:
            pass
    beside = os.path.dirname(os.path.abspath(getattr(options, "output_dir", None) or "here"))
    below = Path(getattr(options, "cache_dir", None) or Path(beside, ".cache")).absolute()
    os.environ["HF_HOME"] = str(below / "huggingface")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(below / "torchinductor"))  # torch asks for the user's name
    if os.environ.get("RANK", "0") == "0" and not getattr(options, "quiet", False):
        print(f"note: {usual} cannot be made; the cache is {below} (--cache_dir or HF_HOME choose)", file=sys.stderr)

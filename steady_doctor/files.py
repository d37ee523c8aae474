"""Files that are whole or absent, whatever kill or full disk comes while they are written."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes `text` beside `path`, and puts it in its place. Raises OSError; then `path` stays as it was."""
    draft = path.with_name(f".{os.getpid()}-{path.name}.tmp")
    try:
        draft.write_text(text)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def make_folder(folder: Path) -> None:
    """Raises OSError where it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".write-test-{os.getpid()}"
    probe.write_bytes(b"")
    probe.unlink()

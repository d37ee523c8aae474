"""Files that are whole or absent, whatever kill, full disk or power cut comes while they are written."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from utils.core.errors import OF_THE_DISK, explained


@contextlib.contextmanager
def whole_file(path: Path, *, durable: bool = False, shared: bool = False) -> Iterator[Path]:
    """Yields the path of a draft beside `path`. The block writes the draft, which then takes the place of `path`.

    If the block raises, the draft is deleted, and `path` stays as it was. What a kill leaves is overwritten next time.
    `durable`: the content is on the disk before the name, so that a power cut cannot leave the name without the content.
    `shared`: several processes may write this file at once. Each writes its own draft, and the last one wins.
    """
    draft = path.with_name(f".{os.getpid()}-{path.name}.tmp" if shared else f".{path.name}.tmp")
    try:
        yield draft
        if durable:
            sync(draft)
        os.replace(draft, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in OF_THE_DISK and error.filename is None:
            error.filename = str(path)  # of a full disk, Python does not say where
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Writes a file as `whole_file` does. Raises OSError."""
    with whole_file(path, shared=shared) as draft:
        draft.write_text(text)


def write_json(path: Path, content: Any, *, shared: bool = False) -> None:
    """Writes a file as `whole_file` does. Raises OSError."""
    write_text(path, json.dumps(content, indent=2) + "\n", shared=shared)


def append(path: Path, lines: bytes) -> None:
    """Adds all of `lines` to the end of a file, or nothing. Raises OSError. What a kill leaves may end in half a line."""
    with open(path, "ab", buffering=0) as file:
        before = file.tell()
        try:
            while lines:
                lines = lines[file.write(lines) :]  # a disk may have room for a part
        except OSError:
            file.truncate(before)
            raise


def read_json(path: Path) -> dict[str, Any]:
    """Returns the mapping in a JSON file; empty where there is no file, or it is damaged or holds something else."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}


def make_folder(folder: Path, flag: str) -> None:
    """Makes a folder for what is about to be computed. Raises UserError, which names `flag`, where it cannot be written."""
    with explained(f"cannot write to {flag} {folder}", f"choose another {flag}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-test-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()


def sync(path: Path) -> None:
    """Waits until the disk holds the content of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files that are whole or absent, whatever kill, full disk or power cut comes while they are written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from utils.core.errors import UserError


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
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def make_folder(folder: Path, flag: str) -> None:
    """Makes a folder for what is about to be computed. Raises UserError, which names `flag`, where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-test-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {flag} {folder}: {error.strerror or error}\nchoose another {flag}") from None


def sync(path: Path) -> None:
    """Waits until the disk holds the content of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

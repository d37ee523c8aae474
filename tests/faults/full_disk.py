"""A disk that is full for one write, or for every so many, of all that a script makes in this process."""

import contextlib
import errno
import functools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from utils.core.images import PNG_END

Write = tuple[str, int]  # a file or folder, and how often it was written so far
watching: list[Callable[[str], bool]] = []  # what is asked at each write, at most one: audit hooks cannot be removed


@contextlib.contextmanager
def full_at(disk: Path, chosen: list[Write]) -> Iterator[tuple[list[Write], list[Write]]]:
    """Inside it, `disk`, a file system of its own, is full at each of the `chosen` writes, and until the next one. A write is a
    file below `disk` that is opened for writing, or a folder that is made, by its relative name, without what is another one
    in each process. Gives all writes so far, and those that found the disk full."""
    writes, full, filler, busy, times = [], [], disk / "filler", [False], Counter()

    def before(path: str) -> bool:
        path = os.path.abspath(path)
        if not path.startswith(f"{disk}{os.sep}") or busy[0]:
            return False
        busy[0], name = True, re.sub(rf"\.{os.getpid()}-|(?<=tfevents)\..*", ".", os.path.relpath(path, disk))
        filler.unlink(missing_ok=True)
        times[name] += 1
        writes.append((name, times[name]))
        if found := writes[-1] in chosen:
            full.append(writes[-1])
            fill(filler)
        busy[0] = False
        return found

    def told(write):  # what Python's own `open` does not open; of both functions the second argument is the file
        def announced(content, file, *others, **named):
            if isinstance(file, str | Path):
                before(str(file))
            return write(content, file, *others, **named)

        return functools.wraps(write)(announced)

    _hear()
    watching.append(before)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(safetensors.torch, "serialize_file", told(safetensors.torch.serialize_file))
            patch.setattr(torch, "save", told(torch.save))
            yield writes, full
    finally:
        watching.clear()
        filler.unlink(missing_ok=True)


def fill(filler: Path) -> None:
    with open(filler, "wb", buffering=0) as file:
        left = os.fstatvfs(file.fileno())
        if left.f_bavail:
            os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_bsize)


@functools.cache
def _hear() -> None:
    def heard(event: str, given: tuple) -> None:
        if not watching or event not in ("open", "os.mkdir") or isinstance(given[0], int):
            return
        path = os.fsdecode(given[0])
        if event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR):
            watching[0](path)
        elif event == "os.mkdir" and not os.path.exists(path) and watching[0](path):  # for which a tmpfs has room in any case
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    sys.addaudithook(heard)


def damaged(folder: Path) -> list[str]:
    """What is half written below `folder`, or a draft that was left there."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix != ".lock" and path.name != ".lock"):
        try:
            if path.name.startswith(".tmp-") or path.suffix == ".tmp":
                raise ValueError("it was left")
            if path.is_file():
                _read(path)
        except Exception as error:  # each library has its own
            found.append(f"{path.relative_to(folder)}: {error!r}")
    return found


def _read(path: Path) -> None:
    content = path.read_bytes()
    if not content:
        raise ValueError("it is empty")
    if path.suffix in (".json", ".jsonl"):
        for part in content.splitlines() if path.suffix == ".jsonl" else [content]:
            json.loads(part)
    elif path.suffix == ".safetensors":
        safetensors.torch.load_file(path)
    elif path.suffix == ".npy":
        np.load(path)
    elif not content.rstrip().endswith({".png": PNG_END, ".html": b"</html>"}.get(path.suffix, b"")):
        raise ValueError("it has no end")

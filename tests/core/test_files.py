"""A file is written whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from utils.core.files import append, whole_file


@pytest.mark.parametrize("shared", [False, True])
def test_the_new_content_comes_whole_or_the_old_one_stays(tmp_path, shared):
    path = tmp_path / "file.json"
    path.write_text("old")
    with whole_file(path, shared=shared) as draft:
        draft.write_text("new")
        assert path.read_text() == "old" and draft.parent == tmp_path and draft.name.startswith(".")
    assert path.read_text() == "new"
    with pytest.raises(OSError, match="no space"), whole_file(path, shared=shared) as draft:
        draft.write_text("half")
        raise OSError("no space left")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(OSError, match="No space left") as raised, whole_file(tmp_path / "file.json"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert raised.value.filename == str(tmp_path / "file.json")
    with pytest.raises(ConnectionError) as raised, whole_file(tmp_path / "file.json"):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    assert raised.value.filename is None


@pytest.mark.parametrize("room", [0, 5, 19])
def test_lines_are_added_whole_or_not_at_all(tmp_path, files_no_larger_than, room):
    path = tmp_path / "file.jsonl"
    append(path, b"first\n")
    with files_no_larger_than(6 + room), pytest.raises(OSError):
        append(path, b"second\n" + b"third, longer\n")
    assert path.read_bytes() == b"first\n"
    append(path, b"fourth\n")
    assert path.read_bytes() == b"first\nfourth\n"


def test_a_durable_file_is_on_the_disk_before_its_name(tmp_path, monkeypatch):
    events, real_sync, real_replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(os.fstat(file).st_size), real_sync(file)))
    monkeypatch.setattr(os, "replace", lambda draft, path: (events.append(Path(path).name), real_replace(draft, path)))
    with whole_file(tmp_path / "file.bin", durable=True) as draft:
        draft.write_bytes(b"four")
    assert events == [4, "file.bin"]

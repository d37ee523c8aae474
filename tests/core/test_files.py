"""A file is written whole or not at all."""

import os
from pathlib import Path

import pytest

from utils.core.files import whole_file


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


def test_a_durable_file_is_on_the_disk_before_its_name(tmp_path, monkeypatch):
    events, real_sync, real_replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(os.fstat(file).st_size), real_sync(file)))
    monkeypatch.setattr(os, "replace", lambda draft, path: (events.append(Path(path).name), real_replace(draft, path)))
    with whole_file(tmp_path / "file.bin", durable=True) as draft:
        draft.write_bytes(b"four")
    assert events == [4, "file.bin"]

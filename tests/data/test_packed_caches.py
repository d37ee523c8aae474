"""The list of packed caches, and the removal of those that nobody uses."""

import importlib
import io
import json
import os
import time
from pathlib import Path

import datasets
import pytest
from filelock import FileLock
from PIL import Image

from utils.data.dataset import load_images
from utils.data.packed_caches import describe_size, list_caches, prune_caches
from utils.options.flags import DataOptions

DAY = 86400


@pytest.fixture
def load(opened, tmp_path):
    (tmp_path / "p").mkdir()
    Image.new("RGB", (9, 9), "red").save(tmp_path / "p" / "1.png")
    return lambda resolution: opened(train_data_dir=str(tmp_path / "p"), cache_dir=str(tmp_path / "c"), resolution=resolution)


def used(folder: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(folder / "about.json", (then, then))


def test_caches_are_listed_and_those_long_unused_are_removed(load, tmp_path):
    root = tmp_path / "c" / "steady_diffusion"
    assert list_caches(root) == [] and prune_caches(root, 0) == []
    folders = {n: root / load(n).fingerprint for n in (4, 5, 6, 7)}  # each set is gone, and its lock with it
    in_use = load(7)
    for days, folder in zip((40, 31, 3, 50), folders.values()):
        used(folder, days)
    (folders[5] / "about.json").unlink()  # it could not be written
    os.utime(folders[5], (time.time() - 31 * DAY,) * 2)
    listed = list_caches(root)
    assert [cache.folder for cache in listed] == [folders[n] for n in (7, 4, 5, 6)]
    assert [cache.in_use for cache in listed] == [True, False, False, False]
    assert listed[1].about == f"{tmp_path / 'p'}; 1 images; 3x4x4, background white"
    assert listed[2].about == "not known"
    assert listed[1].size == sum(file.stat().st_size for file in folders[4].iterdir())
    assert {cache.folder for cache in prune_caches(root, 30)} == {folders[4], folders[5]}
    assert not folders[4].exists() and folders[6].exists() and folders[7].exists()
    assert len(in_use.fetch([0])) == 1
    load(6)
    assert prune_caches(root, 2) == []  # it was used just now
    del in_use
    assert {cache.folder for cache in prune_caches(root, 0)} == {folders[6], folders[7]}
    assert list_caches(root) == []


def test_what_a_killed_packer_left_is_removed_and_a_packing_one_is_not_disturbed(tmp_path):
    (tmp_path / "abc.tmp").mkdir()
    (tmp_path / "abc.tmp" / "images.bin").write_bytes(bytes(10))
    with FileLock(tmp_path / "abc.lock"):
        (cache,) = list_caches(tmp_path)
        assert cache.in_use and cache.about == "not packed to its end" and cache.size == 10
        assert prune_caches(tmp_path, 0) == []
    assert [cache.folder.name for cache in prune_caches(tmp_path, 0)] == ["abc.tmp"]


def test_decoded_blocks_of_a_stream_are_listed_and_removed_once_nobody_uses_them(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (9, 9), "red").save(file, "PNG")
    images = datasets.Dataset.from_dict({"image": [{"bytes": file.getvalue()}] * 3})
    images.cast_column("image", datasets.Image()).to_parquet(tmp_path / "a.parquet")
    options = {"dataset_name": str(tmp_path / "a.parquet"), "resolution": 4, "cache_dir": str(tmp_path), "streaming": True}
    streamed = load_images(DataOptions(**options))
    root = tmp_path / "steady_diffusion"
    (cache,) = list_caches(root)
    assert cache.in_use and cache.about == f"{tmp_path / 'a.parquet'}; 3 images, streamed; 3x4x4, background white"
    assert cache.size > 3 * 48 and prune_caches(root, 0) == []
    del streamed
    assert prune_caches(root, 0) != [] and list_caches(root) == []
    assert load_images(DataOptions(**options)).fetch([2]).any()


def test_a_cache_that_cannot_be_marked_still_serves(load, tmp_path, monkeypatch):
    load(4)
    monkeypatch.setattr("fcntl.flock", lambda *arguments: (_ for _ in ()).throw(OSError(95, "not supported")))
    images = load(4)
    assert images.in_use is None and len(images.fetch([0])) == 1


def test_the_doctor_lists_and_prunes(load, tmp_path, capsys):
    diagnose = importlib.import_module("diagnose")

    def ask(*flags) -> str:
        assert diagnose.main(diagnose.parse_args([*flags, "--cache_dir", str(tmp_path / "c")])) == 0
        return capsys.readouterr().out

    folder = tmp_path / "c" / "steady_diffusion" / load(4).fingerprint
    used(folder, 40)
    text = ask("--cache")
    assert "unused for 40 days" in text and str(folder) in text and "1 packed cache, 0.3 kB" in text
    assert "removed" in ask("--prune_cache", "30") and not folder.exists()
    assert json.loads(ask("--cache", "--json")) == {"removed": [], "caches": []}


def test_no_size_is_rounded_to_nothing():
    assert [describe_size(size) for size in (768, 115_200, 5e7, 2.5e9)] == ["0.8 kB", "0.1 MB", "50.0 MB", "2.5 GB"]

"""Blocks of a stream on the disk."""

import os
import shutil
import threading

import numpy as np
import pytest
from shard_files import png

from utils.core.size import read_bytes
from utils.data import stream
from utils.data.block_cache import BlockCache
from utils.data.decode import ImageFile, ImagePreparation, Size

pytest_plugins = ("shard_fixtures",)


def test_blocks_are_kept_within_the_limit_and_made_again(tmp_path):
    prepare = ImagePreparation(Size(8, 8), 3, True, "white", 255)
    cache = BlockCache(tmp_path, "ab", prepare, 5000)
    made = []

    def make(block):
        made.append(block)
        return [ImageFile(png(block), None, "x") for _ in range(4)]

    def read(block):
        return cache.open(block, lambda: make(block), "x.parquet").at(np.array([3]))[0]

    first = read(0)
    for block in (1, 2, 3, 4, 5, 6, 7):
        read(block)
        os.utime(tmp_path / "ab" / f"{block}.bin", (block, block))
    cache.trim()
    kept = {path.name for path in (tmp_path / "ab").iterdir()}
    assert "1.bin" not in kept and "7.bin" in kept
    assert sum(path.stat().st_size for path in (tmp_path / "ab").iterdir()) <= 5000
    assert (read(1) == prepare(ImageFile(png(1), None, ""))[0]).all() and made.count(1) == 2
    (tmp_path / "ab" / "1.bin").write_bytes(b"\0" * 700)  # as a power cut may leave it
    assert (read(0) == first).all() and (read(1) == prepare(ImageFile(png(1), None, ""))[0]).all() and made.count(1) == 3


def test_blocks_do_not_stay_open_beyond_the_limit_and_count_as_used(folder, load, monkeypatch):
    images = load(folder, cache_limit="64kB", shuffle_window=10)
    store = images.store
    for row in range(len(images)):
        images.fetch([row])
        assert sum(len(stored.data) for stored, _ in store._open.values()) <= max(1000, len(store.block(0).data))
        assert store._mapped == sum(len(stored.data) for stored, _ in store._open.values())
    path = store.cache.folder / "0.bin"
    os.utime(path, (0, 0))
    monkeypatch.setattr(stream, "_OPEN_SECONDS", -1.0)
    store._open.clear()
    images.fetch([0])
    os.utime(path, (0, 0))
    images.fetch([0])
    assert path.stat().st_mtime > 0  # it was open


def test_a_folder_that_was_pruned_is_made_again(folder, load):
    images = load(folder)
    shutil.rmtree(images.store.cache.folder)
    assert images.fetch([60]).any()


def test_one_of_several_makes_a_block_and_the_others_wait(tmp_path):
    cache = BlockCache(tmp_path, "ab", ImagePreparation(Size(8, 8), 3, True, "white", 255), 10**9)
    made, begun = [], threading.Event()

    def make():
        begun.wait(1)
        made.append(1)
        return [ImageFile(png(0), None, "x")]

    threads = [threading.Thread(target=lambda: cache.open(0, make, "x")) for _ in range(4)]
    for thread in threads:
        thread.start()
    cache.make_if_free(0, make)  # somebody is at it
    begun.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_sizes_of_files():
    sizes = {"50GB": 50 * 10**9, "1.5 tb": 1500 * 10**9, "700": 700, "3MB": 3 * 10**6}
    assert {text: read_bytes(text) for text in sizes} == sizes
    for text in ("much", "-3GB", "0", "3 XB"):
        with pytest.raises(ValueError):
            read_bytes(text)

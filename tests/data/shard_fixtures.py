"""Fixtures of the tests of streams."""

import pytest
from shard_files import write_shards

from utils.data import shards
from utils.data.dataset import load_images
from utils.options.flags import DataOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "WAITS", (0.01, 0.01))
    monkeypatch.setattr(shards, "RANGE_WAITS", ())

    def load_with_cache(name, **options):
        options = {"resolution": 8, "cache_dir": str(tmp_path / "cache"), "streaming": True, **options}
        return load_images(DataOptions(dataset_name=str(name), **options))

    return load_with_cache

"""Fixtures of the tests of streams."""

import pytest
from shard_files import write_shards

from utils.data import shards


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture
def load(opened, monkeypatch):
    monkeypatch.setattr(shards, "WAITS", (0.01, 0.01))
    monkeypatch.setattr(shards, "RANGE_WAITS", ())
    return lambda name, **options: opened(**{"dataset_name": str(name), "streaming": True} | options)

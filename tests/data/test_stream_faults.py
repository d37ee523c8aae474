"""Shards that fail, change or lie elsewhere."""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hub_stand_in import hub_stand_in
from shard_files import SHARDS, web_server, write_shards, write_tars
from test_dataset import in_new_process

from utils.core.errors import UserError
from utils.data import loader, shard_formats, shards

pytest_plugins = ("shard_fixtures",)


def test_a_shard_that_changed_is_refused(tmp_path, load):
    folder = write_shards(tmp_path / "shards")
    images = load(folder)
    path = folder / "train-00002.parquet"
    os.utime(path, (1, 1))
    with pytest.raises(UserError, match=r"train-00002.parquet has changed since") as caught:
        images.fetch([74])
    assert len(str(caught.value).splitlines()) == 2
    assert (load(folder).fetch([74]) == images.fetch([0])).all() is not None  # a new start takes it


def test_a_damaged_or_lost_shard_ends_with_its_name(tmp_path, load):
    folder = write_shards(tmp_path / "shards")
    path = folder / "train-00001.parquet"
    images = load(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"cannot read the shard .*train-00001.parquet") as caught:
        images.fetch([40])
    assert len(str(caught.value).splitlines()) == 2
    path.write_bytes(b"PAR1 no parquet PAR1")
    with pytest.raises(UserError, match=r"cannot read the shard .*train-00001.parquet"):
        load(folder)


def test_images_of_a_lost_shard_are_replaced_and_count(tmp_path, load):
    folder = write_shards(tmp_path / "shards")
    whole, first = load(folder, streaming=False), 25  # images of the shards before
    images = load(folder, on_bad_image="replace", max_bad_images=25)
    few = load(folder, on_bad_image="replace", max_bad_images=24, cache_dir=str(tmp_path / "other"))
    (folder / "train-00001.parquet").unlink()
    rows = np.arange(20, 55)
    shown = np.where((rows >= first) & (rows < 2 * first), 2 * first, rows)
    assert (images.fetch(rows) == whole.fetch(shown)).all()
    assert sorted(images.bad_images) == list(range(first, 2 * first)) and set(images.replacements().values()) == {2 * first}
    assert re.fullmatch(r"row 3 of .*train-00001.parquet", images.bad_images[first + 3].name)
    assert images.bad_images[first].reason.startswith("its shard cannot be read: ")
    with pytest.raises(UserError, match=r"25 or more images .*train-00001.parquet: its shard cannot be read"):
        few.fetch(rows)


def test_a_lost_shard_is_waited_for_once(tmp_path, load):
    """Its other blocks are tried without waiting; micro-batches that are fetched together fail together."""
    folder = write_shards(tmp_path / "shards")
    with web_server(folder) as (address, faults, asked):
        names = f"{address}/train-0000{{0..1}}.parquet"
        images, others = load(names), load(names, on_bad_image="replace", cache_dir=str(tmp_path / "other"))
        asked.clear()
        faults[:] = [500] * 99
        order = SimpleNamespace(indices=lambda numbers: numbers % 4 + 12, seed=0)  # of one block
        samples = loader._Samples(images, order, True, None)
        [error] = samples.__getitems__([range(2), range(2, 4)])
        assert str(error).startswith("cannot read the shard") and len(asked) == 3
        asked.clear()
        faults[:] = [500] * 4  # three tries for one block of the first shard, and one for another; one is there already
        shown, rows = others.fetch(np.arange(50)), np.arange(50)
        assert asked[:4] == ["train-00000.parquet"] * 4 and sorted(others.bad_images) == list(range(10, 25))
    assert (shown == load(folder, streaming=False).fetch(np.where((rows < 10) | (rows >= 25), rows, 25))).all()


def test_shards_of_a_web_server(folder, load):
    packed = load(folder, streaming=False)
    with web_server(folder) as (address, _, asked):
        images = load(f"{address}/train-{{00000..00002}}.parquet")
        indices = np.arange(len(packed))
        assert (images.fetch(indices) == packed.fetch(indices)).all() and (images.labels == packed.labels).all()
        assert len(asked) < 12 * SHARDS
        asked.clear()
        assert (load(f"{address}/train-{{00000..00002}}.parquet").fetch(indices) == packed.fetch(indices)).all()
        assert len(asked) <= 2 * SHARDS  # whether they are as they were, and the columns
        assert images.fetch([3]).any()  # without the server, from the disk


@pytest.mark.parametrize("fault", ["stall", "reset", "short", 500])
def test_a_fault_that_ends_costs_nothing_but_time(fault, folder, load, monkeypatch, capfd):
    monkeypatch.setattr(shards, "TIMEOUT", 0.2)
    with web_server(folder) as (address, faults, _):
        images = load(f"{address}/train-00000.parquet")
        faults[:] = [fault, fault]
        assert (images.fetch([12]) == load(folder, streaming=False).fetch([12])).all()
        assert not faults
    said = capfd.readouterr().err.splitlines()
    assert sum("trying again" in line for line in said) == 1


def test_a_part_that_fails_is_asked_for_again_alone(tmp_path, load, monkeypatch, capfd):
    monkeypatch.setattr(shards, "RANGE_WAITS", (0.01, 0.01))
    monkeypatch.setattr(shard_formats, "_BUFFER", 4096)
    folder = write_tars(tmp_path / "tars", range(40))
    with web_server(folder) as (address, faults, asked):
        load(f"{address}/train-00000.tar", cache_dir=str(tmp_path / "undisturbed"))
        usual = len(asked)
        assert usual < 3 * (folder / "train-00000.tar").stat().st_size / 4096  # parts of that size, and not each header
        asked.clear()
        faults[:] = [None] * (usual // 2) + [500, "reset", None, "short"]
        images = load(f"{address}/train-00000.tar")
        assert not faults and len(asked) == usual + 3
        assert (images.fetch([3]) == load(folder / "train-00000.tar", streaming=False).fetch([3])).all()
    assert "trying again" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "fault, words",
    [
        ("stall", "cannot read the shard http.*train-00000.parquet.*3 times"),
        (500, "cannot read the shard http.*train-00000.parquet.*500"),
        (404, "cannot read the shard http.*train-00000.parquet.*404"),
        ("whole", "does not send parts"),
    ],
)
def test_a_fault_that_stays_ends_with_the_name_of_the_shard(fault, words, folder, load, monkeypatch):
    monkeypatch.setattr(shards, "TIMEOUT", 0.2)
    with web_server(folder) as (address, faults, asked):
        images = load(f"{address}/train-00000.parquet")
        asked.clear()
        faults[:] = [fault] * 9
        with pytest.raises(UserError, match=words) as caught:
            images.fetch([12])
        assert len(str(caught.value).splitlines()) == 2 and len(asked) == (1 if fault in (404, "whole") else 3)


def test_a_web_shard_that_changed_is_refused(tmp_path, load):
    folder = write_shards(tmp_path / "shards")
    with web_server(folder) as (address, _, _):
        images = load(f"{address}/train-00000.parquet")
        os.utime(folder / "train-00000.parquet", (1, 1))
        with pytest.raises(UserError, match=r"train-00000.parquet has changed since"):
            images.fetch([12])


def test_other_file_systems_and_patterns(folder, load):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/streamed", recursive=True)
    packed = load(folder, streaming=False)
    for name in ("memory://streamed", "memory://streamed/train-*.parquet"):
        assert (load(name).fetch([0, 60]) == packed.fetch([0, 60])).all()


def test_shards_of_the_hub(folder, load, tmp_path):
    (tmp_path / "repository" / "data").mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        name = path.name.replace(".parquet", f"-of-{SHARDS:05}.parquet")
        (tmp_path / "repository" / "data" / name).write_bytes(path.read_bytes())
    with hub_stand_in("me/shards", tmp_path / "repository") as (address, _):
        code = (
            "import json; from utils.data.dataset import load_images; from utils.options.flags import DataOptions\n"
            f"o = dict(dataset_name='me/shards', resolution=8, cache_dir={str(tmp_path)!r}, streaming=True)\n"
            "images = load_images(DataOptions(**o)); print(json.dumps([len(images), int(images.fetch([60]).sum())]))"
        )
        answer = in_new_process(code, HF_ENDPOINT=address, HF_HOME=str(tmp_path / "hf"))
    assert answer == [75, load(folder, streaming=False).fetch([60]).sum()]

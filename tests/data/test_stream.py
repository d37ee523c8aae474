"""Streamed parquet shards: the same pixels as packed ones, an order in windows, blocks on the disk, and shards that fail."""

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hub_stand_in import Answers, hub_stand_in, serving
from PIL import Image

from steady_doctor.data.rows import check_rows
from utils.core.errors import UserError
from utils.core.size import read_bytes
from utils.data import loader, shard_formats, shards, stream
from utils.data.block_cache import BlockCache
from utils.data.dataset import content_fingerprint, load_images
from utils.data.decode import ImageFile, ImagePreparation, Size
from utils.data.loader import BatchSplit, WindowedOrder, training_batches
from utils.data.split import split_validation
from utils.options.flags import DataOptions

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS, GROUP, SHARDS = 25, 10, 3  # so the last row group of each shard is shorter


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(value).integers(0, 256, (8, 10, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_shards(folder, damaged=(), empty=()):
    import datasets

    folder.mkdir()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee"])})
    for shard in range(SHARDS):
        numbers = range(shard * ROWS, (shard + 1) * ROWS)
        data = [b"no image" if number in damaged else png(number) for number in numbers]
        images = [None if number in empty else {"bytes": each, "path": None} for number, each in zip(numbers, data)]
        columns = {"image": images, "label": [number % 2 for number in numbers]}
        dataset = datasets.Dataset.from_dict(columns, features=features)
        dataset.to_parquet(folder / f"train-{shard:05}.parquet", batch_size=GROUP)
    return folder


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


# ---- the order


@pytest.mark.parametrize("seed", range(6))
def test_each_pass_shows_every_image_once_and_each_window_few_blocks(seed):
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 40, generator.integers(1, 60))
    blocks[0] += 1
    window, length = int(generator.integers(1, 300)), int(blocks.sum())
    order = WindowedOrder(blocks, window, seed)
    shown = order.indices(torch.arange(3 * length)).numpy().reshape(3, length)
    assert (np.sort(shown, 1) == np.arange(length)).all()
    if length > 50:
        assert (shown[0] != shown[1]).any()
    numbers = generator.permutation(3 * length)[:50]
    again = WindowedOrder(blocks, window, seed).indices(torch.from_numpy(numbers)).numpy()
    assert (again == shown.reshape(-1)[numbers]).all()
    owner = np.repeat(np.arange(len(blocks)), blocks)
    for start in range(0, length, window):  # windows begin where a block does, so a stretch of as many samples meets two
        met = np.unique(owner[shown[1, start : start + window]])
        assert blocks[met].sum() <= 2 * (window + blocks.max())


def test_a_window_is_shuffled_well():
    blocks = np.full(100, 100)
    shown = WindowedOrder(blocks, 1000, 0).indices(torch.arange(10_000)).numpy()
    assert len(np.unique(shown[:1000] // 100)) == 10
    assert (np.diff(shown) == 1).sum() < 40  # 10 are expected of windows of 1,000
    first, last = shown[:500], shown[500:1000]
    assert abs(np.mean(first % 100) - np.mean(last % 100)) < 8  # of each block's rows both halves show the same
    assert len(np.unique(first // 100)) == len(np.unique(last // 100)) == 10


def test_what_comes_next_is_known_ahead():
    order = WindowedOrder(np.full(20, 10), 50, 3)
    for number in (0, 60, 199, 390):
        _, ahead = order.ahead(number)
        window = number // 50 * 50
        needed = order.indices(torch.arange(window, window + 100)).numpy() // 10
        assert list(dict.fromkeys((ahead // 10)[:5])) == list(ahead[:5] // 10) and set(ahead // 10) == set(needed)


def test_the_step_audit_knows_windows():
    numbers, blocks = np.arange(4000), np.full(500, 200)
    rows = WindowedOrder(blocks, 2000, 0).indices(torch.from_numpy(numbers)).numpy()

    def found(rows, window):
        return list(check_rows(1, rows, numbers, 100_000, np.zeros(0, np.int64), False, window))

    assert found(rows, 2000) == [] != found(rows, None)
    in_blocks = (np.random.default_rng(0).permutation(500)[:, None] * 200 + np.arange(200)).reshape(-1)[:4000]
    assert found(in_blocks, 2000) != []


# ---- the images


def test_the_same_images_and_labels_as_packed(folder, load):
    packed, streamed = load(folder, streaming=False), load(folder, shuffle_window=30)
    assert packed.labels is not None and (packed.labels == streamed.labels).all()
    assert streamed.class_names == ["ant", "bee"] and len(streamed) == SHARDS * ROWS
    indices = np.random.default_rng(0).permutation(len(packed))
    crop = np.random.default_rng(1).random((len(indices), 2), np.float32)
    assert (packed.fetch(indices, crop) == streamed.fetch(indices, crop)).all()
    assert streamed.blocks().tolist() == [10, 10, 5] * SHARDS
    few = load(folder, max_train_images=33)
    assert len(few) == 33 and few.blocks().tolist() == [10, 10, 5, 8]
    assert (few.fetch([32]) == packed.fetch([32])).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_updates_are_the_same_however_they_are_split_and_where_they_begin(num_workers, folder, load, monkeypatch):
    monkeypatch.setattr(loader, "_BLOCK", 64)  # of which the order is computed at once
    images = load(folder)
    order = WindowedOrder(images.blocks(), 30, 0)

    def update(step, processes, accumulation):
        parts = []
        for process in range(processes):
            split = BatchSplit(8 // processes // accumulation, accumulation, process, processes)
            workers = num_workers if (processes, step) == (2, 11) else 0
            parts.append(list(training_batches(images, order, split, range(step, step + 1), num_workers=workers)))
        micro_batches = [part[turn] for turn in range(accumulation) for part in parts]
        return torch.cat([batch["images"] for batch in micro_batches]), torch.cat([batch["labels"] for batch in micro_batches])

    for step in (0, 11):  # the second one is in the second pass
        whole = update(step, 1, 1)
        for processes, accumulation in ((2, 1), (4, 1), (2, 2)):
            for first, second in zip(whole, update(step, processes, accumulation)):
                assert torch.equal(first, second)


def test_held_out_images_are_not_trained_on(folder, load):
    images = load(folder)
    training, validation = split_validation(images, 20, 0)
    rows = np.concatenate([part.dataset_rows(np.arange(len(part))).numpy() for part in (training, validation)])
    assert len(validation) == 20 and sorted(rows) == list(range(len(images)))
    assert training.blocks().sum() == len(training)
    shown = WindowedOrder(training.blocks(), 30, 0).indices(torch.arange(len(training)))
    assert len(shown.unique()) == len(training)
    assert content_fingerprint(images) == content_fingerprint(load(folder))


def test_images_that_cannot_be_decoded(tmp_path, load):
    folder = write_shards(tmp_path / "shards", damaged=(12, 13), empty=(30,))
    packed = load(folder, streaming=False, on_bad_image="replace")
    streamed = load(folder, on_bad_image="replace")
    indices = np.arange(len(packed))
    assert (packed.fetch(indices) == streamed.fetch(indices)).all() and (packed.shown(indices) == streamed.shown(indices)).all()
    assert packed.replacements() == streamed.replacements() == {12: 14, 13: 14, 30: 31}
    with pytest.raises(UserError, match=r"at row 12, column 'image' of train-00000.parquet"):
        load(folder).fetch([12])


@pytest.mark.parametrize("kind", ["texts", "structs"])
def test_images_that_a_column_names_begin_at_its_file_and_are_read_again_when_they_change(kind, tmp_path, load):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "shards" / "photos").mkdir(parents=True)
    names = [f"photos/{number}.png" for number in range(12)]
    for number, name in enumerate(names):
        (tmp_path / "shards" / name).write_bytes(png(number))
    column = names if kind == "texts" else [{"bytes": None, "path": name} for name in names]
    pq.write_table(pa.table({"image": column}), tmp_path / "shards" / "train.parquet", row_group_size=5)
    how = {} if kind == "texts" else {"image_column": "image"}
    before = load(tmp_path / "shards" / "train.parquet", **how)
    pixels = before.fetch(np.arange(12))
    assert (pixels == load(tmp_path / "shards" / "train.parquet", streaming=False, **how).fetch(np.arange(12))).all()
    assert load(tmp_path / "shards" / "train.parquet", **how).fingerprint == before.fingerprint
    (tmp_path / "shards" / names[7]).write_bytes(png(99))
    os.utime(tmp_path / "shards" / names[7], (1, 1))
    changed = load(tmp_path / "shards" / "train.parquet", **how).fetch(np.arange(12))
    assert (changed != pixels).any(axis=(1, 2, 3)).nonzero()[0].tolist() == [7]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"shuffle_window": 75, "cache_limit": "10kB"}, "two windows"),
        ({"dataset_split": "test"}, "has no such split"),
        ({"image_column": "photo"}, "no such column"),
        ({"label_column": "kind"}, "no such column"),
    ],
)
def test_what_is_wrong_is_said_in_two_lines(options, words, folder, load):
    with pytest.raises(UserError, match=words) as caught:
        load(folder, **options)
    assert len(str(caught.value).splitlines()) == 2


def test_sources_that_cannot_be_streamed(tmp_path, load):
    for name in ("photo.png", "photo.csv"):
        (tmp_path / name).write_bytes(png(0))
    for name in (tmp_path, tmp_path / "photo.csv"):
        with pytest.raises(UserError, match="reads parquet, tar or arrow files"):
            load(name)


# ---- other formats than parquet


def write_tars(folder, numbers, files=lambda number: {"png": png(number), "cls": str(number % 2).encode()}):
    """Two webdataset shards."""
    folder.mkdir()
    for shard, part in enumerate(np.array_split(np.array(numbers), 2)):
        with tarfile.open(folder / f"train-{shard:05}.tar", "w") as archive:
            archive.addfile(tarfile.TarInfo("samples/.hidden"))
            for number in part.tolist():
                for ending, data in files(number).items():
                    member = tarfile.TarInfo(f"samples/{number:06}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return folder


def as_saved(folder, tmp_path):
    import datasets

    dataset = datasets.load_dataset("parquet", data_files=f"{folder}/*.parquet", cache_dir=tmp_path / "prepared", split="train")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([3])}).save_to_disk(
        tmp_path / "saved", num_shards={"train": 2, "test": 1}
    )
    return tmp_path / "saved"


@pytest.mark.parametrize("kind", ["tar", "tar of a web server", "saved", "arrow"])
def test_other_formats_give_the_same_as_packed(kind, folder, load, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_formats, "_SAMPLES", 7)
    name = write_tars(tmp_path / "tars", range(40)) if kind.startswith("tar") else as_saved(folder, tmp_path)
    packed = load(name, streaming=False)
    with contextlib.ExitStack() as stack:
        if kind == "arrow":
            name = name / "train"
            (name / "state.json").unlink()
        if kind == "tar of a web server":
            address, _, _ = stack.enter_context(web_server(name))
            name = f"{address}/train-{{00000..00001}}.tar"
        images = load(name)
        order = np.random.default_rng(0).permutation(len(packed))
        assert (images.fetch(order) == packed.fetch(order)).all() and (images.labels == packed.labels).all()
    assert len(images) == len(packed) == (40 if kind.startswith("tar") else SHARDS * ROWS)
    assert images.class_names == packed.class_names and len(images.store.starts) > 2


def test_splits_that_were_saved(folder, load, tmp_path):
    name = as_saved(folder, tmp_path)
    assert len(load(name, dataset_split="test")) == 1
    with pytest.raises(UserError, match=r"--dataset_split valid: .*\n.*'train', 'test'"):
        load(name, dataset_split="valid")


def jpg(number):
    return {"jpg": png(number)}  # what it holds counts


def test_tars_with_other_images_texts_and_gaps(load, tmp_path):
    def files(number):
        image = {} if number == 5 else {"jpg" if number % 3 else "PNG": png(number)}
        return image | {"json": json.dumps({"kind": "ab"[number % 2], "size": [1], "jpg": 1, "caption": None}).encode()}

    folder = write_tars(tmp_path / "tars", range(13), files)  # the second one begins with another kind of image
    images = load(folder, label_column="kind", on_bad_image="replace", max_bad_images=1)
    assert images.class_names == ["a", "b"] and images.labels.tolist() == [*([0, 1] * 6), 0]
    assert (images.fetch([6, 7]) == [shown(6), shown(7)]).all()
    images.fetch([5])
    assert len(images.bad_images) == 1


def shown(number):
    pixels, _ = ImagePreparation(Size(8, 8), 3, False, "white", 255)(ImageFile(png(number), None, ""))
    return pixels[:, :8, 1:9]


def test_a_mask_does_not_stand_for_an_image_nor_a_text_for_a_sample(load, tmp_path):
    def files(number):
        masked = {"seg.png": png(100 + number), "cls": b"cow" if number % 2 else b"ant"}
        return {"txt": b"read me"} if number == 99 else masked if number == 3 else masked | jpg(number)

    images = load(write_tars(tmp_path / "tars", [*range(8), 99], files), on_bad_image="replace", max_bad_images=1)
    assert (images.fetch([4]) == shown(4)).all() and images.class_names == ["ant", "cow"] and len(images) == 8
    images.fetch([3])
    assert len(images.bad_images) == 1
    with pytest.raises(UserError, match="this column has no images"):
        load(tmp_path / "tars", image_column="cls")


def test_labels_of_two_types_in_tars(load, tmp_path):
    def files(number):
        return jpg(number) | {"json": json.dumps({"label": number if number < 6 else "six"}).encode()}

    with pytest.raises(UserError, match="labels in label are not of one type") as caught:
        load(write_tars(tmp_path / "tars", range(12), files))
    assert len(str(caught.value).splitlines()) == 2


def test_hard_links_and_empty_tars(load, tmp_path):
    folder = write_tars(tmp_path / "tars", range(4))
    with tarfile.open(folder / "train-00002.tar", "w") as archive:
        for name, link in (("a.png", None), ("b.png", "a.png")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.LNKTYPE, link) if link else (tarfile.REGTYPE, "")
            member.size = 0 if link else len(png(9))
            archive.addfile(member, io.BytesIO(png(9)))
    tarfile.open(folder / "train-00003.tar", "w").close()
    images = load(folder)
    assert len(images) == 6 and (images.fetch([4]) == images.fetch([5])).all() and (images.fetch([5]) == shown(9)).all()


@pytest.mark.parametrize("damage", ["first header", "header in the middle", "cut between samples"])
def test_damaged_tars(load, tmp_path, damage):
    folder = write_tars(tmp_path / "tars", range(24))
    path = folder / "train-00001.tar"
    with tarfile.open(path) as archive:
        start = archive.getmembers()[9].offset
    data = bytearray(path.read_bytes())
    data[{"first header": 0}.get(damage, start)] ^= 1
    path.write_bytes(data[:start] if damage == "cut between samples" else data)
    with pytest.raises(UserError, match=r"cannot read the shard .*train-00001.tar") as caught:
        load(folder)
    assert len(str(caught.value).splitlines()) == 2


def test_compressed_tars(load, tmp_path):
    path = write_tars(tmp_path / "tars", range(4)) / "train-00001.tar"
    path.rename(f"{path}.gz")
    with pytest.raises(UserError, match="uncompress it"):
        load(f"file://{path}.gz")


def test_saved_elsewhere_without_what_datasets_left_there(folder, load, tmp_path):
    saved = as_saved(folder, tmp_path)
    here = load(saved)
    for split in ("train", "test"):
        shutil.copy(next((saved / split).glob("data-*.arrow")), saved / split / "cache-0123.arrow")
    assert len(load(f"file://{saved}")) == len(here) == SHARDS * ROWS
    assert len(load(f"file://{saved}", dataset_split="test")) == 1
    with pytest.raises(UserError, match="no such split"):
        load(saved / "train", dataset_split="test")
    path = next((saved / "train").glob("data-*.arrow"))
    path.write_bytes(path.read_bytes()[:-8])  # its end mark
    with pytest.raises(UserError, match=r"cannot read the shard .*ends too early"):
        load(saved)


def test_a_tar_elsewhere_is_read_in_large_parts(tmp_path):
    from fsspec.implementations.memory import MemoryFile

    folder = write_tars(tmp_path / "tars", range(40))
    reads = []

    class Counted(MemoryFile):
        def readinto(self, buffer):
            reads.append(len(buffer))
            return super().readinto(buffer)

    shard = shards.Shard("memory://x.tar", 0, "")
    with pytest.MonkeyPatch.context() as patch:
        data = (folder / "train-00000.tar").read_bytes()
        patch.setattr(shard_formats, "open_shard", lambda _: Counted(None, "", data))
        assert len(shard_formats.Tar().index(shard, [])) == 20
    assert len(reads) <= 4


# ---- the disk


def test_blocks_are_kept_within_the_limit_and_made_again(tmp_path):
    prepare = ImagePreparation(Size(8, 8), 3, True, "white", 255)
    cache = BlockCache(tmp_path, "ab", prepare, 5000)
    made = []

    def make(block):
        made.append(block)
        return [ImageFile(png(block), None, "x") for _ in range(4)]

    def read(block):
        return cache.open(block, lambda: make(block), "x.parquet").images[3]

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
        assert sum(stored.size for stored, _ in store._open.values()) <= max(1000, store.block(0).size)
        assert store._mapped == sum(stored.size for stored, _ in store._open.values())
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


@pytest.mark.parametrize("text, number", [("50GB", 50 * 10**9), ("1.5 tb", 1500 * 10**9), ("700", 700), ("3MB", 3 * 10**6)])
def test_sizes_of_files(text, number):
    assert read_bytes(text) == number


def test_what_is_no_size_of_files():
    for text in ("much", "-3GB", "0", "3 XB"):
        with pytest.raises(ValueError):
            read_bytes(text)


# ---- shards that fail


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
        worker = pickle.loads(pickle.dumps(images.store))
        asked.clear()
        faults[:] = [500] * 99
        order = SimpleNamespace(indices=lambda numbers: numbers % 4 + 12, seed=0)  # of one block
        samples = loader._Samples(images, order, True, None)
        [error] = samples.__getitems__([range(2), range(2, 4)])
        assert str(error).startswith("cannot read the shard") and len(asked) == 3
        os.utime(next((tmp_path / "cache").rglob("*.lost")), (worker._begun + 1,) * 2)  # clocks of files are coarse
        for begins, tries in ((0, 1), (9999, 3)):  # a process of that run, and a run that is started again, with the same cache
            store = pickle.loads(pickle.dumps(worker))
            store._begun += begins
            asked.clear()
            with pytest.raises(UserError, match="cannot read the shard"):
                store.fetch(np.arange(12, 16), None)
            assert len(asked) == tries
        asked.clear()
        faults[:] = [500] * 4  # three tries for one block of the first shard, and one for another; one is there already
        shown, rows = others.fetch(np.arange(50)), np.arange(50)
        assert asked[:4] == ["train-00000.parquet"] * 4 and sorted(others.bad_images) == list(range(10, 25))
    assert (shown == load(folder, streaming=False).fetch(np.where((rows < 10) | (rows >= 25), rows, 25))).all()


@contextlib.contextmanager
def web_server(folder, faults=()):
    """Serves parts of the files of `folder`; the first requests that the test lets fail meet `faults`, one each."""
    faults, asked = list(faults), []

    class Handler(Answers):
        def do_GET(self):
            path = folder / self.path.strip("/")
            asked.append(path.name)
            fault = faults.pop(0) if faults else None
            if fault == "stall":
                time.sleep(0.5)
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                return self.connection.close()
            if fault in (500, 404) or not path.is_file():
                return self.reply(fault or 404, b"")
            data, stamp = path.read_bytes(), {"ETag": f'"{path.stat().st_mtime_ns}"'}
            if fault == "whole":
                return self.reply(200, data, stamp)
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part = data[first : last + 1]
            self.reply(206, part, stamp | {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"}, fault and 3)
            self.close_connection = fault == "short"

        def handle_one_request(self):
            with contextlib.suppress(OSError, ValueError):  # of the connections that the test cuts
                super().handle_one_request()

    with serving(Handler) as address:
        yield address, faults, asked


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
            "import sys; from utils.data.dataset import load_images; from utils.options.flags import DataOptions\n"
            f"o = dict(dataset_name='me/shards', resolution=8, cache_dir={str(tmp_path)!r}, streaming=True)\n"
            "images = load_images(DataOptions(**o)); print(len(images), images.fetch([60]).sum())"
        )
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=REPOSITORY)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["75", str(load(folder, streaming=False).fetch([60]).sum())]

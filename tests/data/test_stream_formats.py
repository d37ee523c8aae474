"""Streams of other formats than parquet: tars, and what datasets saved."""

import contextlib
import io
import json
import shutil
import tarfile

import numpy as np
import pytest
from shard_files import ROWS, SHARDS, png, web_server, write_tars

from utils.core.errors import UserError
from utils.data import shard_formats
from utils.data.decode import ImageFile, ImagePreparation, Size

pytest_plugins = ("shard_fixtures",)


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
    with pytest.raises(UserError, match=r"--dataset_split valid: .*\n.*'train', 'test'"):
        load(saved, dataset_split="valid")
    with pytest.raises(UserError, match="no such split"):
        load(saved / "train", dataset_split="test")
    path = next((saved / "train").glob("data-*.arrow"))
    path.write_bytes(path.read_bytes()[:-8])  # its end mark
    with pytest.raises(UserError, match=r"cannot read the shard .*ends too early"):
        load(saved)

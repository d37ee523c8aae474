"""Folders of images and archives of them: what is used, what is left out and said, classes, splits and metadata."""

import io
import json
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from utils.core.errors import UserError
from utils.data import stored_files
from utils.data.bad_images import UndecodableImage
from utils.data.dataset import content_fingerprint

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)


def encoded(number: int, image_format="PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS[number % 6]).save(file, image_format)
    return file.getvalue()


def write(folder: Path, *names: str) -> Path:
    """Files whose first digit tells their image."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        digits = [character for character in path.name if character.isdigit()]
        path.write_bytes(encoded(int(digits[0])) if digits else b"no image")
    return folder


def archive(folder: Path, path: Path, prefix: str = "") -> Path:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
            for file in files:
                made.write(file, f"{prefix}{file.relative_to(folder)}")
    else:
        with tarfile.open(path, "w") as made:
            for file in files:
                made.add(file, f"{prefix}{file.relative_to(folder)}")
    return path


@pytest.fixture
def load(opened):
    return lambda source, **options: opened(train_data_dir=str(source), **options)


def shown(images) -> list[int]:
    """Which of PIXELS each image is."""
    fetched = images.fetch(range(len(images))).transpose(0, 2, 3, 1)
    return [next(n for n in range(6) if np.array_equal(image, PIXELS[n])) for image in fetched]


def said(images) -> list[str]:
    return [note for note in images.notes if not note.startswith("packed images: ")]


@pytest.mark.parametrize("prefix", ["", "./photos/"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_is_the_same_data_as_its_folder(kind, prefix, load, tmp_path):
    folder = write(tmp_path / "photos", "cat/1.png", "cat/3.PNG", "dog/0.png", "dog/2.png", "notes.txt", "dog/.5.png")
    expected = load(folder)
    assert expected.class_names == ["cat", "dog"] and expected.labels.tolist() == [0, 0, 1, 1]
    assert shown(expected) == [1, 3, 0, 2]
    folders = "images of 2 folders are used: cat (2), dog (2); to use one alone, give that folder"
    assert said(expected) == [folders, "4 of 6 files used; left out: 1 hidden, 1 .txt"]
    path = archive(folder, tmp_path / f"p.{kind}", prefix)
    for options in ({}, {"cache_images": "no"}):
        images = load(path, **options)
        assert content_fingerprint(images) == content_fingerprint(expected) and images.class_names == expected.class_names
        assert said(images) == said(expected)
    if kind == "zip":
        assert shown(load("ignored", dataset_name=str(path))) == [1, 3, 0, 2]


def test_damaged_archives_and_other_files_are_one_clear_line(load, tmp_path):
    folder = write(tmp_path / "photos", *(f"{kind}/{n}.png" for kind in ("cat", "dog") for n in range(3)))
    for kind in ("zip", "tar"):
        whole = archive(folder, tmp_path / f"whole.{kind}").read_bytes()
        for cut in (100, len(whole) // 2, len(whole) // 2 // 512 * 512):
            (tmp_path / f"cut.{kind}").write_bytes(whole[:cut])
            with pytest.raises(UserError, match=rf"cannot read the archive .*cut\.{kind}") as caught:
                load(tmp_path / f"cut.{kind}")
            assert str(caught.value).count("\n") <= 1
    (tmp_path / "photos.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match=r"photos\.tar\.gz is neither a folder .* \.zip or \.tar file of images\nunpack it"):
        load(tmp_path / "photos.tar.gz")
    (tmp_path / "other.zip").write_bytes((tmp_path / "whole.tar").read_bytes())
    with pytest.raises(UserError, match="not a zip file"):
        load(tmp_path / "other.zip")
    with zipfile.ZipFile(tmp_path / "text.zip", "w") as made:
        made.writestr("notes.txt", "")
    with pytest.raises(UserError, match=r"text\.zip has no images; 0 of 1 files used; left out: 1 \.txt"):
        load(tmp_path / "text.zip")


def test_a_damaged_member_is_named_or_replaced(load, tmp_path):
    path = archive(write(tmp_path / "photos", "0.png", "1.png", "2.png"), tmp_path / "photos.zip")
    damaged = bytearray(path.read_bytes())
    damaged[60] ^= 0xFF  # within the first image
    path.write_bytes(damaged)
    with pytest.raises(UndecodableImage, match=r"zip://0\.png::.*photos\.zip \(row 0"):
        load(path)
    assert shown(load(path, on_bad_image="replace")) == [1, 1, 2]


def test_nothing_is_left_out_silently_and_links_are_followed(load, tmp_path):
    folder = write(
        tmp_path / "photos",
        "cat/1.png",
        "cat/x.heic",
        "cat/y.tar.gz",
        "cat/without",
        "Thumbs.db",
        ".hidden/3.png",
        "lost+found/4.png",
        "@eaDir/1.png/thumb.png",
    )
    (folder / "cat" / "4.avif").write_bytes(encoded(4, "AVIF"))
    (folder / "dog").symlink_to(write(tmp_path / "elsewhere", "2.png"))
    (folder / "cat" / "back").symlink_to(folder)
    (folder / "cat" / "gone.png").symlink_to(tmp_path / "nowhere")
    (folder / "cat" / "itself").symlink_to("itself")
    images = load(folder)
    assert len(images) == 3 and images.class_names == ["cat", "dog"] and images.labels.tolist() == [0, 0, 1]
    note = said(images)[-1]
    assert note.startswith("3 of 10 files used; left out: ")
    for reason in ("1 link to a folder above it", "2 link to nothing", "1 .heic (needs pillow-heif)", "1 .gz (unpack it)"):
        assert reason in note
    assert "1 without a suffix" in note and "1 .db" in note


def test_archives_in_a_folder_count_as_folders_unless_they_are_unpacked_beside(load, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    archive(write(tmp_path / "a", "0.png", "1.png"), folder / "cats.zip")
    archive(write(tmp_path / "b", "2.png"), folder / "dogs.tar")
    images = load(folder)
    assert images.class_names == ["cats", "dogs"] and shown(images) == [0, 1, 2] and len(said(images)) == 1
    write(folder / "cats", "0.png", "1.png")
    images = load(folder)
    assert shown(images) == [0, 1, 2] and said(images)[1] == "3 of 4 files used; left out: 1 .zip beside its unpacked folder"


@pytest.mark.parametrize("inside", ["", "photos/"])
def test_folders_named_as_splits_are_splits(inside, load, tmp_path):
    folder = write(tmp_path / "data", *(f"{inside}{name}" for name in ("train/a/0.png", "train/b/1.png", "Val/b/2.png")))
    images = load(folder)
    assert shown(images) == [0, 1] and images.class_names == ["a", "b"]
    start = f"{inside}train/ (2 images) and {inside}Val/ (1 images) are splits; used: train (--dataset_split chooses"
    assert said(images)[0].startswith(start)
    validation = load(folder, dataset_split="validation")
    assert shown(validation) == [2] and validation.class_names == ["a", "b"] and validation.labels.tolist() == [1]
    assert shown(load(folder, dataset_split="train[1:]+validation")) == [1, 2]
    assert shown(load(folder, dataset_split="all")) == [2, 0, 1]
    with pytest.raises(UserError, match=r"--dataset_split test: Unknown split \"test\".*\['train', 'validation'\]"):
        load(folder, dataset_split="test")
    write(folder, f"{inside}plane/3.png")  # now they are classes
    assert said(load(folder, dataset_split="train"))[1].startswith("the folders do not become classes")


@pytest.mark.parametrize("kind", ["folder", "zip"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_metadata_names_the_images_and_their_classes(suffix, kind, load, tmp_path):
    import pyarrow as pa
    from pyarrow import csv, parquet

    folder = write(tmp_path / "data", *(f"in/{n}.png" for n in range(5)))
    rows = {"file_name": ["in/3.png", "./in/0.png", "in/4.png", "in/1.png"], "label": ["NA", "ant", "ant", "NA"]}
    if suffix == "csv":
        csv.write_csv(pa.table(rows), folder / "metadata.csv")
    elif suffix == "jsonl":
        lines = [json.dumps(dict(zip(rows, row))) + "\n" for row in zip(*rows.values())]
        (folder / "metadata.jsonl").write_text("".join(lines))
    else:
        parquet.write_table(pa.table(rows), folder / "metadata.parquet")
    images = load(folder if kind == "folder" else archive(folder, tmp_path / "data.zip"))
    assert shown(images) == [3, 0, 4, 1] and images.class_names == ["NA", "ant"] and images.labels.tolist() == [0, 1, 1, 0]
    told = "the 2 values of the column 'label' become classes (--label_column chooses)"
    assert said(images) == ["4 of 5 files used; left out: 1 not in the metadata", told]


def test_metadata_that_cannot_be_used_is_one_clear_line(load, tmp_path):
    folder = write(tmp_path / "data", "0.png", "1.png")
    cases = [
        ("file,label\n0.png,a\n", r"metadata\.csv has no column file_name\n.*file, label"),
        ("file_name\n../0.png\n", r"row 0: file_name is .*, which is not a file in the same folder"),
        ("file_name\nhttp://example.org/0.png\n", r"row 0: file_name is .*, which is not a file in the same folder"),
        ("file_name,label\n0.png\n", r"cannot read .*metadata\.csv: ArrowInvalid"),
        ("file_name\n0.png\n7.png\n", r"1 file of the metadata is not there: 7\.png"),
    ]
    for text, message in cases:
        (folder / "metadata.csv").write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            load(folder)
        assert str(caught.value).count("\n") <= 1


def test_images_of_two_metadata_files_are_those_of_both_and_none_twice(load, tmp_path):
    folder = write(tmp_path / "data", "0.png", "in/1.png", "in/2.png")
    (folder / "metadata.csv").write_text("file_name,label\nin/1.png,0\nin/2.png,1\n")
    (folder / "metadata.jsonl").write_text('{"file_name": "0.png", "label": 1}\n')
    images = load(folder)
    assert shown(images) == [1, 2, 0] and images.labels.tolist() == [0, 1, 1]
    (folder / "metadata.jsonl").write_text('{"file_name": "in/2.png"}\n{"file_name": "in/1.png"}\n')
    images = load(folder)
    assert shown(images) == [1, 2] and images.labels.tolist() == [0, 1]
    assert said(images)[0] == "metadata.csv is used, and metadata.jsonl, which lists no other images, is not"
    (folder / "metadata.jsonl").write_text('{"caption": "of something else"}\n')
    (folder / "in" / "metadata.csv").write_text("file_name\n2.png\n1.png\n")
    with pytest.raises(UserError, match=r"^in/metadata\.csv and metadata\.csv in .* both list in/[12]\.png\nleave it in one"):
        load(folder)


def test_names_that_no_table_can_hold_are_one_clear_line(load, tmp_path):
    path = os.fsencode(tmp_path) + b"/data/\xff0.png"
    (tmp_path / "data").mkdir()
    with open(path, "wb") as file:
        file.write(encoded(0))
    with pytest.raises(UserError, match="not UTF-8\nrename this file"):
        load(tmp_path / "data")


def test_the_cache_of_an_archive_follows_its_contents_not_its_spelling(load, tmp_path, monkeypatch):
    path = archive(write(tmp_path / "photos", "0.png"), tmp_path / "photos.zip")
    first = load(path)
    monkeypatch.chdir(tmp_path)
    assert load("photos.zip").fingerprint == load("./photos/../photos.zip").fingerprint == first.fingerprint
    archive(write(tmp_path / "photos", "1.png"), path)
    assert len(load(path)) == 2
    folder = load(tmp_path / "photos").fingerprint
    assert load("photos/").fingerprint == folder
    shutil.copytree(tmp_path / "photos", tmp_path / "copy")
    assert load("copy").fingerprint != folder  # other files, which may change by themselves
    assert content_fingerprint(load("copy")) == content_fingerprint(load("photos"))


class Answers:
    """A stand-in for the session that asks web servers: a list of answers, each an image's number, a status or an error."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def __call__(self):
        return self

    def get(self, address, timeout):
        import httpx2

        self.asked.append(address)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        status, content = (200, encoded(answer)) if answer < 100 else (answer, b"")
        return httpx2.Response(status, content=content, request=httpx2.Request("GET", address))


@pytest.mark.parametrize("column", ["image_url", "image"])
def test_images_at_web_addresses(column, load, tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    def answer(*answers):
        session = Answers(*answers)
        monkeypatch.setattr(huggingface_hub, "get_session", session)
        return session

    addresses = ["https://example.org/0", "https://example.org/1"]
    datasets.Dataset.from_dict({column: addresses}).to_parquet(tmp_path / "a.parquet")
    monkeypatch.setattr(stored_files, "_WAITS", (0, 0))
    monkeypatch.setattr("utils.data.cache._REMOTE_WORKERS", 1)
    options = {"dataset_name": str(tmp_path / "a.parquet")}
    for answers, message in [
        ([2, 404], r"cannot decode the image https://example\.org/1 .*answers 404 Not Found"),
        ([2, 500, 503, 500], r"cannot read the image https://example\.org/1 .*500 Internal Server Error"),
        ([OSError("cut")] * 3, r"cannot read the image https://example\.org/0 .*cut"),
    ]:
        session = answer(*answers)
        with pytest.raises(UserError, match=message):
            load(None, **options)
        assert session.answers == []
    answer(500, 2, OSError("cut"), 3)
    assert shown(load(None, **options)) == [2, 3]
    assert shown(load(None, **options)) == [2, 3]  # packed


def test_relative_paths_begin_at_the_file_that_holds_them(load, tmp_path, monkeypatch):
    import datasets

    write(tmp_path / "set", "pictures/0.png", "pictures/1.png")
    made = datasets.Dataset.from_dict({"image": ["pictures/1.png", "pictures/0.png"]})
    made.to_parquet(tmp_path / "set" / "a.parquet")
    made.to_json(tmp_path / "set" / "a.jsonl")
    made.to_parquet(tmp_path / "set" / "folder" / "train.parquet")
    write(tmp_path / "set" / "folder", "pictures/0.png", "pictures/1.png")
    made.save_to_disk(tmp_path / "saved")
    write(tmp_path / "saved", "pictures/0.png", "pictures/1.png")
    for cwd in (tmp_path, tmp_path / "set"):
        monkeypatch.chdir(cwd)
        for name in ("set/a.parquet", "set/a.jsonl", "set/folder", "saved"):
            assert shown(load(None, dataset_name=str(tmp_path / name), cache_images="no")) == [1, 0]
    shutil.move(tmp_path / "set" / "a.parquet", tmp_path / "b.parquet")
    with pytest.raises(UserError, match=rf"cannot decode the image {tmp_path}/pictures/1\.png"):
        load(None, dataset_name=str(tmp_path / "b.parquet"), cache_images="no").fetch([0])

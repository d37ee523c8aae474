"""Folders as other tools write them: files beside the images, classes one level up or in a file, tables of other dialects."""

import csv
import gzip
import io
import json
import tarfile
import unicodedata
import zipfile
import zlib

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageOps
from pyarrow import parquet
from test_image_folder import encoded, said, shown, write

from utils.core.errors import UserError


@pytest.fixture
def load(opened):
    return lambda source, by="train_data_dir", **options: opened(**{by: str(source)}, **options)


@pytest.mark.parametrize("by", ["train_data_dir", "dataset_name"])
@pytest.mark.parametrize(("suffix", "captions"), [(".txt", 3), (".json", 5), (".xml", 1), (".md", 3), (".caption", 1)])
@pytest.mark.parametrize("folders", [("",), ("cat/", "dog/")])
def test_files_beside_the_images_are_left_out_and_counted(by, suffix, folders, captions, load, tmp_path):
    for folder in folders:
        write(tmp_path / "set", *(f"{folder}{n}.png" for n in range(3)))
        for number in range(captions):
            (tmp_path / "set" / folder / f"{number}{suffix}").write_text('{"a": 1}' if suffix == ".json" else "a cat")
    images = load(tmp_path / "set", by)
    assert shown(images) == [0, 1, 2] * len(folders)
    assert images.class_names == (["cat", "dog"] if len(folders) > 1 else None)
    count = captions * len(folders)
    assert f"{3 * len(folders)} of {3 * len(folders) + count} files used; left out: {count} {suffix}" in said(images)


def test_a_table_beside_pictures_stays_a_table(load, tmp_path):
    write(tmp_path / "set", "pictures/0.png", "pictures/1.png", "pictures/2.png")
    (tmp_path / "set" / "train.jsonl").write_text('{"image": "pictures/2.png"}\n{"image": "pictures/0.png"}\n')
    assert shown(load(tmp_path / "set", "dataset_name", cache_images="no")) == [2, 0]


@pytest.mark.parametrize(
    ("names", "classes", "labels"),
    [
        (("n01/images/0.png", "n02/images/1.png", "n02/images/2.png"), ["n01", "n02"], [0, 1, 1]),
        (("train/n01/images/0.png", "train/n02/images/1.png", "val/images/2.png"), ["n01", "n02"], [0, 1]),
        (("pets/cat/0.png", "wild/fox/1.png"), ["cat", "fox"], [0, 1]),
        (("pets/cat/0.png", "wild/cat/1.png"), ["pets", "wild"], [0, 1]),
        (("all/images/0.png", "all/images/1.png"), None, None),
        (("cat/train/0.png", "cat/val/1.png", "dog/train/2.png"), ["cat", "dog"], [0, 0, 1]),
        (("train2017/0.png", "train2017/1.png", "val2017/2.png"), None, None),
        (("train_256/cat/0.png", "train_256/dog/1.png", "val_256/cat/2.png"), ["cat", "dog"], [0, 1]),
        (("10_dog/0.png", "5_cat/1.png", "5_cat/2.png"), ["10_dog", "5_cat"], [0, 1, 1]),
        (("img/10_dog/0.png", "reg/1_dog/1.png"), ["10_dog", "1_dog"], [0, 1]),
        (("0_air/0.png", "1_car/1.png"), ["0_air", "1_car"], [0, 1]),
        (("part-00000/0.png", "part-00001/1.png", "part-00001/2.png"), None, None),
        (("cat/cat/0.png", "dog/dog/1.png"), ["cat", "dog"], [0, 1]),
    ],
)
def test_the_classes_are_the_folders_that_divide_the_images(names, classes, labels, load, tmp_path):
    images = load(write(tmp_path / "set", *names))
    assert images.class_names == classes and (labels is None or images.labels.tolist() == labels)


def numbered(folder, sizes, digits=5, first=0):
    for number, size in enumerate(sizes, first):
        write(folder, *(f"{number:0{digits}}/img{number}{image}.png" for image in range(size)))
    return folder


def test_folders_that_are_numbered_as_parts_are_no_classes(load, tmp_path):
    images = load(numbered(tmp_path / "parts", (4, 4, 2)))
    assert images.labels is None and any("00000 to 00002 look like parts" in note for note in said(images))
    for name, (sizes, digits, first) in {
        "uneven": ((4, 3, 4), 5, 0),
        "growing": ((3, 3, 4), 5, 0),
        "short": ((3, 3, 3), 2, 0),
        "from 7": ((3, 3, 3), 5, 7),
    }.items():
        images = load(numbered(tmp_path / name, sizes, digits, first))
        assert len(images.class_names) == 3, name
    for beside in ("{:05}.parquet", "{:05}_stats.json"):  # of downloads, of which some failed
        folder = numbered(tmp_path / beside, (3, 2, 4))
        for number in range(3):
            (folder / beside.format(number)).touch()
        assert load(folder).labels is None, beside
    images = load(numbered(tmp_path / "digits", (3, 3, 3), 1))
    assert len(images.class_names) == 3 and not any("become" in note for note in said(images))


@pytest.mark.parametrize("zipped", [False, True])
def test_the_classes_of_a_file_of_nvlabs_kind(zipped, load, tmp_path):
    folder = numbered(tmp_path / "set", (3, 3, 1))
    names = [f"{path.parent.name}/{path.name}" for path in sorted(folder.rglob("*.png"))]
    labels = [[name, 7 - place] for place, name in enumerate(names)]
    (folder / "dataset.json").write_text(json.dumps({"labels": labels[::-1]}))
    source = folder
    if zipped:
        source = tmp_path / "set.zip"
        with zipfile.ZipFile(source, "w") as made:
            for path in [folder / "dataset.json", *(folder / name for name in names)]:
                made.write(path, path.relative_to(folder))
    images = load(source)
    names = images.class_names  # 1 to 7
    assert [int(names[label]) for label in images.labels] == [label for _, label in labels[::-1]]
    assert "the classes are those of dataset.json" in said(images)
    (folder / "dataset.json").write_text('{"labels": null}')
    images = load(folder)
    assert images.labels is None and "7 of 8 files used; left out: 1 .json" in said(images)


def table(rows, mark=",", encoding="utf-8") -> bytes:
    file = io.StringIO()
    csv.writer(file, delimiter=mark).writerows([("file_name", "label"), *rows])
    return file.getvalue().encode(encoding)


@pytest.mark.parametrize(
    ("mark", "encoding", "note"),
    [
        (",", "utf-8", None),
        (",", "utf-8-sig", None),
        (";", "utf-8", "metadata.csv was read with semicolons between the columns"),
        ("\t", "utf-8-sig", "metadata.csv was read with tabs between the columns"),
        ("|", "utf-16", "metadata.csv was read as UTF-16 with vertical bars between the columns"),
        (",", "utf-16", "metadata.csv was read as UTF-16 with commas between the columns"),
        ("\t", "utf-16-le", "metadata.csv was read as UTF-16 with tabs between the columns"),
        (",", "utf-16-be", "metadata.csv was read as UTF-16 with commas between the columns"),
    ],
)
def test_dialects_of_tables(mark, encoding, note, load, tmp_path):
    folder = write(tmp_path / "set", "0.png", "1.png", "2.png")
    (folder / "metadata.csv").write_bytes(table([("2.png", 1), ("0.png", 0), ("1.png", 1)], mark, encoding))
    images = load(folder)
    assert shown(images) == [2, 0, 1] and images.labels.tolist() == [1, 0, 1]
    assert said(images) == ([note] if note else [])


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("0.PNG", "0.png"),
        ("0.png", "0.jpg"),
        ("images/0.png", "images\\0.png"),
        ("images/0.png", "./images/0.png"),
        ("images/0.png", "0.png"),
        ("images/0.png", "Images/0.PNG"),
        (unicodedata.normalize("NFD", "é0.png"), "é0.png"),
        ("é0.png", unicodedata.normalize("NFD", "é0.png")),
        ("images/0.png", "/home/somebody/set/images/0.png"),
        ("images/0.png", "C:\\set\\images\\0.png"),
        ("0.png", "0"),
        ("0000.png", "0000"),
        ("0.png", " 0.png "),
        ("é0.png", "%C3%A90.png"),
        ("photos/0.png", "photos.zip/0.png"),
        ("0.png", "file:///home/somebody/0.png"),
    ],
)
def test_names_that_differ_from_those_of_the_files(file, name, load, tmp_path):
    folder = write(tmp_path / "set", file, file.replace("0", "1"))
    (folder / "metadata.csv").write_bytes(table([(name.replace("0", "1"), 1), (name, 0)]))
    images = load(folder)
    assert shown(images) == [1, 0] and images.labels.tolist() == [1, 0]


def test_a_table_in_the_folder_that_its_names_begin_with(load, tmp_path):
    folder = write(tmp_path / "set", "images/0.png", "images/1.png")
    (folder / "images" / "metadata.csv").write_bytes(table([("images/1.png", 1), ("images/0.png", 0)]))
    images = load(folder)
    assert shown(images) == [1, 0]
    assert said(images) == ["2 in the metadata differ from the names of files: images/images/1.png means images/1.png, ..."]


def test_each_table_is_about_its_folder_and_one_of_each_counts(load, tmp_path):
    for part in ("train", "test"):
        folder = write(tmp_path / "set" / part, "images/0.png", "images/1.png")
        (folder / "metadata.csv").write_bytes(table([("1.png", 1), ("../train/images/0.png", 0)][: 1 + (part == "train")]))
    (tmp_path / "set" / "train" / "metadata.jsonl").write_text('{"file_name": "1.png"}\n')
    images = load(tmp_path / "set", dataset_split="all")
    assert shown(images) == [1, 1, 0] and images.labels.tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["cat/0.png", "dog/0.png"], ["train/cat/0.png", "train/dog/0.png"]),
        (["images/cat/0.png", "images/dog/0.png"], ["cat/0.png", "dog/0.png"]),
        (["cat/0.png", "dog/0.png"], ["cat.zip/0.png", "dog.zip/0.png"]),
        (["0.png", "0.bmp"], ["0.PNG", "0.BMP"]),
    ],
)
def test_names_of_which_several_files_have_the_last_part(files, names, load, tmp_path):
    folder = write(tmp_path / "set", *files)
    (folder / "metadata.csv").write_bytes(table([(names[1], 1), (names[0], 0)]))
    images = load(folder)
    assert images.labels.tolist() == [1, 0] and len(images) == 2


def test_names_of_several_folders_where_each_is_one_file(load, tmp_path):
    folder = write(tmp_path / "set", "part1/0.png", "part2/1.png", "part2/2.png")
    (folder / "metadata.csv").write_bytes(table([("2.png", 1), ("0.png", 0)]))
    assert shown(load(folder)) == [2, 0]


@pytest.mark.parametrize(
    ("column", "values", "splits"),
    [
        ("split", ("train", "val", "train"), {"train": [0, 2], "validation": [1], "all": [0, 1, 2]}),
        ("split", ("0", "1", "0"), {"train": [0, 1, 2]}),
        ("is_train", ("1", "0", "1"), {"train": [0, 1, 2]}),
    ],
)
def test_a_column_of_splits_is_used_or_told(column, values, splits, load, tmp_path):
    folder = write(tmp_path / "set", "0.png", "1.png", "2.png")
    rows = "".join(f"{number}.png,{value}\n" for number, value in enumerate(values))
    (folder / "metadata.csv").write_text(f"file_name,{column}\n{rows}")
    for split, numbers in splits.items():
        images = load(folder, dataset_split=split)
        assert shown(images) == numbers
        told = [f"the column {column!r} is not used: the rows of all its values are trained on"]
        assert said(images) == told if len(numbers) == 3 else "in the column 'split' (1 images) are splits" in said(images)[0]


def test_masks_beside_their_images_are_left_out(load, tmp_path):
    folder = write(tmp_path / "set", "0.png", "0-masklabel.png", "1.png", "1_mask.png", "2_mask.png")
    images = load(folder)
    assert shown(images) == [0, 1, 2] and said(images) == ["3 of 5 files used; left out: 2 masks of other images"]


def test_a_folder_that_datasets_takes_for_several_kinds(load, tmp_path):
    for part in ("train", "valid"):
        write(tmp_path / "set" / part, "0.png")
        (tmp_path / "set" / part / "_annotations.coco.json").write_text('{"images": []}')
    assert shown(load(tmp_path / "set", "dataset_name")) == [0]


def test_a_table_beside_an_archive_made_on_windows(load, tmp_path):
    (tmp_path / "set").mkdir()
    with zipfile.ZipFile(tmp_path / "set" / "photos.zip", "w") as made:
        for number in range(3):
            member = zipfile.ZipInfo("x")
            member.filename = f"pets\\{number}.png"
            made.writestr(member, encoded(number))
    (tmp_path / "set" / "metadata.csv").write_bytes(table([("2.png", 1), ("1.png", 0)]))
    images = load(tmp_path / "set")
    assert shown(images) == [2, 1]
    (tmp_path / "set" / "metadata.csv").unlink()
    assert shown(load(tmp_path / "set")) == [0, 1, 2]


def test_what_is_ambiguous_or_not_there_is_not_guessed_and_listed_at_once(load, tmp_path):
    folder = write(tmp_path / "set", "a/0.png", "b/0.png", "1.png", "1.webp", "2.png")
    rows = [("0.png", 0), ("1.jpg", 0), ("2.png", 1), ("2.jpg", 1), ("c/2.png", 1), ("5.png", 1)]
    (folder / "metadata.csv").write_bytes(table(rows))
    images = load(folder, on_bad_image="replace", max_bad_images=9)
    assert len(images) == 6 and np.unique(shown(images)).tolist() == [2]
    assert any(note == "5 files of the metadata are not there: 0.png, 1.jpg, 2.jpg, c/2.png, 5.png" for note in said(images))
    with pytest.raises(UserError, match=r"5 files.*0\.png, 1\.jpg, 2\.jpg, c/2\.png, 5\.png"):
        load(folder)


def test_tables_about_folders_beside_them_are_no_data(load, tmp_path):
    for part in ("00000", "00001"):
        write(tmp_path / "set", *(f"{part}/{n}.png" for n in range(3)))
        (tmp_path / "set" / f"{part}_stats.json").write_text('{"count": 3}')
        (tmp_path / "set" / f"{part}.parquet").write_bytes(b"a table of downloads")
    assert shown(load(tmp_path / "set", "dataset_name")) == [0, 1, 2] * 2


def test_tables_about_tar_files_beside_them_are_no_data(load, tmp_path):
    (tmp_path / "set").mkdir()
    for part in ("00000", "00001"):
        with tarfile.open(tmp_path / "set" / f"{part}.tar", "w") as made:
            for number in range(3):
                member = tarfile.TarInfo(f"{part}{number}.png")
                member.size = len(encoded(number))
                made.addfile(member, io.BytesIO(encoded(number)))
        (tmp_path / "set" / f"{part}_stats.json").write_text('{"count": 3}')
        parquet.write_table(pa.table({"url": ["https://example.com/0.png"] * 3}), tmp_path / "set" / f"{part}.parquet")
    assert shown(load(tmp_path / "set", "dataset_name")) == [0, 1, 2] * 2


def test_captions_in_linked_folders(load, tmp_path):
    write(tmp_path / "real", "0.png", "1.png")
    (tmp_path / "real" / "0.txt").write_text("a cat")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "images").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "back").symlink_to(tmp_path / "set")
    assert shown(load(tmp_path / "set", "dataset_name")) == [0, 1]


@pytest.mark.parametrize("labels", [{"cat": 0, "dog": 1}, ["ab", "cd"], [["cat/0.png", 1, 2]], 3])
def test_another_dataset_json_is_a_file_beside_the_images(labels, load, tmp_path):
    folder = write(tmp_path / "set", "cat/0.png", "dog/1.png")
    (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
    assert load(folder).class_names == ["cat", "dog"]


def test_names_are_not_moved_into_one_of_several_folders(load, tmp_path):
    folder = write(tmp_path / "set", "images/0.png", "masks/0.png", "masks/1.png")
    (folder / "metadata.csv").write_bytes(table([("0.png", 1), ("1.png", 0)]))
    with pytest.raises(UserError, match=r"2 files of the metadata are not there: 0\.png, 1\.png"):
        load(folder)


def test_files_that_are_not_asked_for_may_be_missing(load, tmp_path):
    folder = write(tmp_path / "set", "0.png", "1.png")
    (folder / "metadata.csv").write_bytes(table([("0.png", 1), ("1.png", 0), ("5.png", 0)]))
    assert shown(load(folder, dataset_split="train[:2]")) == shown(load(folder, max_train_images=2)) == [0, 1]


def test_a_table_of_windows_and_empty_cells(load, tmp_path):
    folder = write(tmp_path / "set", "0é.png", "1.png", "2.png", "3.png", "4.png")
    rows = [("0é.png", "chât"), ("1.png", "chât"), ("2.png", "dog"), ("3.png", "dog"), ("4.png", "")]
    (folder / "metadata.csv").write_bytes(table(rows, ";", "cp1252"))
    images = load(folder)
    assert images.class_names == ["chât", "dog"] and images.labels.tolist() == [0, 0, 1, 1, -1]
    assert "metadata.csv was read as Windows-1252 with semicolons between the columns" in said(images)


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


LARGE = zlib.compress(bytes(2**21))
REFUSED = {
    "text": [chunk(b"zTXt", b"a\0\0" + LARGE)],
    "international text": [chunk(b"iTXt", b"a\0\1\0\0\0" + LARGE)],
    "profile": [chunk(b"iCCP", b"a\0\0" + LARGE)],
    "damaged facts": [
        chunk(b"gAMA", b""),
        chunk(b"pHYs", b"\0"),
        chunk(b"cHRM", b"\0"),
        bytes([0, 0, 0, 1]) + b"gAMA\1" + bytes(4),
    ],
    "damaged animation": [chunk(b"acTL", b"\0\0\0\2\0\0\0\0"), chunk(b"fcTL", b"x")],
    "many texts": [chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20 - 1)))] * 66,
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", REFUSED)
def test_pixels_beside_what_pillow_refuses_are_used(kind, before, load, tmp_path):
    folder, png = write(tmp_path / "set", "0.png", "1.png"), encoded(2)
    head, ends = png[:33], (png[33:-12], png[-12:])  # the signature and IHDR; the pixels; IEND
    parts = [*REFUSED[kind], ends[0]] if before or kind == "profile" else [ends[0], *REFUSED[kind]]
    (folder / "2.png").write_bytes(b"".join([head, *parts, ends[1]]))
    assert shown(load(folder)) == [0, 1, 2]
    (folder / "2.png").write_bytes(b"".join([head, *parts])[:-20] if before else head + b"".join(REFUSED[kind]))
    with pytest.raises(UserError, match=r"cannot decode the image .*2\.png"):
        load(folder)


@pytest.mark.parametrize(
    "damage", [b"Exif\0\0no tables", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\1\x01\x12"]
)
def test_pixels_with_damaged_exif_are_used(damage, load, tmp_path):
    (tmp_path / "set").mkdir()
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    image.save(tmp_path / "set" / "0.jpg", quality=100, exif=damage)
    image.save(tmp_path / "set" / "1.jpg", quality=100)
    pixels = load(tmp_path / "set", image_channels=1).fetch([0, 1])
    assert np.array_equal(pixels[0], pixels[1])


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_without_its_end_is_used_if_no_pixel_is_missing(progressive, load, tmp_path):
    (tmp_path / "set").mkdir()
    file, path = io.BytesIO(), tmp_path / "set" / "0.jpg"
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", quality=95, progressive=progressive)
    whole = file.getvalue()
    for cut in (0, 2, 40, 400):
        path.write_bytes(whole[: len(whole) - cut])
        if cut == 0:
            expected = load(tmp_path / "set").fetch([0])
        elif cut == 2 and not progressive:
            assert np.array_equal(load(tmp_path / "set").fetch([0]), expected)
        else:
            with pytest.raises(UserError, match=r"cannot decode the image .*0\.jpg"):
                load(tmp_path / "set")


def test_each_orientation_is_that_of_pillow(load, tmp_path):
    (tmp_path / "set").mkdir()
    image, exif, expected = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)), Image.Exif(), []
    for orientation in range(1, 9):
        exif[0x0112] = orientation
        image.save(tmp_path / "set" / f"{orientation}.png", exif=exif)
        with Image.open(tmp_path / "set" / f"{orientation}.png") as saved:
            expected.append(np.asarray(ImageOps.exif_transpose(saved)))
    assert np.array_equal(load(tmp_path / "set", image_channels=1).fetch(range(8))[:, 0], expected)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.tsv", "file_name\tlabel\n1.png\t1\n0.png\t0\n"),
        ("Metadata.CSV", "file_name,label\n1.png,1\n0.png,0\n"),
        ("metadata.csv", "sep=;\r\nfile_name;label\r\n1.png;1\r\n0.png;0\r\n"),
        ("metadata.csv", "File Name, label\n1.png,1\n0.png,0\n"),
        ("metadata.csv", "\n\nfile_name;label\n1.png;1\n0.png;0\n"),
        ("metadata.csv", '"filename","text","label"\n1.png,"a; b; c",1\n0.png,"""x""",0\n'),
        ("metadata.jsonl", '[{"file_name": "1.png", "label": 1},\n {"file_name": "0.png", "label": 0}]'),
    ],
)
def test_metadata_as_other_programs_write_it(name, content, load, tmp_path):
    folder = write(tmp_path / "set", "0.png", "1.png")
    (folder / name).write_text(content)
    images = load(folder)
    assert shown(images) == [1, 0] and images.labels.tolist() == [1, 0]


def test_metadata_above_the_images_in_an_archive(load, tmp_path):
    folder = write(tmp_path / "set", "images/0.png", "images/1.png")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("images/0.png", "images/1.png"):
            archive.write(folder / name, f"set/{name}")
        archive.writestr("set/metadata.csv", "file_name,label\n1.png,1\n0.png,0\n")
    assert shown(load(tmp_path / "a.zip")) == [1, 0]


def test_what_is_no_table_is_told(load, tmp_path):
    folder = write(tmp_path / "set", "0.png")
    for content, why in (
        (b"PK\3\4", "it is a spreadsheet"),
        (b"file_name,a,a\n0.png,1,2\n", "two of its columns have the same"),
    ):
        (folder / "metadata.csv").write_bytes(content)
        with pytest.raises(UserError, match=why):
            load(folder)
    (folder / "metadata.csv").write_bytes("file_name\n狗.png\n".encode("gbk"))
    with pytest.raises(UserError, match=r"not there: .*; metadata\.csv was read as Windows-1252"):
        load(folder)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(("mark", "suffix"), [(",", ".csv"), (";", ".csv"), ("	", ".tsv"), ("|", ".tsv")])
@pytest.mark.parametrize("column", ["image_path", "Datei", "sep="])
def test_tables_of_paths_in_any_dialect(suffix, encoding, mark, column, load, tmp_path):
    write(tmp_path, "set/0.png", "set/1.png")
    column = f"sep={mark}\nimage" if column == "sep=" else column
    rows = f"{column}{mark}label\nset/1.png{mark}ä\nset/0.png{mark}b\nset/1.png{mark}ä\nset/1.png{mark}b\n"
    (tmp_path / f"t{suffix}").write_bytes(rows.encode(encoding))
    images = load(tmp_path / f"t{suffix}", "dataset_name", cache_images="no")
    assert shown(images) == [1, 0, 1, 1] and images.class_names == ["b", "ä"]


def test_a_table_without_a_row_of_names_is_told(load, tmp_path):
    (tmp_path / "t.csv").write_text("".join(f"{label},{','.join('0123456789' * 5)}\n" for label in range(3)))
    with pytest.raises(UserError, match=r"no column that looks like images\nits first row was taken for the names"):
        load(tmp_path / "t.csv", "dataset_name")


@pytest.mark.parametrize(
    ("names", "note"),
    [
        (
            ("images/0.png", "masks/0.png", "masks/1.png"),
            "images of 2 folders are used: images (1), masks (2); to use one alone",
        ),
        (("x/trainA/0.png", "x/testA/1.png", "x/2.png"), "images of 3 folders are used: . (1), testA (1), trainA (1); to"),
        (("pets/cat/0.png", "wild/fox/1.png"), "the folders cat, fox become classes, and pets, wild do not"),
        (("00000/0.png", "01000/1.png", "02000/2.png"), "the folders 00000 to 02000 look like parts of one set"),
        (("2023-01-31/0.png", "2023-02-01/1.png"), "images of 2 folders are used: 2023-01-31 (1), 2023-02-01 (1); to"),
    ],
)
def test_folders_that_may_be_no_classes_are_told(names, note, load, tmp_path):
    assert any(one.startswith(note) for one in said(load(write(tmp_path / "set", *names))))


def test_a_folder_of_something_else_is_listed(load, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "data.mdb").write_bytes(b"x")
    (tmp_path / "set" / "data_batch_1").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no images; 0 of 2 files used; left out: 1 \.mdb .*, 1 without a suffix\nimage"):
        load(tmp_path / "set", "dataset_name")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "begins with b'version https://git-lfs'"),
        (b"\n<!DOCTYPE html><html></html>", "begins with b'<!DOCTYPE html><html></'"),
        (b"\x93NUMPY", r"begins with b'\\x93NUMPY'"),
        (b"", "is empty"),
    ],
)
def test_what_a_file_is_instead_of_an_image_is_said(content, what, load, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.png.*: not an image that Pillow can read \(it {what}\)"):
        load(tmp_path / "set")


def test_a_compressed_table_is_read_as_before(load, tmp_path):
    write(tmp_path, "0.png", "1.png")
    (tmp_path / "tables").mkdir()
    with gzip.open(tmp_path / "tables" / "train.csv.gz", "wt") as file:
        file.write(f"image,label\n{tmp_path}/1.png,1\n{tmp_path}/0.png,0\n")
    assert shown(load(tmp_path / "tables", "dataset_name", cache_images="no")) == [1, 0]


@pytest.mark.parametrize(
    ("file", "text", "columns"),
    [
        ("train.json", '[{"image": "0.png", "label": 1}, {"image": "1.png", "label": 0}]', True),
        ("instances.json", '{"images": [{"file_name": "0.png"}], "annotations": []}', False),
    ],
)
def test_a_json_file_beside_images_is_a_table_or_about_them(file, text, columns, load, tmp_path):
    folder = write(tmp_path / "set", "0.png", "1.png")
    (folder / file).write_text(text)
    images = load(folder, "dataset_name")
    assert (images.labels is not None) is columns


def test_a_photo_of_somebody_with_a_mask_is_no_mask_of_another(load, tmp_path):
    images = load(write(tmp_path / "set", "0.png", "1.png", "2.png", "3.png", "0_mask.png"))
    assert shown(images) == [0, 0, 1, 2, 3]
    assert said(images) == ["1 images that are called masks of others are used, such as 0_mask.png"]

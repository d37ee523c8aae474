"""Columns of images as people have them: right pixels packed, not packed and streamed, and the doctor reads the same."""

import ast
import base64
import json
import os
import re
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_dataset import encoded

from steady_doctor.data.declared import DeclaredImages, Source
from steady_doctor.data.decode import decoded
from steady_doctor.data.table import open_table
from utils.core.errors import UserError
from utils.data.dataset import load_images
from utils.data.image_column import shortened
from utils.options.flags import DataOptions

COLOR = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
GRAY = np.random.default_rng(1).integers(0, 256, (6, 8, 8), dtype=np.uint8)
COLOR[0, 0, 0], GRAY[0, 0, 0], GRAY[5, 7, 7] = 255, 0, 255
LABELS = [0, 1, 2, 0, 1, 2]


FILES = [encoded(pixels) for pixels in COLOR]
CODES = [base64.b64encode(file).decode() for file in FILES]
NAMES = [f"{number} a.png" for number in range(6)]
STRUCT = pa.struct({"bytes": pa.binary(), "path": pa.string()})
LARGER = pa.struct({"bytes": pa.binary(), "path": pa.string(), "width": pa.int32(), "exif": pa.struct({"iso": pa.int32()})})
BYTES_3D = pa.list_(pa.list_(pa.list_(pa.uint8())))


def column(values, kind=None, name="image"):
    """A table with a column of images beside the labels."""
    return lambda folder: pa.table({"caption": list("abcdef"), name: pa.array(values, kind), "label": LABELS})


def uris(form):
    return lambda folder: column([form(folder / name) for name in NAMES])(folder)


def pixels(names, order=None, kind=None):
    """A table with a column for each pixel."""
    values = GRAY.reshape(6, -1)
    columns = {name: pa.array(values[:, place], kind) for place, name in enumerate(names)}
    return lambda folder: pa.table(
        {"id": range(6)} | {names[n]: columns[names[n]] for n in order or range(64)} | {"label": LABELS}
    )


COLORED = {
    "list of structs": column([[{"bytes": file, "path": None}] for file in FILES], pa.list_(STRUCT)),
    "list of one struct": column([[{"bytes": file, "path": "a.png"}] for file in FILES], pa.list_(STRUCT, 1)),
    "large list of bytes": column([[file] for file in FILES], pa.large_list(pa.binary()), "images"),
    "list of paths": column([[name] for name in NAMES], None, "images"),
    "list in a list": column([[[file]] for file in FILES], None, "anything"),
    "struct of bytes": column([{"bytes": file} for file in FILES]),
    "struct of a path": column([{"path": name} for name in NAMES]),
    "struct with more": column([{"bytes": f, "path": None, "width": 8, "exif": {"iso": 100}} for f in FILES], LARGER),
    "struct in a struct": column([{"picture": {"bytes": file}, "id": 3} for file in FILES]),
    "view of bytes": column(FILES, pa.binary_view()),
    "view of paths": column(NAMES, pa.string_view()),
    "lists of bytes": column(COLOR.tolist(), BYTES_3D),
    "lists with a batch": column([[image] for image in COLOR.tolist()], pa.list_(BYTES_3D)),
    "lists of fixed lengths": column(COLOR.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8(), 3), 8), 8)),
    "lists of numbers": column(COLOR.tolist()),
    "lists of floats": column((COLOR / 255).tolist(), pa.list_(pa.list_(pa.list_(pa.float64())))),
    "base64": column(CODES),
    "base64 of another name": column(CODES, None, "picture_base64"),
    "base64 for addresses": column([code.translate(str.maketrans("+/", "-_")).rstrip("=") for code in CODES]),
    "base64 in lines": column([base64.encodebytes(file).decode() for file in FILES], pa.large_string()),
    "base64 in a list": column([[code] for code in CODES]),
    "base64 as bytes": column([code.encode() for code in CODES]),
    "base64 after its name": column([f"base64,{code}" for code in CODES]),
    "bytes as numbers": column([list(file) for file in FILES]),
    "data URI": column([f"data:image/png;base64,{code}" for code in CODES], None, "anything"),
    "file URI": uris(Path.as_uri),
    "file URI, not quoted": uris("file://{}".format),
    "file URI of this machine": uris(lambda path: path.as_uri().replace("//", "//localhost", 1)),
    "file URI of Java": uris(lambda path: path.as_uri().replace("//", "", 1)),
    "paths of Windows": column([f".\\..\\data\\{name}" for name in NAMES]),
}
GRAYS = {
    "rows of bytes": column(GRAY.tolist(), pa.list_(pa.list_(pa.uint8()))),
    "one row of bytes": column(GRAY.reshape(6, -1).tolist(), pa.list_(pa.uint8(), 64), "pixels"),
    "numbers as text": column([" ".join(map(str, image.ravel())) for image in GRAY], None, "pixels"),
    "pixel0": pixels([f"pixel{number}" for number in range(64)]),
    "pixel0 as int64": pixels([f"pixel{number}" for number in range(64)], None, pa.int64()),
    "0": pixels([str(number) for number in range(64)]),
    "1x1": pixels([f"{number // 8 + 1}x{number % 8 + 1}" for number in range(64)]),
    "sorted as text": pixels([f"p_{number}" for number in range(64)], sorted(range(64), key=str)),
}
RANGES = {"lists of numbers": [0, 255], "lists of floats": [0, 1], "numbers as text": [0, 255], "pixel0 as int64": [0, 255]}


@pytest.fixture
def load(opened, tmp_path):
    (tmp_path / "data").mkdir()
    for name, file in zip(NAMES, FILES):
        (tmp_path / "data" / name).write_bytes(file)

    def load_table(make, **options):
        """`make`: None for the table that is there."""
        path = tmp_path / "data" / "train.parquet"
        if make is not None:
            pq.write_table(make(path.parent), path, row_group_size=4)
        return opened(dataset_name=str(path), **options)

    return load_table


@pytest.mark.parametrize("kind", [*COLORED, *GRAYS])
def test_the_pixels_are_right_for_the_run_and_for_the_doctor(kind, load, tmp_path):
    channels = 3 if kind in COLORED else 1
    right = COLOR.transpose(0, 3, 1, 2) if kind in COLORED else GRAY[:, None]
    options = {"image_channels": channels, "data_range": RANGES.get(kind)}
    for more in ({}, {"cache_images": "no"}, {"streaming": True}):
        images = load({**COLORED, **GRAYS}[kind], **options, **more)
        assert np.array_equal(images.fetch(range(6)), right) and images.labels.tolist() == LABELS
        source = Source(name=str(tmp_path / "data" / "train.parquet"), streamed="streaming" in more)
        table = open_table(source, images.opened)
        declared = DeclaredImages((8, 8), channels, data_range=RANGES.get(kind))
        seen = np.stack([decoded(file, declared)[0] for file in table.images(list(range(6)))])
        assert np.abs((seen + 1) * 127.5 - right).max() < 1e-6 and table.labels.tolist() == LABELS


@pytest.mark.parametrize("more", [{}, {"cache_images": "no"}, {"streaming": True}])
def test_another_content_of_a_named_file_is_seen(more, load, tmp_path):
    for time, (make, changed) in enumerate([(COLORED["file URI"], COLOR[2]), (None, 255 - COLOR[2])]):  # files of one size
        (tmp_path / "data" / NAMES[2]).write_bytes(encoded(changed, "BMP"))
        os.utime(tmp_path / "data" / NAMES[2], (time, time))
        assert np.array_equal(load(make, **more).fetch([2])[0], changed.transpose(2, 0, 1))


def test_a_row_without_an_image_is_named_and_replaced(load):
    cells = [[], *([file] for file in FILES[1:3]), [FILES[3], FILES[4]], [FILES[4]], [b"no image"]]
    make = column(cells, pa.list_(pa.binary()), "images")
    with pytest.raises(UserError, match="row 0, column 'images': the row has no image"):
        load(make)
    images = load(make, on_bad_image="replace")
    assert images.shown_rows(np.arange(6)).tolist() == [1, 1, 2, 4, 4, 1]
    told = ["it is a list of 2", "not an image that Pillow can read (it begins with b'no image')"]
    assert [images.bad_images[row].reason for row in (3, 5)] == told


def test_paths_begin_at_the_table_though_the_first_row_has_none(load):
    images = load(column([None, *NAMES[1:]]), on_bad_image="replace")
    assert list(images.bad_images) == [0] and np.array_equal(images.fetch([4])[0], COLOR[4].transpose(2, 0, 1))


# What is in the column, and the expression that its message has.
REFUSED = {
    "a list of 2": (column([[file, file] for file in FILES], pa.list_(pa.binary())), COLOR),
    "HTML or XML": (column([f'<p><img width=8 src="data:image/png;base64,{code}"/></p>' for code in CODES]), COLOR),
    "Markdown": (column([f"![a cat](data:image/png;base64,{code})" for code in CODES]), COLOR),
    "a struct as JSON": (column([json.dumps({"bytes": code}) for code in CODES]), COLOR),
    "bytes as Python writes them": (column([repr(file) for file in FILES]), COLOR),
    "a list as text": (column([str(image.tolist()) for image in COLOR]), COLOR),
    "hex": (column([f"\\x{file.hex()}" for file in FILES]), COLOR),
    "192 numbers, plane by": (column([" ".join(map(str, image.transpose(2, 0, 1).ravel())) for image in COLOR]), COLOR),
    "a struct of src, height": (column([{"src": code, "height": 8} for code in CODES]), COLOR),
    "plane by plane": (column(COLOR.transpose(0, 3, 1, 2).reshape(6, -1).tolist(), pa.list_(pa.uint8())), COLOR),
    "the 192 columns v0 to v191": (
        lambda folder: pa.table(
            {"id": range(6)} | {f"v{n}": COLOR.transpose(0, 3, 1, 2).reshape(6, -1)[:, n] for n in range(192)}
        ),
        COLOR,
    ),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("what", REFUSED)
def test_what_has_two_meanings_is_refused_with_the_line_that_turns_it(what, streaming, load, tmp_path):
    make, right = REFUSED[what]
    with pytest.raises(UserError, match=what) as caught:
        load(make, streaming=streaming)
    _, _, line = str(caught.value).partition("turn it: ")
    dataset = datasets.Dataset(make(tmp_path))
    turned = eval(line.partition(".save_to_disk")[0], {"dataset": dataset, "np": np, "ast": ast, "json": json, "re": re})
    turned.save_to_disk(tmp_path / "turned")
    data_range = [0, 255] if "int64" in str(turned.features["image"]) else None
    paths = {"dataset_name": str(tmp_path / "turned"), "cache_dir": str(tmp_path / "cache")}
    images = load_images(DataOptions(**paths, resolution=8, image_column="image", data_range=data_range))
    assert np.array_equal(images.fetch(range(6)), right.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("cells", "kind", "options", "message"),
    [
        (["a cat sits on a mat " * 30] * 6, None, {}, "'image' has text that is neither a path nor an image"),
        (["QUJD" * 3000] * 6, None, {}, "'image' has text that is neither a path nor an image"),
        (["data:image/png;base64,_!" + "A" * 200] * 6, None, {}, "'image' has damaged base64"),
        (["x" * 200 + ".png"] * 6, None, {}, r"cannot decode the image x+\.\.\.x+\.png \(row 0.*: No such file"),
        ([image.tobytes() for image in COLOR], pa.binary(192), {}, r"np.frombuffer\(row, np.uint8\).reshape\(8, 8, 3\)"),
        ([[1, 2, 3]] * 6, None, {}, "'image' has 3 numbers, .*\n.*dataset.map"),
        ([[[1, 2], [3]]] * 6, None, {}, "'image' has lists of different lengths"),
        (COLOR.tolist(), None, {}, r"holds int64, whose range is not known .*\nset --data_range LOW HIGH \(0 255 for bytes\)"),
        (COLOR.transpose(0, 3, 1, 2).tolist(), BYTES_3D, {}, r"\[3, 8, 8\].*\n.*np.moveaxis\(image, 0, -1\)"),
        ([1, 2, 3, 4, 5, 6], None, {"image_column": "image"}, "--image_column image: this column has no images"),
    ],
)
def test_what_is_no_image_is_named_without_its_content(cells, kind, options, message, load):
    for streaming in (False, True):
        with pytest.raises(UserError, match=message) as caught:
            load(column(cells, kind), streaming=streaming, **options)
        said = str(caught.value)
        assert said.count("\n") <= 1 and max(map(len, re.split(r"[\s(),]", said))) <= 100


def test_columns_of_three_colors_are_not_taken_for_one(load):
    colors = {f"{color}{n}": COLOR.reshape(6, 64, 3)[:, n, place] for n in range(64) for place, color in enumerate("rgb")}
    with pytest.raises(UserError, match="the columns r#, g#, b# have a color each"):
        load(lambda folder: pa.table(colors))


def test_lists_that_are_no_images_are_not_taken_for_them(load):
    vectors = [[0.5] * 64] * 6
    with pytest.raises(UserError, match=r"no column that looks like images\n.*embedding \(list of double|float64\)"):
        load(column(vectors, None, "embedding"))
    many = pa.table({f"sensor{number}": [1.0] * 6 for number in range(60)} | {"label": LABELS})
    with pytest.raises(UserError, match=r"sensor39 \(float64\), \.\.\. \(61 columns\)"):
        load(lambda folder: many)


def test_a_cell_is_shortened_to_a_hundred_characters():
    assert shortened("a" * 100) == "a" * 100 and shortened("a\nb") == "a b"
    assert len(shortened("a" * 101)) == 100 and shortened("ab" * 5000).endswith("ab")


def test_a_named_file_may_have_any_name(load, tmp_path):
    for place, name in enumerate(("a#1?.png", "100%25.png", "b\nc.png")):
        (tmp_path / "data" / name).write_bytes(FILES[place])
    folder = tmp_path / "data"
    cells = [f"file://{folder}/a#1?.png", f"file://{folder}/100%25.png", f"{folder}/b\nc.png", *NAMES[3:]]
    assert np.array_equal(load(column(cells)).fetch(range(6)), COLOR.transpose(0, 3, 1, 2))

"""Loading by every kind of source; columns; resizing and cropping; one clear line for what is wrong."""

import io
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hub_stand_in import hub_stand_in
from PIL import Image

from utils.core.errors import UserError
from utils.data.bad_images import UndecodableImage
from utils.data.dataset import content_fingerprint
from utils.data.sources import open_dataset
from utils.options.flags import DataOptions

REPOSITORY = Path(__file__).resolve().parents[2]
GENERATOR = np.random.default_rng(0)
PIXELS = GENERATOR.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
LABELS = [0, 1, 2, 0, 1, 2]


def encoded(pixels, image_format="PNG", **options) -> bytes:
    file = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(file, image_format, **options)
    return file.getvalue()


def make_dataset(columns=None, features=None):
    import datasets

    if columns is None:
        columns = {"picture": [{"bytes": encoded(image), "path": None} for image in PIXELS], "kind": LABELS}
        features = {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["ant", "bee", "cow"])}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features) if features else None)


def image_folder(folder: Path, names=("ant", "bee")) -> Path:
    for number, image in enumerate(PIXELS):
        path = folder / names[number % len(names)] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(image))
    return folder


@pytest.fixture
def load(opened):
    return lambda dataset_name=None, **options: opened(dataset_name=dataset_name, **options)


def in_new_process(code: str, **environment) -> dict:
    """Runs code that ends by printing JSON."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "0", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def expected_pixels():
    return PIXELS.transpose(0, 3, 1, 2)


def test_digits(load):
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    images = load("digits", image_channels=1)
    assert len(images) == 1797 and images.shape == (1, 8, 8) and images.max_value == 255
    assert images.class_names == list("0123456789")
    assert images.labels.dtype == np.int64 and np.array_equal(images.labels, labels)
    pixels = images.fetch(np.arange(1797))
    assert pixels.dtype == np.uint8 and pixels.shape == (1797, 1, 8, 8)
    assert np.array_equal(pixels.reshape(-1, 64), np.floor(scans * 255 / 16 + 0.5))
    assert "1,797 images, 8x8, 1 channel, 10 classes" in images.description
    (note,) = images.notes
    assert note.startswith("packed images: 0.1 MB in ")


@pytest.mark.parametrize("kind", ["saved", "saved_splits", "parquet", "parquet_folder", "arrow"])
def test_local_datasets(kind, load, tmp_path):
    import datasets

    dataset, path = make_dataset(), tmp_path / "data"
    path.mkdir()
    if kind == "saved":
        dataset.save_to_disk(path)
    elif kind == "saved_splits":
        datasets.DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(path)
    elif kind == "arrow":
        dataset.save_to_disk(path)
        path = next(path.glob("*.arrow"))
    else:
        dataset.to_parquet(path / "train.parquet")
        path = path / "train.parquet" if kind == "parquet" else path
    images = load(str(path))
    assert np.array_equal(images.fetch(range(6)), expected_pixels())
    assert images.labels.tolist() == LABELS and images.class_names == ["ant", "bee", "cow"]
    if kind == "saved_splits":
        assert len(load(str(path), dataset_split="test")) == 1


def test_image_folder_with_classes(load, tmp_path):
    folder = image_folder(tmp_path / "photos [2]")  # brackets mean something in a glob pattern
    images = load(train_data_dir=str(folder))
    assert images.class_names == ["ant", "bee"] and images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(images.fetch(range(6)), expected_pixels()[[0, 2, 4, 1, 3, 5]])
    both = load("digits", train_data_dir=str(folder), image_channels=1)
    assert len(both) == 1797 and "ignored" in both.notes[0]


HUB_CODE = """
import json
from utils.data.dataset import load_images
from utils.options.flags import DataOptions
options, found = {"dataset_name": "someone/photos", "dataset_config_name": "default", "dataset_revision": "main"}, []
for split in ("train", "validation", "test[1:]"):
    images = load_images(DataOptions(**options, dataset_split=split, resolution=8))
    labels = None if images.labels is None else images.labels.tolist()
    pixels = images.fetch(range(len(images))).tolist()
    found.append([pixels, labels, images.class_names, images.notes[:-1], images.description, images.fingerprint])
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zip", "parquet"])
def test_a_dataset_of_the_hub_is_downloaded_once_and_then_works_offline(kind, tmp_path):
    folder, environment = tmp_path / "repository", {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("photos")
    layouts = {"train": ["in/ant/0", "in/bee/1"], "val": ["in/ant/2", "in/bee/3"], "test": ["4", "5"]}
    for split, names in layouts.items():
        if kind == "parquet":
            make_dataset().select([int(name[-1]) for name in names]).to_parquet(folder / "data" / f"{split}.parquet")
            continue
        with zipfile.ZipFile(folder / "data" / f"{split}.zip", "w") as archive:
            for name in names:
                archive.writestr(f"{name}.png", encoded(PIXELS[int(name[-1])]))
            archive.writestr("notes.txt", "")
    with hub_stand_in("someone/photos", folder) as (address, _):
        found = in_new_process(HUB_CODE, HF_ENDPOINT=address, **environment)
    for (shown, labels, names, notes, *_), rows in zip(found, ([0, 1], [2, 3], [5])):
        assert np.array_equal(shown, expected_pixels()[rows])
        if kind == "parquet":
            assert labels == [LABELS[row] for row in rows] and names == ["ant", "bee", "cow"]
        else:
            assert (labels, names) == ((None, None) if rows == [5] else ([0, 1], ["ant", "bee"]))
            assert notes[1:] == [f"{len(rows)} of {len(rows) + 1} files used; left out: 1 .txt"] or rows == [5]
    assert "someone/photos (config default, split train, revision main): 2 images" in found[0][4]
    packed = {path.parent.name for path in (tmp_path / "home" / "datasets" / "steady_diffusion").glob("*/images.bin")}
    assert packed == {one[5] for one in found}
    again = in_new_process(HUB_CODE, HF_ENDPOINT=address, HF_HUB_OFFLINE="1", **environment)
    assert [one[:5] for one in again] == [one[:5] for one in found] and (again == found or kind == "zip")


def test_split_slices_and_max_images(load, tmp_path):
    path = tmp_path / "a.parquet"
    make_dataset().to_parquet(path)
    half = load(str(path), dataset_split="train[3:]")
    assert np.array_equal(half.fetch(range(3)), expected_pixels()[3:]) and half.labels.tolist() == LABELS[3:]
    first = load(str(path), max_train_images=2)
    assert np.array_equal(first.fetch([1, 0]), expected_pixels()[[1, 0]]) and first.labels.tolist() == LABELS[:2]


def test_subset(load, tmp_path):
    path = tmp_path / "a.parquet"
    make_dataset().to_parquet(path)
    images = load(str(path))
    part = images.subset([4, 1, 5]).subset([2, 0])
    assert len(part) == 2 and part.labels.tolist() == [LABELS[5], LABELS[4]]
    assert np.array_equal(part.fetch([0, 1]), expected_pixels()[[5, 4]])
    assert part.fingerprint not in (images.fingerprint, images.subset([5]).fingerprint)
    for bad in ([2], [-1]):
        with pytest.raises(IndexError, match=r"\[0, 2\)"):
            part.fetch(bad)


def test_columns_are_found_named_and_listed(load, tmp_path):
    import datasets

    files = [encoded(image) for image in PIXELS]
    columns = {
        "thumbnail": [{"bytes": encoded(image // 2), "path": None} for image in PIXELS],
        "jpg": [{"bytes": file, "path": None} for file in files],
        "fine_label": [5, 4, 3, 2, 1, 0],
        "coarse": ["b", "a", "c", "a", "b", "c"],
        "unknown": [-1] * 6,
    }
    features = {
        "thumbnail": datasets.Image(),
        "jpg": datasets.Image(),
        "fine_label": datasets.Value("int32"),
        "coarse": datasets.Value("string"),
        "unknown": datasets.Value("int64"),
    }
    path = str(tmp_path / "a.parquet")
    make_dataset(columns, features).to_parquet(path)
    images = load(path)
    assert np.array_equal(images.fetch(range(6)), expected_pixels())  # of the usual name
    assert images.notes[:-1] == ["image columns jpg, thumbnail: jpg is used (--image_column chooses)"]
    assert images.labels.tolist() == [5, 4, 3, 2, 1, 0] and images.class_names is None
    named = load(path, image_column="jpg", label_column="coarse")
    assert np.array_equal(named.fetch(range(6)), expected_pixels()) and named.notes[:-1] == []
    assert named.labels.tolist() == [1, 0, 2, 0, 1, 2] and named.class_names == ["a", "b", "c"]
    listed = r"thumbnail \(Image\), jpg \(Image\), fine_label \(int32\), coarse \(string\), unknown \(int64\)"
    for option in ({"image_column": "picture"}, {"image_column": "coarse_"}, {"label_column": "label"}):
        [(name, value)] = option.items()
        with pytest.raises(UserError, match=rf"--{name} {value}: .* no such column\n.*{listed}"):
            load(path, **option)
    with pytest.raises(UserError, match=rf"--image_column fine_label: this column has no images\n.*{listed}"):
        load(path, image_column="fine_label")
    with pytest.raises(UserError, match="--label_column unknown: no row has a label"):
        load(path, label_column="unknown")
    with pytest.raises(UserError, match="--label_column jpg: Image values cannot be labels"):
        load(path, label_column="jpg")


def test_wrong_sources_are_one_clear_line(load, tmp_path):
    make_dataset().save_to_disk(tmp_path / "saved")
    make_dataset().select([]).to_parquet(tmp_path / "empty.parquet")
    make_dataset({"text": ["a"], "number": [1]}).save_to_disk(tmp_path / "text")
    make_dataset().to_parquet(tmp_path / "a.parquet")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "notes.md").write_text("no images here")
    (tmp_path / "a.xyz").write_text("")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but not really")
    no_split = "--dataset_split test: .*no such split\n.*'train'"
    cases = [
        ({}, "no dataset was given\nset --dataset_name"),
        ({"dataset_name": str(tmp_path / "saved"), "dataset_split": "test"}, no_split),
        ({"dataset_name": str(tmp_path / "a.parquet"), "dataset_split": "tset"}, r"Unknown split .tset.*'train'"),
        ({"dataset_name": "digits", "dataset_split": "test"}, no_split),
        ({"dataset_name": str(tmp_path / "empty.parquet")}, "corresponds to no data"),
        ({"dataset_name": "digits", "max_train_images": 0}, "has no images"),
        ({"dataset_name": str(tmp_path / "text")}, r"no column that looks like images\n.*text \(string\), number \(int64\)"),
        ({"dataset_name": str(tmp_path / "nothing")}, "cannot load the dataset"),
        ({"train_data_dir": str(tmp_path / "nothing")}, "has no images"),
        ({"train_data_dir": str(tmp_path / "absent")}, "no such file or folder"),
        ({"dataset_name": str(tmp_path / "a.xyz")}, r"ends in one of .*\.parquet"),
        ({"dataset_name": str(tmp_path / "broken.parquet")}, "cannot load the dataset"),
        ({"dataset_name": "digits", "background": "transparent"}, "transparent"),
    ]
    for options, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            load(**options)
        assert str(caught.value).count("\n") <= 1


def test_a_dataset_s_own_code_is_not_run(load, tmp_path):
    """A loading script, and an EPS image, which is a program that Pillow would hand to Ghostscript."""
    folder = tmp_path / "scripted"
    folder.mkdir()
    marker = tmp_path / "ran"
    (folder / "scripted.py").write_text(f"open({str(marker)!r}, 'w').write('x')\n")
    with pytest.raises(UserError):
        load(str(folder))
    assert not marker.exists()
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "a.eps").write_bytes(eps)
    with pytest.raises(UserError, match=r"has no images; 0 of 1 files used; left out: 1 \.eps"):
        load(train_data_dir=str(pictures))
    make_dataset({"image": [eps]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="not an image"):
        load(str(tmp_path / "saved"))


SIDES = [*((12, sides) for sides in [(30, 39), (39, 30), (16, 16), (9, 100), (200, 31)])]
SIDES += [("24x16", sides) for sides in [(30, 38), (60, 20), (20, 60), (24, 16), (48, 33), (5, 3)]]


@pytest.mark.parametrize(("resolution", "sides"), SIDES)
@pytest.mark.parametrize("cache_images", ["yes", "no"])
def test_resize_and_crop_follow_torchvision(resolution, sides, cache_images, load, tmp_path):
    """Resize, CenterCrop and RandomCrop written out: by the smaller scale that covers it, then cut where there is room."""
    pixels = GENERATOR.integers(0, 256, (*sides, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    height, width = (12, 12) if resolution == 12 else (24, 16)
    scale = max(Fraction(height, sides[0]), Fraction(width, sides[1]))
    size = int(scale * sides[0]), int(scale * sides[1])
    resized = np.asarray(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    windows = np.lib.stride_tricks.sliding_window_view(resized, (height, width), axis=(1, 2))
    rows, columns = windows.shape[1:3]
    assert min(rows, columns) == 1

    options = {"train_data_dir": str(tmp_path), "resolution": resolution, "cache_images": cache_images}
    images = load(**options)
    assert images.shape == (3, height, width)
    center = windows[:, round((rows - 1) / 2), round((columns - 1) / 2)]
    for packed in (images, load(**options, center_crop=True)):
        assert np.array_equal(packed.fetch([0])[0], center)
    places = np.stack(np.meshgrid((np.arange(rows) + 0.5) / rows, np.arange(columns) / columns, indexing="ij"), -1)
    crops = images.fetch(np.zeros(rows * columns, int), places.reshape(-1, 2).astype(np.float32) + np.float32(1e-6))
    assert np.array_equal(crops, windows.transpose(1, 2, 0, 3, 4).reshape(-1, 3, height, width))
    first, last = (np.full((1, 2), place, np.float32) for place in (0, np.nextafter(np.float32(1), np.float32(0))))
    assert np.array_equal(images.fetch([0], first)[0], windows[:, 0, 0])
    assert np.array_equal(images.fetch([0], last)[0], windows[:, -1, -1])


def every_kind_of_file(folder: Path) -> Path:
    """Sizes, modes, an animation and a turned photo."""
    folder.mkdir()
    generator = np.random.default_rng(1)
    for number, (height, width) in enumerate([(20, 30), (31, 17), (16, 16)]):
        pixels = generator.integers(0, 256, (height, width, 4), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"rgba{number}.png")
        Image.fromarray(pixels[..., :3]).save(folder / f"rgb{number}.jpg")
        Image.fromarray(pixels[..., 0].astype(np.uint16) * 200).save(folder / f"deep{number}.png")
    frames = [Image.fromarray(generator.integers(0, 256, (20, 20, 3), dtype=np.uint8)) for _ in range(3)]
    frames[0].save(folder / "animated.png", save_all=True, append_images=frames[1:])
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    frames[1].save(folder / "turned.png", exif=exif)
    return folder


@pytest.mark.parametrize("options", [{}, {"center_crop": True}, {"image_channels": 1}, {"preserve_input_precision": True}])
def test_decoding_without_a_cache_gives_the_same_pixels(options, load, tmp_path):
    folder = str(every_kind_of_file(tmp_path / "files"))
    packed = load(train_data_dir=folder, **options)
    decoded = load(train_data_dir=folder, cache_images="no", **options)
    indices = np.random.default_rng(0).permutation(len(packed))
    crop = np.random.default_rng(0).random((len(packed), 2), dtype=np.float32)
    assert len(packed) == len(decoded) == 11
    first, second = packed.fetch(indices, crop), decoded.fetch(indices, crop)
    assert first.dtype == second.dtype and np.array_equal(first, second)
    assert packed.fingerprint == decoded.fingerprint


def test_conversions_are_told_and_done(load, tmp_path):
    folder = every_kind_of_file(tmp_path / "files")
    images = load(train_data_dir=str(folder), resolution=20)
    assert {note.split(":")[0] for note in images.notes[:-1]} == {
        "1 image with several frames (animated or paged)",
        "3 images with more than 8 bits per channel",
        "3 images with transparency",
        "1 image turned upright by their EXIF orientation",
    }
    names = sorted(path.name for path in folder.iterdir())
    with Image.open(folder / "animated.png") as animation:
        first_frame = np.asarray(animation.convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(images.fetch([names.index("animated.png")])[0], first_frame)
    with Image.open(folder / "turned.png") as stored:
        upright = np.rot90(np.asarray(stored), k=-1).transpose(2, 0, 1)
    assert np.array_equal(images.fetch([names.index("turned.png")])[0], upright)


def test_images_of_12_bits_are_told(load, tmp_path):
    for name, white in (("ct", 4095), ("photo", 65535), ("black", 0)):
        Image.fromarray(np.linspace(0, white, 64).reshape(8, 8).astype(np.uint16)).save(tmp_path / f"{name}.png")
    images = load(train_data_dir=str(tmp_path))
    assert any(note.startswith("1 image with 16 bits of which the upper three are empty") for note in images.notes)


def test_images_of_very_many_pixels_are_told(load, tmp_path, monkeypatch):
    Image.new("L", (20, 20)).save(tmp_path / "map.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UserError, match=r"map\.png .*: it has more than 200 pixels: make it smaller"):
        load(train_data_dir=str(tmp_path), cache_images="no")


def test_16_bit_precision_is_kept_on_request(load, tmp_path):
    deep = np.random.default_rng(0).integers(0, 65536, (8, 8)).astype(np.uint16)
    Image.fromarray(deep).save(tmp_path / "a.png")
    Image.fromarray(PIXELS[0]).save(tmp_path / "b.png")
    kept = load(train_data_dir=str(tmp_path), preserve_input_precision=True)
    assert kept.max_value == 65535 and kept.fetch([0]).dtype == np.uint16
    assert np.array_equal(kept.fetch([0])[0], np.stack([deep] * 3))
    assert np.array_equal(kept.fetch([1])[0], PIXELS[0].transpose(2, 0, 1).astype(np.uint16) * 257)
    small = load(train_data_dir=str(tmp_path), preserve_input_precision=True, resolution=4)
    exact = np.asarray(Image.fromarray(deep.astype(np.float32)).resize((4, 4), Image.Resampling.BILINEAR))
    assert np.array_equal(small.fetch([0])[0, 0], np.rint(exact))


@pytest.mark.parametrize("cache_images", ["yes", "no"])
def test_an_undecodable_image_is_named(cache_images, load, tmp_path):
    folder = image_folder(tmp_path / "photos")
    whole = (folder / "bee" / "3.png").read_bytes()
    (folder / "bee" / "3.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"bee/3\.png \(row 4, column 'image'\)") as caught:
        load(train_data_dir=str(folder), cache_images=cache_images).fetch(range(6))
    assert str(caught.value).count("\n") <= 1
    rows = [{"bytes": encoded(PIXELS[0]), "path": None}, {"bytes": b"not an image", "path": None}]
    for bad, message in [
        (rows, "row 1, column 'image': not an image"),
        ([rows[0], None], "row 1, column 'image': the row has no image"),
    ]:
        import datasets

        path = tmp_path / f"saved{len(message)}"
        make_dataset({"image": bad}, {"image": datasets.Image()}).save_to_disk(path)
        with pytest.raises(UserError, match=message):
            load(str(path), cache_images=cache_images).fetch(range(2))


def test_a_machine_that_fails_is_not_the_image_s_fault(load, tmp_path, monkeypatch):
    """What may be read tomorrow must not be replaced today, least of all in a cache."""
    folder = image_folder(tmp_path / "photos")
    for error in (OSError(5, "Input/output error"), MemoryError()):
        with monkeypatch.context() as patch, pytest.raises(UserError, match="cannot read the image") as caught:
            patch.setattr(Image.Image, "getexif", lambda image, error=error: (_ for _ in ()).throw(error))
            load(train_data_dir=str(folder), on_bad_image="replace")
        assert not isinstance(caught.value, UndecodableImage)
    assert len(load(train_data_dir=str(folder)).bad_images) == 0


def with_bad_rows(path: Path, bad=(1, 2, 5)) -> str:
    columns = {"image": [{"bytes": encoded(image), "path": f"{row}.png"} for row, image in enumerate(PIXELS)]}
    for row in bad:
        columns["image"][row]["bytes"] = b"no image"
    make_dataset({**columns, "label": LABELS}).save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("cache_images", ["yes", "no"])
def test_the_next_image_of_the_set_replaces_an_undecodable_one(cache_images, load, tmp_path):
    images = load(with_bad_rows(tmp_path / "a"), cache_images=cache_images, on_bad_image="replace")
    assert np.array_equal(images.fetch([5, 1, 0, 2, 3, 1]), expected_pixels()[[0, 3, 0, 3, 3, 3]])
    assert images.shown([5, 1, 0, 2, 3, 1]).tolist() == [0, 3, 0, 3, 3, 3]
    assert sorted(images.bad_images) == [1, 2, 5] and images.replacements() == {1: 3, 2: 3, 5: 0}
    assert images.bad_images[1].file == "1.png"
    assert images.bad_images[1].reason == "not an image that Pillow can read (it begins with b'no image')"
    part = images.subset([4, 2, 1, 0])  # what is held out of a set does not come back into it
    assert np.array_equal(part.fetch([0, 1, 2, 3]), expected_pixels()[[4, 0, 0, 0]])
    assert part.shown([1, 2]).tolist() == [3, 3] and part.replacements() == {2: 0, 1: 0}
    assert np.array_equal(images.subset([4, 5]).fetch([1]), expected_pixels()[[4]])  # around the end
    with pytest.raises(UserError, match=r"none of the 2 images can be decoded; for example 2\.png \(row 2.*Pillow"):
        images.subset([2, 1]).fetch([0])
    assert content_fingerprint(images) == content_fingerprint(load(str(tmp_path / "a"), on_bad_image="replace"))


@pytest.mark.parametrize("cache_images", ["yes", "no"])
def test_more_bad_images_than_allowed_and_nothing_else_are_one_clear_line(cache_images, load, tmp_path):
    path, options = with_bad_rows(tmp_path / "a"), {"cache_images": cache_images, "on_bad_image": "replace"}
    load(path, max_bad_images=3, **options).fetch(range(6))
    nothing = with_bad_rows(tmp_path / "b", range(6))
    cases = [
        (path, 2, r"3 or more images cannot be decoded, and --max_bad_images is 2 \(1\.png .*2\.png .*5\.png "),
        (nothing, 6, r"none of the 6 images can be decoded; for example 0\.png"),
        (nothing, 4, r"[56] or more images .* 2\.png .*; \.\.\.\)\nrepair"),
    ]
    for path, limit, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            load(path, max_bad_images=limit, **options).fetch(range(6))
        assert str(caught.value).count("\n") <= 1


def test_a_parquet_file_is_opened_in_little_memory_and_as_before(tmp_path):
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    group = pa.table({"image": [os.urandom(2**12) for _ in range(2**8)]})  # 1 MiB
    with pq.ParquetWriter(tmp_path / "noise.parquet", group.schema, compression="none") as writer:
        for _ in range(48):
            writer.write_table(group)
    tracemalloc.start()  # sees what is read, since `datasets` hands pyarrow a file of Python's
    opened = open_dataset(DataOptions(dataset_name=str(tmp_path / "noise.parquet"), cache_dir=str(tmp_path / "ours")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 * 2**20  # of 48; with pyarrow's usual settings more than all of them
    of_datasets = datasets.load_dataset("parquet", data_files=str(tmp_path / "noise.parquet"), cache_dir=str(tmp_path / "ours"))
    assert opened.dataset._fingerprint == of_datasets["train"]._fingerprint and opened.dataset[:] == of_datasets["train"][:]

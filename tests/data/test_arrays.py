"""Arrays as data: .npy, .npz, HDF5 and columns of arrays; ranges, precision, and one clear line for what is wrong."""

import pickle

import numpy as np
import pytest
from PIL import Image

from steady_doctor.data.declared import Source
from steady_doctor.data.table import open_table
from utils.core.errors import UserError
from utils.data.dataset import load_images
from utils.options.flags import DataOptions

GENERATOR = np.random.default_rng(0)
FLOATS = GENERATOR.uniform(-1, 1, (10, 12, 8, 6)).astype(np.float32)
BYTES = GENERATOR.integers(0, 256, (10, 12, 8, 3), dtype=np.uint8)
LABELS = np.arange(10) % 3


@pytest.fixture
def load(opened):
    return lambda name, **options: opened(dataset_name=str(name), resolution="12x8", **options)


@pytest.mark.parametrize("cache_images", ["yes", "no"])
@pytest.mark.parametrize("kind", ["npy", "npz", "h5", "Array3D"])
def test_bytes_arrive_as_they_are(kind, cache_images, load, tmp_path):
    path = tmp_path / f"a.{kind}"
    if kind == "npy":
        np.save(path, BYTES)
    elif kind == "npz":
        np.savez(path, images=BYTES, labels=LABELS)
    elif kind == "h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            file["images"], file["labels"] = BYTES, LABELS
    else:
        import datasets

        features = datasets.Features(
            {"x": datasets.Array3D((12, 8, 3), "uint8"), "label": datasets.ClassLabel(names=["a", "b", "c"])}
        )
        datasets.Dataset.from_dict({"x": list(BYTES), "label": LABELS}, features=features).save_to_disk(path)
    images = load(path, cache_images=cache_images)
    for one in (images, pickle.loads(pickle.dumps(images))):
        assert np.array_equal(one.fetch(np.arange(10)), BYTES.transpose(0, 3, 1, 2))
    if kind == "npy":
        assert images.labels is None
    else:
        assert images.labels.tolist() == LABELS.tolist()
    assert images.original_sizes(range(3)).tolist() == [[12, 8]] * 3
    assert len(load(path, cache_images=cache_images, max_train_images=4)) == 4


@pytest.mark.parametrize(
    ("stored", "labels", "names"),
    [
        (LABELS[:, None], LABELS.tolist(), None),
        (np.eye(3)[LABELS], LABELS.tolist(), None),
        (LABELS.astype(np.float32), LABELS.tolist(), None),
        (np.array(["b", "a", "c"])[LABELS], np.array([1, 0, 2])[LABELS].tolist(), ["a", "b", "c"]),
        (LABELS == 1, (LABELS == 1).tolist(), ["False", "True"]),
    ],
)
def test_labels_of_arrays_are_read_as_those_of_columns(stored, labels, names, load, tmp_path):
    np.savez(tmp_path / "a.npz", images=BYTES, labels=stored)
    images = load(tmp_path / "a.npz")
    assert images.labels.tolist() == labels and images.class_names == names
    table = open_table(Source(name=str(tmp_path / "a.npz")), None)
    assert table.labels.tolist() == labels


def test_the_only_array_needs_no_name(load, tmp_path):
    np.savez(tmp_path / "a.npz", BYTES)
    assert np.array_equal(load(tmp_path / "a.npz").fetch([3]), BYTES[3:4].transpose(0, 3, 1, 2))
    assert np.array_equal(open_table(Source(name=str(tmp_path / "a.npz")), None).images([3])[0], BYTES[3])


def test_floats_keep_their_range_and_as_many_levels_as_asked_for(load, tmp_path):
    np.save(tmp_path / "a.npy", FLOATS)
    given = {"image_channels": 6, "data_range": [-1, 1]}
    for levels, options in ((255, {}), (65535, {"preserve_input_precision": True})):
        images = load(tmp_path / "a.npy", **given, **options)
        assert (images.shape, images.max_value) == ((6, 12, 8), levels)
        values = images.fetch(np.arange(10)).transpose(0, 2, 3, 1) * (2 / levels) - 1
        assert np.abs(values - FLOATS).max() <= 1 / levels + 1e-6
    wider = load(tmp_path / "a.npy", **given | {"data_range": [-2, 2]}).fetch([0]).transpose(0, 2, 3, 1)
    assert np.abs(wider[0] * (4 / 255) - 2 - FLOATS[0]).max() <= 2 / 255 + 1e-6


def test_sixteen_bits_are_kept_to_the_last_one(load, tmp_path):
    deep = GENERATOR.integers(0, 65536, (5, 12, 8), dtype=np.uint16)
    np.savez(tmp_path / "a.npz", images=deep)
    images = load(tmp_path / "a.npz", image_channels=1, preserve_input_precision=True)
    assert images.fetch(range(5)).dtype == np.uint16
    assert np.array_equal(images.fetch(range(5))[:, 0], deep)
    assert any("scaled to 8 bits" in note for note in load(tmp_path / "a.npz", image_channels=1).notes)


def test_arrays_of_another_size_are_resized_and_cut(load, tmp_path):
    """As Pillow resizes a plane of floats; 12x8 covers it by the height here."""
    large = GENERATOR.uniform(0, 1, (1, 24, 30)).astype(np.float32)
    np.save(tmp_path / "a.npy", large)
    plane = np.asarray(Image.fromarray(large[0] * 255).resize((15, 12), Image.Resampling.BILINEAR))
    images = load(tmp_path / "a.npy", image_channels=1, data_range=[0, 1], center_crop=True)
    assert np.abs(images.fetch([0])[0, 0] - plane[:, 4:12]).max() <= 0.5 + 1e-3


def test_what_is_wrong_is_said_in_one_or_two_lines(load, tmp_path):
    holed = FLOATS.copy()
    holed[3, 0, 0, 0] = np.nan
    np.save(tmp_path / "floats.npy", FLOATS)
    np.save(tmp_path / "holed.npy", holed)
    np.save(tmp_path / "flat.npy", FLOATS[:, 0, 0])
    np.save(tmp_path / "objects.npy", np.array([{}, {}]), allow_pickle=True)
    for name, content in (("text.npz", b"no arrays"), ("empty.npy", b""), ("zip.npz", b"PK\x03\x04abc")):
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "words.npy", np.full((2, 3, 3), "word"))
    np.savez(tmp_path / "other.npz", x=BYTES, y=LABELS)
    np.savez(tmp_path / "half.npz", images=BYTES, labels=LABELS / 2)
    np.savez(tmp_path / "labels.npz", images=BYTES, labels=LABELS[:5])
    Image.fromarray(BYTES[0]).save(tmp_path / "a.png")
    six = {"image_channels": 6}
    cases = [
        ("floats.npy", six, r"float32, whose range is not known \(.* from -0.99.* to 0.99"),
        ("floats.npy", six | {"data_range": [0, 1]}, "row 0 of .*outside of the range 0 to 1"),
        ("floats.npy", six | {"data_range": [1, 0]}, "two numbers, the lower one first"),
        ("floats.npy", {"data_range": [-1, 1]}, "6 channels .* --image_channels is 3\nset --image_channels 6"),
        ("holed.npy", six | {"data_range": [-1, 1]}, "row 3 of .*NaN"),
        ("flat.npy", {"data_range": [-1, 1]}, r"they must be \[N, H, W, C\]"),
        ("objects.npy", {}, "cannot read .*objects instead of numbers"),
        ("text.npz", {}, "cannot read .*it is no file of arrays"),
        ("empty.npy", {}, "cannot read .*EOFError"),
        ("zip.npz", {}, "cannot read .*BadZipFile"),
        ("words.npy", {}, "must be whole numbers, floats or booleans"),
        ("other.npz", {}, "no 'images'; it has x, y"),
        ("half.npz", {}, "the labels of .*\n0.5 is no class"),
        ("labels.npz", {}, "the labels of .* for 10 images"),
        ("labels.npz", {"label_column": "kinds"}, "no labels 'kinds'"),
    ]
    for name, options, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            load(tmp_path / name, **options)
        assert str(caught.value).count("\n") <= 1 and "allow_pickle" not in str(caught.value)
    with pytest.raises(UserError, match="--data_range is for arrays"):
        load_images(DataOptions(train_data_dir=str(tmp_path), data_range=[0, 1], cache_dir=str(tmp_path)))
    replaced = load(tmp_path / "holed.npy", **six, data_range=[-1, 1], on_bad_image="replace")
    assert np.array_equal(replaced.fetch([3]), replaced.fetch([4]))

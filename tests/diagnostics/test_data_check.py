"""The figures of a data set, against figures found pair by pair, and against sets made to have one fault each."""

import io
import json
import pickle
import time

import numpy as np
import pytest
import torch
from PIL import Image
from test_dataset import encoded, make_dataset

from utils.data.bad_images import BadImages
from utils.data.cache import PackedImages
from utils.data.dataset import ImageSet, load_images
from utils.diagnostics.data_check import check_data
from utils.options.flags import DataOptions


class Pixels(PackedImages):
    """A cache that lies in memory."""

    uniform, bad_images = True, BadImages(0)

    def __init__(self, pixels: np.ndarray):
        self.pixels = pixels
        self.largest_fetch = 0

    def __len__(self):
        return len(self.pixels)

    def fetch(self, rows, crop):
        self.largest_fetch = max(self.largest_fetch, len(rows))
        return self.pixels[rows]


def image_set(pixels: np.ndarray, labels=None, class_names=None) -> ImageSet:
    """Of uint8 or uint16 [images, channels, side, side]."""
    max_value = np.iinfo(pixels.dtype).max
    labels = None if labels is None else np.asarray(labels)
    return ImageSet(Pixels(pixels), pixels.shape[1:], max_value, labels, class_names, "", [], "made")


def noise(count: int, channels: int = 1, side: int = 16, dtype=np.uint8, seed: int = 0) -> np.ndarray:
    high = np.iinfo(dtype).max
    return np.random.default_rng(seed).integers(0, high, (count, channels, side, side), dtype=dtype, endpoint=True)


def scenes(count: int, side: int = 32) -> np.ndarray:
    """uint8 [count, side, side, 3] with the amplitude spectrum of photographs, 1 / frequency, and their contrast."""
    generator = np.random.default_rng(0)
    frequencies = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side)[None])
    frequencies[0, 0] = np.inf
    spectra = np.fft.fft2(generator.standard_normal((count, 3, side, side))) / frequencies
    planes = np.fft.ifft2(spectra).real
    planes = planes + 2 * planes.mean(1, keepdims=True)  # colors of a photograph go together
    planes *= 50 / planes.std((1, 2, 3), keepdims=True)
    return np.clip(127.5 + planes, 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)


def planes(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixel_figures_equal_those_of_numpy(dtype, channels):
    pixels = noise(40, channels, 8, dtype) // 2
    pixels[:, 0, :4] += np.iinfo(dtype).max // 3  # so that pixels have means of their own
    figures = check_data(image_set(pixels), seed=0)
    scaled = pixels.astype(np.float64) / (np.iinfo(dtype).max / 2) - 1
    assert figures["shape"] == [channels, 8, 8] and figures["images"] == figures["images_read"] == 40
    assert figures["min"] == pytest.approx(scaled.min()) and figures["max"] == pytest.approx(scaled.max())
    assert figures["mean"] == pytest.approx(scaled.mean((0, 2, 3)).tolist())
    assert figures["std"] == pytest.approx(scaled.std((0, 2, 3)).tolist())
    assert json.loads(json.dumps(figures)) == figures


def test_constant_images_and_exact_copies_are_counted():
    pixels = noise(100)
    pixels[10:20] = np.arange(10)[:, None, None, None]  # ten blank images of different values
    pixels[30:40], pixels[50] = pixels[3], pixels[4]
    figures = check_data(image_set(pixels), seed=0)
    assert figures["constant_share"] == pytest.approx(0.1)
    copies = {"share": pytest.approx(0.11), "rows": [3, 30], "repeated": 11}
    by_chance = (11 * 10 + 2 * 1) / 100  # each of 11 equal images is followed by one of 10 others in a hundredth of the orders
    assert figures["copies"] == copies | {"following": 9, "following_by_chance": pytest.approx(by_chance)}
    assert figures["near_copies"]["images"] == 90 and figures["near_copies"]["share"] == 0
    subset = image_set(pixels).subset(range(1, 100))
    assert check_data(subset, seed=0)["copies"]["rows"] == [3, 30]  # of the dataset, not of the subset


@pytest.mark.parametrize("change", ["jpeg", "resize", "noise"])
def test_near_copies_are_found(change):
    originals = scenes(150, 64)

    def changed(image):
        if change == "jpeg":
            file = io.BytesIO()
            Image.fromarray(image).save(file, "JPEG", quality=75)
            return np.asarray(Image.open(file))
        if change == "resize":
            return np.asarray(Image.fromarray(image).resize((48, 48), 2).resize((64, 64), 2))
        return np.clip(image + np.random.default_rng(0).integers(-2, 3, image.shape), 0, 255).astype(np.uint8)

    copies = np.stack([changed(image) for image in originals[:30]])
    figures = check_data(image_set(planes(np.concatenate([originals, copies]))), seed=0)
    assert figures["near_copies"]["share"] == pytest.approx(60 / 180)
    first, second = sorted(figures["near_copies"]["rows"])
    assert second == first + 150
    assert figures["copies"]["share"] == 0


def test_different_images_are_not_near_copies(tmp_path):
    digits = {
        side: load_images(DataOptions(dataset_name="digits", resolution=side, image_channels=1, cache_dir=str(tmp_path)))
        for side in (8, 16)
    }
    for name, images in {
        "noise": image_set(noise(2000)),
        "scenes": image_set(planes(scenes(1000))),
        "digits, 8x8": digits[8],
        "digits, 16x16": digits[16],
    }.items():
        figures = check_data(images, seed=0)
        assert figures["near_copies"]["share"] == 0, name
        assert figures["copies"]["share"] == 0, name


@pytest.mark.parametrize(
    "pixels",
    [noise(60, 1, 8) // 4 + 100, noise(60, 1, 8, np.uint16) // 4096 + 60_000],  # the second ones are faint
    ids=["8 bits", "faint, 16 bits"],
)
def test_nearest_pair_equals_brute_force(pixels):
    scaled = pixels.reshape(60, -1) / (np.iinfo(pixels.dtype).max / 2) - 1
    distances = np.sqrt(np.square(scaled[:, None] - scaled[None]).mean(2))
    np.fill_diagonal(distances, np.inf)
    relative = distances.min(1) / scaled.std(1)
    figures = check_data(image_set(pixels), seed=0)["near_copies"]
    nearest = relative.argmin()
    assert figures["rows"] == [nearest, distances[nearest].argmin()]


def test_what_is_read_is_bounded_and_the_seed_chooses():
    pixels = noise(3000, 3, 32)
    images = image_set(pixels)
    figures = check_data(images, seed=0, sample=50, max_images=700)
    assert figures["images"] == 3000 and figures["images_read"] == 700 and figures["near_copies"]["images"] == 50
    assert check_data(images, seed=0, max_bytes=100 * 3072)["images_read"] == 100
    assert images.store.largest_fetch * 3072 <= 2**20
    assert figures == check_data(images, seed=0, sample=50, max_images=700)
    assert figures["mean"] != check_data(images, seed=1, sample=50, max_images=700)["mean"]


def test_classes_are_counted():
    labels = [0] * 6 + [1] * 3 + [3]
    named = check_data(image_set(noise(10), labels, ["ant", "bee", "cow", "doe"]), seed=0)["classes"]
    assert named == {
        "number": 4,
        "empty": 1,
        "largest": "ant",
        "largest_share": 0.6,
        "counts": {"ant": 6, "bee": 3, "cow": 0, "doe": 1},
    }
    numbered = check_data(image_set(noise(10), [7, 7, 7, 7, 7, 10**9, 10**9, 10**9, 10**9, 10**9]), seed=0)["classes"]
    assert numbered["counts"] == {"7": 5, "1000000000": 5}
    assert check_data(image_set(noise(2000), np.arange(2000)), seed=0)["classes"]["counts"] is None
    assert check_data(image_set(noise(10)), seed=0)["classes"] is None


@pytest.mark.parametrize("pixels", [noise(1), np.full((1, 3, 4, 4), 9, np.uint16), np.full((5, 1, 4, 4), 9, np.uint8)])
def test_sets_with_nothing_to_compare(pixels):
    figures = check_data(image_set(pixels, [0] * len(pixels)), seed=0)
    json.dumps(figures, allow_nan=False)
    assert figures["near_copies"] is None
    with pytest.raises(ValueError, match="no images"):
        check_data(image_set(pixels[:0]), seed=0)


@pytest.mark.parametrize("cache_images", ["yes", "no"])
def test_enlargement_is_read_from_the_headers_of_the_files(cache_images, tmp_path):
    sides = [(8, 30), (30, 15), (16, 16), (40, 20)]
    rng = np.random.default_rng(0)
    files = [{"bytes": encoded(rng.integers(0, 256, (*side, 3), dtype=np.uint8)), "path": None} for side in sides]
    make_dataset({"image": files}).save_to_disk(tmp_path / "data")
    images = load_images(
        DataOptions(dataset_name=str(tmp_path / "data"), resolution=16, cache_dir=str(tmp_path), cache_images=cache_images)
    )
    assert images.original_sizes([3, 0]).tolist() == [[40, 20], [8, 30]]
    assert images.original_sizes(range(4), max_bytes=1).tolist() == [[8, 30]]
    assert images.subset([2, 1]).original_sizes([1]).tolist() == [[30, 15]]
    figures = check_data(images, seed=0)
    expected = {"images": 4, "enlarged_share": 0.5, "shorter_side_min": 8, "shorter_side_median": 15.5}
    assert figures["sizes"] == expected and figures["images_read"] == 4
    assert check_data(images, seed=0, sample=3)["images_read"] == (4 if cache_images == "yes" else 3)
    copy = pickle.loads(pickle.dumps(images))
    assert np.array_equal(copy.fetch([1]), images.fetch([1])) and check_data(copy, seed=0)["sizes"] is None


def test_files_that_are_gone_are_left_out(tmp_path):
    for number, side in enumerate((8, 32)):
        Image.fromarray(noise(1, 1, side)[0, 0]).save(tmp_path / f"{number}.png")
    images = load_images(
        DataOptions(train_data_dir=str(tmp_path), resolution=16, image_channels=1, cache_dir=str(tmp_path / "cache"))
    )
    (tmp_path / "0.png").unlink()
    assert check_data(images, seed=0)["sizes"]["shorter_side_min"] == 32
    (tmp_path / "1.png").unlink()
    assert check_data(images, seed=0)["sizes"] is None


def test_fast_enough_to_run_before_every_training():
    images = image_set(noise(10_000, 3, 32), np.zeros(10_000, np.int64))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.process_time()
        check_data(images, seed=0)
        assert time.process_time() - start < 2  # 0.4 s on a quiet core; 50,000 images take 1.3 s
    finally:
        torch.set_num_threads(threads)

"""Images of 16 bits, transparent ones, and arrays of many channels, from files to files."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tiny_flags, step_seen
from PIL import Image

import evaluate
import generate
import train_ddpm
from utils.core.errors import UserError
from utils.core.images import image_suffix, is_complete_image, make_grid, read_image, save_image
from utils.data.dataset import load_images
from utils.options.flags import DataOptions
from utils.runs.record import RunRecord


def write_images(folder, mode, count=40, size=(20, 24)):
    """Soft blobs, transparent at the corners; of mode I;16 with thousands of levels."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        if mode == "I;16":
            small = Image.fromarray(generator.uniform(0, 65535, (4, 4)).astype(np.float32))
            pixels = np.asarray(small.resize(size, Image.Resampling.BILINEAR))
            image = Image.fromarray(pixels.astype(np.uint16))
        else:
            bands = [Image.fromarray(generator.integers(0, 256, (4, 4), dtype=np.uint8)) for _ in mode]
            image = Image.merge(mode, [band.resize(size, Image.Resampling.BICUBIC) for band in bands])
        image.save(folder / f"{number}.png")
    return folder


def from_data_to_samples(resumed_alike, flags: list, folder: Path, script=train_ddpm, more: tuple = ()) -> tuple[Path, Path]:
    """(a run, the 12 images that its pipeline makes): resumed it is the same, and the doctor finds nothing in it."""
    flags = [*flags, "--random_flip", "--validation_images", "4", "--validation_steps", "4"]
    run, images = resumed_alike(flags, folder, script, more), folder / "made"
    stages, found = step_seen(run)
    assert "data" in stages and found == {}
    assert [failed for _, checks in RunRecord.read(run).records("data_checks") for failed in checks["failed"]] == []
    asked = ["--pipeline", run, "--output_dir", images, "--num_images", "12", "--num_inference_steps", "3"]
    generate.main(generate.parse_args([*map(str, asked)]))
    return run, images


def with_channels(folder: Path, channels: int, changes: dict) -> list:
    """Tiny flags for images of so many channels."""
    flags = [changes.get(before, word) for before, word in pairwise(["", *make_tiny_flags(folder)])]
    network = json.loads((folder / "config.json").read_text()) | dict.fromkeys(("in_channels", "out_channels"), channels)
    (folder / "config.json").write_text(json.dumps(network))
    return [*flags, "--image_channels", str(channels)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["I;16", "RGBA"])
def test_a_run_from_files_to_files(mode, resumed_alike, tmp_path, capsys):
    deep = mode == "I;16"
    channels = 1 if deep else 3
    folder = write_images(tmp_path / "images", mode)
    flags = [*with_channels(tmp_path, channels, {"--dataset_name": str(folder)}), "--background", "navy"]
    flags += ["--preserve_input_precision"] if deep else ["--color_jitter", "0.2"]
    run, out = from_data_to_samples(resumed_alike, flags, tmp_path)
    with Image.open(out / "000000.png") as image:
        assert image.mode == ("I;16" if deep else "RGB") and image.size == (16, 16)
        assert not deep or len(np.unique(np.asarray(image))) > 200
    assert Image.open(out / "grid.png").mode == "RGB"
    real = ["--train_data_dir", str(folder), "--no_classes", "--json", "--num_inference_steps", "3", "--background", "navy"]
    capsys.readouterr()
    evaluate.main(evaluate.parse_args(["--images", str(out), "--pipeline", str(run), "--num_images", "12", *real]))
    found = json.loads(capsys.readouterr().out)["results"]
    assert [result["image_shape"] for result in found] == [[channels, 16, 16]] * 2


@pytest.mark.slow
def test_a_run_on_arrays(resumed_alike, tmp_path):
    """Five channels of floats, smaller and larger than the size, with labels; resumed without a cache."""
    generator, path = np.random.default_rng(0), tmp_path / "waves.npz"
    waves = np.cumsum(generator.normal(size=(40, 20, 30, 5)), axis=1)
    np.savez(path, images=(waves / np.abs(waves).max() * 3).astype(np.float32), labels=np.arange(40) % 2)
    flags = with_channels(tmp_path, 5, {"--dataset_name": str(path), "--resolution": "16x24"})
    flags += ["--data_range", "-3", "3", "--preserve_input_precision", "--class_conditional"]
    more = ("--cache_images", "no", "--dataloader_num_workers", "1")
    run, out = from_data_to_samples(resumed_alike, flags, tmp_path, more=more)
    assert "condition" in step_seen(run)[0]
    made = np.load(out / "000003.npy")
    assert (made.shape, made.dtype) == ((16, 24, 5), np.uint16)
    real = ["--dataset_name", str(path), "--data_range", "-3", "3", "--no_classes", "--json"]
    evaluate.main(evaluate.parse_args(["--images", str(out), *real]))


@pytest.mark.parametrize(
    ("channels", "bits", "suffix"), [(1, 16, ".png"), (3, 8, ".png"), (4, 8, ".npy"), (3, 16, ".npy"), (6, 8, ".npy")]
)
def test_files_hold_what_was_made(channels, bits, suffix, tmp_path):
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 2**bits, (channels, 6, 5)).astype(f"uint{bits}"))
    assert image_suffix(channels, bits) == suffix
    path = tmp_path / f"000000{suffix}"
    save_image(image, path)
    assert np.array_equal(read_image(path).numpy(), image.numpy())
    assert is_complete_image(path, (channels, 6, 5)) and not is_complete_image(path, (channels, 5, 6))
    path.write_bytes(path.read_bytes()[:-20])
    assert not is_complete_image(path, (channels, 6, 5))


def test_grids_show_many_channels():
    assert make_grid(torch.zeros(2, 6, 64, 64, dtype=torch.uint8), columns=1).size == (6 * 64 + 4, 2 * 66 + 2)


@pytest.mark.parametrize("channels", [2, 4, 5])
def test_channels_that_files_cannot_have(channels, tmp_path):
    folder = write_images(tmp_path / "images", "RGBA", 2)
    with pytest.raises(UserError, match=f"--image_channels is {channels}.*\nset 1 or 3"):
        load_images(DataOptions(train_data_dir=str(folder), resolution=16, cache_dir=str(tmp_path), image_channels=channels))

"""Images that are not square, from files to samples: both scripts, resumed, and what reads the pipeline afterwards."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, TINY_EDM2_NETWORK, TINY_NETWORK, make_tiny_flags, slow_turns
from PIL import Image
from test_channels import from_data_to_samples

import evaluate
import train_ddpm
import train_edm2
from utils.core.errors import UserError
from utils.diffusion.export import check_pipeline
from utils.diffusion.pipelines import image_shape, load_network
from utils.diffusion.unet import make_edm2_unet, make_unet
from utils.runs.record import RunRecord

MODULES = {"train_ddpm.py": train_ddpm, "train_edm2.py": train_edm2}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Photographs in portrait and landscape, none of the proportions that are trained."""
    folder, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(40):
        height, width = generator.integers(20, 60, 2)
        small = Image.fromarray(generator.integers(0, 256, (5, 5), dtype=np.uint8))
        place = folder / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(exist_ok=True)
        small.resize((int(width), int(height)), Image.Resampling.BICUBIC).save(place)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPTS[0], *slow_turns(SCRIPTS[1])])
def test_a_run_from_files_to_samples(script, resumed_alike, tmp_path, pictures, capsys):
    changes = {"--dataset_name": str(pictures), "--resolution": "24x16"}
    flags = [changes.get(before, word) for before, word in pairwise(["", *make_tiny_flags(tmp_path, script)])]
    run, images = from_data_to_samples(resumed_alike, flags, tmp_path, MODULES[script])
    assert RunRecord.read(run).options["resolution"] == "24x16"
    check_pipeline(run)
    assert image_shape(load_network(str(run))[0]) == (1, 24, 16)
    assert Image.open(images / "000000.png").size == (16, 24)
    real = ["--train_data_dir", str(pictures), "--num_images", "12", "--no_classes", "--json"]
    capsys.readouterr()
    evaluate.main(evaluate.parse_args(["--images", str(images), "--pipeline", str(run), *real]))
    found = json.loads(capsys.readouterr().out)["results"]
    assert [result["image_shape"] for result in found] == [[1, 24, 16]] * 2


@pytest.mark.parametrize("resolution, message", [("24x17", "24x16 or 24x18"), ("25x17", "24x16 or 26x18"), ("17", "16 or 18")])
def test_levels_must_divide_both_sides(resolution, message, tmp_path):
    """Of both networks, in one line that says which sizes fit."""
    for make, network, module in (
        (make_unet, TINY_NETWORK, train_ddpm),
        (make_edm2_unet, TINY_EDM2_NETWORK, train_edm2),
    ):
        (tmp_path / "config.json").write_text(json.dumps(network))
        flags = ["--dataset_name", "any", "--resolution", resolution, "--image_channels", "1"]
        options = module.parse_args([*flags, "--model_config_name_or_path", str(tmp_path)])
        with pytest.raises(UserError, match=f"--resolution {resolution} does not divide by 2: .*\nuse {message}$"):
            make(options)


def test_a_network_of_another_shape_is_the_same_function(tmp_path):
    """Both networks are convolutions: made for 24x16, they give what those made for 16 give for the same images."""
    images, level = torch.randn(1, 1, 24, 16), torch.ones(1)
    for make, network, module in (
        (make_unet, TINY_NETWORK, train_ddpm),
        (make_edm2_unet, TINY_EDM2_NETWORK, train_edm2),
    ):
        (tmp_path / "config.json").write_text(json.dumps(network))
        flags = ["--dataset_name", "any", "--image_channels", "1", "--model_config_name_or_path", str(tmp_path)]
        square, tall = (make(module.parse_args([*flags, "--resolution", size])) for size in ("16", "24x16"))
        assert (square.config.sample_size, list(tall.config.sample_size)) == (16, [24, 16])
        with torch.no_grad():
            for parameter in (*square.parameters(), *tall.parameters()):
                if parameter.ndim == 0:  # EDM2's gains, which start at 0
                    parameter.fill_(0.5)
            assert torch.equal(square(images, level).sample, tall(images, level).sample)

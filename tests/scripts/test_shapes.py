"""Images that are not square, from files to samples: both scripts, resumed, and what reads the pipeline afterwards."""

import json

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, TINY_EDM2_NETWORK, TINY_NETWORK, make_tiny_flags, slow_turns, step_seen
from PIL import Image

import evaluate
import generate
import train_ddpm
import train_edm2
from utils.core.errors import UserError
from utils.diffusion.edm2_unet import make_edm2_unet
from utils.diffusion.export import check_pipeline
from utils.diffusion.pipelines import image_shape, load_network
from utils.diffusion.unet import make_unet
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


def flags_of(script, tmp_path, pictures) -> list:
    flags = make_tiny_flags(tmp_path, script)
    flags[flags.index("--dataset_name")] = "--train_data_dir"
    flags[flags.index("digits")] = str(pictures)
    flags[flags.index("--resolution") + 1] = "24x16"
    return [*flags, "--random_flip", "--validation_images", "8", "--validation_steps", "4", "--checkpointing_steps", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPTS[0], *slow_turns(SCRIPTS[1])])
def test_a_run_from_files_to_samples(script, train, tmp_path, pictures, capsys):
    """The doctor finds nothing, a resumed run has the same weights to the bit, and the pipeline makes such images."""
    flags, module = flags_of(script, tmp_path, pictures), MODULES[script]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert train([*flags, "--output_dir", straight], module) == 0
    assert train([*flags, "--output_dir", resumed, "--max_train_steps", "4"], module) == 0
    assert train([*flags, "--output_dir", resumed, "--resume_from_checkpoint", "latest"], module) == 0
    weights = "unet/diffusion_pytorch_model.safetensors"
    if script == "train_ddpm.py":  # the other's average depends on the length of the run
        assert (straight / weights).read_bytes() == (resumed / weights).read_bytes()
    raw = "checkpoint-8/model.safetensors"
    assert (straight / raw).read_bytes() == (resumed / raw).read_bytes()

    record = RunRecord.read(straight)
    assert record.options["resolution"] == "24x16"
    stages, found = step_seen(straight)
    assert "data" in stages and found == {}

    check_pipeline(straight)
    unet, _ = load_network(str(straight))
    assert image_shape(unet) == (1, 24, 16)
    out = tmp_path / "images"
    generate.main(generate.parse_args(["--pipeline", str(straight), "--output_dir", str(out), "--num_images", "12"]))
    assert Image.open(out / "000000.png").size == (16, 24)
    real = ["--train_data_dir", str(pictures), "--num_images", "12", "--no_classes", "--json"]
    capsys.readouterr()
    evaluate.main(evaluate.parse_args(["--images", str(out), "--pipeline", str(straight), *real]))
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

"""What the documentation says of presets: their networks, and which one a size gets, against the networks that are built."""

import re

import pytest
import torch
from conftest import ROOT

from models.edm2_unet import PRESETS
from utils.core.errors import UserError
from utils.diffusion.unet import make_edm2_unet, make_unet
from utils.options.flags import DDPMOptions, EDM2Options
from utils.options.presets import EDM2_FLAGS, FLAGS, NETWORKS

OF_DDPM, OF_EDM2 = ((ROOT / "docs" / page).read_text() for page in ("data.md", "edm2.md"))
SIZES = re.findall(r"^\| `(\w+)` \| .*?\b(\d+)x\2\b.* \| ([\d.]+) M \|$", OF_DDPM, re.MULTILINE)
CHOICES = [(int(divisor), name) for divisor, name in re.findall(r"^\| (\d+) \| `(\w+)`", OF_DDPM, re.MULTILINE)]


def millions(network: torch.nn.Module) -> float:
    return sum(parameter.numel() for parameter in network.parameters()) / 1e6


def unet_for(resolution: int | str, preset: str | None = None, channels: int = 3) -> torch.nn.Module:
    with torch.device("meta"):
        return make_unet(DDPMOptions(resolution=resolution, image_channels=channels, model_preset=preset))


def test_the_table_of_train_ddpm_has_every_preset():
    assert [name for name, *_ in SIZES] == list(NETWORKS) == list(FLAGS)


@pytest.mark.parametrize(("name", "resolution", "size"), SIZES)
def test_presets_of_train_ddpm_have_their_documented_sizes(name, resolution, size):
    assert FLAGS[name]["resolution"] == int(resolution)
    network = unet_for(int(resolution), name, FLAGS[name].get("image_channels", 3))
    assert f"{millions(network):.{len(size.split('.')[1])}f}" == size


@pytest.mark.parametrize("resolution", [16, 24, 28, 30, 32, 40, 64, 96, 100, 128, 256, "64x40", "96x64", "28x32", "64x30"])
def test_a_size_gets_the_documented_network(resolution):
    sides = [int(side) for side in str(resolution).split("x")]
    documented = next((name for divisor, name in CHOICES if not any(side % divisor for side in sides)), None)
    if documented is None:
        with pytest.raises(UserError, match="no preset fits"):
            unet_for(resolution)
    else:
        config = unet_for(resolution).config
        assert {key: config[key] for key in NETWORKS[documented]} == NETWORKS[documented]


def test_images_of_64_pixels_get_as_many_parameters_as_is_said():
    [said] = re.findall(r"images of 64x64 pixels are trained with ([\d.]+) M parameters", OF_DDPM)
    assert f"{millions(unet_for(64)):.1f}" == said


def test_presets_of_train_edm2_have_their_documented_sizes():
    def built(name: str) -> float:
        usual = EDM2_FLAGS[name]
        shape = {"resolution": usual.get("resolution", 64), "image_channels": usual.get("image_channels", 3)}
        with torch.device("meta"):
            return millions(make_edm2_unet(EDM2Options(model_preset=name, **shape)))

    rows = re.findall(r"^\| (`\w+`.*?) \| (.*) \| (.* [MB]) \|$", OF_EDM2, re.MULTILINE)
    table = {presets: (text, size) for presets, text, size in rows}
    assert list(table) == ["`digits16`", "`small32`, `small64`", "`few`", "`XXS` to `XXL`"] and set(PRESETS) == set(EDM2_FLAGS)
    assert table["`digits16`"][1] == f"{built('digits16'):.1f} M"
    assert table["`small32`, `small64`"][1] == f"{built('small32'):.1f} M, {built('small64'):.1f} M"
    assert table["`XXS` to `XXL`"][1] == f"{built('XXS'):.0f} M to {built('XXL') / 1000:.1f} B"
    assert f"`{EDM2Options.usual_preset}` ({built('XS'):.1f} M at 64x64) is the default" in table["`XXS` to `XXL`"][0]

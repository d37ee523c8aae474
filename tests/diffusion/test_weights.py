"""Folders of weights that are meant as pipelines: averaged ones beside others, variants, networks alone."""

import shutil

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from safetensors.torch import load_file, save_file

from utils.core.errors import UserError
from utils.diffusion.pipelines import load_network
from utils.evaluation.newest import loadable


def network(seed):
    torch.manual_seed(seed)
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (4,)}
    return UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=2, **blocks)


RAW, AVERAGED = network(0), network(1)


@pytest.fixture
def pipeline(tmp_path):
    def save(unet=RAW, **options):
        DDPMPipeline(unet, DDPMScheduler(num_train_timesteps=77)).save_pretrained(tmp_path / "p", **options)
        return tmp_path / "p"

    return save


def assert_is(unet, expected):
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in unet.state_dict().items())


@pytest.mark.parametrize("variant", ["fp16", "non_ema", "ema"])
def test_the_only_variant_is_used_and_told(variant, pipeline, capsys):
    folder = str(pipeline(variant=variant))
    unet, config = load_network(loadable(folder))
    assert_is(unet, RAW)
    assert config["num_train_timesteps"] == 77
    assert capsys.readouterr().err.startswith(
        f"{folder}: the variant {variant} of the weights is used, because there are no others"
    )


def test_other_weights_beside_those_that_are_used_are_told(pipeline, capsys):
    folder = pipeline()
    assert loadable(str(folder)) == str(folder) and capsys.readouterr().err == ""
    AVERAGED.save_pretrained(folder / "unet_ema")
    AVERAGED.save_pretrained(folder / "unet", variant="non_ema")
    assert_is(load_network(loadable(str(folder)))[0], RAW)
    told = "the weights in unet are used; there are others in non_ema (diffusion_pytorch_model.non_ema), unet_ema\n"
    assert capsys.readouterr().err == f"{folder}: {told}"


@pytest.mark.parametrize("kind", ["checkpoint", "checkpoint of a run", "without unet", "side by side", "network alone"])
def test_the_line_that_makes_a_pipeline_of_a_network_works(kind, pipeline, tmp_path, monkeypatch):
    folder, expected, timesteps = tmp_path / "p", AVERAGED, 77
    if kind.startswith("checkpoint"):
        timesteps = 77 if kind == "checkpoint of a run" else 1000
        folder = (pipeline() if timesteps == 77 else folder) / "checkpoint-500"
        RAW.save_pretrained(folder / "unet")
        AVERAGED.save_pretrained(folder / "unet_ema")
    elif kind == "without unet":
        shutil.move(pipeline(AVERAGED) / "unet", folder / "unet_ema")
    elif kind == "side by side":
        AVERAGED.save_pretrained(folder, safe_serialization=False)
        DDPMScheduler(num_train_timesteps=77).save_pretrained(folder)
    else:
        RAW.save_pretrained(folder)
        expected, timesteps = RAW, 1000
    with pytest.raises(UserError, match=r"it has a network: .*\nmake a pipeline of it: ") as caught:
        load_network(str(folder))
    monkeypatch.chdir(tmp_path)
    names = {"DDPMPipeline": DDPMPipeline, "UNet2DModel": UNet2DModel, "DDPMScheduler": DDPMScheduler}
    eval(str(caught.value).partition("make a pipeline of it: ")[2], names)
    unet, config = load_network("pipeline")
    assert_is(unet, expected)
    assert config["num_train_timesteps"] == timesteps


def test_other_files_are_named(pipeline, tmp_path):
    folder = pipeline()
    with pytest.raises(UserError, match=f"one part of a pipeline\nuse the folder above: {folder}$"):
        load_network(str(folder / "unet"))
    (tmp_path / "w").mkdir()
    torch.save(RAW.state_dict(), tmp_path / "w" / "model.pt")
    with pytest.raises(UserError, match=r"weights without a config: model\.pt\n"):
        load_network(str(tmp_path / "w"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:2000]), r"Unable to load weights .*safetensors.*\ncheck its files"),
        (lambda file: file.write_bytes(b""), r"Unable to load weights .*safetensors.*\ncheck its files"),
        (
            lambda file: changed(file, lambda name: f"module.{name}"),
            r"lack \d+ tensors of the network, such as conv_in\.weight\n",
        ),
        (
            lambda file: changed(file, lambda name: name.replace("conv_in.bias", "x")),
            "lack 1 tensors .* such as conv_in.bias\n",
        ),
    ],
)
def test_weights_that_are_damaged_or_of_another_network_are_one_clear_line(damage, message, pipeline):
    folder = pipeline()
    damage(folder / "unet" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(UserError, match=message):
        load_network(str(folder))
    with pytest.raises(UserError, match=r"it is a file\nuse the folder"):
        load_network(str(folder / "unet" / "diffusion_pytorch_model.safetensors"))


def changed(file, rename):
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file)

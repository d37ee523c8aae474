"""The weights of pipelines: their variant, and what is said of damaged ones."""

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from safetensors.torch import load_file, save_file

from utils.core.errors import UserError
from utils.diffusion.pipelines import load_network


def network(seed):
    torch.manual_seed(seed)
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (4,)}
    return UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=2, **blocks)


RAW = network(0)


@pytest.fixture
def pipeline(tmp_path):
    def save(unet=RAW, **options):
        DDPMPipeline(unet, DDPMScheduler(num_train_timesteps=77)).save_pretrained(tmp_path / "p", **options)
        return tmp_path / "p"

    return save


def assert_is(unet, expected):
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in unet.state_dict().items())


def test_the_variant_fp16_is_used_where_there_are_no_other_weights(pipeline):
    unet, config = load_network(str(pipeline(variant="fp16")))
    assert_is(unet, RAW)
    assert config["num_train_timesteps"] == 77


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:2000]), r"its weights .*safetensors are damaged\n"),
        (lambda file: file.write_bytes(b""), r"its weights .*safetensors are damaged\n"),
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


def changed(file, rename):
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file)

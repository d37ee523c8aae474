"""Runs whose network is told of its images' transforms: what it learns of them stays out of what is published."""

import pytest
import torch
from conftest import TINY_EDM2_NETWORK, TINY_NETWORK
from diffusers import DDPMPipeline, UNet2DModel
from safetensors.torch import load_file

from models.edm2_unet import EDM2UNet
from utils.diffusion.pipelines import load_network
from utils.diffusion.transforms import TransformEmbedding

NETWORKS = {"train_ddpm.py": (UNet2DModel, TINY_NETWORK), "train_edm2.py": (EDM2UNet, TINY_EDM2_NETWORK)}
IMAGES, LEVELS = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_zeros_change_nothing_and_others_do(name):
    torch.manual_seed(0)
    network, config = NETWORKS[name]
    sizes = {"in_channels": 1, "out_channels": 1, "sample_size": 16, "num_class_embeds": None}
    unet = network.from_config(config | sizes).eval()
    for parameter in unet.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))  # nothing is 0
    plain, names = unet(IMAGES, LEVELS).sample, unet.state_dict().keys()
    embedding = TransformEmbedding(unet)

    def output(numbers: torch.Tensor | None) -> torch.Tensor:
        with embedding.given(numbers):
            return unet(IMAGES, LEVELS).sample

    assert torch.equal(output(torch.ones(3, 9)), plain)  # at the start
    for parameter in embedding.parameters():
        parameter.fill_(0.3)
    numbers = torch.tensor([0.0, 1.0, 0.0])[:, None].expand(3, 9)
    changed = (output(numbers) - plain).flatten(1).abs().amax(1)
    assert changed[1] > 1e-3 > 1e-6 > changed[[0, 2]].max()
    assert torch.equal(output(torch.zeros(3, 9)), plain) and torch.equal(output(None), plain)
    assert unet.state_dict().keys() == names


def test_a_checkpoint_has_what_the_pipeline_has_not(train_script, script, script_flags, tmp_path):
    flags = [*script_flags, "--augment_probability", "0.5", "--checkpointing_steps", "8", "--ema_type", "power"]
    assert train_script([*flags, "--output_dir", tmp_path]) == 0
    checkpoint, pipeline = tmp_path / "checkpoint-8", load_file(tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    trained = load_file(checkpoint / "model.safetensors")
    assert all(tensor.any() for name, tensor in trained.items() if name.startswith("transforms."))
    extra = {name for name in trained if name.removeprefix("unet.") not in pipeline and not name.startswith("uncertainty.")}
    assert extra == {"transforms.linear.weight"} | ({"transforms.gain"} if script == "train_edm2.py" else set())
    unet, _ = load_network(str(checkpoint))
    assert all(torch.equal(tensor, pipeline[name]) for name, tensor in unet.state_dict().items())
    if script == "train_ddpm.py":
        DDPMPipeline.from_pretrained(tmp_path).unet.load_state_dict(pipeline)

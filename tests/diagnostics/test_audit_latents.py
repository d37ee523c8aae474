"""What the audit says of latents that are not those of the files."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny

from utils.diagnostics.audit.files import DeclaredImages
from utils.diagnostics.audit.latents import LatentFiles

MEAN, STD = [0.1, -0.2], [0.5, 0.25]
DECLARED = DeclaredImages(
    resolution=32, channels=1, center_crop=False, random_flip=True, color_jitter=0.0, background="white", max_value=255
)


def small(kind: str):
    torch.manual_seed(0)
    if kind == "AutoencoderTiny":
        sides = {f"{side}_block_out_channels": (8, 8) for side in ("encoder", "decoder")}
        blocks = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
        return AutoencoderTiny(in_channels=1, out_channels=1, latent_channels=2, scaling_factor=0.5, **blocks, **sides)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 2, "scaling_factor": 0.5}
    return AutoencoderKL(in_channels=1, out_channels=1, **blocks, **sizes)


def failed(folder, latents, files, config_spread=None, mean=MEAN, std=STD) -> list[str]:
    checks = LatentFiles(str(folder), (mean, std), config_spread).check(latents, files, DECLARED)
    assert all(check.healthy is not None for check in checks)
    return [f"{check.name}: {check.message}" for check in checks if not check.healthy]


@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderTiny"])
def test_latents_of_other_images_or_of_another_scale_are_found(tmp_path, kind):
    network = small(kind).eval()
    network.save_pretrained(tmp_path)
    files = list(np.random.default_rng(0).integers(0, 256, (4, 32, 32), dtype=np.uint8))
    images = torch.from_numpy(np.stack(files)).float()[:, None] / 127.5 - 1
    images[1] = images[1].flip(-1)  # as --random_flip does
    with torch.no_grad():
        found = network.encode(images)
    if kind == "AutoencoderTiny":
        center, spread = found.latents, torch.zeros_like(found.latents)
    else:
        center, spread = found.latent_dist.mean, found.latent_dist.std * torch.randn(found.latent_dist.mean.shape)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    latents = (center + spread - mean) / std
    assert failed(tmp_path, latents, files) == []
    assert failed(tmp_path, latents.half(), files) == []
    if kind == "AutoencoderTiny":  # in the other one the noise of random weights hides the image
        assert "not those of the files" in failed(tmp_path, latents.flip(0), files)[0]
        assert "not those of the files" in failed(tmp_path, latents.flip(-2), files)[0]
    else:
        assert "have less noise" in failed(tmp_path, (center - mean) / std, files)[0]
        assert "not those of the files" in failed(tmp_path, (center + 2 * spread - mean) / std, files)[0]
    assert "not those of the files" in failed(tmp_path, latents * 3, files)[0]
    assert "another shape" in failed(tmp_path, latents[:, :1].expand(-1, 3, -1, -1), files)[0]
    assert "another shape" in failed(tmp_path, latents * torch.nan, files)[0]
    of_config = {"mean": [0.0, 0.0], "std": [4.0, 4.0]}  # a scaling factor of 0.5, for a spread of 0.5
    assert failed(tmp_path, (center + spread) / 4, files, 0.5, **of_config) == []
    (message,) = failed(tmp_path, (center + spread) / 2, files, 0.5, mean=[0.0, 0.0], std=[2.0, 2.0])
    assert message.startswith("scale of latents: latents are scaled by mean 0, spread 2, and")


def test_an_autoencoder_that_is_gone_is_not_observed(tmp_path):
    (check,) = LatentFiles(str(tmp_path / "gone"), (MEAN, STD), None).check(torch.zeros(1, 2, 16, 16), [], DECLARED)
    assert check.healthy is None and "cannot be loaded again" in check.observed

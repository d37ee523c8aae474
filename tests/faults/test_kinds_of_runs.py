"""SIGKILL in runs of each kind, and two processes: fine-tuned, with classes, not square, of four channels, arrays, latents."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_NETWORK, make_tiny_flags, slow_turns, small_kl, step_seen
from kills import PHASED, Killer
from PIL import Image
from safetensors.torch import load_file


def with_network(flags: dict, channels: int) -> dict:
    folder = Path(flags["--model_config_name_or_path"])
    folder.joinpath("config.json").write_text(
        json.dumps(TINY_NETWORK | dict.fromkeys(("in_channels", "out_channels"), channels))
    )
    return flags


def fine_tuned(flags: dict, folder: Path) -> dict:
    from diffusers import UNet2DModel

    from utils.diffusion.ddpm import make_noise_scheduler
    from utils.diffusion.export import export_pipeline

    export_pipeline(UNet2DModel(**TINY_NETWORK), make_noise_scheduler(prediction_type="v_prediction"), folder / "start", "")
    return flags | {"--model_config_name_or_path": None, "--pretrained": folder / "start"}


def with_classes(flags: dict, folder: Path) -> dict:
    return flags | {"--class_conditional": True, "--guidance": 2}


def not_square(flags: dict, folder: Path) -> dict:
    return flags | {"--resolution": "24x16"}


def of_four_channels(flags: dict, folder: Path) -> dict:
    (folder / "images").mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (80, 16, 16, 4), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / "images" / f"{number:02d}.png")
    named = {"--dataset_name": None, "--train_data_dir": folder / "images", "--image_channels": 4, "--random_flip": True}
    return with_network(flags | named, 4)


def of_arrays(flags: dict, folder: Path) -> dict:
    np.savez(folder / "arrays.npz", images=np.random.default_rng(0).uniform(-1, 1, (80, 20, 18, 5)).astype(np.float32))
    named = {"--dataset_name": folder / "arrays.npz", "--data_range": (-1, 1), "--preserve_input_precision": True}
    return with_network(flags | named | {"--image_channels": 5}, 5)


def of_latents(flags: dict, folder: Path) -> dict:
    small_kl().save_pretrained(folder / "vae")
    named = {"--vae": folder / "vae", "--latent_scale": "auto", "--max_train_images": 200, "--random_flip": True}
    return with_network(flags | named, 3)


def fine_tuned_on_latents(flags: dict, folder: Path) -> dict:
    from diffusers import UNet2DModel

    from utils.data.autoencoder import Autoencoder, Scale
    from utils.diffusion.ddpm import make_noise_scheduler
    from utils.diffusion.export import export_pipeline

    autoencoder = Autoencoder(small_kl(), (1, 16, 16), 2, 3)
    autoencoder.scale = Scale([0.5, -0.25, 0.0], [2.0, 3.0, 4.0])
    unet = UNet2DModel(**TINY_NETWORK | {"sample_size": 8, "in_channels": 3, "out_channels": 3})
    export_pipeline(unet, make_noise_scheduler(clips=False), folder / "start", "", autoencoder=autoencoder)
    named = {"--model_config_name_or_path": None, "--pretrained": folder / "start", "--max_train_images": 200}
    return flags | named


KINDS = (of_latents, fine_tuned_on_latents, fine_tuned, with_classes, not_square, of_four_channels, of_arrays)


def words_of(kind, folder: Path) -> list:
    """The flags of a run of this kind; what it reads lies in `folder`."""
    words, plain = [], make_tiny_flags(folder)
    for name, value in kind(dict(zip(plain[::2], plain[1::2], strict=True)), folder).items():
        if value is not None:
            words += [name, *([] if value is True else value if isinstance(value, tuple) else [value])]
    return words


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KINDS[0], *slow_turns(*KINDS[1:])])
def test_kills_cost_nothing_but_time(server, tmp_path, kind):
    (tmp_path / "runs").mkdir()
    killer = Killer(server, "train_ddpm.py", [*words_of(kind, tmp_path), *PHASED], tmp_path / "runs", seed=1)
    tallies = killer.kill_by_phase({"any moment": 2, "a save": 1})
    for tally in tallies.values():
        assert (tally.invalid, tally.different) == ([], [])
        assert tally.ends > 0
        if kind not in (of_latents, fine_tuned_on_latents):  # whose updates do not fetch images
            assert max(tally.updates_lost) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", [of_latents, fine_tuned, with_classes])
def test_two_processes_train_the_same(server, tmp_path, kind):
    words, close = [*words_of(kind, tmp_path), "--checkpointing_steps", 8], 2e-4
    if kind is fine_tuned:
        words, close = [*words, "--train_only", "up_blocks.*", "--learning_rate", 1e-5], 2e-6
    for processes in (2, 1):
        split = ["--train_batch_size", 8 // processes, "--output_dir", tmp_path / str(processes)]
        server.run(["train_ddpm.py", *words, *split], processes)
    one, two = (load_file(tmp_path / count / "checkpoint-8/model.safetensors") for count in "12")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=close)
    stages, found = step_seen(tmp_path / "2")
    assert {"data", "ranks", *(["condition"] if kind is with_classes else [])} <= stages and found == {}

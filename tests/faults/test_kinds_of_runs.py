"""Two processes train as one in runs of each kind: fine-tuned, with classes, on latents."""

import json
from pathlib import Path

import pytest
import torch
from conftest import TINY_NETWORK, make_tiny_flags, small_kl, step_seen
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


def of_latents(flags: dict, folder: Path) -> dict:
    small_kl().save_pretrained(folder / "vae")
    named = {"--vae": folder / "vae", "--latent_scale": "auto", "--max_train_images": 200, "--random_flip": True}
    return with_network(flags | named, 3)


def words_of(kind, folder: Path) -> list:
    """The flags of a run of this kind; what it reads lies in `folder`."""
    words, plain = [], make_tiny_flags(folder)
    for name, value in kind(dict(zip(plain[::2], plain[1::2], strict=True)), folder).items():
        if value is not None:
            words += [name] if value is True else [name, value]
    return words


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

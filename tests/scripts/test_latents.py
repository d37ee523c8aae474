"""Training on latents, --vae: what is encoded, what the run trains on and exports, what is refused."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    TINY_EDM2_NETWORK,
    TINY_NETWORK,
    make_tiny_flags,
    same_bytes,
    slow_turns,
    small_kl,
    step_seen,
)
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny, DDPMScheduler

import generate
import train_ddpm
import train_edm2
from models.guided_pipeline import LatentDDPMPipeline
from utils.core import randomness
from utils.core.errors import UserError
from utils.data.autoencoder import load_autoencoder
from utils.data.dataset import load_images
from utils.data.latents import PackedLatents, draw_latents, pack_latents
from utils.diffusion.pipelines import load_decoder, load_network


@pytest.fixture(scope="module")
def vae(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vae")
    small_kl().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def flags(vae, tmp_path_factory) -> list:
    return latent_flags(tmp_path_factory.mktemp("tiny"), vae)


def latent_flags(folder: Path, vae: Path, script: str = "train_ddpm.py") -> list:
    flags = make_tiny_flags(folder, script)
    network = TINY_EDM2_NETWORK if script == "train_edm2.py" else TINY_NETWORK
    (folder / "config.json").write_text(json.dumps(network | {"in_channels": 3, "out_channels": 3}))
    return [*flags, "--vae", vae, "--latent_scale", "auto", "--max_train_images", "120", "--validation_images", "16"]


@pytest.fixture(scope="module")
def finished(train, flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    flags = [*flags, "--random_flip", "--checkpointing_steps", "4", "--validation_steps", "4", "--save_images_steps", "8"]
    assert train([*flags, "--output_dir", folder]) == 0
    return folder


def packed(flags: list) -> PackedLatents:
    """The newest latents of a run with these flags."""
    cache = Path(flags[flags.index("--cache_dir") + 1]) / "steady_diffusion"
    return PackedLatents(max((path.parent for path in cache.glob("*/latents.bin")), key=os.path.getmtime))


def test_nothing_is_found_in_a_healthy_run_and_its_scale_is_kept(finished, flags):
    stages, found = step_seen(finished)
    assert "data" in stages and found == {}
    recorded = json.loads((finished / "options.json").read_text())["resolved"]
    latents = packed(flags)
    assert recorded["vae.latent_shape"] == [3, 8, 8]
    assert [recorded["vae.latent_mean"], recorded["vae.latent_std"]] == [*map(list, latents.measured)]
    assert json.loads((finished / "scheduler/scheduler_config.json").read_text())["clip_sample"] is False


def test_latents_are_those_that_diffusers_encodes(finished, flags, vae):
    latents, rows, plain = packed(flags), np.array([3, 40]), AutoencoderKL.from_pretrained(vae)
    run = train_ddpm.parse_args([*map(str, flags)])
    clean = torch.from_numpy(load_images(run).fetch(rows)).float() / 127.5 - 1
    for numbers, images in ((None, clean), (mirrored_numbers(run.seed), clean.flip(-1))):
        with torch.no_grad():
            expected = plain.encode(images).latent_dist
        stored = torch.from_numpy(latents.fetch(rows, run.seed, numbers))
        torch.testing.assert_close(stored, torch.stack([expected.mean, expected.std], 1), rtol=1e-4, atol=1e-5)
    drawn = draw_latents(stored[:1].expand(4096, -1, -1, -1, -1), 0, "latents", torch.arange(4096))
    torch.testing.assert_close(drawn.mean(0), stored[0, 0], rtol=0, atol=0.15)
    torch.testing.assert_close(drawn.std(0), stored[0, 1], rtol=0.1, atol=0)


def mirrored_numbers(seed: int) -> torch.Tensor:
    """Two samples that are mirrored."""
    numbers = torch.arange(64)
    return numbers[randomness.uniform(seed, "flip", numbers)[:, 0] < 0.5][:2]


def test_the_exported_pipeline_decodes_as_the_run_does(finished, vae):
    unet, config = load_network(str(finished))
    decoder = load_decoder(str(finished), unet)
    assert decoder.image_shape == (1, 16, 16) and decoder.latent_shape == (3, 8, 8)
    mean, std = decoder.scale
    own = {"vae": AutoencoderKL.from_pretrained(finished, subfolder="vae"), "latent_mean": mean, "latent_std": std}
    pipeline = LatentDDPMPipeline(unet, DDPMScheduler.from_config(config), **own)
    pipeline.set_progress_bar_config(disable=True)
    asked = {"batch_size": 2, "num_inference_steps": 2}
    made, images = (
        pipeline(output_type=kind, generator=torch.Generator().manual_seed(0), **asked).images for kind in ("latent", "pt")
    )
    torch.testing.assert_close(decoder.decode(made), images.clamp(-1, 1), rtol=0, atol=1e-5)
    mean, std = (torch.tensor(value)[:, None, None] for value in decoder.scale)
    with torch.no_grad():
        expected = AutoencoderKL.from_pretrained(vae).decode(made * std + mean).sample
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)
    card = (finished / "README.md").read_text()
    assert "trust_remote_code=True" in card and "| Autoencoder |" in card and "ConsistencyModel" not in card


def test_generate_makes_images(finished, tmp_path):
    from PIL import Image

    flags = ["--pipeline", finished, "--output_dir", tmp_path / "out", "--num_images", "2", "--num_inference_steps", "2"]
    generate.main(generate.parse_args([*map(str, flags)]))
    assert Image.open(tmp_path / "out/000001.png").size == (16, 16)


@pytest.mark.slow
@pytest.mark.parametrize("script", [train_ddpm, *slow_turns(train_edm2)])
def test_resumed_equals_uninterrupted_bit_for_bit(train, vae, tmp_path, script):
    flags = [*latent_flags(tmp_path, vae, f"{script.__name__}.py"), "--checkpointing_steps", "4"]
    flags += ["--lr_scheduler", "constant", "--dataloader_num_workers", "0"]
    assert train([*flags, "--output_dir", tmp_path / "whole"], script) == 0
    assert train([*flags, "--output_dir", tmp_path / "run", "--max_train_steps", "4"], script) == 0
    shutil.rmtree(tmp_path / "cache")  # it is encoded again
    shutil.copytree(vae, tmp_path / "moved")
    flags[flags.index("--vae") + 1] = tmp_path / "moved"
    assert train([*flags, "--output_dir", tmp_path / "run", "--resume_from_checkpoint", "latest"], script) == 0
    name = "checkpoint-8/model.safetensors"
    assert same_bytes(tmp_path / "run" / name, tmp_path / "whole" / name)
    assert step_seen(tmp_path / "whole")[1] == {}
    small_kl(latent_channels=3, layers_per_block=2).save_pretrained(tmp_path / "other")
    flags[flags.index("--vae") + 1] = tmp_path / "other"
    with pytest.raises(UserError, match=r"vae\.weights"):
        train([*flags, "--output_dir", tmp_path / "run", "--resume_from_checkpoint", "latest"], script)


@pytest.mark.parametrize("kind", ["AutoencoderTiny", "AutoencoderDC"])
def test_autoencoders_without_a_spread(tmp_path, kind):
    torch.manual_seed(0)
    sizes = {"in_channels": 1, "latent_channels": 2}
    if kind == "AutoencoderTiny":
        sides = {f"{side}_block_out_channels": (8, 8) for side in ("encoder", "decoder")}
        plain = AutoencoderTiny(out_channels=1, num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1), **sizes, **sides)
    else:
        sides = {f"{side}_block_out_channels": (8, 8) for side in ("encoder", "decoder")}
        sides |= {f"{side}_block_types": ("ResBlock",) * 2 for side in ("encoder", "decoder")}
        sides |= {f"{side}_layers_per_block": (1, 1) for side in ("encoder", "decoder")}
        sides |= {f"{side}_qkv_multiscales": ((), ()) for side in ("encoder", "decoder")}
        plain = AutoencoderDC(**sizes, **sides, scaling_factor=0.5)
    plain.eval().save_pretrained(tmp_path / "vae")  # as that of a pipeline
    autoencoder = load_autoencoder(str(tmp_path), (1, 16, 8))
    images = torch.rand(3, 1, 16, 8) * 2 - 1
    with torch.no_grad():
        encoded = plain.encode(images)
        latents = encoded.latents if kind == "AutoencoderTiny" else encoded.latent
        expected = plain.decode(latents).sample.clamp(-1, 1)
        assert torch.equal(autoencoder.encode(images), latents[:, None])
    assert autoencoder.latent_shape == (2, 8, 4)
    autoencoder.scale = autoencoder.own_scale()
    assert autoencoder.scale.std == [1.0 if kind == "AutoencoderTiny" else 2.0] * 2
    torch.testing.assert_close(autoencoder.decode(autoencoder.normalized(latents)), expected)


def test_latents_are_encoded_once_and_again_where_the_file_is_damaged(vae, tmp_path, monkeypatch):
    words = ["--dataset_name", "digits", "--resolution", "16", "--image_channels", "1", "--max_train_images", "70"]
    images = load_images(train_ddpm.parse_args([*words, "--cache_dir", str(tmp_path)]))
    autoencoder = load_autoencoder(str(vae), images.shape)
    how = {"cache_dir": str(tmp_path), "mirrors": False, "device": torch.device("cpu")}
    first, seen = pack_latents(images, autoencoder, **how), []
    whole = first.fetch(np.arange(70), 0)
    assert whole.shape == (70, 2, 3, 8, 8) and np.isfinite(whole).all()
    pack_latents(images, autoencoder, progress=lambda *at: seen.append(at), **how)
    assert seen == []
    (first.folder / "latents.bin").write_bytes(b"")
    again = pack_latents(images, autoencoder, progress=lambda *at: seen.append(at), **how)
    assert seen == [(0, 70), (64, 70), (64, 70), (70, 70)] and np.array_equal(again.fetch(np.arange(70), 0), whole)
    monkeypatch.setattr(autoencoder, "encode", lambda images: torch.full((len(images), 1, 3, 8, 8), torch.nan))
    with pytest.raises(UserError, match=r"not finite, for an image of rows 0 to 63\ncheck --vae"):
        pack_latents(images, autoencoder, **how | {"mirrors": True})


def words_of_images(folder: Path) -> list[str]:
    size = ["--resolution", "16", "--image_channels", "1", "--max_train_images", "300"]
    return ["--dataset_name", "digits", *size, "--cache_dir", str(folder)]


@pytest.fixture
def encode(server, vae):
    """Starts a process that encodes the images of `words_of_images`, with a pause before each batch."""

    def start(folder: Path, seconds: float = 0.0, others: int = 0):
        return server.start(["tests/launch/encodes.py", vae, seconds, others, *words_of_images(folder)])[0]

    return start


def encoded(run) -> int:
    assert run.wait() == 0, run.text()
    return int(run.text().split("encoded ")[1])


def parts_of(cache: Path) -> list[Path]:
    """That are done, of an encoding that goes on."""
    return [path for path in cache.glob("steady_diffusion/*.tmp/*.part") if path.stat().st_size]


def wait_for(found, run) -> list:
    while not (there := found()):
        assert run.poll() is None, run.text()
        time.sleep(0.02)
    return there


def files_of(cache: Path) -> dict[str, bytes]:
    (folder,) = (path.parent for path in cache.glob("steady_diffusion/*/latents.bin"))
    assert {path.name for path in folder.iterdir()} == {"latents.bin", "meta.json", "about.json"}
    return {name: (folder / name).read_bytes() for name in ("latents.bin", "meta.json")}


@pytest.fixture(scope="module")
def undisturbed(server, vae, tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert "encoded 300\n" in server.run(["tests/launch/encodes.py", vae, 0, 0, *words_of_images(folder)])
    return files_of(folder)


@pytest.mark.parametrize("damage", ["none", "of the note of a part", "of its latents"])
def test_an_encoding_that_was_killed_goes_on_where_it_was(encode, tmp_path, undisturbed, damage):
    first = encode(tmp_path, seconds=0.4)
    done = wait_for(lambda: parts_of(tmp_path), first)
    first.kill()
    if damage == "of the note of a part":
        done.pop().write_text("{}")
    if damage == "of its latents":
        with open(done.pop().parent / "latents.bin", "r+b") as file:
            file.write(b"damage")
    assert encoded(encode(tmp_path)) == 300 - 64 * len(done)
    assert files_of(tmp_path) == undisturbed


def test_two_processes_encode_one_cache(encode, tmp_path, undisturbed):
    shares = [encoded(each) for each in [encode(tmp_path, seconds=0.4, others=1) for _ in range(2)]]
    assert sum(shares) == 300 and min(shares) > 0
    one, two = (np.frombuffer(files["latents.bin"], np.float32) for files in (undisturbed, files_of(tmp_path)))
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)


def test_a_second_process_takes_the_part_of_one_that_dies(encode, tmp_path, undisturbed):
    first = encode(tmp_path, seconds=60.0)
    wait_for(lambda: list(tmp_path.glob("steady_diffusion/*.tmp/0.part")), first)
    second = encode(tmp_path)
    wait_for(lambda: len(parts_of(tmp_path)) == 4, second)
    assert second.poll() is None
    first.kill()
    assert encoded(second) == 300
    assert files_of(tmp_path) == undisturbed


def test_an_edm2_run_has_the_settings_of_latents(vae):
    words = ["--dataset_name", "digits", "--vae", str(vae)]
    options = train_edm2.parse_args(words)
    assert (options.P_mean, options.P_std, options.sigma_data) == (-0.4, 1.0, 0.5)
    assert train_edm2.parse_args([*words, "--P_mean", "-1.2"]).P_mean == -1.2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"--resolution": "17"},
            r"--resolution 17 does not divide by 2, as --vae .* needs it\nuse another one, for example 18",
        ),
        ({"--image_channels": "3"}, r"is for images of 1 channels, and --image_channels is 3\nset --image_channels 1"),
        ({"--vae": "{folder}/none"}, r"cannot load --vae .*none"),
        ({"--vae": "{folder}"}, r"cannot load --vae .*config\.json"),
        ({"--vae": "{folder}/unet"}, r"of the class UNet2DModel, which is not supported\nuse one of AutoencoderKL"),
        ({"--model_config_name_or_path": "{folder}/unet"}, r"in_channels and out_channels are 1 and 1, but the latents have 3"),
        ({"--augment_probability": "0.1"}, r"--augment_probability and --vae"),
        ({"--color_jitter": "0.1"}, r"--color_jitter and --vae"),
        ({"--pretrained": "x"}, r"--latent_scale and --pretrained: a pipeline of latents has its own scale"),
    ],
)
def test_what_cannot_work_is_refused_in_two_lines(train, flags, tmp_path, monkeypatch, changed, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet/config.json").write_text(json.dumps(TINY_NETWORK))
    words = [*flags, *(word for name, value in changed.items() for word in (name, value.format(folder=tmp_path)))]
    with pytest.raises(UserError, match=message) as caught:
        train([*words, "--output_dir", tmp_path / "run"])
    assert len(str(caught.value).splitlines()) == 2

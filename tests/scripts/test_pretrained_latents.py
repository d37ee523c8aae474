"""--pretrained of a pipeline that makes latents: its autoencoder and their scale are taken; and of pipelines with code."""

import contextlib
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    TINY_EDM2_NETWORK,
    TINY_NETWORK,
    made_elsewhere,
    make_tiny_flags,
    same_bytes,
    slow_turns,
    small_kl,
    step_seen,
)
from diffusers import AutoencoderKL, UNet2DModel
from test_pretrained import without

import train_ddpm
import train_edm2
from models.edm2_unet import EDM2UNet
from models.edm_heun import EDMHeunScheduler
from utils.core.errors import UserError
from utils.data.autoencoder import Autoencoder, Scale
from utils.diffusion.ddpm import make_noise_scheduler
from utils.diffusion.export import export_pipeline
from utils.diffusion.pipelines import load_decoder, load_network

MEAN, STD = [0.5, -0.25, 0.0], [2.0, 3.0, 4.0]
LATENTS = {"sample_size": 8, "in_channels": 3, "out_channels": 3}


def export(folder: Path, script=train_ddpm) -> Path:
    """A pipeline for digits of 16x16: latents of 3x8x8, of a scale that no data measures."""
    autoencoder = Autoencoder(small_kl(), (1, 16, 16), 2, 3)
    autoencoder.scale = Scale(MEAN, STD)
    torch.manual_seed(1)
    if script is train_edm2:
        unet = EDM2UNet(**TINY_EDM2_NETWORK | LATENTS | {"num_class_embeds": 10})
        scheduler = EDMHeunScheduler(sigma_data=0.7)
    else:
        unet = UNet2DModel(**TINY_NETWORK | LATENTS)
        scheduler = make_noise_scheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction", clips=False)
    export_pipeline(unet, scheduler, folder, "", autoencoder=autoencoder)
    return folder


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    return export(tmp_path_factory.mktemp("pipeline"))


def flags_of(folder: Path, script=train_ddpm) -> list[str]:
    """Of a run that starts from a pipeline, without what the pipeline says."""
    taken = ("--model_config_name_or_path", "--learning_rate", "--resolution", "--image_channels")
    return [*without(make_tiny_flags(folder, f"{script.__name__}.py"), *taken), "--max_train_images", "120"]


def test_the_autoencoder_and_its_scale_are_taken_and_exported(train, pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr("utils.training.pretrained.load_autoencoder", lambda *_: pytest.fail("it is loaded twice"))
    flags = [*flags_of(tmp_path), "--pretrained", pipeline, "--lr_warmup_steps", "0", "--random_flip"]
    assert train([*flags, "--output_dir", tmp_path / "run"]) == 0
    recorded = json.loads((tmp_path / "run/options.json").read_text())
    assert recorded["options"].items() >= {"vae": str(pipeline), "resolution": 16, "image_channels": 1}.items()
    assert [recorded["resolved"][f"vae.latent_{name}"] for name in ("mean", "std")] == [MEAN, STD]
    stages, found = step_seen(tmp_path / "run")
    assert "data" in stages and found == {}
    assert (tmp_path / "run/samples/0000000.png").exists()
    (before, _), (unet, scheduler) = load_network(str(pipeline)), load_network(str(tmp_path / "run"))
    # Eight updates of 1e-5 each move a weight by 1e-4 at most.
    moved = [float((tensor - before.state_dict()[name]).abs().max()) for name, tensor in unet.state_dict().items()]
    assert 0 < max(moved) < 1.2e-4 and scheduler["clip_sample"] is False
    first, again = load_decoder(str(pipeline), before), load_decoder(str(tmp_path / "run"), unet)
    assert again.scale == first.scale == Scale(MEAN, STD) and again.fingerprint() == first.fingerprint()
    latents = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    with torch.no_grad():
        expected = AutoencoderKL.from_pretrained(pipeline, subfolder="vae").decode(latents * std + mean).sample.clamp(-1, 1)
    torch.testing.assert_close(again.decode(latents), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("script", [train_ddpm, *slow_turns(train_edm2)])
def test_resumed_equals_uninterrupted_and_a_fresh_process_decodes(train, tmp_path, script):
    export(tmp_path / "p", script)
    flags = [*flags_of(tmp_path, script), "--pretrained", tmp_path / "p", "--checkpointing_steps", "4"]
    flags += ["--lr_scheduler", "constant"]
    assert train([*flags, "--output_dir", tmp_path / "whole"], script) == 0
    assert train([*flags, "--output_dir", tmp_path / "run", "--max_train_steps", "4"], script) == 0
    (tmp_path / "p").rename(tmp_path / "moved")
    resume = [*flags, "--output_dir", tmp_path / "run", "--resume_from_checkpoint", "latest"]
    with pytest.raises(UserError, match=r"cannot load --vae .*p: no such file or folder"):
        train(resume, script)
    assert train([*resume, "--vae", tmp_path / "moved"], script) == 0  # of the pipeline, the autoencoder alone is needed
    for name in ("model.safetensors", "optimizer.bin"):
        assert same_bytes(tmp_path / "run/checkpoint-8" / name, tmp_path / "whole/checkpoint-8" / name)
    recorded = json.loads((tmp_path / "run/options.json").read_text())
    assert [recorded["resolved"][f"vae.latent_{name}"] for name in ("mean", "std")] == [MEAN, STD]
    if script is train_edm2:
        assert recorded["options"].items() >= {"P_mean": -0.4, "P_std": 1.0, "sigma_data": 0.7}.items()
    for folder in ("whole", "run"):
        assert step_seen(tmp_path / folder)[1] == {}
    assert made_elsewhere(tmp_path / "run", tmp_path, batch_size=2).shape == (2, 16, 16, 1)


def test_it_goes_on_at_another_resolution(train, pipeline, tmp_path):
    flags = [*flags_of(tmp_path), "--pretrained", pipeline, "--resolution", "24x16", "--max_train_steps", "2"]
    assert train([*flags, "--output_dir", tmp_path / "run"]) == 0
    unet, _ = load_network(str(tmp_path / "run"))
    assert load_decoder(str(tmp_path / "run"), unet).image_shape == (1, 24, 16)


def other_autoencoder(folder: Path, pipeline: Path) -> list:
    small_kl(layers_per_block=2).save_pretrained(folder / "vae")
    return ["--pretrained", pipeline, "--vae", folder / "vae"]


def no_autoencoder(folder: Path, pipeline: Path) -> list:
    shutil.copytree(pipeline, folder / "p")
    shutil.rmtree(folder / "p/vae")
    return ["--pretrained", folder / "p"]


def autoencoder_of_other_latents(folder: Path, pipeline: Path) -> list:
    asked = no_autoencoder(folder, pipeline)
    small_kl(latent_channels=2).save_pretrained(folder / "p/vae")
    return asked


def pixels(folder: Path, pipeline: Path) -> list:
    export_pipeline(UNet2DModel(**TINY_NETWORK), make_noise_scheduler(), folder / "p", "")
    return ["--pretrained", folder / "p", "--vae", pipeline]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (other_autoencoder, r"--vae .*vae is another autoencoder than that of .*\nleave --vae out"),
        (no_autoencoder, r"cannot load the autoencoder of .*p: "),
        (autoencoder_of_other_latents, r"the autoencoder of .*p has 2 channels, and its unet has 3\nuse another pipeline"),
        (pixels, r"--vae .*: the network of .*p makes images, and no latents\nleave --vae out"),
        (["--streaming"], r"--vae and --streaming: a stream is read"),
    ],
)
def test_what_does_not_fit_is_refused_in_two_lines(train, pipeline, tmp_path, asked, message):
    words = ["--pretrained", pipeline, *asked] if isinstance(asked, list) else asked(tmp_path, pipeline)
    with pytest.raises(UserError, match=message) as caught:
        train([*flags_of(tmp_path), *words, "--output_dir", tmp_path / "run"])
    assert len(str(caught.value).splitlines()) == 2
    assert not (tmp_path / "run/options.json").exists()


class Planted:
    def __init__(self, code: str):
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


def edit(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def pickled(part: Path, planted: str) -> None:
    (part / "diffusion_pytorch_model.safetensors").unlink()
    (part / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Planted(planted)))


PLACES = {  # where code lies, what names it
    "in the index": ("evil.py", lambda p: edit(p / "model_index.json", _class_name=["evil", "Evil"])),
    "of a part": ("unet/evil.py", lambda p: edit(p / "model_index.json", unet=["evil", "Evil"])),
    "in the weights": ("unet/evil.py", lambda p: pickled(p / "unet", (p / "unet/evil.py").read_text())),
    "in the autoencoder": ("vae/evil.py", lambda p: pickled(p / "vae", (p / "vae/evil.py").read_text())),
    "beside the autoencoder": (
        *("vae/evil.py", lambda p: edit(p / "vae/config.json", _class_name="Evil", auto_map={"AutoModel": "evil.Evil"})),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_code_of_a_pipeline_is_not_run(train, pipeline, tmp_path, place):
    planted = f"open({str(tmp_path / 'executed')!r}, 'w').close()\n"
    folder, (file, name_it) = shutil.copytree(pipeline, tmp_path / "p"), PLACES[place]
    (folder / file).write_text(planted)
    name_it(folder)
    with contextlib.suppress(UserError):  # where the rest is not enough for a run
        train([*flags_of(tmp_path), "--pretrained", folder, "--max_train_steps", "1", "--output_dir", tmp_path / "run"])
    assert not (tmp_path / "executed").exists()
    exec(planted)  # it would have been seen
    assert (tmp_path / "executed").exists()


def test_the_run_that_it_starts_from_is_not_deleted(train, pipeline, tmp_path):
    """Of these there may be one copy."""
    run = shutil.copytree(pipeline, tmp_path / "run")
    (tmp_path / "link").symlink_to(run)
    flags = [*flags_of(tmp_path), "--output_dir", run, "--overwrite_output_dir"]
    of_images = ["--resolution", "16", "--image_channels", "1"]
    for asked in (["--pretrained", tmp_path / "link"], ["--vae", run, *of_images], ["--vae", run / "vae", *of_images]):
        with pytest.raises(UserError, match=rf"{asked[0]} {asked[1]} is part of the run that --overwrite_output_dir deletes"):
            train([*flags, *asked])
    assert sorted(path.name for path in (run / "vae").iterdir()) == sorted(p.name for p in (pipeline / "vae").iterdir())


def test_a_resume_needs_neither_the_checkpoint_it_started_from_nor_the_pipeline_at_its_path(train, pipeline, tmp_path):
    one = shutil.copytree(pipeline, tmp_path / "one")
    (one / "checkpoint-4").mkdir()
    (one / "checkpoint-4/state.json").write_text("{}")
    shutil.copy(one / "unet/diffusion_pytorch_model.safetensors", one / "checkpoint-4/model.safetensors")
    flags = [*flags_of(tmp_path), "--output_dir", tmp_path / "run", "--checkpointing_steps", "1", "--lr_scheduler", "constant"]
    assert train([*flags, "--pretrained", one / "checkpoint-4", "--max_train_steps", "1"]) == 0
    shutil.rmtree(one / "checkpoint-4")
    resume = [*flags, "--resume_from_checkpoint", "latest"]
    assert train([*resume, "--pretrained", one / "checkpoint-4", "--max_train_steps", "2"]) == 0
    one.rename(tmp_path / "moved")
    assert train([*resume, "--pretrained", tmp_path / "moved", "--max_train_steps", "3"]) == 0
    recorded = json.loads((tmp_path / "run/options.json").read_text())["options"]
    assert (recorded["pretrained"], recorded["vae"]) == (str(tmp_path / "moved"), str(tmp_path / "moved"))
    small_kl(layers_per_block=2).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"another autoencoder than that of .*\nset --vae to a copy of that of the run"):
        train([*resume, "--pretrained", tmp_path / "moved", "--vae", tmp_path / "other"])

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_script
from diffusers import DDPMPipeline, DDPMScheduler
from PIL import Image
from safetensors.torch import save_file
from test_sampling import run_sample, tiny_unet

import generate
from utils.core.errors import UserError
from utils.core.images import save_png
from utils.diffusion.export import export_pipeline
from utils.diffusion.pipelines import load_network
from utils.diffusion.sampling import make_sampler, to_uint8
from utils.diffusion.unet import normalize_spectra

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
FLAGS = ["--num_images", "7", "--batch_size", "2", "--num_inference_steps", "4", "--seed", "3"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelines") / "tiny"
    export_pipeline(tiny_unet(), DDPMScheduler(num_train_timesteps=20), folder, "")
    return folder


@pytest.fixture(scope="module")
def here():
    """generate.py in this process: the same code, without the seconds of another interpreter."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        yield lambda pipeline, output_dir, *flags: generate.main(
            generate.parse_args(["--pipeline", str(pipeline), "--output_dir", str(output_dir), *FLAGS, *flags])
        )
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def made_folder(pipeline, here, tmp_path_factory):
    """A finished folder; the tests that use it may only be refused."""
    here(pipeline, folder := tmp_path_factory.mktemp("made") / "out")
    return folder


def contents(folder: Path) -> dict[str, str]:
    """The files' names and hashes."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.name != "generate.json"
    }


def assert_equal_up_to_rounding(actual: np.ndarray, expected: np.ndarray) -> None:
    """A value between two gray levels may be rounded to either."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype == np.uint8
    difference = np.abs(actual.astype(int) - expected)
    assert difference.max() <= 1 and (difference > 0).mean() < 0.1


@pytest.mark.slow
def test_two_processes_make_the_same_files_as_one(pipeline, here, tmp_path, capsys):
    done = run_script("generate.py", ["--pipeline", pipeline, "--output_dir", tmp_path / "two", *FLAGS], 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"7 images in {tmp_path / 'two'}"
    assert "Loading" not in done.stderr and "\r" not in done.stderr  # no bars of other libraries in a log
    here(pipeline, tmp_path / "one")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert sorted(contents(tmp_path / "one")) == [*(f"{i:06d}.png" for i in range(7)), "grid.png"]

    # The files hold what `sample` gives, and the grid shows them in order.
    expected = to_uint8(
        run_sample(tiny_unet(), make_sampler("ddim", DDPMScheduler(num_train_timesteps=20)), n=7, steps=4, batch_size=2)
    )
    made = [np.array(Image.open(tmp_path / "one" / f"{i:06d}.png")) for i in range(7)]
    assert_equal_up_to_rounding(np.stack(made), expected[:, 0].numpy())
    grid = np.array(Image.open(tmp_path / "one" / "grid.png"))
    assert np.array_equal(grid[2 + 66 + 4 : 2 + 66 + 64 : 8, 2 + 4 : 2 + 64 : 8, 0], made[3])


def test_resumes_what_is_missing_and_no_more(pipeline, here, tmp_path, monkeypatch):
    here(pipeline, tmp_path / "whole")
    part = tmp_path / "part"
    here(pipeline, part)
    whole = contents(tmp_path / "whole")
    os.remove(part / "000002.png")  # chunk 1
    os.truncate(part / "000006.png", (part / "000006.png").stat().st_size - 30)  # chunk 3, cut short
    os.utime(part / "000000.png", (1, 1))
    from utils.diffusion import sampling

    calls, real_sample = [], sampling.sample
    monkeypatch.setattr(sampling, "sample", lambda *a, **k: (calls.append(a[2].tolist()), real_sample(*a, **k))[1])
    here(pipeline, part)
    assert calls == [[2, 3], [6]]
    assert contents(part) == whole and (part / "000000.png").stat().st_mtime == 1
    here(pipeline, part, "--num_images", "9")  # a larger set continues; its last chunk of before is whole now
    assert calls[2:] == [[6, 7], [8]]
    here(pipeline, tmp_path / "nine", "--num_images", "9")
    assert contents(part) == contents(tmp_path / "nine")


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--seed", "4"], r"seed \(3, now 4\)"),
        (["--sampler", "ddpm"], r"sampler \(ddim, now ddpm\)"),
        (["--num_inference_steps", "5"], r"num_inference_steps \(4, now 5\)"),
        (["--batch_size", "3"], r"batch_size \(2, now 3\)"),
        (["--mixed_precision", "bf16"], r"mixed_precision \(no, now bf16\)"),
        (["--num_images", "6"], "has 7 images, more than --num_images 6"),
    ],
)
def test_other_settings_are_refused(flags, key, pipeline, here, made_folder):
    before = contents(made_folder), (made_folder / "generate.json").read_text()
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # bf16 needs another accelerator than the other tests of this process
    try:
        with pytest.raises(UserError, match=key):
            here(pipeline, made_folder, *flags)
    finally:
        AcceleratorState._reset_state(True)
    assert before == (contents(made_folder), (made_folder / "generate.json").read_text())


def test_a_pipeline_that_trained_on_is_refused_and_a_moved_one_is_not(pipeline, here, made_folder, tmp_path):
    trained_on = tmp_path / "trained on"
    export_pipeline(tiny_unet(1), DDPMScheduler(num_train_timesteps=20), trained_on, "")
    with pytest.raises(UserError, match="was trained further since"):
        here(trained_on, made_folder)
    other_schedule = tmp_path / "other schedule"
    export_pipeline(tiny_unet(), DDPMScheduler(num_train_timesteps=20, beta_end=0.01), other_schedule, "")
    with pytest.raises(UserError, match="was trained further since"):
        here(other_schedule, made_folder)
    moved = tmp_path / "moved"
    export_pipeline(tiny_unet(), DDPMScheduler(num_train_timesteps=20), moved, "")
    here(moved, made_folder)
    recorded = json.loads((made_folder / "generate.json").read_text())
    assert recorded["pipeline"] == str(moved) and recorded["seed"] == 3 and recorded["sampler"] == "ddim"


@pytest.mark.parametrize("weights", ["model", "ema"])
def test_a_checkpoint_of_a_run_under_spectral_norm_is_sampled(weights, pipeline, here, tmp_path):
    unet = tiny_unet(1)
    normalize_spectra(unet)
    x, timesteps = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 15])
    for _ in range(3):
        unet.train()(x, timesteps)  # each moves the power iteration
    checkpoint = tmp_path / "checkpoint-3"
    export_pipeline(tiny_unet(2), DDPMScheduler(num_train_timesteps=20), tmp_path, "")
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text("{}")
    save_file({name: value.contiguous() for name, value in unet.state_dict().items()}, checkpoint / f"{weights}.safetensors")
    random_state = torch.get_rng_state()
    loaded, _ = load_network(str(checkpoint))
    assert torch.equal(torch.get_rng_state(), random_state)
    with torch.no_grad():
        expected = unet.eval()(x, timesteps).sample  # torch's own spectral norm
        torch.testing.assert_close(loaded(x, timesteps).sample, expected, rtol=0, atol=1e-5)
    here(checkpoint, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("0*.png"))) == 7


@pytest.mark.parametrize("sampler", ["ddim", "dpmsolver++"])
def test_images_of_an_earlier_version_of_a_sampler_are_not_mixed_with_new_ones(sampler, pipeline, here, tmp_path):
    here(pipeline, tmp_path, "--sampler", sampler)
    settings = json.loads((tmp_path / "generate.json").read_text())
    settings["sampler_version"] = 1
    (tmp_path / "generate.json").write_text(json.dumps(settings))
    if sampler == "ddim":
        here(pipeline, tmp_path, "--sampler", sampler)
        return
    with pytest.raises(UserError, match="images of an earlier version of this sampler"):
        here(pipeline, tmp_path, "--sampler", sampler)


@pytest.mark.parametrize("sampler", ["ddim", "ddpm", "dpmsolver++"])
def test_samplers_and_default_steps(sampler, here, tmp_path):
    export_pipeline(tiny_unet(), DDPMScheduler(num_train_timesteps=100), tmp_path / "p", "")
    without_steps = ["--num_images", "2", "--seed", "3", "--sampler", sampler]
    folders = ["--pipeline", str(tmp_path / "p"), "--output_dir", str(tmp_path / "out")]
    generate.main(generate.parse_args([*folders, *without_steps]))
    steps = 100 if sampler == "ddpm" else 50
    assert json.loads((tmp_path / "out" / "generate.json").read_text())["num_inference_steps"] == steps
    scheduler = make_sampler(sampler, DDPMScheduler(num_train_timesteps=100))
    expected = to_uint8(run_sample(tiny_unet(), scheduler, n=2, steps=steps))
    for i in range(2):
        assert_equal_up_to_rounding(np.array(Image.open(tmp_path / "out" / f"{i:06d}.png")), expected[i, 0].numpy())


def test_rgb_and_oblong_images(here, tmp_path):
    unet = tiny_unet(in_channels=3, out_channels=3, sample_size=(8, 16))
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(tmp_path / "p")
    here(tmp_path / "p", tmp_path / "out", "--num_images", "2")
    os.utime(tmp_path / "out" / "000001.png", (1, 1))
    here(tmp_path / "p", tmp_path / "out", "--num_images", "2")  # sizes are recognized: nothing is made anew
    assert (tmp_path / "out" / "000001.png").stat().st_mtime == 1
    with Image.open(tmp_path / "out" / "000001.png") as image:
        assert image.size == (16, 8) and image.mode == "RGB"


def edit_config(folder: Path, name: str, **changes):
    config = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: (p / "model_index.json").unlink(), r"cannot load .*: it is no whole pipeline; it has a network: unet\nmake"),
        (lambda p: edit_config(p, "model_index.json", vae=["diffusers", "AutoencoderKL"]), "has scheduler, unet, vae"),
        (lambda p: edit_config(p, "model_index.json", unet=["diffusers", "UNet2DConditionModel"]), "UNet2DModel"),
        (lambda p: edit_config(p, "unet/config.json", block_out_channels=[8, 24]), "cannot load a pipeline from"),
        (lambda p: edit_config(p, "unet/config.json", sample_size=None), "no sample_size"),
        (
            lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:999]),
            "cannot load a pipeline",
        ),
    ],
)
def test_pipelines_that_cannot_be_used(spoil, message, here, tmp_path):
    export_pipeline(tiny_unet(), DDPMScheduler(), tmp_path / "p", "")
    spoil(tmp_path / "p")
    with pytest.raises(UserError, match=message) as error:
        here(tmp_path / "p", tmp_path / "out")
    assert str(error.value).count("\n") <= 1 and not (tmp_path / "out").exists()


def test_networks_that_cannot_be_sampled_are_refused(here, tmp_path):
    """One that wants classes, which a pipeline of diffusers does not tell of; and one whose images are not finite."""
    DDPMPipeline(tiny_unet(num_class_embeds=3), DDPMScheduler()).save_pretrained(tmp_path / "classes")
    unet = tiny_unet()
    unet.conv_out.bias.data.fill_(float("nan"))
    export_pipeline(unet, DDPMScheduler(), tmp_path / "nan", "")
    for name, message in (("classes", "class-conditional"), ("nan", "NaN or infinite")):
        with pytest.raises(UserError, match=message):
            here(tmp_path / name, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.png"))


def test_folders_of_others_and_bad_counts(pipeline, here, tmp_path):
    save_png(Image.new("L", (8, 8)), tmp_path / "photos" / "cat.png")
    with pytest.raises(UserError, match=r"photos already has images, which generate\.py did not make"):
        here(pipeline, tmp_path / "photos")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot use --output_dir .*file"):
        here(pipeline, tmp_path / "file")
    with pytest.raises(UserError, match=r"21 sampling steps are not possible .*\nset a number from 1 to 20"):
        here(pipeline, tmp_path / "out", "--num_inference_steps", "21")
    assert not (tmp_path / "out").exists()

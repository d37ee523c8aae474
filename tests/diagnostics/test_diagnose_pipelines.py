"""diagnose.py on pipelines of the kinds that people have, made by diffusers and not by this project."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY_NETWORK, make_tiny_flags, run_command, script_command, script_environment
from diffusers import (
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    UNet2DModel,
)
from hub_stand_in import hub_stand_in

import diagnose
from utils.core.errors import UserError
from utils.diffusion.pipelines import load_unconditional


def network(**changes) -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(**TINY_NETWORK | {"in_channels": 3, "out_channels": 3} | changes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return make_tiny_flags(tmp_path_factory.mktemp("cache"))[5]


@pytest.fixture
def ask(cache, capsys):
    """Asks about a pipeline on the digits: (exit status, what was printed as JSON)."""

    def ask(pipeline: Path) -> tuple[int, dict]:
        capsys.readouterr()
        data = ["--dataset_name", "digits", "--cache_dir", cache, "--probe_images", "8"]
        status = diagnose.main(diagnose.parse_args(["--pipeline", str(pipeline), *data, "--json"]))
        return status, json.loads(capsys.readouterr().out)

    return ask


def edit(path: Path, drop: tuple[str, ...] = (), **changes) -> None:
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(config | changes))


def as_first_releases_saved(pipeline: Path) -> None:
    """Like google/ddpm-cifar10-32: everything side by side, pickled weights, and configs with the keys of diffusers 0.1.1."""
    edit(pipeline / "model_index.json", _diffusers_version="0.1.1")
    kept = {"_class_name", "beta_end", "beta_schedule", "beta_start", "num_train_timesteps", "trained_betas", "variance_type"}
    scheduler = json.loads((pipeline / "scheduler" / "scheduler_config.json").read_text())
    old = {key: value for key, value in scheduler.items() if key in kept}
    old |= {"_diffusers_version": "0.1.1", "clip_sample": True, "timestep_values": None}
    (pipeline / "scheduler_config.json").write_text(json.dumps(old))
    edit(pipeline / "unet" / "config.json", drop=("num_class_embeds", "class_embed_type", "dropout", "add_attention"))
    shutil.move(pipeline / "unet" / "config.json", pipeline / "config.json")
    shutil.move(pipeline / "unet" / "diffusion_pytorch_model.bin", pipeline / "diffusion_pytorch_model.bin")
    for name in ("unet", "scheduler"):
        shutil.rmtree(pipeline / name)


def save(folder: Path, scheduler=None, pipeline_class=DDPMPipeline, unet=None, **options) -> Path:
    pipeline_class(unet or network(), scheduler or DDPMScheduler()).save_pretrained(folder, **options)
    return folder


def assert_same_figures(actual, expected) -> None:
    """Means of squares agree far better than 1e-4; what should be 0, as the batch's influence, is rounding: some 1e-6 of 1."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_same_figures(actual[key], expected[key])
    else:
        assert actual == (pytest.approx(expected, rel=1e-4, abs=1e-5) if isinstance(expected, float) else expected)


def test_files_of_the_first_releases(ask, tmp_path):
    save(tmp_path / "p", safe_serialization=False)
    as_first_releases_saved(tmp_path / "p")
    status, found = ask(tmp_path / "p")
    assert status in (0, 1) and found["probe"]["prediction_type"] == "epsilon"
    assert {"timestep-ignored", "batch-leak", "schedule-leaves-signal"} <= set(found["healthy"])
    _, same = ask(save(tmp_path / "new"))
    assert_same_figures(found["probe"], same["probe"])


def test_weights_lie_in_memory_as_those_of_a_new_network_do(tmp_path):
    """In the mapped file they would lie at any multiple of 4 bytes, where some CPUs' kernels round otherwise."""
    unet, _ = load_unconditional(str(save(tmp_path / "p")))
    for name, tensor in network().state_dict().items():
        loaded = unet.state_dict()[name]
        assert torch.equal(loaded, tensor) and loaded.stride() == tensor.stride()
        assert (loaded.data_ptr() - tensor.data_ptr()) % 64 == 0, name


@pytest.mark.slow
def test_a_name_on_the_hub(cache, tmp_path):
    save(tmp_path / "p", safe_serialization=False)
    as_first_releases_saved(tmp_path / "p")
    flags = ["--pipeline", "google/ddpm-cifar10-32", "--dataset_name", "digits", "--cache_dir", cache, "--probe_images", "8"]
    environment = script_environment() | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    with hub_stand_in("google/ddpm-cifar10-32", tmp_path / "p", "models") as (address, requests):
        command = script_command("diagnose.py", [*flags, "--json"])
        result = run_command(command, environment | {"HF_ENDPOINT": address})
    assert result.returncode in (0, 1) and "probe" in json.loads(result.stdout), result.stderr
    assert any(path.endswith("diffusion_pytorch_model.bin") for path in requests)


@pytest.mark.parametrize(
    ("scheduler", "pipeline_class"),
    [
        (DDPMScheduler(prediction_type="v_prediction", beta_schedule="squaredcos_cap_v2"), DDIMPipeline),
        (DDIMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction"), DDIMPipeline),
        (EulerDiscreteScheduler(beta_start=0.0001), DDPMPipeline),
        (HeunDiscreteScheduler(), DDPMPipeline),
        (PNDMScheduler(), DDPMPipeline),
    ],
)
def test_schedulers_with_betas_mean_the_process_that_they_name(scheduler, pipeline_class, ask, tmp_path):
    folder = save(tmp_path / "p", scheduler, pipeline_class)
    index = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    saved = {key: index[key] for key in ("beta_start", "beta_end", "beta_schedule")}
    _, found = ask(folder)
    assert found["probe"]["prediction_type"] == scheduler.config.get("prediction_type", "epsilon")
    expected = DDPMScheduler(**saved, rescale_betas_zero_snr=index.get("rescale_betas_zero_snr", False)).alphas_cumprod
    assert found["schedule"]["alphas_cumprod"][-1] == pytest.approx(expected[-1].item(), abs=1e-7)


def test_defaults_of_another_scheduler_class_stay_its_own(ask, tmp_path):
    folder = save(tmp_path / "p", HeunDiscreteScheduler())  # whose betas end at 0.012, DDPM's at 0.02
    edit(folder / "scheduler" / "scheduler_config.json", drop=("beta_start", "beta_end"))
    _, found = ask(folder)
    heun = HeunDiscreteScheduler().alphas_cumprod[-1].item()
    assert found["schedule"]["alphas_cumprod"][-1] == pytest.approx(heun, rel=1e-4)


def test_predict_epsilon_false_means_the_image(ask, tmp_path):
    folder = save(tmp_path / "p")
    edit(folder / "scheduler" / "scheduler_config.json", drop=("prediction_type",), predict_epsilon=False)
    assert ask(folder)[1]["probe"]["prediction_type"] == "sample"


def test_there_are_as_many_timesteps_as_betas(tmp_path):
    folder = save(tmp_path / "p")
    edit(folder / "scheduler" / "scheduler_config.json", trained_betas=[1e-4 + 4e-4 * step for step in range(50)])
    assert load_unconditional(str(folder))[1]["num_train_timesteps"] == 50


def test_half_precision_variants_and_other_sizes(ask, tmp_path):
    half = save(tmp_path / "half", unet=network().half(), variant="fp16")
    assert not list(half.glob("unet/*model.safetensors"))
    assert ask(half)[0] in (0, 1)
    gray = save(tmp_path / "gray", unet=network(in_channels=1, out_channels=1, sample_size=8))
    assert ask(gray)[1]["data"]["shape"] == [1, 8, 8]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: save(p, EDMEulerScheduler()), "EDMEulerScheduler"),
        (lambda p: save(p, FlowMatchEulerDiscreteScheduler(shift=3.0)), "another shift than FlowMatchEulerDiscreteScheduler"),
        (lambda p: edit(save(p) / "model_index.json", unet=["models", "EDM2UNet"]), "the unet of class EDM2UNet"),
        (lambda p: save(p, unet=network(out_channels=6)), "3 input channels and 6 output"),
        (lambda p: save(p, unet=network(num_class_embeds=10)), "class-conditional"),
        (lambda p: edit(save(p) / "scheduler" / "scheduler_config.json", beta_schedule="mine"), "mine"),
        (lambda p: None, "cannot load a pipeline"),
    ],
)
def test_what_cannot_be_asked_is_told_in_one_line(make, message, ask, tmp_path):
    make(tmp_path / "p")
    with pytest.raises(UserError, match=message) as error:
        ask(tmp_path / "p")
    assert str(error.value).count("\n") <= 1 and len(str(error.value)) < 400

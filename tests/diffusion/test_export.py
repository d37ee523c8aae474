import importlib
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import TINY_NETWORK, made_elsewhere, make_tiny_flags, slow_turns, small_kl
from diffusers import (
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    UNet2DModel,
)
from safetensors.torch import load_file
from test_edm2_unet import TINY as TINY_EDM2
from test_sampling import CHAIN, tiny_unet

from benchmarks.shared.replace import replace_everywhere
from models.edm2_unet import EDM2UNet
from models.edm_heun import EDMHeunScheduler
from utils.core.errors import UserError
from utils.data.autoencoder import Scale, load_autoencoder
from utils.diffusion import export
from utils.diffusion.ddpm import BETA_SCHEDULES, make_noise_scheduler
from utils.diffusion.export import check_export, check_pipeline, export_pipeline
from utils.diffusion.pipelines import load_decoder, load_network
from utils.diffusion.unet import normalize_spectra

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


def same_weights(folder: Path, unet: UNet2DModel) -> bool:
    loaded = DDPMPipeline.from_pretrained(folder).unet.state_dict()
    return all(torch.equal(loaded[name], value) for name, value in unet.state_dict().items())


@pytest.mark.slow
def test_loads_in_a_fresh_interpreter_elsewhere_and_samples_the_same(tmp_path):
    unet, scheduler = tiny_unet().eval(), DDPMScheduler(num_train_timesteps=100, beta_schedule="sigmoid")
    output_dir = tmp_path / "run"
    (output_dir / "checkpoint-5").mkdir(parents=True)
    (output_dir / "checkpoint-5" / "state.bin").write_bytes(b"kept")
    export_pipeline(unet, scheduler, output_dir, "card")
    found = {str(path.relative_to(output_dir)) for path in output_dir.rglob("*") if path.is_file()}
    pipeline_files = {"model_index.json", "unet/config.json", WEIGHTS, "scheduler/scheduler_config.json", "README.md"}
    assert found == pipeline_files | {"checkpoint-5/state.bin"} and (output_dir / "README.md").read_text() == "card"

    pipeline = DDPMPipeline(unet, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    asked = {"batch_size": 2, "num_inference_steps": 3, "output_type": "np"}
    expected = pipeline(generator=torch.Generator().manual_seed(0), **asked).images
    np.testing.assert_allclose(made_elsewhere(output_dir, tmp_path, batch_size=2), expected, rtol=0, atol=CHAIN)


@pytest.mark.parametrize("schedule", BETA_SCHEDULES)
@pytest.mark.parametrize("zero_snr", [False, True])
def test_schedulers_of_diffusers_load_from_it(schedule, zero_snr, tmp_path):
    prediction_type = "v_prediction" if zero_snr else "epsilon"
    options = {"beta_schedule": schedule, "prediction_type": prediction_type, "rescale_betas_zero_snr": zero_snr}
    training = make_noise_scheduler(**options)
    export_pipeline(tiny_unet(), training, tmp_path, "")
    unet = DDPMPipeline.from_pretrained(tmp_path).unet
    for kind in (DDPMScheduler, DDIMScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler):
        scheduler = kind.from_pretrained(tmp_path, subfolder="scheduler")
        torch.testing.assert_close(scheduler.betas, training.betas, rtol=1e-6, atol=0)
        assert scheduler.config.prediction_type == prediction_type
        assert scheduler.config.timestep_spacing == training.config.timestep_spacing
        scheduler.set_timesteps(3)  # and sample
        x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * scheduler.init_noise_sigma
        for timestep in scheduler.timesteps:
            with torch.no_grad():
                prediction = unet(scheduler.scale_model_input(x, timestep), timestep).sample
            x = scheduler.step(prediction, timestep, x, generator=torch.Generator().manual_seed(0)).prev_sample
        assert x.isfinite().all()


def kill_at(move: int, monkeypatch):
    """The process dies before its `move`-th rename: no clean-up runs either."""
    moves, real_replace = [], os.replace

    def replace(source, target):
        moves.append(target)
        if len(moves) == move:
            raise KeyboardInterrupt
        real_replace(source, target)

    monkeypatch.setattr(export.os, "replace", replace)
    monkeypatch.setattr(export.shutil, "rmtree", lambda *args, **kwargs: None)


@pytest.mark.parametrize("move", range(1, 6))
@pytest.mark.parametrize("other", [{}, {"prediction_type": "v_prediction"}], ids=["the same schedule", "another one"])
def test_killed_in_the_middle_stays_loadable_and_never_mixes_two_models(move, other, tmp_path, monkeypatch):
    old, new, scheduler = tiny_unet(0), tiny_unet(1), DDPMScheduler(**other)
    export_pipeline(old, DDPMScheduler(), tmp_path, "old")
    with monkeypatch.context() as patch:
        kill_at(move, patch)
        with pytest.raises(KeyboardInterrupt):
            export_pipeline(new, scheduler, tmp_path, "new")
    assert (tmp_path / ".tmp-export").exists()
    if other:
        with pytest.raises(OSError, match="model_index"):
            DDPMPipeline.from_pretrained(tmp_path)
    else:
        assert same_weights(tmp_path, old) or same_weights(tmp_path, new)
    export_pipeline(new, scheduler, tmp_path, "new")
    assert same_weights(tmp_path, new) and not (tmp_path / ".tmp-export").exists()


def test_there_are_five_moves(tmp_path, monkeypatch):
    """So that the two tests above stop at each of them, model_index.json being the last."""
    targets, real_replace = [], os.replace
    monkeypatch.setattr(export.os, "replace", lambda s, t: (targets.append(Path(t).name), real_replace(s, t)))
    export_pipeline(tiny_unet(), DDPMScheduler(), tmp_path, "")
    assert len(targets) == 5 and targets[-1] == "model_index.json"


@pytest.mark.slow
def test_check_pipeline_names_what_is_broken(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # an assert would check nothing
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "diffusers.py").write_text("raise RuntimeError('the repository is on the path')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shadow"))
    folder = tmp_path / "run"
    export_pipeline(tiny_unet(), DDPMScheduler(num_train_timesteps=10), folder, "")
    check_pipeline(folder)
    unet = tiny_unet()
    unet.conv_out.bias.data.fill_(float("nan"))
    export_pipeline(unet, DDPMScheduler(num_train_timesteps=10), folder, "")
    with pytest.raises(RuntimeError, match=r"run does not work: .*not finite"):
        check_pipeline(folder)


def test_no_file_says_where_the_parts_were_loaded_from(tmp_path):
    here = tmp_path / "somewhere"
    small_kl().save_pretrained(here / "vae")
    autoencoder = load_autoencoder(str(here / "vae"), (1, 16, 16))
    autoencoder.scale = Scale([0.0] * 3, [1.0] * 3)
    network = UNet2DModel(**TINY_NETWORK | {"sample_size": 8, "in_channels": 3, "out_channels": 3})
    export_pipeline(network, DDPMScheduler(), here / "run", "", autoencoder=autoencoder)
    loaded, _ = load_network(str(here / "run"))  # as reconstruct_ema.py does
    export_pipeline(loaded, DDPMScheduler(), here / "out", "", autoencoder=load_decoder(str(here / "run"), loaded))
    files = [path for name in ("run", "out") for path in (here / name).rglob("*") if path.is_file()]
    assert len(files) > 10 and [path for path in files if str(tmp_path).encode() in path.read_bytes()] == []


def add_batch_norm(network):
    network.conv_out = torch.nn.Sequential(torch.nn.BatchNorm2d(network.conv_out.weight.shape[1]), network.conv_out)
    return network


@pytest.mark.parametrize("script", ["train_ddpm", *slow_turns("train_edm2")])
def test_a_network_that_cannot_be_exported_is_refused_before_the_first_update(script, train, monkeypatch, tmp_path):
    make = {"train_ddpm": "utils.diffusion.unet.make_unet", "train_edm2": "utils.diffusion.unet.make_edm2_unet"}[script]
    module, name = make.rsplit(".", 1)
    plain = getattr(sys.modules.get(module) or importlib.import_module(module), name)
    flags = [*make_tiny_flags(tmp_path, f"{script}.py"), "--max_train_steps", "2", "--output_dir", tmp_path / "run"]
    assert train(flags, script=importlib.import_module(script)) == 0
    first_run = (tmp_path / "run" / "options.json").read_bytes()
    replace_everywhere(make, lambda *arguments, **options: add_batch_norm(plain(*arguments, **options)), monkeypatch)
    with pytest.raises(UserError, match=r"exported pipeline cannot be loaded: .*conv_out") as refused:
        train([*flags, "--overwrite_output_dir"], script=importlib.import_module(script))
    assert str(refused.value).count("\n") <= 1 and len(str(refused.value)) < 600
    assert (tmp_path / "run" / "options.json").read_bytes() == first_run  # which is not lost
    assert (tmp_path / "run" / "model_index.json").exists() and not (tmp_path / "run" / ".tmp-export").exists()


def worn(kind: str):
    """(network as training holds it, scheduler)"""
    if kind == "EDM2":
        return EDM2UNet(**TINY_EDM2 | {"num_class_embeds": 3}), EDMHeunScheduler()
    unet = tiny_unet()
    if kind == "zero output":
        torch.nn.init.zeros_(unet.conv_out.weight)
        torch.nn.init.zeros_(unet.conv_out.bias)
    if kind == "spectral norm":
        normalize_spectra(unet)
    if kind == "bf16, channels last":
        unet.to(torch.bfloat16).to(memory_format=torch.channels_last)
    if kind == "compiled, bf16":
        unet.compile(backend="eager")
        unet.mid_block.compile(backend="eager")
        AcceleratorState._reset_state(True)
        unet = Accelerator(cpu=True, mixed_precision="bf16").prepare(unet)
        AcceleratorState._reset_state(True)
    return unet, make_noise_scheduler(beta_schedule="sigmoid")


@pytest.mark.parametrize("kind", ["plain", "EDM2", "zero output", "spectral norm", "bf16, channels last", "compiled, bf16"])
def test_an_export_is_clean_fp32_and_neither_it_nor_its_check_changes_anything(kind, tmp_path):
    unet, scheduler = worn(kind)
    unet.train()
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    random_states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    if "bf16, channels" not in kind:  # which computes something else than its weights in fp32
        check_export(unet, scheduler, tmp_path)
        assert list(tmp_path.iterdir()) == []
    export_pipeline(unet, scheduler, tmp_path, "")
    assert torch.equal(torch.get_rng_state(), random_states[0]) and random.getstate() == random_states[2]
    assert (np.random.get_state()[1] == random_states[1]).all()
    after, saved = unet.state_dict(), load_file(tmp_path / WEIGHTS)
    assert after.keys() == before.keys() and all(torch.equal(value, before[name]) for name, value in after.items())
    assert all(module.training for module in unet.modules()) and all(p.requires_grad for p in unet.parameters())
    assert all(p.grad is None for p in unet.parameters()) and hasattr(unet, "_original_forward") == (kind == "compiled, bf16")
    if kind != "spectral norm":  # whose weights are another product
        assert saved.keys() == before.keys()
        assert all(tensor.dtype == torch.float32 and torch.equal(tensor, before[n].float()) for n, tensor in saved.items())


@pytest.mark.parametrize("kind", ["plain", "EDM2", "zero output", "spectral norm"])
def test_a_network_that_would_compute_something_else_once_exported_is_refused(kind, tmp_path):
    unet, scheduler = worn(kind)
    block = unet.encoder[0] if kind == "EDM2" else unet.mid_block
    block.register_forward_hook(lambda module, inputs, output: output.flip(-1))
    with pytest.raises(UserError, match="its output is another one when it is loaded, though the weights are the same"):
        check_export(unet, scheduler, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_noise_schedule_that_its_config_does_not_name_is_refused(tmp_path):
    unet, scheduler = worn("plain")
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.sqrt()
    with pytest.raises(UserError, match="the noise schedule is not the one that its config names"):
        check_export(unet, scheduler, tmp_path)

"""Runs without an exported pipeline: their newest checkpoint is taken, by every script, and says by itself what it is of."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_tiny_flags, slow_turns, small_kl
from diffusers import DDPMScheduler
from safetensors.torch import load_file

import diagnose
import evaluate
import generate
import reconstruct_ema
import train_ddpm
from utils.core.errors import UserError
from utils.diffusion.generated import weights_hash
from utils.diffusion.pipelines import load_decoder, load_network, load_unconditional, names_of_classes
from utils.evaluation.newest import loadable

RECORDED = ROOT / "tests" / "recorded"


@pytest.fixture
def stopped(tmp_path) -> Path:
    """The folder of a run with the checkpoints 4 and 8, and nothing exported."""
    for step in (4, 8):
        shutil.copytree(RECORDED / "train_ddpm" / "checkpoint-4", tmp_path / "run" / f"checkpoint-{step}")
    (tmp_path / "run" / "options.json").write_text('{"options": {}}')
    return tmp_path / "run"


def test_the_newest_valid_checkpoint_stands_for_the_run(stopped, capsys):
    using = f"{stopped} has no exported pipeline yet: using the averaged weights of checkpoint-"
    assert loadable(str(stopped)) == f"{stopped}/checkpoint-8"
    assert capsys.readouterr() == ("", f"{using}8\n")  # stdout may be JSON
    (stopped / "checkpoint-8" / "ema.safetensors").write_bytes(b"damaged")
    assert loadable(str(stopped)) == f"{stopped}/checkpoint-4"
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == [f"{using}4"]
    assert lines[0].startswith("skipping checkpoint-8: ema.safetensors has 7 bytes")
    (stopped / ".tmp-replaced-checkpoint-12").mkdir()  # of a run that goes on: it is left alone
    assert loadable(str(stopped)) and (stopped / ".tmp-replaced-checkpoint-12").is_dir()


def test_what_can_be_loaded_is_taken_by_its_name(stopped, tmp_path):
    for name in (f"{stopped}/checkpoint-4", "some/thing", str(tmp_path)):
        assert loadable(name) == name
    (stopped / "model_index.json").write_text("{}")
    assert loadable(str(stopped)) == str(stopped)


def test_a_run_with_neither_says_so(stopped):
    (stopped / "checkpoint-4" / "MANIFEST.json").unlink()
    (stopped / "checkpoint-8" / "MANIFEST.json").unlink()
    with pytest.raises(
        UserError, match=r"no valid checkpoint yet\nrestore one from a copy: skipping checkpoint-8: .*; skipping"
    ):
        loadable(str(stopped))
    for path in stopped.glob("checkpoint-*"):
        shutil.rmtree(path)
    with pytest.raises(UserError, match=r"no exported pipeline and no valid checkpoint yet\n.* --checkpointing_steps"):
        loadable(str(stopped))


def test_a_checkpoint_alone_has_its_network_and_its_schedule(stopped):
    unet, config = load_network(f"{stopped}/checkpoint-4")
    stored = load_file(stopped / "checkpoint-4" / "ema.safetensors")
    assert unet.state_dict().keys() == stored.keys() and not unet.training
    assert all(torch.equal(tensor, stored[name]) for name, tensor in unet.state_dict().items())
    assert torch.equal(DDPMScheduler.from_config(config).betas, torch.linspace(1e-4, 0.02, 1000))
    edm2 = RECORDED / "train_edm2" / "checkpoint-4"
    unet, config = load_network(str(edm2))
    stored = load_file(edm2 / "ema.safetensors")
    assert torch.equal(
        unet.conv_in.weight, stored["unet.conv_in.weight" if "unet.conv_in.weight" in stored else "conv_in.weight"]
    )
    assert config["sigma_data"] == 0.5
    with pytest.raises(UserError, match="not an unconditional pipeline of pixels"):
        load_unconditional(str(edm2))
    assert load_unconditional(f"{stopped}/checkpoint-4")[1] == load_network(f"{stopped}/checkpoint-4")[1]


KINDS = {
    "v": ["--prediction_type", "v_prediction", "--ddpm_beta_schedule", "sigmoid", "--rescale_betas_zero_snr"],
    "classes": ["--class_conditional"],
    "latents": ["--vae", "vae", "--latent_scale", "auto"],
    "edm2": [],
}


@pytest.mark.parametrize("kind", ["v", *slow_turns("classes", "latents", "edm2")])
def test_it_is_what_the_run_would_have_exported(kind, train, tmp_path, monkeypatch):
    """The same network, schedule, classes and decoder, so that images of both are one set."""
    monkeypatch.chdir(tmp_path)
    script = "train_edm2.py" if kind == "edm2" else "train_ddpm.py"
    flags = [*make_tiny_flags(tmp_path, script), *KINDS[kind]]
    if kind == "latents":
        small_kl().save_pretrained(tmp_path / "vae")
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"in_channels": 3, "out_channels": 3}))
    flags += ["--max_train_images", "64", "--max_train_steps", "2", "--checkpointing_steps", "2", "--output_dir", "run"]
    assert train(flags, script=importlib.import_module(Path(script).stem)) == 0

    def loaded(name: str) -> tuple:
        unet, config = load_network(name)
        decoder = load_decoder(name, unet)
        facts = decoder and (decoder.fingerprint(), decoder.scale, decoder.image_shape)
        return weights_hash(unet, config), facts, names_of_classes(name), dict(unet.config).keys()

    exported = loaded("run/checkpoint-2")
    for name in ("unet", "scheduler", "vae"):
        shutil.rmtree(Path("run", name), ignore_errors=True)
    Path("run/model_index.json").unlink()
    alone = loaded("run/checkpoint-2")
    assert alone[:3] == exported[:3]
    monkeypatch.chdir("/")
    assert loaded(f"{tmp_path}/run/checkpoint-2")[:3] == exported[:3]  # --vae was a relative path
    assert (alone[2] != []) == (kind in ("classes", "edm2"))


@pytest.mark.slow
def test_every_script_takes_it(stopped, tiny_flags, train, tmp_path, capsys):
    using = f"{stopped} has no exported pipeline yet: using the averaged weights of checkpoint-8"
    made = ["--num_images", "2", "--num_inference_steps", "2", "--output_dir", str(tmp_path / "images")]
    generate.main(generate.parse_args(["--pipeline", str(stopped), *made]))
    assert using in capsys.readouterr().err
    assert json.loads((tmp_path / "images" / "generate.json").read_text())["pipeline"] == f"{stopped}/checkpoint-8"
    cache = tiny_flags[tiny_flags.index("--cache_dir") + 1]
    words = ["--pipeline", str(stopped), "--dataset_name", "digits", "--cache_dir", cache, "--probe_images", "4"]
    assert diagnose.main(diagnose.parse_args(words)) in (0, 1)
    assert using in capsys.readouterr().err
    words = [*words[:-2], "--num_images", "16", "--num_inference_steps", "2", "--no_classes", "--json"]
    evaluate.main(evaluate.parse_args(words))
    said = capsys.readouterr()
    assert using in said.err and json.loads(said.out)["results"][0]["name"] == f"{stopped}/checkpoint-8"
    keeps = {"--dataset_name", "--cache_dir", "--train_batch_size", "--eval_batch_size", "--cpu_threads"}
    flags = [word for pair in zip(tiny_flags[::2], tiny_flags[1::2]) if pair[0] in keeps for word in pair]
    flags += ["--pretrained", str(stopped), "--max_train_steps", "1", "--max_train_images", "64"]
    assert train([*flags, "--output_dir", tmp_path / "tuned"], script=train_ddpm) == 0
    said = capsys.readouterr()
    assert using in said.err and f"starting from {stopped}" in said.out
    with pytest.raises(UserError, match="has no EMA snapshots"):
        words = [str(stopped), "--width", "0.1", "--output_dir", str(tmp_path / "ema")]
        reconstruct_ema.main(reconstruct_ema.parse_args(words))


@pytest.mark.slow
def test_averages_are_reconstructed_without_a_pipeline(train, tmp_path):
    flags = [*make_tiny_flags(tmp_path, "train_edm2.py"), "--ema_snapshot_steps", "1", "--max_train_images", "64"]
    flags += ["--checkpointing_steps", "4", "--output_dir", tmp_path / "run"]
    assert train(flags, script=importlib.import_module("train_edm2")) == 0
    made = []
    for name in ("exported", "alone"):
        words = [str(tmp_path / "run"), "--width", "0.1", "--output_dir", str(tmp_path / name)]
        reconstruct_ema.main(reconstruct_ema.parse_args(words))
        made.append(load_file(tmp_path / name / "unet" / "diffusion_pytorch_model.safetensors"))
        (tmp_path / "run" / "model_index.json").unlink(missing_ok=True)
        shutil.rmtree(tmp_path / "run" / "unet", ignore_errors=True)
    assert made[0].keys() == made[1].keys() and all(torch.equal(made[0][name], made[1][name]) for name in made[0])

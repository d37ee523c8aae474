"""The training script as its users run it: equal launches, resuming, stopping, bad input, the exported pipeline."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, logged_scalars, run_command, same_bytes, script_environment, slow_turns, step_seen
from safetensors.torch import load_file

from utils.core.errors import UserError
from utils.core.limits import usable_cores
from utils.runs.checkpoint_files import list_checkpoints

CHECKPOINT_FILES = ("model.safetensors", "ema.safetensors", "optimizer.bin")


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


# ---- one process, two processes, accumulation: the same training


@pytest.fixture(scope="module")
def split_runs(server, tiny_flags, tmp_path_factory) -> dict[str, Path]:
    """20 updates of the same run, split in three ways."""
    folder = tmp_path_factory.mktemp("split")
    flags = [*tiny_flags, "--max_train_steps", "20", "--validation_images", "16"]
    flags += ["--random_flip", "--color_jitter", "0.1", "--augment_probability", "0.2", "--validation_steps", "10"]
    splits = {"1x8": (1, 8, 1), "1x4x2": (1, 4, 2), "2x4": (2, 4, 1)}
    for name, (processes, batch, accumulation) in splits.items():
        split = ["--train_batch_size", batch, "--gradient_accumulation_steps", accumulation, "--output_dir", folder / name]
        server.run(["train_ddpm.py", *flags, *split], processes)
    return {name: folder / name for name in splits}


@pytest.mark.slow
@pytest.mark.parametrize("split", ["1x4x2", "2x4"])
def test_splits_of_a_batch_train_alike(split_runs, split):
    expected, actual = (logged_scalars(split_runs[name], "train/loss") for name in ("1x8", split))
    assert len(expected) == 20
    assert actual == pytest.approx(expected, rel=1e-5)
    for tag in ("train/lr", "train/ema_decay", "train/samples_seen"):
        assert logged_scalars(split_runs["1x8"], tag) == logged_scalars(split_runs[split], tag)
    validation = [logged_scalars(split_runs[name], "validation/loss") for name in ("1x8", split)]
    assert validation[0] == pytest.approx(validation[1], rel=1e-4)


# ---- resuming


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="plain"),
        pytest.param(["--augment_probability", "0.3", "--objective", "flow"], id="transforms"),
        *slow_turns(
            ["--dropout", "0.3", "--optimizer", "rmsprop", "--prediction_type", "v_prediction", "--no-use_ema"],
            ["--cache_images", "no", "--dataloader_num_workers", "2", "--balanced_sampling", "--snr_gamma", "5"],
            ["--random_flip", "--color_jitter", "0.2", "--max_grad_norm", "0"],
            ["--spectral_norm", "--adaptive_clipping", "--save_model_steps", "3"],
            ["--mixed_precision", "bf16", "--gradient_checkpointing", "--l1_weight", "1e-5", "--zero_init_output"],
            ["--mixed_precision", "bf16", "--gradient_accumulation_steps", "2", "--train_batch_size", "4"],
            ids=[
                "dropout-rmsprop",
                "workers-balanced",
                "flips-unclipped",
                "spectral-adaptive",
                "bf16-checkpointing",
                "bf16-micro",
            ],
        ),
    ],
)
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(resumed_alike, tiny_flags, tmp_path, options):
    run = resumed_alike([*tiny_flags, *options], tmp_path)
    state = json.loads((run / "checkpoint-8" / "state.json").read_text())
    assert (state["grad_norm_mean"] is None) == ("--adaptive_clipping" not in options)
    measured = {"data", "noise", "timestep", "input", "network", "target", "weight", "gradient", "optimizer", "learning_rate"}
    measured |= {"state", "ema"} | ({"condition"} if "--augment_probability" in options else set())
    assert measured - ({"ema"} if "--no-use_ema" in options else set()) == step_seen(run)[0]


def test_sampling_and_validating_leave_the_training_untouched(train, tiny_flags, tmp_path):
    flags = [*tiny_flags, "--dropout", "0.2", "--validation_images", "16"]
    flags += ["--max_train_steps", "4", "--checkpointing_steps", "4"]
    quiet = ["--output_dir", tmp_path / "quiet", "--validation_steps", "100"]
    busy = ["--output_dir", tmp_path / "busy", "--validation_steps", "1", "--save_images_steps", "1", "--save_model_steps", "2"]
    train([*flags, *quiet])
    train([*flags, *busy])
    assert len(list((tmp_path / "busy" / "samples").glob("*.png"))) == 8
    for file in CHECKPOINT_FILES:
        assert same_bytes(tmp_path / "quiet/checkpoint-4" / file, tmp_path / "busy/checkpoint-4" / file)


# ---- stopping


@pytest.mark.slow
def test_early_stopping_keeps_the_best_checkpoint_and_stays_stopped(train, tiny_flags, tmp_path):
    """With a learning rate of practically nothing the validation loss stands still, and only the first one counts."""
    flags = [*tiny_flags, "--output_dir", tmp_path, "--learning_rate", "1e-30", "--max_train_steps", "40"]
    flags += ["--validation_images", "8", "--validation_steps", "2", "--checkpointing_steps", "8", "--early_stopping_patience"]
    assert train([*flags, "3"]) == 0
    assert max(logged_scalars(tmp_path, "train/loss")) == 8  # best at 2, then 4, 6 and 8 brought no gain
    assert (tmp_path / "model_index.json").exists()
    exported = (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").read_bytes()
    train([*flags, "3", "--resume_from_checkpoint", "latest"])
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-8"]
    assert same_bytes(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", exported)
    train([*flags, "6", "--resume_from_checkpoint", "latest"])
    assert max(logged_scalars(tmp_path, "train/loss")) == 14


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "processes", "asked"), [*slow_turns(("cpu.yaml", 1, None), ("cpu.yaml", 1, "1")), ("multi_cpu.yaml", 2, None)]
)
def test_launch_configs_start_connected_processes_on_all_cores(tiny_flags, tmp_path, config, processes, asked):
    threads = tiny_flags.index("--cpu_threads")
    flags = tiny_flags[:threads] + tiny_flags[threads + 2 :]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / config]
    command += [ROOT / "train_ddpm.py", *flags, "--max_train_steps", "2", "--output_dir", tmp_path]
    environment = {name: value for name, value in script_environment().items() if name != "OMP_NUM_THREADS"}
    result = run_command(command, environment | ({"OMP_NUM_THREADS": asked} if asked else {}))
    assert result.returncode == 0, result.stderr[-3000:]
    resolved = json.loads((tmp_path / "options.json").read_text())["resolved"]
    assert (resolved["num_processes"], resolved["global_batch_size"]) == (processes, 8 * processes)
    assert resolved["cpu_threads"] == int(asked or max(1, usable_cores() // processes))


# ---- drop-in for train_unconditional.py


@pytest.mark.slow
def test_its_test_suite_s_command_lines(train, tiny_flags, tmp_path):
    """The three cases of diffusers' own test, on six local images instead of its Hub data set."""
    from PIL import Image

    images = tmp_path / "images"
    images.mkdir()
    for i in range(6):
        Image.effect_noise((40, 32), 60 + i).convert("RGB").save(images / f"{i}.png")
    config = tmp_path / "config"
    config.mkdir()
    network = json.loads((Path(tiny_flags[3]) / "config.json").read_text()) | {"in_channels": 3, "out_channels": 3}
    (config / "config.json").write_text(json.dumps(network))
    output_dir = tmp_path / "run"
    common = f"""--train_data_dir {images} --model_config_name_or_path {config} --resolution 16 --output_dir {output_dir}
        --cache_dir {tmp_path / "cache"} --gradient_accumulation_steps 1 --ddpm_num_inference_steps 2 --learning_rate 1e-3
        --lr_warmup_steps 5 --eval_batch_size 2 --train_batch_size 1 --checkpointing_steps=2""".split()
    assert train([*common, "--num_epochs", "1", "--checkpoints_total_limit=2"]) == 0
    assert names(output_dir) == ["checkpoint-4", "checkpoint-6"]
    assert (output_dir / "unet" / "diffusion_pytorch_model.safetensors").is_file()
    assert (output_dir / "scheduler" / "scheduler_config.json").is_file()
    resume = ["--num_epochs", "2", "--resume_from_checkpoint=checkpoint-6", "--checkpoints_total_limit=2"]
    assert train([*common, *resume]) == 0
    assert names(output_dir) == ["checkpoint-10", "checkpoint-12"]


# ---- bad input ends before the first update, in one line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--validation_images", "5000"], "leaves no images to train on: there are 1797"),
        (["--output_dir", "/proc/run"], "cannot write to --output_dir /proc/run"),
        (
            ["--rescale_betas_zero_snr", "--prediction_type", "v_prediction", "--snr_gamma", "5"],
            "timestep 999 a weight of 0",
        ),
        (["--resume_from_checkpoint", "checkpoint-7"], "has no such checkpoint"),
        (["--mixed_precision", "fp16"], "fp16 needs a GPU"),
        (["--ddpm_num_inference_steps", "5000"], "--ddpm_num_inference_steps: 5000 sampling steps are not possible"),
        (["--background", "fog"], "--background must be an opaque color, such as white, #808080 or rgb(0,0,0); got fog"),
        (["--dataset_name", "data/train.parquet"], "--dataset_name data/train.parquet: no such file or folder"),
        (["--optimizer", "adamw8bit"], "bitsandbytes"),
        (["--logger", "wandbb"], "unknown --logger 'wandbb'"),
        (["--logger", "aim"], "pip install aim"),
        (["--enable_xformers_memory_efficient_attention"], "xformers is not installed\nleave this flag out"),
    ],
)
def test_bad_input_is_named(train, tiny_flags, tmp_path, flags, message):
    with pytest.raises(UserError) as error:
        train([*tiny_flags, "--output_dir", tmp_path / "run", *flags])
    assert message in str(error.value)
    assert "Traceback" not in str(error.value) and len(str(error.value)) < 600
    assert not (tmp_path / "run" / "options.json").exists()  # nor was an earlier run deleted
    assert not list((tmp_path / "run").glob("checkpoint-*"))


# ---- what a run leaves


def test_the_folder_of_a_run_which_is_refused_or_replaced_by_another(train, tiny_flags, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    secret = ["--hub_token", "hf_abcdefghijklmnopqrstuvwxyz"]
    flags = [*tiny_flags, *secret, "--output_dir", tmp_path, "--checkpointing_steps", "4", "--validation_images", "8"]
    assert train(flags) == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"model_index.json", "unet", "scheduler", "README.md", "options.json", "samples", "logs", "checkpoint-8"}
    assert {name for name in left if name.startswith(".")} == {".lock"}
    assert (tmp_path / "exit_status").read_text() == "0\n"
    options = json.loads((tmp_path / "options.json").read_text())
    assert options["options"]["learning_rate"] == 1e-3
    assert options["resolved"]["training_images"] == 1789
    assert set(options["versions"]) >= {"torch", "accelerate", "diffusers"}
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {"0000008.png", "0000008-path.png"}
    card = (tmp_path / "README.md").read_text()
    assert "64" in card and "digits" in card and "samples/0000008.png" in card
    for file in (tmp_path / "options.json", tmp_path / "README.md", *tmp_path.glob("checkpoint-*/state.json")):
        assert "hf_abc" not in file.read_text(), file
    tags = ("train/loss", "train/grad_norm", "train/lr", "train/ema_decay", "train/ema_distance", "train/clip_value")
    for tag in (*tags, "train/skipped_updates", "perf/images_per_second", "perf/data_wait", "perf/peak_memory_gib"):
        assert sorted(logged_scalars(tmp_path, tag)) == list(range(1, 9)), tag
    from diffusers import DDPMPipeline

    weights = load_file(tmp_path / "checkpoint-8" / "ema.safetensors")
    exported = DDPMPipeline.from_pretrained(tmp_path).unet.state_dict()
    assert all(torch.equal(weights[name], exported[name]) for name in weights)
    with pytest.raises(UserError, match="already has a run"):
        train(flags)
    assert train([*flags, "--overwrite_output_dir", "--max_train_steps", "4"]) == 0
    assert names(tmp_path) == ["checkpoint-4"] and (tmp_path / "notes.txt").read_text() == "mine"
    assert sorted(logged_scalars(tmp_path, "train/loss")) == [1, 2, 3, 4]

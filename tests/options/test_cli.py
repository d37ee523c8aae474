import ast
import importlib
import json
import math
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from command_lines import LINES, RECORDED
from conftest import ROOT

import train_ddpm
import train_edm2
from utils.core.errors import UserError
from utils.diffusion.unet import make_edm2_unet
from utils.options.flags import read_widths
from utils.options.parser import make_parser, spelled, values_of
from utils.options.values import Values

# Every flag of diffusers' train_unconditional.py but --local_rank, which torch's launchers no longer pass, with a value.
DROP_IN = """--dataset_name a/b --dataset_config_name c --model_config_name_or_path m --train_data_dir d --output_dir o
    --overwrite_output_dir --cache_dir k --resolution 64 --center_crop --random_flip --train_batch_size 2 --eval_batch_size 3
    --dataloader_num_workers 1 --num_epochs 4 --save_images_epochs 5 --save_model_epochs 6 --gradient_accumulation_steps 7
    --learning_rate 1e-3 --lr_scheduler linear --lr_warmup_steps 8 --adam_beta1 0.9 --adam_beta2 0.99
    --adam_weight_decay 1e-4 --adam_epsilon 1e-7 --use_ema --ema_inv_gamma 2 --ema_power 0.6 --ema_max_decay 0.99
    --push_to_hub --hub_token t --hub_model_id i --hub_private_repo --logger wandb --logging_dir l --mixed_precision bf16
    --prediction_type sample --ddpm_num_steps 500 --ddpm_num_inference_steps 100 --ddpm_beta_schedule linear
    --checkpointing_steps 9 --checkpoints_total_limit 10 --resume_from_checkpoint latest --preserve_input_precision
    --enable_xformers_memory_efficient_attention"""

# Its defaults, as far as both have them.
DEFAULTS = """--output_dir ddpm-model-64 --resolution 64 --train_batch_size 16 --eval_batch_size 16 --num_epochs 100
    --save_images_epochs 10 --save_model_epochs 10 --learning_rate 1e-4 --lr_scheduler cosine --lr_warmup_steps 500
    --adam_beta1 0.95 --adam_beta2 0.999 --adam_weight_decay 1e-6 --adam_epsilon 1e-8 --ema_inv_gamma 1 --ema_power 0.75
    --ema_max_decay 0.9999 --logger tensorboard --logging_dir logs --prediction_type epsilon --ddpm_num_steps 1000
    --ddpm_beta_schedule linear --checkpointing_steps 500"""


def test_every_flag_of_train_unconditional_is_understood():
    args = vars(train_ddpm.parse_args(shlex.split(DROP_IN)))
    words = shlex.split(DROP_IN)
    for word, value in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            expected = True if value.startswith("--") else value
            assert args[word[2:]] == (type(args[word[2:]])(expected)), word


def test_defaults_are_those_of_train_unconditional():
    usual, given = (train_ddpm.parse_args(["--dataset_name", "a/b", *words]) for words in ([], DEFAULTS.split()))
    names = [word.removeprefix("--") for word in DEFAULTS.split() if word.startswith("--")]
    assert {name: getattr(usual, name) for name in names} == {name: getattr(given, name) for name in names}
    assert usual.checkpoints_total_limit is usual.resume_from_checkpoint is usual.model_preset is None


@pytest.mark.parametrize(
    ("preset", "channels", "learning_rate", "dropout", "mebi_images"),
    [  # published for pixels (ImageNet-64); the lengths of XXS and XXL for latents, as there are no others
        ("XXS", 64, 0.0170, 0.0, 2048),
        ("XS", 128, 0.0120, 0.0, 1024),
        ("S", 192, 0.0100, 0.0, 1024),
        ("M", 256, 0.0090, 0.1, 2048),
        ("L", 320, 0.0080, 0.1, 1024),
        ("XL", 384, 0.0070, 0.1, 640),
        ("XXL", 448, 0.0065, 0.1, 896),
    ],
)
def test_edm2_s_presets_are_the_published_settings_for_pixels(preset, channels, learning_rate, dropout, mebi_images):
    args = train_edm2.parse_args(["--dataset_name", "x/y", "--model_preset", preset])
    assert (args.optimizer, args.adam_beta1, args.adam_beta2, args.adam_epsilon) == ("adam", 0.9, 0.99, 1e-8)
    assert (args.adam_weight_decay, args.max_grad_norm, args.lr_scheduler) == (0.0, 0.0, "inverse_sqrt")
    assert (args.learning_rate, args.lr_decay_steps, args.global_batch_size) == (learning_rate, 35_000, 2048)
    assert (args.P_mean, args.P_std, args.sigma_data, args.ema_type) == (-0.8, 1.6, 0.5, "power")
    assert args.max_train_steps * 2048 == mebi_images * 2**20
    assert args.ema_snapshot_steps * 2048 == 8 * 2**20
    assert args.lr_warmup_steps == math.ceil(10e6 / 2048)
    with torch.device("meta"):
        config = make_edm2_unet(args).config
    assert (config.model_channels, config.dropout) == (channels, dropout)
    other = train_edm2.parse_args(["--dataset_name", "x/y", "--model_preset", preset, "--global_batch_size", "256"])
    changed = {name for name, value in vars(other).items() if value != getattr(args, name)}
    assert changed == {"global_batch_size"}  # as the help says


READERS = {"args", "options", "self", "self.options", "self._options", "run.options", "self._run.options"}  # names of options


@pytest.mark.parametrize("module", [train_ddpm, train_edm2], ids=["ddpm", "edm2"])
def test_every_flag_is_read(module):
    paths = [path for path in (ROOT / "utils").rglob("*.py") if path.name != "flags.py"]
    nodes = [node for path in (Path(module.__file__), *paths) for node in ast.walk(ast.parse(path.read_text()))]
    nodes += ast.walk(ast.parse((ROOT / "utils/options/flags.py").read_text()))  # where flags are compared with one another
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in READERS}
    assert set(vars(module.parse_args([]))) - read == set()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model_preset cifar", "unknown --model_preset 'cifar'"),
        ("--model_preset cifar10", "no data was given"),
        (
            "--checkpoint_steps 3",
            r"unknown flag --checkpoint_steps\nnearest: --checkpointing_steps, .*\n\S+ --help all lists all flags$",
        ),
        ("--profile 20", r"^--profile is no longer a flag\nuse a profiler that starts the script"),
        ("--hub_tok secret", "unknown flag --hub_tok\nnearest: --hub_token"),
        ("--train_batch_size 0", "--train_batch_size must be a whole number of at least 1, or auto; got 0"),
        ("--early_stopping_patience 3 --validation_images 0", "set --validation_images"),
    ],
)
def test_values_that_no_run_can_use_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        train_ddpm.parse_args(flags.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--compile true", "unexpected word true after --compile, which takes no value"),
        ("--compile=true", "--compile takes no value, got true"),
        ("--no-use_ema=1", "--use_ema takes no value, got 1"),
        ("--resolution", "--resolution needs a value: a number of pixels up to 16384, or two as height x width, such as 64x96"),
        ("--ema_widths", "--ema_widths needs a value: a number"),
        ("--config", "--config needs a value: a file"),
        ("word", "unexpected word word: flags begin with --"),
        ("--qzqzqz", r"unknown flag --qzqzqz\n\S+ --help all lists all flags$"),
        ("--lr 3", "unknown flag --lr\nnearest: --learning_rate\n"),
        ("--num-processes 4", "--num-processes is a flag of accelerate launch\nwrite it before "),
        ("--learning_rate -1e-4", "--learning_rate must be a number above 0; got -1e-4"),
        ("--output_dir $NOT_SET/run", r"--output_dir begins with a variable that is not set: \$NOT_SET/run"),
        ("--resolution 20000", "--resolution must be a number of pixels up to 16384, .*; got 20000"),
        ("-x", "unknown flag -x"),
    ],
)
def test_words_that_mean_nothing_are_told_apart(flags, message):
    with pytest.raises(UserError, match=message):
        train_ddpm.parse_args(flags.split())


def test_negative_numbers_with_an_exponent_are_values():
    assert train_ddpm.parse_args(["--dataset_name", "a.npz", "--data_range", "-1e-3", "-.5e-3"]).data_range == [-1e-3, -5e-4]


def test_the_home_folder_is_meant_wherever_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("output_dir: $HOME/runs/a\n")
    options = train_ddpm.parse_args(["--train_data_dir=~/photos", "--config=~/run.yaml"])
    assert (options.train_data_dir, options.output_dir) == (f"{tmp_path}/photos", f"{tmp_path}/runs/a")


def test_flags_without_effect_are_told():
    def told(words):
        return train_ddpm.parse_args(["--dataset_name", "digits", *words.split()]).without_effect()

    assert told("--momentum 0.5 --lr_power 2 --seed 3") == [
        "--momentum has no effect without --optimizer sgd or rmsprop",
        "--lr_power has no effect without --lr_scheduler polynomial",
    ]
    assert told("--validation_images 0 --validation_steps 5") == [
        "--validation_steps has no effect without --validation_images"
    ]
    assert not told("--momentum 0.5 --optimizer sgd --ema_widths 0.1 --ema_type power --eval_steps 5 --eval_images 50")


def test_scripts_without_a_training_refuse_flags_without_effect():
    words = ["run", "--width", "0.1", "--output_dir", "out", "--num_images", "50"]
    with pytest.raises(UserError, match=r"^--num_images has no effect without --widths\nleave it out"):
        importlib.import_module("reconstruct_ema").parse_args(words)


def test_flags_that_need_others_are_those_of_the_scripts():
    for script in (train_ddpm, importlib.import_module("train_edm2")):
        options = script.parse_args(["--dataset_name", "digits"])
        for names, (needed, *values) in options.needs.items():
            assert {*names.split(), needed} <= vars(options).keys()
            choices = values_of(type(options))[needed].choices
            assert not values or {*values} <= {*choices}


def test_the_value_of_a_mistyped_flag_is_not_what_is_told():
    with pytest.raises(UserError, match=r"^unknown flag --image_dir\nnearest: --images"):
        importlib.import_module("evaluate").parse_args(["--image_dir", "photos", "--dataset_name", "digits"])


@pytest.mark.parametrize("name", LINES)
def test_every_refused_value_names_its_flag_and_what_is_allowed(name):
    script = importlib.import_module(name)
    parser, tried = make_parser(script.parse_args.__annotations__["return"], ""), 0
    for flag, action in parser._option_string_actions.items():
        if not isinstance(action.type, Values) or flag not in action.option_strings:
            continue
        bad = ["nonsense", "nan", "inf"] if action.type.type in (int, float) else ["nonsense"] if action.type.choices else []
        outside = {"at least": -1, "above": 0, "below": 0}
        bad += [str(limit + outside[word]) for word, limit in action.type.limits]
        for value in ["", *bad]:
            tried += 1
            with pytest.raises(UserError) as error:
                script.parse_args([flag, value])
            assert str(error.value) == f"{flag} must be {action.type.allowed()}; got {value or 'nothing'}"
    assert tried >= 10


@pytest.mark.parametrize(
    ("text", "widths"),
    [("0.1", [0.1]), ("0.02:0.05:0.01", [0.02, 0.03, 0.04, 0.05]), ("0.1:0.18:0.05", [0.1, 0.15])]
    + [
        (text, None)
        for text in ("0.1-0.2", "0.2:0.1:0.05", "0.1:0.2:0", "0:0.2:0.1", "0.1:0.3:0.1", "0.1:0.2", "nan", "0.02:0.2:1e-8")
    ],
)
def test_widths_to_try_are_a_range_of_possible_ones(text, widths):
    words = ["run", "--output_dir", "out", "--widths", text]
    script = importlib.import_module("reconstruct_ema")
    if widths is not None:
        assert read_widths(script.parse_args(words).widths) == widths
        return
    with pytest.raises(UserError, match=f"^--widths must be FIRST:LAST:STEP, such as 0.02:0.25:0.01.*; got {text}$"):
        script.parse_args(words)


@pytest.mark.parametrize("name", LINES)
def test_hyphens_stand_for_underscores(name):
    script = importlib.import_module(name)
    parser = make_parser(script.parse_args.__annotations__["return"], "")
    flags = [flag for flag in parser._option_string_actions if "_" in flag]
    assert flags
    for flag in flags:
        assert spelled(flag.replace("_", "-") + "=a-b_c", parser) == flag + "=a-b_c"
    assert spelled("--no-such-flag", parser) == "--no-such-flag"
    assert spelled("some-file_name", parser) == "some-file_name"
    line = json.loads(RECORDED.read_text())[name]["lines"]
    line = next(words for words, found in line.items() if "options" in found and re.search(r"--\w+_", words))
    words = [word.replace("_", "-") if word.startswith("--") else word for word in line.split()]
    assert words != line.split() and script.parse_args(words) == script.parse_args(line.split())


@pytest.mark.parametrize("script", ["train_ddpm", "train_edm2", "evaluate", "diagnose"])
def test_help_shows_the_usual_flags_and_names_the_way_to_all(script, capsys):
    def shown(*words):
        with pytest.raises(SystemExit) as stopped:
            importlib.import_module(script).parse_args([*words])
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        return set(re.findall(r"^  (?:-h \[all\], )?(--\w+|\w+(?=  )|{make-reference})", text, re.MULTILINE)), text

    usual, text = shown("--help")
    everything, _ = shown("--help", "all")
    assert 13 <= len(usual - {"--help", "--config"}) <= 16 and usual < everything
    count = int(re.search(rf"{Path(sys.argv[0]).name} --help all explains all (\d+) flags", text)[1])
    assert count == len([name for name in everything if name.startswith("--")])
    with pytest.raises(UserError, match="--help takes no value, or all; got al"):
        shown("--help", "al")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train_ddpm.py --help all", ["accelerate launch train_ddpm.py", "cifar10: --resolution 32"]),
        ("train_edm2.py --help all", ["settings for pixels (ImageNet-64)", "do not follow another --global_batch_size"]),
        ("generate.py --help", ["accelerate launch generate.py --pipeline"]),
        ("train_ddpm.py --version", [f"torch {version('torch')}", "commit "]),
        ("train_ddpm.py --print-config", ["dataset_name: digits\n", "learning_rate: 0.002\n"]),
    ],
)
def test_what_only_prints_ends_at_once_without_the_libraries(line, expected):
    script, *words = line.split()
    code = f"import sys, runpy; sys.argv = {[script, *words]}\n"
    code += f"try: runpy.run_path('{ROOT / script}', run_name='__main__')\n"
    code += "except SystemExit as end: assert not end.code and not {'torch', 'diffusers', 'numpy', 'PIL'} & set(sys.modules)"
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert time.perf_counter() - start < 30
    assert all(words in result.stdout for words in expected)

"""What each script makes of command lines, and what each of its flags is: recorded, so that no rewrite changes it.

    python tests/command_lines.py      # records tests/recorded/command_lines.json anew: only for a change that is meant

tests/options/test_command_lines.py compares.
"""

import argparse
import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from unittest.mock import patch

RECORDED = Path(__file__).parent / "recorded" / "command_lines.json"
TRAINING = [  # for both training scripts
    "",
    "--dataset_name digits",
    "--dataset_name uoft-cs/cifar10",
    "--dataset_name uoft-cs/cifar10 --resolution 32 --random_flip --train_batch_size 64 --gradient_accumulation_steps 2",
    "--dataset_name a/b --dataset_config_name c --dataset_split all --dataset_revision 1f --image_column img --label_column y",
    "--train_data_dir somewhere --center_crop --num_epochs 3 --background black --color_jitter 0.2 --balanced_sampling",
    "--train_data_dir somewhere --model_preset digits16",
    "--train_data_dir somewhere --num_epochs 5 --model_preset digits16 --max_train_steps 7",
    "--model_preset digits16 --gradient_accumulation_steps 4",
    "--model_preset digits16 --save_images_epochs 2 --save_model_epochs 3",
    "--model_preset digits16 --learning_rate 1e-5 --lr_scheduler cyclic --lr_cycles 3 --lr_power 2 --lr_floor 0.1",
    "--model_preset nonsense",
    "--model_preset=digits16 --seed=3",
    "--model_config_name_or_path config --dataset_name digits",
    "--model_config_name_or_path config",
    "--dataset_name d --cache_dir c --cache_images no --on_bad_image replace --max_bad_images 7 --dataloader_num_workers 3",
    "--dataset_name d --cache_images maybe",
    "--dataset_name d --max_train_images 10 --image_channels 1 --preserve_input_precision --validation_images 4",
    "--dataset_name d --image_channels 2",
    "--dataset_name d --streaming",
    "--dataset_name d --streaming --balanced_sampling",
    "--dataset_name d --streaming --cache_limit much",
    "--dataset_name d --resolution 0",
    "--dataset_name d --resolution big",
    "--dataset_name d --train_batch_size auto --global_batch_size 64",
    "--dataset_name d --train_batch_size auto",
    "--dataset_name d --train_batch_size auto --global_batch_size 8 --gradient_accumulation_steps 2",
    "--dataset_name d --train_batch_size some",
    "--dataset_name d --global_batch_size 64 --train_batch_size 8 --dry_run",
    "--dataset_name d --mixed_precision bf16 --gradient_checkpointing --compile --channels_last --no-tf32",
    "--dataset_name d --mixed_precision fp8",
    "--dataset_name d --no-channels_last --max_grad_norm 0 --adaptive_clipping --max_bad_steps 3 --cpu_threads 2",
    "--dataset_name d --collective_timeout 0",
    "--dataset_name d --collective_timeout 30.5",
    "--dataset_name d --max_grad_norm -1",
    "--dataset_name d --learning_rate 0",
    "--dataset_name d --learning_rate nan",
    "--dataset_name d --dropout 1",
    "--dataset_name d --dropout 0.25",
    "--dataset_name d --lr_warmup_steps -1",
    "--dataset_name d --optimizer sgd --momentum 0.5 --adam_beta1 0.8 --adam_beta2 0.9 --adam_epsilon 1e-6 --l1_weight 1e-4",
    "--dataset_name d --optimizer adamw8bit --adam_weight_decay 0.1 --lr_decay_steps 100 --lr_warmup_steps 10",
    "--dataset_name d --no-use_ema --ema_max_decay 0.99 --ema_inv_gamma 2 --ema_power 0.5",
    "--dataset_name d --use_ema --ema_type power --ema_widths 0.05 0.2 --ema_snapshot_steps 9 --ema_snapshot_dtype fp32",
    "--dataset_name d --ema_type exponential",
    "--dataset_name d --ema_max_decay 1",
    "--dataset_name d --ema_power 0",
    "--dataset_name d --logger wandb --logging_dir other --logging_steps 5 --stop_on critical --validation_steps 7",
    "--dataset_name d --logging_dir ../outside",
    "--dataset_name d --early_stopping_patience 2",
    "--dataset_name d --early_stopping_patience 2 --validation_images 8",
    "--dataset_name d --best_metric fd",
    "--dataset_name d --best_metric fd --eval_steps 10 --eval_images 20 --evaluation_batch_size 5 --eval_batch_size 4",
    "--dataset_name d --save_images_epochs 2 --save_images_steps 3 --save_model_epochs 4 --save_model_steps 5",
    "--dataset_name d --output_dir o --overwrite_output_dir --checkpointing_steps 3 --checkpoints_total_limit 2",
    "--dataset_name d --resume_from_checkpoint latest --allow_option_change learning_rate dropout",
    "--dataset_name d --push_to_hub --hub_token secret --hub_model_id me/it --hub_private_repo",
    "--dataset_name d --checkpoint_steps 3",
    "--dataset_name d --checkpoints_total 3",
    "--dataset_name d extra",
    "--dataset_name",
]
LINES = {
    "train_ddpm": [
        *TRAINING,
        "--model_preset cifar10 --dataset_name uoft-cs/cifar10",
        "--model_preset celeba64 --train_data_dir faces --no-use_ema",
        "--model_preset 256 --dataset_name d --train_batch_size auto",
        "--model_preset cifar10 --dataset_name d --rescale_betas_zero_snr --snr_gamma 5",
        "--model_preset digits16 --rescale_betas_zero_snr --prediction_type v_prediction",
        "--dataset_name d --ddpm_num_steps 100 --ddpm_beta_schedule squaredcos_cap_v2",
        "--dataset_name d --ddpm_num_inference_steps 10 --sampler ddpm",
        "--dataset_name d --activation mish --initialisation he --zero_init_output --spectral_norm",
        "--dataset_name d --spectral_norm --gradient_checkpointing",
        "--dataset_name d --enable_xformers_memory_efficient_attention",
        "--dataset_name d --sampler heun",
        "--dataset_name d --P_mean 0",
    ],
    "train_edm2": [
        *TRAINING,
        "--model_preset XXS --dataset_name d",
        "--model_preset XS --dataset_name d --resolution 32",
        "--model_preset S --dataset_name d --resolution 64 --learning_rate 0.02",
        "--model_preset M --dataset_name d",
        "--model_preset L --dataset_name d --dropout 0.2",
        "--model_preset XL --dataset_name d",
        "--model_preset XXL --dataset_name d",
        "--dataset_name d --P_mean -0.8 --P_std 1.6 --sigma_data 0.4 --label_dropout 0.2 --no-class_conditional",
        "--dataset_name d --P_std 0",
        "--dataset_name d --label_dropout 1",
        "--dataset_name d --no-force_weight_norm --num_inference_steps 8 --sampler dpmsolver++",
        "--dataset_name d --snr_gamma 5",
        "--dataset_name d --spectral_norm",
    ],
    "generate": [
        "",
        "--pipeline run --output_dir images --num_images 16",
        "--pipeline run --output_dir images --num_images 16 --seed 3 --batch_size 8 --sampler ddpm --num_inference_steps 20",
        "--pipeline run --output_dir images --num_images 16 --class_labels 1 2 --guidance 1.5 --guide_pipeline other",
        "--pipeline run --output_dir images --num_images 16 --mixed_precision bf16 --compile",
        "--pipeline run --output_dir images --num_images 0",
        "--pipeline run --output_dir images --num_images 4 --sampler euler",
        "--pipeline run --output_dir images --num_image 4",
    ],
    "evaluate": [
        "",
        "--pipeline run --dataset_name digits",
        "--images a b --dataset_name digits --resolution 16 --image_channels 1 --features classifier --num_images 100",
        "--pipeline run other --seeds 0 1 2 --sampler ddpm --num_inference_steps 4 --class_labels 3 --guidance 2",
        "--images a --reference stats.safetensors --features inception --feature_weights w --feature_weights_sha256 ab",
        "--compare one.json two.json",
        "--images a --dataset_name digits --num_images 0",
        "--images a --features nonsense",
        "--nonsense",
    ],
    "diagnose": [
        "",
        "run",
        "run --json",
        "run --no_report",
        "--pipeline out --probe_images 8 --seed 2 --dataset_name digits",
        "--pipeline out --dataset_name digits --resolution 16 --image_channels 1",
        "run --nonsense",
        "run --probe_images 0",
    ],
    "reconstruct_ema": [
        "",
        "run --width 0.1",
        "run --width 0.1 --output_dir out --step 100",
        "run --widths 0.02:0.25:0.01 --metric fd_randconv --output_dir out --num_images 10 --batch_size 5",
        "run --width 0.1 --widths 0.1:0.2:0.1 --output_dir out",
        "run --widths 0.1 --output_dir out",
        "run --width big --output_dir out",
        "run --width 0.1 --output_dir out --metric nothing",
    ],
}


def outcome(script: str, line: str) -> dict:
    """{"options": the values} or {"refused": the last line that a user reads}."""
    from utils.core.errors import UserError

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), patch.object(sys, "argv", [f"{script}.py"]):
            options = vars(importlib.import_module(script).parse_args(line.split()))
    except UserError as error:
        return {"refused": str(error)}
    except SystemExit:
        return {"refused": errors.getvalue().strip().splitlines()[-1]}
    return {"options": {name: str(value) if isinstance(value, Path) else value for name, value in sorted(options.items())}}


def flags_of(script: str) -> dict[str, dict]:
    """Of the last parser that the script makes: flag -> what argparse knows of it."""
    seen, parse = [], argparse.ArgumentParser.parse_known_args

    def remember(parser, *arguments, **keywords):
        seen.append(parser)
        return parse(parser, *arguments, **keywords)

    line = next(line for line in LINES[script] if "options" in outcome(script, line))
    with patch.object(argparse.ArgumentParser, "parse_known_args", remember):
        outcome(script, line)
    found = {}
    for action in seen[0]._actions:
        name = max(action.option_strings, key=len, default=action.dest)
        if name != "--help":
            found["--" + name[5:] if name.startswith("--no-") else name] = {
                "choices": list(action.choices) if action.choices else None,
                "nargs": action.nargs,
                "help": action.help,
                "negated": any(text.startswith("--no-") for text in action.option_strings),
            }
    return found


def observe(script: str) -> dict:
    """All that is recorded of a script. Of the options of a line only those that differ from the first line's that has any."""
    outcomes = {line: outcome(script, line) for line in LINES[script]}
    usual = next(found["options"] for found in outcomes.values() if "options" in found)
    for found in outcomes.values():
        if "options" in found:
            assert found["options"].keys() == usual.keys()
            found["options"] = {name: value for name, value in found["options"].items() if value != usual[name]}
    observed = {"flags": flags_of(script), "usual": usual, "lines": outcomes}
    return json.loads(json.dumps(observed, default=str))  # tuples as lists, paths as text


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    RECORDED.write_text(json.dumps({script: observe(script) for script in LINES}, indent=1) + "\n")

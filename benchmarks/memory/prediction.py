"""Predicted against real memory of the training scripts.

    python benchmarks/memory/prediction.py                     # small batches on this CPU; on a GPU larger ones, up to 80 GiB

Each configuration is a command line. The real script runs with it for a few updates of noise images, in this process, and
what it predicts (that of its own `--dry_run`) is compared with what it takes:

    activations    the storages that autograd keeps from the first forward pass for its backward pass, by saved-tensor hooks
    peak           on a GPU torch.cuda.max_memory_allocated of the second to the fourth update, two of which make a report; in
                   the first one cuDNN tries algorithms with all memory that is free, and goes on without where there is none.
                   On a CPU what torch's allocator handed out at most during the second update, which makes a report, by the
                   profiler, and beside it weights, optimizer and EMA as predicted. The libraries' workspace, which the profiler
                   does not see, is left out of the prediction there.

Samples, validation and export are not part of either.
"""

import argparse
import contextlib
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from accelerate import Accelerator

from benchmarks.shared.measuring import PeakMemory, default_device, describe, free
from benchmarks.shared.real_script import load_script, planned, run_script, synthetic_dataset
from utils.training.between_updates import Periodic
from utils.training.memory_estimate import GIB, SavedTensors

UPDATES, REPORT_EVERY = 4, 2
COMMON = f"""--dataset_name {{data}}/{{resolution}} --cache_dir {{data}}/cache --output_dir {{data}}/run --overwrite_output_dir
    --max_train_steps {UPDATES} --logging_steps {REPORT_EVERY} --validation_images 0 --eval_batch_size 1"""
STEPS = {"train_ddpm.py": "--ddpm_num_inference_steps 2", "train_edm2.py": "--num_inference_steps 2"}
ON_A_CPU = (
    "train_ddpm.py --model_preset digits16 --train_batch_size 32",
    "train_ddpm.py --model_preset digits16 --train_batch_size 32 --mixed_precision bf16",
    "train_ddpm.py --model_preset digits16 --train_batch_size 128 --gradient_checkpointing",
    "train_ddpm.py --model_preset digits16 --train_batch_size 64 --channels_last --dropout 0.1",
    "train_ddpm.py --model_preset cifar10 --train_batch_size 4",
    "train_ddpm.py --model_preset cifar10 --train_batch_size 4 --mixed_precision bf16",
    "train_ddpm.py --model_preset cifar10 --train_batch_size 8 --mixed_precision bf16 --gradient_checkpointing",
    "train_ddpm.py --model_preset cifar10 --train_batch_size 4 --optimizer sgd --no-use_ema --gradient_accumulation_steps 2",
    "train_edm2.py --model_preset digits16 --train_batch_size 32",
    "train_edm2.py --model_preset XXS --resolution 32 --train_batch_size 4 --gradient_accumulation_steps 1",
)
ON_A_GPU = (
    "train_ddpm.py --model_preset cifar10 --train_batch_size 128",
    "train_ddpm.py --model_preset cifar10 --train_batch_size 128 --no-cudnn_benchmark",
    "train_ddpm.py --model_preset cifar10 --train_batch_size 128 --mixed_precision bf16",
    "train_ddpm.py --model_preset cifar10 --train_batch_size 512 --mixed_precision bf16",
    "train_edm2.py --model_preset XS --resolution 64 --train_batch_size 64 --gradient_accumulation_steps 1 "
    "--mixed_precision bf16",
    "train_ddpm.py --model_preset cifar10 --train_batch_size 512 --mixed_precision bf16 --channels_last",
    "train_ddpm.py --model_preset cifar10 --train_batch_size 512 --mixed_precision bf16 --gradient_checkpointing",
    "train_ddpm.py --model_preset celeba64 --train_batch_size 64 --mixed_precision bf16",
    "train_ddpm.py --model_preset 256 --train_batch_size 16 --mixed_precision bf16",
    "train_ddpm.py --model_preset 256 --train_batch_size 8",
    "train_edm2.py --model_preset XS --resolution 64 --train_batch_size 128 --gradient_accumulation_steps 1 "
    "--mixed_precision fp16 --gradient_checkpointing",
    "train_ddpm.py --model_preset cifar10 --train_batch_size 256 --mixed_precision fp16 --optimizer sgd --no-use_ema "
    "--gradient_accumulation_steps 2",
    "train_ddpm.py --model_preset celeba64 --train_batch_size 128 --mixed_precision bf16 --gradient_checkpointing "
    "--gradient_accumulation_steps 2",
    "train_ddpm.py --model_preset 256 --train_batch_size 32 --mixed_precision bf16 --gradient_checkpointing",
    "train_ddpm.py --model_preset digits16 --train_batch_size 512",
)


class Watch:
    """Measures a script while it trains: `activations` of its first forward pass and `peak`, in bytes (see above)."""

    def __init__(self, device: torch.device):
        self._device, self._updates = device, 0
        self._saved: SavedTensors | None = None
        self.activations = self.peak = 0

    @contextlib.contextmanager
    def installed(self):
        """Inside, scripts are watched at places that both have: accumulate, backward, and the end of each update and its
        report."""
        accumulate, backward, after_update = Accelerator.accumulate, Accelerator.backward, Periodic.after_update

        @contextlib.contextmanager
        def watched_accumulate(accelerator, model):
            with accumulate(accelerator, model):
                if not self.activations:
                    self._saved = SavedTensors(model.parameters()).__enter__()
                yield

        def watched_backward(accelerator, loss, **options) -> None:
            if self._saved is not None:  # what it holds must go as the backward pass goes
                self._saved.__exit__()
                self.activations = self._saved.bytes
                self._saved.forget()
                self._saved = None
            backward(accelerator, loss, **options)

        def watched_end(periodic, learning_rate) -> None:
            after_update(periodic, learning_rate)
            self._after_update()
            if self._device.type == "cpu" and self._updates == REPORT_EVERY - 1:
                self._memory.__enter__()

        if self._device.type == "cuda":
            self._memory = PeakMemory(self._device).__enter__()
        else:
            self._memory = PeakMemory(self._device)
        with (
            mock.patch.object(Accelerator, "accumulate", watched_accumulate),
            mock.patch.object(Accelerator, "backward", watched_backward),
            mock.patch.object(Periodic, "after_update", watched_end),
        ):
            yield self

    def _after_update(self) -> None:
        self._updates += 1
        if self._device.type == "cuda" and self._updates == 1:
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._updates == (UPDATES if self._device.type == "cuda" else REPORT_EVERY):
            self._memory.__exit__(None, None, None)
            self.peak = self._memory.bytes


def compare(configuration: str, data: Path, device: torch.device) -> tuple[float, float]:
    """Prints a row. Returns (activations, peak), each predicted / real - 1. Writes data sets and runs to the folder `data`."""
    name, *flags = shlex.split(configuration)
    script = load_script(name)
    resolution = script.parse_args([*flags, "--dataset_name", "any"]).resolution
    if not (data / str(resolution)).exists():
        synthetic_dataset(data / str(resolution), resolution, 640 if resolution <= 64 else 64)
    args = script.parse_args([*flags, *COMMON.format(data=data, resolution=resolution).split(), *STEPS[name].split()])
    with (
        planned() as plans,
        Watch(device).installed() as watch,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        run_script(script, args)
    predicted = plans[0].estimate(args.train_batch_size, args.gradient_accumulation_steps)
    peak, expected = watch.peak, predicted.peak
    if device.type == "cpu":
        peak += predicted.parameters + predicted.buffers + predicted.optimizer + predicted.ema
        expected -= predicted.workspace
    errors = predicted.activations / watch.activations - 1, expected / peak - 1
    for width, sizes, error in ((8, (predicted.activations, watch.activations), errors[0]), (9, (expected, peak), errors[1])):
        print(f"{sizes[0] / GIB:{width}.3f} {sizes[1] / GIB:8.3f} {100 * error:+6.2f} %", end=" ")
    print(f" {configuration}", flush=True)
    return errors


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", help="which of the configurations, from 1 (all)")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_args()
    device = default_device()
    configurations = ON_A_GPU if device.type == "cuda" else ON_A_CPU
    print(f"{describe(device)}; GiB, predicted and real")
    print(f"{'activations':>17} {'error':>8} {'peak':>18} {'error':>8}  configuration")
    errors = []
    with tempfile.TemporaryDirectory() as data:
        for row in options.rows or range(1, len(configurations) + 1):
            errors.append(compare(configurations[row - 1], Path(data), device))
            free()
    activations, peaks = ([abs(pair[i]) for pair in errors] for i in (0, 1))
    print(f"=> memory prediction, {len(errors)} configurations: largest error of the peak {100 * max(peaks):.1f} %", end=" ")
    print(f"(median {100 * statistics.median(peaks):.1f} %), of activations {100 * max(activations):.1f} %")


if __name__ == "__main__":
    main()

"""Predicted against real memory of a training step.

    python benchmarks/memory_prediction.py                     # small batches on this CPU; on a GPU larger ones, up to 80 GiB

For each configuration `utils.memory` predicts activations and peak; then the same update runs with real tensors. Activations
are the storages that autograd keeps, by saved-tensor hooks. The peak is torch.cuda.max_memory_allocated; on a CPU what torch's
allocator handed out at most, by the profiler, without the libraries' workspace, which it does not see.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.bare_loop import SIZES, allocated, default_device, describe, free
from utils.memory import GIB, TrialStep, estimate_memory
from utils.optimization import make_optimizer
from utils.unet import make_unet


@dataclass(frozen=True)
class Configuration:
    preset: str
    batch: int
    precision: str = "no"
    checkpointing: bool = False
    channels_last: bool = False
    optimizer: str = "adamw"
    ema: bool = True
    micro_steps: int = 1
    dropout: float | None = None

    def __str__(self) -> str:
        extras = {
            "checkpointing": self.checkpointing,
            "channels last": self.channels_last,
            self.optimizer: self.optimizer != "adamw",
            "no EMA": not self.ema,
            f"{self.micro_steps} micro steps": self.micro_steps > 1,
            f"dropout {self.dropout}": self.dropout,
        }
        return ", ".join([self.preset, str(self.batch), self.precision, *(name for name, there in extras.items() if there)])


ON_A_CPU = (
    Configuration("digits16", 32),
    Configuration("digits16", 32, "bf16"),
    Configuration("digits16", 128, checkpointing=True),
    Configuration("digits16", 64, channels_last=True, dropout=0.1),
    Configuration("cifar10", 4, dropout=0.1),
    Configuration("cifar10", 4, "bf16"),
    Configuration("cifar10", 8, "bf16", checkpointing=True, dropout=0.1),
    Configuration("cifar10", 4, optimizer="sgd", ema=False, micro_steps=2),
    Configuration("celeba64", 1),
)
ON_A_GPU = (
    Configuration("digits16", 512),
    Configuration("cifar10", 128, dropout=0.1),
    Configuration("cifar10", 128, "bf16", dropout=0.1),
    Configuration("cifar10", 512, "bf16", dropout=0.1),
    Configuration("cifar10", 512, "bf16", channels_last=True, dropout=0.1),
    Configuration("cifar10", 512, "bf16", checkpointing=True),
    Configuration("cifar10", 256, "fp16", optimizer="sgd", ema=False, micro_steps=2),
    Configuration("celeba64", 64, "bf16"),
    Configuration("celeba64", 128, "bf16", checkpointing=True, micro_steps=2),
    Configuration("256", 8),
    Configuration("256", 16, "bf16"),
    Configuration("256", 32, "bf16", checkpointing=True),
)


def measure(step: TrialStep, device: torch.device, run: partial) -> tuple[int, int]:
    """(bytes of activations, most bytes beyond those there before) of a real update, not the first."""
    run()
    before = allocated(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        activations = run()
        torch.cuda.synchronize(device)
        return activations, torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        activations = run()
    now = most = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return activations, most


def compare(configuration: Configuration, device: torch.device) -> tuple[float, float]:
    """Prints a row. Returns (activations, peak), each predicted / real - 1."""
    resolution, channels = SIZES[configuration.preset]
    network = partial(
        make_unet,
        resolution=resolution,
        image_channels=channels,
        preset=configuration.preset,
        dropout=configuration.dropout,
        gradient_checkpointing=configuration.checkpointing,
        channels_last=configuration.channels_last,
    )
    optimizer = partial(make_optimizer, name=configuration.optimizer, learning_rate=1e-4)
    shape = (channels, resolution, resolution)
    predicted = estimate_memory(
        network,
        optimizer,
        image_shape=shape,
        micro_batch_size=configuration.batch,
        device=device,
        mixed_precision=configuration.precision,
        use_ema=configuration.ema,
        accumulates=configuration.micro_steps > 1,
    )
    with device:
        step = TrialStep(network, optimizer, configuration.ema, distributed=False)
        run = partial(step.run, shape, configuration.batch, configuration.precision, configuration.micro_steps)
        activations, peak = measure(step, device, run)
    peak += predicted.parameters + predicted.buffers + predicted.optimizer + predicted.ema
    expected = predicted.peak if device.type == "cuda" else predicted.peak - predicted.workspace
    errors = predicted.activations / activations - 1, expected / peak - 1
    columns = [predicted.activations / GIB, activations / GIB, 100 * errors[0], expected / GIB, peak / GIB, 100 * errors[1]]
    print(f"{configuration!s:52} {columns[0]:8.3f} {columns[1]:8.3f} {columns[2]:+6.2f} %", end="")
    print(f" {columns[3]:9.3f} {columns[4]:8.3f} {columns[5]:+6.2f} %", flush=True)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    device = default_device()
    print(f"{describe(device)}; GiB, predicted and real")
    print(f"{'configuration':52} {'activations':>17} {'error':>8} {'peak':>18} {'error':>8}")
    errors = []
    for configuration in ON_A_GPU if device.type == "cuda" else ON_A_CPU:
        errors.append(compare(configuration, device))
        free()
    activations, peaks = ([abs(pair[i]) for pair in errors] for i in (0, 1))
    print(f"=> memory prediction, {len(errors)} configurations: largest error of the peak {100 * max(peaks):.1f} %", end=" ")
    print(f"(median {100 * statistics.median(peaks):.1f} %), of activations {100 * max(activations):.1f} %")


if __name__ == "__main__":
    main()

"""Gradient checkpointing of both networks: memory saved and time paid.

    python benchmarks/memory/gradient_checkpointing.py            # small batches on this CPU; on a GPU larger ones

Bare training loops with and without it, which take turns block by block: the medians of an update's time, and the median and
quartiles of the ratios of neighboring blocks. Activations are what autograd keeps from the forward to the backward pass, by
saved-tensor hooks. "update" is the most that an update needs beside weights, optimizer and EMA: what is computed again is there
too, block by block, and gradients and the optimizer's own tensors, so that it falls less. On a GPU that is
torch.cuda.max_memory_allocated, on a CPU what torch's allocator handed out, by the profiler.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.shared.bare_loop import ALL, BareLoop, Switches
from benchmarks.shared.measuring import default_device, describe, free, interleaved, ratio
from benchmarks.shared.tasks import make_task
from utils.core.limits import usable_cores
from utils.training.memory_estimate import GIB

EAGER = Switches(tf32=True, sdpa=True, fused=True)  # a CPU's defaults
BF16 = replace(EAGER, mixed_precision="bf16")
Row = tuple[str, str, int | None, int, Switches]
ON_A_CPU: tuple[Row, ...] = (  # script, preset, resolution (None: the preset's own), batch, switches
    ("train_ddpm.py", "digits16", None, 32, EAGER),
    ("train_ddpm.py", "cifar10", None, 4, EAGER),
    ("train_edm2.py", "digits16", None, 32, EAGER),
    ("train_edm2.py", "XXS", 32, 4, EAGER),
    ("train_edm2.py", "XS", 32, 2, EAGER),
)
ON_A_GPU: tuple[Row, ...] = (
    ("train_ddpm.py", "cifar10", None, 256, BF16),
    ("train_ddpm.py", "cifar10", None, 256, ALL),
    ("train_edm2.py", "XS", 64, 64, BF16),
    ("train_edm2.py", "XS", 64, 64, ALL),
    ("train_ddpm.py", "celeba64", None, 64, BF16),
    ("train_ddpm.py", "256", None, 16, BF16),
    ("train_edm2.py", "S", 64, 32, BF16),
)


def compare(configuration: Row, blocks: int, updates: int) -> None:
    """Prints a row."""
    script, preset, resolution, batch, switches = configuration
    device, task = default_device(), make_task(script, preset, resolution=resolution)
    kinds = {"off": switches, "on": replace(switches, checkpointing=True)}
    loops = {side: BareLoop(task, kind, batch, device) for side, kind in kinds.items()}
    seconds = interleaved(loops, blocks, updates, time.perf_counter)
    off, on = (1e3 * statistics.median(seconds[side]) for side in kinds)
    times, low, high = ratio(seconds["on"], seconds["off"])
    activations = [loop.activation_bytes() for loop in loops.values()]
    peaks = [loop.update_bytes() for loop in loops.values()]
    saved = [100 * (1 - after / before) for before, after in (activations, peaks)]
    name = f"{Path(script).stem.removeprefix('train_')} {preset}, {task.resolution}x{task.resolution}, {batch}"
    name += f", {switches.mixed_precision}{', compiled' if switches.compile else ''}"
    print(f"{name:42} {off:9.1f} {on:9.1f} {times:7.3f} ({low:.3f}, {high:.3f})", end=" ")
    print(f"{activations[0] / GIB:7.3f} {activations[1] / GIB:7.3f} {saved[0]:5.1f} %", end=" ")
    print(f"{peaks[0] / GIB:7.3f} {peaks[1] / GIB:7.3f} {saved[1]:5.1f} %", flush=True)
    print(f"=> checkpointing, {name}: {times:.2f} x the time, update's memory -{saved[1]:.0f} %", flush=True)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--block_updates", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", help="which of the configurations, from 1 (all)")
    parser.add_argument("--cpu_threads", type=int, default=usable_cores())
    return parser.parse_args(argv)


def main() -> None:
    options = parse_args()
    torch.set_num_threads(options.cpu_threads)
    device = default_device()
    configurations = ON_A_GPU if device.type == "cuda" else ON_A_CPU
    print(f"{describe(device)}; milliseconds per update; GiB")
    header = f"{'network, size, batch, precision':42} {'off ms':>9} {'on ms':>9}  {'on/off (quartiles)':22}"
    print(f"{header} {'activations off, on, saved':>24} {'update off, on, saved':>24}")
    for row in options.rows or range(1, len(configurations) + 1):
        compare(configurations[row - 1], options.blocks, options.block_updates)
        free()


if __name__ == "__main__":
    main()

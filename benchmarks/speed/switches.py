"""What each switch brings: a bare training loop with it off and on, side by side.

    python benchmarks/speed/switches.py                                                    # digits16, on this CPU
    python benchmarks/speed/switches.py --model_preset cifar10 --batch_size 256            # on a GPU
    python benchmarks/speed/switches.py --script train_edm2.py --only force_weight_norm    # cost of EDM2's weight normalization
    python benchmarks/speed/switches.py --together compile channels_last                   # all combinations of these

Twice for each switch: alone, on top of eager fp32, and as the last one, on top of all others. Blocks of updates alternate, and
the figure is the median of the ratios of neighboring blocks: above 1 the switch pays. `--only` names the switches to measure.
`--together` measures all combinations of some, on top of all others, each beside the one that has none of them on.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.shared.bare_loop import ALL, BareLoop, Switches
from benchmarks.shared.measuring import default_device, describe, free, interleaved, ratio
from benchmarks.shared.tasks import DDPM, TASKS, make_task
from utils.core.limits import usable_cores

NONE = Switches()
OFF = Switches(force_weight_norm=False)
SWITCHES: dict[str, dict[str, Any]] = {
    "compile": {"compile": True},
    "channels_last": {"channels_last": True},
    "bf16": {"mixed_precision": "bf16"},
    "sdpa": {"sdpa": True},
    "fused": {"fused": True},
    "ema": {"ema": "script"},
    "item": {"item": True},
    "checkpointing": {"checkpointing": True},
    "tf32": {"tf32": True},
    "cudnn_benchmark": {"cudnn_benchmark": True},
    "force_weight_norm": {"force_weight_norm": True},
}


def without(switches: Switches, name: str) -> Switches:
    return replace(switches, **{field: getattr(OFF, field) for field in SWITCHES[name]})


def has(name: str, device: torch.device, script: str) -> bool:
    """Whether the switch means anything there."""
    if name in ("tf32", "cudnn_benchmark"):
        return device.type == "cuda"
    return {"force_weight_norm": "train_edm2.py", "sdpa": "train_ddpm.py"}.get(name, script) == script  # EDM2 has only SDPA


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=TASKS, default="train_ddpm.py")
    parser.add_argument("--model_preset", default="digits16")
    parser.add_argument("--resolution", type=int, help="(the preset's own; 32 for EDM2's paper sizes)")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--block_updates", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SWITCHES, default=list(SWITCHES))
    parser.add_argument("--base", nargs="+", choices=("alone", "last"), default=["alone", "last"])
    parser.add_argument("--together", nargs="+", choices=SWITCHES)
    parser.add_argument("--cpu_threads", type=int, default=usable_cores())
    parser.add_argument("--cpu_time", action="store_true", help="count the process's own time: for a busy CPU, with one thread")
    return parser.parse_args(argv)


def combinations(names: list[str]) -> dict[str, Switches]:
    """Of these switches, on top of all others; first the one with none of them on."""
    chosen = {}
    for count in range(len(names) + 1):
        for some in itertools.combinations(names, count):
            switches = ALL
            for name in names:
                switches = replace(switches, **SWITCHES[name]) if name in some else without(switches, name)
            chosen[" + ".join(some) or "none of them"] = switches
    return chosen


def compare_together(options: argparse.Namespace, task: DDPM, device: torch.device, clock: Callable[[], float]) -> None:
    """Prints a row for each combination."""
    kinds = combinations(options.together)
    loops = {name: BareLoop(task, kind, options.batch_size, device) for name, kind in kinds.items()}
    seconds = interleaved(loops, options.blocks, options.block_updates, clock)
    print(f"{'on':44}       ms  off/on     quartiles  first s      GiB")
    for name, loop in loops.items():
        gain, low, high = ratio(seconds["none of them"], seconds[name])
        row = f"{name:44} {1e3 * statistics.median(seconds[name]):8.2f} {gain:7.3f} {low:6.3f} {high:6.3f}"
        print(f"=> {row} {loop.compile_seconds:8.1f} {loop.peak_bytes(2) / 2**30:8.2f}", flush=True)


def main() -> None:
    options = parse_args()
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # "first s" is what compiling takes where nothing was compiled
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    device, clock = default_device(), time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.cpu_threads)
    task = make_task(options.script, options.model_preset, resolution=options.resolution)
    print(f"{describe(device)}; {options.script}, {options.model_preset}, {task.resolution}x{task.resolution}", end=", ")
    print(f"batch {options.batch_size}")
    if options.together:
        return compare_together(options, task, device, clock)
    print("switch            base     off ms    on ms  off/on     quartiles  first s  off GiB  on GiB")
    for name in (name for name in options.only if has(name, device, options.script)):
        for base in options.base:
            off = without(NONE if base == "alone" else ALL, name)
            pair = {"off": off, "on": replace(off, **SWITCHES[name])}
            loops = {side: BareLoop(task, s, options.batch_size, device) for side, s in pair.items()}
            seconds = interleaved(loops, options.blocks, options.block_updates, clock)
            gain, low, high = ratio(seconds["off"], seconds["on"])
            times = [1e3 * statistics.median(s) for s in seconds.values()]
            peaks = [loop.peak_bytes(2) / 2**30 for loop in loops.values()]
            row = f"{name:17} {base:6} {times[0]:8.2f} {times[1]:8.2f} {gain:7.3f} {low:6.3f} {high:6.3f}"
            print(f"{row} {loops['on'].compile_seconds:8.1f} {peaks[0]:8.2f} {peaks[1]:7.2f}", flush=True)
            if base == "last":
                print(f"=> {name}: {gain:.3f} x on top of the others, {peaks[0]:.2f} -> {peaks[1]:.2f} GiB")
            del loops
            free()


if __name__ == "__main__":
    main()

"""Speed and memory of the real script, beside bare training loops.

    python benchmarks/throughput.py                                                              # digits16, on this CPU
    python benchmarks/throughput.py --model_preset cifar10 --dataset_name synthetic --train_batch_size 256 \\
        --mixed_precision bf16 --compile                                                         # on a GPU

The real `train_ddpm.py` runs in this process, with its EMA, statistics, logging, data pipeline and checks. After every block
of its updates each of the other loops does a block too, so that a machine that slows down or speeds up does so for all; ratios
are medians over neighbouring blocks. The others work on noisy images and targets that are already on the device:

    bare    forward, backward, clip and step, with every switch that the script has on
    eager   fp32 without TF32, diffusers' EMAModel and `loss.item()` in every update, as train_unconditional.py has them
    eager in the script's precision

FLOPs are those of the network's convolutions and matrix products, forward and backward; their rate is compared with that of
one large matrix product, measured here. Validation, samples, checkpoints and export are timed apart, as seconds each, since
how often they run is the user's choice. Other flags go to train_ddpm.py.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import datasets
import numpy as np
import torch
from PIL import Image

import train_ddpm
import utils.checkpoints
import utils.export
import utils.previews
import utils.tracking
import utils.validation
from benchmarks.bare_loop import UNCONDITIONAL, BareLoop, Switches, allocated, default_device, preset_flops, ratio, synchronize
from utils.memory import AUTOCAST, estimate_memory
from utils.optimization import make_optimizer
from utils.options import optimizer_options, unet_options
from utils.unet import make_unet


def comparison_loops(args: argparse.Namespace, device: torch.device, wanted: list[str]) -> dict[str, BareLoop]:
    precision = args.mixed_precision or "no"
    bare = Switches(
        mixed_precision=precision,
        tf32=args.tf32,
        channels_last=unet_options(args, device.type)["channels_last"],
        sdpa=True,
        compile=args.compile,
        fused=True,
        checkpointing=args.gradient_checkpointing,
    )
    kinds = {"bare": bare, "eager": UNCONDITIONAL}
    if precision != "no":
        kinds[f"eager {precision}"] = UNCONDITIONAL.in_precision(precision)
    return {
        name: BareLoop(args.model_preset, switches, args.train_batch_size, device, args.dropout)
        for name, switches in kinds.items()
        if name.split()[0] in wanted
    }


def predicted_peak(args: argparse.Namespace, device: torch.device) -> int:
    """Bytes, by `utils.memory`."""
    return estimate_memory(
        partial(make_unet, **unet_options(args, device.type)),
        partial(make_optimizer, **optimizer_options(args)),
        image_shape=(args.image_channels, args.resolution, args.resolution),
        micro_batch_size=args.train_batch_size,
        device=device,
        mixed_precision=args.mixed_precision or "no",
        use_ema=args.use_ema,
        accumulates=args.gradient_accumulation_steps > 1,
    ).peak


def matmul_rate(device: torch.device, precision: str) -> float:
    """FLOP/s of a large matrix product: in bf16 on a GPU, in the script's precision on a CPU; the best of several."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if device.type == "cuda" else AUTOCAST.get(precision, torch.float32)
    first, second = torch.randn(2, size, size, device=device).to(dtype)
    seconds = []
    for _ in range(8):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(4):
            first @ second
        synchronize(device)
        seconds.append((time.perf_counter() - start) / 4)
    return 2 * size**3 / min(seconds)


def synthetic_dataset(folder: Path, resolution: int) -> Path:
    """2,000 images of noise, 500 large ones, for presets whose data cannot be had offline."""
    generator = np.random.default_rng(0)
    count = 2000 if resolution <= 64 else 500
    pixels = generator.integers(0, 256, (count, resolution, resolution, 3), dtype=np.uint8)
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": [Image.fromarray(p) for p in pixels]}, features=features).save_to_disk(folder)
    return folder


class SideBySide:
    """Follows the real script from update to update, and gives the other loops their turns between its blocks."""

    def __init__(self, args: argparse.Namespace, block_updates: int, wanted: list[str], clock: Callable[[], float]):
        self.clock = clock
        self.args, self.block_updates, self.wanted = args, block_updates, wanted
        self.device = default_device()
        self.loops: dict[str, BareLoop] = {}
        self.seconds: dict[str, list[float]] = {"train_ddpm": []}
        self.other: dict[str, list[float]] = {}  # seconds of each call of what is timed apart
        self.waited: list[float] = []  # seconds for each micro-batch
        self.peak, self.own_bytes = 0, 0
        self._updates, self._block_start, self._paused = 0, None, 0.0

    def time_apart(self, owner, name: str) -> None:
        """Keeps the calls of `owner.name`, of a module or class, out of the time of the updates around them."""
        function = getattr(owner, name)

        def wrapper(*arguments, **keywords):
            start = self.clock()
            result = function(*arguments, **keywords)
            self.other.setdefault(name, []).append(self.clock() - start)
            self._paused += self.other[name][-1]
            return result

        setattr(owner, name, wrapper)

    @contextmanager
    def waiting_for_data(self):
        start = self.clock()
        yield
        self.waited.append(self.clock() - start)

    def after_update(self) -> None:
        self._updates += 1
        if self._updates % self.block_updates:
            return
        synchronize(self.device)
        if not self.loops:
            self.own_bytes = allocated(self.device)
            self.loops = comparison_loops(self.args, self.device, self.wanted)
            self.seconds |= {name: [] for name in self.loops}
        elif self._block_start is not None:
            self.seconds["train_ddpm"].append((self.clock() - self._block_start - self._paused) / self.block_updates)
            if self.device.type == "cuda":
                others = allocated(self.device) - self.own_bytes
                self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device) - others)
            for name, loop in self.loops.items():
                self.seconds[name].append(loop.seconds(self.block_updates, self.clock) / self.block_updates)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._block_start, self._paused = self.clock(), 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--block_updates", type=int, default=10)
    parser.add_argument("--loops", nargs="+", choices=("bare", "eager"), default=["bare", "eager"])
    parser.add_argument("--cpu_time", action="store_true", help="count the process's own time: for a busy CPU, with one thread")
    options, flags = parser.parse_known_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        shown = " ".join(flags) or "no flags"
        flags += ["--output_dir", f"{folder}/run", "--max_train_steps", str((options.blocks + 2) * options.block_updates)]
        args = train_ddpm.parse_args(flags)
        if args.dataset_name == "synthetic":
            args.dataset_name = str(synthetic_dataset(Path(folder, "data"), args.resolution))
            args.validation_images = 128
        args.save_images_steps = args.checkpointing_steps = args.save_model_steps = args.max_train_steps // 2
        args.validation_steps = args.max_train_steps // 4
        race = SideBySide(args, options.block_updates, options.loops, clock)
        for owner, name in (
            (utils.validation, "validation_loss"),
            (utils.previews.Previews, "make"),
            (utils.checkpoints, "save_checkpoint"),
            (utils.export, "export_pipeline"),
        ):
            race.time_apart(owner, name)
        utils.tracking.Stopwatch.waiting_for_data = lambda stopwatch: race.waiting_for_data()
        update = utils.tracking.ProgressBar.update
        utils.tracking.ProgressBar.update = lambda bar: (update(bar), race.after_update())
        train_ddpm.main(args)

    device, real = race.device, race.seconds["train_ddpm"]
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    flops, rate = preset_flops(args.model_preset) * args.train_batch_size, matmul_rate(device, args.mixed_precision or "no")
    print(f"\n{name}; torch {torch.__version__}; Python {platform.python_version()}; {shown}")
    print(f"batch {args.train_batch_size}, {args.resolution}x{args.resolution}, {len(real)} blocks of {options.block_updates}")
    print(f"a large matrix product: {rate / 1e12:.3f} TFLOP/s; an update: {flops / 1e12:.4f} TFLOP")
    print("loop            ms/update   images/s   TFLOP/s  of rate  peak GiB   time over train_ddpm's (quartiles)")
    for loop, seconds in race.seconds.items():
        median = statistics.median(seconds)
        peak = race.peak if loop == "train_ddpm" else race.loops[loop].peak_bytes(2)
        times, low, high = ratio(seconds, real)
        row = f"{loop:14} {1e3 * median:10.2f} {args.train_batch_size / median:10.1f} {flops / median / 1e12:9.3f}"
        row += f" {100 * flops / median / rate:6.1f} % {peak / 2**30:9.2f}"
        print(f"{row}   {times:.3f} ({low:.3f}, {high:.3f})")
    predicted = predicted_peak(args, device)
    print(f"predicted peak of train_ddpm, eager: {predicted / 2**30:.2f} GiB")
    for loop in race.loops.values():
        if loop.switches.compile:
            print(f"compiling, within the first update: {loop.compile_seconds:.1f} s")
    print(f"waiting for a micro-batch: {1e3 * statistics.median(race.waited):.3f} ms")
    for name, seconds in race.other.items():
        print(f"{name:16} {statistics.median(seconds):8.2f} s each")
    rate_reached = 100 * flops / statistics.median(real) / rate
    gains = ", ".join(f"{ratio(race.seconds[loop], real)[0]:.2f} x {loop}" for loop in race.loops)
    print(
        f"=> {shown}: {args.train_batch_size / statistics.median(real):.0f} images/s, {gains}, {rate_reached:.1f} % of", end=" "
    )
    print(f"{rate / 1e12:.2f} TFLOP/s, {race.peak / 2**30:.2f} GiB (predicted {predicted / 2**30:.2f})")


if __name__ == "__main__":
    main()

"""Speed and memory of a real training script, beside bare training loops.

    python benchmarks/speed/throughput.py                                                              # digits16, on this CPU
    python benchmarks/speed/throughput.py --script train_edm2.py                                       # EDM2's digits16
    python benchmarks/speed/throughput.py --model_preset cifar10 --dataset_name synthetic --train_batch_size 256 \\
        --mixed_precision bf16 --compile                                                         # on a GPU

    python benchmarks/speed/throughput.py --cpu_threads 1 --loops                                # one process, and two:
    ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 \\
        torchrun --standalone --nproc_per_node=2 benchmarks/speed/throughput.py --cpu_threads 1

The real script runs in this process, with its EMA, statistics, logging, data pipeline and checks; an update is one micro batch
for each process. After every block of its updates each of the other loops does a block too, so that a machine that slows down
or speeds up does so for all; ratios are medians over neighboring blocks. The others work on noisy images and targets that are
already on the device; several processes run without them.

    bare        forward, backward, clip, step (and EDM2's forced weight normalization), with every switch that the script has on
    bare again  the same once more: how far it is from `bare` is the noise of these figures
    bare + EMA  with the script's own EMA, which every training needs
    eager       fp32 without TF32, diffusers' EMAModel and `loss.item()` in every update, as train_unconditional.py has them
    eager in the script's precision

A report (what --logging_steps makes: magnitudes by layer, figures) costs many times more than what stands between
two. So that blocks can be short, every second block ends with one; what it adds to the block before is the cost of a report
(the median is taken), and every block is charged the share of it that a real run would have at its --logging_steps.

The doctor is off, unless `--doctor on` is among the flags: of its looks, some 20 in 100,000 updates, a short run has most.

FLOPs are those of the network's convolutions and matrix products, forward and backward; their rate is compared with that of
one large matrix product, measured here. Validation, evaluation, samples, checkpoints and export are timed apart; the last table
says how much of an update each is at the preset's (or the given) intervals. Other flags go to the script.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import utils.core.entrypoint
import utils.diffusion.export
import utils.optim.ema
import utils.runs.ema_snapshots
import utils.training.between_updates
import utils.training.compile_check
import utils.training.evaluation
import utils.training.progress
import utils.training.samples
from benchmarks.shared.bare_loop import UNCONDITIONAL, BareLoop, Switches
from benchmarks.shared.measuring import allocated, default_device, describe, ratio, synchronize
from benchmarks.shared.real_script import load_script, one_micro_batch, planned, run_script, synthetic_dataset
from benchmarks.shared.tasks import DDPM, TASKS, make_task
from utils.training.memory_estimate import AUTOCAST

LOOPS = ("bare", "again", "ema", "eager")
# What the other loops do not know, so that they would not be the same computation.
UNKNOWN_TO_THEM = ("optimizer", "max_grad_norm", "l1_weight", "adaptive_clipping", "spectral_norm", "activation", "use_ema")
UNKNOWN_TO_THEM += ("ema_type", "ema_widths", "model_config_name_or_path", "class_conditional")


def comparison_loops(task: DDPM, args: argparse.Namespace, device: torch.device, wanted: list[str]) -> dict[str, BareLoop]:
    precision = args.mixed_precision or "no"
    switches = {
        "mixed_precision": precision,
        "tf32": args.tf32,
        "cudnn_benchmark": args.cudnn_benchmark,
        "channels_last": args.uses_channels_last(device.type),
        "sdpa": True,
        "compile": args.compile,
        "fused": True,
        "checkpointing": args.gradient_checkpointing,
        "force_weight_norm": getattr(args, "force_weight_norm", False),
    }
    kinds = {}
    if "bare" in wanted:
        kinds["bare"] = Switches(**switches)
    if "again" in wanted:
        kinds["bare again"] = Switches(**switches)
    if "ema" in wanted:
        kinds["bare + EMA"] = Switches(**switches, ema="script")
    if "eager" in wanted:
        kinds["eager"] = UNCONDITIONAL
        if precision != "no":
            kinds[f"eager {precision}"] = UNCONDITIONAL.in_precision(precision)
    return {name: BareLoop(task, kind, args.train_batch_size, device) for name, kind in kinds.items()}


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


class CallTimer:
    """Seconds of calls inside an update: on a GPU those of the device, by events that nobody waits for."""

    def __init__(self, device: torch.device, clock: Callable[[], float]):
        self._device, self._clock, self._calls = device, clock, []

    @contextmanager
    def call(self) -> Iterator[None]:
        if self._device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._calls.append((start, end))
        else:
            start = self._clock()
            yield
            self._calls.append(self._clock() - start)

    def seconds(self) -> list[float]:
        if self._device.type != "cuda":
            return self._calls
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) / 1e3 for start, end in self._calls]


class SideBySide:
    """Follows the real script from update to update, and gives the other loops their turns between its blocks.

    Of a pair of blocks the first has no report and the second ends with one: the script's --logging_steps must be two blocks.
    """

    def __init__(
        self,
        device: torch.device,
        block_updates: int,
        clock: Callable[[], float],
        make_loops: Callable[[], dict[str, BareLoop]],
    ):
        self.device, self.clock = device, clock
        self._block_updates, self._make_loops = block_updates, make_loops
        self.loops: dict[str, BareLoop] | None = None
        self.blocks: list[float] = []  # seconds per update of the script, in turns without and with a report
        self.seconds: dict[str, list[float]] = {}  # of the other loops
        self.apart: dict[str, list[float]] = {}  # seconds of each call of what is timed apart
        self.waited: list[float] = []  # seconds for each micro-batch
        self.ema = CallTimer(device, clock)  # of the script's averages
        self.first_update = 0.0  # seconds from its first batch on: with --compile mostly that
        self.peak, self._own_bytes = 0, 0
        self._others_turn = False
        self.updates, self._block_start, self._paused = 0, 0.0, 0.0

    def _timed_apart(self, label: str, function: Callable) -> Callable:
        """`function`, whose calls are kept out of the time of the updates around them."""

        def wrapper(*arguments, **keywords):
            synchronize(self.device)
            start = self.clock()
            result = function(*arguments, **keywords)
            synchronize(self.device)
            self.apart.setdefault(label, []).append(self.clock() - start)
            self._paused += self.apart[label][-1]
            return result

        return wrapper

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside, stands between the scripts and their utils."""
        apart = (
            ("compiling", utils.training.compile_check, "check_compiled"),
            ("checkpoint", utils.training.between_updates.Periodic, "_save"),
            ("validation", utils.training.evaluation.Validation, "mean_loss"),
            ("evaluation", utils.training.evaluation.SampleEvaluation, "make"),
            ("sample grids", utils.training.samples.SampleGrids, "make"),
            ("examining it", utils.training.samples.SampleGrids, "probe"),
            ("export", utils.diffusion.export, "export_pipeline"),
            ("EMA snapshots", utils.runs.ema_snapshots.Snapshots, "save"),
        )
        update_ema, after_update = utils.optim.ema.EMA.update, utils.training.between_updates.Periodic.after_update

        def timed_update(*arguments) -> None:
            with nullcontext() if self._others_turn else self.ema.call():
                update_ema(*arguments)

        def end_of_update(periodic, learning_rate: float) -> None:
            after_update(periodic, learning_rate)
            self.after_update()

        @contextmanager
        def waiting_for_data(stopwatch):
            start = self.clock()
            yield
            self.waited.append(self.clock() - start)
            self.first_update = self.first_update or -self.clock()

        with ExitStack() as replaced:
            for label, owner, name in apart:
                replaced.enter_context(mock.patch.object(owner, name, self._timed_apart(label, getattr(owner, name))))
            replaced.enter_context(mock.patch.object(utils.optim.ema.EMA, "update", timed_update))
            replaced.enter_context(mock.patch.object(utils.training.between_updates.Periodic, "after_update", end_of_update))
            replaced.enter_context(mock.patch.object(utils.training.progress.Stopwatch, "waiting_for_data", waiting_for_data))
            yield

    def after_update(self) -> None:
        self.updates += 1
        if self.updates == 1:
            synchronize(self.device)
            self.first_update += self.clock()
        if self.updates % self._block_updates:
            return
        synchronize(self.device)
        self._others_turn = True
        if self.loops is not None:
            self.blocks.append((self.clock() - self._block_start - self._paused) / self._block_updates)
            if self.device.type == "cuda":
                others = allocated(self.device) - self._own_bytes
                self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device) - others)
            turn = len(self.blocks) % max(len(self.loops), 1)  # none of them always comes right after the script
            for name in [*self.loops][turn:] + [*self.loops][:turn]:
                seconds = self.loops[name].seconds(self._block_updates, self.clock)
                self.seconds[name].append(seconds / self._block_updates)
        elif self.updates == 2 * self._block_updates:  # the first report is over: all that the script needs is there
            self._own_bytes = allocated(self.device)
            self.loops = self._make_loops()
            self.seconds = {name: [] for name in self.loops}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._others_turn = False
        self._block_start, self._paused = self.clock(), 0.0

    def report_seconds(self) -> float:
        """What a report adds, the median over pairs of blocks."""
        pairs = zip(self.blocks[::2], self.blocks[1::2])
        return statistics.median((with_one - without) * self._block_updates for without, with_one in pairs)

    def update_seconds(self, logging_steps: int) -> list[float]:
        """Seconds per update of the script in each block, if it reported every `logging_steps`."""
        report = self.report_seconds()
        share, own = report / logging_steps, report / self._block_updates
        return [seconds + share - (own if index % 2 else 0.0) for index, seconds in enumerate(self.blocks)]


@contextmanager
def shared_folder(num_processes: int, rank: int) -> Iterator[Path]:
    """A folder that is gone afterwards, the same one for all processes of a torchrun."""
    if num_processes == 1:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    folder = Path(tempfile.gettempdir(), f"throughput-{os.getppid()}")
    folder.mkdir(exist_ok=True)
    yield folder
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def make_data(args: argparse.Namespace, folder: Path, rank: int) -> None:
    """Images of noise in place of the data set "synthetic"; the first process writes them."""
    ready = folder / "data"
    if rank == 0:
        synthetic_dataset(folder / "unfinished", args.resolution).rename(ready)
    while not ready.exists():
        time.sleep(0.1)
    args.dataset_name, args.cache_dir, args.validation_images = str(ready), str(folder / "cache"), 128


def print_additions(race: SideBySide, update: float, report_seconds: float, intervals: dict[str, int | None]) -> None:
    """The table of what the script does beside forward, backward and step. `intervals`: updates from one to the next."""
    ema = race.ema.seconds()
    rows = {"report": (report_seconds, intervals["report"])}
    if ema:
        rows["EMA"] = (statistics.median(ema), 1)
    rows["waiting for data"] = (statistics.median(race.waited), 1)
    for name, seconds in race.apart.items():
        once_prepared = seconds[1:] if name == "evaluation" and len(seconds) > 1 else seconds
        rows[name] = (statistics.median(once_prepared), intervals[name])
    print("what the script adds      ms each   every   ms/update   of an update")
    for name, (seconds, every) in rows.items():
        row = f"{name:20} {1e3 * seconds:12.3f}"
        if every:
            row += f" {every:7} {1e3 * seconds / every:11.4f} {100 * seconds / every / update:10.2f} %"
        print(row)


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--script", choices=TASKS, default="train_ddpm.py")
    parser.add_argument("--blocks", type=int, default=30, help="measured, an even number (30)")
    parser.add_argument("--block_updates", type=int, default=10)
    parser.add_argument("--loops", nargs="*", choices=LOOPS, default=LOOPS, help="beside the script; without a name, none")
    parser.add_argument("--cpu_time", action="store_true", help="count the process's own time: for a busy CPU, with one thread")
    options, flags = parser.parse_known_args(argv)
    if options.blocks < 2 or options.blocks % 2 or options.block_updates < 1:
        parser.error("--blocks must be even and at least 2, --block_updates at least 1")
    return options, flags


def main(parsed: tuple[argparse.Namespace, list[str]]) -> int:
    options, flags = parsed
    num_processes, rank = (int(os.environ.get(name, usual)) for name, usual in (("WORLD_SIZE", "1"), ("RANK", "0")))
    script = load_script(options.script)
    updates = (options.blocks + 2) * options.block_updates
    with shared_folder(num_processes, rank) as folder, planned() as plans:
        shown = " ".join([options.script, *flags])
        flags = ["--doctor", "off", *flags]
        args = one_micro_batch(script.parse_args([*flags, "--output_dir", f"{folder}/run", "--max_train_steps", str(updates)]))
        args.mixed_precision = args.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
        if args.train_batch_size == "auto":
            raise SystemExit("--train_batch_size auto: name a number here")
        wanted = options.loops if num_processes == 1 else []
        usual = script.parse_args(["--model_preset", args.model_preset, "--dataset_name", "any"])
        unknown = [name for name in UNKNOWN_TO_THEM if getattr(args, name, None) != getattr(usual, name, None)]
        if wanted and unknown:
            raise SystemExit(f"the other loops do not know --{unknown[0]}: leave it out, or give --loops without a name")
        if args.compile:  # what compiling takes where nothing was compiled, unless a place is told
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{folder}/inductor")
        if args.dataset_name == "synthetic":
            make_data(args, folder, rank)
        intervals = {
            "report": args.logging_steps,
            "compiling": None,
            "checkpoint": args.checkpointing_steps,
            "validation": args.validation_steps,
            "evaluation": args.eval_steps,
            "sample grids": args.save_images_steps,
            "examining it": args.save_images_steps,
            "export": args.save_model_steps,
            "EMA snapshots": args.ema_snapshot_steps,
        }
        args.logging_steps = 2 * options.block_updates
        args.save_images_steps = args.checkpointing_steps = args.save_model_steps = args.ema_snapshot_steps = updates // 2
        args.validation_steps = updates // 4
        args.eval_steps = args.eval_steps and updates // 2
        size = {"resolution": args.resolution, "channels": args.image_channels}
        task = make_task(options.script, args.model_preset, **size, dropout=args.dropout)
        device = default_device()
        race = SideBySide(
            device,
            options.block_updates,
            time.process_time if options.cpu_time else time.perf_counter,
            lambda: comparison_loops(task, args, device, wanted),
        )
        with race.following():
            run_script(script, args)
    if rank == 0:
        report(race, task, args, intervals, num_processes, plans[0].estimate(args.train_batch_size, 1).peak, shown)
    return 0


def report(race, task, args, intervals, num_processes: int, predicted: int, shown: str) -> None:
    device, real, images = race.device, race.update_seconds(intervals["report"]), args.train_batch_size * num_processes
    flops, rate = task.flops() * args.train_batch_size, matmul_rate(device, args.mixed_precision or "no")
    print(f"\n{describe(device)}; {num_processes} processes; {shown}")
    print(f"batch {args.train_batch_size} each, {args.resolution}x{args.resolution}, {len(real)} blocks of", end=" ")
    print(f"{len(race.waited) // (len(real) + 2)} updates")
    print(f"a large matrix product: {rate / 1e12:.3f} TFLOP/s; an update: {flops / 1e12:.4f} TFLOP")
    print("loop            ms/update   images/s   TFLOP/s  of rate  peak GiB   time over the script's (quartiles)")
    for loop, seconds in {task.script: real, **race.seconds}.items():
        median = statistics.median(seconds)
        peak = race.loops[loop].peak_bytes(2) if loop in race.loops else race.peak
        times, low, high = ratio(seconds, real)
        row = f"{loop:14} {1e3 * median:10.2f} {images / median:10.1f} {flops / median / 1e12:9.3f}"
        row += f" {100 * flops / median / rate:6.1f} % {gib(peak):>9}"
        print(f"{row}   {times:.3f} ({low:.3f}, {high:.3f})")
    print(f"predicted peak of {task.script}, eager: {predicted / 2**30:.2f} GiB")
    first = race.first_update + sum(race.apart.get("compiling", []))
    print(f"the script's first update{', with compiling and its check' if args.compile else ''}: {first:.1f} s")
    update = statistics.median(real)
    print_additions(race, update, race.report_seconds(), intervals)
    gains = "".join(f", {ratio(seconds, real)[0]:.2f} x {loop}" for loop, seconds in race.seconds.items())
    print(f"=> {shown}: {images / update:.0f} images/s{gains}, {100 * flops / update / rate:.1f} % of", end=" ")
    print(f"{rate / 1e12:.2f} TFLOP/s, {gib(race.peak)} GiB (predicted {gib(predicted)})")


def gib(size: int) -> str:
    """Of bytes; a CPU does not count its peak."""
    return f"{size / 2**30:.2f}" if size else "-"


if __name__ == "__main__":
    utils.core.entrypoint.run_script(main, parse_args)

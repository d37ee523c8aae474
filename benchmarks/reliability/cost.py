"""What health costs: the checks of every update, the report every so many, and a verified checkpoint.

    python benchmarks/reliability/cost.py updates                                    # digits16, on this machine's device
    ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 benchmarks/reliability/cost.py updates
    python benchmarks/reliability/cost.py checkpoints --presets digits16 cifar10
    python benchmarks/reliability/cost.py repetitions --every 100                    # --rerun_steps, in pairs of runs

`updates` runs the real `train_ddpm.py` and times, inside it, what asks whether the update may be made and whether to stop
("together"), the EMA, and the sums for the next report: on a CPU that is all of their cost; on a GPU it is the host's part,
while the work itself is a few small kernels. Other flags
go to the script. A report is everything that happens every --logging_steps: magnitudes by layer, figures to the trackers, the
doctor's look at all that was recorded, without the line of the ledger, which is told by itself. With several processes, "rank
times" is what measures each of them in each update. An audit is what the doctor adds to an update that it records.
On a machine with other work, `--own_time` with `--cpu_threads 1` counts the main thread's time on its processor, whose
ratios are steadier than those of the clock.

`repetitions` makes pairs of runs, one with --rerun_steps and one without, each first in turn, and tells the ratio of their
times from the fifth update on, and the memory that the process has before and after an update is made again.

`checkpoints` publishes checkpoints of a preset's network, EMA and AdamW state and, in
turns, writes the same tensors with safetensors, with and without waiting for the disk.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import save_file

import train_ddpm
import utils.core.signals
import utils.optim.ema
import utils.optim.nonfinite
import utils.training.progress
from benchmarks.shared.measuring import default_device, describe
from steady_doctor.declared_run import audited_updates
from utils.diffusion.unet import make_unet
from utils.optim.ema import EMA
from utils.optim.optimizers import make_optimizer
from utils.options.flags import DDPMOptions
from utils.options.presets import FLAGS
from utils.runs.checkpoint_files import verify_checkpoint
from utils.runs.checkpoints import attach_state_hooks, save_checkpoint
from utils.runs.state import TrainState
from utils.training.ledger import Ledger
from utils.training.ranks import RankTimes
from utils.training.rerun import Rerun

CHECKS = ("BadUpdates.add_losses", "BadUpdates.add", "StopSignal.agreed")
LEDGER = ("begin", "add_batch", "add", "measure", "write")
RANK_TIMES = ("now", "before_backward")
REPORT_EVERY = 17  # updates, of which few are audited; the cost is told for the default of 50


def time_updates(updates: int, flags: list[str], clock: Callable[[], float]) -> None:
    seconds: dict[str, list[float]] = {}
    ends: list[float] = []

    def timed(cls, name):
        function = getattr(cls, name)

        def wrapper(*arguments):
            start = clock()
            result = function(*arguments)
            seconds.setdefault(f"{cls.__name__}.{name}", []).append(clock() - start)
            return result

        setattr(cls, name, wrapper)

    timed(utils.optim.nonfinite.BadUpdates, "add_losses")
    timed(utils.optim.nonfinite.BadUpdates, "add")
    timed(utils.core.signals.StopSignal, "agreed")
    timed(utils.optim.ema.EMA, "update")
    timed(utils.training.progress.StepStatistics, "add_losses")
    timed(utils.training.progress.StepStatistics, "add_update")
    for name in LEDGER:
        timed(Ledger, name)
    for name in RANK_TIMES:
        timed(RankTimes, name)
    update = utils.training.progress.ProgressBar.update
    utils.training.progress.ProgressBar.update = lambda bar: (ends.append(clock()), update(bar))
    train(updates, ["--logging_steps", str(REPORT_EVERY), *flags])
    if os.environ.get("RANK", "0") != "0":
        return
    update_ms = 1e3 * statistics.median(b - a for a, b in pairwise(ends[5:]))
    print(f"\n{describe(default_device())}")
    print(f"{'update':24} {update_ms:8.3f} ms (median of {len(ends) - 6})")
    total = 0.0
    of_parts = {"a line of the ledger": (Ledger, LEDGER), "rank times": (RankTimes, RANK_TIMES)}
    parts = {name: [seconds.pop(f"{cls.__name__}.{each}", []) for each in names] for name, (cls, names) in of_parts.items()}
    for name, values in seconds.items():
        cost = 1e3 * statistics.median(values[5:])
        total += cost if name in CHECKS else 0.0
        print(f"{name:24} {cost:8.3f} ms  {100 * cost / update_ms:.2f} %")
    print(f"{'together':24} {total:8.3f} ms  {100 * total / update_ms:.2f} %")
    # The median of what is done at each line, and once in each update.
    line = sum(
        1e3 * statistics.median(sorted(values)[-(len(ends) // REPORT_EVERY) :]) for values in parts["a line of the ledger"]
    )
    print(f"{'a line of the ledger':24} {line:8.3f} ms  {100 * line / (50 * update_ms):.3f} % of 50 updates")
    calls = [values for values in parts["rank times"] if values]
    each = sum(1e3 * statistics.median(values) * len(values) / len(ends) for values in calls)
    mean = sum(1e3 * sum(values) / len(ends) for values in calls)  # with the times in which something else had the processor
    print(f"{'rank times':24} {each:8.3f} ms  {100 * each / update_ms:.3f} %, on average {mean:.3f} ms")
    # An update that is measured for a report takes longer, and so does the one after it, in whose time the report is made.
    spans = [1e3 * (b - a) for a, b in pairwise(ends)]  # of updates 2, 3, ...
    plain = statistics.median(span for update, span in enumerate(spans, start=2) if update % REPORT_EVERY > 1)
    measured = range(2 * REPORT_EVERY - 2, len(spans) - 1, REPORT_EVERY)
    extra = statistics.median(spans[i] + spans[i + 1] - 2 * plain for i in measured)
    audits = sorted(
        n for n in audited_updates(updates) if 8 <= n < updates and n % REPORT_EVERY not in (0, 1, REPORT_EVERY - 1)
    )
    costs = [spans[n - 2] + spans[n - 1] - 2 * plain for n in audits]
    audit, total = statistics.mean(costs), FLAGS["digits16"]["max_train_steps"]  # some compute a gradient again, others do not
    share = 100 * audit * len(audited_updates(total)) / (total * plain)
    each = ", ".join(f"{n}: {cost:.0f}" for n, cost in zip(audits, costs))
    print(f"{'an audit':24} {audit:8.3f} ms  {audit / plain:.2f} updates ({each}); {share:.2f} % of a run of {total} updates")
    print(f"{'a report':24} {extra:8.3f} ms  {100 * extra / (50 * plain):.2f} % of 50 updates")


def train(updates: int, flags: list[str]) -> None:
    """Runs train_ddpm.py, without what comes between updates but reports."""
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(tempfile.gettempdir(), f"reliability-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}")
        never = str(updates + 1)
        quiet = ["--max_train_steps", str(updates), "--validation_images", "0", "--save_images_steps", never]
        quiet += ["--save_model_steps", never, "--checkpointing_steps", never, "--ddpm_num_inference_steps", "2"]
        args = train_ddpm.parse_args([*quiet, *flags, "--output_dir", f"{shared if 'RANK' in os.environ else folder}/run"])
        args.overwrite_output_dir = True
        train_ddpm.main(args)


def time_repetitions(pairs: int, updates: int, every: int, flags: list[str], clock: Callable[[], float]) -> None:
    ends: list[float] = []
    update = utils.training.progress.ProgressBar.update
    utils.training.progress.ProgressBar.update = lambda bar: (ends.append(clock()), update(bar))
    begin, judged, before, after = Rerun.begin, Rerun._judged, [], []
    Rerun.begin = lambda rerun, *state: (before.append(resident_mib()), begin(rerun, *state))[1]
    Rerun._judged = lambda rerun: (after.append(resident_mib()), judged(rerun))[1]  # all copies are there

    def seconds(more: list[str]) -> float:
        AcceleratorState._reset_state(reset_partial_state=True)
        ends.clear()
        train(updates, [*flags, *more])
        return ends[-1] - ends[4]

    ratios, count = [], updates // every - 4 // every
    for pair in range(pairs):
        both = {}
        for repeats in (True, False) if pair % 2 else (False, True):
            both[repeats] = seconds(["--rerun_steps", str(every)] if repeats else [])
        ratios.append(both[True] / both[False])
        each = (both[True] - both[False]) / count / (both[False] / (updates - 5))
        print(
            f"pair {pair + 1}: {both[False]:.2f} s, with {count} repetitions {both[True]:.2f} s: {each:.2f} updates each",
            flush=True,
        )
    print(f"{describe(default_device())}")
    share = f"{100 * (statistics.median(ratios) - 1):.2f} % ({100 * (min(ratios) - 1):.2f} to {100 * (max(ratios) - 1):.2f})"
    print(f"--rerun_steps {every}: {share} of {updates} updates, median of {pairs} pairs")
    print(f"resident memory: at most {max(before):.0f} MiB before an update, {max(after):.0f} with the copies of the state")


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def time_checkpoints(presets: list[str], repeats: int) -> None:
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    print(f"{describe(default_device())}; median of {repeats}, in turns")
    print(f"{'preset':10} {'MiB':>8} {'checkpoint':>11} {'verify':>8} {'safetensors':>12} {'flushed':>8}   seconds")
    for preset in presets:
        flags = FLAGS[preset]
        resolution, channels = flags.get("resolution", 64), flags.get("image_channels", 3)
        unet = make_unet(DDPMOptions(resolution=resolution, image_channels=channels, model_preset=preset))
        optimizer = make_optimizer(unet, DDPMOptions())
        unet, optimizer = accelerator.prepare(unet, optimizer)
        for parameter in unet.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        ema, state = EMA(unet), TrainState()
        accelerator._save_model_state_pre_hook.clear()
        attach_state_hooks(accelerator, ema, state)
        moments = {f"{i}.{k}": v for i, s in enumerate(optimizer.state.values()) for k, v in s.items() if v.ndim}
        tensors = {**unet.state_dict(), **{f"ema.{k}": v for k, v in ema.state_dict().items()}, **moments}
        tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        times: dict[str, list[float]] = {"save": [], "verify": [], "plain": [], "flushed": []}
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", ".")) as folder:
            for state.step in range(1, repeats + 1):
                start = time.perf_counter()
                problem = save_checkpoint(accelerator, Path(folder), state, total_limit=2)
                saved = time.perf_counter()
                problem = problem or verify_checkpoint(Path(folder, f"checkpoint-{state.step}"))
                times["save"].append(saved - start)
                times["verify"].append(time.perf_counter() - saved)
                if problem:
                    raise RuntimeError(f"what was saved is not whole: {problem}")
                start = time.perf_counter()
                save_file(tensors, Path(folder, "plain.safetensors"))
                times["plain"].append(time.perf_counter() - start)
                with open(Path(folder, "plain.safetensors"), "rb") as file:
                    os.fsync(file.fileno())
                times["flushed"].append(time.perf_counter() - start)
                Path(folder, "plain.safetensors").unlink()
            size = sum(p.stat().st_size for p in Path(folder, f"checkpoint-{state.step}").iterdir()) / 2**20
        row = {name: statistics.median(values) for name, values in times.items()}
        print(f"{preset:10} {size:8.1f} {row['save']:11.3f} {row['verify']:8.3f} {row['plain']:12.3f} {row['flushed']:8.3f}")
        accelerator.free_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("updates", "checkpoints", "repetitions"))
    parser.add_argument("--updates", type=int, default=150, help="at least 51 (150)")
    parser.add_argument("--pairs", type=int, default=5, help="of runs (5)")
    parser.add_argument("--every", type=int, default=100, help="updates between two that are made again (100)")
    parser.add_argument("--own_time", action="store_true")
    parser.add_argument("--presets", nargs="+", default=["digits16", "cifar10"])
    parser.add_argument("--repeats", type=int, default=7)
    options, flags = parser.parse_known_args()
    clock = time.thread_time if options.own_time else time.perf_counter
    if options.what == "updates" and options.updates < 3 * REPORT_EVERY:
        parser.error(f"--updates {options.updates}: at least {3 * REPORT_EVERY}, since the first reports are left out")
    if options.what == "updates":
        time_updates(options.updates, flags, clock)
    elif options.what == "repetitions":
        time_repetitions(options.pairs, options.updates, options.every, flags, clock)
    else:
        time_checkpoints(options.presets, options.repeats)


if __name__ == "__main__":
    main()

"""Everything that needs a GPU, in at most 25 minutes, with a short table at the end.

    python benchmarks/gpu_all.py --output_dir gpu-results                 # logs of each part go there

Parts run one after the other, the most telling first; each has a time limit, and what no longer fits into `--minutes` is left
out and named. `--list` prints the commands alone. Parts share what was compiled, in the same folder: only the first part with a
network says how long that takes.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SYNTHETIC = "--dataset_name synthetic --eval_batch_size 16"
DDPM = f"benchmarks/speed/throughput.py --blocks 8 --block_updates 10 --loops bare ema {SYNTHETIC}"  # each is compiled
EDM2 = f"{DDPM} --script train_edm2.py"
FAST = "--mixed_precision bf16 --compile"
RUN = "train_ddpm.py --max_train_steps 300 --overwrite_output_dir --output_dir {folder}"
FORCED = "benchmarks/speed/switches.py --script train_edm2.py --only force_weight_norm --base last --blocks 20"
TOGETHER = "benchmarks/speed/switches.py --together compile channels_last --blocks 8 --block_updates 5"
PARTS = {  # name: (seconds at most, command)
    "EDM2 XS 64x64 64": (540, f"{EDM2} --model_preset XS --resolution 64 --train_batch_size 64 {FAST}"),
    "precisions": (240, "benchmarks/reliability/precisions.py"),
    "doctor, healthy": (240, "benchmarks/doctor/ask.py --gpu --only healthy --sample 30"),
    "cifar10 256": (480, f"{DDPM} --model_preset cifar10 --train_batch_size 256 {FAST}"),
    "memory prediction": (280, "benchmarks/memory/prediction.py"),
    "sampling cifar10": (150, "benchmarks/speed/sampling.py --model_preset cifar10 --batch_size 256 --turns 3"),
    "checkpointing": (240, "benchmarks/memory/gradient_checkpointing.py --blocks 5 --block_updates 3"),
    "forced norm XS": (120, f"{FORCED} --block_updates 2 --model_preset XS --resolution 64 --batch_size 64"),
    "precision": (100, "benchmarks/speed/precision.py --model_preset digits16 cifar10"),
    "celeba64 64": (300, f"{DDPM} --model_preset celeba64 --train_batch_size 64 {FAST}"),
    "cifar10 512": (160, f"{DDPM} --model_preset cifar10 --train_batch_size 512 {FAST}"),
    "fp16 run": (60, f"{RUN}/fp16 --mixed_precision fp16"),
    "bf16 compiled run": (100, f"{RUN}/bf16 {FAST}"),
    "256 16": (240, f"{DDPM} --model_preset 256 --train_batch_size 16 {FAST}"),
    "switches cifar10": (400, f"{TOGETHER} --model_preset cifar10 --batch_size 256"),
    "switches EDM2 XS": (400, f"{TOGETHER} --script train_edm2.py --model_preset XS --resolution 64 --batch_size 64"),
    "cifar10 128 eager": (90, f"{DDPM} --model_preset cifar10 --train_batch_size 128 --mixed_precision bf16"),
    "digits16 512": (90, f"{DDPM.replace('synthetic', 'digits')} --model_preset digits16 --train_batch_size 512 {FAST}"),
    "EDM2 S 64x64 32 eager": (
        120,
        f"{EDM2} --model_preset S --resolution 64 --train_batch_size 32 --mixed_precision bf16",
    ),
    "auto batch size": (90, f"{RUN}/auto --max_train_steps 5 --train_batch_size auto --global_batch_size 1024"),
    "dry run 256": (60, "train_ddpm.py --model_preset 256 --dataset_name any --train_batch_size 512 --dry_run"),
}


def run(command: str, log: Path, limit: float) -> int | None:
    """Exit status, None when the time was up; the process and its children are gone afterwards."""
    environment = os.environ | {"TQDM_MININTERVAL": "30", "PYTHONWARNINGS": "ignore"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(log.parent / "compiled")  # a network is compiled by the first part that has it
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(command)],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # Ctrl-C too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def found_in(log: Path, status: int | None) -> list[str]:
    """The lines of a part's log that its row in the table shows; why it ended early, where it did."""
    lines = log.read_text(errors="replace").splitlines()
    found = [line[3:] for line in lines if line.startswith("=> ")]
    found += [
        line
        for line in lines
        if line.startswith(("done: ", "fits: ", "updates fit, ", "does not fit: ", "--compile", "Healthy: "))
    ]
    if status != 0:
        reason = "time was up" if status is None else f"exit status {status}"
        found.append(f"{reason}: {(lines or ['no output'])[-1][-200:]}")
    return found or ["nothing to say"]


def table(rows: list[tuple[str, float, list[str]]]) -> str:
    """Of (part, seconds, what was found), in lines."""
    head = f"{'part':22} {'s':>5}  found"
    return "\n".join([head, *(f"{name:22} {seconds:5.0f}  " + f"\n{'':30}".join(found) for name, seconds, found in rows)])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("gpu-results"))
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(argv)
    folder = options.output_dir.resolve()
    parts = {name: (PARTS[name][0], PARTS[name][1].format(folder=folder)) for name in options.only}
    if options.list:
        for name, (seconds, command) in parts.items():
            print(f"{name} ({seconds} s at most): python {command}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    deadline, rows = time.monotonic() + 60 * options.minutes, []
    for name, (seconds, command) in parts.items():
        left = deadline - time.monotonic()
        if left < seconds / 3:
            rows.append((name, 0.0, ["left out: no time"]))
            continue
        start, log = time.monotonic(), folder / f"{name.replace(' ', '-')}.log"
        status = run(command, log, min(seconds, left))
        rows.append((name, time.monotonic() - start, found_in(log, status)))
        print(f"{name}: {time.monotonic() - start:.0f} s, {log}", flush=True)
        (folder / "table.txt").write_text(table(rows) + "\n")  # at once: what comes next may take the machine along
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()

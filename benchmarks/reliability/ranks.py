"""Plants faults in one rank of several, and counts which runs name them; and whether healthy runs name anything.

    python benchmarks/reliability/ranks.py --processes 2 4 --healthy 30

Each run is a training of a tiny network on gloo. Right is a run that names the rank, and the part in which it errs: the
parameter whose weight was moved by one rounding step (and ends with status 3), the update in which a bit of the gradient
flips (with --rerun_steps 1), data or compute of the rank that takes twice as long as an update, and what the rank does that
no longer comes (and ends with status 1).
"""

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(2, str(Path(__file__).parents[2] / "tests/faults"))

from conftest import make_tiny_flags
from fork_server import ForkServer

from benchmarks.shared.measuring import default_device, describe

SCRIPT, UPDATES, HANG_TIMEOUT, PATIENCE = "train_ddpm.py", 16, 6, 300
# Fault -> its value, the exit status, what must be said of rank R.
FAULTS = {
    "nudge": ("conv_in.weight", 3, r"after update 6, rank R differs from the other ranks in the weights: conv_in\.weight\."),
    "flip": ("gradient:20", 0, r"update 6, made again [\w ]+, has other bits, first in [\w ,]+, on rank R;"),
    "slow-compute": ("0.3", 0, r"rank R takes [\d.]+ times as long as the median of the other ranks, in compute"),
    "slow-data": ("0.3", 0, r"rank R takes [\d.]+ times as long as the median of the other ranks, in data"),
    "hang": ("", 1, r"hang: rank R has been computing for \d+ s, in update 6; rank"),
    "hang-data": ("", 1, r"hang: rank R has been waiting for data for \d+ s, in update \d+; rank"),
}


def run(server: ForkServer, command: list, folder: Path, processes: int) -> tuple[set[int], str]:
    """(exit statuses, all that was said)"""
    runs = server.start([*command, "--output_dir", folder], processes)
    statuses = {each.wait(PATIENCE) for each in runs}
    found = json.loads((folder / "diagnosis.json").read_text()) if (folder / "diagnosis.json").exists() else []
    return statuses, "\n".join([*(each.text() for each in runs), *(finding["evidence"] for finding in found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--healthy", type=int, default=30, help="healthy runs, of the first number of processes (30)")
    args = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name, ForkServer() as server:
        flags = [*make_tiny_flags(Path(name)), "--train_batch_size", 4, "--max_train_steps", UPDATES, "--logging_steps", 2]
        flags += ["--logger", "none", "--save_images_epochs", 999, "--hang_timeout", HANG_TIMEOUT]
        print("| fault | processes | rank | named |\n|---|---|---|---|")
        for count in args.processes:
            for fault in args.faults:
                value, status, said = FAULTS[fault]
                rank = count - 1
                plant = ["tests/faults/inject.py", SCRIPT, fault, "--rank", rank, "--step", 6, "--value", value, "--", *flags]
                plant += ["--rerun_steps", 1] if fault == "flip" else []
                statuses, text = run(server, plant, Path(name, f"{fault}-{count}"), count)
                found = re.search(said.replace("rank R", f"rank {rank}"), text)
                named = re.sub("(; rank|;)$", "", found[0]) if found and statuses == {status} else f"no: statuses {statuses}"
                print(f"| {fault} | {count} | {rank} | {named} |", flush=True)
        told = 0
        for number in range(args.healthy):
            statuses, text = run(server, [SCRIPT, *flags], Path(name, f"healthy-{number}"), args.processes[0])
            wrong = statuses != {0} or re.search(r"stopped:|hang:|times as long as the median", text)
            told += bool(wrong)
            if wrong:
                print(f"healthy run {number}: {statuses}, {wrong}")
    print(f"\nhealthy runs that named something: {told} of {args.healthy}")
    print(f"{time.monotonic() - start:.0f} s; {describe(default_device())}")


if __name__ == "__main__":
    main()

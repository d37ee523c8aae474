"""Kills tiny training runs with SIGKILL at random moments and counts what that costs.

    python benchmarks/reliability/chaos.py --kills 200

A run of 24 updates with a checkpoint every 3 is killed, resumed with `--resume_from_checkpoint latest` and killed again until
it comes to its end; then the next begins. Half of the kills wait for a save to begin and strike up to 20 ms later; the
others strike at any moment. After each kill every published checkpoint is verified and compared with that of a run that
nobody disturbed; after each finished run weights, EMA, optimizer, the exported pipeline and the logged curves are.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(2, str(Path(__file__).parents[2] / "tests/faults"))

from conftest import SCRIPTS, make_tiny_flags
from fork_server import ForkServer
from kills import kill_at_random

from benchmarks.shared.measuring import default_device, describe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--script", default="train_ddpm.py", choices=SCRIPTS)
    parser.add_argument("--share_in_save", type=float, default=0.5, help="of the kills, that wait for a save to begin (0.5)")
    args = parser.parse_args()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it reports what the resumed runs had it hide
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name, ForkServer() as server:
        flags = [*make_tiny_flags(Path(name), args.script), "--max_train_steps", 24, "--checkpointing_steps", 3]
        tally = kill_at_random(
            server, args.script, flags, Path(name), kills=args.kills, seed=args.seed, share_in_save=args.share_in_save
        )
    for problem in (*tally.invalid, *tally.different):
        print(problem)
    rows = {
        "kills": tally.kills,
        "of them inside a save": tally.in_save,
        "of them before the first checkpoint": tally.before_first,
        "published checkpoints that were invalid": len(tally.invalid),
        "runs that came to their end": tally.finished,
        "of them not identical to the undisturbed run": len({what.split(":")[0] for what in tally.different}),
        "updates lost per kill, mean (a checkpoint every 3)": f"{statistics.mean(tally.updates_lost):.1f}",
        "most updates lost by one kill": max(tally.updates_lost),
    }
    print("| | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")
    print(f"{args.script}, seed {args.seed}, {time.monotonic() - start:.0f} s; {describe(default_device())}")


if __name__ == "__main__":
    main()

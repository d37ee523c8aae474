"""Kills tiny training runs with SIGKILL in each of their phases and counts what that costs.

    python benchmarks/reliability/chaos.py --kills 800
    python benchmarks/reliability/chaos.py --kills 200 --script train_edm2.py
    python benchmarks/reliability/chaos.py --kills 200 -- --objective flow          # more flags of the script
    python benchmarks/reliability/chaos.py --kills 0 --delays 5          # suspended ranks, frozen disks, clocks set back

A run of 24 updates with a checkpoint every 3, pictures every 8 and an evaluation every 12 is killed, resumed with
`--resume_from_checkpoint latest` and killed again until it comes to its end; then the next begins. The functions that a phase
consists of are wrapped in the killed process and note when it begins and ends. The kill comes up to as much later as the phase
lasts in an undisturbed run. After each kill every published checkpoint is verified and compared with that of such a run; after
each finished run weights, EMA and its snapshots, optimizer, the exported pipeline, the ledger and the logged curves are.
"""

import argparse
import functools
import logging
import operator
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
from kills import DELAYS, PHASED, TWICE, Killer, Tally

from benchmarks.shared.measuring import default_device, describe

# Of 100 kills: in one process, and, where two take part, of the one that does not publish.
SHARES = {
    "any moment": 18,
    "a save": 33,
    "the first save of a run": 8,
    "a start that resumes": 10,
    TWICE: 8,
    "a preview, with averaged weights": 7,
    "an evaluation": 5,
    "packing of images": 6,
}
OTHER_RANK = "a save by the other of two ranks"  # the rest of the kills


def row(name: str, tally: Tally) -> str:
    lost = f"{statistics.mean(tally.updates_lost):.1f}, {max(tally.updates_lost)}"
    different = len({what.split(":")[0] for what in tally.different})
    cells = (name, tally.kills, tally.hits, tally.in_save, len(tally.invalid), tally.ends, different, lost)
    return f"| {' | '.join(map(str, cells))} |"


def tell(tallies: dict[str, Tally]) -> None:
    for tally in tallies.values():
        for problem in (*tally.invalid, *tally.different):
            print(problem)
    print("| killed in | kills | hit it | save half made | invalid | runs ended | different | updates lost: mean, most |")
    print("|---" * 8 + "|")
    for name, tally in tallies.items():
        print(row(name, tally))
    print(row("all; a run counts where it was killed", functools.reduce(operator.add, tallies.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--delays", type=int, default=0, help="trials of each of the delays, which kill nobody (0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--script", default="train_ddpm.py", choices=SCRIPTS)
    parser.add_argument("flags", nargs="*", help="more flags of the script, after --")
    args = parser.parse_args()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it reports what the resumed runs had it hide
    start, tallies, runs, delayed = time.monotonic(), {}, 0, []
    plan = {name: args.kills * share // 100 for name, share in SHARES.items()}
    for processes in (2, 1) if args.kills else (2,):
        with tempfile.TemporaryDirectory() as name, ForkServer() as server:
            flags = [*make_tiny_flags(Path(name), args.script), *PHASED, "--train_batch_size", 8 // processes, *args.flags]
            killer = Killer(server, args.script, flags, Path(name), seed=args.seed, processes=processes)
            if processes == 1:
                tallies |= killer.kill_by_phase(plan)
            else:
                tallies[OTHER_RANK] = killer.kill_by_phase({"a save": args.kills - sum(plan.values())})["a save"]
                for delay, trial in DELAYS.items():
                    problems = [trial(killer, Path(name, f"{delay[:30]}-{n}")) for n in range(args.delays)]
                    delayed.append(f"| {delay} | {args.delays} | {sum(map(bool, problems))} |")
                    print(delayed[-1], *filter(None, problems), sep="\n", flush=True)
            runs += killer.runs
    if args.delays:
        print("| what | trials | ended otherwise, or with other bits |\n|---|---|---|", *delayed, sep="\n")
    if args.kills:
        tell(tallies)
    command = " ".join([args.script, *args.flags])
    print(f"{runs} runs; {command}, seed {args.seed}, {time.monotonic() - start:.0f} s; {describe(default_device())}")


if __name__ == "__main__":
    main()

"""Run as two processes: one works alone, in the way that the first argument names, while the other waits. Limits are short."""

import os
import signal
import sys
import time
from pathlib import Path

from utils.core import distributed, entrypoint, waiting
from utils.core.bars import print_progress
from utils.core.distributed import agree, main_process_first, make_accelerator, on_main_process, waited_for
from utils.core.entrypoint import run_script
from utils.core.errors import UserError
from utils.core.signals import leave_on_signal

TIMEOUT = 3.0  # seconds, after which a collective call gives up
PATIENCE = 8.0  # seconds without a sign of life, after which a process counts as lost
waiting.PERIOD, waiting.TOLD_AFTER = 0.05, 0.2


def tell(line: str) -> None:
    print_progress(line)
    Path(sys.argv[2]).touch()


waiting.print_progress = tell
entrypoint.WAIT_FOR_FIRST = 0.1


def until_told() -> None:
    """Until the other process has said that it waits."""
    while not Path(sys.argv[2]).exists():
        time.sleep(0.02)


def work_long() -> None:
    until_told()
    time.sleep(1.2 * TIMEOUT)


def work() -> None:
    kind = sys.argv[1]
    if kind not in ("fails", "refuses"):
        until_told()
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "leaves":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind in ("hangs", "lags", "works"):
        time.sleep(3600)
    if kind == "fails":
        raise ValueError("broken")
    if kind == "refuses":
        raise UserError("no room\nmake room")


def main(options: None) -> None:
    kind = sys.argv[1]
    leave_on_signal()
    accelerator = make_accelerator(cpu_threads=1, collective_timeout=TIMEOUT if kind == "long" else 60.0)
    rank = accelerator.process_index
    if kind == "long":
        on_main_process(accelerator, "hashing", work_long)
        with main_process_first(accelerator, "loading"):
            print("loads", time.monotonic(), flush=True)
            time.sleep(0.1)
            print("loaded", time.monotonic(), flush=True)
        problems = []
        for number in range(200):  # a process that was refused goes on with the others
            try:
                agree(
                    accelerator,
                    "trying",
                    f"rank {rank} at {number} \udce9" if number % 3 in (1 - rank, 2) else None,
                    alike=True,
                )
            except UserError as error:
                problems.append(str(error))
        print(problems, distributed.from_main_process(rank), flush=True)
        return
    accelerator.waiting.patience = PATIENCE
    if kind == "hangs":
        distributed.LONGEST = 1.0
    if kind == "lags":
        if rank == int(sys.argv[3]):
            work()
        agree(accelerator, "a validation", None, alike=True)
    with waited_for(accelerator, "packing the images"):
        if rank == int(sys.argv[3]):
            work()


if __name__ == "__main__":
    run_script(main, lambda: None)

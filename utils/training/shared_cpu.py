"""A warning that the threads of a run on a CPU wait for processors that others use."""

import time

import torch

from utils.core.processors import ThreadTime, processor_limit, thread_times
from utils.training.run import Run

SECONDS = 15.0  # over which it is measured, and at least MEASURED_UPDATES
MEASURED_UPDATES = 3
# Of the time in which threads could run: with two threads on two cores, and one other program, a quarter. Since the threads
# wait for each other after each operation, updates take several times as long.
SHARE = 0.2


class SharedCPU:
    """Compares, once, the time that the threads of the main process ran with the time that they waited for a processor.

    The time that Linux counts as waiting is of threads that are ready to run. One that waits for data, for other ranks or for a
    disk is not: processor time beside the clock alone could not tell these apart.
    """

    def __init__(self, run: Run):
        self._run = run
        self._measures = run.accelerator.device.type == "cpu" and run.accelerator.is_main_process
        self._updates = 0
        self._start, self._before = 0.0, dict[str, ThreadTime]()

    def after_update(self) -> None:
        if not self._measures:
            return
        now = time.monotonic()
        if self._updates == 0:  # the first update starts threads and workers
            self._start, self._before = now, thread_times()
        elif self._updates >= MEASURED_UPDATES and now - self._start >= SECONDS:
            self._measures = False
            self._judge(now - self._start, thread_times())
        self._updates += 1

    def _judge(self, seconds: float, after: dict[str, ThreadTime]) -> None:
        known = self._before.keys() & after.keys()
        ran, waited = (sum(after[name][i] - self._before[name][i] for name in known) / 1e9 for i in (0, 1))
        if waited < SHARE * max(ran + waited, seconds):
            return
        threads, limit = torch.get_num_threads(), processor_limit()
        why, otherwise, cores = "other processes use this CPU, too", "end other programs", round(ran / seconds)
        if limit is not None and ran > 0.8 * limit * seconds:
            why = f"the control group of this run (a container, or a job) may use {limit:.3g} processors"
            otherwise, cores = "give it more processors", int(limit)
        fewer = max(1, min(threads - 1, cores))
        advice = f"--cpu_threads {fewer} instead of {threads}, also on resume" if threads > 1 else otherwise
        who = "this run" if threads == 1 else f"the {threads} threads of this run together"
        self._run.print_line(
            f"warning: in {seconds:.0f} s, {who} computed for {ran:.0f} s and waited {waited:.0f} s for a processor: {why}. "
            f"Try: {advice}"
        )

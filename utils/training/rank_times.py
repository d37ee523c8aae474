"""How each rank spends the time of its updates: computing, waiting for data, waiting for other ranks in collectives."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.autograd import Variable

from utils.core.distributed import from_all

KINDS = ("compute", "data", "collectives")
RING = 256  # marks at most; what lies half as many marks back is over: a GPU's queue holds about 1,000 kernels


class RankTimes:
    """Of runs with several ranks; else it does nothing. On an accelerator by events, so that the host waits for none."""

    def __init__(self, accelerator: Accelerator, tells: Callable[[str | None], None]):
        """`tells` gets each kind when its time begins."""
        self._accelerator, self._tells, self._on = accelerator, tells, accelerator.num_processes > 1
        self._marks: list[tuple[str | None, Any]] = []
        self._own = dict.fromkeys(KINDS, 0.0)  # seconds between earlier marks
        self._unused: list[Any] = []  # events of earlier marks

    def now(self, kind: str | None) -> None:
        """From here on time is of that one of KINDS, or of none of them (what is made between updates)."""
        if self._on:
            if len(self._marks) == RING:
                self._add_up(RING // 2)
            self._marks.append((kind, self._moment()))
            self._tells(kind)

    def before_backward(self, loss: Tensor, now: Callable[[str | None], None]) -> None:
        """Has `now` told of the end of this rank's own backward pass, from which on it waits: DDP awaits what it sent."""
        if self._on:
            # Callbacks run once the pass is over, in their order; DDP adds the one that waits for its collectives after this.
            queue = Variable._execution_engine.queue_callback
            loss.register_hook(lambda gradient: queue(lambda: now("collectives")))

    def wait_for_device(self) -> None:
        """Until all is done that was begun before the newest mark, the collectives of an update among it."""
        if self._marks and not isinstance(self._marks[-1][1], float):
            self._marks[-1][1].synchronize()

    def _moment(self) -> Any:
        if self._accelerator.device.type == "cpu":
            return time.perf_counter()
        event = self._unused.pop() if self._unused else torch.Event(self._accelerator.device.type, enable_timing=True)
        event.record()
        return event

    def _add_up(self, last: int) -> None:
        """The times between the oldest marks, up to number `last`, once the device has come there."""
        marks, self._marks = self._marks[: last + 1], self._marks[last:]
        if marks and not isinstance(marks[-1][1], float):
            marks[-1][1].synchronize()
            self._unused += [event for _, event in marks[:-1]]
        for (kind, start), (_, end) in itertools.pairwise(marks):
            if kind is not None:
                self._own[kind] += end - start if isinstance(start, float) else start.elapsed_time(end) / 1000.0

    def report(self) -> "Shares | None":
        """Those since the last report, once the device is done with it; None in one process. Every rank must call it."""
        if not self._on:
            return None
        self._add_up(len(self._marks) - 1)
        self._unused += [event for _, event in self._marks if not isinstance(event, float)]
        self._marks, own, self._own = [], self._own, dict.fromkeys(KINDS, 0.0)
        rows = torch.tensor([list(own.values())], dtype=torch.float32).to(self._accelerator.device)
        return Shares(*zip(*from_all(self._accelerator, rows)))


class Shares(NamedTuple):
    """Seconds of each rank."""

    compute: tuple[float, ...]
    data: tuple[float, ...]
    collectives: tuple[float, ...]

    def figures(self) -> dict[str, float]:
        """The rank that takes longest for its own part (computing, data), and its time over the median of the others."""
        own = [compute + data for compute, data in zip(self.compute, self.data)]
        slowest = max(range(len(own)), key=own.__getitem__)
        usual = statistics.median(own[:slowest] + own[slowest + 1 :])
        return {"perf/slowest_rank": slowest, "perf/rank_spread": own[slowest] / max(usual, 1e-9)}

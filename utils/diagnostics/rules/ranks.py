"""Findings about ranks: one that the others wait for."""

from collections import Counter
from statistics import median

from utils.diagnostics.finding import Finding, Found
from utils.runs.record import RunRecord

REPORTS = 8  # the newest ones, which are judged together


def slow_rank(record: RunRecord) -> Found:
    if record.resolved.get("num_processes") == 1:
        yield "slow-rank"  # there is no other to wait for it
        return
    seen = record.known("ranks")[1:]  # the first report includes what is made once: kernels that are chosen, workers
    if len(seen) < 3:
        return
    yield "slow-rank"
    own = [[compute + data for compute, data in zip(times["compute"], times["data"])] for _, times in seen[-REPORTS:]]
    rank, times_seen = Counter(max(range(len(each)), key=each.__getitem__) for each in own).most_common(1)[0]
    spread = median(_excess(each, rank) for each in own)
    # Ranks that share a busy machine are slow in turn, and seldom by so much; one with half the speed always is.
    if spread < 1.4 or times_seen < 0.75 * len(own):
        return
    step, newest = seen[-1]
    part = max(("compute", "data"), key=lambda part: newest[part][rank] - _others(newest[part], rank))
    what = f"rank {rank} takes {spread:.1f} times as long as the median of the other ranks, in {part}"
    yield Finding("slow-rank", "warning", what, step)


def _excess(times: list[float], rank: int) -> float:
    return times[rank] / max(_others(times, rank), 1e-9)


def _others(times: list[float], rank: int) -> float:
    return median(times[:rank] + times[rank + 1 :])

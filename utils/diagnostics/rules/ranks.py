"""Findings about ranks: one that the others wait for, and one whose device errs."""

from collections import Counter
from statistics import median

from utils.diagnostics.finding import Finding, Found
from utils.runs.ledger import HASHES
from utils.runs.record import RunRecord

REPORTS = 8  # the newest ones, which are judged together
STAGES = {"own gradient": "the gradient", "gradient": "the gradient, after it was averaged and clipped"}  # of an update
STAGES |= HASHES


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
    spread = median(each[rank] / max(_others(each, rank), 1e-9) for each in own)
    # Ranks that share a busy machine are slow in turn, and seldom by so much; one with half the speed always is.
    if spread < 1.4 or times_seen < 0.75 * len(own):
        return
    step, newest = seen[-1]
    part = max(("compute", "data"), key=lambda part: newest[part][rank] - _others(newest[part], rank))
    what = f"rank {rank} takes {spread:.1f} times as long as the median of the other ranks, in {part}"
    yield Finding("slow-rank", "warning", what, step)


def device_errs(record: RunRecord) -> Found:
    """Of updates that were made again (--rerun_steps)."""
    made = record.known("rerun")
    if not made:
        return
    yield from ("device-errs", "update-not-repeatable")
    wrong = [(step, each) for step, each in made if each["outcome"] == "wrong"]
    if wrong:
        step, each = wrong[0]
        ranks = " or ".join(f"rank {rank}" for rank in each["ranks"])
        what = f"update {step}, made again from the same weights and batches, has other bits, first in {STAGES[each['stage']]}"
        if record.resolved.get("num_processes") != 1:
            what += f", on {ranks}"
        yield Finding("device-errs", "critical", f"{what}; {len(wrong)} of {len(made)} updates that were looked at", step)
    apart = [(step, each) for step, each in made if each["outcome"] == "not repeatable"]
    if apart:
        step, each = apart[0]
        what = f"first in {STAGES[each['stage']]} of update {step}; {len(apart)} of {len(made)} updates that were looked at"
        yield Finding("update-not-repeatable", "info", what, step)


def _others(times: list[float], rank: int) -> float:
    return median(times[:rank] + times[rank + 1 :])

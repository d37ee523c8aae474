"""Two runs beside each other: the first update at which they hold different bits, what differs first, and why it may."""

from dataclasses import dataclass, field
from pathlib import Path

from utils.runs.ledger import HASHES, LEDGER, read_ledger
from utils.runs.record import RunRecord

SAME, DIFFERENT, NOT_COMPARABLE = 0, 1, 2
# Of options.json, beside the flags: what may change bits.
FACTS = ("num_processes", "global_batch_size", "gradient_accumulation_steps", "mixed_precision", "device", "cpu_threads")
WHERE_TO = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "allow_option_change", "hub_model_id"}
ABSENT = "(absent)"


@dataclass
class Comparison:
    """`status`: SAME as far as both runs went, DIFFERENT, or NOT_COMPARABLE."""

    status: int
    verdict: str  # in a sentence
    last_same: int | None = None  # update
    first_different: int | None = None
    what: str | None = None  # of `ledger.HASHES`
    options: dict[str, list] = field(default_factory=dict)  # name -> the values of both runs, where they differ

    def lines(self) -> list[str]:
        if not self.options:
            return [self.verdict, "no option differs"]
        pairs = (f"  {name}: {_shown(a)} | {_shown(b)}" for name, (a, b) in self.options.items())
        return [self.verdict, "options and versions that differ:", *pairs]


def compare(first: Path, second: Path) -> Comparison:
    """Compares the runs in two folders. Raises UserError where one holds no run, or its options cannot be read."""
    records, ledgers = [RunRecord.read(folder) for folder in (first, second)], [read_ledger(first), read_ledger(second)]
    was, now = map(_settings, records)
    pairs = {name: [was.get(name, ABSENT), now.get(name, ABSENT)] for name in was | now}
    options = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    for record, ledger in zip(records, ledgers):
        if not ledger:
            return Comparison(
                NOT_COMPARABLE, f"not comparable: {record.output_dir} has no {LEDGER} of this version", options=options
            )
    sizes = [record.resolved.get("parameters") for record in records]
    if sizes[0] != sizes[1]:
        verdict = f"not comparable: one network has {sizes[0]} parameters, the other {sizes[1]}"
        return Comparison(NOT_COMPARABLE, verdict, options=options)
    a, b = ledgers
    common = sorted(step for step in a.keys() & b.keys() if a[step].keys() & b[step].keys())
    if not common:
        return Comparison(NOT_COMPARABLE, f"not comparable: no update has a line in both {LEDGER}", options=options)
    last_same = None
    for step in common:
        both = a[step].keys() & b[step].keys()
        if (what := next((name for name in HASHES if name in both and a[step][name] != b[step][name]), None)) is not None:
            return Comparison(DIFFERENT, _verdict(last_same, step, what), last_same, step, what, options)
        last_same = step
    lengths = [max(ledger) for ledger in ledgers]
    more = f"; the ledgers go to updates {lengths[0]} and {lengths[1]}" if lengths[0] != lengths[1] else ""
    return Comparison(SAME, f"the same bits up to update {last_same}{more}", last_same, options=options)


def _verdict(last_same: int | None, step: int, what: str) -> str:
    if step == 0:
        return f"different before the first update: {HASHES[what]}"
    if last_same is None:
        return f"different at update {step}, the first one with a line in both runs: first {HASHES[what]}"
    text = f"the same bits up to update {last_same}, different at update {step}: first {HASHES[what]}"
    if step > last_same + 1:
        text += ". Nothing was recorded between these two updates: --ledger_steps 1 names the update in new runs"
    return text


def _settings(record: RunRecord) -> dict:
    facts = {f"resolved {name}": record.resolved[name] for name in FACTS if name in record.resolved}
    versions = {f"version of {name}": version for name, version in record.versions.items()}
    options = {name: value for name, value in record.options.items() if name not in WHERE_TO}
    return options | facts | versions | {"git commit": record.git_commit}


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)

"""Which row of a source each row of a value is made of: rows of the source are exchanged, and what changes is seen."""

from collections.abc import Collection

import torch
from torch import Tensor

from steady_doctor.record.ops import Op
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.tape import Tape

MOST_ROWS, MOST_NUMBERS = 4096, 1 << 22  # of a source; it is copied for each look
LOOKS = 4  # rows that are tried in place of each row
UNKNOWN, SEVERAL = -1, -2
FORMS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "clone", "alias", "_to_copy"}
FORMS |= {"transpose", "permute", "squeeze", "unsqueeze"}


def origins(tape: Tape, op: Op, source: Op) -> Tensor | None:
    """Returns int64 [B], the row of `source` that each row of the value of `op` is made of, or UNKNOWN, or SEVERAL. A network
    on the way keeps the rows of its batch. None where it cannot be told."""
    try:
        return _origins(tape, op, source)
    except (NotRecorded, RuntimeError, LookupError):
        return None


def without(tape: Tape, op: Op, before: Op) -> Tensor | None:
    """Returns bool [B]: the rows of `op` that do not depend on the value of `before`, whose rows differ. None where some rows
    of `before` have no others to be exchanged for."""
    try:
        value, base = tape.value(before), tape.value(op)
        changed, tried = torch.zeros(len(base), dtype=torch.bool), torch.zeros(len(value), dtype=torch.bool)
        for other in _others(value):
            tried |= differ(value, other)
            changed |= differ(base, tape.value(op, {before: other}))
        return ~changed if bool(tried.all()) else None
    except (NotRecorded, RuntimeError, LookupError):
        return None


def differ(one: Tensor, other: Tensor) -> Tensor:
    """Which rows are not the same, bool [B]; NaN is the same as NaN."""
    unlike = (one != other) & ~((one != one) & (other != other))
    return unlike.reshape(len(one), -1).any(1).cpu()


def alike(rows: Tensor) -> bool:
    return len(rows) < 2 or not bool(differ(rows, rows[:1].expand_as(rows)).any())


def is_value(number: int, op: Op) -> bool:
    """Whether this is the tensor that computing `op` again gives: of several outputs the first."""
    return len(op.outs) < 2 or number == op.result


def with_a_row_each(value: Op, sizes: Collection[int]) -> Op:
    """Returns what the value was before a linear layer put all tokens of a batch in one axis: its last form of one of these
    sizes, or the value itself."""
    before = value
    while before.shape[:1] not in [(size,) for size in sizes]:
        if before.name not in FORMS or not before.reads or not is_value(*before.reads[0]):
            return value
        before = before.reads[0][1]
    return before


def readers_of_data(tape: Tape, op: Op) -> list[Op]:
    """What the networks upstream are given: values that no layer was before, where they meet a layer."""
    found: dict[Op, None] = {}
    for each in tape.upstream(op):
        if each.kind == "op" and (each.meets or each.fronts):
            found |= dict.fromkeys(
                last
                for number, last in each.reads
                if is_value(number, last) and last.content and not last.fronts and not last.meets
            )
    return list(found)


def _origins(tape: Tape, op: Op, source: Op) -> Tensor | None:
    bit = 1 << source.index
    ends = tape.ends(op)
    if source in ends or source is op:
        return _probe(tape, op, source)
    for end in ends:
        if end.is_source or not (end.content | end.choice) & bit or not end.shape:
            continue
        inner = _probe(tape, op, end)
        given = [each for each in readers_of_data(tape, end) if (each.content | each.choice) & bit]
        given = [each for each in given if each.shape[:1] == end.shape[:1]]
        outer = [rows for each in given if (rows := _origins(tape, each, source)) is not None]
        if inner is not None and outer and all(torch.equal(rows, outer[0]) for rows in outer):
            return torch.where(inner >= 0, outer[0][inner.clamp(min=0)], inner)
    return None


def _probe(tape: Tape, op: Op, source: Op) -> Tensor | None:
    count = source.shape[0] if source.shape else 0
    if not 1 < count <= MOST_ROWS or torch.Size(source.shape).numel() > MOST_NUMBERS or not op.shape:
        return None
    value = tape.value(source)
    base = value if op is source else tape.value(op)
    bits = (count - 1).bit_length()
    seen = torch.zeros(bits, 2, len(base), dtype=torch.bool)
    for other in _others(value):
        for bit in range(bits):
            for side in (0, 1):  # the rows whose number has this bit, then all others
                chosen = (torch.arange(count, device=value.device) >> bit & 1) == 1 - side
                mixed = torch.where(chosen.reshape(-1, *[1] * (value.ndim - 1)), other, value)
                seen[bit, side] |= differ(base, mixed if op is source else tape.value(op, {source: mixed}))
    with_bit, others = seen[:, 0], seen[:, 1]
    rows = (with_bit.long() << torch.arange(bits)[:, None]).sum(0)
    rows = torch.where((with_bit | others).all(0), rows, UNKNOWN)
    return torch.where((with_bit & others).any(0), SEVERAL, rows)


def _others(value: Tensor) -> list[Tensor]:
    """The same rows, each in the place of another; all are values that occur."""
    shifts = sorted({1, len(value) // 2, len(value) // 3, len(value) - 1} - {0, len(value)})[:LOOKS]
    return [value.roll(shift, 0) for shift in shifts]

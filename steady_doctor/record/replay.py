"""What a tape tells: which operations a value needs, and the value itself, computed again."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from steady_doctor.record.ops import Op, Ref, draws, is_unwritten, tensors_in

ROUNDS = {"ceil", "floor", "round", "trunc", "frac", "remainder", "fmod", "floor_divide", "sign"}
REPEATED = ("aten", "prims")  # whose operations do the same each time, and for this process alone


class NotRecorded(Exception):
    """A value that cannot be computed again from what the tape kept. It may be right."""

    def __init__(self, why: str):
        super().__init__(f"the doctor cannot compute it again, as {why}; it may be right")


class Replay:
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.values: dict[int, Tensor] = {}  # of sources, by their index
        self.held: dict[Op, Tensor] = {}  # the values of fronts
        self._upstream: dict[tuple[Op, frozenset[Op]], list[Op]] = {}  # what was asked for

    def upstream(self, op: Op, stop: Iterable[Op] = ()) -> list[Op]:
        """All operations that the value needs, the oldest first, not beyond those of `stop`."""
        ends = frozenset(stop)
        if (known := self._upstream.get((op, ends))) is not None:
            return known
        seen, todo = {op}, [op]
        while todo:
            each = todo.pop()
            if not each.is_source and each not in ends:
                new = [need for need in each.needs if need not in seen]
                seen.update(new)
                todo += new
        self._upstream[op, ends] = found = sorted(seen, key=lambda op: op.index)
        return found

    def ends(self, op: Op) -> list[Op]:
        """Where computing the value of `op` again begins: at sources, and at the layers whose values are kept."""
        return [each for each in self.upstream(op, self.held) if each.is_source or each in self.held]

    def sources(self, bits: int) -> Iterator[Op]:
        while bits:
            low = bits & -bits
            yield self.ops[low.bit_length() - 1]
            bits ^= low

    def value(
        self,
        op: Op,
        instead: dict[Op, Tensor] | None = None,
        grad: bool = False,
        anew: bool = False,
        through: bool = False,
        exact: bool = False,
    ) -> Tensor:
        """Computes the value of `op` again, `instead` of some operations with other values.

        Args:
            grad: whether the result has a gradient.
            anew: from the sources alone, and not from what was kept of layers.
            through: with a gradient also where the script took none.
            exact: in float64 what the script did in float32, from the values that it had, and with whole numbers and choices
                as they came out there. Where an operation has no float64, only what depends on the values `instead`, and all
                else as the script had it.

        Raises:
            NotRecorded: something on the way was not kept, and cannot be repeated, or does not take the values `instead`.
        """
        instead = instead or {}
        given = instead if anew else self.held | instead
        ops = self.upstream(op, given)
        if exact:
            with contextlib.suppress(NotRecorded, RuntimeError):
                depending = _depending(ops, instead)
                decided = {each: self.value(each, anew=anew) for each in ops if _decides(each) and each not in depending}
                return self._again(op, instead, decided | given, grad, through, wide=set(ops))
        return self._again(op, instead, given, grad, through, wide=_depending(ops, instead) if exact else set())

    def _again(
        self, op: Op, instead: dict[Op, Tensor], given: dict[Op, Tensor], grad: bool, through: bool, wide: set[Op]
    ) -> Tensor:
        """As `value` has it, `wide` operations in float64."""
        tensors: dict[int, Tensor] = {}
        for each in self.upstream(op, given):
            precise = _in_float64 if each in wide else _as_it_is
            with torch.set_grad_enabled(grad and (each.with_grad or through)):
                if each in given:
                    value = given[each] if each in instead else given[each].detach()
                    tensors[each.result] = precise(value.clone())  # the script may have written to it
                elif each.is_source:
                    if each.index not in self.values:
                        raise NotRecorded(f"{each.name} was written over")
                    tensors[each.result] = precise(self.values[each.index].clone())
                elif each.func.namespace not in REPEATED:
                    raise NotRecorded(f"{each.name} may draw numbers, or wait for other processes")
                elif draws(each.func, each.args, each.kwargs):
                    raise NotRecorded(f"{each.name} draws numbers on the way")
                elif through and each.name == "detach":
                    tensors[each.result] = tensors[each.args[0].number]
                else:
                    try:
                        arguments = _filled(each.args, tensors, precise), _filled(each.kwargs, tensors, precise)
                        result = each.func(*arguments[0], **arguments[1])
                    except (IndexError, KeyError, RuntimeError) as error:  # KeyError: another result of what was replaced
                        if not instead:  # of the script's own values: an error of ours, which is said
                            raise
                        raise NotRecorded(f"{each.name} does not take these values") from error
                    if is_unwritten(each.name):
                        result.zero_()
                    tensors.update(zip(each.outs, tensors_in(result)))
        return tensors[op.result]


def _depending(ops: list[Op], instead: Iterable[Op]) -> set[Op]:
    """Those of which the value depends on these; all, where such a value is written into another tensor."""
    found = set(instead)
    for op in ops:
        if any(need in found for need in op.needs):
            if any(last not in found for number, last in op.reads if number in op.writes):
                return set(ops)
            found.add(op)
    return found


def _decides(op: Op) -> bool:
    """Whether numbers become whole ones, or choices: a last bit may make others of them."""
    if op.writes or len(op.outs) > 1:  # of what is written into another tensor, its other views have to know
        return False
    return op.name in ROUNDS or (not op.floating and any(last.floating for _, last in op.reads))


def _filled(value: Any, tensors: dict[int, Tensor], precise: Callable[[Any], Any]) -> Any:
    """The arguments of an operation, with the tensors; all others as `precise` makes them."""
    if isinstance(value, Ref):
        return precise(tensors[value.number])
    if isinstance(value, tuple | list):
        return type(value)([_filled(part, tensors, precise) for part in value])
    if isinstance(value, dict):
        return {name: _filled(part, tensors, precise) for name, part in value.items()}
    return precise(value)


def _as_it_is(value: Any) -> Any:
    return value


def _in_float64(value: Any) -> Any:
    """A tensor, or an argument, in the place of one in float32."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return torch.float64 if value is torch.float32 else value

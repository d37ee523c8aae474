"""A tape of one update: every operation that torch dispatches, what it read and what it wrote.

No activation is kept. The tape keeps the operations with their arguments as numbers (`Ref`), a copy of what came from
outside or was drawn (`values`), and the outputs of the last layers (`fronts`): all else can be computed again from these.
"""

import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DRAWS = torch.Tag.nondeterministic_seeded
PICKS = {"index", "index_select", "gather", "take", "embedding", "take_along_dim"}  # (values, which of them, ...)
COPIED = 1 << 26  # elements of a source that are copied at the most; a larger one is kept by reference
REPEATED = ("aten", "prims")  # whose operations do the same each time, and for this process alone
PARAMETERS = ("trained", "frozen", "unowned")
MUCH = 16  # times smaller than the layer before: not a layer that follows it
SAMPLED = 64  # elements that are kept of an average
OVERWRITES = {"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_", "log_normal_"}


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor in the arguments of an operation."""

    number: int


@dataclass(eq=False)
class Op:
    """One operation, or one source: then `func` is None and `kind` says which.

    `content` are the sources that its value is made of, as bits; `choice` those that decided which part of them. `uses` are the
    trained parameters that it depends on. `fronts` are the layers that it descends from, with none in between.
    """

    index: int
    name: str
    kind: str  # "op", "drawn" or a source's: "data", "outside", "trained", "frozen", "unowned", "gradient", "state"
    func: Any = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    needs: tuple["Op", ...] = ()
    reads: tuple[tuple[int, "Op"], ...] = ()  # (number of the tensor, the operation that wrote to it last)
    outs: tuple[int | None, ...] = ()
    writes: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    content: int = 0
    choice: int = 0
    uses: int = 0
    meets: bool = False  # reads what was made of parameters alone
    fronts: frozenset["Op"] = frozenset()
    changes: frozenset[str] = frozenset()  # the kinds of sources that it writes over
    with_grad: bool = True
    load: int = -1  # of a source that a loader returned: the number of its batch

    @property
    def result(self) -> int:
        """The number of its first output, or of what it wrote to."""
        return next(number for number in (*self.outs, *self.writes) if number is not None)

    @property
    def floating(self) -> bool:
        return self.dtype is not None and self.dtype.is_floating_point

    @property
    def trained(self) -> bool:
        """Whether its value depends on trained parameters."""
        return self.uses != 0

    @property
    def is_source(self) -> bool:
        return self.func is None or self.kind == "drawn"

    def __repr__(self) -> str:
        return f"{self.index}:{self.name}{list(self.shape)}"


@dataclass
class Write:
    """Some numbers of a tensor that has the shape of a parameter, and was made with parameters and with what stood there."""

    op: Op
    place: int  # the number of the tensor's source: where it stood
    shape: torch.Size
    before: Tensor
    after: Tensor


class NotRecorded(Exception):
    """A value that cannot be computed again from what the tape kept. It may be right."""

    def __init__(self, why: str):
        super().__init__(f"the doctor cannot compute it again, as {why}; it may be right")


class Tape(TorchDispatchMode):
    """Records while it is entered. `trained`: the parameters of the optimizers."""

    supports_higher_order_operators = True  # which end the recording, and not the script

    def __init__(self, trained: Iterable[Tensor]):
        super().__init__()
        self.ops: list[Op] = []
        self.values: dict[int, Tensor] = {}  # of sources and fronts, by the number of the tensor
        self.roots: list[Op | None] = []  # what was differentiated
        self.failure: Exception | None = None  # of the tape's, after which nothing is recorded
        self._process = os.getpid()
        self.paused = 0  # by how many; nothing is recorded then
        self.samples: dict[int, Tensor] = {}  # of what became an average: its first numbers
        self.unowned: list[Tensor] = []  # parameters that want a gradient, and that this optimizer does not have
        self.writes: list[Write] = []  # to what is outside, with what came from trained parameters
        trained = list(trained)
        self._trained = {_key(parameter): bit for bit, parameter in enumerate(trained)}
        self.wanted = sum(1 << bit for bit, parameter in enumerate(trained) if parameter.requires_grad)  # bits
        self._shapes = {parameter.shape for parameter in trained}
        self._kinds: dict[int, str] = {}  # by storage
        self._loads: dict[int, int] = {}  # by storage
        self._numbers: dict[int, tuple[int, weakref.ref]] = {}  # by id(tensor)
        self._makers: dict[int, Op] = {}  # by the number of the tensor
        self._writers: dict[int, Op] = {}  # by storage
        self._origins: dict[int, Op] = {}  # the source that stood in a storage
        self._storages: dict[int, StorageWeakRef] = {}  # held, so that no address is used twice
        self._held: dict[Op, Tensor] = {}  # the fronts' values
        self._asked: set[Op] = set()  # fronts of what was differentiated, which is to be computed again from them
        self._next = 0

    # ---- recording

    def known(self, tensors: Iterable[Tensor], kind: str, load: int = -1) -> None:
        """Tells what these tensors are: "data" of the batch `load`, "drawn", "gradient" or "state"."""
        for tensor in tensors:
            key = self._storage(tensor)
            self._kinds[key], self._loads[key] = kind, load
            self._writers.pop(key, None)  # whatever wrote to it was not recorded
            self._origins.pop(key, None)
            if (known := self._numbers.get(id(tensor))) is not None:
                self._makers.pop(known[0], None)

    def root(self, tensor: Tensor) -> None:
        """Notes that this is differentiated now."""
        self.roots.append(root := self.op_of(tensor))
        self._asked |= root.fronts if root is not None else set()

    def origin(self, tensor: Tensor) -> Op | None:
        """The source that stood where this tensor lies."""
        return self._origins.get(_key(tensor))

    def op_of(self, tensor: Tensor) -> Op | None:
        """The operation that wrote to this tensor last."""
        known = self._numbers.get(id(tensor))
        maker = self._makers.get(known[0]) if known is not None and known[1]() is tensor else None
        writer = self._writers.get(_key(tensor))
        return maker if writer is None or (maker is not None and maker.index > writer.index) else writer

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or os.getpid() != self._process:  # a worker that was forked while this records
            return func(*args, **kwargs)
        before: Any = None
        try:
            tensors = tensors_in((args, kwargs))
            written = list(_written(func, args, kwargs))
            before = self._reads(tensors, written), self._numbered((args, kwargs))
            for tensor in written:  # a layer's output that is written over
                if (front := self._writers.get(_key(tensor))) in self._held and front is not None:
                    self._held[front] = self._held[front].clone()
        except Exception as error:  # never the script's: the operation itself is not in here
            self._fail(error)
        result = func(*args, **kwargs)
        if before is not None and self.failure is None:
            try:
                self._append(func, before[1], before[0], tensors, written, tensors_in(result))
            except Exception as error:
                self._fail(error)
        return result

    def _fail(self, error: Exception) -> None:
        """Records nothing more."""
        self.failure = error
        self.paused += 1

    def _append(self, func: Any, arguments: Any, reads: tuple, tensors: list, written: list, made: list) -> None:
        first = made[0] if made else written[0] if written else None
        name = func._schema.name.split("::")[-1]
        op = Op(len(self.ops), name, "op", func, arguments[0], arguments[1], reads=reads, with_grad=torch.is_grad_enabled())
        op.needs = tuple({o.index: o for number, last in reads for o in (last, self._makers[number])}.values())
        if first is not None:
            op.shape, op.dtype = tuple(first.shape), first.dtype
        whole = [self._number(tensor) for tensor in written if name in OVERWRITES and _is_all_of_its_storage(tensor)]
        self._follow(op, tuple(read for read in reads if read[0] not in whole), name)
        if draws(func, *arguments):
            self._draw(op, made, written)
        self.ops.append(op)
        op.writes = tuple(self._number(tensor) for tensor in written)
        op.outs = tuple(self._new(tensor, op, tensors) for tensor in made)
        before = {_key(tensor) for tensor in tensors}
        for tensor in written:
            self._writers[self._storage(tensor)] = op
        for tensor in made:
            if _key(tensor) not in before:
                self._writers[self._storage(tensor)] = op
        op.changes = frozenset(self._origins[key].kind for key in map(_key, written) if key in self._origins)
        if op.trained and self._is_of_averages(op):
            self._note_writes(op, written or made)
        elif op.meets and first is not None and first.numel() > 1:  # a loss with a penalty is no layer's output
            self._hold(op, first)

    def _is_of_averages(self, op: Op) -> bool:
        """Whether it was made of parameters and what has their shapes alone; of no draws and of no data."""
        made_of = self.sources(op.content)
        return not op.fronts and all(one.kind == "outside" and torch.Size(one.shape) in self._shapes for one in made_of)

    def _note_writes(self, op: Op, results: list[Tensor]) -> None:
        for result in results:
            if result.shape not in self._shapes or not result.is_floating_point():
                continue
            stood = self._origins.get(_key(result))
            if stood is None:  # a new tensor, made of an old one
                olds = [o for o in self.upstream(op) if o.kind == "outside" and o.shape == tuple(result.shape)]
                stood = olds[0] if len(olds) == 1 else None
            if stood is not None and stood.kind not in ("trained", "gradient", "state"):
                before = self.samples.get(stood.index)
                before = sample(self.values[stood.index]) if before is None else before
                self.writes.append(Write(op, stood.index, result.shape, before, sample(result)))

    def _follow(self, op: Op, reads: tuple[tuple[int, Op], ...], name: str) -> None:
        """What the value depends on."""
        of_content = [last for _, last in reads]
        if name in PICKS and len(reads) > 1 and not reads[0][1].trained:
            table, *which = of_content
            for last in which:
                op.choice |= last.choice
                if table.content == 0:  # a schedule's numbers: the value tells which was picked
                    op.content |= last.content
                else:
                    op.choice |= last.content
            of_content = [table]
        for last in of_content:
            op.content |= last.content
            op.choice |= last.choice
        parameters = [last for _, last in reads if last.kind in PARAMETERS or (last.meets and not last.content)]
        op.meets = bool(parameters)
        for _, last in reads:
            op.uses |= last.uses
        op.fronts = frozenset().union(*(last.fronts for _, last in reads))

    def _draw(self, op: Op, made: list, written: list) -> None:
        """A draw is a source, unless it changes what it reads, as dropout does: then what came out is kept."""
        value = (made or written)[0]
        if op.content and not (written or op.name.endswith("_like")):
            if not op.fronts:
                self._held[op] = value
        elif not op.trained:
            op.kind, op.content, op.choice = "drawn", 1 << op.index, 0
            self.values[op.index] = value.detach().clone()

    def _hold(self, op: Op, value: Tensor) -> None:
        """Keeps the output of a layer, and forgets those of the layers before it."""
        if not op.content or not op.floating:
            return
        size = value.numel()
        kept = {earlier for earlier in op.fronts if earlier in self._held and self._held[earlier].numel() > MUCH * size}
        for earlier in op.fronts - kept - self._asked:  # figures of a loss and of weights are no layer
            if earlier.trained or not op.trained:  # what an encoder gives to the network is needed to make its input again
                self._held.pop(earlier, None)
        op.fronts = frozenset({op} | kept)  # a loss that a parameter weighs does not hide the output
        self._held[op] = value.detach()

    def _reads(self, tensors: list[Tensor], written: list[Tensor]) -> tuple[tuple[int, Op], ...]:
        targets, reads = {id(tensor) for tensor in written}, {}
        for tensor in sorted(tensors, key=lambda tensor: id(tensor) in targets):  # what is written to comes last
            number = self._number(tensor)
            maker = self._makers.get(number) or self._source(tensor, number, id(tensor) in targets)
            writer = self._writers.get(_key(tensor), maker)
            reads[number] = writer if writer.index > maker.index else maker  # a view is younger than what it shows
        return tuple((self._number(tensor), reads[self._number(tensor)]) for tensor in tensors)

    def _source(self, tensor: Tensor, number: int, is_written: bool) -> Op:
        key = self._storage(tensor)
        kind = self._kind(tensor, key)
        op = Op(len(self.ops), kind, kind, outs=(number,), shape=tuple(tensor.shape), dtype=tensor.dtype)
        if kind == "trained":
            op.uses, op.meets = 1 << self._trained[key], True
        elif kind in ("frozen", "unowned"):
            op.meets = True
            self.unowned += [tensor] if kind == "unowned" else []
        elif kind in ("data", "outside", "drawn"):
            is_table = kind == "outside" and tensor.is_floating_point() and tensor.numel() == max((1, *tensor.shape))
            op.content = 0 if is_table else 1 << op.index
        op.load = self._loads.get(key, -1)
        self._keep(op, tensor, is_written)
        self.ops.append(op)
        self._makers[number] = op
        self._writers.setdefault(key, op)
        self._origins.setdefault(key, op)
        return op

    def _keep(self, op: Op, tensor: Tensor, is_written: bool) -> None:
        tensor = tensor.detach()
        if tensor.shape in self._shapes and op.kind in ("outside", "frozen", "unowned"):  # an average, perhaps
            self.samples[op.index] = sample(tensor)
        if is_written and tensor.shape in self._shapes:
            return  # some numbers are enough
        if op.kind not in ("data", "outside", "drawn"):
            self.values[op.index] = tensor
        else:
            self.values[op.index] = tensor.clone() if tensor.numel() <= COPIED else tensor

    def _kind(self, tensor: Tensor, key: int) -> str:
        if key in self._trained:
            return "trained"
        if key in self._kinds:
            return self._kinds[key]
        if not isinstance(tensor, torch.nn.Parameter):
            return "outside"
        return "unowned" if tensor.requires_grad else "frozen"  # unowned: to be trained, but no optimizer has it

    def _numbered(self, value: Any) -> Any:
        """The arguments of an operation, with a Ref in the place of each tensor."""
        if isinstance(value, Tensor):
            return Ref(self._number(value))
        if isinstance(value, tuple | list):
            return type(value)([self._numbered(part) for part in value])
        return {name: self._numbered(part) for name, part in value.items()} if isinstance(value, dict) else value

    def _number(self, tensor: Tensor) -> int:
        known = self._numbers.get(id(tensor))
        if known is not None and known[1]() is tensor:
            return known[0]
        self._next += 1
        self._numbers[id(tensor)] = self._next, weakref.ref(tensor)
        return self._next

    def _new(self, tensor: Tensor, op: Op, inputs: list[Tensor]) -> int:
        number = self._number(tensor)
        if number not in self._makers or all(tensor is not each for each in inputs):
            self._makers[number] = op
        return number

    def _storage(self, tensor: Tensor) -> int:
        key = _key(tensor)
        if key not in self._storages and tensor.layout == torch.strided:
            self._storages[key] = StorageWeakRef(tensor.untyped_storage())
        return key

    # ---- reading

    def upstream(self, op: Op, stop: Iterable[Op] = ()) -> list[Op]:
        """All operations that the value needs, the oldest first, not beyond those of `stop`."""
        seen: dict[int, Op] = {}
        todo, ends = [op], {end.index for end in stop}
        while todo:
            op = todo.pop()
            if op.index not in seen:
                seen[op.index] = op
                if op.index not in ends and not op.is_source:
                    todo += op.needs
        return [seen[index] for index in sorted(seen)]

    def ends(self, op: Op) -> list[Op]:
        """Where computing the value of `op` again begins: at sources, and at the layers whose values are kept."""
        return [each for each in self.upstream(op, self._held) if each.is_source or each in self._held]

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
            exact: in float64 what the script did in float32, from the values that it had.

        Raises:
            NotRecorded: something on the way was not kept, and cannot be repeated.
        """
        given = ({} if anew else self._held) | (instead or {})
        tensors: dict[int, Tensor] = {}
        precise = _in_float64 if exact else _as_it_is
        for each in self.upstream(op, given):
            with torch.set_grad_enabled(grad and (each.with_grad or through)):
                if each in given:
                    own = given[each] if instead and each in instead else given[each].detach().clone()
                    tensors[each.result] = precise(own)
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
                    again = tree_map(
                        lambda x: tensors[x.number] if isinstance(x, Ref) else precise(x), (each.args, each.kwargs)
                    )
                    result = each.func(*again[0], **again[1])
                    made = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
                    tensors.update({number: tensor for number, tensor in zip(each.outs, made) if number is not None})
        return tensors[op.result]


def _as_it_is(value: Any) -> Any:
    return value


def _in_float64(value: Any) -> Any:
    """A tensor, or an argument, in the place of one in float32."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return torch.float64 if value is torch.float32 else value


def tensors_in(value: Any) -> list[Tensor]:
    """All in what an operation takes or gives. (torch's own walk through trees takes longer than most operations.)"""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def sample(tensor: Tensor) -> Tensor:
    """Returns some numbers, spread evenly, in float64: at most SAMPLED."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].double().clone()


def draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether the operation draws random numbers. Attention without dropout does not, though torch marks it."""
    if DRAWS not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value))
    return True


def _key(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse ones have none
        return -id(tensor)


def _is_all_of_its_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """The arguments that an operation writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)

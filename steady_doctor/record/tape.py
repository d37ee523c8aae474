"""A tape of one update: every operation that torch dispatches, what it read and what it wrote.

No activation is kept. The tape keeps the operations with their arguments as numbers (`Ref`), a copy of what came from
outside or was drawn (`values`), and the outputs of the last layers (`held`): all else can be computed again from these
(`Replay`). Each operation of the script waits for what is done here.
"""

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from steady_doctor.record.ops import (
    PARAMETERS,
    PICKS,
    Op,
    Ref,
    Traits,
    Write,
    draws,
    is_unwritten,
    of_shapes_alone,
    tensors_in,
    written_by,
)
from steady_doctor.record.replay import Replay
from steady_doctor.record.samples import sample

COPIED = 1 << 26  # elements of a source that are copied at the most; a larger one is kept by reference
LISTED = 4096  # whole numbers that a list has at the most
MUCH = 16  # times smaller than the layer before: not a layer that follows it
OVERWRITES = {"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_", "log_normal_"}


class Tape(Replay, TorchDispatchMode):
    """Records while it is entered. `trained`: what an optimizer trains; `copies`: of it, in its order, which are as good."""

    supports_higher_order_operators = True  # which end the recording, and not the script

    def __init__(self, trained: Iterable[Tensor], copies: Iterable[Tensor] = ()):
        super().__init__()
        self.roots: list[Op | None] = []  # what was differentiated
        self.failure: Exception | None = None  # of the tape's, after which nothing is recorded
        self._process = os.getpid()
        self.paused = 0  # by how many; nothing is recorded then
        self.waits: Callable[[], bool] | None = None  # it begins with the first draw, or batch, where this holds
        self.over: Callable[[], bool] | None = None  # and is over before the next one where this does
        self.samples: dict[int, Tensor] = {}  # of what became an average: its first numbers
        self.unowned: list[Tensor] = []  # parameters that want a gradient, and that this optimizer does not have
        self.writes: list[Write] = []  # to what is outside, with what came from trained parameters
        trained = list(trained)
        # An optimizer is often given all of a module's parameters, with constants of a schedule and of a normalization.
        self._trained = {key_of(parameter): bit for bit, parameter in enumerate(trained) if parameter.requires_grad}
        self.wanted = sum(1 << bit for bit, parameter in enumerate(trained) if parameter.requires_grad)  # bits
        self._trained |= {key_of(copy): bit for bit, copy in enumerate(copies)}
        self._shapes = {parameter.shape for parameter in trained}
        self._kinds: dict[int, str] = {}  # by storage
        self._loads: dict[int, int] = {}  # by storage
        self._refs: dict[int, tuple[Ref, weakref.ref]] = {}  # by id(tensor)
        self._makers: dict[int, Op] = {}  # by the number of the tensor
        self._writers: dict[int, Op] = {}  # by storage
        self._origins: dict[int, Op] = {}  # the source that stood in a storage
        self._storages: dict[int, StorageWeakRef] = {}  # held, so that no address is used twice
        self._next = 0
        self._asked: set[Op] = set()  # fronts of what was differentiated, which is to be computed again from them

    def known(self, tensors: Iterable[Tensor], kind: str, load: int = -1) -> None:
        """Tells what these tensors are: "data" of the batch `load`, "drawn", "gradient", "asked" (of one that stands at no
        parameter) or "state"."""
        for tensor in tensors:
            key = self._storage(tensor)
            self._kinds[key], self._loads[key] = kind, load
            self._writers.pop(key, None)  # whatever wrote to it was not recorded
            self._origins.pop(key, None)
            if (known := self._refs.get(id(tensor))) is not None:
                self._makers.pop(known[0].number, None)

    def root(self, tensor: Tensor) -> None:
        """Notes that this is differentiated now."""
        self.roots.append(root := self.op_of(tensor))
        self._asked |= root.fronts if root is not None else set()

    def origin(self, tensor: Tensor) -> Op | None:
        """The source that stood where this tensor lies."""
        return self._origins.get(key_of(tensor))

    def op_of(self, tensor: Tensor) -> Op | None:
        """The operation that wrote to this tensor last."""
        known = self._refs.get(id(tensor))
        maker = self._makers.get(known[0].number) if known is not None and known[1]() is tensor else None
        writer = self._writers.get(key_of(tensor))
        return maker if writer is None or (maker is not None and maker.index > writer.index) else writer

    def whole(self, tensor: Tensor) -> Op | None:
        """The operation whose value is this tensor: a new one, where a part of it was written last."""
        last = self.op_of(tensor)
        if last is None or not last.writes or last.shape == tuple(tensor.shape):
            return last
        self.paused += 1
        with torch.no_grad():
            same = torch.ops.aten.alias.default(tensor)
        self.paused -= 1
        op, given, keys, written = self._call(torch.ops.aten.alias.default, (tensor,), {})
        self._append(op, given, keys, written, [same])
        return op

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or os.getpid() != self._process:  # a worker that was forked while this records
            return func(*args, **kwargs)
        if (self.waits or self.over) and Traits.of(func).draws:
            self.before_draw()
        if self.waits or self.paused:
            return func(*args, **kwargs)
        call: tuple[Op, list, set, list] | None = None
        try:
            call = self._call(func, args, kwargs)
        except Exception as error:  # never the script's: the operation itself is not in here
            self._fail(error)
        result = func(*args, **kwargs)
        if call is not None:
            try:
                self._append(*call, list(tensors_in(result)))
            except Exception as error:
                self._fail(error)
        return result

    def before_draw(self) -> None:
        """Before something is drawn or loaded: begins where it waits for this update, ends where that is of the next one."""
        if self.waits and self.waits():
            self.waits = None
        elif self.over and self.over():
            self.over = None
            self.paused += 1

    def _fail(self, error: Exception) -> None:
        """Records nothing more."""
        self.failure = error
        self.paused += 1

    def _call(self, func: Any, args: tuple, kwargs: dict) -> tuple[Op, list[tuple[Tensor, int]], set[int], list[Tensor]]:
        """Returns the operation with what it reads, its tensors with their numbers, where these lie, and those it writes to."""
        given: list[tuple[Tensor, int]] = []
        traits = Traits.of(func)
        op = Op(-1, traits.name, "op", func, self._numbered(args, given), self._numbered(kwargs, given) if kwargs else kwargs)
        op.with_grad = torch.is_grad_enabled()
        written = written_by(traits, args, kwargs) if traits.writes else []
        if (
            not traits.draws and traits.name not in OVERWRITES
        ):  # what stands there was written without an operation, as by Sobol's
            self.known([each for each in written if (last := self.op_of(each)) and is_unwritten(last.name)], "outside")
        targets = {id(tensor) for tensor in written}
        reads, needs, keys = {}, {}, set()
        for tensor, number in sorted(given, key=lambda one: id(one[0]) in targets) if written else given:  # targets come last
            keys.add(key := key_of(tensor))
            maker = self._makers.get(number) or self._source(tensor, number, key, id(tensor) in targets)
            writer = self._writers.get(key, maker)
            last = writer if writer.index > maker.index else maker  # a view is younger than what it shows
            needs[last] = needs[maker] = None
            is_parameter = maker.kind in PARAMETERS and isinstance(tensor, torch.nn.Parameter)
            reads[number] = maker if is_parameter else last  # it is one, whatever was written to it
            if written and id(tensor) in targets and writer in self.held:  # a layer's output that is written over
                self.held[writer] = self.held[writer].clone()
        op.reads = tuple(reads.items()) if len(reads) == len(given) and not written else tuple((n, reads[n]) for _, n in given)
        op.needs = tuple(needs)
        return op, given, keys, written

    def _append(self, op: Op, given: list, before: set[int], written: list[Tensor], made: list[Tensor]) -> None:
        first = made[0] if made else written[0] if written else None
        op.index = len(self.ops)
        if first is not None:
            op.shape, op.dtype = tuple(first.shape), first.dtype
        reads = op.reads
        if written and op.name in OVERWRITES:
            whole = [self._ref(tensor).number for tensor in written if _is_all_of_its_storage(tensor)]
            reads = tuple(read for read in reads if read[0] not in whole)
        self._follow(op, reads)
        if draws(op.func, op.args, op.kwargs):
            self._draw(op, made, written)
        self.ops.append(op)
        if written:
            op.writes = tuple(self._ref(tensor).number for tensor in written)
            keys = [self._storage(tensor) for tensor in written]
            self._writers |= dict.fromkeys(keys, op)
            op.changes = frozenset(self._origins[key].kind for key in keys if key in self._origins)
        op.outs = tuple(self._new(tensor, op, given) for tensor in made)
        for tensor in made:
            if (key := self._storage(tensor)) not in before:
                self._writers[key] = op
        if op.uses and self.is_of_averages(op):
            self._note_writes(op, written or made)
        elif op.meets and first is not None and first.numel() > 1:  # a loss with a penalty is no layer's output
            self._hold(op, first)

    def is_of_averages(self, op: Op) -> bool:
        """Whether it was made of parameters, of what has their shapes, and of single numbers, such as a decay; of no draws."""
        made_of = [one for one in self.sources(op.content) if one.kind != "outside" or one.shape]
        return not op.behind and all(one.kind == "outside" and torch.Size(one.shape) in self._shapes for one in made_of)

    def _note_writes(self, op: Op, results: list[Tensor]) -> None:
        for result in results:
            if result.shape not in self._shapes or not result.is_floating_point():
                continue
            stood = self._origins.get(key_of(result))
            if stood is None:  # a new tensor, made of an old one
                olds = [
                    o
                    for o in self.upstream(op)
                    if o.kind in ("outside", "frozen", "unowned") and o.shape == tuple(result.shape)
                ]
                stood = olds[0] if len(olds) == 1 else None
            if stood is not None and stood.kind not in ("trained", "gradient", "state"):
                before = self.samples.get(stood.index)
                before = sample(self.values[stood.index]) if before is None else before
                self.writes.append(Write(op, stood.index, result.shape, before, sample(result)))

    def _follow(self, op: Op, reads: tuple[tuple[int, Op], ...]) -> None:
        """What the value depends on. What is written to weights, in the shape of one, depends on none of them."""
        if is_unwritten(op.name) or (not op.with_grad and op.name.endswith("_like") and reads[0][1].kind in PARAMETERS):
            return
        of_content = [last for _, last in reads]
        for last in of_content:
            if last.is_layer or last.behind:
                op.behind = op.behind | last.fronts if op.behind else last.fronts
            op.uses |= last.uses
            op.meets |= last.meets and not last.content and not _is_of_samples(last, op)
        if op.name in PICKS and len(reads) > 1 and not reads[0][1].uses:
            table, *which = of_content
            for last in which:
                op.choice |= last.choice
                op.rows |= last.rows
                if table.content == 0:  # a schedule's numbers: the value tells which was picked
                    op.content |= last.content
                else:
                    op.choice |= last.content
            op.content |= table.content
            op.choice |= table.choice
            return
        for last in of_content:
            op.content |= last.content
            op.choice |= last.choice
            op.rows |= last.rows

    def _draw(self, op: Op, made: list, written: list) -> None:
        """A draw is a source, unless it changes what it reads, as dropout does: then what came out is kept. Numbers that are
        drawn by weights, as timesteps by their losses, are a draw."""
        value = (made or written)[0]
        is_own = op.name == "multinomial" or op.name.endswith("_like") or of_shapes_alone(op)
        if op.content and not (written or is_own):
            if not op.behind:
                self.held[op] = value
        elif not op.uses:
            op.kind, op.content, op.choice = "drawn", 1 << op.index, 0
            self.values[op.index] = value.detach().clone()

    def _hold(self, op: Op, value: Tensor) -> None:
        """Keeps the output of a layer, and forgets those of the layers before it."""
        if not op.content or not op.floating:
            return
        size = value.numel()
        kept = {earlier for earlier in op.behind if earlier in self.held and self.held[earlier].numel() > MUCH * size}
        for earlier in op.behind - kept - self._asked:  # figures of a loss and of weights are no layer
            if earlier.uses or not op.uses:  # what an encoder gives to the network is needed to make its input again
                self.held.pop(earlier, None)
        op.behind, op.is_layer = frozenset(kept), True  # a loss that a parameter weighs does not hide the output
        self.held[op] = value.detach()

    def _source(self, tensor: Tensor, number: int, key: int, is_written: bool) -> Op:
        self._storage(tensor)
        kind = self._kind(tensor, key)
        op = Op(len(self.ops), kind, kind, outs=(number,), shape=tuple(tensor.shape), dtype=tensor.dtype)
        if kind == "trained":
            op.uses, op.meets = 1 << self._trained[key], True
        elif kind in ("frozen", "unowned"):
            op.meets = True
            self.unowned += [tensor] if kind == "unowned" else []
        elif kind in ("data", "outside", "drawn"):
            is_row = kind == "outside" and tensor.is_floating_point() and tensor.numel() == max((1, *tensor.shape))
            op.content, op.rows = (0, 1 << op.index) if is_row else (self._same(op, tensor) or 1 << op.index, 0)
        op.load = self._loads.get(key, -1)
        self._keep(op, tensor, is_written)
        self.ops.append(op)
        self._makers[number] = op
        self._writers.setdefault(key, op)
        self._origins.setdefault(key, op)
        return op

    def _same(self, op: Op, tensor: Tensor) -> int:
        """The bit of an earlier source of whole numbers with the same values: a list that picks from several tables becomes a
        tensor for each."""
        if op.kind != "outside" or tensor.is_floating_point() or not 1 < tensor.numel() <= LISTED:
            return 0
        earlier = (one for one in self.ops if one.kind == "outside" and one.shape == op.shape and one.dtype == op.dtype)
        known = ((one, self.values.get(one.index)) for one in earlier)
        return next((one.content for one, value in known if value is not None and torch.equal(value, tensor)), 0)

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

    def _numbered(self, value: Any, found: list[tuple[Tensor, int]]) -> Any:
        """The arguments of an operation, with a Ref in the place of each tensor, which are added to `found`."""
        if isinstance(value, Tensor):
            ref = self._ref(value)
            found.append((value, ref.number))
            return ref
        if isinstance(value, tuple | list):
            return type(value)([self._numbered(part, found) for part in value])
        return {name: self._numbered(part, found) for name, part in value.items()} if isinstance(value, dict) else value

    def _ref(self, tensor: Tensor) -> Ref:
        known = self._refs.get(id(tensor))
        if known is not None and known[1]() is tensor:
            return known[0]
        self._next += 1
        self._refs[id(tensor)] = (ref := Ref(self._next)), weakref.ref(tensor)
        return ref

    def _new(self, tensor: Tensor, op: Op, given: list[tuple[Tensor, int]]) -> int:
        number = self._ref(tensor).number
        if number not in self._makers or all(tensor is not each for each, _ in given):
            self._makers[number] = op
        return number

    def _storage(self, tensor: Tensor) -> int:
        key = key_of(tensor)
        if key not in self._storages and tensor.layout == torch.strided:
            self._storages[key] = StorageWeakRef(tensor.untyped_storage())
        return key


def key_of(tensor: Tensor) -> int:
    """The address of its storage, or what stands for it."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse ones have none
        return -id(tensor)


def _is_of_samples(last: Op, op: Op) -> bool:
    """Whether it is one number for each sample, made of numbers that came as a row, such as noise levels: no weight."""
    first = op.shape[0] if op.shape else 0
    return bool(last.rows) and first > 1 and last.shape[:1] == (first,) and torch.Size(last.shape).numel() == first


def _is_all_of_its_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()

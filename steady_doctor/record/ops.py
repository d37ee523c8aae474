"""What a tape is made of: operations, and the sources that they read."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PICKS = {"index", "index_select", "gather", "take", "embedding", "take_along_dim"}  # (values, which of them, ...)
REPLACES = {"where", "masked_fill", "masked_fill_", "index_put_", "index_fill_"}
PARAMETERS = ("trained", "frozen", "unowned")


class Ref:
    """Stands for a tensor in the arguments of an operation."""

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number


@dataclass(eq=False, slots=True)
class Op:
    """One operation, or one source: then `func` is None and `kind` says which.

    `content` are the sources that its value is made of, as bits; `choice` those that decided which part of them. `rows` are
    rows of numbers from outside, if they were not picked from: constants, or levels of a batch. `uses` are the trained
    parameters that it depends on. `behind` are the layers that it descends from, with none in between.
    """

    index: int
    name: str
    kind: str  # "op", "drawn" or a source's: "data", "outside", "trained", "frozen", "unowned", "gradient", "state"
    func: Any = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    needs: tuple["Op", ...] = ()
    reads: tuple[tuple[int, "Op"], ...] = ()  # (number of the tensor, the operation that wrote to it last)
    outs: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    content: int = 0
    choice: int = 0
    rows: int = 0
    uses: int = 0
    meets: bool = False  # reads what was made of parameters alone
    behind: frozenset["Op"] = frozenset()
    is_layer: bool = False  # whether it is a layer itself
    changes: frozenset[str] = frozenset()  # the kinds of sources that it writes over
    with_grad: bool = True
    load: int = -1  # of a source that a loader returned: the number of its batch

    @property
    def result(self) -> int:
        """The number of its first output, or of what it wrote to."""
        return (self.outs or self.writes)[0]

    @property
    def fronts(self) -> frozenset["Op"]:
        """The layers that a reader descends from. (One that named itself would wait for Python's garbage collector.)"""
        return self.behind | {self} if self.is_layer else self.behind

    @property
    def made_of(self) -> int:
        return self.content | self.choice | self.rows

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


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of a function of torch's, whatever it is called with. Read once, as that takes longer than an operation."""

    name: str
    writes: tuple[tuple[int, str], ...]  # place and name of each argument that it writes to
    draws: bool  # random numbers; attention without dropout does not, though torch marks it
    dropout: tuple[int, Any] | None  # the place of its share of dropout, and the default

    @staticmethod
    @functools.cache
    def of(func: Any) -> "Traits":
        """Raises AttributeError for operations of a higher order."""
        places = list(enumerate(func._schema.arguments))
        writes = tuple((at, x.name) for at, x in places if x.alias_info is not None and x.alias_info.is_write)
        dropout = next(((at, x.default_value) for at, x in places if x.name == "dropout_p"), None)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        return Traits(func._schema.name.split("::")[-1], writes, draws, dropout)


def draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether the operation draws random numbers with these arguments."""
    known = Traits.of(func)
    if not known.draws or known.dropout is None:
        return known.draws
    place, default = known.dropout
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", default))


def is_unwritten(name: str) -> bool:
    """Whether an operation of this name gives memory as it is: what stands there is whatever was computed last."""
    return name.startswith(("empty", "new_empty"))


def of_shapes_alone(op: Op, within: int = 4) -> bool:
    """Whether what it reads was made, `within` so many operations, of shapes alone: of zeros in the shape of labels."""
    made = (
        last.name.startswith("new_") or last.name.endswith("_like") or of_shapes_alone(last, within - 1) for _, last in op.reads
    )
    return bool(op.reads) and within > 0 and all(made)


def written_by(traits: Traits, args: tuple, kwargs: dict) -> list[Tensor]:
    """The arguments that such an operation writes to."""
    return [tensor for at, name in traits.writes for tensor in tensors_in(args[at] if at < len(args) else kwargs.get(name))]


def tensors_in(value: Any) -> Iterator[Tensor] | tuple[Tensor, ...]:
    """All in what an operation takes or gives. (torch's own walk through trees takes longer than most operations.)"""
    if isinstance(value, Tensor):
        return (value,)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return (tensor for part in parts for tensor in tensors_in(part))

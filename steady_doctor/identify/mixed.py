"""What the network is given, and the mixture of an image and noise in it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steady_doctor.record.ops import PARAMETERS, Op
from steady_doctor.record.tape import Tape

LINEAR = 1e-3  # of the values: what may remain of a linear relation in float32, after a dozen operations


@dataclass
class Given:
    """One value that meets parameters and does not depend on them."""

    at: Op  # the operation where they meet
    value: Op


@dataclass
class Mixture:
    """Tensors are [B, ...] or [B]; a and b in float64."""

    input: Op  # the value that the network gets, or the part of it that is the mixture
    value: Tensor
    noise: Op
    noise_value: Tensor
    draws: list[Op]  # the sources of the noise
    b: Tensor
    where: Tensor  # 1 where there is noise, and everywhere if no sample has it in parts alone; else 0
    clean: Op | None = None
    clean_value: Tensor | None = None
    a: Tensor | None = None
    offset: Tensor | None = None  # a constant beside the two, of each sample
    levels: tuple[Op, ...] = ()  # the sources that decide a and b
    told: tuple[Tensor, ...] = ()  # [B] each: numbers on the way from the level to the network, the last first
    told_rounded: bool = False  # they were in half precision
    embedding: Tensor | None = None  # [B, ...]: the value that meets parameters there
    extra: tuple[Op, ...] = ()  # other draws that are in the input
    only_noise: bool = False
    index_range: tuple[int, int] | None = None  # of the draw that it is
    index: Tensor | None = None  # [B]: the row of a table that the shares come from
    table: Tensor | None = None  # [3, rows looked at]: row, a, b; some rows follow each other
    growth: Tensor | None = None  # [B]: of the logarithm of (a / b)^2, with a level that is drawn as a number of its own
    told_within: bool = False  # the network may get the level in one value with the mixture, or in numbers from elsewhere
    told_otherwise: bool = False  # a layer gets rows that are made of nothing, or of a draw that decides nothing of the mixture
    behind_frozen: bool = False  # a frozen layer stands between the mixture and the first trained one
    given: Op | None = None  # what the network gets: the mixture itself, or what was made of it

    @property
    def image(self) -> int:
        """The sources of the clean image, as bits."""
        return 0 if self.clean is None else self.clean.content

    @property
    def size(self) -> int:
        return self.value.shape[0]


class Nothing(Exception):
    """No mixture: the text is a code."""


def given_to_network(tape: Tape, forward: list[Op]) -> list[Given]:
    """All values that meet trained parameters, or what was made with them, and have nothing of these themselves.

    Before the last layer: what meets the output is of the loss.
    """
    inside: set[Op] = set()
    for op in reversed(forward):
        if op in inside or _is_layer(op):
            inside.add(op)
            inside.update(op.needs)
    found = []
    for op in forward:
        if op.trained and op in inside:
            some = [last for _, last in op.reads if last.content or last.rows]
            found += [Given(op, last) for last in some if not last.trained and last.kind != "frozen"]
    return found


def _is_layer(op: Op) -> bool:
    """Whether it reads parameters, or what was made of them alone, beside other values."""
    own = [last for _, last in op.reads if last.kind in PARAMETERS or (last.meets and not last.content)]
    return bool(own) and any(last.content for _, last in op.reads)


def beside(mixture: Mixture, given: list[Given]) -> list[Given]:
    """What the network is given besides the mixture."""
    noise = mixture.noise.content
    return [each for each in given if not each.value.content & noise and each.value is not mixture.input]


def numel(op: Op) -> int:
    return int(torch.Size(op.shape).numel())


def multiple(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns k [B] and the share [B] of y that remains, where y = k x for each sample."""
    y, x = (v.detach().double().flatten(1) for v in (y, x))
    k = (y * x).sum(1) / (x * x).sum(1).clamp(min=1e-30)
    return k, (y - k[:, None] * x).norm(dim=1) / y.norm(dim=1).clamp(min=1e-12)

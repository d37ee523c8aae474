"""The clean images of a pass: which rows they are, and what was done to them on the way. Figures alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steady_doctor.identify.mixed import Mixture
from steady_doctor.identify.rows import origins
from steady_doctor.record.loads import RESHAPES, WRAPS, wraps
from steady_doctor.record.ops import Op
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.session import Recorded
from steady_doctor.record.tape import Tape

COLORS = (3, 4)  # channels of an image, of which the order tells


@dataclass
class Batch:
    marks: Tensor  # [B, 3], float64: three figures of each image, which mirroring does not change
    rows: int = 0  # of the table that the images were picked from, or of the loader's dataset; 0: not known
    one_row: bool = False  # all images are made of one row of a source whose rows differ
    reshaped: bool = False  # pixels in rows of colors were taken for planes, without an exchange of axes
    colors_flipped: tuple[int, int] = (0, 0)  # images whose channels were put in reverse order, of how many
    wrapped: bool = False  # arithmetic in bytes left 0 to 255
    rougher: float | None = None  # of images of 3 channels: how much neighbors differ, over the same as if pixels were in rows
    encoded: bool = False  # a network that is not trained made them
    batch_norms: int = 0  # of that network, which normalize by the batch
    load: int = -1  # the number of the loader's batch that they are made of
    dataset: int = 0  # the id of the loader's dataset; 0: not known
    loads: int = 0  # batches that were loaded so far
    loaded_at: int = 0  # the update before the newest of these


def identify_batch(recorded: Recorded, mixture: Mixture) -> Batch | None:
    if mixture.clean is None or mixture.clean_value is None:
        return None
    tape, clean, value = recorded.tape, mixture.clean, mixture.clean_value
    flat = value.double().flatten(1)
    found = Batch(torch.stack([flat.mean(1), flat.std(1, correction=0), _product(value)], 1).cpu())
    found.encoded = bool(clean.fronts)
    found.loads, found.loaded_at = recorded.loads, recorded.loaded_at
    sources = list(tape.sources(clean.content | clean.choice))
    found.load = max((source.load for source in sources), default=-1)
    found.dataset = recorded.datasets.get(found.load, 0)
    found.rows = _table(sources, mixture.size)
    found.one_row = _is_one_row(tape, clean, sources)
    upstream = tape.upstream(clean)
    found.batch_norms = sum(map(_counts_batches, upstream))
    found.reshaped = any(op.name in RESHAPES and op.reads and _mixes(op.reads[0][1].shape, op.shape) for op in upstream)
    found.wrapped = any(_wraps(tape, op) for op in upstream)
    found.colors_flipped = _colors_flipped(upstream, mixture.size)
    for handling, size in recorded.handled:
        if hasattr(handling, "flipped"):
            found.reshaped |= any(_mixes(*shapes) for shapes in handling.reshaped)
            found.wrapped |= handling.wrapped
            flipped = sum(_is_of_colors(shape, axes) for shape, axes in handling.flipped)
            if flipped and size > 1:
                found.colors_flipped = max(found.colors_flipped, (flipped, size))
    if value.ndim == 4 and value.shape[1] == 3 and value.shape[-1] > 6 and not found.encoded:
        found.rougher = _rougher(value)
    return found


def _counts_batches(op: Op) -> bool:
    """Whether it is a batch norm in training mode with weights that get no gradient there, and statistics that it keeps."""
    if "batch_norm" not in op.name or op.args[5:6] != (True,) or op.args[1] is None or op.args[3] is None:
        return False
    kind = dict(op.reads)[op.args[1].number].kind
    return kind == "frozen" or (kind == "unowned" and not op.with_grad)


def _product(value: Tensor) -> Tensor:
    """Of each image with numbers that are the same mirrored: one-hot features all have one mean and spread."""
    numbers = torch.randn(value.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(value.device)
    return (value.double() * (numbers + numbers.flip(-1))).flatten(1).mean(1)


def _table(sources: list[Op], size: int) -> int:
    """Rows of what the images were picked from."""
    tables = [source.shape[0] for source in sources if source.kind == "outside" and len(source.shape) > 1]
    return max((rows for rows in tables if rows > size), default=0)


def _is_one_row(tape: Tape, clean: Op, sources: list[Op]) -> bool:
    for source in sources:
        if len(clean.shape) > 1 and clean.shape[0] > 1 and source.shape and source.shape[0] > 1:
            rows = origins(tape, clean, source)
            if rows is not None and bool((rows >= 0).all()):
                return bool((rows == rows[0]).all())
    return False


def _mixes(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """(..., H, W, C) -> (..., C, H, W) by a change of shape alone."""
    if len(before) != len(after) or len(before) < 3 or before[:-3] != after[:-3]:
        return False
    height, width, colors = before[-3:]
    return colors in COLORS and height not in COLORS and width not in COLORS and after[-3:] == (colors, height, width)


def _wraps(tape: Tape, op: Op) -> bool:
    if op.name not in WRAPS or op.floating or len(op.shape) < 3:
        return False
    try:
        numbers = {number: last for number, last in op.reads}
        args = [tape.value(numbers[x.number]) if hasattr(x, "number") else x for x in op.args[:2]]
    except (NotRecorded, RuntimeError, IndexError):
        return False
    return wraps(op.name, *args)


def _is_of_colors(shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    if len(shape) != 3 or len(axes) != 1:
        return False
    first, last = shape[0] in COLORS, shape[2] in COLORS
    return first != last and axes[0] == (0 if first else 2)


def _colors_flipped(upstream: list[Op], size: int) -> tuple[int, int]:
    """Where a part of a batch [B, C, H, W] alone is flipped."""
    for op in upstream:
        of_images = op.name == "flip" and len(op.shape) == 4 and op.shape[1] in COLORS
        if of_images and op.shape[0] < size and tuple(axis % 4 for axis in op.args[1]) == (1,):
            return op.shape[0], size
    return 0, 0


def _rougher(value: Tensor) -> float:
    def roughness(images: Tensor) -> float:
        return float(images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean())

    images = value.double()
    in_rows = images.reshape(len(images), *images.shape[2:], 3).permute(0, 3, 1, 2)
    return roughness(images) / max(roughness(in_rows), 1e-12)

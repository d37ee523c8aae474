"""The shares of image and noise at other levels than those that were drawn."""

import torch
from torch import Tensor

from steady_doctor.identify.mixed import Mixture, multiple, numel
from steady_doctor.record.ops import PICKS, Op
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.tape import Tape

LOOKED_AT = 33  # rows of a table of noise levels
NEAR = 1e-3  # of a level, by which it is moved


def find_table(tape: Tape, mixture: Mixture) -> None:
    """Where the shares are picked from a table of the script's by a whole number: that number, and the shares of all rows."""
    levels = sum(1 << source.index for source in mixture.levels)
    for op in tape.upstream(mixture.input):
        if op.name not in PICKS or (op.floating and op.reads[0][1].content):
            continue
        which = [last for _, last in op.reads[1:] if not last.floating and last.content & levels]
        if len(which) != 1 or numel(which[0]) != mixture.size or not op.reads[0][1].shape:
            continue
        index = tape.value(which[0])
        rows = max(op.reads[0][1].shape)
        mixture.index, mixture.index_range = index.flatten(), _range_of(which[0], tape)
        chosen = torch.linspace(0, rows - 1, LOOKED_AT).round().to(index)
        chosen = torch.cat([chosen, chosen[1:] - 1]).clamp(min=0).unique()  # with the row before each
        shares, places = [], torch.nonzero(mixture.where.flatten(1).any(1).cpu()).flatten()  # of which a mask leaves something
        try:
            for some in chosen.split(len(places)):
                at, instead = places[: len(some)].to(index.device), index.flatten().clone()
                instead[at] = some
                found = shares_at(tape, mixture, {which[0]: instead.reshape(index.shape)})
                shares.append([share[at.to(share.device)] for share in found])
        except NotRecorded:  # the row after it is picked, too
            return
        a, b = (torch.cat(list(one)) for one in zip(*shares))
        mixture.table = torch.stack([chosen.double().to(a.device), a, b])
        return


def find_growth(tape: Tape, mixture: Mixture) -> None:
    """From the shares at levels that are a little higher and lower."""
    if mixture.clean_value is None or len(mixture.levels) != 1:
        return
    level = mixture.levels[0]
    if not level.floating or level.kind != "drawn" or numel(level) != mixture.size:
        return
    value = tape.value(level)
    step = NEAR * value.abs().clamp(min=NEAR)
    ends = [shares_at(tape, mixture, {level: moved}, exact=True) for moved in (value.double() + step, value.double() - step)]
    (a, b), (other_a, other_b) = ends
    mixture.growth = 2 * (a * other_b / (b * other_a)).abs().log() / (2 * step.double().flatten().to(a.device))


def _range_of(op: Op, tape: Tape) -> tuple[int, int] | None:
    """The numbers from which a whole number was drawn, where nothing but its shape was changed since."""
    ways = [
        each for each in tape.upstream(op) if each.kind != "op" or each.name not in {"view", "_to_copy", "squeeze", "unsqueeze"}
    ]
    if len(ways) != 1 or ways[0].name != "randint":
        return None
    low_or_high, *more = (number for number in ways[0].args if isinstance(number, int))
    return (low_or_high, more[0]) if more else (0, low_or_high)


def shares_at(tape: Tape, mixture: Mixture, instead: dict[Op, Tensor], exact: bool = False) -> tuple[Tensor, Tensor]:
    """The shares of image and noise with other values instead; `exact`: in float64."""
    image = mixture.clean_value
    if image is not None and mixture.clean is not None:
        instead = something(mixture, image) | instead
        image = instead.get(mixture.clean, image).reshape(image.shape)
    zero = {mixture.noise: torch.zeros_like(tape.value(mixture.noise))}
    rest = tape.value(mixture.input, instead | zero, exact=exact) * mixture.where
    share = tape.value(mixture.input, instead, exact=exact) * mixture.where - rest
    b = multiple(share, mixture.noise_value * mixture.where)[0]
    if image is None:
        return torch.zeros_like(b), b
    return multiple(rest, image * mixture.where)[0], b


def something(mixture: Mixture, image: Tensor) -> dict[Op, Tensor]:
    """The images with 1 in place of those that are 0 wherever noise reaches them, if there are any."""
    is_nothing = ~(image * mixture.where).flatten(1).any(1)
    if mixture.clean is None or len(mixture.clean.outs) > 1 or not bool(is_nothing.any()):
        return {}
    other = image.masked_fill(is_nothing.reshape(-1, *[1] * (image.ndim - 1)), 1.0)
    return {mixture.clean: other.reshape(mixture.clean.shape)}

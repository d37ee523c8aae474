"""The network's own call in a pass: what the module got and gave, whatever it does itself before and after its layers."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from steady_doctor.identify.mixed import Mixture, numel
from steady_doctor.identify.target import Target, fitted
from steady_doctor.record.ops import Op
from steady_doctor.record.recorded import Call
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.tape import Tape

REST = 2e-2  # of what it got or gave, that is neither of this image nor of this noise


@dataclass
class Called:
    """It gets a clean + b noise in `channels`, and gives p clean + q noise where the loss is least."""

    low: float  # of the clean images
    high: float
    channels: tuple[int, int]
    told: dict[str, Tensor]  # numbers among its arguments; as all tensors here float64 [N], of the samples that count
    a: Tensor
    b: Tensor
    p: Tensor
    q: Tensor


def find_called(tape: Tape, mixture: Mixture, target: Target, calls: list[Call]) -> Called | None:
    """None where no call gave what the loss is of, or what it got and gave cannot be computed."""
    if target.wanted is None or mixture.clean_value is None:
        return None
    known = ((one.got, one.gave, one.told) for one in calls if one.got is not None and one.gave is not None)
    of_loss = (each for each in known if len(each[0].shape) > 1 and target.output in tape.upstream(each[1]))
    if (call := next(of_loss, None)) is None:
        return None
    op, gave_op, numbers = call
    got_op, channels = _noised_part(op, mixture)
    try:
        both = tape.value(got_op), tape.value(gave_op, {target.output: target.wanted}, exact=True)
        got, gave = (value.reshape(mixture.value.shape) for value in both)
        silent = tape.value(got_op, {mixture.noise: torch.zeros_like(tape.value(mixture.noise))}).reshape(got.shape)
    except (NotRecorded, RuntimeError):
        return None
    noised = replace(mixture, where=mixture.where * (got != silent).to(mixture.where))  # elsewhere what is known is written
    (ab, left, _), (pq, rest, known) = (fitted(noised, value, mixture.noise_value) for value in (got, gave))
    seen = (known.mean(1) > 0.02).cpu()
    if not bool(seen.any()) or float(torch.maximum(left, rest).cpu()[seen].max()) > REST:
        return None
    told = {name: one.double().cpu()[seen] for name, one in numbers.items() if len(one) == mixture.size}
    low, high = torch.aminmax(mixture.clean_value)
    return Called(float(low), float(high), channels, told, *(one.cpu()[seen] for one in (*ab.unbind(1), *pq.unbind(1))))


def _noised_part(got: Op, mixture: Mixture) -> tuple[Op, tuple[int, int]]:
    """What of it has the noise, where other images stand beside it, and the channels where it stands."""
    begin = 0
    for part in [last for _, last in got.reads] if got.name == "cat" and got.args[1:] == (1,) else ():
        if part.content & mixture.noise.content and numel(part) == mixture.value.numel():
            return part, (begin, begin + part.shape[1])
        begin += part.shape[1]
    return got, (0, got.shape[1])

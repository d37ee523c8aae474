"""The network's own call in a pass: what the module got and gave, whatever it does itself before and after its layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steady_doctor.identify.mixed import Mixture
from steady_doctor.identify.target import Target, fitted
from steady_doctor.record.ops import Op
from steady_doctor.record.recorded import Call
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.tape import Tape

REST = 2e-2  # of what it got or gave, that is neither of this image nor of this noise


@dataclass
class Called:
    """It gets a clean + b noise, and gives p clean + q noise where the loss is least. Tensors are float64 [N], of the samples
    that count; `told`: numbers among its arguments."""

    told: dict[str, Tensor]
    a: Tensor
    b: Tensor
    p: Tensor
    q: Tensor


def find_called(tape: Tape, mixture: Mixture, target: Target, calls: list[Call]) -> Called | None:
    """None where no call gave what the loss is of, or what it got and gave cannot be computed."""
    call = next((one for one in calls if one.gave is not None and target.output in tape.upstream(one.gave)), None)
    if call is None or call.got is None or call.gave is None or target.wanted is None or mixture.clean_value is None:
        return None
    try:
        both = tape.value(call.got), tape.value(call.gave, {target.output: target.wanted}, exact=True)
        got, gave = (value.reshape(mixture.value.shape) for value in both)
    except (NotRecorded, RuntimeError):
        return None
    (ab, left, _), (pq, rest, known) = (fitted(mixture, value, mixture.noise_value) for value in (got, gave))
    seen = (known.mean(1) > 0.02).cpu()
    if not bool(seen.any()) or float(torch.maximum(left, rest).cpu()[seen].max()) > REST:
        return None
    told = {name: one.double().cpu()[seen] for name, one in call.told.items() if len(one) == mixture.size}
    return Called(told, *(one.cpu()[seen] for one in (*ab.unbind(1), *pq.unbind(1))))

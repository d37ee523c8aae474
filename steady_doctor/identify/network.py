"""The network of an update: modes, precision, what is frozen. Figures alone."""

from dataclasses import dataclass, field

import torch

from steady_doctor.record import modules
from steady_doctor.record.session import Recorded

HALF = (torch.bfloat16, torch.float16)


@dataclass
class Network:
    called: list[modules.Network] = field(default_factory=list)
    finite: bool = True  # all that was differentiated
    half: str = ""  # the precision that most weights are kept in, where that is half of float32
    still: float = 0.0  # of these, the share that the step left as they were though they had a gradient
    dead: float = 0.0  # the share of the tensors that the losses depend on whose gradient is exactly 0


def identify_network(recorded: Recorded) -> Network:
    found = Network(recorded.modules.networks, all(recorded.finite))
    numbers = {dtype: 0 for dtype in HALF}
    for parameter in recorded.parameters:
        if parameter.dtype in numbers:
            numbers[parameter.dtype] += parameter.numel()
    half = max(numbers, key=lambda dtype: numbers[dtype])
    if 2 * numbers[half] > sum(parameter.numel() for parameter in recorded.parameters):
        found.half = str(half).removeprefix("torch.")
        found.still = _still(recorded)
    used = 0
    for root in recorded.tape.roots:
        used |= 0 if root is None else root.uses
    wanted = [place for place, p in enumerate(recorded.parameters) if p.requires_grad and used >> place & 1]
    if wanted:
        found.dead = sum(recorded.no_gradient >> place & 1 for place in wanted) / len(wanted)
    return found


def _still(recorded: Recorded) -> float:
    if len(recorded.weights) < 2:
        return 0.0
    still = count = 0
    for parameter, before, after, gradient in zip(
        recorded.parameters, recorded.weights[-2], recorded.weights[-1], recorded.at_step
    ):
        if gradient is not None and parameter.dtype in HALF:
            moves = (gradient != 0) & (before != 0)
            still, count = still + int((moves & (before == after)).sum()), count + int(moves.sum())
    return still / count if count else 0.0

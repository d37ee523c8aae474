"""The network of an update: modes, and what is frozen or gets no gradient. Figures alone."""

from dataclasses import dataclass, field

from steady_doctor.record import modules
from steady_doctor.record.session import Recorded


@dataclass
class Network:
    called: list[modules.Network] = field(default_factory=list)
    finite: bool = True  # all that was differentiated
    dead: float = 0.0  # the share of the tensors that the losses depend on whose gradient is exactly 0


def identify_network(recorded: Recorded) -> Network:
    found = Network(recorded.modules.networks, all(map(bool, recorded.finite)))
    used = 0
    for root in recorded.tape.roots:
        used |= 0 if root is None else root.uses
    wanted = [place for place, p in enumerate(recorded.computing) if p.requires_grad and used >> place & 1]
    if wanted:
        found.dead = sum(recorded.no_gradient >> place & 1 for place in wanted) / len(wanted)
    return found

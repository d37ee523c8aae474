"""One recorded update as data: its passes and what it does around them. Nothing of the tape is kept."""

from dataclasses import dataclass

from torch import Tensor

from steady_doctor.identify.mixture import Mixture, Nothing, find_mixture
from steady_doctor.identify.target import Target, find_target
from steady_doctor.identify.update import Update, identify_update
from steady_doctor.record.session import Recorded
from steady_doctor.record.tape import NotRecorded, Op


@dataclass
class Pass:
    """One backward pass: what the network got, and what it is trained to give. Each is None where the tape does not tell."""

    mixture: Mixture | None = None
    target: Target | None = None
    why_not: str = ""  # a code: why there is no mixture
    slope: Tensor | None = None  # of the loss, for each sample [B]: how much its error counts
    even: float | None = None  # the smallest slope within a sample over its largest


@dataclass
class Step:
    update: Update
    passes: list[Pass]


def identify(recorded: Recorded) -> Step:
    return Step(identify_update(recorded), [_pass(recorded, root) for root in recorded.tape.roots if root is not None])


def _pass(recorded: Recorded, root: Op) -> Pass:
    tape = recorded.tape
    try:
        mixture = find_mixture(tape, [op for op in tape.upstream(root) if op.kind == "op"])
    except (Nothing, NotRecorded) as error:
        return Pass(why_not=str(error))
    found = Pass(mixture, find_target(tape, root, mixture))
    if found.target is not None and found.target.slope is not None and found.target.slope.shape[0] == mixture.size:
        slope = found.target.slope.abs().flatten(1)
        found.slope = slope.amax(1)
        found.even = float((slope.amin(1) / found.slope.clamp(min=1e-30)).min())
    return found

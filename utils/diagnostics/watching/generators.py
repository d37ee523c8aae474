"""Random generators that stand where they stood before: what a script draws from then on repeats itself."""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from utils.diagnostics.audit.verdict import Check

MOST = 1 << 16  # states of a generator that are kept
SURE = 2  # updates that repeat a state: a script may have begun anew on purpose, once
QUIET, SELDOM = 16, 16  # looks at one from which nothing was drawn, after which it is looked at once in so many updates


@dataclass
class _States:
    """Of one generator, after each update."""

    updates: dict[int, int] = field(default_factory=dict)  # hash of a state -> the first update that left it
    last: int = 0
    repeated: list[tuple[int, int]] = field(default_factory=list)  # (update, the earlier one with its state)
    goes_on: bool = False  # one repeated state was followed by another one, so that each update draws from it
    quiet: int = 0  # looks in a row that found the state of the one before

    def see(self, state: int, update: int) -> None:
        self.quiet = self.quiet + 1 if state == self.last else 0
        if state != self.last and state in self.updates:  # where it is the last one, nothing was drawn since
            before = self.repeated[-1] if self.repeated else (-1, -1)
            self.goes_on |= before == (update - 1, self.updates[state] - 1)
            self.repeated.append((update, self.updates[state]))
        self.last = state
        if len(self.updates) < MOST:
            self.updates.setdefault(state, update)


class Generators:
    """Sees the states after each update. They hold all that was drawn: two that are equal go on alike."""

    def __init__(self) -> None:
        self._states: dict[str, _States] = {}

    def see(self, update: int) -> None:
        for name, state_of in _generators().items():
            of = self._states.setdefault(name, _States())
            if of.quiet < QUIET or update % SELDOM == 0:
                of.see(state_of(), update)

    def end(self) -> list[Check]:
        """Of the generator that repeats itself most. Noise is drawn by torch; the others may serve a validation alone."""
        known = {name: of for name, of in self._states.items() if name.startswith("torch") or of.goes_on}
        if not known:
            return []
        name, most = max(known.items(), key=lambda one: len(one[1].repeated))
        again = len(most.repeated) > 0
        text, found = "", "no"
        if again:
            (update, earlier), found = most.repeated[0], f"after {len(most.repeated)} updates"
            text = (
                f"after update {update} the random generator of {name} stands where it stood after update {earlier}, and what "
                "is drawn repeats: does a preview, a validation or each epoch set the seed?"
            )
        severity = "critical" if name.startswith("torch") and len(most.repeated) >= SURE else "warning"
        return [Check("state", "random generators that stand where they stood", "no", found, not again, text, severity)]


def _generators() -> dict[str, Callable[[], int]]:
    """What hashes their states, by name."""
    found: dict[str, Callable[[], int]] = {"torch": partial(_hash, torch.default_generator), "Python": _hash_python}
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        found["torch on the GPU"] = partial(_hash, torch.cuda.default_generators[torch.cuda.current_device()])
    if "numpy" in sys.modules:
        found["numpy"] = _hash_numpy
    return found


def _hash(generator: torch.Generator) -> int:
    """A GPU's state is 16 bytes on the host."""
    return hash(generator.get_state().numpy().tobytes())


def _hash_python() -> int:
    return hash(random.getstate())


def _hash_numpy() -> int:
    state = sys.modules["numpy"].random.get_state()
    return hash((state[1].tobytes(), state[2])) if isinstance(state, tuple) else 0

"""Whether nothing but the optimizer's step changes the weights, and the random generators go on."""

from collections.abc import Iterator

from steady_doctor.found import Found
from steady_doctor.seen import Seen

MOVED = 2e-5  # of a weight's size; rounding of a merge that is undone changes 1e-7
LEAST = 3  # recorded updates that agree
AGAIN = 2  # repeated states of a generator: a script may begin anew on purpose, once


def written(seen: Seen) -> Iterator[Found]:
    known = seen.recorded()
    if any(update.normalized or update.by_itself for update in known):
        return
    if len(known) >= LEAST and all(update.weights_moved and update.weights_put_back for update in known):
        return  # a part that is not to be trained is put back after each step
    for update in known:
        if update.weights_moved > MOVED:
            figures = {"by": _by(update.weights_written_by), "moved": update.weights_moved}
            yield Found("state-weights-written", update.number, figures)
            return
    if seen.history.moved:
        yield Found("state-weights-written", seen.history.moved[0], {"by": "", "count": len(seen.history.moved)})


def _by(operations: tuple[str, ...]) -> str:
    return f", written by {', '.join(operations)}" if operations else ""


def generator(seen: Seen) -> Iterator[Found]:
    again = seen.history.repeated
    if len(again) >= AGAIN:
        yield Found("state-generator", again[0][0], {"before": again[0][1], "count": len(again)})


def copied(seen: Seen) -> Iterator[Found]:
    """An optimizer with copies of the network's weights: these have to come back into the network."""
    known = [update for update in seen.recorded() if update.network and update.gradient.by_hand]
    if len(known) >= LEAST and len(known) == len(seen.recorded()) and len({update.network for update in known}) == 1:
        yield Found("state-not-copied", known[0].number)


def loaded(seen: Seen) -> Iterator[Found]:
    """Of the weights that a module was to load, without being strict, one at least has a place in it."""
    for module, count, own, stored in seen.not_loaded:
        yield Found("state-not-loaded", seen.updates, {"network": module, "count": count, "own": own, "stored": stored})


LAWS = (written, generator, copied, loaded)

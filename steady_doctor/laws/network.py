"""The network: its mode, its what of it is trained."""

from collections.abc import Iterator

from steady_doctor.found import Found
from steady_doctor.seen import Seen

LOOKS = 2  # recorded updates
SAMPLED = 4  # steps of a sampler
LATE = 8  # the update from which on a layer that begins with zeros is none any more
MOST_DEAD = 0.5  # of the tensors
OUT_OF_REACH = 0.05  # of the target's numbers


def finite(seen: Seen) -> Iterator[Found]:
    broken = [step.update.number for step in seen.steps if not step.network.finite]
    if len(broken) >= LOOKS:
        yield Found("network-not-finite", broken[0], {"updates": len(broken), "of": len(seen.steps)})


def mode(seen: Seen) -> Iterator[Found]:
    """Layers that leave something out by chance do so while the network trains; those that normalize by the batch go on to."""
    has_normalized = False
    for step in seen.steps:
        drops, norms = ([mode for one in step.network.called for mode in getattr(one, of)] for of in ("drops", "batch_norms"))
        is_all = not any(one.training for one in step.network.called)  # else only these layers rest, on purpose
        for modes in (drops, norms if has_normalized and is_all else []):
            if modes and not any(modes):
                yield Found("network-evaluation-mode", step.update.number, {"layers": len(modes)})
        has_normalized = has_normalized or any(norms)


def samples(seen: Seen) -> Iterator[Found]:
    """They do not where it makes samples."""
    modes = [step.trains for step in seen.sampled]
    if len(modes) >= SAMPLED and all(modes):
        yield Found("network-training-mode", seen.updates, {"steps": len(modes)})


def bounded(seen: Seen) -> Iterator[Found]:
    """The last operation never gives what is asked for."""
    beyond = [(update, *one.target.beyond) for update, one in seen.mixed() if one.target is not None]
    if len(beyond) >= LOOKS and all(share > OUT_OF_REACH for *_, share in beyond):
        update, name, share = beyond[0]
        yield Found("network-bounded", update, {"by": name, "share": share})


def batch_norm(seen: Seen) -> Iterator[Found]:
    for step in seen.steps:
        for one in step.network.called:
            if any(one.batch_norms) and any(each.mixture is not None for each in step.passes):
                yield Found("network-batch-norm", step.update.number, {"layers": sum(one.batch_norms), "network": one.name})


def encoder(seen: Seen) -> Iterator[Found]:
    """A network that makes the images, and is not trained, makes each of it alone, as when it is used later."""
    for update, one in seen.mixed():
        if one.batch is not None and one.batch.batch_norms:
            yield Found("network-encoder-mode", update, {"layers": one.batch.batch_norms})


def frozen(seen: Seen) -> Iterator[Found]:
    """Weights that nobody trains and nobody has trained, in a network of which most is trained."""
    for step in seen.steps:
        for one in step.network.called:
            if one.as_made and one.frozen < one.trained:
                yield Found("network-frozen", step.update.number, {"weights": len(one.as_made), "such_as": one.as_made[0]})


def dead(seen: Seen) -> Iterator[Found]:
    """Most of the network gets a gradient of exactly 0."""
    # Where the gradients are cleared before the step, that is the fault.
    late = [step for step in seen.steps if step.update.number >= LATE and not step.update.gradient.cleared_at_step]
    if len(late) >= LOOKS and all(step.network.dead > MOST_DEAD for step in late):
        yield Found("network-dead", late[0].update.number, {"share": min(step.network.dead for step in late)})


def level_ignored(seen: Seen) -> Iterator[Found]:
    """What reads the noise level gets no gradient: its effect is multiplied by zero, or detached."""
    cleared = {step.update.number for step in seen.steps if step.update.gradient.cleared_at_step}
    late = [(update, one) for update, one in seen.mixed() if update >= LATE and update not in cleared]
    if len({update for update, _ in late}) >= LOOKS and all(one.conditions.level_ignored for _, one in late):
        yield Found("network-level-ignored", late[0][0], {"updates": len(late)})


LAWS = (finite, mode, samples, bounded, batch_norm, encoder, frozen, dead, level_ignored)

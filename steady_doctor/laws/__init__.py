"""One file for each stage of an update. A law is asked about all that was seen, each time anew, and gives what it finds.

A law speaks where the identification is exact. What may be right in somebody's script is not a finding.
"""

from collections.abc import Callable, Iterator

from steady_doctor.found import Found
from steady_doctor.laws import (
    condition,
    data,
    declared_step,
    declared_update,
    ema,
    gradient,
    inputs,
    learning_rate,
    network,
    noise,
    optimizer,
    ranks,
    sampler,
    state,
    target,
    timestep,
    weight,
)
from steady_doctor.laws.paths import has_levels
from steady_doctor.seen import Seen

# In the order of an update: a fault early on shows in later stages, too.
OF_PASSES: tuple[Callable[[Seen], Iterator[Found]], ...] = (
    *(*data.LAWS, *noise.LAWS, *timestep.LAWS, *inputs.LAWS, *condition.LAWS, *network.LAWS, *target.LAWS, *weight.LAWS),
)
# What holds where images are noised to levels.
OF_DIFFUSION = {*data.OF_IMAGES, *noise.LAWS, *timestep.LAWS, *inputs.LAWS, *target.LAWS, *weight.LAWS} - {inputs.clean}
OF_ANYBODY: tuple[Callable[[Seen], Iterator[Found]], ...] = (
    *OF_PASSES,
    *(*gradient.LAWS, *optimizer.LAWS, *learning_rate.LAWS, *ema.LAWS, *state.LAWS, *ranks.LAWS, sampler.read),
)
# What is usual is no law for a script that declares what it does.
OF_DECLARED: tuple[Callable[[Seen], Iterator[Found]], ...] = (
    *(*declared_step.LAWS, condition.ignored, *declared_update.LAWS),
    *(gradient.left_over, gradient.cleared, gradient.clipped, gradient.sign, gradient.missing, gradient.none),
    *(optimizer.again, state.generator, *ranks.LAWS),
)


# Faults whose effects are found in stages before their own.
EFFECTS = {
    "state-generator": ("data-not-shuffled", "noise-again", "timestep-again", "noise-repeated", "timestep-repeated"),
    "rate-zero": ("condition-ignored", "network-dead", "network-level-ignored", "gradient-zero", "gradient-missing"),
    "optimizer-lacks-parameters": ("condition-ignored", "network-dead", "network-level-ignored", "gradient-zero"),
}


def judge(seen: Seen) -> list[Found]:
    """Returns what all laws find, each code once, a fault before its effects."""
    found: dict[str, Found] = {}
    of_others = OF_PASSES if seen.by_hand else OF_ANYBODY  # what the step of a script's own is to do is not known
    if seen.declared is None and not has_levels(seen):
        of_others = tuple(law for law in of_others if law not in OF_DIFFUSION)
    for law in of_others if seen.declared is None else OF_DECLARED:
        for one in law(seen):
            found.setdefault(one.code, one)
    codes = list(found)
    for cause, effects in EFFECTS.items():
        later = [code for code in codes if code in effects] if cause in codes else []
        codes = [code for code in codes if code not in later] + later
    return [found[code] for code in codes]

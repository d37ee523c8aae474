"""Whether the noise is new, independent, standard normal noise in each number of the input."""

import itertools
from collections.abc import Iterator

import torch

from steady_doctor.found import Found
from steady_doctor.identify.noise import NORMAL
from steady_doctor.identify.step import Mixed
from steady_doctor.laws.paths import CLOSE, factors, levels
from steady_doctor.seen import Seen

ERRORS = 7.0  # standard errors, beyond which chance does not explain a figure
NORMAL_FOURTH = 3.0  # of a normal distribution, over the square of its variance; its own variance is 96 / n
STRONGEST_OFFSET = 0.2  # of a mean of its own in each sample and channel: 0.1 is what is published
ENOUGH = 512  # numbers, before a figure of them is judged
EQUAL = 1e-4  # of a share, by which two that were measured may differ
ROUNDED = 0.02  # what half precision may do to a spread or to a fourth moment


def shared(seen: Seen) -> Iterator[Found]:
    """One draw for several samples, channels, rows or columns."""
    for update, one in seen.mixed():
        mixture = one.mixture
        along = [axis for axis, size in enumerate(mixture.input.shape) if size > 1]
        noise = mixture.noise
        if len(noise.shape) == len(mixture.input.shape):
            is_spread = noise.count < mixture.input.count  # else it was given another shape
            same = [axis for axis in along if (is_spread and noise.shape[axis] == 1) or axis in noise.same_along]
            if same:
                yield Found("noise-shared", update, {"axis": same[0], "shape": mixture.input.shape})
        if _twice(mixture):
            yield Found("noise-shared", update, {"axis": 0, "shape": mixture.input.shape})


def _twice(mixture: Mixed) -> bool:
    """Whether two samples have the same noise, and neither the same level nor the same image: such pairs are meant."""
    rows = mixture.noise.head
    if mixture.noise.each <= 8 or len(rows) != mixture.size or len(torch.unique(rows, dim=0)) == len(rows):
        return False
    images = torch.arange(mixture.size)[:, None] if mixture.clean is None else mixture.clean.head
    pairs = itertools.combinations(range(mixture.size), 2)
    alike = [(i, j) for i, j in pairs if torch.equal(rows[i], rows[j])]
    levels = mixture.b.tolist()
    return any(abs(levels[i] - levels[j]) > EQUAL * abs(levels[i]) and not torch.equal(images[i], images[j]) for i, j in alike)


def again(seen: Seen) -> Iterator[Found]:
    """The same numbers as in an earlier pass."""
    earlier: dict[bytes, tuple[int, bytes]] = {}
    for update, one in seen.mixed():
        noise, clean = one.mixture.noise, one.mixture.clean
        if noise.each <= 8:
            continue
        images = [b""] * len(noise.head) if clean is None else [row.numpy().tobytes() for row in clean.head]
        for row, image in zip((row.numpy().tobytes() for row in noise.head), images):
            before, with_image = earlier.setdefault(row, (update, image))
            is_stored_pair = with_image == image and image and set(one.mixture.drawn_by) <= {"data", "outside"}
            if before != update and not is_stored_pair:
                yield Found("noise-again", update, {"before": before})
        # within an update, each micro step has its own
    for step in seen.steps:
        firsts = [
            one.mixture.noise.head[0] for one in step.micro_steps if one.mixture is not None and one.mixture.noise.each > 8
        ]
        if len(firsts) > 1 and any(torch.equal(x, y) for i, x in enumerate(firsts) for y in firsts[:i] if x.shape == y.shape):
            yield Found("noise-again", step.update.number, {"before": step.update.number})


def normal(seen: Seen) -> Iterator[Found]:
    """Mean 0, the spread of a normal distribution, and its fourth moment; of small batches several together."""
    count = mean = fourth = 0.0
    earlier: set[bytes] = set()
    for update, one in seen.mixed():
        noise, new = one.mixture.noise, _independent(one.mixture)
        normals = [name in NORMAL for name in one.mixture.drawn_by]
        if not new or noise.std < 1e-12 or one.mixture.a is None or (len(normals) > 1 and all(normals)):
            continue  # numbers that several draws were added up to are not independent
        if (numbers := noise.head.numpy().tobytes()) in earlier:  # nor those that came before
            continue
        earlier.add(numbers)
        mean, fourth = (
            (count * x + new * y) / (count + new) for x, y in ((mean, noise.mean / noise.std), (fourth, noise.fourth))
        )
        if (count := count + new) < ENOUGH:
            continue
        off = abs(mean) > ERRORS * (1 / count) ** 0.5 + ROUNDED
        uneven = abs(fourth - NORMAL_FOURTH) > ERRORS * (96 / count) ** 0.5 + NORMAL_FOURTH * ROUNDED
        if off or uneven:
            yield Found("noise-not-normal", update, {"mean": mean, "fourth": fourth, "drawn": one.mixture.drawn_by})
        count = mean = fourth = 0.0


def _independent(mixture: Mixed) -> int:
    """Of the noise's numbers, all or none; a mask leaves others than those that were drawn."""
    noise = mixture.noise
    is_masked = bool((noise.head == 0).all(0).any())
    return 0 if noise.same_along or is_masked else noise.count


def unit(seen: Seen) -> Iterator[Found]:
    """A spread of 1, where the shares are on a path that tells how strong the noise should be; and the same one in all passes,
    or it is the noise level of a whole batch."""
    path = levels(seen)
    known = [
        (update, one.mixture.noise, _independent(one.mixture)) for update, one in seen.mixed() if one.mixture.a is not None
    ]
    known = [each for each in known if each[2] >= ENOUGH] if path is not None and not path.single else []
    close = [ERRORS * (0.5 / count) ** 0.5 + ROUNDED for _, _, count in known]
    if any(abs(noise.std / known[0][1].std - 1) > 2 * near for (_, noise, _), near in zip(known, close)):
        return
    for (update, noise, _), near in zip(known, close):
        is_asked = any(abs(noise.std / number - 1) < near for number in seen.asked_numbers if number > 0)
        if abs(noise.std - 1) > near and not is_asked:
            yield Found("noise-strength", update, {"std": noise.std})


def share(seen: Seen) -> Iterator[Found]:
    """The formula has the noise weaker, or stronger, than the variance of the path has it."""
    found = levels(seen)
    if found is None or found.kind or (both := factors(found.a, found.b)) is None:
        return
    if any(one.mixture.is_difference for _, one in seen.mixed()):
        return
    of_image, of_noise = both
    # A factor of the image alone is a published choice, and one of both is no other path.
    if abs(of_noise - 1) > CLOSE and abs(of_noise / of_image - 1) > CLOSE:
        yield Found("noise-share", seen.mixed()[0][0], {"factor": of_noise})


def offset(seen: Seen) -> Iterator[Found]:
    """A mean of its own in each sample, beyond what is known to help."""
    for update, one in seen.mixed():
        noise = one.mixture.noise
        if noise.count < ENOUGH or noise.each < 64 or noise.same_along or len(noise.means) < 2:
            continue
        chance = noise.std / noise.each**0.5
        if float(noise.means.square().mean()) ** 0.5 > STRONGEST_OFFSET * noise.std + ERRORS * chance:
            yield Found("noise-offset", update, {"offset": float(noise.means.square().mean()) ** 0.5})


def spread(seen: Seen) -> Iterator[Found]:
    """The noise's share of each sample is spread along the samples."""
    for update, one in seen.passes():
        if "noise" in one.misplaced:
            yield Found("noise-spread", update)


LAWS = (spread, shared, again, normal, unit, share, offset)

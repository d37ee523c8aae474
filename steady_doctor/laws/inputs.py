"""Whether the network gets a mixture of one image and noise, on one path from images to noise."""

from collections.abc import Iterator

import torch

from steady_doctor.found import Found
from steady_doctor.identify.step import Mixed, Pass
from steady_doctor.laws.paths import LEAST, Levels, is_slip, levels
from steady_doctor.laws.target import asks
from steady_doctor.seen import Seen

MOST_SIGNAL = 0.85  # the image's share at the last row of a table; published schedules of 50 steps leave up to 0.78
NO_SIGNAL = 0.01  # the share below which nothing of the image is left
TOO_MANY = 0.4  # of a table's rows without any image
FAR = 1.0  # of -log of the shares, at the last row: the beginning of a straight path is a polynomial, too
LEFT_OF_ONE = 0.5  # of the image, where the variances of the noise are betas that were not multiplied up
FEWEST_ROWS, OF_BETAS = 12, 1e-4  # usual betas leave 4e-5 at most, and straight paths 1e-3 at least
WIDE = 0.1  # of the shares: in a smaller range each path looks like another one
EVEN, EXACT = 0.02, 2e-6  # of a beta, and of a share that rounding leaves
EXACT_RATIO, FIRST_BETA = 1e-3, 1e-3  # of a ratio; the largest one
TRACES = 0.3  # of the clean image: an encoder's latents have some hundredths
MOSTLY = 0.5  # of the image, that is asked for
CLAMPS = {"clamp", "clamp_", "clamp_min", "clamp_max", "round", "tanh", "hardtanh", "clip"}


def path(seen: Seen) -> Iterator[Found]:
    """The shares of a denoiser: what is asked is known, so it is no discriminator, which gets pairs of images."""
    found = levels(seen) if asks(seen) is not None else None
    is_wide = found is not None and max(float(x.max() - x.min()) for x in (found.a, found.b)) > WIDE
    is_enough = is_wide and len(found.a) >= 2 * LEAST  # type: ignore[union-attr]
    if found is None or not is_enough or found.kind:
        return
    tables = (one.mixture.table for _, one in seen.mixed() if one.mixture.table is not None)
    part = next(filter(None, map(_not_cumulated, tables)), "")
    if part == "noise":
        yield Found("noise-not-cumulated", seen.mixed()[0][0])
    elif part:
        yield Found("input-not-cumulated", seen.mixed()[0][0])
    elif is_slip(found.a, found.b) or _has_one_ratio(seen, found):
        pairs = [(round(float(a), 3), round(float(b), 3)) for a, b in list(zip(found.a, found.b))[:4]]
        yield Found("input-path", seen.mixed()[0][0], {"pairs": pairs})


def _has_one_ratio(seen: Seen, found: Levels) -> bool:
    """Whether image and noise are mixed alike at all levels, though both are scaled by these, and the noise is not."""
    spreads, told = zip(*((one.mixture.noise.std, one.mixture.told) for _, one in seen.mixed()))
    is_told = any(len(way[0].unique()) > 1 for way in told if way)  # else it is trained for one level
    is_steady = max(spreads) < (1 + WIDE) * min(spreads)
    return (
        is_told and is_steady and float(found.sigma.max() - found.sigma.min()) <= EXACT_RATIO * float(found.sigma.abs().max())
    )


def sub_vp(seen: Seen) -> Iterator[Found]:
    """A path that some mean, and say so, and that a forgotten square root makes of another one."""
    found = levels(seen)
    if found is not None and found.kind == "sub-vp" and "subvp" not in f"{seen.asked_words} {seen.network.lower()}":
        yield Found("input-sub-vp", seen.mixed()[0][0])


def nothing(seen: Seen) -> Iterator[Found]:
    """Noise alone, but for a generator, of which another network judges what it makes."""
    for update, one in seen.mixed():
        is_alone = one.mixture.clean is None and float(one.mixture.input.std) > 0 and one.mixture.only_noise
        if is_alone and _is_compared(one):
            yield Found("input-no-image", update)


def _is_compared(one: Pass) -> bool:
    """Whether a value is asked of the network, number by number."""
    return one.target is not None and one.target.kind != "none" and not one.target.by_network


def clean(seen: Seen) -> Iterator[Found]:
    """Noise is asked of a network that got none of it; at most the traces of an encoder's. A noisy image may be asked for."""
    has_traces = all(_has_traces(one.mixture) for _, one in seen.mixed())
    for update, one in seen.passes():
        asked = None if one.target is None else one.target.p
        is_image = asked is not None and float(asked.min()) > MOSTLY
        if one.noise_in_loss and has_traces and not is_image:
            yield Found("input-clean", update)


def _has_traces(mixture: Mixed) -> bool:
    if mixture.a is None or mixture.clean is None:
        return False
    noise, image = float(mixture.b.abs().max()) * mixture.noise.std, float(mixture.a.abs().min()) * mixture.clean.std
    return noise < TRACES * image


def unscaled(seen: Seen) -> Iterator[Found]:
    """An output that is preconditioned for each level, and an input that is not."""
    found, asked = levels(seen), asks(seen)
    if (
        found is not None
        and asked is not None
        and asked[1].fits == ["edm outside"]
        and found.kind == "ve"
        and float(found.b.max()) > 5
    ):
        yield Found("input-unscaled", asked[0], {"largest": float(found.b.max())})


def of_scheduler(seen: Seen) -> Iterator[Found]:
    """The shares of a table with as many rows as that of the script's own noise scheduler are its."""
    for update, one in seen.mixed():
        table = one.mixture.table
        if table is None or one.mixture.a is None or len(seen.alphas_cumprod) != 1:
            continue
        alphas = seen.alphas_cumprod[0]
        if len(alphas) != int(table[0, -1]) + 1:
            continue
        a, b = alphas[table[0].long()].sqrt(), (1 - alphas[table[0].long()]).clamp(min=0).sqrt()
        if float(torch.maximum((table[1] - a).abs(), (table[2] - b).abs()).max()) > 0.02:
            yield Found("input-not-schedulers", update, {"a": float(table[1, len(a) // 2]), "declared": float(a[len(a) // 2])})


def no_noise(seen: Seen) -> Iterator[Found]:
    """A level without noise that is drawn, though the noise is asked for."""
    asked = asks(seen)
    for update, one in seen.mixed():
        table, drawn = one.mixture.table, one.mixture.index_range
        if table is None or drawn is None or asked is None or "epsilon" not in asked[1].fits:
            continue
        for row, b in ((table[0, 0], table[2, 0]), (table[0, -1], table[2, -1])):
            if drawn[0] <= int(row) < drawn[1] and abs(float(b)) < 1e-7:
                yield Found("input-no-noise", update, {"row": int(row)})


def signs(seen: Seen) -> Iterator[Found]:
    found = levels(seen)
    if found is not None and (float(found.a.min()) < -1e-4 or float(found.b.min()) < -1e-4):
        yield Found("input-negative", seen.mixed()[0][0], {"a": float(found.a.min()), "b": float(found.b.min())})


def changed(seen: Seen) -> Iterator[Found]:
    """The mixture is clamped, or rounded, on its way to the network."""
    for update, one in seen.mixed():
        if _is_compared(one) and set(one.mixture.changed_by) & CLAMPS:
            yield Found("input-clamped", update, {"by": one.mixture.changed_by})


def schedule(seen: Seen) -> Iterator[Found]:
    """The rows of a table of variances, from first to last."""
    for update, one in seen.mixed():
        table = one.mixture.table
        if table is None or one.mixture.a is None:
            continue
        a, b = table[1:] / table[1:].norm(dim=0).clamp(min=1e-30)  # exploding ones beside their spread
        if bool((a[1:] > a[:-1] + 1e-4).any()) and bool((a[1:] < a[:-1] - 1e-4).any()):
            continue
        last = -1 if a[0] > a[-1] else 0
        # The rows may go from noise to the image: what tells is whose products are those of betas.
        if last == 0 and levels(seen) is not None and levels(seen).kind == "vp" and _of_betas(table[0], b * b):
            yield Found("input-exchanged", update, {"first": float(b[0]), "last": float(b[-1])})
        is_exploding = (path := levels(seen)) is not None and path.kind == "ve"  # to sigmas that may be for noisy photographs
        most = LEFT_OF_ONE if _are_betas(table[0], b * b) else MOST_SIGNAL
        if float(a[last]) > most and not is_exploding:
            yield Found("input-signal-left", update, {"share": float(a[last])})
        if float((a.abs() < NO_SIGNAL).double().mean()) > TOO_MANY:
            yield Found("input-all-noise", update, {"share": float((a.abs() < NO_SIGNAL).double().mean())})


def square_roots(seen: Seen) -> Iterator[Found]:
    """Shares a and 1 - a, where a is the table of variances of usual betas: a straight path is in even steps, or shifted."""
    found = levels(seen)
    for update, one in seen.mixed():
        table = one.mixture.table
        if table is not None and found is not None and found.kind == "flow" and _of_betas(*table[:2]):
            yield Found("input-no-square-roots", update, {"first": float(table[1, 0]), "last": float(table[1, -1])})
            return


def _not_cumulated(table: torch.Tensor) -> str:
    """Which share, the "noise" or the "input", is of the alpha of its row alone, where the other is of all up to this row."""
    rows, a, b = table
    variances = a * a, 1 - b * b
    follows = (rows.diff() == 1) & (torch.minimum(*variances)[1:] > NO_SIGNAL)
    if int(follows.sum()) < FEWEST_ROWS:
        return ""
    for part, one, other in (("noise", *variances), ("input", *reversed(variances))):
        betas, own = 1 - (one[1:] / one[:-1])[follows], 1 - other[1:][follows]
        if float(betas.max()) > 10 * EXACT and bool(((betas - own).abs() <= EVEN * betas + EXACT).all()):
            return part
    return ""


def _of_betas(rows: torch.Tensor, variances: torch.Tensor) -> bool:
    """Whether their products are those of betas, or roots of betas, in even steps: -log is a polynomial of the third degree."""
    known = variances > NO_SIGNAL
    place, logs = rows[known].double() / float(rows[-1]), -variances[known].double().log()
    if len(logs) < FEWEST_ROWS or float(logs.max()) < FAR:
        return False
    powers = place[:, None] ** torch.arange(4, device="cpu")
    rest = powers @ torch.linalg.lstsq(powers, logs[:, None]).solution - logs[:, None]
    return float(rest.abs().max() / logs.max()) < OF_BETAS


def _are_betas(rows: torch.Tensor, variances: torch.Tensor) -> bool:
    """Whether they are betas in even steps, or squares of such steps: they begin with next to nothing."""
    if len(rows) < FEWEST_ROWS or float(variances.min()) > FIRST_BETA:
        return False
    powers = (rows.double() / float(rows[-1]))[:, None] ** torch.arange(3, device="cpu")
    rest = powers @ torch.linalg.lstsq(powers, variances.double()[:, None]).solution - variances.double()[:, None]
    return float(rest.abs().max() / variances.max()) < OF_BETAS


def spread(seen: Seen) -> Iterator[Found]:
    """The image's share of each sample is spread along the samples."""
    for update, one in seen.passes():
        if "image" in one.misplaced:
            yield Found("input-spread", update)


LAWS = (spread, clean, of_scheduler, path, sub_vp, unscaled, no_noise, nothing, signs, changed, schedule, square_roots)

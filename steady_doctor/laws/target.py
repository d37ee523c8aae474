"""Whether the network is trained to give something that belongs to the path of its input, made of the same image and noise."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from steady_doctor.found import Found
from steady_doctor.identify.step import Pass
from steady_doctor.laws.paths import LEAST, Levels, levels
from steady_doctor.seen import Seen

REST = 2e-2  # of the target, that is neither of this image nor of this noise
CLOSE = 2e-2  # of the shares
EXACT = 2e-4  # of the shares: the mean of the next image is nearly the input itself
NEARLY = 5e-2  # of the shares of a known target: what is nearer trains the same
EXPONENTS = (-1.0, 0.0, 0.5, 1.0, 2.0)  # of shares
WIDE = 2.0  # times: by less, a wrong factor of all targets would look like a function of the level
LOOKS = 3  # passes that agree


class Asks:
    """The shares of image and noise in the target beside those in the input, of all samples where they are known; `fits`: the
    known targets that they are those of."""

    def __init__(self, passes: list[Pass], kind: str, scale: float):
        def gathered(of: str, name: str) -> Tensor:
            return torch.cat([getattr(getattr(one, of), name)[one.target.seen] for one in passes])

        self.a, self.b = gathered("mixture", "a"), gathered("mixture", "b")
        self.p, self.q, self.rest = (gathered("target", name) for name in ("p", "q", "rest"))
        self.kind, self.scale = kind, scale
        self.is_told = any(one.mixture.told for one in passes)
        self.single = Levels(self.a, self.b, kind).single
        self.has_table = any(one.mixture.index is not None for one in passes)
        self.skips = any(one.target.skips for one in passes)
        self.fits = [name for name, pair in self._known(scale).items() if self._is(*pair)]
        slopes = [one.target.slope for one in passes]
        self.scaled = not self.fits and not self.skips and None not in slopes  # a known preconditioning has its own scale
        if self.scaled:
            weights = [one.mixture.size * slope[one.target.seen] for slope, one in zip(slopes, passes)]
            self._divided(torch.cat(weights).sqrt(), scale)

    def _is(self, p: Tensor, q: Tensor) -> bool:
        return all(
            bool(((x - y).abs() <= NEARLY * torch.maximum(p.abs(), q.abs()).clamp(min=1e-9)).all())
            for x, y in ((self.p, p), (self.q, q))
        )

    def _divided(self, factor: Tensor, scale: float) -> None:
        """An output that is divided by a function of the level, such as sigma, before it is compared: as much as the target is
        larger, each of its errors counts less."""
        if bool((factor <= 0).any()) or float(factor.max()) < WIDE * float(factor.min()):
            return
        for name, (p, q) in self._known(scale).items():
            size = torch.maximum(self.p.abs(), self.q.abs()) / torch.maximum(p.abs(), q.abs())
            even = size * factor
            if float(even.max()) < (1 + CLOSE) * float(even.min()) and self._is(p * size, q * size):
                self.fits.append(name)

    def is_multiple(self, scale: float) -> bool:
        """Whether it is a known target times a number of each sample."""
        size = torch.hypot(self.p, self.q)
        for p, q in self._known(scale).values():
            across, along = self.p * q - self.q * p, self.p * p + self.q * q
            if bool((across.abs() <= CLOSE * size * torch.hypot(p, q)).all()) and bool((along > 0).all()):
                return True
        return False

    def is_slip(self) -> bool:
        """Whether both shares, or what they are beside the input, are powers of those of the input, times a number: what a
        sign, a root, a factor or a term too few or too many makes of a known target. Others may be of a target that is not
        known here, such as the mean of the next image."""
        powers = [
            self.a.abs().clamp(min=1e-6) ** i * self.b.abs().clamp(min=1e-6) ** j
            for i, j in itertools.product(EXPONENTS, EXPONENTS)
        ]
        close = EXACT * float(torch.maximum(self.p.abs(), self.q.abs()).max())
        shares = [(self.p - sign * self.a, self.q - sign * self.b) for sign in (0, 1, -1)]
        if len(self.p) < 2 * LEAST:
            return False
        return any(all(any(_is_multiple(one, power, close) for power in powers) for one in pair) for pair in shares)

    def _known(self, scale: float) -> dict[str, tuple[Tensor, Tensor]]:
        a, b, one, zero = self.a, self.b, torch.ones_like(self.a), torch.zeros_like(self.a)
        score = -1 / b.clamp(min=1e-12)
        known = {"epsilon": (zero, one), "sample": (one, zero), "score": (zero, score), "minus score": (zero, -score)}
        if self.kind in ("vp", "edm"):
            known["v"] = (-b / scale, a * scale)
            if self.skips:
                known["edm"] = (b / scale, -a * scale)
        if self.kind == "vp" and not self.has_table:  # a quarter of a turn in a time of 1
            factor = float((self.p * -b + self.q * a).median())
            if abs(factor) > 1.1:
                known["turned v"] = (-b * factor, a * factor)
        if self.kind == "flow":
            # Where some noise is left at the images' end of the line, by as much less, which many scripts leave out of account.
            noise = scale * one if self._is(-one, scale * one) or self._is(one, -scale * one) else one
            known |= {"velocity": (-one, noise), "backward": (one, -noise)}
        if not (self.kind == "vp" and self.has_table):
            known["minus noise"] = (zero, -one)  # a score times its sigma
        sigma = b / a.clamp(min=1e-12)
        square = float((-sigma * self.q / self.p).median())
        if square > 0 and self.skips:  # EDM's preconditioning around the output alone; the input may have another form
            total = (sigma * sigma + square).sqrt()
            known["edm outside"] = sigma / (square**0.5 * total), -(square**0.5) / total
        return known


def _is_multiple(x: Tensor, y: Tensor, close: float) -> bool:
    return float((x - (x @ y) / (y @ y) * y).abs().max()) <= close


def asks(seen: Seen) -> tuple[int, Asks] | None:
    """The first update that it was seen in, and what is asked."""
    found = levels(seen)
    known = [
        (update, one)
        for update, one in seen.mixed()
        if one.mixture.a is not None and one.target is not None and one.target.p is not None and not one.target.by_network
    ]
    if found is None or not known or not any(bool(one.target.seen.any()) for _, one in known):
        return None
    return known[0][0], Asks([one for _, one in known], found.kind, found.scale)


def known(seen: Seen) -> Iterator[Found]:
    asked = asks(seen)
    if asked is None:
        return
    update, found = asked
    if float(found.rest.max()) > REST:
        yield Found("target-other", update, {"rest": float(found.rest.max())})
    # A network that is not told the level gives a field over the images, which may grow and fall with the level as it likes.
    elif (
        not found.fits
        and found.kind
        and not found.single
        and ((found.skips and found.kind in ("edm", "ve")) or found.is_slip())
        and (found.is_told or not found.is_multiple(found.scale))
    ):
        pairs = [(round(float(p), 3), round(float(q), 3)) for p, q in list(zip(found.p, found.q))[:4]]
        yield Found("target-path", update, {"pairs": pairs, "path": found.kind})
        if float((found.p.abs() - 1).abs().max()) < CLOSE and float((found.p + found.q).abs().max()) < CLOSE:
            yield Found("input-for-target", update, {"path": found.kind})  # a straight line's: either of the two is wrong


def declared(seen: Seen) -> Iterator[Found]:
    """What the script's own noise schedulers say that a network gives."""
    asked = asks(seen)
    if asked is None or len(seen.predictions) != 1 or not asked[1].fits:
        return
    expected = {"epsilon": "epsilon", "sample": "sample", "v_prediction": "v", "flow_prediction": "velocity"}
    name = expected.get(next(iter(seen.predictions)))
    if name is not None and name not in asked[1].fits and not asked[1].skips:
        yield Found("target-not-schedulers", asked[0], {"declared": name, "fits": asked[1].fits[0]})


def direction(seen: Seen) -> Iterator[Found]:
    """A velocity points to where the time that the network is told grows, or against it and that which is drawn: its sign is
    chosen together with the sampler's, which the training does not show."""
    asked = asks(seen)
    if asked is None or asked[1].kind != "flow" or not {"velocity", "backward"} & set(asked[1].fits):
        return
    told = [one.mixture for _, one in seen.mixed() if one.mixture.told and one.mixture.a is not None and one.mixture.size > 2]
    agrees = []
    for place in (0, -1):  # the number that the network gets, and that which the script drew
        grows = {_slope(mixture.told[place], mixture.b) > 0 for mixture in told}
        agrees.append(len(grows) != 1 or grows.pop() == ("velocity" in asked[1].fits))
    if agrees == [False, True]:
        yield Found("timestep-against-target", asked[0], {"fits": asked[1].fits[0]})


def _slope(x: Tensor, y: Tensor) -> float:
    return float((x - x.mean()) @ (y - y.mean()))


def signal(seen: Seen) -> Iterator[Found]:
    """Where the last level has no image at all, its noise tells nothing about the image."""
    asked = asks(seen)
    if asked is None or "epsilon" not in asked[1].fits:
        return
    for update, one in seen.mixed():
        table = one.mixture.table
        if table is not None and one.mixture.a is not None and float(table[1].abs().min()) < 1e-5:
            yield Found("target-no-signal", update)


def unnoised(seen: Seen) -> Iterator[Found]:
    """What counts is where noise was added."""
    known = [(update, one.target) for update, one in seen.mixed() if one.target is not None and one.target.slope is not None]
    known = [(update, target) for update, target in known if bool(target.slope.any())]
    if len(known) >= LOOKS and not any(target.noised for _, target in known):
        yield Found("target-unnoised", known[0][0])


LAWS = (known, declared, direction, signal, unnoised)

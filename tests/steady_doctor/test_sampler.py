"""The script's own sampler: of any kind it is silent, and a misread answer or another schedule is named."""

import copy
import gc
import pickle
import weakref
from itertools import pairwise

import pytest
import torch
from small_loops import ALPHA, ALPHA_BAR, SIDE, C, Network, T, column, pictures, train, vp

from steady_doctor.doctor import Doctor
from steady_doctor.record import calls

STEPS = 50


def shape(count=16):
    return count, C, SIDE, SIDE


@torch.no_grad()
def ddim(network, predicts="epsilon", bar=ALPHA_BAR, clip=False, guided=False):
    x = torch.randn(shape())
    times = torch.linspace(T - 1, 0, STEPS).long().tolist()
    for now, then in pairwise(times):
        answer = network(x, torch.full((len(x),), now))
        if guided:
            answer = answer + 2 * (answer - network(x, torch.full((len(x),), now)))
        a, b = bar[now].sqrt(), (1 - bar[now]).sqrt()
        image = (x - b * answer) / a if predicts == "epsilon" else answer
        image = image.clamp(-1, 1) if clip else image
        noise = (x - a * image) / b
        x = bar[then].sqrt() * image + (1 - bar[then]).sqrt() * noise


@torch.no_grad()
def two_steps(network):
    """DPM-Solver++ (2M), which goes on from the image of the step before, too (Lu et al. 2022)."""
    x, before = torch.randn(shape()), None
    ratios = (ALPHA_BAR / (1 - ALPHA_BAR)).log() / 2
    for now, then in pairwise(reversed(range(T))):
        a, b = ALPHA_BAR[now].sqrt(), (1 - ALPHA_BAR[now]).sqrt()
        image, h = (x - b * network(x, torch.full((len(x),), now))) / a, ratios[then] - ratios[now]
        used = image if before is None else image + (image - before[0]) * h / (2 * before[1])
        x = (1 - ALPHA_BAR[then]).sqrt() / b * x - ALPHA_BAR[then].sqrt() * torch.expm1(-h) * used
        before = image, h


@torch.no_grad()
def ancestral(network, clip=False, low=-1, drawn_before=False, fresh=1, predicts="epsilon", known=None):
    """`known`: what stands in the first column of each image."""
    x = torch.randn(shape())
    for t in reversed(range(T)):
        noise = torch.randn_like(x) if drawn_before else None
        if known is not None:
            x[..., 0] = known
        answer = network(x, torch.full((len(x),), t))
        before = ALPHA_BAR[t - 1] if t else torch.ones(())
        image = (x - (1 - ALPHA_BAR[t]).sqrt() * answer) / ALPHA_BAR[t].sqrt()
        image = answer if predicts == "sample" else image
        image = image.clamp(low, 1) if clip else image
        mean = before.sqrt() * (1 - ALPHA[t]) * image + ALPHA[t].sqrt() * (1 - before) * x
        noise = torch.randn_like(x) if noise is None else noise
        x = mean / (1 - ALPHA_BAR[t]) + fresh * (1 - ALPHA[t]).sqrt() * noise


def flow(network):
    def loss_of(x0):
        t, noise = torch.rand(len(x0)), torch.randn_like(x0)
        return (network((1 - column(t)) * x0 + column(t) * noise, 1000 * t) - (noise - x0)).square().mean()

    return loss_of


@torch.no_grad()
def euler(network, sign=1, begin=1.0, heun=False):
    x, times = torch.randn(shape()), torch.linspace(begin, 1 - begin, STEPS).tolist()
    for now, then in pairwise(times):
        velocity = network(x, torch.full((len(x),), 1000 * now))
        if heun:
            middle = x + (then - now) * velocity
            velocity = (velocity + network(middle, torch.full((len(x),), 1000 * then))) / 2
        x = x + sign * (then - now) * velocity


@torch.no_grad()
def encoded(network):
    """Images to noise."""
    x, times = torch.rand(shape()) * 2 - 1, torch.linspace(0.0, 1.0, STEPS).tolist()
    for now, then in pairwise(times):
        x = x + (then - now) * network(x, torch.full((len(x),), 1000 * now))


@torch.no_grad()
def figure(network):
    """The same images and noise at each level."""
    x0, noise = torch.rand(shape()) * 2 - 1, torch.randn(shape())
    for t in range(10, T, 10):
        network(ALPHA_BAR[t].sqrt() * x0 + (1 - ALPHA_BAR[t]).sqrt() * noise, torch.full((len(x0),), t))


@torch.no_grad()
def validation(network):
    """Losses of other images, at one level for all of them."""
    for t in torch.randint(0, T, (60,)).tolist():
        x0 = torch.rand(shape()) * 2 - 1
        noised = ALPHA_BAR[t].sqrt() * x0 + (1 - ALPHA_BAR[t]).sqrt() * torch.randn_like(x0)
        network(noised, torch.full((len(x0),), t))


class OfCodes(Network):
    def forward(self, x, t, code=0):
        return self.last(torch.relu(self.first(x) + self.embedding(t) + code))


class Parts(torch.nn.Module):
    """It has no call of its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.denoiser = torch.nn.Conv2d(C, 16, SIDE), OfCodes()


def of_parts(network):
    return lambda x0: vp(lambda x, t: network.denoiser(x, t, network.encoder(x0)))(x0)


def held(network):
    """The first column of each image is known, and gets no noise."""

    def loss_of(x0):
        t, noise = torch.randint(0, T, (len(x0),)), torch.randn_like(x0)
        mixed = column(ALPHA_BAR[t].sqrt()) * x0 + column((1 - ALPHA_BAR[t]).sqrt()) * noise
        mixed[..., 0] = x0[..., 0]
        return (network(mixed, t) - noise)[..., 1:].square().mean()

    return loss_of


class OfClasses(Network):
    def __init__(self):
        super().__init__()
        self.classes = torch.nn.Embedding(11, 16)

    def forward(self, x, t, y):
        return self.last(torch.relu(self.first(x) + self.embedding(t) + self.classes(y)[:, :, None, None]))


class MayHaveNone(OfClasses):
    def forward(self, x, t, y=None, more=()):
        if more == {}:
            more["label"] = torch.full((len(x),), 10)
        y = y if y is not None else dict(more).get("label")
        return super().forward(x, t, torch.full((len(x),), 10) if y is None else y)


def twice(network, x, t, y, none):
    return network(x, t, y), network(x, t, none)


def at_once(network, x, t, y, none):
    """Both halves of a batch."""
    return network(torch.cat([x, x]), torch.cat([t, t]), torch.cat([y, none])).chunk(2)


def left_out(network, x, t, y, none):
    return network(x, t, y), network(x, t)


def written_over(network, x, t, y, none):
    """What the script makes of its answers is in the tensor of one of them."""
    given, free = network(x, t, y), network(x, t, none)
    return given.sub_(free).mul_(1).add_(free), free


def in_a_dictionary(network, x, t, y, none):
    return network(x, t, more={"label": y}), network(x, t, more={})


@pytest.mark.parametrize(
    ("answers", "one_class"),
    [(twice, False), (twice, True), (at_once, False), (left_out, True), (in_a_dictionary, True), (written_over, False)],
)
@pytest.mark.parametrize(("strength", "codes"), [(3, []), (0.5, []), (-3, ["condition-guided-away"])])
def test_guidance_leads_to_the_condition(answers, one_class, strength, codes, sign=1):
    network, update = MayHaveNone(), iter(range(999))

    @torch.no_grad()
    def sample():
        x, y, times = torch.randn(shape()), torch.arange(16) % 10, torch.linspace(1, 0, STEPS).tolist()
        y = torch.full_like(y, 3) if one_class else y
        for now, then in pairwise(times):
            given, free = answers(network, x, torch.full((len(x),), 1000 * now), y, torch.full_like(y, 10))
            x = x + sign * (then - now) * (free + strength * (given - free))

    def trained(x, t):
        y = torch.arange(len(x)) % 10
        return network(x, t, more={"label": y}) if answers is in_a_dictionary else network(x, t, y)

    loss = flow(trained)
    assert train(network, loss, updates=40, after=lambda: next(update) == 39 and sample())[0] == codes


def test_guidance_from_other_classes_to_one():
    """The answers that are led away from know a class, too."""
    network, update = OfClasses(), iter(range(999))

    @torch.no_grad()
    def sample():
        x, times, own = torch.randn(shape()), torch.linspace(1, 0, STEPS).tolist(), torch.arange(16) % 10
        for now, then in pairwise(times):
            t = torch.full((len(x),), 1000 * now)
            to, away = network(x, t, torch.full_like(own, 3)), network(x, t, own)
            x = x + (then - now) * (away + 3 * (to - away))

    loss = flow(lambda x, t: network(x, t, torch.arange(len(x)) % 10))
    assert train(network, loss, updates=40, after=lambda: next(update) == 39 and sample())[0] == []


class Rests(Network):
    """Its mode decides where it may leave something out, and how much is an argument."""

    def __init__(self):
        super().__init__()
        self.dropout = 0.1

    def forward(self, x, t, share=0.0):
        hidden = torch.relu(self.first(x) + self.embedding(t))
        return self.last(torch.nn.functional.dropout(hidden, share) if self.training and share else hidden)


def test_a_mode_that_changes_nothing():
    network, update = Rests(), iter(range(999))
    assert train(network, vp(network), updates=40, after=lambda: next(update) == 39 and ddim(network))[0] == []


def test_guidance_calls_the_network_twice_at_each_level():
    test_guidance_leads_to_the_condition(twice, False, 3, ["target-other-sampler"], sign=-1)


class Velocity(Network):
    """Its layers give the image, and the module makes a velocity of it (Li & He 2025)."""

    def forward(self, x, t):
        return (x - super().forward(x, t)) / column(t / 1000).clamp(min=0.02)


class Score(Network):
    """Its layers give the noise with another sign, which the module divides by sigma (Song et al. 2021)."""

    def forward(self, x, sigma):
        return super().forward(x, 100 * sigma.log()) / column(sigma)


def exploding(network, sign=1):
    def loss_of(x0):
        sigma, noise = torch.exp(torch.rand(len(x0)) * 7 - 4), torch.randn_like(x0)
        return (network(x0 + column(sigma) * noise, sigma) * column(sigma) + sign * noise).square().mean()

    return loss_of


@torch.no_grad()
def reverse_sde(network, levels=STEPS, fresh=True, corrected=False, times=1):
    sigmas = torch.exp(torch.linspace(3, -4, levels))
    x = sigmas[0] * torch.randn(shape())
    for now, then in pairwise(sigmas):
        for _ in range(2 * corrected):
            x = x + 0.02 * now**2 * network(x, now.expand(len(x))) + 0.2 * now * torch.randn_like(x)
        x = x + times * (now**2 - then**2) * network(x, now.expand(len(x))) / (1 if fresh else 2)
        x = x + fresh * (now**2 - then**2).sqrt() * torch.randn_like(x)


@torch.no_grad()
def langevin(network, steps=4, sign=1):
    """Some steps at each level, and none from one level to the next (Song & Ermon 2019)."""
    x = torch.randn(shape())
    for sigma in torch.exp(torch.linspace(2, -3, 10)):
        for _ in range(steps):
            x = x + sign * 0.05 * sigma**2 * network(x, sigma.expand(len(x))) + 0.3 * sigma * torch.randn_like(x)


class Preconditioned(Network):
    """Karras et al. 2022, table 1, around a network of its own."""

    def __init__(self):
        super().__init__()
        self.within = Network()
        del self.first, self.last, self.time

    def forward(self, x, sigma):
        size = (column(sigma) ** 2 + 0.25).sqrt()
        return 0.25 / size**2 * x + 0.5 * column(sigma) / size * self.within(x / size, 100 * sigma.log())


def edm(network):
    def loss_of(x0):
        sigma = torch.exp(1.2 * torch.randn(len(x0)) - 1)
        denoised = network(x0 + column(sigma) * torch.randn_like(x0), sigma)
        return ((column(sigma) ** 2 + 0.25) / (column(sigma) / 2) ** 2 * (denoised - x0) ** 2).mean()

    return loss_of


@torch.no_grad()
def karras(network, heun=True, slope=1):
    sigmas = torch.exp(torch.linspace(1, -3, STEPS))
    x = sigmas[0] * torch.randn(shape())
    for now, then in pairwise(sigmas):
        direction = (x - network(x, now.expand(len(x)))) / now
        middle = x + slope * (then - now) * direction
        if heun:
            direction = (direction + (middle - network(middle, then.expand(len(x)))) / then) / 2
            middle = x + slope * (then - now) * direction
        x = middle


class Beside(Network):
    """What it is given to be made better stands in channels before the noised image (Saharia et al. 2021)."""

    def __init__(self):
        super().__init__(channels=2 * C)


def beside(network):
    return lambda x0: vp(lambda x, t: network(torch.cat([x0.mean((2, 3), keepdim=True).expand_as(x0), x], 1), t))(x0)


def sampled_beside(network, predicts="epsilon"):
    image = torch.rand(shape()) * 2 - 1
    ddim(lambda x, t: network(torch.cat([image, x], 1), t), predicts)


FASTER = torch.cumprod(1 - torch.linspace(1e-4, 0.002, T), 0)
HEALTHY = {
    "ddim": (vp, ddim),
    "ddim, cut off": (vp, lambda network: ddim(network, clip=True)),
    "ddim, guided": (vp, lambda network: ddim(network, guided=True)),
    "ancestral": (vp, ancestral),
    "ancestral, cut off": (vp, lambda network: ancestral(network, clip=True)),
    "two steps": (vp, two_steps),
    "ancestral, noise drawn before the call": (vp, lambda network: ancestral(network, drawn_before=True)),
    "ancestral, of a part": (of_parts, lambda network: ancestral(network.denoiser)),
    "ancestral, a known column": (held, lambda network: ancestral(network, known=0.3)),
    "euler": (flow, euler),
    "heun": (flow, lambda network: euler(network, heun=True)),
    "the average": (vp, lambda network: ddim(copy.deepcopy(network))),
    "validation": (vp, validation),
    "the same images at each level": (vp, figure),
    "images to noise": (flow, encoded),
    "a velocity made of an image": (flow, euler),
    "reverse SDE": (exploding, reverse_sde),
    "reverse SDE, few steps": (exploding, lambda network: reverse_sde(network, 12)),
    "flow of probability": (exploding, lambda network: reverse_sde(network, fresh=False)),
    "predictor and corrector": (exploding, lambda network: reverse_sde(network, corrected=True)),
    "Langevin": (exploding, langevin),
    "Langevin, a step at each level": (exploding, lambda network: langevin(network, 1)),
    "EDM": (edm, karras),
    "EDM, Euler": (edm, lambda network: karras(network, heun=False)),
    "beside another image": (beside, sampled_beside),
    "another network": (vp, lambda network: ddim(Network(), predicts="sample")),
}
FAULTS = {
    "answers are images": (vp, lambda network: ddim(network, predicts="sample"), "target-other-sampler"),
    "answers are images, noise drawn before the call": (
        vp,
        lambda network: ancestral(network, drawn_before=True, predicts="sample"),
        "target-other-sampler",
    ),
    "answers of a part are images": (
        of_parts,
        lambda network: ancestral(network.denoiser, predicts="sample"),
        "target-other-sampler",
    ),
    "answers are images, beside a known column": (
        held,
        lambda network: ancestral(network, known=0.3, predicts="sample"),
        "target-other-sampler",
    ),
    "no fresh noise": (vp, lambda network: ancestral(network, fresh=0), "export-other-schedule"),
    "the sign of the velocity": (flow, lambda network: euler(network, sign=-1), "target-other-sampler"),
    "from images to noise": (flow, lambda network: euler(network, sign=-1, begin=0.0), "export-sampled-backwards"),
    "the ends exchanged": (flow, lambda network: euler(network, begin=0.0), "export-sampled-backwards"),
    "the sign of a velocity made of an image": (flow, lambda network: euler(network, sign=-1), "target-other-sampler"),
    "the sign of the score": (lambda network: exploding(network, -1), reverse_sde, "target-other-sampler"),
    "the sign of the noise": (vp, lambda network: ddim(lambda *given: -network(*given)), "target-other-sampler"),
    "steps far too long": (exploding, lambda network: reverse_sde(network, times=25), "export-other-step"),
    "Langevin, the sign of the score": (exploding, lambda network: langevin(network, sign=-1), "export-other-step"),
    "EDM, the sign of the slope": (edm, lambda network: karras(network, slope=-1), "export-other-step"),
    "answers beside another image are images": (
        beside,
        lambda network: sampled_beside(network, "sample"),
        "target-other-sampler",
    ),
    "another schedule": (vp, lambda network: ddim(network, bar=FASTER), "export-other-schedule"),
}


def test_a_sampler_that_cuts_off_at_the_range_of_the_images():
    network, update, images = (
        Network(),
        iter(range(999)),
        torch.rand(64, C, SIDE, SIDE, generator=torch.Generator().manual_seed(1)),
    )
    sample = lambda: next(update) == 39 and ancestral(network, True, 0)  # noqa: E731
    assert train(network, vp(network), updates=40, data=images, after=sample)[0] == ["data-unsigned"]


@pytest.mark.parametrize("name", [*HEALTHY, *FAULTS])
def test_a_sampler_is_that_of_the_loss(name):
    loss, sample, *codes = (HEALTHY | FAULTS)[name]
    kind = {
        beside: Beside,
        of_parts: Parts,
        held: Network,
        edm: Preconditioned,
        vp: Network,
        flow: Velocity if "made of an image" in name else Network,
    }.get(loss, Score)
    network, update = kind(), iter(range(999))
    found, _ = train(network, loss(network), updates=40, after=lambda: next(update) == 39 and sample(network))
    assert found == codes


@pytest.mark.parametrize(
    ("loss", "sample", "reads"),
    [
        (vp, lambda network: ddim(network, predicts="sample"), "an image"),
        (vp, lambda network: ddim(lambda *given: -network(*given)), "noise with the other sign"),
        (flow, lambda network: euler(network, sign=-1), "a velocity with the other sign"),
    ],
)
def test_it_is_said_for_which_answer_a_sampler_would_be_right(loss, sample, reads):
    network, doctor = Network(), Doctor()
    with doctor.install():
        optimizer, loss_of = torch.optim.Adam(network.parameters()), loss(network)
        for _ in range(40):
            optimizer.zero_grad()
            loss_of(pictures(16)).backward()
            optimizer.step()
        sample(network)
    assert [one.figures["reads"] for one in doctor.findings() if one.code == "target-other-sampler"] == [reads]


def test_latents_that_look_like_noise_are_encoded():
    network, update = Network(), iter(range(999))
    latents = torch.randn(64, C, SIDE, SIDE, generator=torch.Generator().manual_seed(3))

    @torch.no_grad()
    def encode():
        x, times = latents[:16], torch.linspace(0.0, 1.0, STEPS).tolist()
        for now, then in pairwise(times):
            x = x + (then - now) * network(x, torch.full((len(x),), 1000 * now))

    sample = lambda: next(update) == 39 and encode()  # noqa: E731
    assert train(network, flow(network), updates=40, data=latents, after=sample)[0] == []


@pytest.mark.parametrize("layer", [torch.nn.Dropout(0.1), torch.nn.BatchNorm2d(16)])
@pytest.mark.parametrize("mode", [True, False])
def test_samples_are_made_in_evaluation_mode(layer, mode):
    network, update = Network(), iter(range(999))
    network.first = torch.nn.Sequential(network.first, layer)

    def sample():
        ddim(network.train(mode))
        network.train()

    found, _ = train(network, vp(network), updates=40, after=lambda: next(update) == 39 and sample())
    assert ("network-training-mode" in found) == mode


def trained():
    network = Network()
    optimizer, loss_of = torch.optim.Adam(network.parameters()), vp(network)
    for _ in range(40):
        optimizer.zero_grad()
        loss_of(pictures(16)).backward()
        optimizer.step()
    return weakref.ref(network), network.state_dict()


@pytest.mark.parametrize(("predicts", "codes"), [("epsilon", []), ("sample", ["target-other-sampler"])])
def test_samples_of_a_checkpoint_when_the_network_that_was_trained_is_gone(predicts, codes):
    doctor = Doctor()
    with doctor.install():
        network, weights = trained()
        gc.collect()
        assert network() is None
        again = Network()
        again.load_state_dict(weights)
        ddim(again, predicts)
    assert [one.code for one in doctor.findings()] == codes


def test_weights_that_cannot_be_read_end_the_reading_of_samplers_alone(monkeypatch):
    monkeypatch.setattr(calls, "_weights_of", lambda module: 1 / 0)
    network = Network()
    assert "variance-preserving path, epsilon" in train(network, vp(network))[1]


def test_a_network_is_called_and_kept_as_without_the_doctor():
    network, update, kept = Network(), iter(range(99)), []

    def after():
        if next(update) == 39:
            kept.append(pickle.dumps(network))
            assert pickle.loads(pickle.dumps(vars(Network)["__call__"])) is torch.nn.Module.__call__
            kept.append(network(torch.zeros(shape(2)), t=torch.zeros(2)))

    train(network, vp(network), updates=40, after=after)
    assert "__call__" not in vars(Network)
    assert torch.equal(pickle.loads(kept[0])(torch.zeros(shape(2)), torch.zeros(2)), kept[1])


def test_nothing_stands_around_a_network_that_is_compiled():
    network, update, stands = Network(), iter(range(99)), []

    def after():
        if next(update) == 10:
            stands.append("__call__" in vars(Network))
            torch.compile(network, backend="eager")
        stands.append("__call__" in vars(Network))

    train(network, vp(network), updates=20, after=after)
    assert stands[9:12] == [True, True, False] and not stands[-1]

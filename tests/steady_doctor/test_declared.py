"""A loop that says what it is to do: each departure from that is found at its stage, and none where there is none."""

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from steady_doctor import declared_doctor
from steady_doctor.declare.declaration import Declaration, Optimizer
from steady_doctor.declare.processes import DDPM, EDM2, ema_decay
from steady_doctor.declared_doctor import DeclaredDoctor
from steady_doctor.words import finding

SIZE, LEVELS, UPDATES, LIMIT, RATE = 8, 50, 8, 0.5, 1e-2
ABAR = torch.linspace(0.999, 0.02, LEVELS, dtype=torch.float64)


class Network(nn.Module):
    """Convolutions, told the level by its sine, and a label by an embedding whose last row is for none."""

    def __init__(self, classes: int = 3):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.level, self.label = nn.Linear(4, 8), nn.Embedding(classes + 1, 8)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, level: Tensor, labels: Tensor) -> Tensor:
        features = (level[:, None].float() * torch.tensor([0.01, 0.03, 0.1, 0.3])).sin()
        told = self.level(features) + self.label(labels)
        return self.last(self.drop(torch.tanh(self.first(x) + told[:, :, None, None])))


class Denoiser(nn.Module):
    """EDM2's: the network with its preconditioning, and u of each level."""

    def __init__(self, power: float = 2.0):
        """`power`: of the size of the images with noise, in c_skip."""
        super().__init__()
        self.unet, self.u, self.power = Network(), nn.Linear(2, 1, bias=False), power

    def forward(self, x: Tensor, sigma: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        size = (sigma**2 + 0.25).sqrt()[:, None, None, None]
        s = sigma[:, None, None, None]
        told = sigma.log() / 4
        denoised = 0.25 / size**self.power * x + s * 0.5 / size * self.unet(x / size, told, labels)
        return denoised, self.u(torch.stack([told.sin(), told.cos()], 1))[:, 0]


class Loop:
    """Each part of an update, to be exchanged for a wrong one. `k`: the update's number, from 1."""

    passes, limit_taken, process = 2, LIMIT, DDPM(ABAR, "epsilon")

    def __init__(self, declares: dict[str, Any] | None = None, **parts: Any):
        self.declares = declares or {}
        for name, part in parts.items():
            setattr(self, name, MethodType(part, self) if callable(part) else part)

    def noise(self, k, shape):
        return torch.randn(shape)

    def levels(self, k):
        return torch.randint(0, LEVELS, (SIZE,))

    def noised(self, clean, noise, a, b):
        return a * clean + b * noise

    def told(self, levels):
        return levels

    def labels(self, labels):
        return torch.where(labels < 0, 3, labels)

    def images(self):
        return torch.rand(SIZE, 1, 8, 8) * 2 - 1

    def target(self, clean, noise, a, b):
        return noise

    def error(self, output, target):
        return (output - target).square().flatten(1).mean(1)

    def losses(self, network, clean, noise, levels, labels):
        a, b = (part[levels].float()[:, None, None, None] for part in (ABAR.sqrt(), (1 - ABAR).sqrt()))
        output = network(self.noised(clean, noise, a, b), self.told(levels), self.labels(labels))
        return self.error(output, self.target(clean, noise, a, b))

    def loss(self, losses, network):
        return losses.mean() / self.declared.micro_steps

    def clip(self, network):
        return nn.utils.clip_grad_norm_(network.parameters(), LIMIT)

    def step(self, k, optimizer):
        optimizer.step()

    def clear(self, k, optimizer):
        optimizer.zero_grad()

    def average(self, k, network):
        self.follow(k, network)

    def between(self, k, network, optimizer):
        pass

    def groups(self, network):
        matrices = [p for p in network.parameters() if p.ndim > 1]
        others = [p for p in network.parameters() if p.ndim <= 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]

    def rate(self, k):
        return RATE / k

    def made(self, groups):
        return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-8)

    def build(self):
        return Network()

    def exported(self, network):
        return network

    def follow(self, k: int, network: nn.Module, decay: float | None = None) -> None:
        decay = ema_decay(0.99, 1.0, 0.75, k) if decay is None else decay
        for name, parameter in self.exported(network).named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 1 - decay)

    def run(self, updates: int = UPDATES) -> list[str]:
        torch.manual_seed(0)
        network = self.network = self.build()
        network.train()
        self.shadow = {name: parameter.detach().clone() for name, parameter in self.exported(network).named_parameters()}
        optimizer = self.made(self.groups(network))
        settings = {"betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False}
        self.declared = Declaration(
            self.process,
            Optimizer("AdamW", settings, 0.1),
            **{"learning_rate": lambda k: RATE / k, "micro_steps": 2, "dropout": 0.0} | self.declares,
            averages={"EMA": lambda k: ema_decay(0.99, 1.0, 0.75, k)},
            classes=3,
            no_class=3,
        )
        doctor = DeclaredDoctor(self.declared, optimizer, network, self.exported(network), {"EMA": self.shadow}, _raise)
        self.doctor = doctor
        with doctor.install():
            for k in range(1, updates + 1):
                self._update(k, network, optimizer, doctor.session)
            doctor.session.begin(updates + 1, recorded=False)
            doctor.session.followed.look()
        found = doctor.findings()
        for one in found:
            finding(one)  # has a sentence for each figure
        return [one.code for one in found]

    def _update(self, k: int, network: nn.Module, optimizer: torch.optim.Optimizer, session: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.rate(k)
        session.begin(k, recorded=k in (1, 2, 3, 5, 8) or k % 10 == 0)
        for _ in range(self.passes):
            clean, labels = self.images(), torch.randint(-1, 3, (SIZE,))
            noise, levels = self.noise(k, clean.shape), self.levels(k)
            session.tell(clean, noise, levels, labels)
            losses = self.losses(network, clean, noise, levels, labels)
            torch.autograd.backward(self.loss(losses, network))
        norm = self.clip(network)
        self.step(k, optimizer)
        session.stepped(LIMIT, norm if isinstance(norm, Tensor) else None, limit_taken=self.limit_taken)
        self.clear(k, optimizer)
        self.average(k, network)
        session.end(k, torch.tensor(True))
        session.leave()
        self.between(k, network, optimizer)


class EDM2Loop(Loop):
    process = EDM2(sigma_data=0.5, P_mean=-0.8, P_std=1.6)

    def levels(self, k):
        return (-0.8 + 1.6 * torch.randn(SIZE)).exp()

    def build(self):
        return Denoiser()

    def exported(self, network):
        return network.unet

    def weight(self, sigma):
        return (sigma**2 + 0.25) / (0.5 * sigma) ** 2

    def learned(self, error, u):
        return error / u.exp() + u

    def losses(self, network, clean, noise, levels, labels):
        denoised, u = network(clean + levels[:, None, None, None] * noise, levels, self.labels(labels))
        return self.learned(self.weight(levels) * self.error(denoised, clean), u)


def _raise(error: BaseException) -> None:
    raise error


def _moved(network: nn.Module, by: float = 1e-4) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(by)


class Cast(nn.Module):
    """The network in bfloat16, its output in float32."""

    def __init__(self):
        super().__init__()
        self.inner = Network()

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(*inputs).float()


class InHalf(nn.Module):
    """One layer in bfloat16, beside others in float32."""

    def __init__(self, layer: nn.Module, call: Any):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (part.bfloat16() for part in (self.layer.weight, self.layer.bias))
        return self.call(x.bfloat16(), weight, bias).float()


def _with(**layers: nn.Module) -> Network:
    network = Network()
    for name, layer in layers.items():
        setattr(network, name, layer)
    return network


def _elsewhere(network: nn.Module) -> None:
    """Changes one number of 72, which is not among those that are sampled."""
    with torch.no_grad():
        network.first.weight.view(-1)[-1].add_(1.0)


def _seeded(seed: int, value: Any) -> Any:
    torch.manual_seed(seed)
    return value


class Dropping(Loop):
    """Seeds the generator for each pass, after it has told what that is of. Other draws have a generator of their own."""

    def __init__(self, **parts: Any):
        super().__init__({"dropout": 0.5}, **parts)
        self.own, self.seed = torch.Generator().manual_seed(1), 10

    def build(self):
        return _dropping()

    def noise(self, k, shape):
        return torch.randn(shape, generator=self.own)

    def levels(self, k):
        return torch.randint(0, LEVELS, (SIZE,), generator=self.own)

    def told(self, levels):
        self.seed += 1
        return _seeded(self.seed, levels)


def _frozen() -> Network:
    network = Network()
    network.first.weight.requires_grad_(False)
    return network


def _hooked() -> Network:
    network = Network()
    network.first.weight.register_hook(lambda gradient: gradient / 2)
    return network


def _dropping() -> Network:
    network = Network()
    network.drop.p = 0.5
    return network


def _stale(loop: Loop, k: int, network: nn.Module) -> None:
    """Leaves out one update that nobody records."""
    if k != 4:
        loop.follow(k, network)


def _of_part(loop: Loop, k: int, network: nn.Module) -> None:
    decay = ema_decay(0.99, 1.0, 0.75, k)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            loop.shadow[name].lerp_(parameter.detach(), 1 - decay)


WRONG: dict[str, dict[str, Any]] = {  # the code that is found, and what is wrong
    "noise-not-declared: uniform noise": {"noise": lambda self, k, shape: (torch.rand(shape) - 0.5) * 12**0.5},
    "noise-not-declared: noise with an offset": {
        "noise": lambda self, k, shape: torch.randn(shape) + 0.3 * torch.randn(SIZE, 1, 1, 1)
    },
    "noise-repeated: the same noise twice": {
        "noise": lambda self, k, shape: torch.randn(shape, generator=torch.Generator().manual_seed(k // 4))
    },
    "timestep-distribution: levels of one half": {"levels": lambda self, k: torch.randint(0, LEVELS // 2, (SIZE,))},
    "timestep-dependent: sorted levels": {"levels": lambda self, k: torch.randint(0, LEVELS, (SIZE,)).sort().values},
    "timestep-not-declared: told another level": {"told": lambda self, levels: levels + 1},
    "timestep-not-declared: told levels in bfloat16": {"told": lambda self, levels: (levels * 20.3).bfloat16().float() / 20.3},
    "input-not-declared-shares: no square roots": {"noised": lambda self, x, n, a, b: a**2 * x + b**2 * n},
    "input-not-declared-shares: a second noise": {
        "noised": lambda self, x, n, a, b: a * x + b * n + 0.01 * torch.randn_like(x)
    },
    "input-not-declared-shares: a rounded input": {"noised": lambda self, x, n, a, b: (a * x + b * n).bfloat16().float()},
    "condition-not-drawn: labels of none are the first": {"labels": lambda self, labels: labels.clamp(min=0)},
    "target-not-declared: v as target": {"target": lambda self, x, n, a, b: a * n - b * x},
    "target-not-declared: a rounded target": {"target": lambda self, x, n, a, b: n.bfloat16().float()},
    "weight-uneven: a part of the pixels, whose share is made up for": {
        "error": lambda self, o, t: (o - t)[..., 1:].square().flatten(1).sum(1) / 64
    },
    "target-of-another-shape: an output of more channels": {"build": lambda self: _with(last=nn.Conv2d(8, 3, 3, padding=1))},
    "target-without-output: an output of one number": {
        "build": lambda self: _with(first=nn.Conv2d(1, 8, 8), last=nn.Conv2d(8, 1, 1))
    },
    "target-not-squared: a Huber error": {"error": lambda self, o, t: _huber(o, t).flatten(1).mean(1)},
    "weight-flat: errors cut off": {"error": lambda self, o, t: (o - t).square().flatten(1).mean(1).clamp(max=1e-3)},
    "weight-not-declared: a part of the samples": {"loss": lambda self, losses, network: losses[: SIZE // 2].mean() / 2},
    "weight-not-declared: not divided by the passes": {"loss": lambda self, losses, network: losses.mean()},
    "gradient-penalty: a penalty": {
        "loss": lambda self, losses, network: losses.mean() / 2 + 1e-3 * network.first.weight.abs().sum()
    },
    "gradient-passes: one pass": {"passes": 1},
    "gradient-not-clipped-so: not clipped": {"clip": lambda self, network: None},
    "gradient-limit: another limit, which no norm reaches": {
        "limit_taken": 1e4,
        "clip": lambda self, network: nn.utils.clip_grad_norm_(network.parameters(), 1e4),
    },
    "gradient-not-of-passes: noise in the gradient": {"clip": lambda self, network: _noisy(network)},
    "gradient-norm: another norm told": {
        "clip": lambda self, network: 2 * nn.utils.clip_grad_norm_(network.parameters(), LIMIT)
    },
    "gradient-left-over: gradients left over": {"clear": lambda self, k, optimizer: None if k % 2 else optimizer.zero_grad()},
    "rate-not-declared: another rate once, unrecorded": {"rate": lambda self, k: RATE if k == 4 else RATE / k},
    "optimizer-kind: another optimizer": {"made": lambda self, groups: torch.optim.Adam(groups)},
    "optimizer-setting: other betas": {"made": lambda self, groups: torch.optim.AdamW(groups, betas=(0.9, 0.999))},
    "optimizer-weight-decay: decay of all": {
        "groups": lambda self, network: [{"params": list(network.parameters()), "weight_decay": 0.1}]
    },
    "optimizer-parameters: biases in no group": {"groups": lambda self, network: Loop().groups(network)[:1]},
    "optimizer-count: a step twice": {"step": lambda self, k, optimizer: (optimizer.step(), optimizer.step())},
    "optimizer-count: memory lost": {
        "between": lambda self, k, network, optimizer: optimizer.state.clear() if k == 6 else None
    },
    "ema-not-declared: an average twice": {
        "average": lambda self, k, network: (self.follow(k, network), self.follow(k, network))
    },
    "ema-not-declared: an average of a part": {"average": lambda self, k, network: _of_part(self, k, network)},
    "ema-not-followed: an average left out once": {"average": lambda self, k, network: _stale(self, k, network)},
    "ema-changed-between: an average changed between": {
        "between": lambda self, k, network, optimizer: self.shadow["first.weight"].mul_(1.01) if k == 6 else None
    },
    "state-changed-between: weights changed between": {
        "between": lambda self, k, network, optimizer: _moved(network) if k == 6 else None
    },
    "state-changed-in-update: a number changed after the step": {"average": lambda self, k, network: _elsewhere(network)},
    "state-changed-in-update: a number changed before the step": {"clip": lambda self, network: _elsewhere(network)},
    "state-changed-in-update: a number changed before the passes": {
        "noise": lambda self, k, shape: (_elsewhere(self.network), torch.randn(shape))[1]
    },
    "network-mode: evaluation mode": {"between": lambda self, k, network, optimizer: network.eval()},
    "gradient-not-slope: a hook that halves": {"build": lambda self: _hooked()},
    "network-trained: a frozen layer": {"build": lambda self: _frozen()},
    "network-dropout: dropout": {"build": lambda self: _dropping()},
    "network-layers-precision: bfloat16 layers": {"build": lambda self: Cast()},
    "network-layers-precision: a bfloat16 convolution": {
        "build": lambda self: _with(last=InHalf(nn.Conv2d(8, 1, 3), lambda *of: nn.functional.conv2d(*of, padding=1)))
    },
    "network-layers-precision: a bfloat16 linear layer": {
        "build": lambda self: _with(level=InHalf(nn.Linear(4, 8), nn.functional.linear))
    },
    "network-layers-precision: bfloat16 layers declared": {"declares": {"layers": torch.bfloat16}},
}


def _huber(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.huber_loss(output, target, reduction="none", delta=0.1)


def _noisy(network: nn.Module) -> None:
    nn.utils.clip_grad_norm_(network.parameters(), LIMIT)
    for parameter in network.parameters():
        parameter.grad.add_(1e-3 * parameter.grad.norm() * torch.randn_like(parameter))


OF_EDM2: dict[str, tuple[dict[str, Any], set[str]]] = {
    "as declared": ({}, set()),
    "levels at which float32 keeps no digit of the error": (
        {"levels": lambda self, k: (-12 + torch.randn(SIZE)).exp(), "process": EDM2(0.5, P_mean=-12.0, P_std=1.0)},
        set(),
    ),
    "another target there": (
        {
            "levels": lambda self, k: (-12 + torch.randn(SIZE)).exp(),
            "process": EDM2(0.5, P_mean=-12.0, P_std=1.0),
            "build": lambda self: Denoiser(power=1.0),
        },
        {"target-not-declared"},
    ),
    "a penalty of the network without u": (
        {
            "loss": lambda self, losses, network: (losses.mean() + _penalty(network.unet)) / 2,
            "declares": {"l1_weight": 1e-3},
        },
        set(),
    ),
    "u detached": ({"learned": lambda self, error, u: error / u.detach().exp() + u.detach()}, {"weight-learned"}),
    "exp(u) multiplied": ({"learned": lambda self, error, u: error * u.exp() + u}, {"weight-not-declared", "weight-learned"}),
    "no u": ({"learned": lambda self, error, u: error}, {"weight-not-learned"}),
    "lambda of another sigma_data": ({"weight": lambda self, sigma: (sigma**2 + 1) / sigma**2}, {"weight-not-declared"}),
}


@pytest.mark.parametrize("name", OF_EDM2)
def test_an_edm2_loop(name):
    parts, expected = OF_EDM2[name]
    found = set(EDM2Loop(**parts).run(30))
    assert expected & found if expected else found == set()


@pytest.mark.parametrize("name", WRONG)
def test_departures_from_what_is_declared(name):
    code = name.split(": ")[0]
    updates = 80 if code in ("timestep-dependent", "noise-not-declared") else UPDATES  # chance needs many
    assert code in Loop(**WRONG[name]).run(updates)[:3]


def _drawing(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().flatten(1).mean(1) + 0 * torch.rand(SIZE) * output.flatten(1).mean(1)


def _convolutions() -> dict[str, tuple[nn.Module, Any]]:
    sizes = {"first": (1, 8), "last": (8, 1)}
    return {name: (nn.Conv2d(*of, 3), lambda *of: nn.functional.conv2d(*of, padding=1)) for name, of in sizes.items()}


def _normed() -> Network:
    """Its power iteration writes over where it began, and the output cannot be computed again."""
    network = Network()
    spectral_norm(network.first)
    return network


def _with_zeros() -> Network:
    network = Network()
    nn.init.zeros_(network.level.weight)
    return network


def _penalty(network: nn.Module) -> Tensor:
    return 1e-3 * sum(parameter.abs().sum() for parameter in network.parameters() if parameter.ndim > 1)


def _noted(loop: Loop, loss: Tensor) -> Tensor:
    loop.newest = loss
    return loss


def _figures(loop: Loop, network: nn.Module) -> Tensor:
    """As read together for a report; their graph has the network's output and its parameters."""
    return torch.cat([loop.newest.reshape(1), *(parameter.flatten() for parameter in network.parameters())])


RIGHT: dict[str, dict[str, Any]] = {
    "as declared": {},
    "gray images of little contrast, in bfloat16": {
        "images": lambda self: 0.5 + 0.002 * torch.randn(SIZE, 1, 8, 8),
        "build": lambda self: Cast(),
        "declares": {"layers": torch.bfloat16},
    },
    "a loss that cannot be computed again": {"error": lambda self, o, t: _drawing(o, t)},
    "linear layers in more than is declared": {
        "build": lambda self: _with(**{name: InHalf(*of) for name, of in _convolutions().items()}),
        "declares": {"layers": torch.bfloat16},
    },
    "more micro steps than are recorded": {"passes": 6, "declares": {"micro_steps": 6}},
    "bfloat16 layers": {"build": lambda self: Cast(), "declares": {"layers": torch.bfloat16}},
    "noise told in another layout": {"noise": lambda self, k, shape: torch.randn(shape).transpose(2, 3)},
    "figures of the loss beside those of weights, which cannot be made again": {
        "build": lambda self: _normed(),
        "loss": lambda self, losses, network: _noted(self, losses.mean() / 2),
        "average": lambda self, k, network: (_figures(self, network), self.follow(k, network)),
    },
    "a penalty as declared, of a layer that begins with zeros, before a warm-up": {
        "build": lambda self: _with_zeros(),
        "loss": lambda self, losses, network: (losses.mean() + _penalty(network)) / 2,
        "rate": lambda self, k: RATE * (k - 1),
        "declares": {"l1_weight": 1e-3, "learning_rate": lambda k: RATE * (k - 1)},
    },
    "dropout as declared is left to the option": {"between": lambda self, k, network, optimizer: network.train()},
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_where_nothing_is_wrong(name):
    assert Loop(**RIGHT[name]).run(30) == []


def test_dropout_is_judged_by_the_generator_as_the_pass_begins():
    reset = {"between": lambda self, k, network, optimizer: torch.manual_seed(0)}  # as a preview does
    assert Dropping(**reset).run() == []
    assert "network-same-dropout" in Dropping(told=lambda self, levels: _seeded(0, levels)).run()


def test_an_update_that_is_made_again_is_forgotten():
    for erred in (UPDATES, 5):
        loop = Loop(average=lambda self, k, network, at=erred: (_moved(network) if k == at else None, self.follow(k, network)))
        codes = loop.run()
        assert {"state-changed-in-update", "state-changed-between"} <= set(codes)
        loop.doctor.forget()
        assert [one.code for one in loop.doctor.findings()] == ([] if erred == UPDATES else codes)


def test_levels_are_looked_at_again_when_there_are_enough_new_ones(monkeypatch):
    counts = []
    identify = declared_doctor.identify_levels
    monkeypatch.setattr(declared_doctor, "identify_levels", lambda *of: counts.append(len(of[1])) or identify(*of))
    loop = Loop()
    loop.run(30)
    for _ in range(3):
        loop.doctor.findings()
    assert counts == [30 * 2 * SIZE]

"""What the laws of gradient, optimizer, learning rate, averages and state find in a loop of one network, and do not find."""

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, LambdaLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from steady_doctor import words
from steady_doctor.doctor import Doctor

STAGES = {"gradient", "optimizer", "learning_rate", "ema", "state"}


class Network(nn.Module):
    def __init__(self, norm: bool = False):
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 12)
        self.norm = nn.BatchNorm1d(24) if norm else nn.Identity()
        self.cut = contextlib.nullcontext

    def forward(self, x):
        with self.cut():
            hidden = self.norm(torch.relu(self.first(x)))
        return self.last(hidden)


def codes(updates=5, passes=1, network=Network, optimizer=None, schedule=None, averaged=copy.deepcopy, ended=True, **events):
    """Trains, with `events[name](now)` at its place in each update; returns the figures of what was found, by its code."""
    doctor = Doctor()
    with doctor.install():
        torch.manual_seed(0)
        now = SimpleNamespace(step=0, model=network(), kept=None)
        now.ema = averaged(now.model)
        now.optimizer = (optimizer or (lambda model: AdamW(model.parameters(), 1e-3)))(now.model)
        now.schedule = schedule(now.optimizer) if schedule else None

        def at(name):
            if name in events:
                events[name](now)

        for now.step in range(updates):
            for now.k in range(passes):
                at("begin")
                x = torch.randn(8, 12)
                now.loss = mse_loss(now.model(x), 0.3 * x + 1) / passes
                at("loss")
                now.loss.backward()
                at("backward")
            at("before_step")
            now.optimizer.step()
            at("stepped")
            now.optimizer.zero_grad()
            if now.schedule is not None:
                now.schedule.step()
            at("end")
    assert doctor.session.failure is None
    return {one.code: one.figures for one in doctor.findings(ended) if words.stage(one.code) in STAGES}


@torch.no_grad()
def mix(now, keep=0.9, source=None):
    for old, new in zip(now.ema.parameters(), (source or now.model).parameters()):
        old.lerp_(new, 1 - keep)


def clip(now, limit=0.01, model=None):
    nn.utils.clip_grad_norm_((model or now.model).parameters(), limit)


def change(now, do):
    with torch.no_grad():
        do(now.model.first.weight)


def each_gradient(now, do):
    for parameter in now.model.parameters():
        if parameter.grad is not None:
            do(parameter.grad)


def every(count, do):
    return lambda now: do(now) if now.step % count == count - 1 else None


def rates(rate):
    """A learning rate that is set by hand: of the update, from 0."""

    def event(now):
        for group in now.optimizer.param_groups:
            group["lr"] = rate(now.step, group["lr"])

    return event


def two_groups(model):
    return AdamW([{"params": model.first.parameters()}, {"params": model.last.parameters()}], 1e-3)


def beside_another(model):
    """An average, beside a network with layers of other sizes."""
    average = copy.deepcopy(model)
    average.other = [nn.BatchNorm1d(5)]  # no module of it
    return average


FOUND = {  # within 5 updates
    "gradient-left-over": {"optimizer": lambda m: Deaf(m.parameters(), 1e-3)},
    "gradient-cleared-before-step": {"before_step": lambda now: now.optimizer.zero_grad()},
    "gradient-cleared-between": {"begin": lambda now: now.optimizer.zero_grad(), "passes": 2},
    "gradient-partly-cleared": {"before_step": lambda now: now.model.last.weight.grad.zero_()},
    "gradient-clipped-early": {"backward": clip, "passes": 2},
    "gradient-clipped-late": {"stepped": clip},
    "gradient-clipped-others": {"before_step": lambda now: clip(now, model=now.ema)},
    "gradient-cut-on-one-side": {"before_step": lambda now: each_gradient(now, lambda g: g.clamp_(max=1e-3))},
    "gradient-reversed": {"before_step": lambda now: each_gradient(now, torch.Tensor.neg_)},
    "gradient-below-epsilon": {"loss": lambda now: setattr(now, "loss", now.loss * 1e-9)},
    "gradient-clipped-away": {"before_step": lambda now: clip(now, 1e-4), "optimizer": lambda m: SGD(m.parameters(), 0.01)},
    "gradient-zero": {"loss": lambda now: setattr(now, "loss", now.loss * 0), "updates": 8},
    "gradient-none": {"loss": lambda now: setattr(now, "loss", torch.tensor(1.0, requires_grad=True))},
    "gradient-missing": {"begin": lambda now: setattr(now.model, "cut", torch.no_grad)},
    "gradient-not-finite": {"loss": lambda now: setattr(now, "loss", now.loss * torch.inf), "updates": 2},
    "optimizer-of-a-copy": {"optimizer": lambda m: AdamW(copy.deepcopy(m).parameters())},
    "optimizer-lacks-parameters": {"optimizer": lambda m: AdamW(m.first.parameters())},
    "optimizer-stepped-again": {"stepped": lambda now: now.optimizer.step(), "updates": 8},
    "optimizer-made-anew": {
        "end": every(3, lambda now: setattr(now, "optimizer", AdamW(now.model.parameters()))),
        "updates": 8,
    },
    "optimizer-state-lost": {"end": every(3, lambda now: now.optimizer.state.clear()), "updates": 8},
    "optimizer-betas": {"optimizer": lambda m: Adam(m.parameters(), betas=(0.999, 0.9)), "updates": 2},
    "optimizer-decay": {"optimizer": lambda m: AdamW(m.parameters(), 1e-4, weight_decay=10), "updates": 2},
    "optimizer-epsilon": {"optimizer": lambda m: AdamW(m.parameters(), eps=10)},
    "optimizer-half-precision": {
        "network": lambda: Rounded(torch.bfloat16),
        "optimizer": lambda m: AdamW(m.parameters(), 1e-5),
    },
    "rate-high": {"optimizer": lambda m: Adam(m.parameters(), 0.1), "updates": 2},
    "rate-large-steps": {"optimizer": lambda m: SGD(m.parameters(), 30.0), "updates": 3},
    "rate-low": {"optimizer": lambda m: Adam(m.parameters(), 1e-9), "updates": 3},
    "ema-sum": {"end": lambda now: change_average(now, lambda old, new: old.mul_(0.95).add_(new, alpha=0.04))},
    "ema-share": {"end": lambda now: mix(now, 1.01)},
    "ema-of-others": {"averaged": lambda m: Network(), "end": mix},
    "ema-each-pass": {"backward": mix, "passes": 2},
    "ema-before-step": {"before_step": mix},
    "ema-is-the-network": {"averaged": lambda m: m, "end": mix},
    "ema-part": {"end": lambda now: change_average(now, lambda old, new: old.lerp_(new, 0.1), 1), "updates": 13},
    "state-weights-written": {"end": every(4, lambda now: change(now, lambda weight: weight.mul_(0.99))), "updates": 7},
    "state-not-loaded": {
        "begin": lambda now: now.model.load_state_dict(
            {f"module.{k}": v for k, v in now.model.state_dict().items()}, strict=False
        )
    },
    "state-not-copied": {"optimizer": lambda m: masters(m), "before_step": lambda now: give(now), "end": mix},
}
LATER = {  # within 22
    "rate-compounds": {"begin": rates(lambda step, rate: rate * min((step + 1) / 8, 1))},
    "rate-zero": {"begin": rates(lambda step, rate: rate * min((step + 1) / 20, 1))},
    "rate-zero-group": {"optimizer": two_groups, "begin": lambda now: now.optimizer.param_groups[0].update(lr=0.0)},
    "rate-factor": {"schedule": lambda o: LambdaLR(o, lambda step: 1e-3 * min(1, (step + 1) / 4))},
    "rate-not-stepped": {"schedule": lambda o: SimpleNamespace(made=CosineAnnealingLR(o, 22), step=lambda: None)},
    "rate-schedule-short": {"schedule": lambda o: CosineAnnealingLR(o, 8)},
    "rate-schedule-long": {"schedule": lambda o: CosineAnnealingLR(o, 200)},
    "rate-stepped-often": {"schedule": lambda o: CosineAnnealingLR(o, 22), "end": lambda now: now.schedule.step()},
    "rate-stepped-seldom": {"schedule": lambda o: Seldom(CosineAnnealingLR(o, 22), 5)},
    "rate-still-rising": {"schedule": lambda o: LambdaLR(o, lambda step: (step + 1) / 100)},
    "rate-one-group": {
        "optimizer": two_groups,
        "begin": lambda now: now.optimizer.param_groups[0].update(lr=1e-3 / (1 + now.step)),
    },
    "rate-other-optimizer": {"schedule": lambda o: LambdaLR(AdamW(o.param_groups[0]["params"]), lambda step: 1.0)},
    "ema-exchanged": {"end": lambda now: mix(now, 0.01)},
    "ema-falling": {"end": lambda now: mix(now, 0.9 ** (1 + now.step))},
    "ema-copies": {"end": lambda now: mix(now, 0.0), "updates": 2001},
    "ema-never-updated": {},
    "ema-statistics": {"network": lambda: Network(norm=True), "end": mix, "averaged": beside_another},
    "state-generator": {"end": every(4, lambda now: torch.manual_seed(7))},
}


class Deaf(AdamW):
    def zero_grad(self, set_to_none=True):
        pass


class Seldom:
    """A schedule that is stepped once in so many updates."""

    def __init__(self, made, count):
        self.made, self.count, self.calls = made, count, 0

    def step(self):
        self.calls += 1
        if self.calls % self.count == 0:
            self.made.step()


class Rounded(Network):
    def __init__(self, dtype):
        super().__init__()
        self.to(dtype)

    def forward(self, x):
        return super().forward(x.to(self.first.weight.dtype)).float()


@torch.no_grad()
def change_average(now, do, count=None):
    for old, new in list(zip(now.ema.parameters(), now.model.parameters()))[:count]:
        do(old, new)


def masters(model):
    return AdamW([nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()], 1e-3)


def give(now):
    """Gradients by hand, to the copies that the optimizer has."""
    for copied, parameter in zip(now.optimizer.param_groups[0]["params"], now.model.parameters()):
        copied.grad, parameter.grad = parameter.grad, None


def put_back(now):
    with torch.no_grad():
        for copied, parameter in zip(now.optimizer.param_groups[0]["params"], now.model.parameters()):
            parameter.copy_(copied)


def preview(now):
    """With the averaged weights, which are taken out again; with a generator's state that is put back."""
    kept, state = copy.deepcopy(now.model.state_dict()), torch.get_rng_state()
    now.model.load_state_dict(now.ema.state_dict())
    torch.manual_seed(7)
    now.model(torch.randn(8, 12))
    now.model.load_state_dict(kept)
    torch.set_rng_state(state)


@torch.no_grad()
def normalize(now):
    for layer in (now.model.first, now.model.last):
        layer.weight.copy_(layer.weight / layer.weight.norm(dim=1, keepdim=True))


class Unused(Network):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(8, 8))

    @staticmethod
    def zero(now):
        now.loss = now.loss + 0 * now.model.unused.sum()


def keep(now):
    """Gradients of each pass, beside the parameters, whose own are cleared."""
    now.kept = [parameter.grad + kept for parameter, kept in zip(now.model.parameters(), now.kept or [0] * 9)]
    now.optimizer.zero_grad()


def give_back(now):
    for parameter, kept in zip(now.model.parameters(), now.kept):
        parameter.grad = kept
    now.kept = None


RIGHT = {
    "plain": {"end": mix},
    "micro steps, clipped once": {"passes": 3, "before_step": clip, "end": mix},
    "SGD, clipped by value": {
        "optimizer": lambda m: SGD(m.parameters(), 0.01, momentum=0.9),
        "before_step": lambda now: nn.utils.clip_grad_value_(now.model.parameters(), 1e-2),
        "end": mix,
    },
    "an average that begins late": {"end": lambda now: mix(now, 0.0 if now.step < 8 else 0.95)},
    "an average in rhythm": {"end": every(4, mix), "updates": 60},
    "a warm-up of the decay": {"end": lambda now: mix(now, min(0.999, (1 + now.step) / (10 + now.step)))},
    "an average of torch's": {
        "averaged": lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.98)),
        "end": lambda now: now.ema.update_parameters(now.model),
    },
    "warm-up, then constant": {"schedule": lambda o: LambdaLR(o, lambda step: min(1, (step + 1) / 4)), "end": mix},
    "a cosine as long as the run": {"schedule": lambda o: CosineAnnealingLR(o, 22), "end": mix},
    "warm-up, then cosine": {
        "schedule": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=4), CosineAnnealingLR(o, 18)], [4]),
        "end": mix,
    },
    "a rate that falls as one over the updates": {"begin": rates(lambda step, rate: 1e-3 / (step + 1)), "end": mix},
    "a rate that falls by the same factor": {"begin": rates(lambda step, rate: 0.8 * rate), "end": mix},
    "two parts of a training, each with an optimizer of its own": {
        "end": lambda now: (every(12, lambda now: setattr(now, "optimizer", AdamW(now.model.parameters())))(now), mix(now)),
    },
    "a group that is frozen by hand": {
        "optimizer": two_groups,
        "begin": lambda now: now.optimizer.param_groups[1].update(lr=1e-3 if now.step < 9 else 0.0),
        "end": mix,
    },
    "a schedule of each group": {
        "optimizer": two_groups,
        "schedule": lambda o: LambdaLR(o, [lambda step: 1.0, lambda step: 0.99**step]),
        "end": mix,
    },
    "restarts": {"schedule": lambda o: CosineAnnealingWarmRestarts(o, 5), "end": mix},
    "a schedule of a longer run that was cut": {"schedule": lambda o: CosineAnnealingLR(o, 500), "end": mix, "ended": False},
    "previews": {"end": lambda now: (mix(now), every(5, preview)(now))},
    "weights that are normalized": {"end": lambda now: (normalize(now), mix(now))},
    "copies that are trained": {"optimizer": masters, "before_step": give, "end": lambda now: (put_back(now), mix(now))},
    "no average": {"averaged": lambda m: None},
    "an average that begins later": {"end": lambda now: mix(now, 0.0)},
    "unused parameters in the loss, times 0": {"network": lambda: Unused(), "loss": Unused.zero, "end": mix},
    "gradients that are added up elsewhere": {"passes": 2, "backward": keep, "before_step": give_back, "end": mix},
}


@pytest.mark.parametrize("code", [*FOUND, *LATER])
def test_what_is_wrong_is_found(code):
    assert code in codes(**FOUND[code] if code in FOUND else LATER[code] | {"updates": 22} | LATER[code])


def test_one_group_that_is_brought_to_0_by_hand():
    falls = {"begin": lambda now: now.optimizer.param_groups[0].update(lr=1e-3 * (1 - now.step / 21))}
    assert "rate-one-group" in codes(optimizer=two_groups, updates=22, **falls)


def test_an_average_of_layers_that_begin_alike_has_all_of_them():
    class Alike(Network):
        def __init__(self):
            super().__init__()
            self.more = nn.ModuleList(copy.deepcopy(self.first) for _ in range(3))

        def forward(self, x):
            return super().forward(x) + sum(self.last(part(x)) for part in self.more)

    assert [*codes(network=Alike, updates=22)] == ["ema-never-updated"]


def test_an_average_may_be_among_the_parameters_of_the_optimizer():
    class WithAverage(Network):
        def __init__(self):
            super().__init__()
            self.average = nn.ParameterList(parameter.detach().clone() for parameter in self.parameters()).requires_grad_(False)

    assert [*codes(network=WithAverage, averaged=lambda m: None, updates=22)] == ["ema-never-updated"]


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not(name):
    assert codes(**{"updates": 22} | RIGHT[name]) == {}


@pytest.mark.parametrize(
    ("keep", "found"),
    [
        (lambda step: (0.9, 0.95), []),
        (lambda step: (0.1, 0.02), ["ema-exchanged"]),
        (lambda step: (0.1, 0.9), []),
        (lambda step: (0.9**step, 0.95**step), ["ema-falling"]),
        (lambda step: (0.9**step, 1 - 0.9**step), []),
        (lambda step: (0.0, 0.0) if step < 6 else (0.9 - step / 40, 0.9 - step / 50), ["ema-falling"]),
    ],
)
def test_two_averages_are_judged_by_what_both_do(keep, found):
    def update(now):
        for average, share in zip(now.ema, keep(1 + now.step)):
            mix(SimpleNamespace(ema=average, model=now.model), share)

    averaged = lambda model: nn.ModuleList([copy.deepcopy(model), copy.deepcopy(model)])  # noqa: E731
    assert list(codes(averaged=averaged, end=update, updates=22)) == found


def cosine(total_steps):
    return lambda step: 0.5 + 0.5 * math.cos(math.pi * step / total_steps)


def test_a_schedule_that_is_long_over_need_not_wait_for_the_end():
    for schedule in (lambda o: CosineAnnealingLR(o, 8), lambda o: LambdaLR(o, cosine(8))):
        assert list(codes(schedule=schedule, updates=14, end=mix, ended=False)) == ["rate-schedule-short"]
    assert codes(schedule=lambda o: LambdaLR(o, cosine(14)), updates=14, end=mix, ended=False) == {}


def test_what_wrote_to_the_weights_is_named():
    assert "mul_" in codes(**FOUND["state-weights-written"])["state-weights-written"]["by"]


def test_a_falling_line_of_factors_multiplies_what_it_left_before():
    assert "rate-compounds" in codes(begin=rates(lambda step, rate: rate * (1 - 0.9 * step / 22)), updates=22)
    assert codes(begin=rates(lambda step, rate: 5e-4 * (1 + math.cos(math.pi * step / 64))), updates=64, end=mix) == {}

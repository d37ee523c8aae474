"""The step audit, asked about a loop that is written here: one that does what it declares, and one with each of many faults."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DModel

from utils.diagnostics.audit.averages import check_averages
from utils.diagnostics.audit.conditions import check_told
from utils.diagnostics.audit.declared import Declared, DeclaredNoising, DeclaredOptimizer
from utils.diagnostics.audit.elements import ElementSample
from utils.diagnostics.audit.gradients import check_gradients
from utils.diagnostics.audit.noising import check_noising
from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.optimizer import check_optimizer
from utils.diagnostics.audit.pooled import Pool
from utils.diagnostics.audit.seen import Call, MicroStep, on_cpu
from utils.diagnostics.audit.slopes import check_slopes
from utils.diagnostics.audit.state import check_network, check_state

RATE, DECAY, STEPS = 1e-3, 0.9, 1000
LABELS = torch.tensor([0, 2, 1, 5])


def network(classes: int | None = None) -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        num_class_embeds=classes,
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )


def declared(prediction_type="epsilon", micro_steps=1, autocast=None, snr_gamma=5.0) -> Declared:
    return Declared(
        DeclaredNoising("linear", STEPS, False, prediction_type, snr_gamma),
        None,
        DeclaredOptimizer("adamw", 0.9, 0.999, 1e-8, 0.01, 0.9, lambda step: RATE, 1.0),
        micro_steps,
        autocast,
        averages={"EMA": lambda number: DECAY},
    )


def snr_weights(prediction_type: str, abar: torch.Tensor, gamma: float = 5.0) -> torch.Tensor:
    snr = abar / (1 - abar)
    clipped = snr.clamp(max=gamma)
    return {"epsilon": clipped / snr, "sample": clipped, "v_prediction": clipped / (snr + 1)}[prediction_type]


class Loop:
    """Trains on random images; a fault replaces one of its methods."""

    def __init__(self, wanted: Declared, batch=16):
        self.declared, self.batch = wanted, batch
        self.network = self.make_network().train()
        groups = [[p for p in self.network.parameters() if (p.ndim > 1) is many] for many in (True, False)]
        self.matrices, self.others = groups
        self.optimizer = self.make_optimizer()
        self.average = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        self.scheduler = DDPMScheduler(num_train_timesteps=STEPS)
        self.abar = self.scheduler.alphas_cumprod
        self.observer = Observer({"network": self.network}, {"EMA": self.average})
        self.pool = Pool(wanted)
        self.generator = torch.Generator().manual_seed(1)

    @property
    def groups(self):
        return [{"params": self.matrices, "weight_decay": 0.01}, {"params": self.others, "weight_decay": 0.0}]

    def make_network(self):
        return network()

    def call(self, x, t):
        return self.network(x, t).sample

    def make_optimizer(self):
        return torch.optim.AdamW(self.groups, lr=RATE, betas=(0.9, 0.999))

    def images(self):
        blocks = torch.randn(self.batch, 3, 2, 2, generator=self.generator).tanh()
        return blocks.repeat_interleave(4, 2).repeat_interleave(4, 3)

    def noise(self, x0):
        return torch.randn(x0.shape, generator=self.generator)

    def timesteps(self):
        return torch.randint(STEPS, (self.batch,), generator=self.generator)

    def noisy(self, x0, noise, t):
        a = self.abar[t].sqrt()[:, None, None, None]
        return a * x0 + (1 - a**2).sqrt() * noise

    def tell(self, t):
        return t

    def target(self, x0, noise, t):
        a = self.abar[t].sqrt()[:, None, None, None]
        kind = self.declared.noising.prediction_type
        return {"epsilon": noise, "sample": x0, "v_prediction": a * noise - (1 - a**2).sqrt() * x0}[kind]

    def weights(self, t):
        return snr_weights(self.declared.noising.prediction_type, self.abar[t])

    def error(self, output, target):
        return (output - target).square().flatten(1).mean(1)

    def loss(self, errors, t):
        return (self.weights(t) * errors).mean() / self.declared.micro_steps

    def between_micro_steps(self):
        pass

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)

    def step(self):
        self.optimizer.step()

    def clear(self):
        self.network.zero_grad()

    def update_average(self, number):
        for name, p in self.network.named_parameters():
            self.average[name].lerp_(p.detach(), 1 - DECAY)

    def update(self, number: int, asks=False):
        """One update, audited; its checks."""
        self.observer.begin(number, asks)
        cast = self.declared.autocast
        for micro_step in range(self.declared.micro_steps):
            if micro_step:
                self.between_micro_steps()
            x0, t = self.images(), self.timesteps()
            noise = self.noise(x0)
            self.observer.begin_micro_step()
            with torch.autocast("cpu", cast) if cast else nullcontext():
                output = self.call(self.noisy(x0, noise, t), self.tell(t))
            self.observer.tell(clean_images=x0, noise=noise, timesteps=t)
            self.pool.add_levels(t)
            self.pool.add_noise(noise)
            self.loss(self.error(output.float(), self.target(x0, noise, t)), t).backward()
        self.clip()
        self.step()
        self.clear()
        self.observer.end_step()
        self.update_average(number)
        seen = self.observer.end_update()
        checks = check_network(seen, self.observer, self.declared) + check_noising(seen.micro_steps, self.declared)
        checks += check_gradients(seen, self.declared) + check_slopes(seen, self.declared, self.observer)
        checks += check_optimizer(seen, self.declared, self.observer) + check_state(seen, self.declared, self.observer)
        return checks + check_averages(seen, self.declared, self.observer) + self.pool.checks()


def wrong(checks) -> list:
    return [check for check in checks if check.healthy is False]


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize(("micro_steps", "autocast"), [(1, None), (3, None), (2, torch.bfloat16)])
def test_a_healthy_loop_has_no_deviation_and_all_is_observed(prediction_type, micro_steps, autocast):
    loop = Loop(declared(prediction_type, micro_steps, autocast))
    for number in range(2):
        checks = loop.update(number, asks=number == 0)
        assert wrong(checks) == []
        assert [check for check in checks if check.healthy is None] == []
    stages = {check.stage for check in checks}
    assert stages == {
        "network",
        "timestep",
        "input",
        "target",
        "weight",
        "gradient",
        "optimizer",
        "learning_rate",
        "state",
        "ema",
        "noise",
    }


def test_without_hooks_of_the_forward_pass_gradients_and_averages_are_still_observed():
    """As in updates of a compiled network that must not run eagerly."""
    loop = Loop(declared())
    loop.observer.eager = False
    seen = {check.name: check.healthy for check in loop.update(0)}
    assert False not in seen.values() and seen["gradients before the first backward pass"] and seen["EMA"]
    loop.clear = lambda: None
    loop.update_average = lambda number: None
    loop.update(1)
    assert {check.name for check in wrong(loop.update(2))} == {"gradients before the first backward pass", "EMA"}


class LabeledLoop(Loop):
    """Its class embedding begins at zero, as some do."""

    def make_network(self):
        made = network(6)
        torch.nn.init.zeros_(made.class_embedding.weight)
        return made

    def call(self, x, t):
        return self.network(x, t, torch.arange(len(x)) % 6).sample


def without_classes(loop):
    forward = loop.network.class_embedding.forward
    loop.network.class_embedding.forward = lambda labels: forward(labels) * 0.0


def classes_without_gradients(loop):
    forward = loop.network.class_embedding.forward
    loop.network.class_embedding.forward = lambda labels: forward(labels).detach()


def without_any_gradient(loop):
    loop.clip = loop.clear


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        (lambda loop: None, set()),
        (without_classes, {"condition"}),
        (classes_without_gradients, {"gradient"}),  # which is why labels change nothing
        (without_any_gradient, {"gradient"}),
    ],
)
def test_labels_that_change_nothing_are_named_where_gradients_reach_them(change, stages):
    loop = LabeledLoop(declared())
    change(loop)
    loop.update(0)
    found = {check.stage for check in wrong(loop.update(5, asks=True))}
    assert found - {"optimizer", "ema"} == stages  # no gradient, no step


OPTIMIZERS = {  # (name, momentum) as declared, and torch's of these settings
    ("adamw", 0.9): lambda loop: loop.make_optimizer(),
    ("rmsprop", 0.9): lambda loop: torch.optim.RMSprop(loop.groups, lr=RATE, momentum=0.9, eps=1e-8),
    ("rmsprop", 0.0): lambda loop: torch.optim.RMSprop(loop.groups, lr=RATE, eps=1e-8),
    ("sgd", 0.9): lambda loop: torch.optim.SGD(loop.groups, lr=RATE, momentum=0.9),
    ("sgd", 0.0): lambda loop: torch.optim.SGD(loop.groups, lr=RATE),
}
OTHERS = {
    ("adamw", 0.9): lambda loop: torch.optim.AdamW(loop.groups, lr=RATE, amsgrad=True),
    ("rmsprop", 0.9): OPTIMIZERS["rmsprop", 0.0],
    ("rmsprop", 0.0): lambda loop: torch.optim.RMSprop(loop.groups, lr=RATE, eps=1e-8, centered=True),
    ("sgd", 0.9): OPTIMIZERS["sgd", 0.0],
    ("sgd", 0.0): OPTIMIZERS["sgd", 0.9],
}


@pytest.mark.parametrize(("name", "momentum"), OPTIMIZERS)
def test_the_optimizer_keeps_what_the_declared_one_keeps(name, momentum):
    settings = replace(declared().optimizer, name=name, momentum=momentum)
    for make in (OPTIMIZERS[name, momentum], OTHERS[name, momentum]):
        loop = Loop(replace(declared(), optimizer=settings))
        loop.optimizer = make(loop)
        found = [check for number in range(3) for check in wrong(loop.update(number))]
        if make is OPTIMIZERS[name, momentum]:
            assert found == []
        else:
            assert {check.stage for check in found} == {"optimizer"}
            assert "keeps" in found[0].message and found[0].declared != found[0].observed


def test_a_momentum_that_a_resume_set_to_0_may_stay():
    settings = replace(declared().optimizer, name="sgd", momentum=0.0)
    loop = Loop(replace(declared(), optimizer=settings))
    loop.optimizer = torch.optim.SGD(loop.groups, lr=RATE)
    for group in loop.groups:
        for parameter in group["params"]:
            loop.optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    assert [check for number in range(2) for check in wrong(loop.update(number))] == []


def set_(**methods):
    def change(loop):
        for name, method in methods.items():
            setattr(loop, name, method.__get__(loop))

    return change


def optimizer(make):
    def change(loop):
        loop.optimizer = make(loop)

    return change


def noisy_with(a, b):
    return lambda self, x0, noise, t: a(self.abar[t])[:, None, None, None] * x0 + b(self.abar[t])[:, None, None, None] * noise


def with_gradients(change):
    def clip(self):
        for p in self.network.parameters():
            p.grad = change(p.grad)
        Loop.clip(self)

    return clip


def hooked(self, output, target):
    output.register_hook(lambda gradient: gradient * 3)
    return Loop.error(self, output, target)


def averaged(self, number, of):
    for name, p in self.network.named_parameters():
        of(self.average[name], p.detach())


def hooked_parameter(loop):
    loop.network.conv_in.weight.register_hook(lambda gradient: gradient / 2)


def detached(loop):
    """The skip connections of the last block take no gradients."""
    block = loop.network.up_blocks[1]
    forward = block.forward
    block.forward = lambda x, skips, *rest, **named: forward(x, tuple(s.detach() for s in skips), *rest, **named)


def without_gradients(loop):
    loop.network.mid_block.forward = torch.no_grad()(loop.network.mid_block.forward)


def frozen_scale(loop):
    norm = loop.network.conv_norm_out
    norm.forward = lambda x: torch.nn.functional.group_norm(x, 4, norm.weight.detach(), norm.bias, norm.eps)


def halved_path(loop):
    block = loop.network.mid_block
    forward = block.forward
    block.forward = lambda *given, **named: (lambda y: (y + y.detach()) / 2)(forward(*given, **named))


FAULTS = {
    # fault: (stage, words of the message, the change of the loop)
    "roots missing": ("input", "square roots are missing", set_(noisy=noisy_with(lambda a: a, lambda a: 1 - a))),
    "coefficients exchanged": ("input", "exchanged", set_(noisy=noisy_with(lambda a: (1 - a).sqrt(), lambda a: a.sqrt()))),
    "image not scaled": ("input", "image is not scaled", set_(noisy=noisy_with(torch.ones_like, lambda a: (1 - a).sqrt()))),
    "noise twice": ("input", "2 times", set_(noisy=noisy_with(torch.sqrt, lambda a: 2 * (1 - a).sqrt()))),
    "bf16 noising": ("input", "rounded", set_(noisy=lambda self, *a: Loop.noisy(self, *a).bfloat16().float())),
    "other noise in the image": (
        "input",
        "not the noise that was drawn",
        set_(noisy=lambda self, x, n, t: Loop.noisy(self, x, torch.randn_like(n), t)),
    ),
    "noise of the next": ("input", "of another image", set_(noisy=lambda self, x, n, t: Loop.noisy(self, x, n.roll(1, 0), t))),
    "told reversed": ("timestep", "reversed", set_(tell=lambda self, t: STEPS - 1 - t)),
    "told one too high": ("timestep", "one too high", set_(tell=lambda self, t: t + 1)),
    "told in bf16": ("timestep", "bf16", set_(tell=lambda self, t: t.bfloat16())),
    "told fractions": ("timestep", "fractions", set_(tell=lambda self, t: t / STEPS)),
    "told shuffled": ("timestep", "shuffled", set_(tell=lambda self, t: t[torch.tensor([*range(5, 16), 1, 0, 2, 3, 4])])),
    "noised with others": ("timestep", "reversed", set_(noisy=lambda self, x, n, t: Loop.noisy(self, x, n, STEPS - 1 - t))),
    "one for all": ("timestep", "one timestep", set_(timesteps=lambda self: Loop.timesteps(self)[:1].expand(16))),
    "target x0": ("target", "clean image", set_(target=lambda self, x0, n, t: x0)),
    "target of the next": ("target", "image before", set_(target=lambda self, x0, n, t: n.roll(1, 0))),
    "target of other noise": ("target", "something else", set_(target=lambda self, x0, n, t: torch.randn_like(n))),
    "L1": ("target", "L1", set_(error=lambda self, o, y: (o - y).abs().flatten(1).mean(1))),
    "Huber": (
        "target",
        "Huber",
        set_(error=lambda self, o, y: torch.nn.functional.smooth_l1_loss(o, y, reduction="none").flatten(1).mean(1)),
    ),
    "sum over pixels": ("weight", "summed over the pixels", set_(error=lambda self, o, y: (o - y).square().flatten(1).sum(1))),
    "sum over the batch": ("weight", "summed over the batch", set_(loss=lambda self, e, t: (self.weights(t) * e).sum())),
    "maximized": ("weight", "maximized", set_(loss=lambda self, e, t: -(self.weights(t) * e).mean())),
    "SNR upside down": ("weight", "1 / the declared weights", set_(weights=lambda self, t: 1 / Loop.weights(self, t))),
    "no weights": ("weight", "weighed by 1", set_(weights=lambda self, t: torch.ones(16))),
    "max for min": (
        "weight",
        "max\\(SNR",
        set_(weights=lambda self, t: (self.abar[t] / (1 - self.abar[t])).clamp(min=5) * (1 - self.abar[t]) / self.abar[t]),
    ),
    "weights of others": ("weight", "other images", set_(weights=lambda self, t: Loop.weights(self, t.flip(0)))),
    "broadcast": ("weight", "shape", set_(loss=lambda self, e, t: (self.weights(t) * e[:, None]).mean())),
    "output's gradient changed": ("gradient", "3 times", set_(error=hooked)),
    "a hook on a parameter": ("gradient", "conv_in.weight: 1/2", hooked_parameter),
    "skips without gradients": ("gradient", "parts of the network, such as", detached),
    "a block without gradients": ("gradient", "such as mid_block.*: zero", without_gradients),
    "a frozen scale": ("gradient", "1 of .* conv_norm_out.weight: zero", frozen_scale),
    "half of a path": ("gradient", "parts of the network, such as", halved_path),
    "never cleared": ("gradient", "not cleared", set_(clear=lambda self: None)),
    "not clipped": ("gradient", "not clipped", set_(clip=lambda self: None)),
    "clipped by value": (
        "gradient",
        "by itself",
        set_(clip=lambda self: torch.nn.utils.clip_grad_value_(self.network.parameters(), 1e-3)),
    ),
    "gradient halved": ("gradient", "1/2 times|clipped to a norm", set_(clip=with_gradients(lambda g: g / 2))),
    "gradient noise": (
        "gradient",
        "something else",
        set_(clip=with_gradients(lambda g: g + 0.1 * g.std(correction=0) * torch.randn_like(g))),
    ),
    "wrong sign": ("gradient", "sign", set_(clip=with_gradients(lambda g: -g))),
    "betas exchanged": (
        "optimizer",
        "beta",
        optimizer(lambda loop: torch.optim.AdamW(loop.groups, lr=RATE, betas=(0.999, 0.9))),
    ),
    "epsilon": (
        "optimizer",
        "epsilon",
        optimizer(lambda loop: torch.optim.AdamW(loop.groups, lr=RATE, betas=(0.9, 0.999), eps=1e-2)),
    ),
    "decay for all": (
        "optimizer",
        "biases",
        optimizer(lambda loop: torch.optim.AdamW([{"params": list(loop.network.parameters())}], lr=RATE, weight_decay=0.3)),
    ),
    "SGD": ("optimizer", "SGD", optimizer(lambda loop: torch.optim.SGD(loop.groups, lr=RATE))),
    "half forgotten": (
        "optimizer",
        "not in the optimizer",
        optimizer(lambda loop: torch.optim.AdamW(loop.groups[:1], lr=RATE)),
    ),
    "stepped twice": ("optimizer", "2 times", set_(step=lambda self: (self.optimizer.step(), self.optimizer.step()))),
    "no step": ("optimizer", "no step", set_(step=lambda self: None)),
    "rate halved": (
        "learning_rate",
        "1/2",
        optimizer(lambda loop: torch.optim.AdamW(loop.groups, lr=RATE / 2, betas=(0.9, 0.999))),
    ),
    "EMA frozen": ("ema", "does not move", set_(update_average=lambda self, n: None)),
    "EMA twice": (
        "ema",
        "2 times",
        set_(update_average=lambda self, n: (Loop.update_average(self, n), Loop.update_average(self, n))),
    ),
    "EMA exchanged": (
        "ema",
        "exchanged",
        set_(update_average=lambda self, n: averaged(self, n, lambda e, p: e.lerp_(p, DECAY))),
    ),
    "EMA a copy": ("ema", "copy", set_(update_average=lambda self, n: averaged(self, n, lambda e, p: e.copy_(p)))),
    "EMA away": ("ema", "away", set_(update_average=lambda self, n: averaged(self, n, lambda e, p: e.sub_(0.1 * (p - e))))),
    "EMA of others": (
        "ema",
        "weights that are not those of this network",
        set_(update_average=lambda self, n: averaged(self, n, lambda e, p: e.lerp_(torch.randn_like(p), 0.1))),
    ),
    "weights changed after": (
        "state",
        "after the optimizer",
        set_(clear=lambda self: [p.data.mul_(0.99) for p in self.network.parameters()] and Loop.clear(self)),
    ),
    "weights changed before": (
        "state",
        "at the step are not",
        set_(clip=lambda self: [p.data.mul_(0.99) for p in self.network.parameters()] and Loop.clip(self)),
    ),
    "evaluation mode": ("network", "evaluation", lambda loop: loop.network.eval()),
    "noise scaled": ("noise", "variance", set_(noise=lambda self, x0: 0.9 * Loop.noise(self, x0))),
    "noise uniform": (
        "noise",
        "kurtosis",
        set_(noise=lambda self, x0: (torch.rand(x0.shape, generator=self.generator) - 0.5) * 12**0.5),
    ),
    "noise shared": ("noise", "images of a batch", set_(noise=lambda self, x0: Loop.noise(self, x0)[:1].expand_as(x0))),
    "noise repeated": (
        "noise",
        "an earlier image had",
        set_(noise=lambda self, x0: torch.randn(x0.shape, generator=torch.Generator().manual_seed(3))),
    ),
    "offset noise": (
        "noise",
        "offset|neighboring",
        set_(noise=lambda self, x0: Loop.noise(self, x0) + 0.3 * torch.randn(len(x0), 3, 1, 1)),
    ),
    "timesteps of a half": ("timestep", "not drawn", set_(timesteps=lambda self: Loop.timesteps(self) // 2)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_stage(fault):
    stage, words, change = FAULTS[fault]
    loop = Loop(declared())
    change(loop)
    checks = []
    for number in range(6):  # distributions need several updates
        checks += loop.update(number, asks=number == 0)
        if any(check.stage == stage for check in wrong(checks)):
            break
    found = [check for check in wrong(checks) if check.stage == stage]
    assert found, [(check.stage, check.message) for check in wrong(checks)]
    assert any(re.search(words, check.message) for check in found), [check.message for check in found]
    others = {check.stage for check in wrong(checks)} - {stage}
    assert not others, [(check.stage, check.message) for check in wrong(checks) if check.stage != stage]


def test_layers_that_the_loop_freezes_on_its_way_are_named():
    loop = Loop(declared())
    assert wrong(loop.update(0)) == []
    loop.network.down_blocks.requires_grad_(False)
    first = wrong(loop.update(1))[0]
    assert first.stage == "network" and "parameters are frozen, such as down_blocks.0" in first.message
    loop.network.down_blocks.requires_grad_(True)
    assert "network" not in {check.stage for check in wrong(loop.update(2))}


def test_gradients_cleared_or_clipped_between_micro_steps_are_named():
    for words, between in (
        ("cleared", Loop.clear),
        ("clipped or scaled", lambda loop: torch.nn.utils.clip_grad_norm_(loop.network.parameters(), 1e-3)),
    ):
        loop = Loop(declared(micro_steps=2))
        loop.between_micro_steps = lambda loop=loop, between=between: between(loop)
        found = wrong(loop.update(0))
        assert found and found[0].stage == "gradient" and words in found[0].message


def test_what_is_not_declared_is_said_with_the_schedule_and_prediction_that_are_trained():
    wanted = declared()
    other = replace(wanted, noising=replace(wanted.noising, schedule="squaredcos_cap_v2", prediction_type="sample"))
    loop = Loop(wanted)
    loop.declared = other
    loop.target = lambda x0, noise, t: noise
    loop.weights = lambda t: torch.ones(16)
    messages = {check.stage: check.message for check in wrong(loop.update(0))}
    assert "linear" in messages["input"] and "epsilon" in messages["target"]


class WithoutFloat64(torch.Tensor):
    """As on Apple's GPUs: what becomes float64 there is an error; `cpu` takes it to the host."""

    device = property(lambda self: torch.device("mps"))

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        result = super().__torch_function__(function, types, arguments, options or {})
        if function is torch.Tensor.cpu or (function is torch.Tensor.to and arguments[1] == torch.device("cpu")):
            return result.as_subclass(torch.Tensor)
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


def test_what_is_seen_on_a_device_without_float64_is_judged_on_the_cpu(monkeypatch):
    def moved(update):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "cpu", lambda tensor: tensor.as_subclass(WithoutFloat64))
            return on_cpu(update)

    loop = Loop(declared())
    end_update = loop.observer.end_update
    loop.observer.end_update = lambda: moved(end_update())
    with pytest.raises(TypeError, match="float64"):
        loop.update(0)
    loop.observer.end_update = lambda: on_cpu(moved(end_update()))
    assert wrong(loop.update(1)) == []


def test_the_sampled_weights_need_no_float64_of_the_device():
    weights = torch.randn(4, 3).as_subclass(WithoutFloat64)
    sample = ElementSample({"weight": weights})
    assert sample.device.type == "cpu" and type(sample.take([weights])) is torch.Tensor
    assert type(sample.take([None])) is torch.Tensor


@pytest.mark.parametrize(
    ("given", "words"),
    [((LABELS,), ""), ((), "none"), ((None,), "none"), ((LABELS + 1,), "one too high"), ((LABELS.roll(-1),), "the next")],
)
def test_labels_that_the_network_is_not_told_are_named(given, words):
    call = Call((torch.zeros(4, 1, 8, 8), torch.zeros(4), *given))
    [check] = check_told([MicroStep({"unet": call}, {"labels": LABELS})], "unet")
    assert check.healthy is (not words) and words in check.message

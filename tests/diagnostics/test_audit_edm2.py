"""The step audit of EDM2, asked about steps that are computed here: right ones, and ones with each of many faults.

The right formulas are those of Karras et al. 2022 (table 1) and 2024 (eq. 14, 66, 121 to 126), written down once more.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from utils.diagnostics.audit.averages import check_averages
from utils.diagnostics.audit.declared import Declared, DeclaredDenoising, DeclaredOptimizer, declared_by
from utils.diagnostics.audit.denoising import check_denoising
from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.seen import Call, MicroStep
from utils.diagnostics.audit.state import check_state
from utils.options.flags import EDM2Options

DATA, MICRO_STEPS, BATCH, PIXELS = 0.5, 2, 12, 192
ADAM = DeclaredOptimizer("adam", 0.9, 0.99, 1e-8, 0.0, 0.9, lambda step: 0.01, 1.0)
DECLARED = Declared(None, DeclaredDenoising(DATA, -0.4, 1.0, True), ADAM, MICRO_STEPS, None)
EXPONENTS = {0.05: 16.97, 0.10: 6.94}  # by the width of the average: Karras et al. 2024, section 3.1


def shaped(values: torch.Tensor) -> torch.Tensor:
    return values[:, None, None, None]


RIGHT: dict[str, Callable] = {  # s: sigma; y, n: clean image and noise; e: mean squared error; u: its logarithm's estimate
    "noisy": lambda y, n, s: y + s * n,
    "told": lambda s: s,
    "c_in": lambda s: (s**2 + DATA**2).rsqrt(),
    "c_noise": lambda s: s.log() / 4,
    "c_skip": lambda s: DATA**2 / (s**2 + DATA**2),
    "c_out": lambda s: s * DATA * (s**2 + DATA**2).rsqrt(),
    "labels": lambda labels: labels,
    "target": lambda y, n, x, s: y,
    "error": lambda difference: difference.square().flatten(1).mean(1),
    "lambda": lambda s: (s**2 + DATA**2) / (s * DATA) ** 2,
    "loss": lambda w, e, u: w * e / u.exp() + u,
    "mean": lambda losses: losses.mean() / MICRO_STEPS,
    "u": lambda u: u.clone(),
    "u_of": lambda s: s,
}


def step(generator: torch.Generator, f: dict[str, Callable], fresh: bool, dtype: torch.dtype) -> MicroStep:
    """One micro step, computed by `f`. `fresh`: the raw network gives zeros, as a new one does."""
    clean = torch.randn(BATCH, 3, 2, 2, generator=generator).tanh().repeat_interleave(4, 2).repeat_interleave(4, 3)
    noise = torch.randn(clean.shape, generator=generator)
    sigma = (torch.randn(BATCH, generator=generator) * 1.2 - 0.4).exp()
    labels = torch.randint(-1, 5, (BATCH,), generator=generator)
    x, told = f["noisy"](clean, noise, shaped(sigma)), f["told"](sigma)
    raw_x = shaped(f["c_in"](told)) * x
    mixed = torch.randn(3, 3, generator=generator) * 0.3
    raw = (torch.einsum("bchw,cd->bdhw", raw_x, mixed).tanh().roll(1, 2) * (not fresh)).to(dtype).requires_grad_()
    denoised = shaped(f["c_skip"](told)) * x + shaped(f["c_out"](told)) * raw.float()
    denoised.retain_grad()
    own_u = torch.randn(BATCH, generator=generator) * 0.4
    u = f["u"](own_u).requires_grad_()
    errors = f["error"](denoised - f["target"](clean, noise, x, shaped(sigma)))
    f["mean"](f["loss"](f["lambda"](sigma), errors, u)).backward()
    to_outputs = {0: denoised.grad} | ({} if u.grad is None else {1: u.grad})
    calls = {
        "network": Call((x, told, labels), (denoised.detach(), u.detach()), to_outputs),
        "unet": Call((raw_x, f["c_noise"](told), f["labels"](labels)), (raw.detach(),), {0: raw.grad}),
        "uncertainty": Call((f["u_of"](told),), (own_u,)),
    }
    return MicroStep(calls, {"clean_images": clean, "noise": noise, "sigmas": sigma, "labels": labels})


def checks_of(fresh=False, dtype=torch.float32, **wrong):
    generator = torch.Generator().manual_seed(2)
    steps = [step(generator, RIGHT | wrong, fresh, dtype) for _ in range(MICRO_STEPS)]
    return check_denoising(steps, DECLARED)


def wrong_in(checks) -> dict[str, str]:
    """Stage -> what is said of it."""
    found: dict[str, str] = {}
    for check in checks:
        if check.healthy is False:
            assert check.message
            found[check.stage] = "; ".join(part for part in (found.get(check.stage), check.message) if part)
    return found


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_step_has_no_deviation_and_every_identity_is_looked_at(fresh, dtype):
    checks = checks_of(fresh, dtype)
    assert wrong_in(checks) == {}
    names = {check.name for check in checks if check.healthy}
    assert {"noise level that the network gets", "coefficients of image and noise", "c_in", "c_noise", "c_skip"} <= names
    assert {"labels that the network gets", "target of the raw network", "target of the loss"} <= names
    assert {"weight of each sample's loss", "gradient of u(sigma)", "u of each sample"} <= names
    assert ("c_out" in names) == (not fresh)  # of zeros no factor is known


FAULTS: list[tuple[str, str, str, Callable]] = [  # (what is replaced, stage, a part of what is said, by what)
    ("told", "timestep", "those drawn: others", lambda s: s.roll(-1)),
    ("told", "timestep", "2 times those", lambda s: 2 * s),
    ("noisy", "input", "sigma squared", lambda y, n, s: y + s**2 * n),
    ("noisy", "input", "2 times sigma", lambda y, n, s: y + 2 * s * n),
    ("noisy", "input", "not the noise that was drawn", lambda y, n, s: y + s * n.roll(1, 0)),
    ("noisy", "input", "times sigma, not by sigma", lambda y, n, s: y + s.roll(-1, 0) * n),
    ("c_in", "input", "c_in is 1, declared", lambda s: s**0),
    ("c_in", "input", "1 / (sigma^2 + sigma_data^2)", lambda s: 1 / (s**2 + DATA**2)),
    ("c_in", "input", "sigma_data 0.8, declared 0.5", lambda s: (s**2 + 0.64).rsqrt()),
    ("c_in", "input", "declared", lambda s: RIGHT["c_in"](s) * (1 + 1e-4)),
    ("c_noise", "timestep", "ln(sigma) as noise level", torch.log),
    ("c_noise", "timestep", "rounded to bf16", lambda s: (s.log() / 4).bfloat16().float()),
    ("c_noise", "timestep", "-ln(sigma) / 4", lambda s: -s.log() / 4),
    ("c_skip", "network", "sigma^2 / (sigma^2 + sigma_data^2)", lambda s: s**2 / (s**2 + DATA**2)),
    ("c_skip", "network", "c_skip is 0", lambda s: s * 0),
    ("c_skip", "network", "times it, declared", lambda s: RIGHT["c_skip"](s).roll(-1)),
    ("c_out", "network", "sigma / sqrt(sigma^2 + sigma_data^2)", lambda s: s * (s**2 + DATA**2).rsqrt()),
    ("c_out", "network", "c_out is -", lambda s: -RIGHT["c_out"](s)),
    ("labels", "condition", "one too high", lambda labels: labels + 1),
    ("labels", "condition", "none", lambda labels: None),
    ("labels", "condition", "of the next image", lambda labels: labels.roll(-1)),
    ("labels", "condition", "others", lambda labels: labels.clamp(min=0)),  # dropped ones become class 0
    ("target", "target", "with the noise, not", lambda y, n, x, s: n),
    ("target", "target", "not a squared error", lambda y, n, x, s: y.roll(-1, 0)),
    ("target", "target", "in [0, 1]", lambda y, n, x, s: (y + 1) / 2),
    ("error", "target", "absolute error (L1)", lambda d: d.abs().flatten(1).mean(1)),
    ("error", "target", "Huber", lambda d: nn.functional.smooth_l1_loss(d, d * 0, beta=0.1, reduction="none").mean((1, 2, 3))),
    ("lambda", "weight", "1 / exp(u), without lambda", lambda s: s**0),
    ("lambda", "weight", "upside down", lambda s: 1 / RIGHT["lambda"](s)),
    ("lambda", "weight", "1 / sigma^2 / exp(u)", lambda s: 1 / s**2),
    ("lambda", "weight", "the square is missing", lambda s: (s**2 + DATA**2) / (s * DATA)),
    ("lambda", "weight", "weighed by something else", lambda s: RIGHT["lambda"](s).roll(-1)),
    ("loss", "weight", "without exp(u)", lambda w, e, u: w * e + u),
    ("loss", "weight", "u of the wrong sign", lambda w, e, u: w * e * u.exp() + u),
    ("loss", "weight", "detached", lambda w, e, u: w * e / u.detach().exp() + u),
    ("loss", "weight", "the term + u is missing", lambda w, e, u: w * e / u.exp()),
    ("loss", "weight", "u counts twice", lambda w, e, u: w * e / u.exp() + 2 * u),
    ("loss", "weight", "u(sigma) gets no gradient", lambda w, e, u: w * e / u.detach().exp() + u.detach()),
    ("u", "weight", "not that of its own noise level: that of the next image", lambda u: u.roll(-1)),
    ("u", "weight", "not that of its own noise level: another", lambda u: u / 2),
    ("u_of", "weight", "not that of its own noise level", lambda s: s.mean().expand(len(s))),
    ("mean", "weight", "summed over the batch", lambda losses: losses.sum() / MICRO_STEPS),
    ("mean", "weight", "not divided by the number of micro steps", torch.mean),
    ("mean", "weight", "its sign is wrong", lambda losses: -losses.mean() / MICRO_STEPS),
]


@pytest.mark.parametrize("what, stage, said, fault", FAULTS, ids=[f"{what}: {said}" for what, _, said, _ in FAULTS])
def test_a_wrong_step_is_named(what, stage, said, fault):
    found = wrong_in(checks_of(**{what: fault}))
    assert said in found[stage], found
    # A later stage is judged by what was observed before it, but for these, which are declared of one another.
    consequences = {"c_skip": {"target"}, "c_out": {"target"}, "told": {"weight"}, "target": {"weight"}}.get(what, set())
    assert set(found) <= {stage} | consequences, found


@pytest.mark.parametrize("what", ["c_in", "c_skip"])
def test_a_fresh_network_whose_output_is_zero_hides_no_wrong_coefficient(what):
    stage = {"c_in": "input", "c_skip": "network"}[what]
    assert stage in wrong_in(checks_of(fresh=True, **{what: lambda s: RIGHT[what](s) * 1.01}))


# ---- after the step: forced weight normalization, and averages of the power function


def normalized(weight: torch.Tensor) -> torch.Tensor:
    """Each row has the root mean square 1."""
    return weight / weight.flatten(1).square().mean(1).sqrt().reshape(-1, *[1] * (weight.ndim - 1))


class Training:
    """Updates of a small network, whose steps and averages are made here. The last layer, as u(sigma), is not averaged."""

    def __init__(self):
        torch.manual_seed(0)
        self.averaged = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Flatten(), nn.Linear(32, 5, bias=False))
        self.network = nn.ModuleDict({"unet": self.averaged, "uncertainty": nn.Linear(5, 3, bias=False)})
        self.network.forward = lambda x: self.network["uncertainty"](self.averaged(x))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.01)
        self.normalize(lambda weight: normalized(weight))
        self.averages = {
            f"EMA {width}": {f"unet.{name}": p.detach().clone() for name, p in self.averaged.named_parameters()}
            for width in EXPONENTS
        }
        self.observer = Observer({"network": self.network, "unet": self.averaged}, self.averages)
        self.declared = declared_by(
            EDM2Options(ema_type="power", ema_widths=list(EXPONENTS)),
            {"gradient_accumulation_steps": 1, "num_processes": 1, "training_images": 90},
        )

    @torch.no_grad()
    def normalize(self, how) -> None:
        for p in self.network.parameters():
            p.copy_(how(p))

    def decay(self, width: float, number: int) -> float:
        return (1 - 1 / number) ** (EXPONENTS[width] + 1)

    @torch.no_grad()
    def average(self, number: int) -> None:
        for width in EXPONENTS:
            for name, p in self.averaged.named_parameters():
                self.averages[f"EMA {width}"][f"unet.{name}"].lerp_(p, 1 - self.decay(width, number))

    def update(self, number: int, how=normalized) -> dict[str, str]:
        """What is wrong in the update of that number, the first being 1."""
        self.observer.begin(number - 1)
        self.network(torch.randn(2, 3, 4, 4)).square().mean().backward()
        self.optimizer.step()
        self.normalize(how)
        self.network.zero_grad()
        self.observer.end_step()
        self.average(number)
        seen = self.observer.end_update()
        return wrong_in(check_state(seen, self.declared, self.observer) + check_averages(seen, self.declared, self.observer))


def test_forced_weight_normalization_and_power_averages_are_recognized():
    training = Training()
    assert [training.update(number) for number in (1, 2, 3, 4)] == [{}] * 4


@pytest.mark.parametrize(
    "how",
    [
        lambda weight: weight,
        lambda weight: normalized(weight) / weight[0].numel() ** 0.5,  # length 1, not variance 1
        lambda weight: normalized(weight) if weight.ndim > 2 else weight,
        lambda weight: weight / weight.square().mean().sqrt(),  # of the whole matrix
    ],
    ids=["none", "length 1", "convolutions alone", "the whole matrix"],
)
def test_weights_that_are_not_normalized_are_named(how):
    assert "not normalized after the step" in Training().update(1, how)["optimizer"]


def test_what_else_changes_the_weights_after_the_step_is_named():
    training = Training()
    training.network["gain"] = nn.Linear(1, 5)  # its bias has no rows
    training.network.forward = lambda x: training.network["uncertainty"](training.averaged(x) + training.network["gain"].bias)
    training.optimizer = torch.optim.Adam(training.network.parameters(), lr=0.01)
    training.observer = Observer({"network": training.network, "unet": training.averaged}, training.averages)
    rows = {"healthy": lambda w: normalized(w) if w.ndim > 1 else w}
    rows["gains are clamped"] = lambda w: normalized(w) if w.ndim > 1 else w.clamp(-0.001, 0.001)
    rows["rows are turned"] = lambda w: normalized(w + 0.01 * torch.randn(w.shape)) if w.ndim > 1 else w
    for number, (what, how) in enumerate(rows.items(), 1):
        found = training.update(number, how).get("state", "")
        assert ("by more than the lengths of their rows" in found) == (what != "healthy"), what


AVERAGES = {
    "of another width": (lambda self, width, number: Training.decay(self, 0.10, number), "EMA 0.05: its decay"),
    "exponent g": (lambda self, width, number: (1 - 1 / number) ** EXPONENTS[width], "EMA 0.05: its decay"),
    "constant": (lambda self, width, number: 0.5, "EMA 0.05: its decay is 0.5"),
    "of the update before": (lambda self, width, number: Training.decay(self, width, number - 1), "the decay of update 8"),
    "frozen": (lambda self, width, number: 1.0, "it does not move"),
    "a copy": (lambda self, width, number: 0.0, "it is a copy of the weights"),
}


@pytest.mark.parametrize("fault", AVERAGES)
def test_an_average_of_another_decay_is_named(fault, monkeypatch):
    training = Training()
    for number in range(1, 9):
        assert training.update(number) == {}
    decay, said = AVERAGES[fault]
    monkeypatch.setattr(training, "decay", lambda width, number: decay(training, width, number))
    assert said in training.update(9)["ema"]

"""What is concluded from one look at a script: targets, weights, schedules, averages. Tensors are made up."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from diffusers.training_utils import EMAModel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from utils.diagnostics.audit.seen import Call, MicroStep, Update
from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching import facts
from utils.diagnostics.watching.averages import First, check_average
from utils.diagnostics.watching.averages import _decay as _decay_of
from utils.diagnostics.watching.batches import Batches
from utils.diagnostics.watching.bound import check_bound
from utils.diagnostics.watching.conditions import Conditions
from utils.diagnostics.watching.drawing import Drawing
from utils.diagnostics.watching.facts import Average, Facts, schedule_length
from utils.diagnostics.watching.forward import ForwardJudge, _data, _told_beside
from utils.diagnostics.watching.hooks import install
from utils.diagnostics.watching.images import check_latents, check_range, check_spread
from utils.diagnostics.watching.inputs import _told_by_place, check_embedded, check_mixture, check_told
from utils.diagnostics.watching.judging import Judge
from utils.diagnostics.watching.levels import Levels, Look, half_matching, matching, tables
from utils.diagnostics.watching.loading import Loading
from utils.diagnostics.watching.looks import without_silence
from utils.diagnostics.watching.mixture import Mixture, axis_of_factors, find, strength
from utils.diagnostics.watching.observing import ForeignObserver
from utils.diagnostics.watching.optimizing import _betas, _decay, _epsilon, _size_of_step, rates_of
from utils.diagnostics.watching.options import Schedule, declared_strength, evaluation_at
from utils.diagnostics.watching.places import number_told, place_of_told
from utils.diagnostics.watching.probes import CopyProbe, Probe
from utils.diagnostics.watching.result import SETTLING, Result
from utils.diagnostics.watching.schedules import check_ends
from utils.diagnostics.watching.seen import Draw, Recorder, Seen, Times
from utils.diagnostics.watching.targets import check_target, identify_target
from utils.diagnostics.watching.updating import UpdateJudge, _by_function, _kind_of
from utils.diagnostics.watching.watcher import Watcher, holder_of
from utils.diagnostics.watching.weights import identify_weights

B, SHAPE = 8, (8, 3, 8, 8)
ORDER = ["epsilon", "v_prediction", "sample", "velocity", "backward", "raw", "score"]


class Network(torch.nn.Conv2d):
    def forward(self, x, t):
        return super().forward(x) * t[:, None, None, None]


def levels_of(
    a: torch.Tensor, b: torch.Tensor, gradient_of=None, told: torch.Tensor | None = None, size: float = 1.0
) -> Levels:
    """Samples of these coefficients [B]; `gradient_of(output, clean, noise)` is the loss's gradient, `size` the output's, and
    `told` [B] the time that the network gets."""
    generator = torch.Generator().manual_seed(0)
    clean, noise, output = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    clean, output = clean.clamp(-1, 1), size * output
    x = a.float()[:, None, None, None] * clean + b.float()[:, None, None, None] * noise
    flat = [v.flatten(1).double() for v in (clean, noise)]
    gradient = gradient_of(output, clean, noise) if gradient_of else None
    return Levels([Look(x, told, output, gradient, Mixture(*flat, a, b, torch.zeros(B), clean, noise))])


def on_circle() -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.linspace(0.1, 1.4, B, dtype=torch.float64)
    return angle.cos(), angle.sin()


MASK = (torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) < 0.5).float()
OTHER = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("gradient", "name", "healthy"),
    [
        (lambda o, x, n: o - n, "epsilon", True),
        (lambda o, x, n: (o - n) * MASK, "epsilon", True),
        (lambda o, x, n: (o - n).sign(), "epsilon", True),
        (lambda o, x, n: (o - n.roll(1, 0)).sign(), "the noise of the image before", False),
        (lambda o, x, n: (o - n) * (0.2 + MASK * o.abs()), "epsilon", None),  # weights of pixels
        (lambda o, x, n: o - n + 0.2 * o.sign(), "", None),  # one more term
        (lambda o, x, n: o - 0.9 * n - 0.3 * OTHER, "", None),  # a teacher
        (lambda o, x, n: o - OTHER, "other noise than that of the image", False),
        (
            lambda o, x, n: o - x.flip(0),
            "a target that is made of other images, or of the noise of other images of the batch",
            False,
        ),
        (lambda o, x, n: o - 1.5 * n, "1.5 noise", False),
        (lambda o, x, n: 0 * o, "nothing", False),
        (lambda o, x, n: (o - n).mean((1, 2, 3), keepdim=True) + 0 * o, "the mean of the target over all pixels", False),
    ],
)
def test_targets(gradient, name, healthy):
    levels = levels_of(*on_circle(), lambda *parts: gradient(*parts) * 2 / OTHER.numel())
    target = identify_target(levels, ORDER)
    assert target.name == name or (name == "1.5 noise" and target.name.endswith(name))
    assert check_target(target, None, levels).healthy is healthy


def test_v_of_the_wrong_sign_is_not_taken_for_the_target_of_edm():
    a, b = on_circle()
    of_image = [v.float()[:, None, None, None] for v in (a, b)]
    levels = levels_of(a, b, lambda o, x, n: o - (of_image[1] * x - of_image[0] * n))
    assert identify_target(levels, [name for name in ORDER if name != "raw"]).name == "v of the wrong sign"


def test_v_of_coefficients_that_are_not_on_a_circle():
    a = torch.linspace(0.1, 0.9, B, dtype=torch.float64)
    share, noise_share = a.float()[:, None, None, None], 1 - a.float()[:, None, None, None]
    for v in (lambda x, n: share * n - noise_share * x, lambda x, n: (n - noise_share * (share * x + noise_share * n)) / share):
        levels = levels_of(a, 1 - a, lambda o, x, n, v=v: o - v(x, n))
        check = check_target(identify_target(levels, ORDER), None, levels)
        assert (check.stage, check.healthy) == ("input", False)


def test_noise_of_another_strength():
    a, b = on_circle()
    s = torch.linspace(0.1, 0.9, B, dtype=torch.float64)
    assert [strength(a, b), strength(1 - s, s), strength(torch.ones(B), s)] == [1, 1, 1]
    scaled = [strength(a, b / 2), strength(1 - s, 3 * s), strength(1 / (s**2 + 0.25).sqrt(), 2 * s / (s**2 + 0.25).sqrt())]
    assert scaled == pytest.approx([0.5, 3, 2])


def test_the_velocity_of_a_path_that_leaves_some_noise():
    s = torch.linspace(0.1, 0.9, B, dtype=torch.float64)
    levels = levels_of(s, 1 - 0.95 * s, lambda o, x, n: o - (x - 0.95 * n))
    assert identify_target(levels, ORDER).name == "velocity of its path"
    assert check_mixture(levels).healthy is not False


@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize(("sign", "name"), [(1, "velocity"), (-1, "backward")])
def test_the_sign_of_a_target_beside_an_output_of_zero(size, sign, name):
    """Networks whose last layer begins at 0: a target and its negative then differ in the sign of the gradient alone."""
    s = torch.linspace(0.1, 0.9, B, dtype=torch.float64)
    levels = levels_of(1 - s, s, lambda o, x, n: o - sign * (n - x), told=s if sign > 0 else 1 - s, size=size)
    target = identify_target(levels, ORDER)
    assert target.name == name and check_target(target, None, levels).healthy
    against = levels_of(1 - s, s, lambda o, x, n: o - sign * (n - x), told=1 - s if sign > 0 else s, size=size)
    assert check_target(identify_target(against, ORDER), None, against).healthy is False


@pytest.mark.parametrize("size", [0.0, 1.0])
@pytest.mark.parametrize("speed", [1.0, math.pi / 2])
def test_the_velocity_of_a_path_on_a_circle(size, speed):
    """The derivative by a time that runs from the noise to the image; the other way it points against the path."""
    a, b = on_circle()
    wide = [v.float()[:, None, None, None] for v in (a, b)]
    angle, order = torch.atan2(b, a), [name for name in ORDER if name != "raw"]
    gradient = lambda o, x, n: o - speed * (wide[1] * x - wide[0] * n)  # noqa: E731
    levels, against = (levels_of(a, b, gradient, told=told, size=size) for told in (-angle, angle))
    assert identify_target(levels, order).name == "velocity of its path"
    assert check_target(identify_target(levels, order), None, levels).healthy
    assert check_target(identify_target(against, order), None, against).healthy is False


def test_times_beyond_the_ends_of_a_path():
    s = torch.linspace(-0.5, 1.3, B, dtype=torch.float64)
    assert check_mixture(levels_of(1 - s, s)).stage == "timestep"
    assert check_mixture(levels_of(1 - s.clamp(0, 1), s.clamp(0, 1))).healthy is not False


def test_frames_that_are_told_their_noise_levels():
    """One ladder for all samples is no mistake where the network gets it."""
    assert _told_by_place((torch.zeros(B, 3, 8, 8), torch.zeros(B, 8)), 8)
    assert not _told_by_place((torch.zeros(B, 3, 8, 8), torch.zeros(8), None), 8)


@pytest.mark.parametrize(
    ("name", "severity"),
    [("eval_every", "warning"), ("validation_steps", "warning"), ("num_samples", "info"), ("sampling_steps", "info")],
)
def test_which_option_is_the_rhythm_of_the_evaluation(name, severity):
    facts = SimpleNamespace(options={name: 50})
    assert bool(evaluation_at(facts, lambda value: value == 50)) is (severity == "warning")


@pytest.mark.parametrize(("shape", "axis"), [((B, 1, 1, 1), None), ((1, 1, 1, B), 3), ((1, 1, B, 1), 2), ((B, 1, 1, B), None)])
def test_factors_along_the_wrong_axis(shape, axis):
    """Factors of a batch of 8 over images of 8 x 8; those of places that differ from sample to sample are no mistake."""
    clean, noise = torch.randn(SHAPE), torch.randn(SHAPE)
    b = torch.linspace(0.1, 0.9, math.prod(shape)).view(shape)
    seen = Seen([Draw(noise, True)], tensors={0: clean})
    assert axis_of_factors((1 - b) * clean + b * noise, seen) == axis


def snr_of(levels: Levels) -> torch.Tensor:
    return (levels.a / levels.b) ** 2


@pytest.mark.parametrize(
    ("weights", "target", "severity"),
    [
        (lambda snr: snr.clamp(max=5) / snr, "epsilon", None),
        (lambda snr: (snr.clamp(max=5) / snr).flip(0), "epsilon", "critical"),  # of other images
        (lambda snr: 1 / (snr + 1), "epsilon", None),  # P2
        (lambda snr: (snr + 1) ** -0.5, "epsilon", None),
        (lambda snr: snr**-0.5, "epsilon", None),
        (lambda snr: snr.clamp(min=5) / snr, "epsilon", "critical"),
        (lambda snr: 1 / snr, "sample", "critical"),
        (lambda snr: snr**2 / (snr + 1), "v_prediction", "critical"),  # SNR, where the loss asks for the noise
        (lambda snr: snr.clamp(min=1) / (snr + 1), "v_prediction", None),  # max(SNR, 1), where it asks for the image
        (lambda snr: torch.where(snr > 1, 1.0, -1.0), "epsilon", "info"),  # preferences
        (lambda snr: (snr.clamp(max=5) / snr).mean().expand(B), "epsilon", "critical"),  # [B, 1] times [B]
        (lambda snr: torch.full((B,), 0.37, dtype=torch.float64), "epsilon", None),
        (lambda snr: torch.full((B,), float(B), dtype=torch.float64), "epsilon", "warning"),
    ],
)
def test_weights(weights, target, severity):
    levels = levels_of(*on_circle())
    found = identify_weights(weights(snr_of(levels)), levels, target, 1)
    assert (None if found.healthy else found.severity) == severity, found


@pytest.mark.parametrize("error", [torch.nn.functional.l1_loss, torch.nn.functional.smooth_l1_loss])
@pytest.mark.parametrize("weights", [lambda w: w, lambda w: w.mean().expand(B), lambda w: B * w / w])
def test_weights_of_errors_that_are_not_squared(error, weights):
    levels = levels_of(*on_circle())
    expected = weights(snr_of(levels).clamp(max=5) / snr_of(levels))

    def gradient(output, clean, noise):
        output = output.detach().requires_grad_()
        ((error(output, noise, reduction="none").mean((1, 2, 3)) * expected.float()).mean()).backward()
        return output.grad

    target = identify_target(levels_of(*on_circle(), gradient), ORDER)
    found = target.scale * levels.pixels * B / 2
    assert torch.allclose(found, expected, 1e-3)


@pytest.mark.parametrize(
    ("weights", "name", "healthy"),
    [
        (lambda snr: snr.clamp(max=5) / (snr + 1), "min(SNR, gamma) / (SNR + 1)", True),
        (lambda snr: (snr > 0) * torch.linspace(0.5, 2, B).double().sin(), "", True),
        (lambda snr: (snr < snr.max()).double(), "", False),
    ],
)
def test_an_image_that_counts_nothing(weights, name, healthy):
    a, b = on_circle()
    a[-1], b[-1] = 0, 1  # the last step of a schedule that ends in noise alone
    levels = levels_of(a, b)
    found = identify_weights(weights(snr_of(levels)), levels, "v_prediction", 1)
    assert (found.name, found.healthy) == (name, healthy), found


@pytest.mark.parametrize(
    ("weight", "healthy"),
    [
        (lambda s: (s**2 + 0.25) / (s * 0.5) ** 2, True),
        (lambda s: (s**2 + 0.25) / (s * 0.5), False),
        (lambda s: (s * 0.5) ** 2 / (s**2 + 0.25), False),
    ],
)
def test_weights_of_sigmas(weight, healthy):
    sigma = torch.logspace(-2, 2, B, dtype=torch.float64)
    levels = levels_of(torch.ones(B, dtype=torch.float64), sigma)
    assert identify_weights(weight(sigma), levels, "sample", 1).healthy is healthy


def test_latents_and_sequences_are_no_images():
    assert check_range(torch.randn(2, 4, 8, 8)).healthy is None
    assert check_range(torch.randn(2, 4, 8, 8) * 9).severity == "warning"
    assert check_range(torch.randn(2, 4, 8, 8) / 9).severity == "info"
    assert check_range(torch.randn(2, 3, 64) * 5).healthy is None
    assert check_range(torch.randn(2, 3, 64) * 50).code == "data-range"
    assert check_range(torch.randn(2, 3, 64) * 50, unit=16).healthy is None  # of proteins, by their sigma_data
    assert check_range(torch.rand(2, 3, 8, 8) * 255).code == "data-range"


def test_signals_that_were_not_scaled_or_twice():
    whole = (torch.randn(2, 64) * 9000).round()
    assert [check_range(signals).healthy for signals in (whole, whole / 32768, whole / 32768**2)] == [False, None, False]
    assert check_range(torch.zeros(1, 1, 64)).healthy is None  # one clip of silence


@pytest.mark.parametrize(
    ("spread", "severity"), [(1.0, None), (5.5, "warning"), (0.18, "warning"), (0.9, None), (60.0, "info"), (2.0, None)]
)
def test_latents_that_were_made_earlier(spread, severity):
    check = check_spread(torch.randn(4, 4, 32, 32) * spread, {"scaling_factor": 0.18215})
    assert (None if check.healthy else check.severity) == severity


@pytest.mark.parametrize("encoded", [None, (-1.0, 1.0)])
@pytest.mark.parametrize("config", [None, "a path", {"scaling_factor": 0.18}])
def test_an_autoencoder_that_says_nothing_of_its_scale(config, encoded):
    autoencoder = torch.nn.Module()
    if config is not None:
        autoencoder.config = config
    update = Update(1, [MicroStep()])
    [look] = levels_of(*on_circle()).looks
    assert _data(look, update, Facts(autoencoder=autoencoder), encoded).stage == "data"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_scaled_in_any_precision(dtype):
    latents = torch.randn(4, 4, 8, 8).to(dtype)
    scaled = latents * 1.7

    def healthy(clean, *before) -> bool | None:
        return check_latents(clean, Seen(tensors=dict(enumerate((*before, clean)))), {"scaling_factor": 1.7}).healthy

    assert healthy(scaled, latents) is True
    assert healthy(scaled * 1.7, latents, scaled) is healthy(latents, latents / 1.7 + 9) is False


def test_what_holds_the_parameters():
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    around, half_made = torch.nn.DataParallel(network), torch.nn.Module.__new__(torch.nn.Module)
    assert holder_of(list(network.parameters())) is network and around is not half_made
    assert list(holder_of([torch.ones(2, requires_grad=True)]).parameters()) == []


def test_a_missing_gradient_is_said_of_what_it_belongs_to():
    network = torch.nn.Module()
    network.embed, network.second = torch.nn.Embedding(3, 4), torch.nn.Linear(2, 2)
    names = (
        "embed.weight",
        "time_embed.0.weight",
        "y_embedder.table",
        "second.weight",
        "0.label_proj.bias",
        "embedding.0.bias",
    )
    assert [_kind_of(name, network) for name in names] == ["condition", "timestep", "condition", "", "condition", "network"]


def test_noise_that_was_changed_is_noise_that_was_drawn():
    recorder = Recorder()
    recorder.start()
    noise = torch.randn(2, 1, 4, 4).clamp(-1, 1)
    assert any(torch.equal(draw.tensor, noise) for draw in recorder.stop().draws)


@pytest.mark.parametrize("strength", [0.1, 1.0])
def test_one_number_for_each_channel_that_is_added_to_the_noise(strength):
    clean, noise, steps = torch.rand(SHAPE) * 2 - 1, torch.randn(SHAPE), torch.randn(B, 3, 1, 1)
    a, b = (part.float()[:, None, None, None] for part in on_circle())
    seen = Seen(draws=[Draw(noise, True), Draw(steps, True)], tensors={1: clean})
    mixture = find(a * clean + b * (noise + strength * steps), seen)
    assert mixture is not None and mixture.offset == pytest.approx(strength, rel=1e-3) and mixture.drawn
    assert torch.allclose(mixture.noise_tensor, noise + strength * steps, atol=1e-4)
    [*_, check] = Drawing({}).look([Look(clean, None, clean, None, mixture)])
    assert (check.name, check.severity) == ("offset noise", "warning" if strength == 1 else "info")


def test_words_that_are_put_back_are_those_of_an_embedding_alone():
    network, text = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Linear(4, 4))
    assert not ForeignObserver({"network": network}, (), (), text).embeds_alone
    assert ForeignObserver({"network": network}, (), (), text[0]).embeds_alone


@pytest.mark.parametrize(
    ("change", "bytes_seen", "overflowed"),
    [
        (lambda image: image + 90, True, True),
        (lambda image: image + 20, True, False),
        (lambda image: torch.add(image, 20, alpha=4), True, True),
        (lambda image: (image > 90).byte() - 1, False, False),  # a mask of bits
    ],
)
def test_bytes_that_overflow_are_seen(change, bytes_seen, overflowed):
    recorder, image = Recorder(), torch.tensor([0, 200]).byte().expand(1, 3, 2, 2)
    recorder.start()
    change(image)
    seen = recorder.stop()
    assert (seen.bytes_seen, seen.overflowed) == (bytes_seen, overflowed)


@pytest.mark.parametrize(("images", "healthy"), [(1.0, True), (0.2, True), (2 / 255, False)])
def test_images_that_were_divided_twice_are_nearly_gray(images, healthy):
    assert check_range(torch.rand(2, 3, 8, 8) * images - 1).healthy is healthy


def test_alphas_that_are_not_multiplied_up_leave_the_images():
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)[torch.linspace(10, 990, B).long()]
    check = check_mixture(levels_of((1 - betas).sqrt(), betas.sqrt()))
    assert (check.healthy, check.stage) == (False, "input")
    assert check_mixture(levels_of(*on_circle())).healthy


# ---- schedules of the learning rate


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def test_a_warm_up_has_no_length():
    of = optimizer()
    warm, fall = torch.optim.lr_scheduler.LinearLR(of, 0.1, total_iters=5), torch.optim.lr_scheduler.CosineAnnealingLR(of, 20)
    assert (schedule_length(warm), schedule_length(fall)) == (None, 20)
    assert schedule_length(torch.optim.lr_scheduler.LinearLR(of, 1.0, 0.1, total_iters=7)) == 7
    assert schedule_length(torch.optim.lr_scheduler.ConstantLR(of, 0.3, total_iters=7)) is None


def ends_of(schedule, made: int, total: int, each: int = 1) -> bool | None:
    """Whether the end of the run is healthy: `made` updates of `total`, a step of the schedule after `each`."""
    facts, judge = Facts(schedules=[schedule], options={"max_train_steps": total}), Schedule()
    for update in range(1, made + 1):
        if update % each == 0:
            schedule.optimizer.step()
            schedule.step()
        if update in (2, 3, 5, 8):
            judge.look(facts, update)
    ended = judge.end(facts, [(1, [0.1])], made, made == total)
    return ended[0].healthy if ended else None


def test_the_end_of_a_schedule_is_projected():
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    assert ends_of(cosine(optimizer(), 100), 30, 100) is True
    assert ends_of(cosine(optimizer(), 400), 30, 100) is False
    assert ends_of(cosine(optimizer(), 10), 30, 200, each=20) is None  # of epochs of 20 updates
    assert ends_of(cosine(optimizer(), 10), 70, 200, each=20) is True
    assert ends_of(cosine(optimizer(), 10), 30, 30) is False


def test_a_schedule_that_nobody_has_stepped_is_a_fault_at_the_end_alone():
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    assert ends_of(cosine(optimizer(), 100), 30, 100, each=1000) is not False
    judged = Schedule().end(Facts(schedules=[cosine(optimizer(), 9)]), [(1, [0.1])], 30, True)
    assert judged[0].observed == "never stepped" and not judged[0].healthy


def test_a_rate_that_rises_to_the_end():
    rates = [(update, [0.01 * update]) for update in range(1, 31)]
    assert Schedule().end(Facts(), rates, 30, True)[0].observed.endswith("rising")
    assert Schedule().end(Facts(), rates, 30, False) == []


# ---- between updates


def test_a_copy_is_told_from_an_average():
    weights, copy, average = torch.ones(4), torch.ones(4), torch.ones(4)
    owned = [Average("copy", {"w": copy}, None), Average("average", {"w": average}, None)]
    probes = [CopyProbe(one, "w", weights) for one in owned]
    for step in range(6):
        for probe in probes:
            probe.take()
        weights += step + 1
        copy.copy_(weights)
        average.lerp_(weights, 0.1)
    for probe in probes:
        probe.compare()
    assert [(probe.copies > 0, probe.averages) for probe in probes] == [(True, False), (False, True)]


def test_an_average_of_new_tensors_is_followed():
    shadow = {"w": torch.ones(2), "b": torch.zeros(1)}
    average = Average("ema", dict(shadow), shadow)
    shadow["w"] = shadow["w"] * 0.5
    assert float(average.now()["w"].sum()) == 1
    stacked = Average("ema", {"w": torch.ones(2)}, [torch.ones(2)])
    stacked.owner[0] = torch.ones(3)  # another thing by now
    assert stacked.now()["w"].shape == (2,)


def test_an_average_that_begins_later_is_told_so(monkeypatch):
    class Holder:
        def __init__(self):
            self.shadow, self.update_after_step = [], 100

    monkeypatch.setattr(facts, "_scopes", lambda: [{"ema": Holder()}])
    assert facts._beginning("ema.shadow", {}) == 100
    assert facts._beginning("shadow", {"ema_start": 2000, "start": 7, "ema": True}) == 2000
    assert facts._beginning("shadow", {"ema_start": 10**9}) == 0  # never


def test_weights_that_are_nan_have_not_moved():
    probe = Probe([torch.full((4,), math.nan)])
    probe.take()
    probe.again()
    assert not probe.moved()


def test_labels_are_not_what_was_drawn():
    recorder = Recorder()
    recorder.start()
    labels = torch.tensor([0, 1, 2, 3])
    times = torch.randint(0, 9, (4,))
    moved = times.clone()
    torch.where(torch.rand(4) < 0.5, labels, 4)
    found = recorder.stop().labels_of(4)
    assert any(torch.equal(labels, one) for one in found)
    assert not any(torch.equal(moved, one) for one in found)


def test_labels_that_are_changed_in_place_are_copied_if_they_may_be_of_the_batch(monkeypatch):
    recorder, counter = Recorder(), torch.zeros(200_000, dtype=torch.int64)
    recorder.shape = torch.Size((4, 3, 8, 8))
    recorder.start()
    labels, other = torch.tensor([0, 1, 2, 3]), torch.zeros(5, dtype=torch.int64)
    for changed in (labels, other, counter):
        changed.add_(1)
    for _ in range(4):
        labels.add_(1)
    seen = recorder.stop()
    assert {len(one) for one in seen.earlier.values()} == {4} and len(seen.earlier) == 5
    assert [0, 1, 2, 3] in [one.tolist() for one in seen.labels_of(4)]
    assert not any(len(one) == len(counter) for one in seen.labels.values())

    recorder.start()
    monkeypatch.setattr(recorder, "_keep_earlier", lambda tensor: 1 / 0)
    labels.add_(1)  # the script goes on
    recorder.stop()


def test_large_draws_are_not_kept_for_long(monkeypatch):
    monkeypatch.setattr("utils.diagnostics.watching.seen.MOST_BYTES", 1)
    recorder = Recorder()
    recorder.start()
    drawn = [torch.randn(2, 3) for _ in range(20)]
    assert len(drawn) == 20 and len(recorder.stop().draws) == 8


ZEROS, VARIED, STEPS = torch.zeros(4).long(), torch.tensor([0, 1, 2, 1]), torch.tensor([7, 2, 5, 3])


@pytest.mark.parametrize(
    ("script", "given", "table", "severity"),
    [
        ([VARIED], (STEPS, ZEROS), 3, "warning"),
        ([VARIED], (STEPS, ZEROS), 2, "info"),  # numbers that the embedding has no row for
        ([VARIED], (STEPS, ZEROS, VARIED), 3, "info"),  # they are the labels of another place
        ([STEPS], (STEPS, ZEROS), 9, "info"),  # the timesteps
        ([VARIED], (STEPS, ZEROS + 2), 0, "warning"),
        (
            [STEPS.repeat(2).reshape(2, 4).repeat(2, 1) * torch.arange(4)[:, None]],
            (STEPS, torch.full((4, 8), 0.3)),
            0,
            "warning",
        ),
        (
            [STEPS.repeat(2).reshape(2, 4).repeat(2, 1) * torch.arange(4)[:, None]],
            (STEPS, torch.ones(4, 4)),
            0,
            "info",
        ),  # a mask
        ([torch.arange(32).reshape(4, 8)], (STEPS, torch.tensor([[512.0, 512, 0, 0]]).repeat(4, 1)), 0, "info"),  # sizes
    ],
)
def test_labels_that_are_one_for_all(script, given, table, severity):
    seen = Seen(labels=dict(enumerate(script)))
    call = Call((torch.zeros(SHAPE)[:4], *given))
    conditions = Conditions()
    for _ in range(4):
        checks = conditions.look(Update(1, [MicroStep({"network": call}, {"seen": seen})]), {"labels": torch.zeros(table) > 0})
    assert next((check.healthy, check.severity) for check in checks) == (False, severity)


TEXT, SIZES = torch.full((4, 8, 8), 0.3), torch.tensor([[64, 64, 0, n, 64, 64] for n in range(4)])


@pytest.mark.parametrize("given", [[SIZES], [SIZES.float() / 9], [{"time_ids": SIZES, "text_embeds": TEXT[:, 0]}]])
def test_sizes_that_differ_say_nothing_of_a_text_that_does_not(given):
    def severities(*tokens) -> list[str]:
        step = step_of(STEPS, TEXT, *given, seen=Seen(labels=dict(enumerate((SIZES, *tokens)))))
        conditions = Conditions()
        return [check.severity for _ in range(4) for check in conditions.look(Update(1, [step]), {}) if check.healthy is False]

    assert set(severities()) == {"info"}
    assert "warning" in severities(torch.arange(32).reshape(4, 8))  # a text that the network does not get


def shares(step: MicroStep, rows: dict, looks: int = 40) -> list[bool]:
    conditions = Conditions()
    for _ in range(looks):
        checks = conditions.look(Update(1, [step]), rows)
    return [check.healthy for check in checks if check.name.startswith("share")]


def test_labels_that_are_mostly_dropped():
    labels, texts = torch.tensor([1, 0, 4, 2, 3]), torch.arange(40.0).reshape(5, 8)
    few, many = torch.arange(5) < 1, torch.arange(5) < 4
    for drop, healthy in ((few, [True]), (many, [False])):
        recorder = Recorder()
        recorder.conditions = {texts.shape}
        recorder.start()
        given = torch.where(drop, 5, labels)
        in_place = labels.clone()
        in_place[drop] = 5
        without_text = texts * ~drop[:, None]
        seen = recorder.stop()
        assert shares(step_of(labels / 5, given, seen=Seen(labels={0: labels})), {}) == healthy
        assert shares(step_of(labels / 5, in_place, seen=seen), {}) == healthy
        assert shares(step_of(labels / 5, without_text, seen=seen), {}) == healthy
        reached = torch.zeros(6, dtype=torch.bool)
        reached[given] = True
        assert shares(step_of(labels / 5, labels), {"table": reached}) == healthy  # dropped by the network itself
        assert shares(step_of(labels / 5, labels), {"of other labels": torch.arange(9) > 5}) == [True]
    assert shares(step_of(labels / 5, labels, seen=Seen(labels={0: labels})), {}) == []
    assert shares(step_of(labels / 5, in_place, seen=seen), {}, looks=1) == [True]  # too few to say so


@pytest.mark.parametrize("change", [lambda v: v.roll(1, 0), lambda v: v.flip(0), lambda v: v[torch.tensor([0, 2, 1, 3])]])
def test_labels_of_other_images(change):
    labels, texts = torch.tensor([1, 0, 4, 2]), torch.arange(32.0).reshape(4, 8)
    images = torch.rand(4, 3, 8, 8)

    def exchanged(given, images_seen=images, **seen) -> bool | None:
        known = Seen(tensors={0: images_seen}, **seen)
        step = step_of(torch.rand(4), given, seen=known, sample_numbers=images)
        checks = Conditions().look(Update(1, [step]), {})
        return next(check.healthy for check in checks if check.name.endswith("of a batch"))

    assert exchanged(change(labels), labels={0: labels}) is exchanged(change(texts), conditions={0: texts}) is False
    assert exchanged(torch.where(STEPS > 6, 9, change(labels)), labels={0: labels, 1: change(labels)}) is False  # and dropped
    assert exchanged(change(labels), images_seen=change(images), labels={0: labels}) is True  # both are shuffled
    assert exchanged(labels, labels={0: labels, 1: labels.clone()}) is exchanged(texts, conditions={0: texts + 1}) is True
    places = torch.arange(4)
    assert exchanged(labels, labels={0: labels, 1: places, 2: change(places)}) is True  # an order, as of a transport


def test_a_network_beside_that_gets_another_image_has_its_own_noise_level():
    image, steps = torch.randn(4, 3, 8, 8), torch.arange(4)

    def told(*beside) -> list:
        step = MicroStep({"network": Call((image, steps))}, {"beside": beside})
        return [check.healthy for check in _told_beside(Update(1, [step]))]

    assert [told(image, steps), told(image, steps.flip(0)), told(image.flip(0), 0 * steps)] == [[True], [False], []]


def test_a_name_alone_makes_no_average(monkeypatch):
    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def shared(**names) -> str:
        monkeypatch.setattr(facts, "_scopes", lambda: [names])
        return facts.find_facts(network, optimizer).shared

    assert shared(shadow_net=network) == ""
    assert shared(model=network, ema_model=network) == "ema_model"


def test_weights_that_are_changed_in_place_are_seen():
    weights = [torch.ones(2), torch.ones(3)]
    for change in (lambda: weights[1].lerp_(weights[1], 0.1), lambda: torch._foreach_mul_(weights, 0.9)):
        recorder = Recorder()
        recorder.start()
        weights[0] * 2
        change()
        assert weights[1].data_ptr() in recorder.stop().changed


def step_of(*inputs, **batch) -> MicroStep:
    return MicroStep({"network": Call((torch.zeros(len(inputs[0]), 3, 8, 8), *inputs))}, batch)


def test_the_noise_level_may_come_after_the_labels():
    drawn = [Times(VARIED, highest=3), Times(STEPS, highest=1000)]
    noise, floats = STEPS / 9.0, torch.tensor([0.3, 0.9, 0.1, 0.4])

    def place(*inputs, **batch) -> int | None:
        step = step_of(*inputs, **batch)
        return place_of_told(step.calls["network"].inputs, step)

    assert place(VARIED, STEPS, seen=Seen(times=drawn)) == 2
    assert place(STEPS.flip(0), VARIED, seen=Seen(times=drawn)) == 1
    assert place(STEPS, STEPS + 1, seen=Seen(times=[Times(STEPS + 1, highest=9), Times(STEPS, highest=9)])) == 1
    assert place(VARIED, noise, floats, noise_levels=noise) == place(VARIED, 1 - noise, noise_levels=noise) == 2
    assert place(VARIED, floats, noise_levels=noise) == place(VARIED, floats) == 2  # which is wrong, and yet no label
    assert place(STEPS, floats, seen=Seen(times=drawn)) == place(VARIED) == 1
    assert place(torch.zeros(4, 9)) is None


def test_the_noise_level_is_where_the_images_are():
    inputs = torch.zeros(SHAPE, device="meta"), 3
    told = number_told(inputs, MicroStep({"network": Call(inputs)}))
    assert (told.device.type, told.shape) == ("meta", (B,))


def test_a_table_of_one_row_beside_that_of_the_labels():
    one, several = torch.arange(5) == 3, torch.arange(5) < 3
    assert shares(step_of(STEPS, VARIED), {"y": one}) == [False]
    assert shares(step_of(STEPS, VARIED), {"y": several, "season": one}) == [True]
    assert shares(step_of(STEPS, VARIED), {"words": torch.arange(500) == 3}) == []


def test_the_level_of_a_silent_clip_is_not_asked_for():
    [look] = levels_of(*on_circle()).looks
    assert without_silence([look]) == [look]
    look.mixture.clean[2] = 0
    look.told, look.times = torch.arange(B), Times(torch.arange(B))
    look.moments, look.others = [torch.arange(B) / B], [torch.rand(SHAPE)]
    [left] = without_silence([look])
    assert left.told.tolist() == left.times.values.tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert {len(left.x), len(left.output), len(left.mixture.of_clean), len(left.mixture.clean_tensor)} == {B - 1}
    assert (len(left.moments[0]), len(left.others[0])) == (B - 1, B - 1)
    look.mixture.clean[:] = 0
    assert without_silence([look]) == []


def test_of_a_silent_batch_nothing_is_said():
    _a, b = (of.float()[:, None, None, None] for of in on_circle())
    noise = torch.randn(SHAPE)

    def found(x, *images) -> list[str]:
        seen = Seen(draws=[Draw(noise, True)], tensors={n: image for n, image in enumerate((*images, noise))})
        step = MicroStep({"network": Call((x, torch.arange(B)), (noise,), {0: noise})}, {"seen": seen})
        return [c.message for c in ForwardJudge({}).look(Update(1, [step]), Facts(), 1.0) if c.healthy is False]

    assert found(b * noise, torch.zeros(SHAPE)) == []
    alone = ["the network sees noise alone, without the image"]
    assert found(b * noise, torch.rand(SHAPE)) == found(noise, torch.zeros(SHAPE)) == alone


def test_large_images_are_not_kept_for_long(monkeypatch):
    monkeypatch.setattr("utils.diagnostics.watching.seen.MOST_BYTES", 1)
    recorder = Recorder()
    recorder.start()
    images = [torch.ones(2, 3, 4, 4) + number for number in range(20)]
    assert len(images) == 20 and len(recorder.stop().tensors) == 8


def test_large_conditions_are_not_kept_for_long(monkeypatch):
    monkeypatch.setattr("utils.diagnostics.watching.seen.MOST_BYTES", 1)
    recorder = Recorder()
    recorder.shape, recorder.conditions = torch.Size(SHAPE), {torch.Size((2, 9))}
    recorder.start()
    texts, others = [torch.ones(2, 9) + number for number in range(20)], torch.rand(5)
    drawn, seen = torch.rand(B), recorder.stop()
    assert len(texts) == 20 and len(others) == 5 and len(seen.conditions) == 2
    assert [len(moments) for moments in seen.moments] == [len(drawn)]


@pytest.mark.parametrize(("dtype", "known"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_schedule_that_is_almost_a_known_one_is_another(dtype, known):
    places = torch.linspace(120, 700, B).long()
    table = tables(1000)["squaredcos_cap_v2"][places]
    exact, near = (levels_of(values.sqrt(), (1 - values).sqrt()) for values in (table, table + 3e-5))
    for levels in (exact, near):
        levels.looks[0].x = levels.looks[0].x.to(dtype)
    assert matching(exact, places, 1000)[0] == "squaredcos_cap_v2"
    assert (matching(near, places, 1000) is not None) is known  # bf16 leaves as much


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("name", ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"])
def test_schedules_are_those_of_diffusers(name, zero_snr):
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(num_train_timesteps=50, beta_schedule=name, rescale_betas_zero_snr=zero_snr)
    table = tables(50)[name + " (zero terminal SNR)" * zero_snr]
    assert (table - scheduler.alphas_cumprod.double()).abs().max() < 1e-6


def test_a_scheduler_that_noises_by_sigmas_has_no_table():
    from diffusers import DDPMScheduler, EulerDiscreteScheduler

    from utils.diagnostics.watching.schedules import _own_table

    assert _own_table(DDPMScheduler(num_train_timesteps=50)).shape == (50,)
    assert _own_table(EulerDiscreteScheduler()) is None


def wrong(checks: list) -> set[str]:
    return {check.name for check in checks if check.healthy is False}


def test_a_batch_that_is_repeated_within_or_between_updates():
    images, levels = torch.rand(3, B, 9), torch.rand(3, B)

    def found(images, levels) -> set[str]:
        judge = Batches()
        return set.union(*(wrong(judge._one_batch(*both)) for both in zip(images, levels)))

    assert found(images, levels) == set()
    assert found(images[:1].expand_as(images), levels) == {"batches of different updates"}
    assert found(images, levels[:1].expand_as(levels)) == {"noise levels of different updates"}
    assert found(images[:, :1].expand_as(images), levels) == {"images of a batch"}
    assert found(images[:, :1], levels[:, :1]) == set()
    assert found(images, torch.full_like(levels, 0.1)) == set()  # a denoiser of one noise level


def test_noise_levels_that_are_cut_off_at_an_end():
    def found(*looks) -> set[str]:
        judge = Batches()
        return set.union(*(wrong(judge._one_batch(torch.rand(len(levels), 9), levels)) for levels in looks))

    drawn = torch.linspace(0.1, 1.0, 16).double()
    cut, seldom = drawn.clamp(min=0.6), drawn.clamp(min=0.2)
    assert found(cut, seldom, cut) == {"share of images of the first or last noise level"}
    assert found(cut) == found(cut, seldom, seldom, cut) == found(drawn, drawn.flip(0) - 0.01, drawn) == set()
    few = [torch.tensor([0.1, 0.4, 0.7, 0.99]).double()[[0, 0, 0, 0, 1, 1, 2, 3 - n]] for n in range(3)]
    views = [torch.rand(2).double().repeat_interleave(4) for _ in range(3)]
    assert found(*few) == found(*views) == set()


@pytest.mark.parametrize(("dtype", "scale", "found"), [("float16", 1, 1), ("float16", 8, 0), ("bfloat16", 1, 0)])
def test_a_loss_in_fp16_that_is_not_scaled(dtype, scale, found):
    factor = 2 / torch.zeros(SHAPE).numel()
    levels = levels_of(*on_circle(), lambda output, clean, noise: (output.to(getattr(torch, dtype)) - noise) * factor)
    levels.looks[0].output = levels.looks[0].output.to(getattr(torch, dtype))
    checks = ForwardJudge({})._loss(levels, None, None, 1, "", scale)
    assert len(wrong(checks) & {"scale of the loss"}) == found


def test_settings_of_an_optimizer_that_nobody_wants():
    assert wrong(_betas([{"lr": 1.0, "betas": (0.9, 0.999)}, {"lr": 0.1}])) == set()
    assert wrong(_betas([{"lr": 1.0, "betas": (0.999, 0.9)}])) == {"betas"}
    assert wrong(_betas([{"lr": 1.0, "betas": (0.0, 0.0)}])) == {"betas"}
    assert wrong(_decay([{"lr": 1e-3, "weight_decay": 0.3}, {"lr": None}])) == set()
    assert wrong(_decay([{"lr": 1e-3, "weight_decay": 0.0}, {"lr": 1e-3, "weight_decay": 10}])) == {"weight decay of an update"}


def test_optimizers_of_other_settings():
    assert _betas([{"lr": 1.0, "betas": (0.9, 0.999, 0.9999)}, {"betas": (None, 0.999)}]) == []
    assert rates_of([{"lr": None}, {"lr": 1.0}]) == rates_of([{}]) == []
    assert rates_of([{"lr": torch.tensor(0.5)}, {"lr": 1}]) == [0.5, 1.0]
    judge, step = UpdateJudge({}), SimpleNamespace(optimizer="CAME", groups=[{"lr": None, "betas": (0.9, 0.999, 0.9999)}])
    judge._say(SimpleNamespace(update=SimpleNamespace(optimizer_step=step), facts=Facts()), 1, 0.0)
    assert judge._words["optimizer"] == "CAME"


def test_groups_that_never_begin():
    def found(*rates) -> set[str]:
        return wrong(Schedule().end(Facts(), [(1 + 30 * n, list(each)) for n, each in enumerate(rates)], 40, True))

    assert found((1.0, 0.0), (0.5, 0.0)) == {"groups with a rate of 0"}
    assert found((1.0, 0.0), (1.0, 1.0)) == found((1.0,), (1.0, 1.0)) == set()  # begins late


class Around(torch.optim.Optimizer):
    """Makes the steps of another one, and then changes the weights too, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.999)


@pytest.mark.parametrize(
    ("choose", "found"),
    [
        (lambda both, update: both[update > 3], {"optimizer of the parameters": "warning"}),
        (lambda both, update: both[update in (4, 5)], {}),
        (lambda both, update: Around(both[0]) if update == 1 else None, {}),
    ],
)
def test_optimizers_of_the_same_parameters(choose, found):
    network, watcher = Network(3, 3, 1), Watcher(lambda watcher: None)
    both, chosen = [torch.optim.Adam(network.parameters(), lr=1e-3) for _ in range(2)], None
    with install(watcher):
        for update in range(1, 8):
            clean, noise, t = torch.rand(SHAPE) * 2 - 1, torch.randn(SHAPE), torch.rand(B)
            mixed = torch.lerp(clean, noise, t[:, None, None, None])
            chosen = choose(both, update) or chosen
            chosen.zero_grad()
            (network(mixed, t) - (noise - clean)).square().mean().backward()
            chosen.step()
        watcher.end(True)
    assert not watcher.failure
    checks = [check for entry in watcher.judge.history for check in entry["audit"]["checks"]]
    names = ("optimizer of the parameters", "steps per update", "weights at the next update")
    assert {c["name"]: c["severity"] for c in checks if c["healthy"] is False and c["name"] in names} == found


@pytest.mark.parametrize(
    ("init", "change", "healthy"), [(0.06, 1e-3, True), (0.0, 1e-3, True), (0.06, 0.1, False), (1.0, 0.1, True)]
)
def test_an_update_as_large_as_the_weights(init, change, healthy):
    network = torch.nn.Linear(64, 64)
    torch.nn.init.normal_(network.weight, std=init)
    observer = ForeignObserver({"network": network}, set(), set())
    before = observer.sample.take(network.parameters())
    update = Update(1, optimizer_step=SimpleNamespace(before=before, after=before + change))
    assert _size_of_step(update, observer).healthy is healthy


def test_a_gradient_of_which_clipping_leaves_nothing():
    def found(factor: float, scale: float = 1.0, limit: float = 1e-3) -> list:
        judge, whole = UpdateJudge({}), torch.ones(4)
        update = Update(1, [MicroStep(gradient_after=whole * scale)], optimizer_step=SimpleNamespace(gradient=whole * factor))
        look = SimpleNamespace(update=update, loss_scale=scale, clips=[SimpleNamespace(limit=limit)])
        return [check.healthy or check.severity for _ in range(4) for check in judge._far_clipped(look)]

    assert [found(1.0), found(0.05), found(1.0, 2.0**16), found(0.001)] == [[True], [True], [True], ["warning"]]
    assert found(0.001, limit=1.0) == ["info"]  # the gradient of a summed loss


@pytest.mark.parametrize(("rates", "found"), [([1.0, 0.5, 0.0], True), ([1.0, 0.5, 0.01], False), ([0.0, 0.5, 1.0], False)])
def test_a_rate_that_is_over_long_before_the_run(rates, found):
    seen = [(1 + 20 * number, [rate]) for number, rate in enumerate(rates)]
    checks = Schedule().end(Facts(), seen, 100, True)
    assert any("trains nothing" in check.message for check in checks) is found
    assert Schedule().end(Facts(), [(1, [1.0]), (98, [0.0])], 100, True) == []


def test_threads_of_process_groups_get_time_at_the_end(monkeypatch, tmp_path):
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    for size in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", size)
        Result(tmp_path).finish(SimpleNamespace(end=lambda ended, last_look: None), contextlib.ExitStack(), ended=True)
    assert waited == [SETTLING]


def test_clipping_is_seen_however_it_is_called():
    weight = torch.nn.Parameter(torch.ones(3))
    with install(Watcher(lambda watcher: None)):
        for call in (
            lambda: torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0),
            lambda: torch.nn.utils.clip_grad_norm_(max_norm=1.0, parameters=iter([weight]), foreach=False),
        ):
            weight.grad = torch.ones(3)
            assert float(call()) == pytest.approx(3**0.5) and float(weight.grad.norm()) == pytest.approx(1)
        with pytest.raises(TypeError):
            torch.nn.utils.clip_grad_norm_([weight])
    compiled = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")
    assert compiled(torch.zeros(())) == 1  # compiled networks no longer run eagerly


@pytest.mark.parametrize(("cut", "stage"), [(True, "gradient"), (False, "optimizer")])
def test_an_optimizer_whose_parameters_never_get_a_gradient(cut, stage):
    network, other, watcher = Network(3, 3, 1), Network(3, 3, 1), Watcher(lambda watcher: None)
    optimizer = torch.optim.Adam((network if cut else other).parameters(), lr=1e-3)
    with install(watcher):
        for _ in range(6):
            loss = network(torch.rand(SHAPE), torch.rand(B)).square().mean()
            (torch.tensor(loss.item(), requires_grad=True) if cut else loss).backward()
            optimizer.step()
    checks = [check for entry in watcher.judge.history for check in entry["audit"]["checks"]]
    assert [check["stage"] for check in checks if check["healthy"] is False] == [stage]


def test_what_fails_within_the_hooks_of_a_step_does_not_reach_the_script(monkeypatch, capsys):
    weight, watcher = torch.nn.Parameter(torch.ones(3)), Watcher(lambda watcher: None)
    optimizer, rests = torch.optim.SGD([weight], lr=0.5), []
    with install(watcher):
        hook = register_optimizer_step_pre_hook(lambda *arguments: None)
        monkeypatch.setattr(watcher, "rest", lambda: (rests.append(float(weight[0].detach())), hook.remove()))
        monkeypatch.setattr(watcher, "before_step", lambda optimizer: 1 / 0)
        weight.sum().backward()
        optimizer.step()
        assert watcher.failure and not rests
        weight.sum().backward()
    assert rests[0] == 0.5 and "the script goes on" in capsys.readouterr().err


def test_an_average_in_the_buffers_of_a_module(monkeypatch):
    network = torch.nn.Linear(2, 2)
    ema = torch.nn.Module()
    ema.register_buffer("decay", torch.tensor(0.9))
    ema.register_buffer("weight_", torch.zeros(2, 2))
    ema.register_buffer("bias_", torch.zeros(2))
    monkeypatch.setattr(facts, "_scopes", lambda: [{"model_ema": ema}])
    [average] = facts.find_facts(network, torch.optim.SGD(network.parameters(), lr=0.1)).averages
    assert average.is_average and average.name == "model_ema.buffers" and average.tensors["bias"] is ema.bias_


def test_an_average_of_the_weights_that_are_trained_alone(monkeypatch):
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    network[1].weight.requires_grad_(False)
    shadow = [p.detach().clone() for p in network.parameters() if p.requires_grad]
    monkeypatch.setattr(facts, "_scopes", lambda: [{"ema": shadow}])
    [average] = facts.find_facts(network, torch.optim.SGD(network[0].parameters(), lr=0.1)).averages
    assert average.is_average and list(average.tensors) == ["0.weight", "0.bias"]


def test_weights_that_are_kept_beside_an_average_are_none():
    judge = UpdateJudge({})
    judge._moving = {"ema"}
    kept = ("ema.collected_params", "ema.shadow_params", "ema.1", "other.collected_params")
    assert [judge.is_beside(name) for name in kept] == [True, False, False, False]


def test_films_have_a_range_and_noise_of_each_frame():
    films = torch.rand(8, 3, 4, 8, 8) * 2 - 1
    assert [check_range(of).healthy for of in (films, films / 255)] == [True, False]
    for noise, healthy in ((torch.randn(8, 3, 4, 8, 8), True), (torch.randn(8, 3, 1, 8, 8).expand(8, 3, 4, 8, 8), False)):
        mixture = Mixture(noise, noise, torch.ones(8), torch.ones(8), torch.zeros(8), films, noise)
        look = Look(films, None, films, None, mixture)
        assert (not wrong(Drawing({}).look([look]))) is healthy


def test_images_whose_colors_and_places_are_mixed_up():
    smooth = torch.linspace(-1, 1, 16).expand(4, 16, 16)
    images = torch.stack([smooth, -smooth, smooth * 0.5], -1)  # [B, H, W, C]
    assert check_range(images.permute(0, 3, 1, 2)).healthy and not check_range(images.reshape(4, 3, 16, 16)).healthy
    assert check_range(torch.rand(4, 3, 16, 16) * 2 - 1).healthy


def test_one_coefficient_of_a_schedule():
    places, (a, b) = torch.arange(0, 800, 100), (lambda table: (table.sqrt(), (1 - table).sqrt()))(tables(1000)["linear"])
    assert half_matching(levels_of(a[places], b[places]), places, 1000) == ""
    assert "the image has others" in half_matching(levels_of(a[places] ** 0.01, b[places]), places, 1000)
    assert half_matching(levels_of(a[places] ** 2, b[places] ** 2), places, 1000) == ""
    shares = torch.linspace(0.1, 0.9, B).double()
    assert "equally strong" in check_mixture(levels_of(shares, torch.ones(B).double())).message
    assert check_mixture(levels_of(torch.ones(B).double(), shares)).healthy


@pytest.mark.parametrize(
    ("sigma", "found"),
    [
        (lambda u, n: 0.01 * 1000**u, None),
        (lambda u, n: (1.2 * n - 1.2).exp(), None),
        (lambda u, n: 10 ** (5 * u - 2.9), None),  # 0.00126 to 126: as variational diffusion has them
        (lambda u, n: (15 * u - 7.5).exp(), None),  # the logarithm of the SNR, uniform from -15 to 15
        (lambda u, n: (0.01 * 1000**u) ** 4, "input"),
        (lambda u, n: 0.01 * 1000**n, "timestep"),
    ],
)
def test_noise_that_is_less_than_the_rounding_of_the_images(sigma, found):
    """Of images from -1 to 1 it is 1 / 127.5 / sqrt(12), that is 0.0023."""
    generator = torch.Generator().manual_seed(0)
    uniform, normal = torch.rand(256, generator=generator).double(), torch.randn(256, generator=generator).double()
    images = torch.randint(0, 256, (256, 3, 4, 4), generator=generator) / 127.5 - 1
    levels = sigma(uniform, normal)

    def stages(clean: torch.Tensor) -> list[str]:
        mixture = Mixture(*[clean.flatten(1).double()] * 2, torch.ones(256).double(), levels, torch.zeros(256), clean, clean)
        look = Look(clean, None, clean, None, mixture, moments=[uniform, normal])
        return [check.stage for check in ForwardJudge({})._below_rounding([look]) if not check.healthy]

    assert stages(images) == ([found] if found else [])
    assert stages(images + 1e-3) == []  # they are no bytes
    assert stages((images + 1) / 2) == ([found] if found else [])


@pytest.mark.parametrize(("times", "healthy"), [(1.0, True), (0.25, True), (1000.0, False), (0.0, None)])
def test_what_the_bound_of_the_variances_counts(times, healthy):
    """As improved DDPM has it: the KL divergence of the step back, in bits, beside the squared error of the noise."""
    generator, table = torch.Generator().manual_seed(0), tables(1000)["linear"]
    steps = torch.tensor([0, 10, 50, 100, 200, 300, 400, 500])
    clean, noise = (torch.randn(SHAPE, generator=generator).double() for _ in range(2))
    output = torch.randn(B, 6, 8, 8, generator=generator).double().requires_grad_()
    now, before = (table[at.clamp(min=0)][:, None, None, None] for at in (steps, steps - 1))
    x = now.sqrt() * clean + (1 - now).sqrt() * noise
    beta = torch.where(steps[:, None, None, None] > 0, 1 - now / before, 1e-4)
    given, told = output.chunk(2, 1)
    low = beta * (1 - torch.where(before > now, before, 0.99995)) / (1 - now)
    variance = beta ** ((told + 1) / 2) * low ** ((1 - told) / 2)
    mean = (x - beta / (1 - now).sqrt() * given.detach()) / (1 - beta).sqrt()
    wanted = (x - beta / (1 - now).sqrt() * noise) / (1 - beta).sqrt()
    kl = torch.distributions.kl_divergence(
        torch.distributions.Normal(wanted, low.sqrt()), torch.distributions.Normal(mean, variance.sqrt())
    )
    ((given - noise).square().mean() + times * kl.mean() / math.log(2)).backward()
    parts = [part.flatten(1) for part in (clean, noise)]
    mixture = Mixture(*parts, now.sqrt().flatten(), (1 - now).sqrt().flatten(), torch.zeros(B), clean, noise)
    levels = Levels([Look(x, None, output.detach(), output.grad, mixture)])
    check = check_bound(levels, table, torch.ones(B).double())
    assert (check.healthy if check else None) is healthy
    assert check is None or check.observed == f"{times:.4g} times"


def test_a_target_of_another_image():
    levels = levels_of(*on_circle(), lambda output, clean, noise: output - 2 * noise + 0.5 * OTHER)
    assert identify_target(levels, ORDER).name == ""
    levels.looks[0].others = [OTHER, levels.looks[0].mixture.clean_tensor]
    target = identify_target(levels, ORDER)
    assert target.name.startswith("an image that is not the one") and not target.healthy
    for declared in (None, "epsilon"):  # it may be what a teacher says
        assert check_target(target, declared, levels).severity == "info"
    for other, name in ((OTHER, "other noise than that of the image"), (OTHER.clamp(-1, 1), "an image that is not the one")):
        levels = levels_of(*on_circle(), lambda output, clean, noise, other=other: output - other)
        levels.looks[0].others = [other]
        assert identify_target(levels, ORDER).name.startswith(name)
    clean = levels.looks[0].mixture.clean_tensor
    levels = levels_of(*on_circle(), lambda output, clean, noise: output - clean.flip(2))
    levels.looks[0].others = [clean, clean.flip(2)]
    assert check_target(identify_target(levels, ORDER), None, levels).severity == "critical"


@pytest.mark.parametrize(("inside", "healthy"), [(10.0, True), (0.1, False), (1.0, None)])
@pytest.mark.parametrize("holed", [True, False])
def test_a_loss_that_counts_what_is_outside_the_holes_of_images(inside, healthy, holed):
    """`holed`: the script has the images with these holes; else nothing says what the weights are for."""
    levels = levels_of(*on_circle(), lambda output, clean, noise: (output - noise) * (1 + (inside - 1) * (1 - MASK)))
    clean = levels.looks[0].mixture.clean_tensor
    levels.looks[0].others = [OTHER, clean, clean * MASK if holed else clean * MASK.roll(1, 2)]
    checks = [c for c in ForwardJudge({})._loss(levels, None, None, 1, "", 1) if c.name.startswith("errors outside the holes")]
    assert [check.healthy for check in checks] == ([] if healthy is None or not holed else [healthy])


@pytest.mark.parametrize(("of_noise", "severity"), [(1.0, "warning"), (0.0, "info")])
def test_the_whole_image_as_target_of_a_part_that_is_noised(of_noise, severity):
    """With noise in it nothing but that image has the target; without it, it may be what a network restores."""
    levels = levels_of(*on_circle(), lambda output, clean, noise: output - of_noise * noise + OTHER)
    look, cut = levels.looks[0], OTHER * MASK
    look.mixture.clean_tensor, levels.clean, look.others = cut, cut.flatten(1).double(), [cut, OTHER]
    check = check_target(identify_target(levels, ORDER), None, levels)
    assert (check.stage, check.severity) == ("input" if of_noise else "target", severity)


@pytest.mark.parametrize(("name", "found"), [("squaredcos_cap_v2", 0), ("cosine (betas up to 0.9999)", 0), ("linear (zero", 1)])
def test_the_noise_as_target_of_a_last_step_without_signal(name, found):
    levels = levels_of(*on_circle(), lambda output, clean, noise: output - noise)
    table = next(table for known, table in tables(1000).items() if known.startswith(name))
    checks = ForwardJudge({})._loss(levels, table, "epsilon", 1, "", 1)
    assert [check.name for check in checks].count("target of the last step") == found


@pytest.mark.parametrize(
    ("told", "words"),
    [(lambda s: s.log() / 4, "ln(sigma) / 4"), (lambda s: (s / 2).log(), "ln(sigma / 2)"), (lambda s: s, "sigma")],
)
def test_what_networks_are_told_of_sigma(told, words):
    sigma = torch.linspace(0.1, 9, B).double()
    levels = levels_of(torch.ones(B).double(), sigma)
    levels.told = told(sigma)
    check, found = check_told(levels)
    assert check.healthy and found == words


@pytest.mark.parametrize(
    ("told", "frequencies", "healthy"),
    [
        (lambda t: 1000 * t, lambda n: 1e-4**n, True),
        (lambda t: t, lambda n: 1e-4**n, True),  # weak, and usual
        (lambda t: t, lambda n: 0.02 * n, False),  # made for 0 to 1000
        (lambda t: t, lambda n: 16 * n, True),
        (lambda t: 0.9 + 0.01 * t, lambda n: 1e-4**n, None),  # hardly any levels
    ],
)
def test_embeddings_of_the_noise_level_that_are_all_alike(told, frequencies, healthy):
    levels = told(torch.linspace(0.01, 1, B).double())
    angles = levels[:, None] * frequencies(torch.linspace(0, 1, 32).double())
    sines, sizes = torch.cat([angles.sin(), angles.cos()], 1).float(), torch.full((B, 8), 100).float().cos()
    check = check_embedded(levels, [torch.randn(B, 16), sizes, sines])
    assert (check.healthy if check else None) is healthy
    assert check_embedded(levels, [sines.roll(1, 0) + 0.1, torch.randn(B, 16)]) is None  # neither is one


@pytest.mark.parametrize(
    ("steps", "end", "wrong"), [(1000, 0.02, 0), (300, 0.02, 0), (1000, 0.002, 1), (100, 0.02, 1), (1000, 0.2, 1)]
)
def test_schedules_that_end_too_early_or_too_late(steps, end, wrong):
    table = torch.cumprod(1 - torch.linspace(1e-4, end, steps, dtype=torch.float64), 0)
    assert sum(check.healthy is False for check in check_ends(table, True)) == wrong
    assert all(check.severity == "info" for check in check_ends(table, False)[:1])


@pytest.mark.parametrize(("draw", "healthy"), [(torch.randn, True), (torch.rand, False)])
def test_paths_of_which_a_part_is_not_trained(draw, healthy):
    judge = ForwardJudge({})
    torch.manual_seed(0)
    for _ in range(5):
        s = torch.sigmoid(draw(B)).double()
        checks = judge._span(levels_of(1 - s, s))
    assert [check.healthy for check in checks] == [healthy]


@pytest.mark.parametrize(
    ("labels", "dropped", "healthy"),
    [
        (lambda look: torch.full((B,), look // 2), False, False),
        (lambda look: torch.full((B,), look // 2), True, False),
        (lambda look: torch.full((B,), 1), True, True),  # a set of one class
        (lambda look: (torch.arange(B) + look) % 2, False, True),
        (lambda look: (torch.arange(B) + look) % 3, True, True),
    ],
)
def test_batches_of_one_class(labels, dropped, healthy):
    conditions = Conditions()
    for look in range(5):
        given = torch.where(torch.arange(B) == look, 9, labels(look)) if dropped else labels(look)
        step = step_of(100 * torch.arange(B), given, seen=Seen())
        checks = conditions.look(Update(look, [step]), {})
    assert [check.healthy for check in checks if check.name == "classes of a batch"] == [healthy]


def test_micro_steps_that_accelerate_was_told_and_never_come():
    judge = UpdateJudge({})
    assert [[c.healthy for c in judge._accumulated(4, passes)] for passes in (1, 1, 1)] == [[True], [True], [False]]
    assert judge._accumulated(4, 4)[0].healthy and not judge._accumulated(None, 1)


@pytest.mark.parametrize(("counts", "wrong"), [(True, 1), (False, 0)])
def test_an_average_that_another_one_replaced(counts, wrong):
    """Those of diffusers count their updates; of others only a long rest says it, after which there are two."""
    average = Average("EMA", {}, EMAModel([torch.nn.Parameter(torch.ones(2))]) if counts else None)
    judge, zeros = UpdateJudge({}), torch.zeros(2)
    for update in (2, 3, 5, 8):
        assert not judge._stopped(average, zeros, zeros + update, update)
    assert len(judge._stopped(average, zeros + 16, zeros + 16, 21)) == wrong
    judge._moves["EMA"] = (4, zeros + 16, 21)
    assert len(judge._stopped(average, zeros + 16, zeros + 16, 55)) == 1


def test_statistics_of_batches_that_an_average_does_not_get():
    network, average = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    judge = UpdateJudge({})
    judge._averaged.add("EMA")
    for copied in (True, True, False):
        network(torch.randn(B, 3, 4, 4))
        if copied:
            average.load_state_dict(network.state_dict())
        checks = judge._buffers_left(Average("EMA", {}, average), network)
    assert [check.healthy for check in checks] == [True]  # once may be between two copies
    judge._buffers.clear()
    for _ in range(2):
        network(torch.randn(B, 3, 4, 4))
        checks = judge._buffers_left(Average("EMA", {}, average), network)
    assert [check.healthy for check in checks] == [False]


@pytest.mark.parametrize(("follows", "observed"), [(False, "no change"), (True, "not observed")])
def test_an_average_of_weights_that_never_change(follows, observed):
    """Its rounding moves it in the first updates, and then no more."""
    weights = torch.linspace(1, 2, 4096)
    begun = weights if follows else weights - 0.1
    update = SimpleNamespace(step=20, weights=weights, optimizer_step=SimpleNamespace(before=weights - 1e-3))
    observer = SimpleNamespace(averaged=lambda name: torch.full((4096,), True))
    now = begun * (1 + 1e-7 * torch.sign(torch.randn(4096, generator=torch.Generator().manual_seed(0))))
    [check] = check_average(Average("ema", {}, None), now, now, First(begun, 2, 0), update, observer)
    assert check.observed.startswith(observed)


@pytest.mark.parametrize(
    ("decays", "healthy"), [((0.75, 0.6, 0.3), False), ((0.3, 0.6, 0.75), True), ((0.9, 0.899, 0.9), True)]
)
def test_decays_that_fall(decays, healthy):
    first, update = First(torch.zeros(2), 2, 0), SimpleNamespace(step=4)
    checks = [_decay_of(Average("EMA", {}, None), 1 - decay, first, update, 0.0) for decay in decays]
    assert checks[-1].healthy is healthy


@pytest.mark.parametrize(
    ("shuffle", "draws", "passes", "found"),
    [
        (True, False, 3, []),
        (False, False, 3, ["warning"]),
        (False, False, 1, ["info"]),
        (False, True, 3, []),  # a dataset that makes its images
        ("seeded", False, 3, ["warning"]),
    ],
)
def test_passes_over_the_data_that_begin_alike(shuffle, draws, passes, found):
    class Images(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            image = torch.rand(3, 4, 4) if draws else torch.full((3, 4, 4), index / 32)
            return {"label": index, "input": image.flip(2)}

    loading, steps, generator = Loading(), 0, torch.Generator()
    loader = torch.utils.data.DataLoader(Images(), 8, shuffle=bool(shuffle), generator=generator)
    evaluated = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(32.0)[:, None, None]), 4)
    for _ in range(passes):
        if shuffle == "seeded":
            generator.manual_seed(0)
        for each, training in ((loader, True), (evaluated, False)):
            iterator = iter(each)
            for batch in iterator:
                loading.see(iterator, batch, steps)
                steps += training
    assert [check.severity for check in loading.end(steps) if not check.healthy] == found


@pytest.mark.parametrize(("epsilon", "healthy"), [(1e-8, []), (1e-3, [True]), (0.1, [False])])
def test_an_epsilon_that_is_larger_than_the_gradients(epsilon, healthy):
    state = {"exp_avg_sq": torch.full((9,), 1e-4), "step": torch.full((9,), 5000.0)}
    step = SimpleNamespace(groups=[{"eps": epsilon, "betas": (0.9, 0.999)}], state_before=state)
    assert [check.healthy for check in _epsilon(SimpleNamespace(optimizer_step=step))] == healthy
    step.groups[0]["eps"] = (1e-30, 1e-3)
    assert _epsilon(SimpleNamespace(optimizer_step=step)) == []


@pytest.mark.parametrize(("peak", "wrong"), [(1e-6, 0), (1e-7, 1)])
def test_a_learning_rate_that_hardly_moves_anything(peak, wrong):
    checks = Schedule().end(Facts(), [(1, [peak / 2]), (5, [peak]), (40, [peak / 2])], 50, True)
    assert sum(check.stage == "learning_rate" and check.healthy is False for check in checks) == wrong


def test_images_of_half_the_range():
    images = torch.rand(4, 3, 8, 8).round() - 0.5
    assert check_range(images).code == "data-range" and check_range(2 * images).healthy


def test_a_loss_that_is_nearly_nothing():
    assert not identify_weights(torch.full((B,), 3e-7).double(), levels_of(*on_circle()), "epsilon", 1).healthy


def test_torchscript_within_a_network_is_no_obstacle():
    scripted = torch.jit.script(torch.nn.Linear(4, 4))
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), scripted)
    observer = ForeignObserver({"network": network}, (), ())
    observer.begin(1)
    network(torch.rand(B, 4))
    assert not observer.failure and len(observer.update.micro_steps[0].batch["vectors"]) == 1


def test_what_linear_layers_get_is_seen_without_asking_for_their_weights():
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4)))
    observer = ForeignObserver({"network": network}, (), ())
    before = [buffer.clone() for buffer in network.buffers()]
    observer.begin(1)
    assert all(map(torch.equal, network.buffers(), before))
    given = torch.rand(B, 4)
    network(given)
    [vector] = observer.update.micro_steps[0].batch["vectors"]
    observer.rest()
    assert torch.equal(vector, given)


@pytest.mark.parametrize(("factor", "healthy"), [(1.0, True), (float(B), False)])
def test_weights_of_a_velocity(factor, healthy):
    s = torch.linspace(0.2, 0.9, B).double()
    levels = levels_of(1 - s, s)
    assert identify_weights(factor / s**2, levels, "sample", 1).healthy is healthy
    assert not identify_weights(factor / (1 - s) ** 2, levels, "sample", 1).healthy
    assert identify_weights(factor / (1 - s) ** 2, levels, "epsilon", 1).healthy is healthy


@pytest.mark.parametrize(
    ("seen", "stage"), [(lambda clean, x, s: (clean - x) / (1 - s), "target"), (lambda *given: OTHER, "weight")]
)
def test_a_velocity_of_the_other_path(seen, stage):
    """The same loss is one of velocities, or is weighed by something that was computed by itself."""
    s = torch.linspace(0.2, 0.8, B).double()
    share = s.float()[:, None, None, None]
    levels = levels_of(1 - s, s, lambda output, clean, noise: 2 / OTHER.numel() * (output - clean) / (1 - share) ** 2)
    look = levels.looks[0]
    look.others = [OTHER, seen(look.mixture.clean_tensor, look.x, share)]
    wrong = [check for check in ForwardJudge({})._loss(levels, None, None, 1, "", 1) if check.healthy is False]
    assert [check.stage for check in wrong] == [stage]


def test_conditions_that_tell_the_image_or_nothing_or_repeat():
    images, hints = torch.rand(2, 4, 3, 8, 8), torch.rand(2, 4, 3, 8, 8)

    def found(first, second=None) -> set[str]:
        pairs = [(image, hint) for image, hint in zip(images, (first, second)) if hint is not None]
        steps = [step_of(torch.rand(4), hint, sample_numbers=image) for image, hint in pairs]
        return wrong(Conditions().look(Update(1, steps), {}))

    assert found(*hints) == found(hints[0] * 0) == set()
    assert found(images[0].clone()) == {"image beside the noised one"}
    assert found(hints[0] / 255) == {"largest value of an image beside"}
    assert found(torch.rand(4, 24, 8, 8) / 255) == set()  # features of a network beside it
    assert found(hints[0], hints[0].clone()) == set()  # once is by chance


def test_conditions_that_are_those_of_the_first_micro_step():
    def found(*conditions) -> set[str]:
        judge, checks = Conditions(), []
        for one in conditions:
            steps = [step_of(torch.rand(4), one.clone(), sample_numbers=torch.rand(4, 3, 8, 8)) for _ in range(2)]
            checks = judge.look(Update(1, steps), {})
        return wrong(checks) & {"conditions of the micro steps"}

    hints = torch.rand(3, 4, 3, 8, 8)
    assert found(*hints) == {"conditions of the micro steps"}
    assert found(*hints[:2]) == found(hints[0], hints[0], hints[1]) == set()  # too few looks; fixed cameras
    assert found(*hints[:, :1].expand_as(hints)) == found(*hints[:, [0, 0, 1, 1]]) == set()  # two texts for all


def test_the_image_itself_joined_to_the_noised_one_or_beside_it():
    image = torch.rand(4, 3, 8, 8)

    def severities(x, *given, inner=None) -> list[str]:
        calls = {"network": Call((x, torch.rand(4), *given))} | ({} if inner is None else {"raw": Call((inner, torch.rand(4)))})
        step = MicroStep(calls, {"sample_numbers": image})
        return [check.severity for check in Conditions().look(Update(1, [step]), {}) if check.healthy is False]

    noised = torch.rand(4, 3, 8, 8)
    assert severities(torch.cat([noised, image], 1)) == ["warning"]
    assert severities(noised, image.clone()) == ["info"]  # an autoencoder's, or a reference network's
    assert severities(noised, image.clone(), inner=torch.cat([noised, image], 1)) == ["warning"]  # joined by a wrapper
    hole = image * (torch.rand(4, 1, 8, 8) > 0.5)
    assert severities(noised, hole, inner=torch.cat([noised, hole], 1)) == []


def test_a_rate_that_is_never_what_was_asked_for():
    def found(*rates, made: int = 2, base: float = 1.0, kind=SimpleNamespace, **options) -> list[str]:
        schedule = kind(base_lrs=[base], last_epoch=made, optimizer=None)
        known, judge = Facts(options=options, schedules=[] if options else [schedule]), Schedule()
        judge.look(known, 2)
        checks = judge.end(known, [(1 + n, rate) for n, rate in enumerate(rates)], 40, True)
        return [f"{c.severity}: {c.name}" for c in checks if not c.healthy]

    def by_function(**of):
        return SimpleNamespace(lr_lambdas=[], **of)

    assert found([0.1]) == found([0.0001], base=0.001, kind=by_function) == ["warning: highest learning rate"]
    assert found([0.1], lr=1.0) == ["info: highest learning rate"]  # which may be for a larger batch
    stuck = found([0.1], lr=1.0, warmup_steps=10)  # always the first of its steps
    assert stuck == ["warning: highest learning rate"] and found([0.1], lr=1.0, warmup_steps=8)[0].startswith("info")
    assert found([0.1], [0.2], lr=1.0, warmup_steps=10)[0].startswith("info")  # one that is longer than the run
    assert found([0.1], made=60) == []  # it goes on with an earlier run
    assert found([0.1], kind=by_function) == []  # its function gives the rate itself
    assert found([0.1], [0.9]) == found([0.1], [0.9], lr=1.0) == found([0.1, 0.2], [0.9, 1.8]) == []


def test_rates_of_groups_that_part():
    def found(*bases: float) -> set[str]:
        schedules = [SimpleNamespace(base_lrs=list(bases), last_epoch=60, optimizer=None)] if bases else []
        return wrong(Schedule().end(Facts(schedules=schedules), [(1, [0.1, 1.0]), (2, [0.9, 1.0])], 40, True))

    assert found() == found(0.1) == {"rates of the groups"}  # by hand, or of a group that was added later
    assert found(0.1, 1.0) == set()


@pytest.mark.parametrize(("every", "seldom"), [(1, False), (10, False), (25, True)])
def test_an_average_that_hardly_ever_moves(every, seldom):
    weights, average = torch.ones(4), torch.zeros(4)
    probe = CopyProbe(Average("ema", {"w": average}, None), "w", weights)
    for step in range(1, 61):
        if step % every == 0:
            average.lerp_(weights, 0.1)
        probe.take()
    probe.compare()
    assert probe.seldom is seldom


@pytest.mark.parametrize(
    ("moved", "kind", "severity", "options"),
    [
        (range(50, 500, 50), None, "info", {}),
        ((9, 30, 300), None, "warning", {}),
        ((9, 30, 300), AveragedModel, "info", {}),
        (range(50, 500, 50), None, "warning", {"eval_freq": 50}),  # where the network is evaluated
        (range(50, 500, 50), None, "info", {"eval_freq": 70}),
        (range(50, 500, 50), None, "info", {"eval_freq": 50, "ema_every": 50}),
    ],
)
def test_an_average_that_seldom_moves_in_a_rhythm(moved, kind, severity, options):
    weights, average = torch.ones(4), torch.zeros(4)
    probe = CopyProbe(Average("ema", {"w": average}, kind and kind(torch.nn.Linear(1, 1))), "w", weights)
    for step in range(1, 500):
        if step in moved:
            average.lerp_(weights, 0.1)
        probe.take()
    judge = Judge(_facts=Facts(options=options))
    judge.end(499, True, [probe], 0)
    [check] = judge.history[0]["audit"]["checks"]
    assert check["severity"] == severity and f"moves in {len(moved) - 1} of the" in check["message"]


def test_what_is_known_to_be_an_average_is_compared_now_and_then():
    weights, average = torch.ones(4), torch.zeros(4)
    probe = CopyProbe(Average("ema", {"w": average}, None), "w", weights)
    for _ in range(100):
        average.lerp_(weights, 0.1)
        probe.take()
    assert probe.averages and len(probe._kept) <= 100 / 4


def test_embeddings_that_are_cut_off_together():
    network = torch.nn.ModuleDict(
        {"time_embed": torch.nn.Linear(2, 2), "label_emb": torch.nn.Embedding(3, 2), "body": torch.nn.Linear(2, 2)}
    )
    names = list(dict(network.named_parameters()))

    def stages(*reached) -> set[str]:
        judge, sample = UpdateJudge({}), SimpleNamespace(names=names, counts=[1] * len(names))
        step = SimpleNamespace(group_of=torch.zeros(len(names), dtype=torch.long))
        observer = SimpleNamespace(sample=sample, trained=network, parameters=dict(network.named_parameters()))
        look = SimpleNamespace(update=SimpleNamespace(optimizer_step=step), observer=observer)
        look.reached = {name for name in names if name.split(".")[0] in reached}
        return {c.stage for _ in range(3) for c in judge._without_gradient(look) if c.healthy is False}

    assert [stages("body"), stages("body", "label_emb"), stages("body", "time_embed")] == [
        {"gradient"},
        {"timestep"},
        {"condition"},
    ]


def test_gradients_that_are_put_there_by_hand():
    without = Check("gradient", "gradient at the step", "that of the backward passes", "none", False, "no backward pass")
    left = Check("gradient", "gradients before the first backward pass", "none left over", "norm 1", False, "not cleared")
    for gradient, healthy in ((torch.ones(3), None), (torch.zeros(3), False)):
        update = Update(1, optimizer_step=SimpleNamespace(gradient=gradient))
        assert [check.healthy for check in _by_function([left, without], update)] == [healthy, healthy]
    assert not _by_function([left], Update(1, optimizer_step=SimpleNamespace(gradient=torch.ones(3))))[0].healthy


@pytest.mark.parametrize(
    ("copied", "clipped", "found"),
    [(True, "copies", set()), (False, "copies", {"weights of the network"}), (True, "network", {"norm at the step"})],
)
def test_an_optimizer_of_flat_copies(copied, clipped, found):
    """As loops in half precision have them."""

    network, watcher = Network(3, 3, 1), Watcher(lambda watcher: None)
    flat = torch.nn.Parameter(torch.cat([p.detach().flatten() for p in network.parameters()]))
    optimizer = torch.optim.SGD([flat], lr=1e-3)
    with install(watcher):
        for _ in range(9):
            clean, noise, t = torch.rand(SHAPE) * 2 - 1, torch.randn(SHAPE), torch.rand(B)
            mixed = torch.lerp(clean, noise, t[:, None, None, None])
            network.zero_grad()
            (network(mixed, t) - (noise - clean)).square().mean().backward()
            flat.grad = torch.cat([p.grad.flatten() for p in network.parameters()])
            torch.nn.utils.clip_grad_norm_([flat] if clipped == "copies" else network.parameters(), 1e-3)
            optimizer.step()
            if copied:
                torch.nn.utils.vector_to_parameters(flat.detach(), network.parameters())
        watcher.end(True)
    assert not watcher.failure and watcher.updates == 9
    checks = [check for entry in watcher.judge.history for check in entry["audit"]["checks"]]
    known = {"weights of the network", "norm at the step", "gradients before the first backward pass"}
    assert {check["name"] for check in checks if check["healthy"] is False} & known == found


def test_the_first_update_of_a_closure_counts():
    network, watcher = torch.nn.Conv2d(3, 3, 1), Watcher(lambda watcher: None)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = network(torch.randn(SHAPE)).square().mean()
        loss.backward()
        return loss

    with install(watcher):
        for _ in range(4):
            optimizer.step(closure)
        watcher.end(True)
    assert watcher.updates == 4


def test_noise_that_is_stronger_on_purpose():
    known = Facts(options={"noise_scale": 2.0, "lr": 0.5})
    assert declared_strength(known, 1.999) and not declared_strength(known, 0.5) and not declared_strength(Facts(), 2.0)

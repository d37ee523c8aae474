"""What a watched script does to images, noise, targets, labels and settings on their way; what its objects declare of them."""

import json
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDPMScheduler
from test_watching_parts import ORDER, SHAPE, B, levels_of, on_circle, wrong

from utils.diagnostics.audit.seen import Call, MicroStep, Update
from utils.diagnostics.watching.batches import Batches
from utils.diagnostics.watching.conditions import Conditions
from utils.diagnostics.watching.drawing import Drawing
from utils.diagnostics.watching.facts import Facts
from utils.diagnostics.watching.inputs import _changed
from utils.diagnostics.watching.labels import Labels, are_reordered, as_labels
from utils.diagnostics.watching.levels import Look
from utils.diagnostics.watching.loading import Loading
from utils.diagnostics.watching.mixture import find
from utils.diagnostics.watching.network import Settings, check_beside
from utils.diagnostics.watching.options import Schedule, check_declared_schedule, check_log_normal
from utils.diagnostics.watching.probes import Probe
from utils.diagnostics.watching.schedules import Schedules
from utils.diagnostics.watching.seen import Draw, Seen, Times
from utils.diagnostics.watching.targets import MORE_NOISE, identify_target
from utils.diagnostics.watching.weights import identify_weights

CLEAN, NOISE = torch.rand(SHAPE) * 2 - 1, torch.randn(SHAPE)
WIDE = [v.float()[:, None, None, None] for v in on_circle()]
SEEN = Seen(draws=[Draw(NOISE, True)], tensors={0: CLEAN})


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        (lambda x: x.clamp(-1, 1), "input"),
        (lambda x: x + torch.rand(B, 3, 1, 1), "noise"),
        (lambda x: x.tanh(), None),
        (lambda x: x + torch.rand_like(x), None),
    ],
)
def test_a_noised_image_that_is_changed(change, stage):
    check = _changed(change(WIDE[0] * CLEAN + WIDE[1] * NOISE), SEEN)
    assert (check and check.stage) == stage


def test_numbers_of_another_kind_that_are_added_to_the_noise():
    for steps, count in ((torch.rand(B, 3, 1, 1), 1), (torch.zeros(B, 3, 1, 1), 0)):
        noise = NOISE + 0.5 * steps
        seen = Seen(draws=[Draw(NOISE, True)], tensors={0: CLEAN, 1: noise})
        told = SimpleNamespace(clean=CLEAN, noise=noise)
        mixture = find(WIDE[0] * CLEAN + WIDE[1] * noise, seen, told)
        look = Look(CLEAN, None, CLEAN, None, mixture)
        assert len(wrong(Drawing({}).look([look])) & {"offset of the noise"}) == count
    normal = torch.randn(B, 3, 1, 1)
    seen = Seen(draws=[Draw(NOISE, True), Draw(normal, True)], tensors={0: CLEAN})
    told = SimpleNamespace(clean=CLEAN, noise=NOISE + 0.5 * normal)
    assert not find(WIDE[0] * CLEAN + WIDE[1] * told.noise, seen, told).moved  # offset noise, as it is published


@pytest.mark.parametrize("limit", [1.0, 2.0, None])
def test_targets_that_are_cut_off(limit):
    levels = levels_of(*on_circle(), lambda o, x, n: o - (n if limit is None else n.clamp(-limit, limit)))
    assert ("cut off" in identify_target(levels, ORDER).name) is (limit is not None)
    for size in (0.0, 0.1, 1.0):  # beside an output of zero it is the target that seems to be cut off
        huber = levels_of(*on_circle(), lambda o, x, n: (o - n).clamp(-1, 1) * (1 + WIDE[0]), size=size)
        assert identify_target(huber, ORDER).healthy


def test_the_perturbed_noise_as_target():
    other = torch.randn(SHAPE)
    levels = levels_of(*on_circle(), lambda o, x, n: o - n - 0.1 * other)
    levels.looks[0].others, levels.looks[0].batch = [0.1 * other], B
    assert identify_target(levels, ORDER).name == MORE_NOISE


def test_weights_of_a_batch_times_its_errors_in_each_micro_step():
    """[B, 1] times [B] gives all images of a micro step the mean of its weights; the next one has another mean."""
    levels = levels_of(*on_circle())
    snr = (levels.a / levels.b) ** 2
    found = identify_weights(torch.full_like(snr, float((snr.clamp(max=5) / snr).mean())), levels, "epsilon", 1)
    assert not found.healthy and found.name == "1"


# ---- labels


def test_rows_of_zeros_and_ones_are_labels():
    rows = torch.eye(4)[[2, 0, 3]]
    assert as_labels(rows).tolist() == [2, 0, 3]
    rows[1] = 0
    assert as_labels(rows).tolist() == [2, -1, 3]
    for other in (torch.ones(3, 4), torch.rand(3, 4), torch.zeros(3, 4), torch.zeros(3)):
        assert as_labels(other) is None


def conditions_of(value, vectors=(), looks=12) -> set[str]:
    conditions, checks = Conditions(), []
    for _ in range(looks):
        x = torch.randn(len(value), 3, 8, 8)
        batch = {"seen": Seen(), "sample_numbers": x, "vectors": list(vectors)}
        checks = conditions.look(Update(1, [MicroStep({"network": Call((x, torch.rand(len(value)), value), (x,))}, batch)]), {})
    return wrong(checks)


def test_rows_that_are_dropped_within_the_network():
    rows = torch.eye(4)[torch.arange(8) % 4]
    few, many = rows * (torch.arange(8) > 0)[:, None], rows * (torch.arange(8) > 6)[:, None]
    share = "share of the labels that is dropped"
    assert share not in conditions_of(rows, [torch.rand(8, 16), 2 * few])
    assert share in conditions_of(rows, [torch.rand(8, 16), 2 * many])


def test_texts_that_are_mostly_empty():
    texts = torch.randn(8, 5, 16)
    share = "share of the texts that are one and the same"
    assert share not in conditions_of(texts)
    texts[:7] = texts[0]
    assert share in conditions_of(texts)


def test_images_in_another_order_than_the_loader_brought_them():
    means = torch.rand(12).double()
    assert not are_reordered(2 * means - 1, means)
    assert are_reordered((2 * means - 1).flip(0), means)
    assert not are_reordered(torch.rand(12).double(), means)  # other images
    labels = Labels()
    for _ in range(3):
        given = torch.arange(12) % 4
        labels.look(given, (), [given], moved=True)
    assert "order of the images beside that of their labels" in wrong(labels.checks())


# ---- batches


def batch_of(images: torch.Tensor, b: torch.Tensor | None = None) -> Look:
    a, b = on_circle() if b is None else ((1 - b**2).sqrt(), b)
    look = levels_of(a, b).looks[0]
    look.mixture.clean = images.flatten(1).double()
    return look


def test_batches_that_come_again_in_their_order():
    batches, first = Batches(), torch.rand(SHAPE)
    looks = [(first, 2), (first, 3), (first.flip(0), 21), (first, 21)]  # used twice at once; in another order; kept
    found = [wrong(batches._again([batch_of(images)], update)) for images, update in looks]
    assert found == [set(), set(), set(), {"batches that come again"}]
    assert not wrong(Batches()._again([batch_of(first), batch_of(torch.rand(SHAPE))], 2))


def test_batches_of_one_image():
    batches, image = Batches(), torch.rand(1, *SHAPE[1:])
    mirrored = torch.cat([image, image.flip(3)]).repeat(B // 2, 1, 1, 1)
    found = [wrong(batches._again([batch_of(mirrored + 0.1 * number)], number)) for number in range(3)]
    assert found == [set(), set(), {"different images of a batch"}]


@pytest.mark.parametrize(("different", "images", "healthy"), [(8, 500, False), (80, 500, True), (8, 8, True), (8, 0, True)])
def test_images_that_the_sampler_leaves_out(different, images, healthy):
    batches, pool = Batches(), torch.rand(different, *SHAPE[1:])
    for number in range(10):
        batches._again([batch_of(pool[(torch.arange(B) + B * number) % different])], number)
    assert (not wrong(batches.end(images))) is healthy


@pytest.mark.parametrize("in_order", [False, True])
def test_noise_that_goes_with_brightness(in_order):
    generator, batches, found = torch.Generator().manual_seed(0), Batches(), set()
    for _ in range(12):
        images = torch.rand(B, 1, 1, 1, generator=generator) * torch.ones(SHAPE)
        levels = torch.rand(B, generator=generator).double() * 0.98 + 0.01
        levels = levels.sort().values[images[:, 0, 0, 0].argsort().argsort()] if in_order else levels
        found |= wrong(batches._brightness([batch_of(images, levels)]))
    assert (found == {"noise beside brightness"}) is in_order


def test_the_highest_timestep_that_is_drawn():
    for highest, options, healthy in ((500, {}, False), (1000, {}, True), (500, {"max_timestep": 500}, True), (0, {}, True)):
        times = Times(torch.arange(4), 0, highest)
        assert Schedules({})._partly(times, 1000, Facts(options=options)).healthy is healthy


# ---- what objects declare


@pytest.mark.parametrize(("mean", "fine"), [(-1.2, True), (1.2, False)])
def test_the_mean_of_the_noise_levels_that_is_declared(mean, fine):
    generator = torch.Generator().manual_seed(0)
    logs = (mean + 1.2 * torch.randn(80, generator=generator)).tolist()
    facts = Facts(options={"P_mean": -1.2, "P_std": 1.2})
    assert (not wrong(check_log_normal(facts, logs))) is fine
    assert not check_log_normal(Facts(), logs) and not check_log_normal(facts, logs[:8])


def test_the_schedule_of_the_command_line_and_of_the_model(tmp_path):
    linear, scaled = (DDPMScheduler(beta_schedule=name) for name in ("linear", "scaled_linear"))
    facts = Facts(options={"ddpm_beta_schedule": "linear"})
    assert not wrong(check_declared_schedule(facts, linear)) and wrong(check_declared_schedule(facts, scaled))
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(dict(scaled.config)))
    facts = Facts(options={"pretrained_model_name_or_path": str(tmp_path)})
    assert wrong(check_declared_schedule(facts, linear)) and not wrong(check_declared_schedule(facts, scaled))
    for options in ({}, {"pretrained_model_name_or_path": "of/the-hub"}, {"pretrained_model_name_or_path": None}):
        assert not check_declared_schedule(Facts(options=options), linear)
    assert not wrong(check_declared_schedule(Facts(options={"beta_schedule": "own"}), None))


def test_settings_of_layers_that_are_changed():
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.Dropout(0.1))
    observer, settings = SimpleNamespace(modules={"network": network}), Settings()
    network.eval()
    assert not wrong(settings.look(observer))
    network.train()
    assert not wrong(settings.look(observer))
    network[0].s1 = 0.9
    assert wrong(settings.look(observer)) == {"settings of the network's layers"}


def test_models_beside_the_network():
    encoder = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1)).requires_grad_(False)
    autoencoder = torch.nn.Linear(2, 2)
    facts = Facts(encoders=[encoder], autoencoder=autoencoder)
    assert wrong(check_beside(facts, [])) == {"mode of Sequential"}
    encoder.eval()
    assert not wrong(check_beside(facts, []))
    assert wrong(check_beside(facts, [id(autoencoder.weight)])) == {"parameters of the autoencoder in the optimizer"}
    encoder.train().requires_grad_(True)
    assert not wrong(check_beside(facts, []))


@pytest.mark.parametrize(
    ("steps", "rates", "found"), [(0, (1e-3, 1e-3), True), (1, (1e-3, 1e-3), False), (0, (1e-3, 1e-4), False)]
)
def test_a_schedule_of_an_optimizer_that_makes_no_steps(steps, rates, found):
    """It may begin later, or lend its rate to the one that is used."""
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    facts = Facts(others=[torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0)])
    for _ in range(steps):
        other.step()
    seen = [(update, [rates[update >= 15]]) for update in range(30)]
    assert bool(wrong(Schedule().end(facts, seen, 30, True)) & {"schedule of the learning rate at the end of the run"}) is found


def test_a_weight_of_any_layer_that_is_changed_between_updates():
    weights = [torch.rand(4, 4) for _ in range(120)]
    probe = Probe(weights)
    for changed in (False, True):
        probe.take()
        if changed:
            weights[3].zero_(), weights[2].zero_()
        probe.again()
        assert probe.moved() is changed
    shared = torch.rand(1).expand(3, 3)  # has fewer numbers than elements
    Probe([torch.rand(3), shared]).take()


def test_labels_of_the_last_batches_are_kept_alone():
    loading, dataset = Loading(), [0] * 64
    iterator = SimpleNamespace(_dataset=dataset, _index_sampler=range(4), _num_yielded=2)
    for number in range(6):
        loading.see(iterator, [torch.rand(16, 3, 8, 8), torch.arange(16) + number], number, soon=False)
    assert [int(labels[0]) for labels in loading.labels] == [3, 4, 5] and not loading.means
    loading.see(iterator, [torch.rand(16, 3, 8, 8), torch.eye(16)], 7, soon=True)
    assert loading.labels[-1].tolist() == list(range(16)) and len(loading.means) == 1

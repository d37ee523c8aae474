"""What a watched script's parts do from update to update: generators, datasets, labels, schedules, rates, averages."""

import gc
import random
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel
from test_watching_parts import B, levels_of, on_circle, wrong

from utils.diagnostics.audit.seen import MicroStep, Update
from utils.diagnostics.watching.averages import First, check_average
from utils.diagnostics.watching.batches import Batches, _channels_reversed
from utils.diagnostics.watching.drawing import _without_pairs
from utils.diagnostics.watching.facts import Average, Facts, _defaults, find_facts
from utils.diagnostics.watching.forward import _data
from utils.diagnostics.watching.generators import Generators
from utils.diagnostics.watching.images import check_latents
from utils.diagnostics.watching.inputs import check_exchanged, check_told
from utils.diagnostics.watching.labels import Labels
from utils.diagnostics.watching.levels import Levels, tables
from utils.diagnostics.watching.network import _normalized
from utils.diagnostics.watching.optimizing import _rates
from utils.diagnostics.watching.options import Schedule, _decays, declared_prediction
from utils.diagnostics.watching.schedules import Schedules, check_drawn
from utils.diagnostics.watching.seen import Draw, Noising, Recorder, Seen
from utils.diagnostics.watching.stored_images import StoredImages
from utils.diagnostics.watching.updating import UpdateJudge, _of_one_sign
from utils.diagnostics.watching.weights import check_masked, identify_weights


def updates_of(generators: Generators, seed_before: set[int], draws: bool = True) -> None:
    for update in range(1, 13):
        if update in seed_before:
            torch.manual_seed(7)
        if draws:
            torch.randn(4)
        generators.see(update)


@pytest.mark.parametrize(
    ("seed_before", "draws", "healthy"),
    [({5, 9}, True, False), ({5}, True, True), (set(), True, True), ({5, 9}, False, True)],
)
def test_a_generator_that_is_set_back(seed_before, draws, healthy):
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    generators = Generators()
    updates_of(generators, seed_before, draws)
    [check] = generators.end()
    assert check.healthy is healthy and check.stage == "state"
    assert healthy or "after update 9 the random generator of torch stands where it stood after update 5" in check.message


def test_a_generator_that_serves_previews_alone():
    """Whatever it repeats then is no matter of the training."""
    generators, drawing = Generators(), Generators()
    for update in range(1, 13):
        if update in (4, 8):
            random.seed(update % 8)
            random.random()
        generators.see(update)
    assert generators.end()[0].healthy
    for update in range(1, 13):
        if update in (4, 8):
            random.seed(0)
        random.random()
        drawing.see(update)
    assert [(check.healthy, check.severity) for check in drawing.end()] == [(False, "warning")]


def test_a_generator_that_is_put_back_after_a_preview():
    generators = Generators()
    for update in range(1, 13):
        torch.randn(4)
        generators.see(update)
        if update % 4 == 0:
            state = torch.get_rng_state()
            torch.manual_seed(7)
            torch.randn(4)
            torch.set_rng_state(state)
    assert generators.end()[0].healthy


class Kept:
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, place):
        return self.images[place]


def dataset_of_a_closure(images):
    class Cached:
        def __len__(self):
            return len(images)

        def __getitem__(self, place):
            return images[place]

    return Cached()


def test_images_that_are_changed_where_they_are_kept():
    for make in (
        lambda: np.random.default_rng(0).integers(1, 255, (40, 8, 8, 3)).astype(np.uint8),
        lambda: torch.rand(40, 3, 8, 8) + 0.1,
        lambda: [torch.rand(3, 8, 8) + 0.1 for _ in range(40)],
    ):
        for wrap in (Kept, dataset_of_a_closure, lambda images: torch.utils.data.Subset(Kept(images), range(40))):
            images = make()
            stored = StoredImages(wrap(images))
            assert not stored.changed()
            for place in range(0, 40):
                images[place][:] = (
                    (images[place] * 0.5).astype(np.uint8) if isinstance(images, np.ndarray) else images[place] * 0.5
                )
            assert stored.changed()


def test_datasets_that_change_on_purpose():
    images = torch.rand(40, 3, 8, 8)
    stored = StoredImages(Kept(images))
    images.copy_(images[torch.randperm(40)].clone())  # put into another order
    assert not stored.changed()
    empty = torch.zeros(40, 3, 8, 8)
    stored = StoredImages(Kept(empty))
    empty.copy_(images)  # filled as it is read
    assert not stored.changed()
    assert not StoredImages(SimpleNamespace()).changed()


LABELS = torch.tensor([2, 0, 3, 1, 1, 3, 0, 2, 3, 0, 1, 2])


def labels_after(given, others=(), loaded=()) -> list[str]:
    labels = Labels()
    for shift in range(3):
        labels.look(*(given.roll(shift),), [o.roll(shift) for o in others], [one.roll(shift) for one in loaded])
    return [check.message for check in labels.checks() if not check.healthy]


def test_labels_of_other_images():
    labels = Labels()
    for _ in range(3):
        labels.look(LABELS.sort().values, (), ())
    assert "sorted" in next(c for c in labels.checks() if not c.healthy).message
    dropped = LABELS.sort().values.clone()
    dropped[[2, 9]] = 4  # the label that stands for none
    labels = Labels()
    for _ in range(3):
        labels.look(dropped, (), ())
    assert not all(check.healthy for check in labels.checks())
    assert labels_after(LABELS) == []
    assert labels_after(LABELS, loaded=[LABELS]) == []
    assert labels_after(LABELS + 1, loaded=[LABELS]) == []  # a function of them
    assert "other labels than those that the loader brought" in labels_after(LABELS.flip(0), loaded=[LABELS])[0]
    assert labels_after(LABELS % 2, loaded=[LABELS.flip(0) % 2]) == []  # of two classes chance cannot be excluded


def test_labels_that_are_dropped():
    drop = torch.tensor([0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1], dtype=torch.bool)  # of 3, 1, 2
    none, first = LABELS.masked_fill(drop, 4), LABELS.masked_fill(drop, 0)
    assert labels_after(none, others=[LABELS], loaded=[LABELS]) == []
    assert "which is the label of other images" in labels_after(first, others=[LABELS])[0]
    assert "in a tensor that the network does not get" in labels_after(LABELS, others=[none])[0]


def in_order(table: torch.Tensor, places: torch.Tensor) -> Levels:
    return levels_of(table[places].sqrt(), (1 - table[places]).sqrt(), told=places.double())


def test_a_schedule_that_is_changed_on_the_way():
    judge, table = Schedules({}), tables(1000)["linear"]
    places = torch.linspace(10, 990, B).long()
    for values, healthy in ((table, True), (table.clamp(min=0.05), False)):
        checks, _, _ = judge.look(in_order(values, places), in_order(values, places).looks, Facts(), None)
        assert (wrong(checks) == {"noise schedule"}) is not healthy
    fresh = Schedules({})  # nothing was known of it before
    checks, _, _ = fresh.look(in_order(table.clamp(min=0.05), places), in_order(table, places).looks, Facts(), None)
    assert "noise schedule" not in wrong(checks)


@pytest.mark.parametrize(("before", "healthy"), [("few", True), ("several", True), ("all", False)])
def test_steps_that_a_preview_leaves(before, healthy):
    table, judge, generator = tables(1000)["linear"], Schedules({}), torch.Generator().manual_seed(0)
    few = torch.tensor([100, 100, 300, 300, 100, 300, 100, 300])
    steps = {"few": few, "several": 50 * torch.arange(B), "all": None}[before]
    for _ in range(4):
        drawn = torch.randint(0, 1000, (B,), generator=generator) if steps is None else steps
        assert not wrong(judge.variety(table, in_order(table, drawn).looks))
    assert (not wrong(judge.variety(table, in_order(table, few).looks))) is healthy


def test_the_same_set_of_steps_in_each_update():
    judge, levels = Batches(), torch.linspace(0.1, 0.9, 16).double()
    found = [wrong(judge._one_batch(torch.rand(16, 9), levels[torch.randperm(16)])) for _ in range(3)]
    assert found[-1] == {"noise levels of different updates"}


def test_arguments_of_add_noise_that_are_exchanged():
    image, noise, timesteps = torch.rand(B, 3, 8, 8), torch.randn(B, 3, 8, 8), torch.arange(B)
    for given, healthy in (((image, noise), True), ((noise, image), False)):
        batch = {"seen": Seen(draws=[Draw(noise, True)]), "noising": [Noising(None, *given, timesteps, image)]}
        assert (check_exchanged(Update(1, [MicroStep({}, batch)])) is None) is healthy


def test_channels_that_are_flipped():
    images = torch.rand(4, 3, 8, 8)
    for flipped, dims, healthy in ((2, 0, False), (2, 2, True), (4, 0, True), (0, 0, True)):
        recorder = Recorder()
        recorder.start()
        for image in images[:flipped]:
            image.flip(dims)
        seen = recorder.stop()
        looks = [SimpleNamespace(x=images)]
        assert bool(wrong(_channels_reversed(Update(1, [MicroStep({}, {"seen": seen})]), looks))) is not healthy


def test_pairs_that_come_again_are_counted_once():
    noise, images = torch.randn(6, 3, 8, 8), torch.rand(6, 3, 8, 8)
    again = torch.tensor([0, 1, 1, 3, 0, 5])
    assert torch.equal(_without_pairs(noise[again], images[again]), noise[[0, 1, 3, 5]])
    assert torch.equal(_without_pairs(noise[again], images), noise[again])  # the same noise of other images


def masked_levels(mask) -> Levels:
    return levels_of(*on_circle(), lambda output, clean, noise: (output - noise) * mask(clean))


@pytest.mark.parametrize(
    ("mask", "healthy"),
    [
        (lambda clean: (clean > 0.2).float(), False),
        (lambda clean: (clean.mean(1, keepdim=True) < 0).float().expand_as(clean), False),
        (lambda clean: torch.ones_like(clean), True),
        (lambda clean: (torch.arange(8) < 5).float().expand_as(clean), True),  # of places
    ],
)
def test_masks_that_are_made_of_the_image(mask, healthy):
    assert (check_masked(masked_levels(mask)) is None) is healthy


def test_gradients_that_are_cut_off_on_one_side():
    gradient = torch.randn(4096)
    for values, healthy in (
        (gradient, True),
        (gradient.clamp(max=0.5), False),
        (gradient.clamp(min=-0.5), False),
        (gradient.clamp(-0.5, 0.5), True),
        (gradient.clamp(min=0), True),  # zeros are no limit
    ):
        [check] = _of_one_sign(Update(1, optimizer_step=SimpleNamespace(gradient=values)))
        assert check.healthy is healthy


def test_layers_that_are_zero_twice():
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    names = list(dict(network.named_parameters()))
    torch.nn.init.zeros_(network[1].weight), torch.nn.init.zeros_(network[2].weight)
    sample = SimpleNamespace(names=names, counts=[1] * len(names))
    observer = SimpleNamespace(sample=sample, trained=network, parameters=dict(network.named_parameters()))
    step = SimpleNamespace(group_of=torch.zeros(len(names), dtype=torch.long))
    look = SimpleNamespace(update=SimpleNamespace(optimizer_step=step), observer=observer, reached={"2.bias"})
    judge = UpdateJudge({})
    assert [c.stage for _ in range(3) for c in judge._without_gradient(look)] == ["network"]


def test_normalization_over_the_batch_of_a_network_that_has_none():
    network = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    assert [check.severity for check in _normalized(network)] == ["info"]
    other = type("UNet2DModel", (torch.nn.Sequential,), {"__module__": "diffusers.models.unets"})(torch.nn.BatchNorm2d(3))
    assert [check.severity for check in _normalized(other)] == ["warning"]
    assert not _normalized(torch.nn.Sequential(torch.nn.GroupNorm(1, 3)))


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_rate_that_something_else_sets(overwritten):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    facts, judge, rates = Facts(schedules=[schedule]), Schedule(), []
    for update in range(8):
        if overwritten:
            optimizer.param_groups[0]["lr"] = 1.0
        judge.see_step(facts, [optimizer.param_groups[0]["lr"]])
        rates.append((update, [optimizer.param_groups[0]["lr"]]))
        optimizer.step(), schedule.step()
    found = wrong(judge.end(facts, rates, 8, True))
    assert (found == {"rate of the optimizer"}) is overwritten


def test_an_ema_of_a_generator_that_was_used_up():
    network = torch.nn.Linear(2, 2)

    def is_empty(parameters) -> bool:
        optimizer, average = torch.optim.SGD(parameters, lr=0.1), EMAModel(parameters)
        return find_facts(network, optimizer).empty and average is not None

    assert is_empty(network.parameters())
    gc.collect()
    assert not is_empty(list(network.parameters()))


def test_the_decay_that_the_command_line_asks_for():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    average = Average("EMA", {"p": parameters[0]}, EMAModel(parameters, decay=0.75))
    for options, count in (({"ema_max_decay": 0.9999}, 1), ({"ema_max_decay": 0.75}, 0), ({"ema_power": 0.9999}, 0)):
        assert len(wrong(_decays(Facts(averages=[average], options=options)))) == count


def test_when_averages_begin_by_the_defaults_of_their_object():
    class EMA:
        def step_ema(self, ema_model, model, step_start_ema=2000):
            pass

    assert list(_defaults(EMA())) == [("step_start_ema", 2000)]
    assert list(_defaults(EMA)) == list(_defaults(types.SimpleNamespace())) == []


def test_an_average_that_moves_less_than_rounding_but_with_the_weights():
    """A decay of 0.9999 and a large table of labels: its sampled change is far below the size of its values."""
    generator = torch.Generator().manual_seed(0)
    begun = 30 * torch.randn(4096, generator=generator)
    way = 0.1 * torch.randn(4096, generator=generator)
    update = SimpleNamespace(step=35, weights=begun + way, optimizer_step=SimpleNamespace(before=begun + way))
    observer = SimpleNamespace(averaged=lambda name: torch.full((4096,), True))
    for gone, still in ((2e-5 * way, False), (2e-6 * torch.randn(4096, generator=generator), True)):
        before, now = (begun + gone).double(), (begun + 1.01 * gone).double()
        [check] = check_average(Average("ema", {}, None), before, now, First(begun.double(), 2, 0), update, observer)
        assert check.observed.startswith("no change") is still


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [(["x.py"], "v_prediction"), (["x.py", "--prediction_type", "epsilon"], "epsilon"), (["x.py", "--other"], "v_prediction")],
)
def test_a_default_of_the_command_line_declares_less_than_the_scheduler(argv, wanted, monkeypatch):
    monkeypatch.setattr("sys.argv", argv)
    assert declared_prediction({"prediction_type": "epsilon"}, {"prediction_type": "v_prediction"}) == wanted
    assert declared_prediction({"prediction_type": "epsilon"}, {}) == "epsilon"


def test_fractions_are_right_for_a_layer_that_gets_the_number_itself():
    table, places = tables(1000)["linear"], torch.linspace(10, 990, B).long()
    for to_layer in (False, True):
        levels = in_order(table, places)
        levels.looks[0].told, levels.looks[0].told_to_layer = places / 1000, to_layer
        checks = Schedules({})._steps(levels, levels.looks, places.double(), "linear", table)
        assert ("timestep that the network gets" in wrong(checks)) is not to_layer


def test_the_range_of_images_that_an_autoencoder_gets():
    images = torch.randn(B, 4, 8, 8)
    look = SimpleNamespace(mixture=SimpleNamespace(clean_tensor=images))
    facts = Facts(autoencoder=SimpleNamespace(config={"scaling_factor": 0.18215}))
    update = Update(1, [MicroStep({}, {"seen": Seen(tensors={0: images / 0.18215})})])
    found = {name: _data(look, update, facts, name) for name in ((-1.0, 0.9), (0.0, 1.0))}
    assert [(check.name, check.healthy) for check in found.values()] == [
        ("scale of the latents", True),
        ("range of the images that are encoded", False),
    ]


def test_latents_that_are_scaled_in_place():
    """The autoencoder's output is then the scaled one, and not without a scale."""
    latents = torch.randn(B, 4, 8, 8)
    for changed, healthy in (({latents.data_ptr()}, True), (set(), False)):
        seen = Seen(tensors={0: latents}, changed=changed)
        assert check_latents(latents, seen, {"scaling_factor": 0.18215}).healthy is healthy


def test_rates_that_cannot_be_meant():
    update = Update(1)
    for kind, rate, count in (("AdamW", 1e-3, 0), ("AdamW", 0.03, 1), ("SGD", 0.1, 0), ("SGD", -1e-4, 1), ("Prodigy", 1.0, 0)):
        assert len(wrong(_rates(kind, [{"lr": rate}], update))) == count
    normalized = Update(1)
    normalized.row_sizes = torch.ones(8)
    assert not wrong(_rates("Adam", [{"lr": 0.03}], normalized))


def test_timesteps_at_a_distance_of_those_drawn():
    a, b = on_circle()
    drawn = torch.arange(B).double() * 100
    for told, found in ((drawn, False), (drawn - 1, False), ((drawn + 50).clamp(max=700), True), (drawn.flip(0), False)):
        assert (check_drawn(levels_of(a, b, told=told), drawn) is not None) is found


@pytest.mark.parametrize(
    ("told_of", "stage"), [(lambda sigma: sigma, ""), (torch.sqrt, "input"), (lambda s: s / 0.8, "noise"), (torch.log, "")]
)
def test_what_a_network_of_large_noise_is_told(told_of, stage):
    sigma = torch.linspace(0.1, 20, B, dtype=torch.float64)
    check, _ = check_told(levels_of(torch.ones(B, dtype=torch.float64), sigma, told=told_of(sigma)))
    assert (check.healthy is False) == bool(stage) and (not stage or check.stage == stage)


def test_weights_of_no_known_function():
    a, b = on_circle()
    levels = levels_of(a, b)
    for weights, healthy in ((1 + b**3, True), (torch.logspace(0, -4, B, dtype=torch.float64), False)):
        assert identify_weights(weights, levels, "epsilon", 1).healthy is healthy


def test_batches_without_a_part_in_the_gradient():
    judge = Batches()
    for first, healthy in ((True, True), (True, True), (True, False)):
        looks = [*levels_of(*on_circle(), lambda o, x, n: o - n).looks, *levels_of(*on_circle()).looks]
        looks[1].mixture.clean = looks[1].mixture.clean + first
        assert (not wrong(judge._left_out(looks))) is healthy
    same = Batches()  # one more pass over the same images, as for self-conditioning
    for _ in range(3):
        looks = [*levels_of(*on_circle(), lambda o, x, n: o - n).looks, *levels_of(*on_circle()).looks]
        assert not wrong(same._left_out(looks))


@pytest.mark.parametrize("stale", [False, True])
def test_an_average_of_the_weights_before_the_step_below_its_rounding(stale):
    generator = torch.Generator().manual_seed(0)
    e = torch.randn(1 << 16, generator=generator)
    before = e + 5e-4 * torch.randn(1 << 16, generator=generator)
    weights = before + 1e-4 * torch.randn(1 << 16, generator=generator)
    now = e + 1e-4 * ((before if stale else weights) - e)  # float32: rounding is half of it
    update = SimpleNamespace(step=7, weights=weights, optimizer_step=SimpleNamespace(before=before))
    observer = SimpleNamespace(averaged=lambda name: torch.full((1 << 16,), True))
    [check] = check_average(Average("ema", {}, None), e, now, First(e - 1e-3, 2, 0), update, observer)
    assert (check.healthy is False) is stale

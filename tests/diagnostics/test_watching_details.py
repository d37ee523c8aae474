"""What the watcher does where no mutation of the loops in tests/watched leads: latents, films, texts, memory, other objects."""

import contextlib
import json
import math
import random
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from utils.diagnostics.audit.seen import Call, MicroStep, Update
from utils.diagnostics.watching.averages import First, check_average
from utils.diagnostics.watching.conditions import Conditions
from utils.diagnostics.watching.drawing import Drawing
from utils.diagnostics.watching.facts import Average, Facts, _defaults
from utils.diagnostics.watching.forward import _data
from utils.diagnostics.watching.generators import Generators
from utils.diagnostics.watching.hooks import install
from utils.diagnostics.watching.images import check_latents, check_range, check_spread
from utils.diagnostics.watching.inputs import (
    _told_by_place,
)
from utils.diagnostics.watching.judging import Judge
from utils.diagnostics.watching.leaves import check_leaves, leaves_of
from utils.diagnostics.watching.levels import Look, tables
from utils.diagnostics.watching.loading import Loading
from utils.diagnostics.watching.mixture import Mixture
from utils.diagnostics.watching.network import _acts_otherwise, check_beside
from utils.diagnostics.watching.optimizing import _betas, rates_of
from utils.diagnostics.watching.options import (
    check_declared_schedule,
    declared_prediction,
    evaluation_at,
)
from utils.diagnostics.watching.probes import CopyProbe, Probe
from utils.diagnostics.watching.result import SETTLING, Result
from utils.diagnostics.watching.seen import Recorder, Seen
from utils.diagnostics.watching.stored_images import StoredImages
from utils.diagnostics.watching.updating import UpdateJudge
from utils.diagnostics.watching.watcher import Watcher


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_scaled_in_any_precision(dtype):
    latents = torch.randn(4, 4, 8, 8).to(dtype)
    scaled = latents * 1.7

    def healthy(clean, *before) -> bool | None:
        return check_latents(clean, Seen(tensors=dict(enumerate((*before, clean)))), {"scaling_factor": 1.7}).healthy

    assert healthy(scaled, latents) is True
    assert healthy(scaled * 1.7, latents, scaled) is healthy(latents, latents / 1.7 + 9) is False


def wrong(checks: list) -> set[str]:
    return {check.name for check in checks if check.healthy is False}


def test_films_have_a_range_and_noise_of_each_frame():
    films = torch.rand(8, 3, 4, 8, 8) * 2 - 1
    assert [check_range(of).healthy for of in (films, films / 255)] == [True, False]
    for noise, healthy in ((torch.randn(8, 3, 4, 8, 8), True), (torch.randn(8, 3, 1, 8, 8).expand(8, 3, 4, 8, 8), False)):
        mixture = Mixture(noise, noise, torch.ones(8), torch.ones(8), torch.zeros(8), films, noise)
        look = Look(films, None, films, None, mixture)
        assert (not wrong(Drawing({}).look([look]))) is healthy


def test_large_draws_are_not_kept_for_long(monkeypatch):
    monkeypatch.setattr("utils.diagnostics.watching.seen.MOST_BYTES", 1)
    recorder = Recorder()
    recorder.start()
    drawn = [torch.randn(2, 3) for _ in range(20)]
    assert len(drawn) == 20 and len(recorder.stop().draws) == 8


def test_large_images_are_not_kept_for_long(monkeypatch):
    monkeypatch.setattr("utils.diagnostics.watching.seen.MOST_BYTES", 1)
    recorder = Recorder()
    recorder.start()
    images = [torch.ones(2, 3, 4, 4) + number for number in range(20)]
    assert len(images) == 20 and len(recorder.stop().tensors) == 8


B, SHAPE = 8, (8, 3, 8, 8)


def test_large_conditions_are_not_kept_for_long(monkeypatch):
    monkeypatch.setattr("utils.diagnostics.watching.seen.MOST_BYTES", 1)
    recorder = Recorder()
    recorder.shape, recorder.conditions = torch.Size(SHAPE), {torch.Size((2, 9))}
    recorder.start()
    texts, others = [torch.ones(2, 9) + number for number in range(20)], torch.rand(5)
    drawn, seen = torch.rand(B), recorder.stop()
    assert len(texts) == 20 and len(others) == 5 and len(seen.conditions) == 2
    assert [len(moments) for moments in seen.moments] == [len(drawn)]


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("name", ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"])
def test_schedules_are_those_of_diffusers(name, zero_snr):
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(num_train_timesteps=50, beta_schedule=name, rescale_betas_zero_snr=zero_snr)
    table = tables(50)[name + " (zero terminal SNR)" * zero_snr]
    assert (table - scheduler.alphas_cumprod.double()).abs().max() < 1e-6


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


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


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


@pytest.mark.parametrize(
    ("name", "severity"),
    [("eval_every", "warning"), ("validation_steps", "warning"), ("num_samples", "info"), ("sampling_steps", "info")],
)
def test_which_option_is_the_rhythm_of_the_evaluation(name, severity):
    facts = SimpleNamespace(options={name: 50})
    assert bool(evaluation_at(facts, lambda value: value == 50)) is (severity == "warning")


def test_optimizers_of_other_settings():
    assert _betas([{"lr": 1.0, "betas": (0.9, 0.999, 0.9999)}, {"betas": (None, 0.999)}]) == []
    assert rates_of([{"lr": None}, {"lr": 1.0}]) == rates_of([{}]) == []
    assert rates_of([{"lr": torch.tensor(0.5)}, {"lr": 1}]) == [0.5, 1.0]
    judge, step = UpdateJudge({}), SimpleNamespace(optimizer="CAME", groups=[{"lr": None, "betas": (0.9, 0.999, 0.9999)}])
    judge._say(SimpleNamespace(update=SimpleNamespace(optimizer_step=step), facts=Facts()), 1, 0.0)
    assert judge._words["optimizer"] == "CAME"


def test_frames_that_are_told_their_noise_levels():
    """One ladder for all samples is no mistake where the network gets it."""
    assert _told_by_place((torch.zeros(B, 3, 8, 8), torch.zeros(B, 8)), 8)
    assert not _told_by_place((torch.zeros(B, 3, 8, 8), torch.zeros(8), None), 8)


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


def test_weights_that_are_nan_have_not_moved():
    probe = Probe([torch.full((4,), math.nan)])
    probe.take()
    probe.again()
    assert not probe.moved()


def step_of(*inputs, **batch) -> MicroStep:
    return MicroStep({"network": Call((torch.zeros(len(inputs[0]), 3, 8, 8), *inputs))}, batch)


ZEROS, VARIED, STEPS = torch.zeros(4).long(), torch.tensor([0, 1, 2, 1]), torch.tensor([7, 2, 5, 3])


TEXT, SIZES = torch.full((4, 8, 8), 0.3), torch.tensor([[64, 64, 0, n, 64, 64] for n in range(4)])


@pytest.mark.parametrize("given", [[SIZES], [SIZES.float() / 9], [{"time_ids": SIZES, "text_embeds": TEXT[:, 0]}]])
def test_sizes_that_differ_say_nothing_of_a_text_that_does_not(given):
    def severities(*tokens) -> list[str]:
        step = step_of(STEPS, TEXT, *given, seen=Seen(labels=dict(enumerate((SIZES, *tokens)))))
        conditions = Conditions()
        return [check.severity for _ in range(4) for check in conditions.look(Update(1, [step]), {}) if check.healthy is False]

    assert set(severities()) == {"info"}
    assert "warning" in severities(torch.arange(32).reshape(4, 8))  # a text that the network does not get


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


def test_a_scheduler_that_noises_by_sigmas_has_no_table():
    from diffusers import DDPMScheduler, EulerDiscreteScheduler

    from utils.diagnostics.watching.schedules import _own_table

    assert _own_table(DDPMScheduler(num_train_timesteps=50)).shape == (50,)
    assert _own_table(EulerDiscreteScheduler()) is None


def conditions_of(value, vectors=(), looks=12) -> set[str]:
    conditions, checks = Conditions(), []
    for _ in range(looks):
        x = torch.randn(len(value), 3, 8, 8)
        batch = {"seen": Seen(), "sample_numbers": x, "vectors": list(vectors)}
        checks = conditions.look(Update(1, [MicroStep({"network": Call((x, torch.rand(len(value)), value), (x,))}, batch)]), {})
    return wrong(checks)


def test_texts_that_are_mostly_empty():
    texts = torch.randn(8, 5, 16)
    share = "share of the texts that are one and the same"
    assert share not in conditions_of(texts)
    texts[:7] = texts[0]
    assert share in conditions_of(texts)


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


def test_labels_of_the_last_batches_are_kept_alone():
    loading, dataset = Loading(), [0] * 64
    iterator = SimpleNamespace(_dataset=dataset, _index_sampler=range(4), _num_yielded=2)
    for number in range(6):
        loading.see(iterator, [torch.rand(16, 3, 8, 8), torch.arange(16) + number], number, soon=False)
    assert [int(labels[0]) for labels in loading.labels] == [3, 4, 5] and not loading.means
    loading.see(iterator, [torch.rand(16, 3, 8, 8), torch.eye(16)], 7, soon=True)
    assert loading.labels[-1].tolist() == list(range(16)) and len(loading.means) == 1


@pytest.mark.parametrize(("share", "healthy"), [(0.1, True), (0.9, False)])
def test_texts_that_are_dropped_too_often(share, healthy):
    generator = torch.Generator().manual_seed(0)
    conditions = Conditions()
    for look in range(60):  # an embedding that is trained has other values in each update
        empty = torch.rand(B, generator=generator) < share
        labels = torch.randint(0, 6, (B,), generator=generator)
        texts = torch.where(empty, 6, labels).double() + 0.01 * look
        conditions._see_texts_dropped(0, texts, (labels,))
    assert (wrong(conditions._share()) == set()) is healthy


LABELS = torch.arange(B) % 6


def test_one_text_for_a_class_is_none_that_was_dropped():
    conditions = Conditions()
    for _ in range(6):
        conditions._see_texts_dropped(0, torch.ones(B).double(), (torch.zeros(B, dtype=torch.int64),))
        conditions._see_texts_dropped(1, torch.ones(B).double(), (LABELS,))  # one caption for all
        conditions._see_texts_dropped(2, (torch.arange(B) % 9 == 0).double(), (LABELS,))  # two of them
    assert wrong(conditions._share()) == set()


@pytest.mark.parametrize(
    ("trained", "frozen", "severity"), [(True, False, None), (False, True, None), (False, False, "warning")]
)
def test_weights_of_which_conditions_are_made(trained, frozen, severity):
    table, network = nn.Embedding(7, 4), nn.Linear(64, 64)
    table.requires_grad_(not frozen)
    told = {"text": [table(LABELS).view(B, 2, 2) * 2]}
    known = {id(p) for p in network.parameters()} | ({id(table.weight)} if trained else set())
    assert [id(each) for each in leaves_of([1, told])] == ([] if frozen else [id(table.weight)])
    found = [check.severity for check in check_leaves([1, told], known) if not check.healthy]
    assert found == ([severity] if severity else [])
    encoder = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    assert [check.severity for check in check_leaves([encoder(torch.ones(B, 8))], known)] == ["info"]  # not frozen
    later = torch.optim.SGD(encoder.parameters())  # which has not made a step yet
    assert check_leaves([encoder(torch.ones(B, 8))], known)[0].healthy and later is not None


class Dropping(nn.Module):
    def __init__(self, drop: float):
        super().__init__()
        self.drop = drop

    def forward(self, labels):
        return labels * 0 if self.training and self.drop > 0 else labels


class Plain(nn.Module):
    drop = 0.1

    def forward(self, x):
        return x


def test_modules_that_drop_by_themselves():
    assert [_acts_otherwise(module) for module in (Dropping(0.1), Dropping(0.0), Plain(), nn.Linear(1, 1))] == [
        True,
        *[False] * 3,
    ]
    assert not _acts_otherwise(torch.jit.script(nn.Linear(1, 1)))


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


def test_latents_that_are_scaled_in_place():
    """The autoencoder's output is then the scaled one, and not without a scale."""
    latents = torch.randn(B, 4, 8, 8)
    for changed, healthy in (({latents.data_ptr()}, True), (set(), False)):
        seen = Seen(tensors={0: latents}, changed=changed)
        assert check_latents(latents, seen, {"scaling_factor": 0.18215}).healthy is healthy


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


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [(["x.py"], "v_prediction"), (["x.py", "--prediction_type", "epsilon"], "epsilon"), (["x.py", "--other"], "v_prediction")],
)
def test_a_default_of_the_command_line_declares_less_than_the_scheduler(argv, wanted, monkeypatch):
    monkeypatch.setattr("sys.argv", argv)
    assert declared_prediction({"prediction_type": "epsilon"}, {"prediction_type": "v_prediction"}) == wanted
    assert declared_prediction({"prediction_type": "epsilon"}, {}) == "epsilon"


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


def test_when_averages_begin_by_the_defaults_of_their_object():
    class EMA:
        def step_ema(self, ema_model, model, step_start_ema=2000):
            pass

    assert list(_defaults(EMA())) == [("step_start_ema", 2000)]
    assert list(_defaults(EMA)) == list(_defaults(types.SimpleNamespace())) == []

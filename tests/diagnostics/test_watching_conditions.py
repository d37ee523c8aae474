"""What a watched network is told, and of what that is made; loaders of other batches; noise that is not the image's."""

import pytest
import torch
from test_watching_parts import OTHER, SHAPE, B, levels_of, on_circle, wrong
from torch import nn

from utils.diagnostics.watching.conditions import Conditions
from utils.diagnostics.watching.leaves import check_leaves, leaves_of
from utils.diagnostics.watching.loading import Loading
from utils.diagnostics.watching.mixture import find
from utils.diagnostics.watching.network import _acts_otherwise
from utils.diagnostics.watching.seen import Draw, Noising, Seen
from utils.diagnostics.watching.targets import OTHER_NOISE, identify_target

LABELS = torch.arange(B) % 6


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


def test_one_text_for_a_class_is_none_that_was_dropped():
    conditions = Conditions()
    for _ in range(6):
        conditions._see_texts_dropped(0, torch.ones(B).double(), (torch.zeros(B, dtype=torch.int64),))
        conditions._see_texts_dropped(1, torch.ones(B).double(), (LABELS,))  # one caption for all
        conditions._see_texts_dropped(2, (torch.arange(B) % 9 == 0).double(), (LABELS,))  # two of them
    assert wrong(conditions._share()) == set()


def test_v_of_other_noise():
    a, b = (v.float()[:, None, None, None] for v in on_circle())
    levels = levels_of(*on_circle(), lambda o, x, n: o - (a * OTHER - b * x))
    assert identify_target(levels, ["v_prediction", "epsilon", "sample"]).name == OTHER_NOISE
    half = levels_of(*on_circle(), lambda o, x, n: o - (0.5 * a * OTHER - b * x))
    assert identify_target(half, ["v_prediction", "epsilon", "sample"]).name == ""


def test_offset_noise_that_is_too_small_for_its_batch():
    a, b = (v.float()[:, None, None, None] for v in on_circle())
    clean, noise, normal = torch.rand(SHAPE) * 2 - 1, torch.randn(SHAPE), torch.randn(B, SHAPE[1], 1, 1)
    whole = noise + 0.02 * normal
    told = Noising(None, clean, whole, torch.zeros(B), a * clean + b * whole)
    mixture = find(told.result, Seen(draws=[Draw(noise, True), Draw(normal, True)], tensors={0: clean, 1: whole}), told)
    assert mixture.offset == pytest.approx(0.02, rel=1e-3) and not mixture.moved


def test_a_loader_that_measures_the_images_before_the_training():
    images = torch.utils.data.TensorDataset(torch.arange(32.0)[:, None, None].expand(32, 2, 2))
    loading, steps = Loading(), 0
    for batch in (measured := iter(torch.utils.data.DataLoader(images, 16, shuffle=True))):
        loading.see(measured, batch, steps)
    loader = torch.utils.data.DataLoader(images, 8)
    for _ in range(3):
        for batch in (iterator := iter(loader)):
            loading.see(iterator, batch, steps)
            steps += 1
    assert "first images of each pass over the data" in wrong(loading.end(steps))


class Labels(nn.Module):
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
    assert [_acts_otherwise(module) for module in (Labels(0.1), Labels(0.0), Plain(), nn.Linear(1, 1))] == [True, *[False] * 3]
    assert not _acts_otherwise(torch.jit.script(nn.Linear(1, 1)))

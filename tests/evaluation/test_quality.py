"""The figures of an evaluation and what is concluded from them, on planted collapses and on healthy sets."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import slow_turns

from benchmarks.shared.images import add_noise, enlarged_class, halved_variance
from utils.data.dataset import load_images
from utils.diagnostics.rules.samples import _tail
from utils.evaluation.distances import Moments, frechet_distance
from utils.evaluation.evaluator import ClassJudge, Evaluation
from utils.evaluation.extractors import RandomConvolutions, trained_classifier
from utils.evaluation.feature_sets import FeatureSet
from utils.evaluation.memorization import Originals
from utils.evaluation.quality import compare, location_and_spread, real_floor
from utils.options.flags import DataOptions


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return load_images(
        DataOptions(dataset_name="digits", resolution=16, image_channels=1, cache_dir=str(tmp_path_factory.mktemp("cache")))
    )


def features_of(images: torch.Tensor) -> FeatureSet:
    return FeatureSet.of(RandomConvolutions(images.shape[1])(images))


class World:
    """The digits split in two by `seed`: real images, and others like them, of which collapses are made."""

    def __init__(self, digits, seed: int):
        order = np.random.default_rng(seed).permutation(len(digits))
        self.real = digits.subset(order[: len(order) // 2])
        others = digits.subset(order[len(order) // 2 :])
        self.images, self.labels = torch.from_numpy(others.fetch(np.arange(len(others)))), torch.from_numpy(others.labels)
        self.real_images = torch.from_numpy(self.real.fetch(np.arange(len(self.real))))
        self.generator, self.seed = torch.Generator().manual_seed(seed), seed
        process = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"), is_main_process=True)
        judge = ClassJudge(trained_classifier(self.real, None), self.real.labels, list("0123456789"))
        reference = features_of(self.real_images)
        originals = Originals(self.real)
        self.evaluations = {
            judged: Evaluation(
                process, RandomConvolutions(1), reference, seed=seed, originals=originals, judge=judge if judged else None
            )
            for judged in (True, False)
        }

    def findings(self, images: torch.Tensor, judged: bool = True) -> list[str]:
        """Codes, as evaluate.py finds them: with a classifier that was trained on the real images, or without classes."""
        figures, _ = self.evaluations[judged].measure(lambda numbers: images[numbers], len(images))
        return [finding["code"] for finding in figures["findings"]]


@pytest.fixture(scope="module", params=[0, *slow_turns(1, 2)])
def world(request, digits):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utils.evaluation.extractors._STEPS", 200)
        return World(digits, request.param)


def test_held_out_real_images_give_no_finding(world):
    assert world.findings(world.images) == world.findings(world.images, judged=False) == []


def test_a_few_real_images_give_no_finding(world):
    for count in (10, 10, 10, 20, 20, 20, 50):  # of 10, one set in 13 has less than 0.7 of the variance
        some = torch.randperm(len(world.images), generator=world.generator)[:count]
        assert world.findings(world.images[some], judged=False) == []


def test_a_missing_class_is_named(world):
    images = world.images[world.labels != world.seed]
    assert world.findings(images) == ["modes-missing"]
    assert world.findings(images, judged=False) == ["modes-missing"]  # in 18 of 20 splits of the benchmark


def test_an_enlarged_mode_is_named(world):
    images = enlarged_class(world.images, world.labels, 3 + world.seed, 5, torch.Generator().manual_seed(1))
    assert world.findings(images) == ["mode-dominates"]
    assert world.findings(images, judged=False)[:1] == ["mode-dominates"]


@pytest.mark.parametrize("judged", [True, False])
def test_what_needs_no_classes_is_named_with_and_without(world, judged):
    same = world.images[:1].expand(500, -1, -1, -1)
    copies = world.real_images[:500]
    noise = torch.randint(0, 256, (500, 1, 16, 16), generator=world.generator).byte()
    for images, code in (
        (halved_variance(world.images), "samples-lack-variety"),
        (same, "samples-alike"),
        (add_noise(same, 0.01, world.generator), "samples-alike"),
        (copies, "samples-copied"),
        (add_noise(copies, 0.01, world.generator), "samples-copied"),
        (noise, "samples-unlike-data"),
    ):
        assert world.findings(images, judged) == [code]


def test_mirrored_copies_are_named(world):
    assert world.findings(world.real_images[:500].flip(-1), judged=False) == ["samples-copied"]


def test_standardized_figures_are_those_of_standardized_features():
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([1.0, 30, 0.2])
    real, generated = (
        torch.randn(400, 3, generator=generator) * scales + 5,
        torch.randn(300, 3, generator=generator) * scales + 5.1,
    )
    figures = compare(FeatureSet.of(generated), FeatureSet.of(real), standardized=True, seed=0)
    mean, std = real.double().mean(0), real.double().std(0)
    first, second = (generated.double() - mean) / std, (real.double() - mean) / std
    assert figures["fd"] == pytest.approx(frechet_distance(Moments.of(first), Moments.of(second)), rel=1e-6)
    plain = compare(FeatureSet.of(generated), FeatureSet.of(real), standardized=False, seed=0)
    assert plain["fd"] == pytest.approx(frechet_distance(Moments.of(generated), Moments.of(real)), rel=1e-6)
    assert plain["fd"] > 2 * figures["fd"]


def test_a_feature_that_never_varies_is_not_blown_up():
    rows = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    rows[:, 2] = 1.0
    _, spread = location_and_spread(Moments.of(rows))
    assert spread[2] == pytest.approx(0.1 * spread.median().item())


def test_too_few_images_are_no_basis():
    with pytest.raises(ValueError, match="at least 10"):
        compare(FeatureSet.of(torch.randn(9, 2)), FeatureSet.of(torch.randn(50, 2)), standardized=True, seed=0)


def test_the_floor_splits_the_real_images_without_overlap(digits):
    """A set that is compared with itself would have a floor of 0."""
    rows = torch.arange(100.0)[:, None].repeat(1, 2) + torch.randn(100, 2, generator=torch.Generator().manual_seed(0)) * 1e-3
    floor = real_floor(FeatureSet.of(rows), 80, standardized=False, seed=0)
    assert (floor["images"], floor["reference_images"]) == (50, 50)
    assert floor["fd"] > 1e-3


def test_tail_of_the_binomial():
    from scipy.stats import binom

    for successes, trials in ((0, 5), (3, 20), (20, 20)):
        assert _tail(successes, trials) == pytest.approx(binom.sf(successes - 1, trials, 0.05), rel=1e-9)
    assert math.isclose(_tail(0, 100), 1)

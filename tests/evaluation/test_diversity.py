import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

import utils.evaluation.diversity
from utils.evaluation.diversity import (
    coverage_of_bins,
    different_bins,
    empty_regions,
    fit_modes,
    mean_pairwise_distance,
    nearest_mode,
    neighborhoods,
    variance_ratio,
    vendi_score,
)


@pytest.fixture
def sets():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(90, 5, generator=generator) * 0.8 + 0.4, torch.randn(120, 5, generator=generator)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(utils.evaluation.diversity, "_BLOCK_BYTES", 8 * 120 * 7)  # 7 rows at once


def distances(first, second):
    return np.linalg.norm(first.numpy()[:, None].astype(np.float64) - second.numpy()[None], axis=2)


def test_variance_and_distance_agree_with_numpy(sets, small_blocks):
    generated, real = sets
    expected = generated.numpy().var(0, ddof=1).sum() / real.numpy().var(0, ddof=1).sum()
    assert variance_ratio(generated, real) == pytest.approx(expected, rel=1e-5)
    assert mean_pairwise_distance(real) == pytest.approx(distances(real, real).sum() / (120 * 119), rel=1e-5)


def test_vendi_score_is_that_of_the_similarity_matrix(sets):
    _, real = sets
    unit = real.double() / real.double().norm(dim=1, keepdim=True)
    values = np.linalg.eigvalsh((unit @ unit.T / len(unit)).numpy()).clip(1e-300)
    assert vendi_score(real) == pytest.approx(math.exp(-(values * np.log(values)).sum()), rel=1e-6)
    assert vendi_score(torch.eye(8)) == pytest.approx(8)
    assert vendi_score(torch.ones(8, 8)) == pytest.approx(1)
    assert vendi_score(torch.zeros(8, 3)) == 1


@pytest.fixture(params=[None, 0.0, 300.0], ids=["wide", "tight", "tight and far from 0"])
def any_sets(request, sets):
    """`sets`; or real rows in two tight groups far from each other, and generated ones whose groups are three times as wide:
    their neighbors are 0.1 % of their norm apart, or 0.0001 %."""
    if request.param is None:
        return sets
    generator = torch.Generator().manual_seed(2)
    place = torch.tensor([[1.0], [-1.0]]).repeat(60, 1) + request.param
    real, generated = (place + spread * torch.randn(120, 6, generator=generator) for spread in (3e-4, 1e-3))
    return generated, real


def test_neighborhoods_agree_with_brute_force(any_sets, small_blocks):
    generated, real = any_sets
    k, cross = 4, distances(generated, real)
    real_radii = np.sort(distances(real, real), 1)[:, k]
    generated_radii = np.sort(distances(generated, generated), 1)[:, k]
    found = neighborhoods(generated, real, k)
    assert found.precision == pytest.approx((cross < real_radii).any(1).mean())
    assert found.recall == pytest.approx((cross < generated_radii[:, None]).any(0).mean())
    assert found.density == pytest.approx(np.sum(cross < real_radii) / (k * len(generated)))
    assert found.coverage == pytest.approx(np.mean(cross.min(0) < real_radii))
    assert found.precision < (0.5 if len(generated) == 120 else 0.95)  # what there is to find
    with pytest.raises(ValueError, match=f"more than {len(generated)} rows"):
        neighborhoods(generated, real, len(generated))
    assert nearest_mode(real, real[:40:2]).tolist() == distances(real, real[:40:2]).argmin(1).tolist()
    group = real[::2]
    expected = distances(group, group).sum() / (len(group) * (len(group) - 1))
    assert mean_pairwise_distance(group) == pytest.approx(expected, rel=1e-6)


def test_modes_are_those_of_the_real_images():
    generator = torch.Generator().manual_seed(1)
    places = torch.tensor([[0.0, 0], [10, 0], [0, 10], [10, 10]])
    real = places.repeat(50, 1) + torch.randn(200, 2, generator=generator) * 0.3
    centers = fit_modes(real, 4, seed=0)
    assert torch.equal(centers, fit_modes(real, 4, seed=0))
    assert torch.cdist(places, centers).min(1).values.max() < 0.2
    generated = places[[1]].repeat(30, 1)
    found = coverage_of_bins(nearest_mode(generated, centers), nearest_mode(real, centers), 4)
    assert found.hit == 0.25 and found.real == [50] * 4 and sorted(found.generated) == [0, 0, 0, 30]
    assert (found.largest_share, found.largest_real_share) == (1.0, 0.25)
    assert found.different == 4


def test_the_test_of_a_bin_is_that_of_two_proportions():
    # 30 of 100 against 45 of 100: pooled 0.375, z = 0.15 / sqrt(0.375 x 0.625 x 0.02) = 2.19, p = 0.028 (two-sided).
    counts, others = torch.tensor([30.0, 70], dtype=torch.float64), torch.tensor([45.0, 55], dtype=torch.float64)
    assert different_bins(counts, others, 0.029).all() and not different_bins(counts, others, 0.028).any()
    assert not different_bins(torch.tensor([5.0, 0]), torch.tensor([9.0, 0])).any()  # a bin that nobody uses


def test_no_more_than_a_block_of_distances_is_held(monkeypatch):
    largest, cdist = 0, torch.cdist

    def watched(rows, others, **options):
        nonlocal largest
        largest = max(largest, len(rows) * len(others) * rows.element_size())
        return cdist(rows, others, **options)

    monkeypatch.setattr(torch, "cdist", watched)
    monkeypatch.setattr(utils.evaluation.diversity, "_BLOCK_BYTES", 2**20)
    rows = torch.randn(3000, 2, generator=torch.Generator().manual_seed(0))
    neighborhoods(rows[:2000], rows)
    mean_pairwise_distance(rows)
    nearest_mode(rows, fit_modes(rows, 3, seed=0))
    assert 0 < largest <= 2**20


@pytest.mark.parametrize("dimensions", [3, 120, 2048])
def test_repeated_images_lie_in_their_own_neighborhoods(dimensions):
    """Each of them is repeated more often than there are neighbors, so that all radii are 0."""
    distinct = 5 * torch.randn(40, dimensions, generator=torch.Generator().manual_seed(0)) + 3
    found = neighborhoods(distinct.repeat(8, 1), distinct.repeat(8, 1), 5)
    assert (found.precision, found.recall, found.coverage) == (1, 1, 1)
    half = neighborhoods(distinct[:20].repeat(16, 1), distinct.repeat(8, 1), 5)
    assert (half.precision, half.recall, half.coverage) == (1, 0.5, 0.5)


def test_images_among_their_own_are_counted_as_scikit_learn_finds_their_neighbors(small_blocks):
    generator = torch.Generator().manual_seed(0)
    generated, real = torch.randn(120, 4, generator=generator) * 0.7, torch.randn(120, 4, generator=generator)
    near = NearestNeighbors(n_neighbors=21).fit(torch.cat([real, generated])).kneighbors(torch.cat([real, generated]))[1][:, 1:]
    of_generated = (near >= 120).sum(1)
    missing, crowded = empty_regions(generated, real, seed=0)
    assert missing.share == pytest.approx((of_generated[:120] <= 4).mean())
    assert crowded.share == pytest.approx((of_generated[120:] >= 16).mean())
    assert missing.limit > missing.by_chance and crowded.limit > crowded.by_chance
    with pytest.raises(ValueError, match="one size"):
        empty_regions(generated[:100], real, seed=0)


def test_a_part_that_is_no_cluster_is_missed():
    """A disc of points, of which a corner is never generated: 8 % of them."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(2000, 2, generator=generator)
    real, others = points[:1000], points[1000:]
    missing, crowded = empty_regions(others, real, seed=0)
    assert missing.share <= missing.limit and crowded.share <= crowded.limit
    kept = torch.randn(4000, 2, generator=generator)
    missing, crowded = empty_regions(kept[kept.sum(1) < 2][:1000], real, seed=0)  # P(x + y > 2) = 7.9 %
    assert missing.share > missing.limit and missing.share == pytest.approx(0.079, abs=0.035) and crowded.share < 0.02

import numpy as np
import pytest
import torch
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from utils.evaluation.distances import Moments, frechet_distance, kernel_distance


class Pass(torch.nn.Module):
    """Lets torchmetrics take features in the place of images."""

    num_features = 6

    def forward(self, features):
        return features


@pytest.fixture
def sets():
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    first = torch.randn(300, 6, generator=generator, dtype=torch.float64) @ mix + 0.3
    return first, torch.randn(200, 6, generator=generator, dtype=torch.float64)


def with_moments(mean: list[float], covariance: list[list[float]]) -> Moments:
    moments = Moments.empty(len(mean))
    moments.count, moments.mean = 11, torch.tensor(mean, dtype=torch.float64)
    moments.scatter = torch.tensor(covariance, dtype=torch.float64) * 10
    return moments


def test_frechet_distance_of_known_gaussians():
    # Commuting covariances: |m1 - m2|^2 + sum (s1 - s2)^2 over the standard deviations along the common axes.
    first, second = with_moments([1, 0, 2], np.diag([4.0, 9, 0])), with_moments([0, 0, 0], np.diag([1.0, 16, 25]))
    assert frechet_distance(first, second) == pytest.approx(5 + 1 + 1 + 25, rel=1e-12)
    assert frechet_distance(second, first) == pytest.approx(32, rel=1e-12)
    # Covariances that do not commute, 2 x 2: tr sqrt(AB) = sqrt(tr AB + 2 sqrt(det AB)).
    a, b = np.array([[2.0, 1], [1, 3]]), np.array([[4.0, -1], [-1, 1]])
    expected = np.trace(a + b) - 2 * np.sqrt(np.trace(a @ b) + 2 * np.sqrt(np.linalg.det(a @ b)))
    assert frechet_distance(with_moments([0, 0], a), with_moments([0, 0], b)) == pytest.approx(expected, rel=1e-12)


def test_frechet_distance_of_samples_agrees_with_torchmetrics(sets):
    first, second = sets
    ours = frechet_distance(Moments.of(first), Moments.of(second))
    metric = FrechetInceptionDistance(feature=Pass()).set_dtype(torch.float64)
    metric.update(first, real=False)
    metric.update(second, real=True)
    assert ours == pytest.approx(metric.compute().item(), rel=1e-8)


def test_a_set_has_no_distance_to_itself_even_where_features_never_vary(sets):
    first, _ = sets
    padded = torch.cat([first, torch.full((300, 3), 7.0, dtype=torch.float64)], 1)
    assert frechet_distance(Moments.of(padded), Moments.of(padded)) == pytest.approx(0, abs=1e-6)


def test_moments_in_batches_are_those_of_the_whole(sets):
    first, _ = sets
    far = first + 1e6  # sums of squares would lose the variance in float64's last digits
    moments = Moments.empty(6)
    for batch in far.split(7):
        moments.add(batch)
    moments.add(far[:0])
    assert moments.count == 300
    np.testing.assert_allclose(moments.covariance, np.cov(first.numpy(), rowvar=False), rtol=1e-6)
    scaled = moments.scaled(far.mean(0), far.std(0))
    np.testing.assert_allclose(scaled.covariance, np.corrcoef(first.numpy(), rowvar=False), rtol=1e-5, atol=1e-8)
    with pytest.raises(ValueError, match="at least 2"):
        _ = Moments.of(first[:1]).covariance


def test_kernel_distance_agrees_with_torchmetrics_on_one_subset_of_all(sets):
    first, second = sets[0][:200], sets[1]
    metric = KernelInceptionDistance(feature=Pass(), subsets=1, subset_size=200)
    metric.update(first, real=False)
    metric.update(second, real=True)
    assert kernel_distance(first, second) == pytest.approx(metric.compute()[0].item(), rel=1e-5)


def test_kernel_distance_in_blocks_is_the_sum_over_all_pairs(sets, monkeypatch):
    first, second = sets

    def mean(a, b, same):
        kernel = (a @ b.T / 6 + 1) ** 3
        return (kernel.sum() - kernel.trace()) / (len(a) * (len(a) - 1)) if same else kernel.mean()

    expected = mean(first, first, True) + mean(second, second, True) - 2 * mean(first, second, False)
    monkeypatch.setattr("utils.evaluation.distances._ROWS", 64)
    assert kernel_distance(first, second) == pytest.approx(expected.item(), rel=1e-10)
    with pytest.raises(ValueError, match="at least 2 rows"):
        kernel_distance(first[:1], second)

"""The audit of rows and labels: the real orders are healthy, of any length and any choice of samples; each fault is named."""

import numpy as np
import pytest
import torch

from utils.data.loader import SampleOrder
from utils.diagnostics.audit.chance import agrees, at_least
from utils.diagnostics.audit.rows import check_labels, check_pass, check_rows, check_split


def looked_at(updates=(0, 1, 2, 9, 29, 99, 299, 999), batch=16):
    return np.concatenate([np.arange(update * batch, (update + 1) * batch) for update in updates])


def verdict(rows, numbers, length, held_out=(), balanced=False):
    (check,) = check_rows(np.asarray(rows), np.asarray(numbers), length, held_out, balanced)
    assert check.stage == "data" and check.healthy == (not check.message)
    return check.message


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 17, 64, 100, 1797, 50_000])
@pytest.mark.parametrize("updates", [(0,), (0, 1, 2, 9, 29, 99, 299, 999), range(200)])
def test_the_real_order_is_healthy(length, updates):
    numbers = looked_at(updates)
    for seed in range(20):
        rows = SampleOrder(length, seed).indices(torch.from_numpy(numbers)).numpy()
        assert verdict(rows, numbers, length) == ""
        labels = np.random.default_rng(seed).integers(0, 3, length)
        if length < 2000:
            rows = SampleOrder(length, seed, labels).indices(torch.from_numpy(numbers)).numpy()
            assert verdict(rows, numbers, length, balanced=True) == ""


def test_held_out_rows_leave_gaps():
    held_out = np.random.default_rng(0).choice(1000, 300, replace=False)
    training = np.setdiff1d(np.arange(1000), held_out)
    numbers = looked_at(range(60))
    rows = training[SampleOrder(700, 0).indices(torch.from_numpy(numbers)).numpy()]
    assert verdict(rows, numbers, 700, held_out) == ""
    assert "in the order in which they are stored" in verdict(training[numbers % 700], numbers, 700, held_out)
    rows[5] = held_out[3]
    assert f"1 held-out images are trained on, such as row {held_out[3]}" in verdict(rows, numbers, 700, held_out)


RANDOM = np.random.default_rng(0)
NUMBERS = looked_at(range(0, 400, 3))
ORDER = RANDOM.permutation(1797)


@pytest.mark.parametrize(
    "rows, named",
    [
        (RANDOM.integers(0, 1797, len(NUMBERS)), "repeat an image of the same pass"),
        (0 * NUMBERS + 7, "are the same image, row 7"),
        (NUMBERS % 1797, "the order in which they are stored (100% of the samples)"),
        (1796 - NUMBERS % 1797, "the reverse of the order"),
        (NUMBERS % 1797 * 5 % 1797, "steps of 5 rows"),
        (ORDER[NUMBERS % 1797], "two passes have the same order"),
        (NUMBERS + 1, "but the dataset has 1797 rows"),
    ],
)
def test_a_wrong_order_is_named(rows, named):
    assert named in verdict(rows, NUMBERS, 1797)


def test_a_part_of_the_data_is_named():
    numbers = looked_at(range(4))
    assert "all lie among the images" in verdict(RANDOM.permutation(300)[: len(numbers)], numbers, 1797)
    assert "show images 2 k + 1" in verdict(RANDOM.permutation(898)[: len(numbers)] * 2 + 1, numbers, 1797)


def test_a_sample_that_changes_and_one_that_comes_again():
    assert verdict([4, 2, 4, 2], [0, 1, 0, 1], 10) == ""
    assert "sample 1 showed row 2 and, when it came again, row 3" in verdict([4, 2, 4, 3], [0, 1, 0, 1], 10)


def test_a_row_twice_in_a_pass_is_named():
    assert "row 4 came 2 times in pass 0" in verdict([4, 2, 4], [0, 1, 2], 10)


def test_no_samples_are_not_observed():
    assert check_rows(np.zeros(0), np.zeros(0), 10, [], False)[0].healthy is None


LABELS = RANDOM.integers(0, 10, 200)


def told(change=lambda labels: labels, dropout=0.0, expected=LABELS):
    labels = np.where(RANDOM.random(len(expected)) < dropout, -1, change(expected))
    return {check.name: check for check in check_labels(labels, expected, 0.1)}


@pytest.mark.parametrize("seed", range(20))
def test_labels_dropped_at_the_declared_rate_are_healthy(seed):
    for rate in (0.0, 0.05, 0.1, 0.5, 1.0):
        generator = np.random.default_rng(seed)
        labels = generator.integers(0, 10, 2000)
        given = np.where(generator.random(2000) < rate, -1, labels)
        for count in (1, 8, 100, 2000):
            assert all(not check.message for check in check_labels(given[:count], labels[:count], rate))


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda labels: np.roll(labels, 1), "shifted by 1 in the batch"),
        (lambda labels: np.roll(labels, -1), "shifted by 1 in the batch"),
        (lambda labels: labels + 1, "gets label + 1"),
        (lambda labels: 0 * labels + 3, "gets label 3 for every image"),
        (lambda labels: np.array([3, 1, 2, 0, 4, 5, 6, 7, 9, 8])[labels], "classes are exchanged (0 becomes 3, 1 becomes"),
        (lambda labels: labels // 2, "classes are merged"),
        (lambda labels: np.random.default_rng(0).permutation(labels), "shuffled apart from the images"),
        (lambda labels: np.random.default_rng(0).integers(0, 10, len(labels)), "are they random?"),
    ],
)
def test_wrong_labels_are_named(change, named):
    assert named in told(change)["label"].message


def test_a_wrong_rate_of_dropped_labels_is_named():
    assert "dropped never; the declared share is 0.1" in told(expected=np.arange(300) % 10)["dropped"].message
    assert told()["dropped"].healthy is True or "never" in told()["dropped"].message
    always = told(dropout=1.1)
    assert "dropped always" in always["dropped"].message and always["label"].healthy is None
    assert "in 4" in told(dropout=0.45, expected=np.arange(5000) % 10)["dropped"].message
    (_, dropped) = check_labels(np.array([1, -1]), np.array([1, 1]), 0.0)
    assert "in 50.0% of the samples" in dropped.message
    assert all(check.healthy is None for check in check_labels(np.array([-1]), np.array([-1]), 0.1))


def test_labels_that_are_not_dropped_each_at_random_are_named():
    labels = np.tile(np.arange(10), 200)
    together = np.repeat(RANDOM.random(250) < 0.1, 8)
    (_, dropped) = check_labels(np.where(together, -1, labels), labels, 0.1)
    assert "neighbors are dropped together" in dropped.message
    of_one = (labels == 3) & (RANDOM.random(2000) < 0.9)
    (_, dropped) = check_labels(np.where(of_one, -1, labels), labels, 0.1)
    assert "labels of class" in dropped.message


@pytest.mark.parametrize("seed", range(20))
def test_any_split_by_chance_is_healthy(seed):
    for total, count in [(2, 1), (5, 0), (10, 2), (100, 12), (1797, 16), (50_000, 5000)]:
        rows = np.random.default_rng(seed).permutation(total)
        (check,) = check_split(np.sort(rows[count:]), np.sort(rows[:count]), total, count)
        assert check.healthy, check.message
        (check,) = check_pass(np.random.default_rng(seed).permutation(rows[count:]), np.sort(rows[count:]))
        assert check.healthy, check.message


def test_tails_are_those_of_the_binomial_distribution():
    stats = pytest.importorskip("scipy.stats")
    for count, trials, rate in [
        (0, 5, 0.3),
        (3, 10, 0.2),
        (40, 50, 0.5),
        (7, 1000, 0.001),
        (5, 5, 0.9),
        (6, 5, 0.5),
        (1, 3, 0.0),
    ]:
        assert at_least(count, trials, rate) == pytest.approx(stats.binom.sf(count - 1, trials, rate), rel=1e-9)
    assert agrees(50, 100, 0.5) and not agrees(0, 31, 0.5) and agrees(0, 30, 0.5) and agrees(0, 0, 0.5)

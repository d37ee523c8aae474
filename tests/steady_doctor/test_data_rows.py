"""Which images and labels came: real orders and splits are silent, and each fault has its code."""

import numpy as np
import pytest
import torch
from scipy import stats

from steady_doctor.data.chance import agrees, at_least
from steady_doctor.data.rows import check_balance, check_labels, check_rows, check_split
from utils.data.loader import SampleOrder

RANDOM = np.random.default_rng(0)
NONE = np.zeros(0, np.int64)


def looked_at(updates, batch=16):
    return np.add.outer(np.array(updates) * batch, np.arange(batch)).ravel()


def codes(found) -> list[str]:
    return [one.code for one in found]


def order(rows, numbers, length, held_out=NONE, balanced=False):
    return codes(check_rows(3, np.asarray(rows), np.asarray(numbers), length, held_out, balanced, None))


@pytest.mark.parametrize("length", [1, 2, 5, 17, 100, 1797, 50_000])
@pytest.mark.parametrize("updates", [(0,), (0, 1, 2, 9, 29, 99, 299, 999), range(200)])
def test_the_real_orders_and_any_split_are_silent(length, updates):
    numbers = looked_at(updates)
    for seed in range(5):
        rows = SampleOrder(length, seed).indices(torch.from_numpy(numbers)).numpy()
        assert order(rows, numbers, length) == []
        if length < 2000:
            labels = np.random.default_rng(seed).integers(0, 3, length)
            balanced = SampleOrder(length, seed, labels)
            assert order(balanced.indices(torch.from_numpy(numbers)).numpy(), numbers, length, balanced=True) == []
            first = balanced.indices(torch.arange(8 * length)).numpy()
            assert codes(check_balance(3, first, labels, np.arange(length))) == []
    held_out, training = np.split(RANDOM.permutation(length), [length // 8])
    assert codes(check_split(3, training, held_out, length, length // 8)) == []
    numbers = np.arange(len(training))
    rows = np.sort(training)[SampleOrder(len(training), 0).indices(torch.from_numpy(numbers)).numpy()]
    assert order(rows, numbers, len(training), held_out) == []


NUMBERS = looked_at(range(0, 400, 3))
ORDER = RANDOM.permutation(1797)
HELD_OUT = np.arange(5, 1797, 10)
ORDERS = {
    "with replacement": (RANDOM.integers(0, 1797, len(NUMBERS)), NUMBERS, "data-repeated"),
    "one image": (0 * NUMBERS + 7, NUMBERS, "data-repeated"),
    "as stored": (NUMBERS % 1797, NUMBERS, "data-in-order"),
    "the same in each pass": (ORDER[NUMBERS % 1797], NUMBERS, "data-same-order"),
    "one too high": (NUMBERS + 1, NUMBERS, "data-beyond"),
    "a part": (RANDOM.permutation(300)[:64], np.arange(64), "data-part"),
    "another image of a sample": ([4, 2, 4, 3], [0, 1, 0, 1], "data-sample-changes"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_wrong_order_is_found(name):
    rows, numbers, code = ORDERS[name]
    assert order(rows, numbers, 1797) == [code]


def test_held_out_rows_leave_gaps():
    training, numbers = np.setdiff1d(np.arange(1797), HELD_OUT), looked_at(range(60))
    rows = training[SampleOrder(len(training), 0).indices(torch.from_numpy(numbers)).numpy()]
    assert order(rows, numbers, len(training), HELD_OUT) == []
    assert order(training[numbers % len(training)], numbers, len(training), HELD_OUT) == ["data-in-order"]
    assert order(np.append(rows, HELD_OUT[3]), np.append(numbers, 5000), len(training), HELD_OUT) == ["data-held-out"]


LABELS = np.random.default_rng(0).integers(0, 10, 2000)
TOLD = {  # what the network gets for labels of which some are gone, found
    "right": (lambda labels, gone: np.where(gone, -1, labels), []),
    "the next one's": (lambda labels, gone: np.where(gone, -1, np.roll(labels, 1)), ["condition-labels"]),
    "never dropped": (lambda labels, gone: labels, ["condition-rate"]),
    "always dropped": (lambda labels, gone: 0 * labels - 1, ["condition-rate"]),
    "dropped as class 0": (lambda labels, gone: np.where(gone, 0, labels), ["condition-labels", "condition-rate"]),
    "of neighbors": (lambda labels, gone: np.where(np.repeat(gone[:250], 8), -1, labels), ["condition-together"]),
    "of one class": (lambda labels, gone: np.where(labels == 3, -1, labels), ["condition-uneven"]),
}


@pytest.mark.parametrize("name", TOLD)
def test_labels(name):
    change, expected = TOLD[name]
    told = change(LABELS, np.random.default_rng(1).random(2000) < 0.1)
    assert codes(check_labels(3, told, LABELS, 0.1)) == expected
    assert set(codes(check_labels(3, told[:4], LABELS[:4], 0.1))) <= {"condition-labels"}  # chance tells nothing of so few


def test_tails_are_those_of_the_binomial_distribution():
    assert at_least(7, 1000, 0.001) == pytest.approx(stats.binom.sf(6, 1000, 0.001), rel=1e-9) and at_least(1, 3, 0.0) == 0
    assert agrees(50, 100, 0.5) and not agrees(0, 31, 0.5) and agrees(0, 30, 0.5) and agrees(0, 0, 0.5)

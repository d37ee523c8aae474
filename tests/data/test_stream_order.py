"""The order of streamed images, in windows."""

import numpy as np
import pytest
import torch

from steady_doctor.data.rows import check_rows
from utils.data.loader import WindowedOrder

pytest_plugins = ("shard_fixtures",)


@pytest.mark.parametrize("seed", range(6))
def test_each_pass_shows_every_image_once_and_each_window_few_blocks(seed):
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 40, generator.integers(1, 60))
    blocks[0] += 1
    window, length = int(generator.integers(1, 300)), int(blocks.sum())
    order = WindowedOrder(blocks, window, seed)
    shown = order.indices(torch.arange(3 * length)).numpy().reshape(3, length)
    assert (np.sort(shown, 1) == np.arange(length)).all()
    if length > 50:
        assert (shown[0] != shown[1]).any()
    numbers = generator.permutation(3 * length)[:50]
    again = WindowedOrder(blocks, window, seed).indices(torch.from_numpy(numbers)).numpy()
    assert (again == shown.reshape(-1)[numbers]).all()
    owner = np.repeat(np.arange(len(blocks)), blocks)
    for start in range(0, length, window):  # windows begin where a block does, so a stretch of as many samples meets two
        met = np.unique(owner[shown[1, start : start + window]])
        assert blocks[met].sum() <= 2 * (window + blocks.max())


def test_a_window_is_shuffled_well():
    blocks = np.full(100, 100)
    shown = WindowedOrder(blocks, 1000, 0).indices(torch.arange(10_000)).numpy()
    assert len(np.unique(shown[:1000] // 100)) == 10
    assert (np.diff(shown) == 1).sum() < 40  # 10 are expected of windows of 1,000
    first, last = shown[:500], shown[500:1000]
    assert abs(np.mean(first % 100) - np.mean(last % 100)) < 8  # of each block's rows both halves show the same
    assert len(np.unique(first // 100)) == len(np.unique(last // 100)) == 10


def test_what_comes_next_is_known_ahead():
    order = WindowedOrder(np.full(20, 10), 50, 3)
    for number in (0, 60, 199, 390):
        _, ahead = order.ahead(number)
        window = number // 50 * 50
        needed = order.indices(torch.arange(window, window + 100)).numpy() // 10
        assert list(dict.fromkeys((ahead // 10)[:5])) == list(ahead[:5] // 10) and set(ahead // 10) == set(needed)


def test_the_step_audit_knows_windows():
    numbers, blocks = np.arange(4000), np.full(500, 200)
    rows = WindowedOrder(blocks, 2000, 0).indices(torch.from_numpy(numbers)).numpy()

    def found(rows, window):
        return list(check_rows(1, rows, numbers, 100_000, np.zeros(0, np.int64), False, window))

    assert found(rows, 2000) == [] != found(rows, None)
    in_blocks = (np.random.default_rng(0).permutation(500)[:, None] * 200 + np.arange(200)).reshape(-1)[:4000]
    assert found(in_blocks, 2000) != []

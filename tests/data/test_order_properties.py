"""What must hold of the order of a stream for any sizes of shards, windows, processes, workers and starts (hypothesis).

The images of these tests are their own numbers, so that what a batch shows is which samples came.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steady_doctor.data.rows import check_rows
from utils.data import loader
from utils.data.bad_images import BadImages
from utils.data.loader import BatchSplit, SampleOrder, WindowedOrder, training_batches

tried = settings(derandomize=True, deadline=None, database=None, max_examples=25)
sizes = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)  # images of each block
windows = st.integers(1, 400)
seeds = st.integers(0, 2**63 - 1)


@pytest.fixture(autouse=True, scope="module")
def few_at_once():
    """The loader computes the order of this many samples at once: a bound that short updates cross too."""
    before, loader._BLOCK = loader._BLOCK, 50
    yield
    loader._BLOCK = before


class Numbers(SimpleNamespace):
    """Stands in for an `ImageSet`: the image at an index is the index."""

    def __init__(self):
        super().__init__(labels=None, uniform=True, bad_images=BadImages(0), shape=(1, 1, 1), max_value=255)

    def fetch(self, indices, crop):
        return np.array(indices)

    def read_ahead(self, indices):
        pass


def shown(order, first, stop):
    return order.indices(torch.arange(first, stop)).tolist()


def updates(blocks, window, seed, split, steps):
    """The images of each update, [updates, processes x accumulation x batch], as the processes' loaders give them."""
    batch, accumulation, processes = split
    parts = []
    for process in range(processes):
        order, own = WindowedOrder(np.array(blocks), window, seed), BatchSplit(batch, accumulation, process, processes)
        parts.append([each["images"] for each in training_batches(Numbers(), order, own, steps)])
    return torch.stack([torch.stack(list(each)) for each in zip(*parts)]).reshape(len(steps), -1).tolist()


@tried
@given(sizes, windows, seeds, st.integers(0, 10**6))
def test_each_pass_shows_each_image_once(blocks, window, seed, number):
    length = sum(blocks)
    for order in (WindowedOrder(np.array(blocks), window, seed), SampleOrder(length, seed)):
        assert sorted(shown(order, number * length, (number + 1) * length)) == list(range(length))


@tried
@given(sizes, windows, seeds)
def test_a_window_bounds_what_is_read(blocks, window, seed):
    length, order = sum(blocks), WindowedOrder(np.array(blocks), window, seed)
    block_of = [block for block, size in enumerate(blocks) for _ in range(size)]
    met, left = set(), set()  # the blocks of the window under way, and of earlier ones
    name = None
    for number, image in enumerate(shown(order, 0, length)):
        now, ahead = order.ahead(number)
        if now != name:
            assert not met & left
            name, left, met = now, left | met, set()
        met.add(block_of[image])
        assert met <= {block_of[each] for each in ahead}
        assert sum(blocks[each] for each in met) < window + max(blocks)
        assert sum(blocks[each] for each in {block_of[each] for each in ahead}) < 2 * (window + max(blocks))


@tried
@given(sizes, windows, seeds, st.integers(0, 40), st.data())
def test_any_share_of_the_work_gives_the_same_updates(blocks, window, seed, step, data):
    batch = data.draw(st.sampled_from([4, 8, 12]))
    steps = range(step, step + 3)
    order = WindowedOrder(np.array(blocks), window, seed)
    expected = [shown(order, number * batch, (number + 1) * batch) for number in steps]
    for processes in (1, 2, 4):
        accumulation = data.draw(st.sampled_from([each for each in (1, 2, 3) if batch % (processes * each) == 0]))
        split = batch // processes // accumulation, accumulation, processes
        assert updates(blocks, window, seed, split, steps) == expected


@tried
@given(sizes, windows, seeds, st.lists(st.integers(0, 1500), min_size=4, max_size=4).map(sorted))
def test_a_run_that_resumes_twice_goes_on_as_one_that_was_not_disturbed(blocks, window, seed, places):
    first, once, twice, last = places
    undisturbed = shown(WindowedOrder(np.array(blocks), window, seed), first, last)
    parts = []
    for start, stop in ((first, once), (once, twice), (twice, last)):
        order = WindowedOrder(np.array(blocks), window, seed)
        for number in range(start, stop, 700):  # as a run asks: some samples at a time
            parts += shown(order, number, min(number + 700, stop))
    assert parts == undisturbed


def test_a_window_is_shuffled_well():
    blocks = np.full(100, 100)
    shown, second = WindowedOrder(blocks, 1000, 0).indices(torch.arange(20_000)).numpy().reshape(2, -1)
    assert (shown == second).sum() < 20  # one is expected
    assert len(np.unique(shown[:1000] // 100)) == 10
    assert (np.diff(shown) == 1).sum() < 40  # 10 are expected of windows of 1,000
    first, last = shown[:500], shown[500:1000]
    assert abs(np.mean(first % 100) - np.mean(last % 100)) < 8  # of each block's rows both halves show the same
    assert len(np.unique(first // 100)) == len(np.unique(last // 100)) == 10


def test_the_step_audit_knows_windows():
    numbers, blocks = np.arange(4000), np.full(500, 200)
    rows = WindowedOrder(blocks, 2000, 0).indices(torch.from_numpy(numbers)).numpy()

    def found(rows, window):
        return list(check_rows(1, rows, numbers, 100_000, np.zeros(0, np.int64), False, window))

    assert found(rows, 2000) == [] != found(rows, None)
    in_blocks = (np.random.default_rng(0).permutation(500)[:, None] * 200 + np.arange(200)).reshape(-1)[:4000]
    assert found(in_blocks, 2000) != []

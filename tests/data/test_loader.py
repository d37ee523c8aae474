"""The order of the samples, and the loader: the same samples however an update is split, resumed or fetched."""

import errno
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from utils.core import randomness
from utils.core.errors import UserError
from utils.data import loader
from utils.data.dataset import load_images
from utils.data.loader import BatchSplit, SampleOrder, training_batches
from utils.options.flags import DataOptions

REPOSITORY = Path(__file__).resolve().parents[2]


def index_of(order: SampleOrder, start: int, stop: int) -> np.ndarray:
    return order.indices(torch.arange(start, stop)).numpy()


@pytest.mark.parametrize("length", [1, 2, 3, 7, 100])
def test_each_pass_shows_every_image_once_in_a_new_order(length):
    order = SampleOrder(length, seed=0)
    passes = index_of(order, 0, 5 * length).reshape(5, length)
    assert (np.sort(passes, axis=1) == np.arange(length)).all()
    if length == 100:
        assert len({tuple(row) for row in passes}) == 5
        assert not np.array_equal(passes[0], index_of(SampleOrder(length, seed=1), 0, length))
    far = 10**12 * length
    assert sorted(index_of(order, far, far + length)) == list(range(length))


LABELS = np.array([3] * 50 + [7] * 5 + [1] * 1 + [4] * 13)[np.random.default_rng(0).permutation(69)]


def test_balanced_order_shows_every_class_once_per_block():
    shown = LABELS[index_of(SampleOrder(69, 0, LABELS), 0, 4 * 1000)].reshape(1000, 4)
    assert (np.sort(shown, axis=1) == [1, 3, 4, 7]).all()
    positions = np.array([(shown == label).mean(axis=0) for label in (1, 3, 4, 7)])
    assert np.abs(positions - 0.25).max() < 4 * (0.25 * 0.75 / 1000) ** 0.5  # no class prefers a place in the block


def test_balanced_order_exhausts_a_class_before_it_repeats_and_shuffles_anew():
    sequence = index_of(SampleOrder(69, 0, LABELS), 0, 4 * 1000)
    for label, size in zip(*np.unique(LABELS, return_counts=True)):
        visits = sequence[LABELS[sequence] == label]
        passes = visits[: len(visits) // size * size].reshape(-1, size)
        assert (np.sort(passes, axis=1) == np.flatnonzero(label == LABELS)).all()
        if size >= 13:  # 13! orders: none should come twice
            assert len({tuple(row) for row in passes}) == len(passes)


def test_classes_of_one_size_are_not_shuffled_alike():
    labels = np.repeat([0, 1], 50)
    sequence = index_of(SampleOrder(100, 0, labels), 0, 100)
    first, second = sequence[sequence < 50], sequence[sequence >= 50] - 50
    assert (first == second).sum() < 8


@pytest.mark.parametrize("labels", [None, LABELS])
def test_order_is_a_function_of_the_sample_number_alone(labels):
    order = SampleOrder(69, 5, labels)
    together = order.indices(torch.arange(500))
    shuffled = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    assert torch.equal(order.indices(shuffled), together[shuffled])
    assert torch.equal(pickle.loads(pickle.dumps(order)).indices(torch.arange(500)), together)


def write(folder, classes):
    """20 images of different sizes, in folders of 20 / `classes` each."""
    generator = np.random.default_rng(0)
    for number in range(20):
        path = folder / str(number * classes // 20) / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (8, 8 + number, 3), dtype=np.uint8)).save(path)
    return {"train_data_dir": str(folder), "cache_dir": str(folder.with_name("cache")), "resolution": 8}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return load_images(DataOptions(**write(tmp_path_factory.mktemp("data") / "images", 2)))


def micro_batches(images, order=None, split=None, first_step=0, steps=6, **options):
    order = order or SampleOrder(len(images), 0)
    return list(training_batches(images, order, split or BatchSplit(8), range(first_step, steps), **options))


def updates(images, processes=1, accumulation=1, **options):
    """Everything that each update sees, over all ranks and micro steps, in the order of the sample numbers."""
    ranks = [
        micro_batches(images, split=BatchSplit(8 // processes // accumulation, accumulation, rank, processes), **options)
        for rank in range(processes)
    ]
    result = []
    for step in range(len(ranks[0]) // accumulation):
        parts = [rank[step * accumulation + micro] for micro in range(accumulation) for rank in ranks]
        result.append({key: torch.cat([part[key] for part in parts]) for key in parts[0]})
    return result


def assert_same(first, second):
    assert len(first) == len(second)
    for left, right in zip(first, second):
        for key in ("images", "labels", "sample_numbers"):
            assert torch.equal(left[key], right[key]), key


def test_a_batch_is_what_it_says(images):
    batches = micro_batches(images)
    assert len(batches) == 6
    numbers = torch.cat([batch["sample_numbers"] for batch in batches])
    assert torch.equal(numbers, torch.arange(48))
    indices = SampleOrder(20, 0).indices(numbers)
    labels = torch.cat([batch["labels"] for batch in batches])
    assert labels.dtype == torch.int64 and np.array_equal(labels, images.labels[indices])
    pixels = torch.cat([batch["images"] for batch in batches])
    assert pixels.dtype == torch.uint8 and pixels.shape == (48, 3, 8, 8)
    centered = torch.cat([batch["images"] for batch in micro_batches(images, center_crop=True)])
    assert np.array_equal(centered, images.fetch(indices))
    assert not torch.equal(pixels, centered)  # crops are random,
    again = [pixels[(indices == index).nonzero()[:2, 0]] for index in range(20) if images.fetch([index]).any()]
    assert any(not torch.equal(pair[0], pair[1]) for pair in again)  # and other ones in the next pass


@pytest.mark.parametrize(("processes", "accumulation"), [(2, 1), (1, 2), (2, 2), (8, 1), (1, 8)])
def test_an_update_has_the_same_samples_however_it_is_split(images, processes, accumulation):
    assert_same(updates(images, processes, accumulation), updates(images))


def test_resuming_continues_where_the_run_stopped(images):
    assert_same(updates(images)[4:], updates(images, processes=2, first_step=4))
    assert micro_batches(images, first_step=6) == []


def test_workers_bring_the_same_batches_and_leave_the_global_random_state(images):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert_same(micro_batches(images, num_workers=2), micro_batches(images))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("place", "free", "said"),
    [("nowhere", 0, "there is no "), ("", 1000, "has 0.0 MiB, and 2 workers need "), ("", 2**40, " cannot be written:")],
)
def test_without_shared_memory_the_process_reads_itself(place, free, said, images, tmp_path, monkeypatch, capsys):
    expected = micro_batches(images)
    monkeypatch.setattr(loader, "_SHARED_MEMORY", str(tmp_path / place))
    real = os.statvfs

    def statvfs(path):
        real(path)  # raises where nothing is
        return SimpleNamespace(f_bavail=free, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(os, "access", lambda *_: "written" not in said)
    started = []
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", lambda process: started.append(process))
    assert_same(micro_batches(images, num_workers=2), expected)
    assert not started and said in capsys.readouterr().err


def test_workers_that_cannot_be_started_are_ended_and_the_process_reads_itself(images, monkeypatch, capfd):
    expected, start, started = micro_batches(images), multiprocessing.process.BaseProcess.start, []

    def start_one(process):
        if started:
            raise OSError(errno.EMFILE, "Too many open files")
        start(process)
        started.append(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_one)
    assert_same(micro_batches(images, num_workers=2), expected)
    started[0].join(20)
    assert not started[0].is_alive()
    said = capfd.readouterr().err
    assert "note: cannot start 2 workers (Too many open files)" in said and "Exception ignored" not in said


def test_a_worker_that_cannot_hand_over_ends_the_run_with_one_line(images, monkeypatch):
    monkeypatch.setattr(loader._Samples, "__getitems__", lambda samples, numbers: [lambda: 0])  # no pickle of it
    with pytest.raises(UserError, match=r"a process that reads images ended: .*DataLoader worker.*\nif memory"):
        micro_batches(images, num_workers=2)


def with_damage(folder, rows, **options):
    """40 black images, of which these rows cannot be decoded."""
    for row in range(40):
        path = folder / f"{row:02}.png"
        path.write_bytes(b"damaged") if row in rows else Image.new("RGB", (8, 8)).save(path)
    options |= {"resolution": 8, "cache_images": "no", "cache_dir": str(folder / "c")}
    return load_images(DataOptions(train_data_dir=str(folder), **options))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_all_batches_before_an_undecodable_image_come(num_workers, tmp_path):
    order, number = SampleOrder(40, 0), 21
    broken = int(order.indices(torch.tensor([number])))
    batches = training_batches(with_damage(tmp_path, [broken]), order, BatchSplit(1), range(40), num_workers=num_workers)
    seen = []
    with pytest.raises(UserError, match=rf"{broken:02}\.png \(row {broken}, column 'image'\): not an image") as caught:
        seen.extend(int(batch["sample_numbers"]) for batch in batches)
    assert seen == list(range(number)) and str(caught.value).count("\n") <= 1
    assert not multiprocessing.active_children()  # ended at once, though the traceback is still held


@pytest.mark.parametrize("together", [1, 16])
def test_bad_images_that_a_worker_met_before_too_many_are_known(together, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "_TOGETHER", together)
    order = SampleOrder(40, 0)
    broken = order.indices(torch.tensor([8, 9, 20])).tolist()
    images = with_damage(tmp_path, broken, on_bad_image="replace", max_bad_images=2)
    with pytest.raises(UserError, match="3 or more images"):
        list(training_batches(images, order, BatchSplit(1), range(40), num_workers=1))
    assert sorted(images.bad_images) == sorted(broken[:2])


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_micro_batches_that_are_fetched_together_are_those_of_each_alone(images, num_workers, monkeypatch):
    split, steps = BatchSplit(3, 2, 1, 2), 23
    together = micro_batches(images, split=split, steps=steps, num_workers=num_workers)
    monkeypatch.setattr(loader, "_TOGETHER", 1)
    assert len(together) == 2 * steps
    assert_same(together, micro_batches(images, split=split, steps=steps))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Opens 20 images in four classes, of which 3 cannot be decoded."""
    options = write(folder := tmp_path_factory.mktemp("damaged") / "images", 4)
    for number in (4, 5, 19):
        path = folder / str(number // 5) / f"{number:02}.png"
        path.write_bytes(path.read_bytes()[:100])
    return lambda **more: load_images(DataOptions(**options, on_bad_image="replace", **more))


@pytest.mark.parametrize("balanced", [False, True])
def test_replaced_images_are_the_same_for_all_who_fetch_and_bring_their_labels(damaged, balanced):
    packed = damaged()
    order = {"order": SampleOrder(20, 0, packed.labels if balanced else None)}
    expected = updates(packed, **order)
    pixels, labels = (torch.cat([update[key] for update in expected]) for key in ("images", "labels"))
    indices = order["order"].indices(torch.arange(48)).numpy()
    assert {4, 5, 19} <= set(indices)
    stand_ins = np.where(np.isin(indices, [4, 5]), 6, np.where(indices == 19, 0, indices))
    assert np.array_equal(labels, packed.labels[stand_ins])
    crop = randomness.uniform(0, "crop", torch.arange(48), 2).numpy()
    assert np.array_equal(pixels, packed.fetch(stand_ins, crop))
    variants = [
        (packed, {"num_workers": 2}),
        (damaged(cache_images="no"), {}),
        (damaged(cache_images="no"), {"num_workers": 2}),
        (damaged(cache_images="no"), {"processes": 2, "accumulation": 2}),
    ]
    for images, options in variants:
        assert_same(updates(images, **order, **options), expected)
        assert images.bad_images == packed.bad_images and sorted(images.bad_images) == [4, 5, 19]
    assert_same(updates(damaged(cache_images="no"), first_step=3, **order), expected[3:])


LAUNCHER = """
import multiprocessing, os, signal, sys
import numpy as np
import torch
from utils.data.loader import BatchSplit, SampleOrder, training_batches

class Images:
    uniform, shape, max_value = True, (1, 2, 2), 255
    bad_images = {}
    labels = None
    def fetch(self, indices, crop):
        return np.zeros((len(indices), 1, 2, 2), np.uint8)

def begun():
    batches = training_batches(Images(), SampleOrder(10, 0), BatchSplit(2), range(10**6), num_workers=2)
    next(batches)
    return batches

batches = begun()
workers = multiprocessing.active_children()
assert len(workers) == 2
"""


def run(code: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LAUNCHER + code]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_workers_survive_the_signals_of_a_launcher_which_still_reach_the_main_process():
    """And a worker that starts after its main process was killed ends."""
    code = """
for worker in workers:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(worker.pid, number)
for _ in range(200):
    next(batches)
assert all(worker.is_alive() for worker in workers)
from utils.data.loader import _start_worker
for main_process in (os.getpid(), os.getpid() + 1):
    worker = multiprocessing.get_context("fork").Process(target=_start_worker, args=(0, main_process))
    worker.start()
    worker.join()
    print(worker.exitcode)
batches.close()
assert not multiprocessing.active_children()
assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == set()
batches = begun()
print("fine", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
next(batches)
"""
    finished = run(code)
    assert finished.stdout == "0\n1\nfine\n" and finished.returncode == -signal.SIGTERM, finished.stderr


@pytest.mark.slow
def test_a_crash_of_the_script_ends_at_once_with_its_workers():
    """The traceback keeps the loader alive until Python ends its children by a SIGTERM that they ignore."""
    finished = run(
        "print(*(worker.pid for worker in workers))\ndef crash(held):\n    raise RuntimeError('crash')\ncrash(batches)"
    )
    assert finished.returncode == 1 and "RuntimeError: crash" in finished.stderr
    for pid in finished.stdout.split():
        assert not Path(f"/proc/{pid}/cmdline").exists() or b"python" not in Path(f"/proc/{pid}/cmdline").read_bytes()

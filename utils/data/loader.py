"""Which image each sample number is, and the loader that brings micro-batches of them.

Sample numbers count through the whole run: update s takes [s * G, (s + 1) * G) with G = batch x processes x
accumulation, and micro step a on rank r takes the `train_batch_size` numbers from s * G + (a * processes + r) *
train_batch_size on. So the samples of an update do not depend on how it is split, and a run resumes at any update
without reading what came before.
"""

import atexit
import functools
import itertools
import math
import multiprocessing
import multiprocessing.queues
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from utils.core import randomness
from utils.core.errors import UserError, shortage
from utils.core.signals import STOP_SIGNALS, signals_held
from utils.data.dataset import ImageSet
from utils.data.latents import PackedLatents

_BLOCK = 4096  # samples
_SHARED_MEMORY = "/dev/shm"  # where Linux keeps what workers hand over
_TOGETHER, _TOGETHER_BYTES = 16, 2**24  # micro-batches that are fetched at once, and of small images alone


class SampleOrder:
    """The image that each sample number shows: a function of (seed, sample number), without state.

    Plain: pass after pass over all images, each pass shuffled anew, each image once in it.
    With `labels` int [length], balanced: every class once in each block of as many samples as there are classes, and
    each class in shuffled passes over its own images, so that none repeats before the others of its class were seen.
    """

    def __init__(self, length: int, seed: int, labels: np.ndarray | None = None):
        self.length, self.seed = length, seed
        self.balanced = labels is not None
        if labels is not None:
            _, counts = np.unique(labels, return_counts=True)
            self.members = torch.from_numpy(np.argsort(labels, kind="stable"))  # images, class after class
            self.class_sizes = torch.from_numpy(counts)
            self.class_starts = self.class_sizes.cumsum(0) - self.class_sizes

    def indices(self, sample_numbers: torch.Tensor) -> torch.Tensor:
        """Returns image indices int64 [batch] in [0, length) of sample numbers int64 [batch]."""
        if self.balanced:
            return self._balanced_indices(sample_numbers)
        epochs = sample_numbers // self.length
        return randomness.permute(self.seed, "order", epochs, sample_numbers % self.length, self.length)

    def _balanced_indices(self, sample_numbers: torch.Tensor) -> torch.Tensor:
        classes = len(self.class_sizes)
        visits = sample_numbers // classes  # how often the sample's class was seen before
        chosen = randomness.permute(self.seed, "class_order", visits, sample_numbers % classes, classes)
        sizes = self.class_sizes[chosen]
        positions = torch.empty_like(visits)
        for size in sizes.unique().tolist():  # a permutation has one length: classes of one size go together
            same = sizes == size
            passes = (visits[same] // size) * classes + chosen[same]  # its own shuffle for each class and pass
            positions[same] = randomness.permute(self.seed, "within_class", passes, visits[same] % size, size)
        return self.members[self.class_starts[chosen] + positions]


class WindowedOrder(SampleOrder):
    """The order of a dataset that is read in blocks. In each pass the blocks of the whole set are shuffled, and follow each
    other in windows of about `window` images: within a window all images are shuffled. So each image comes once in a pass, and
    the images of `window` samples lie in few blocks.

    Args:
        blocks: int64 [blocks], images of each block; those of a block follow each other.
    """

    def __init__(self, blocks: np.ndarray, window: int, seed: int):
        self.blocks = blocks[blocks > 0].astype(np.int64)
        super().__init__(int(self.blocks.sum()), seed)
        self.window, self._first = window, np.cumsum(self.blocks) - self.blocks
        self._passes: dict[int, _Pass] = {}  # the newest ones

    def indices(self, sample_numbers: torch.Tensor) -> torch.Tensor:
        passes, positions = np.divmod(sample_numbers.numpy(), self.length)
        found = np.empty_like(positions)
        for number in np.unique(passes).tolist():
            order = self._pass(number)
            windows = np.where(passes == number, order.window_of(positions), -1)
            for window in np.unique(windows[windows >= 0]).tolist():
                same = windows == window
                start, stop = order.windows[window : window + 2].tolist()
                within = torch.from_numpy(positions[same] - start)
                keys = torch.full_like(within, number * len(self.blocks) + window)
                shuffled = start + randomness.permute(self.seed, "within_window", keys, within, stop - start).numpy()
                places = np.searchsorted(order.starts, shuffled, side="right") - 1
                found[same] = self._first[order.blocks[places]] + shuffled - order.starts[places]
        return torch.from_numpy(found)

    def _pass(self, number: int) -> "_Pass":
        if number not in self._passes:
            positions = torch.arange(len(self.blocks))
            passes = torch.full_like(positions, number)
            blocks = randomness.permute(self.seed, "block_order", passes, positions, len(self.blocks)).numpy()
            sizes = self.blocks[blocks]
            starts = np.cumsum(sizes) - sizes
            first_blocks = np.unique(starts // self.window, return_index=True)[1]
            while len(self._passes) > 1:
                self._passes.pop(next(iter(self._passes)))
            self._passes[number] = _Pass(blocks, starts, np.append(starts[first_blocks], self.length))
        return self._passes[number]

    def ahead(self, sample_number: int) -> tuple[range, np.ndarray]:
        """Returns the samples of a sample's window, and an image of each block, int64 [blocks], of it and of the next one."""
        number, position = divmod(sample_number, self.length)
        window = int(self._pass(number).window_of(np.array([position]))[0])
        start, stop = self._pass(number).windows[window : window + 2].tolist()
        samples = range(number * self.length + start, number * self.length + stop)
        images = []
        for each in ((number, window), (number, window + 1)):
            order = self._pass(each[0])
            if each[1] == len(order.windows) - 1:
                each, order = (number + 1, 0), self._pass(number + 1)
            start, stop = np.searchsorted(order.starts, order.windows[each[1] : each[1] + 2])
            images.append(self._first[order.blocks[start:stop]])
        return samples, np.concatenate(images)


@dataclass(frozen=True)
class _Pass:
    """Of one pass: `blocks` in their order, `starts` the position of the first image of each, `windows` those of the first
    image of each window, and the length; all int64."""

    blocks: np.ndarray
    starts: np.ndarray
    windows: np.ndarray

    def window_of(self, positions: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.windows, positions, side="right") - 1


@dataclass(frozen=True)
class BatchSplit:
    """How the samples of an update are shared out, and which share this process has."""

    train_batch_size: int
    gradient_accumulation_steps: int = 1
    process_index: int = 0
    num_processes: int = 1


class _MicroBatches(Sampler):
    """The sample numbers of the micro-batches of one rank, as ranges: nothing grows with the length of the run.

    They come `most` at a time, and fewer in the beginning, for which the training waits.
    """

    def __init__(self, split: BatchSplit, steps: range, most: int):
        self.split, self.steps, self.most = split, steps, most

    def __iter__(self) -> Iterator[list[range]]:
        split, size = self.split, self.split.train_batch_size
        turns = range(self.steps.start * split.gradient_accumulation_steps, self.steps.stop * split.gradient_accumulation_steps)
        count = 1
        while turns:
            numbers = [turn * split.num_processes + split.process_index for turn in turns[:count]]
            yield [range(number * size, (number + 1) * size) for number in numbers]
            turns, count = turns[count:], min(2 * count, self.most)


class _Samples(Dataset):
    """Sample numbers -> micro-batches. Runs in the workers, where the order is computed too."""

    def __init__(self, images: ImageSet, order: SampleOrder, center_crop: bool, latents: PackedLatents | None):
        self.images, self.order, self.center_crop, self.latents = images, order, center_crop, latents
        self._told = len(images.bad_images)  # those that the main process knows
        self._ahead = range(0)  # samples of the window for which was read ahead
        self._blocks: dict[int, Any] = {}  # number -> indices: the order is computed for many samples at once

    def __getitems__(self, micro_batches: list[range]) -> list[dict | UserError]:
        """All of them in one, or each by itself up to the one that cannot be fetched."""
        try:
            return [self.fetch(torch.cat([torch.arange(each.start, each.stop) for each in micro_batches]))]
        except UserError as error:
            if len(micro_batches) == 1:
                return [error]  # raised by training_batches: the loader would wrap it in a worker's traceback
        found: list[dict | UserError] = []
        for each in micro_batches:
            found += self.__getitems__([each])
            if isinstance(found[-1], UserError):
                break
        return found

    def fetch(self, sample_numbers: torch.Tensor) -> dict:
        """Raises UserError as `training_batches` does."""
        indices = self._indices(sample_numbers)
        # Numbers for a crop that has no choice would cost more than the batch's pixels.
        fixed = self.center_crop or self.images.uniform
        crop = None if fixed else randomness.uniform(self.order.seed, "crop", sample_numbers, 2).numpy()
        if isinstance(self.order, WindowedOrder):
            last = int(sample_numbers[-1])
            if last not in self._ahead:
                self._ahead, ahead = self.order.ahead(last)
                self.images.read_ahead(ahead)
        if self.latents is None:
            images = self.images.fetch(indices, crop)
        else:
            images = self.latents.fetch(self.images.shown_rows(indices), self.order.seed, sample_numbers)
        labels = None if self.images.labels is None else torch.from_numpy(self.images.labels[self.images.shown(indices)])
        batch: dict[str, Any] = {"images": torch.from_numpy(images), "labels": labels, "sample_numbers": sample_numbers}
        if len(self.images.bad_images) > self._told:
            batch["bad_images"] = list(self.images.bad_images.values())[self._told :]
            self._told = len(self.images.bad_images)
        return batch

    def _indices(self, sample_numbers: torch.Tensor) -> np.ndarray:
        """`order.indices`, whose many small operations would cost a short batch more than its pixels do."""
        numbers = sample_numbers.numpy()
        first, last = int(numbers[0]) // _BLOCK, int(numbers[-1]) // _BLOCK
        if last > first + 1:
            return self.order.indices(sample_numbers).numpy()
        self._blocks = {block: self._blocks.get(block) for block in (first, last)}
        for block, known in self._blocks.items():
            if known is None:
                self._blocks[block] = self.order.indices(torch.arange(block * _BLOCK, (block + 1) * _BLOCK)).numpy()
        return np.concatenate(list(self._blocks.values()))[numbers - first * _BLOCK]


def training_batches(
    images: ImageSet,
    order: SampleOrder,
    split: BatchSplit,
    steps: range,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    center_crop: bool = False,
    latents: PackedLatents | None = None,
) -> Iterator[dict]:
    """The micro-batches of one process for the updates `steps`, `gradient_accumulation_steps` each.

    Each is a dict of `images` uint8 or uint16 [batch, channels, height, width], `labels` int64 [batch] or
    None, and `sample_numbers` int64 [batch]. Images of other proportions are cut at random, by `order.seed` and sample
    number, or at the center. With `latents`, those of the images take their places, as `PackedLatents.fetch` gives them.
    The labels are those of the images that are shown, where some stand for others that cannot
    be decoded; what the workers learn of such images is added to `images.bad_images` with the batch.

    The workers ignore SIGTERM, SIGINT and SIGUSR1, which launchers send to the whole process group: the main process
    decides when to stop. They end with the iterator or with the process. The global random state of torch is not
    touched.

    Raises:
        UserError: from the iterator, naming an image that cannot be decoded, once there are more than may be.
    """
    shape = images.shape if latents is None else latents.shape
    most = _TOGETHER_BYTES // (4 * math.prod(shape) * split.train_batch_size)
    together = min(max(most, 1), _TOGETHER)
    bytes_each = math.prod(shape) * (4 if latents is not None else 1 + (images.max_value > 255))
    lacks = _lacks_shared_memory(num_workers, bytes_each * split.train_batch_size * together) if num_workers else None
    if lacks is not None:
        if split.process_index == 0:
            print(f"note: {lacks}: images are read in the training process, as --dataloader_num_workers 0", file=sys.stderr)
        num_workers = 0
    loader = DataLoader(
        _Samples(images, order, center_crop, latents),
        batch_sampler=_MicroBatches(split, steps, together),
        collate_fn=list,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=functools.partial(_start_worker, main_process=os.getpid()),
        generator=torch.Generator(),  # else the workers' seed is drawn from the global random state
    )
    return _iterate(loader, images, split.train_batch_size)


def _lacks_shared_memory(num_workers: int, size: int) -> str | None:
    """What is missing for workers that hand over `size` bytes at a time; containers often have 64 MiB or none."""
    if sys.platform != "linux":
        return None
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return f"there is no {_SHARED_MEMORY}"
    num_workers *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of all processes of this machine
    needed, free = 2 * num_workers * size, found.f_bavail * found.f_frsize  # each worker is two ahead
    if not os.access(_SHARED_MEMORY, os.W_OK):
        return f"{_SHARED_MEMORY} cannot be written"
    if free >= needed:
        return None
    return f"{_SHARED_MEMORY} has {free / 2**20:.1f} MiB, and {num_workers} workers need {needed / 2**20:.1f} MiB"


def _iterate(loader: DataLoader, images: ImageSet, size: int) -> Iterator[dict]:
    """`size`: of a micro-batch."""
    others = set(multiprocessing.active_children())
    try:
        with signals_held():
            iterator = iter(loader)
    except (OSError, RuntimeError) as error:  # too many files, processes or threads
        if not isinstance(error, OSError) and "can't start new thread" not in str(error):
            raise
        reason = getattr(error, "strerror", None) or error
        for child in set(multiprocessing.active_children()) - others:  # they ignore what Python ends them with
            child.kill()
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if isinstance(half_made := frame.f_locals.get("self"), _MultiProcessingDataLoaderIter):
                half_made._shutdown = True  # else it tries to end what it has not made
        print(
            f"note: cannot start {loader.num_workers} workers ({reason}): images are read in the training "
            "process; set a smaller --dataloader_num_workers",
            file=sys.stderr,
        )
        loader.num_workers = 0
        iterator = iter(loader)
    workers = [weakref.ref(child) for child in multiprocessing.active_children() if child not in others]
    if workers:
        # At exit Python ends its children by SIGTERM, which ours ignore, and waits for them for ever.
        atexit.register(_kill, workers)
    try:
        for fetched in (each for several in iterator for each in several):
            if isinstance(fetched, UserError):
                raise fetched
            if "bad_images" in fetched:
                images.bad_images.learn(fetched.pop("bad_images"))
            parts = {name: itertools.repeat(None) if of is None else of.split(size) for name, of in fetched.items()}
            for values in zip(*parts.values()):
                yield dict(zip(parts, values))
    except RuntimeError as error:
        if short := shortage(error):
            raise short from error
        raise
    finally:
        # Ends the workers now. In a cycle with a traceback, the garbage collector would first finalize the queues that
        # bring them the news, and then wait for them.
        del iterator


def _start_worker(worker_id: int, main_process: int) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # A batch that cannot be handed over, as shared memory is full, would be waited for, for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(lambda *_: os._exit(1))  # type: ignore[attr-defined]
    # The loader's own watchdog starts after this and takes whoever is the parent then for the main process: a worker
    # whose main process was killed while it started would wait for ever. (A fork server's children have another parent.)
    if multiprocessing.get_start_method() != "forkserver" and os.getppid() != main_process:
        os._exit(1)


def _kill(workers: list[weakref.ref]) -> None:
    # The loader's handler raises for a worker that was killed: that would leave the next one alive.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for reference in workers:
        worker = reference()
        if worker is not None and worker.is_alive():
            worker.kill()

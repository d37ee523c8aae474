"""A dataset of shards that is neither downloaded nor packed as a whole: images by row, read block by block.

A block is a group of rows of a shard, the least that is read of it (see `shard_formats`). The index, the number of rows of
every block and the labels of all rows, is made once, and kept by the shards' names, sizes and stamps.
Decoded blocks are kept on the local disk (see `block_cache`), so each is read once, by whichever process needs it first.
"""

import functools
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from utils.core.errors import UserError, explained
from utils.core.files import whole_file
from utils.data.bad_images import BadImage, BadImages
from utils.data.block_cache import BlockCache
from utils.data.cache import PackedFile, Progress
from utils.data.columns import Labels, find_labels, is_number, usual_labels
from utils.data.decode import ImageFile, ImagePreparation, cut
from utils.data.image_column import EncodedImages, files_key, find_image_column, first_of
from utils.data.shard_formats import VERSION, Tar, columns_of, counts, format_of
from utils.data.shards import Shard, UnreadableShard, find_shards, in_parallel, patiently
from utils.data.stored_files import is_address
from utils.options.flags import DataOptions

_INDEXES = 64  # of shards, kept in memory
_READERS = 2  # threads of a process that read ahead
_OPEN_SECONDS = 60.0  # for which a block stays mapped
_OPEN_SHARE = 64  # the blocks that a process maps are this part of the cache's limit, at most: no room is free before they go


class BlockReader:
    """The blocks of a streamed dataset in the order of its rows. A call reads the encoded images of one from its shard, once.

    Args:
        counts: rows of each group of each shard.
        most: rows that are used, the first ones.
        features: of all columns.
        index: gives the index of a shard.

    Attributes:
        columns: those that have the images; to be set.
        starts: int64 [blocks + 1], the first row of each block; then the number of rows.
        first_in_shard: int64 [blocks], the number of its first row within its shard.
    """

    columns: list[str]

    def __init__(
        self,
        shards: list[Shard],
        counts: list[list[int]],
        most: int | None,
        features: datasets.Features,
        index: Callable[[Shard], pa.Table],
    ):
        self.shards, self.features, self._index = shards, features, index
        shard = np.repeat(np.arange(len(shards), dtype=np.int32), [len(each) for each in counts])
        group = np.concatenate([np.arange(len(each), dtype=np.int32) for each in counts])
        first_in_shard = np.concatenate([np.cumsum([0, *each[:-1]]) for each in counts if each])
        starts = np.concatenate([[0], np.cumsum(np.concatenate([np.array(each, np.int64) for each in counts]))])
        starts = starts.astype(np.int64) if most is None else np.minimum(starts, most).astype(np.int64)
        kept = np.diff(starts) > 0
        self._shard, self._group, self.first_in_shard = shard[kept], group[kept], first_in_shard[kept]
        self.starts = np.append(starts[:-1][kept], starts[-1])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def shard(self, block: int) -> Shard:
        return self.shards[self._shard[block]]

    def __call__(self, block: int) -> list[ImageFile]:
        files = self.images(block).between(0, self._rows(block))
        return [replace(file, name=f"{file.name} of {self.shard(block).name}") for file in files]

    def _rows(self, block: int) -> int:
        return int(self.starts[block + 1] - self.starts[block])

    def _table(self, block: int, columns: list[str]) -> pa.Table:
        shard = self.shard(block)
        return format_of(shard).read(shard, self._index(shard), int(self._group[block]), columns)

    def first_cell(self, column: str) -> object:
        """Returns the first cell of a column in the first block that is not empty, or None."""
        return first_of(patiently(lambda: self._table(0, [column]), self.shard(0).address).column(column))

    def images(self, block: int) -> EncodedImages:
        """Returns the images of a block. Raises UserError, and what the shard's file system and its parser raise."""
        shard, rows, table = self.shard(block), self._rows(block), self._table(block, self.columns)
        if len(table) < rows:
            raise UserError(
                f"the shard {shard.address} is damaged: group {self._group[block]} has {len(table)} rows, and the index says "
                f"{rows}\nmake the file again"
            )
        features = datasets.Features({name: self.features[name] for name in self.columns})
        table = table.slice(0, rows).replace_schema_metadata(None).cast(features.arrow_schema)
        dataset = datasets.Dataset(table, info=datasets.DatasetInfo(features=features), fingerprint=f"block-{block}")
        return EncodedImages(dataset, self.columns, shard.address.rpartition("/")[0], int(self.first_in_shard[block]))

    def key(self) -> str:
        """Changes with the shards, and with the files on this machine that they name (see `image_column.files_key`).
        Shards that are elsewhere name none, and are not read."""
        key = hashlib.sha256(repr((VERSION, self.shards)).encode()).hexdigest()
        if is_address(self.shards[0].address):
            return key
        reads = ((functools.partial(self, block), self.shard(block).address) for block in range(len(self.starts) - 1))
        return f"{key} {files_key(patiently(*each) for each in reads)}".strip()

    def __str__(self) -> str:
        """For instance "4 shards, 40 blocks of up to 100 images"."""
        sizes = np.diff(self.starts)
        return f"{len(self.shards):,} shards, {len(sizes):,} blocks of up to {int(sizes.max()):,} images"


def open_shards(options: DataOptions, folder: Path, progress: Progress | None) -> tuple[BlockReader, Labels]:
    """Finds the shards and indexes those that are not indexed yet; `folder` keeps a file for each of them.

    Returns the blocks, and labels, names of classes and notes. Raises UserError where a shard cannot be read or has other
    columns than the first one, or no rows are there, or no images.
    """
    shards, declared = find_shards(options)
    features = declared or patiently(lambda: format_of(shards[0]).features(shards[0]), shards[0].address)
    columns = _label_columns(features, options.label_column)
    folder.mkdir(parents=True, exist_ok=True)
    read_index = functools.partial(_indexed, columns=tuple(columns), folder=folder)
    tables: list[pa.Table] = []
    lock = hashlib.sha256(repr([shard.address for shard in shards]).encode()).hexdigest()[:16]
    with FileLock(folder / f"{lock}.lock"):  # one process indexes, and the others read what it wrote
        for table in in_parallel(lambda shard: patiently(lambda: read_index(shard), shard.address), shards):
            tables.append(table)
            if progress is not None:
                progress(len(tables), len(shards))
    for shard, table in zip(shards, tables):
        if columns_of(table) != columns_of(tables[0]):
            raise UserError(
                f"the shard {shard.address} has other columns than {shards[0].name}\nlet --dataset_name name files of one kind"
            )
    rows = [counts(table) for table in tables]
    if not sum(map(sum, rows)):
        raise UserError(f"the dataset {options.dataset_name} has no images\ncheck its name and --dataset_split")
    reader = BlockReader(shards, rows, options.max_train_images, features, read_index)
    labels, class_names, label_notes = _labels(tables, features, columns, options.label_column, len(reader))
    reader.columns, notes = find_image_column(_empty(features), options.image_column, reader.first_cell)
    if isinstance(format_of(shards[0]), Tar) and not isinstance(features[reader.columns[0]], datasets.Image):
        raise UserError(
            f"--image_column {reader.columns[0]}: in the tar files, this column has no images\nleave --image_column out"
        )
    return reader, (labels, class_names, notes + label_notes)


def _label_columns(features: datasets.Features, requested: str | None) -> list[str]:
    """The columns that may hold labels."""
    if requested is not None:
        return [requested] if requested in features else []
    classes = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    return classes or [
        name for name in usual_labels(features) if isinstance(features[name], datasets.Value) or is_number(features[name])
    ]


def _labels(
    tables: list[pa.Table], features: datasets.Features, columns: list[str], requested: str | None, rows: int
) -> Labels:
    if not columns:
        return (None, None, []) if requested is None else find_labels(_empty(features), requested)
    kinds = datasets.Features({name: features[name] for name in columns})
    advice = "make them alike, or choose another column with --label_column"
    with explained(f"the labels in {', '.join(columns)} are not of one type in all shards", advice, pa.ArrowInvalid):
        parts = [table.select(columns).replace_schema_metadata(None).cast(kinds.arrow_schema) for table in tables]
    table = pa.concat_tables(parts).slice(0, rows)
    return find_labels(datasets.Dataset(table, info=datasets.DatasetInfo(features=kinds), fingerprint="labels"), requested)


def _empty(features: datasets.Features) -> datasets.Dataset:
    return datasets.Dataset.from_dict({name: [] for name in features}, features=features)


@functools.lru_cache(maxsize=_INDEXES)
def _indexed(shard: Shard, columns: tuple[str, ...], folder: Path) -> pa.Table:
    """The index of a shard (see `shard_formats`), made where `folder` has none yet."""
    path = folder / f"{hashlib.sha256(repr((VERSION, shard, columns)).encode()).hexdigest()[:32]}.parquet"
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowInvalid):  # none yet, or damaged
        table = format_of(shard).index(shard, list(columns))
    with whole_file(path, shared=True) as draft:
        pq.write_table(table, draft)
    return pq.read_table(path)


class StreamedImages:
    """The counterpart of `PackedImages` for a streamed dataset: the same pixels.

    Attributes:
        starts: int64 [blocks + 1], the first row of each block; then the number of rows.
        bad_images: those met so far.
    """

    def __init__(self, cache: BlockCache, read: BlockReader, prepare: ImagePreparation, max_bad_images: int = 0):
        self.cache, self.prepare, self._read = cache, prepare, read
        self.starts = read.starts
        self.uniform = prepare.center_crop
        self.bad_images = BadImages(max_bad_images)
        self._ahead: ReadAhead | None = None
        self._unreadable: dict[int, tuple[str, str]] = {}  # by block: arguments of the error, which would hold what was read
        self._open: dict[int, tuple[PackedFile, float]] = {}  # until when they stay, the one opened last at the end
        self._mapped = 0  # bytes of them

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_ahead": None, "_open": {}, "_mapped": 0, "_unreadable": {}}

    def blocks_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the blocks int64 [rows] of `rows`."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def fetch(self, rows: np.ndarray, crop: np.ndarray | None) -> np.ndarray | None:
        """Returns pixels [batch, channels, height, width] of `rows` int64 [batch]; `crop` as in `cut`.

        None when some of them cannot be decoded, or their shard not be read: `bad_images` has them now.

        Raises:
            UserError: naming a shard that cannot be read, or an image that cannot be decoded, once there are more than may be.
        """
        blocks = self.blocks_of(rows)
        numbers = (rows - self.starts[blocks]).tolist()
        wanted = set(blocks.tolist())
        try:
            opened = {block: self.block(block) for block in wanted}
        except UnreadableShard:
            self.bad_images.learn(self._unreadable_images(wanted))
            return None
        stored, blank = [opened[block] for block in blocks.tolist()], self.prepare.blank()
        if all(block.shape == blank.shape and not block.bad for block in opened.values()):
            size = blank.size
            joined = bytearray().join([block.values.data[n * size : (n + 1) * size] for block, n in zip(stored, numbers)])
            return np.frombuffer(joined, blank.dtype).reshape(-1, *blank.shape)
        places = list(zip(rows.tolist(), stored, numbers))
        if met := [replace(block.bad[number], row=row) for row, block, number in places if number in block.bad]:
            self.bad_images.learn(met)
            return None
        return cut([block.at(np.array([number]))[0] for _, block, number in places], self.prepare.size, crop)

    def _unreadable_images(self, blocks: set[int]) -> list[BadImage]:
        """Those of the blocks that cannot be read. Raises UnreadableShard where no images may be replaced."""
        found: list[BadImage] = []
        for block in sorted(blocks & self._unreadable.keys()):
            if not self.bad_images.limit:
                raise UnreadableShard(*self._unreadable[block])
            shard, reason = self._read.shard(block), f"its shard cannot be read: {self._unreadable[block][1]}"
            rows = range(*self.starts[block : block + 2].tolist())
            numbers = range(self._read.first_in_shard[block], len(self))
            found += [BadImage(row, f"row {number} of {shard.name}", None, reason) for row, number in zip(rows, numbers)]
        return found

    def block(self, block: int) -> PackedFile:
        """Returns a decoded block from the disk, read first where it is not there. Raises UserError, see `fetch`."""
        stored, until = self._open.get(block, (None, 0.0))
        if stored is not None and time.monotonic() < until:
            return stored
        self._close(block)  # opened again it counts as used once more
        shard = self._read.shard(block).address
        if block in self._unreadable:
            raise UnreadableShard(*self._unreadable[block])
        waits = () if shard in {lost for lost, _ in self._unreadable.values()} else None  # it was waited for
        read = functools.partial(patiently, functools.partial(self._read, block), shard, self.cache.say, waits)
        try:
            stored = self.cache.open(block, read, shard)
        except UnreadableShard as error:
            self._unreadable[block] = error.args
            raise
        self._open[block] = stored, time.monotonic() + _OPEN_SECONDS
        self._mapped += len(stored.data)
        while len(self._open) > 1 and self._mapped > self.cache.limit // _OPEN_SHARE:
            self._close(next(iter(self._open)))
        return stored

    def _close(self, block: int) -> None:
        if block in self._open:
            self._mapped -= len(self._open.pop(block)[0].data)

    def read_ahead(self, rows: np.ndarray) -> None:
        """Begins to read the blocks of `rows` in the background, in their order; what was asked for before does not count."""
        if self._ahead is None or self._ahead.process != os.getpid():
            self._ahead = ReadAhead(self.cache, self._read)
        known = self._open.keys() | self._unreadable
        self._ahead.wanted = deque(block for block in dict.fromkeys(self.blocks_of(rows).tolist()) if block not in known)
        self._ahead.asked.set()


class ReadAhead:
    """Threads that read blocks which are needed soon. Where one fails, whoever needs the block tries again, and says why."""

    def __init__(self, cache: BlockCache, read: BlockReader):
        self.process, self.wanted, self.asked = os.getpid(), deque[int](), threading.Event()
        self._cache, self._read = cache, read
        for _ in range(_READERS):
            threading.Thread(target=self._run, name="read ahead", daemon=True).start()

    def _run(self) -> None:
        while self.asked.wait():
            try:
                block = self.wanted.popleft()
            except IndexError:
                self.asked.clear()
                continue
            try:
                self._cache.make_if_free(block, functools.partial(self._read, block))
            except Exception:  # told to whoever needs the block
                self.asked.clear()
                self.wanted.clear()

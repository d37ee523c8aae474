"""The files (shards) that a streamed dataset consists of: where they are, and reading them with patience.

A shard is a file on this machine, or lies behind an address that fsspec reads (`hf://`, `s3://`, ...) or a web server answers.
"""

import contextlib
import glob
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import datasets
from fsspec.core import url_to_fs
from fsspec.spec import AbstractBufferedFile

from utils.core.bars import print_progress
from utils.core.errors import UserError, explained, one_line
from utils.data.sources import find_builder
from utils.data.stored_files import GONE, is_address, is_web
from utils.options.flags import DataOptions
from utils.options.paths import DIGITS

T = TypeVar("T")

WAITS = (1.0, 5.0, 15.0, 30.0)  # seconds before a shard is tried again
RANGE_WAITS = (0.5, 2.0)  # seconds before a part of a web server's file is tried again, which nobody is told
TIMEOUT = 30  # seconds without a byte of a web server
KINDS = "parquet, tar or arrow files"
ENDINGS = (".parquet", ".tar", ".arrow")  # of a folder with several kinds, the first one counts
_BUILDERS = ("parquet", "webdataset", "arrow")  # of `datasets`, that read such files
_AT_ONCE = 16  # shards that are looked at or indexed at the same time
_DAMAGED = ("ArrowInvalid", "ReadError")  # of pyarrow and tarfile
_STAMPS = ("ETag", "etag", "sha256", "blob_id", "md5Hash", "last_modified", "LastModified", "mtime", "created")


class ShardChanged(UserError):
    """A shard, whose address is its argument, is not what it was when the dataset was indexed."""

    def __str__(self) -> str:
        return f"the shard {self.args[0]} has changed since this run indexed it\nstart a new run with the new data"


class UnreadableShard(UserError):
    """A shard cannot be read, however often it was tried. Its `args`: the address, and the reason in one line."""

    def __str__(self) -> str:
        address, reason = (*self.args, "")[:2]  # torch makes one of a text alone, if a worker raises it
        return f"cannot read the shard {address}: {reason}\ncheck it, or the network, and start again"


@dataclass(frozen=True)
class Shard:
    """`size` in bytes; `stamp` changes with the content: an etag, a hash or a time."""

    address: str
    size: int
    stamp: str

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]


def find_shards(options: DataOptions) -> tuple[list[Shard], datasets.Features | None]:
    """Returns the shards that the options name, in their order, and the types of the columns where the dataset declares them.

    Raises UserError where there are none, or they are files of another kind.
    """
    name = options.dataset_name
    if name in (None, DIGITS):
        what = "the digits are" if name else "--train_data_dir names"
        raise UserError(f"--streaming reads {KINDS}, and {what} images\nset --dataset_name, or leave --streaming out")
    declared = None
    saved = _saved(name, options.dataset_split)
    if saved is not None:
        addresses = saved
    elif is_address(name):
        addresses = _behind(name)
    else:
        addresses, declared = _of_builder(options)
    if not addresses:
        raise UserError(f"--dataset_name {name}: there are no {KINDS}\ncheck the path, and --dataset_split")
    return list(in_parallel(lambda address: patiently(lambda: look_at(address), address), addresses)), declared


def in_parallel(work: Callable[[Any], T], items: list[Any]) -> Iterator[T]:
    """Returns the results in order; the first error ends it."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            yield from pool.map(work, items)
        finally:
            pool.shutdown(cancel_futures=True)


def _saved(name: str, split: str) -> list[str] | None:
    """The files of a folder that `save_to_disk` wrote; None for anything else."""
    if is_web(name) or "{" in name or glob.has_magic(name) or not (is_address(name) or os.path.isdir(name)):
        return None
    with _listing(name):
        files, path = url_to_fs(name)
        splits = None
        if files.isfile(f"{path}/dataset_dict.json"):
            splits, path = json.loads(files.cat_file(f"{path}/dataset_dict.json"))["splits"], f"{path}/{split}"
        elif not files.isfile(f"{path}/state.json"):
            return None
        state = json.loads(files.cat_file(f"{path}/state.json")) if splits is None or split in splits else {}
        if split not in (splits := [state.get("_split") or "train"] if splits is None else splits):
            raise _no_such_split(split, name, splits)
        shards = [f"{path}/{file['filename']}" for file in state["_data_files"]]
    return [files.unstrip_protocol(shard) for shard in shards] if is_address(name) else shards


def _listing(name: str) -> contextlib.AbstractContextManager[None]:
    """Each file system has its own errors."""
    return explained(f"cannot list --dataset_name {name}", "check the address and the network")


def _no_such_split(split: str, name: object, splits: Iterable[str]) -> UserError:
    hint = f"choose from {', '.join(repr(str(each)) for each in splits)}" if splits else "connect to the Hub: a stream needs it"
    return UserError(f"--dataset_split {split}: {name} has no such split (--streaming takes whole splits)\n{hint}")


def _of_builder(options: DataOptions) -> tuple[list[str], datasets.Features | None]:
    name, split = options.dataset_name, options.dataset_split
    if Path(str(name)).is_dir() and not any(path.suffix.lower() in ENDINGS for path in Path(str(name)).rglob("*")):
        raise UserError(f"--streaming reads {KINDS}, and {name} has none\nleave --streaming out")
    builder, _ = find_builder(options)
    if builder.name not in _BUILDERS:
        hint = "" if Path(str(name)).exists() else ", or try --dataset_revision refs/convert/parquet"
        raise UserError(f"--streaming reads {KINDS}, and {name} consists of other files\nleave --streaming out{hint}")
    files = builder.config.data_files or {}
    if split not in files:
        raise _no_such_split(split, name, files)
    return [str(file) for file in files[split]], builder.info.features if builder.name == "parquet" else None


def _behind(address: str) -> list[str]:
    """The files that an address names, with {000..123} for a range of numbers and, but for web servers, * and folders."""
    if found := re.search(r"\{(\d+)\.\.(\d+)\}", address):
        first, last = found.groups()
        numbers = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
        return [more for number in numbers for more in _behind(address[: found.start()] + number + address[found.end() :])]
    if is_web(address):
        return [address]
    with _listing(address):
        files, path = url_to_fs(address)
        if glob.has_magic(path):
            paths = sorted(files.glob(path))
        elif files.isdir(path):
            paths = [found for found in sorted(files.find(path)) if not found.rpartition("/")[2].startswith("cache-")]
            endings = [ending for ending in ENDINGS if any(found.lower().endswith(ending) for found in paths)]
            paths = [found for found in paths if found.lower().endswith(tuple(endings[:1]))]
        else:
            paths = [path]
    return [files.unstrip_protocol(path) for path in paths]


def look_at(address: str) -> Shard:
    """Returns what is known of a shard without its content. Raises what its file system raises."""
    if is_web(address):
        _, size, stamp = _get(address, 0, 0)
        return Shard(address, size, stamp)
    files, path = url_to_fs(address)
    info = files.info(path)
    return Shard(address, int(info["size"]), str(next((info[name] for name in _STAMPS if info.get(name)), "")))


def open_shard(shard: Shard) -> IO[bytes]:
    """Opens a shard for reading parts of it. Raises ShardChanged, and what its file system raises."""
    if is_web(shard.address):
        return _WebFile(shard)
    if look_at(shard.address) != shard:
        raise ShardChanged(shard.address)
    files, path = url_to_fs(shard.address)
    return files.open(path, "rb", **({} if "file" in files.protocol else {"cache_type": "none"}))


class _WebFile(AbstractBufferedFile):
    """A file on a web server, of which each read asks for a part."""

    def __init__(self, shard: Shard):
        super().__init__(None, shard.address, cache_type="none", size=shard.size)
        self._shard = shard

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Asks again where a part fails at once: what was read of the file before is not lost with it."""
        data, size, stamp = self._part(start, min(end, self._shard.size) - 1)
        if (size, stamp) != (self._shard.size, self._shard.stamp):
            raise ShardChanged(self._shard.address)
        return data

    def _part(self, first: int, last: int) -> tuple[bytes, int, str]:
        for wait in RANGE_WAITS:
            try:
                return _get(self._shard.address, first, last)
            except (OSError, http.client.HTTPException) as error:
                if {type(error), type(getattr(error, "reason", None))} & {FileNotFoundError, TimeoutError}:
                    raise
            time.sleep(wait)
        return _get(self._shard.address, first, last)


def _get(address: str, first: int, last: int) -> tuple[bytes, int, str]:
    """(the bytes `first` to `last` of a file on a web server, its size, its stamp)."""
    request = urllib.request.Request(address, headers={"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"})
    try:
        # Not the Hub's client, which HF_HUB_OFFLINE forbids any server.
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", ""))
            if answer.status != 206 or not found:
                raise UserError(f"the server of {address} does not send parts of files\ndownload them, and use their folder")
            data = answer.read()
    except urllib.error.HTTPError as error:
        if error.code in (401, *GONE):
            raise FileNotFoundError(f"the server answers {error.code} {error.reason}") from None
        raise
    if int(found[1]) != first or len(data) != last - first + 1:
        raise ConnectionError(f"{len(data)} bytes came instead of {last - first + 1}")
    return data, int(found[3]), answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def patiently(
    work: Callable[[], T], address: str, say: Callable[[str], None] | None = None, waits: Iterable[float] | None = None
) -> T:
    """Returns what `work` returns, which reads a shard; tries it again after each of the `waits` in seconds (`WAITS`).

    `say` is told of the first failure. Raises UnreadableShard where it fails again after all of them.
    """
    for number, wait in enumerate((*(WAITS if waits is None else waits), None)):
        try:
            return work()
        except (UserError, MemoryError, ImportError, KeyError, TypeError):
            raise
        except Exception as error:  # each file system has its own
            final = isinstance(error, FileNotFoundError) or (type(error).__name__ in _DAMAGED and not is_address(address))
            if wait is None or final:
                tries = f", {number + 1} times" if number and not final else ""
                raise UnreadableShard(address, f"{one_line(error)}{tries}") from error
            if number == 0:
                (say or print_progress)(f"cannot read the shard {address} now ({one_line(error)}); trying again")
            time.sleep(wait)
    raise AssertionError("unreachable")

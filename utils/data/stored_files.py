"""Reads files by their addresses in datasets: `zip://cats/1.png::/data/photos.zip`, `tar://...`, and whatever fsspec reads.

Members of an archive on this machine are read without unpacking it. An archive is opened once per process.
"""

import functools
import os
import tarfile
import time
import zipfile
from collections.abc import Iterator
from typing import IO

from utils.core.errors import explained, one_line

ARCHIVES = ("zip", "tar")  # schemes of addresses, and suffixes of files
_WAITS = (1.0, 5.0)  # seconds before an address is tried again
_TIMEOUT = 30  # seconds without an answer of a web server
_BLOCK = 512  # bytes of zeros that end a tar archive
GONE = (403, 404, 410)  # answers of a server that will not change soon


class _Zip:
    def __init__(self, path: str):
        self._file = zipfile.ZipFile(path)
        members = [member for member in self._file.infolist() if not member.is_dir()]
        if any(member.flag_bits & 1 for member in members):
            raise ValueError("it is encrypted; unpack it")
        self.names = [member.filename for member in members]

    def read(self, name: str) -> bytes:
        try:
            return self._file.read(name)
        except KeyError:
            raise FileNotFoundError("no such file in the archive") from None


class _Tar:
    def __init__(self, path: str):
        with open(path, "rb") as file:
            self._places = {name: (offset, size) for name, offset, size in tar_files(file)}
        self.names, self._path = list(self._places), path

    def read(self, name: str) -> bytes:
        if name not in self._places:
            raise FileNotFoundError("no such file in the archive")
        offset, size = self._places[name]
        with open(self._path, "rb", buffering=0) as file:  # a position of its own for each thread
            file.seek(offset)
            return file.read(size)


def tar_files(file: IO[bytes]) -> Iterator[tuple[str, int, int]]:
    """Yields name, offset and size of each file in an uncompressed tar archive; of a hard link, those of what it leads to.

    Between two of them `file` may be read anywhere. Raises TarError where it is damaged, at its end, too.
    """
    places: dict[str, tuple[int, int]] = {}
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            archive.members.clear()  # type: ignore[attr-defined]  # its memory
            place = (member.offset_data, member.size) if member.isreg() else places.get(member.linkname)
            if place is not None and (member.isreg() or member.islnk()):
                places[member.name] = place
                yield member.name, *place
    file.seek(archive.offset)
    if file.read(_BLOCK) != bytes(_BLOCK):  # tarfile takes this for its end
        raise tarfile.ReadError("it is cut short or damaged")


def list_archive(kind: str, path: str) -> list[str]:
    """Returns the names of the files in an archive, in its order.

    Raises UserError where it is damaged, encrypted, or of another kind.
    """
    damaged = OSError, ValueError, zipfile.BadZipFile, tarfile.TarError
    with explained(f"cannot read the archive {path}", "download or make it again", damaged):
        return _open(kind, path, os.getpid()).names


@functools.lru_cache(maxsize=16)
def _open(kind: str, path: str, process: int) -> _Zip | _Tar:
    """`process`: its number, because a forked process must not share the position in an open file."""
    return _Zip(path) if kind == "zip" else _Tar(path)


forget_archives = _open.cache_clear  # their lists of names take memory; they are opened again when they are needed


def is_address(path: str) -> bool:
    """Whether `path` is not simply a file on this machine."""
    return "://" in path


def is_web(address: str) -> bool:
    """Whether a web server answers for `address`."""
    return address.startswith(("http://", "https://"))


def is_remote(path: str) -> bool:
    """Whether reading `path` takes a network."""
    return is_address(path) and _member(path) is None


def _member(path: str) -> tuple[str, str, str] | None:
    """(kind, name, archive) of an address in an archive on this machine."""
    kind, _, rest = path.partition("://")
    name, _, archive = rest.rpartition("::")
    return (kind, name, archive) if kind in ARCHIVES and name and not is_address(archive) else None


def read_address(path: str) -> bytes:
    """Returns the bytes at an address.

    Raises:
        FileNotFoundError: nothing is there.
        ConnectionError: it cannot be reached now.
        OSError, zipfile.BadZipFile, zlib.error, ...: an archive that is damaged.
    """
    member = _member(path)
    if member is not None:
        kind, name, archive = member
        return _open(kind, archive, os.getpid()).read(name)
    for wait in (*_WAITS, None):
        try:
            return _download(path)
        except (FileNotFoundError, ValueError):  # ValueError: an address that nobody understands
            raise
        except Exception as error:  # each file system has its own
            if wait is None or isinstance(error, ImportError):
                raise ConnectionError(one_line(error)) from error
            time.sleep(wait)
    raise AssertionError("unreachable")


def _download(address: str) -> bytes:
    if not is_web(address):
        from datasets.utils.file_utils import xopen  # fsspec, with the user's login at the Hub

        with xopen(address, "rb") as file:
            return file.read()
    from huggingface_hub import get_session

    answer = get_session().get(address, timeout=_TIMEOUT)
    if answer.status_code in GONE:
        raise FileNotFoundError(f"the server answers {answer.status_code} {answer.reason_phrase}")
    return answer.raise_for_status().content

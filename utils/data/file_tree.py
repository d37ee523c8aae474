"""The files of a folder or an archive, by names relative to its root, and how many others there are and why they do not count.

Links to folders are followed, unless they lead back. An archive in a folder counts as a folder of its name. Names that begin
with `.`, and folders that begin with `__`, are hidden.
"""

import hashlib
import os
import posixpath
from collections import Counter

from utils.core.errors import UserError
from utils.data.decode import image_suffixes
from utils.data.stored_files import ARCHIVES, forget_archives, list_archive


def suffix_of(name: str) -> str:
    return posixpath.splitext(name)[1].lower()


def archive_stem(name: str) -> str | None:
    """The name without its suffix, where that is of an archive that can be read without unpacking it."""
    return os.path.splitext(name)[0] if suffix_of(name)[1:] in ARCHIVES else None


class FileTree:
    """Empty at first; `root`, a path or another word, is part of its key.

    Attributes:
        paths: name, with `/` -> what reads the file: its path, or an address in an archive (see `stored_files`).
        left_out: reason -> number of files that do not count, whatever they are.
    """

    def __init__(self, root: str, opens_archives: bool = True):
        self.paths: dict[str, str] = {}
        self.left_out: Counter[str] = Counter()
        self._digest = hashlib.sha256(os.fsencode(root))
        self._opens_archives = opens_archives

    def key(self, *further: str) -> str:
        """Changes with any file's name, size or time of change, and with `further` words."""
        digest = self._digest.copy()
        digest.update("\0".join(further).encode(errors="surrogateescape"))
        return digest.hexdigest()

    def images(self) -> list[str]:
        """Returns the names of the files with a suffix of images, sorted."""
        suffixes = image_suffixes()
        return sorted(name for name in self.paths if suffix_of(name) in suffixes)

    def add_folder(self, folder: str, prefix: str = "", above: tuple = ()) -> None:
        """Adds what lies below `folder`, with `prefix` before the names. Raises UserError for what cannot be read."""
        try:
            status = os.stat(folder)
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise UserError(f"cannot read the folder {folder}: {error.strerror or error}\ncheck its permissions") from None
        itself = status.st_dev, status.st_ino
        if itself in above:
            self.left_out["link to a folder above it"] += 1
            return
        names = {entry.name for entry in entries}
        for entry in entries:
            stem = archive_stem(entry.name)
            try:
                is_folder = entry.is_dir()
            except OSError as error:
                raise UserError(f"cannot read {entry.path}: {error.strerror or error}\ncheck its permissions") from None
            if is_folder:
                if not entry.name.startswith((".", "__")):
                    self.add_folder(entry.path, f"{prefix}{entry.name}/", (*above, itself))
            elif not entry.is_file():
                self.left_out["link to nothing" if entry.is_symlink() else "special file"] += 1
            elif stem in names:
                self.left_out[f"{suffix_of(entry.name)} beside its unpacked folder"] += 1
            elif stem and self._opens_archives and not stem.startswith("."):
                self.add_archive(entry.path, f"{prefix}{stem}/")
            else:
                self.add_file(prefix + entry.name, entry.path, entry.stat())

    def add_archive(self, path: str, prefix: str = "", kind: str | None = None) -> None:
        """Adds the files in an archive; `kind`: zip or tar, where the suffix does not tell. Raises UserError if damaged."""
        kind = kind or suffix_of(path)[1:]
        self._stamp(prefix, os.stat(path))
        for member in sorted(list_archive(kind, path)):
            name = posixpath.normpath(member.replace("\\", "/") if kind == "zip" else member).lstrip("/")  # by Windows
            if not any(part.startswith("__") for part in name.split("/")[:-1]):
                self._add(prefix + name, f"{kind}://{member}::{path}")
        forget_archives()

    def add_file(self, name: str, path: str, status: os.stat_result) -> None:
        self._stamp(name, status)
        self._add(name, path)

    def _add(self, name: str, path: str) -> None:
        if not any(part.startswith(".") for part in name.split("/")):
            self.paths[name] = path
        elif suffix_of(name) in image_suffixes() and not posixpath.basename(name).startswith("._"):  # macOS adds these
            self.left_out["hidden"] += 1

    def _stamp(self, name: str, status: os.stat_result) -> None:
        self._digest.update(f"\0{name}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="surrogateescape"))


def scan(source: str) -> FileTree:
    """Returns the files of a folder or an archive. Raises UserError where there is none, or it cannot be read."""
    place = os.path.realpath(source)
    tree = FileTree(place)
    if os.path.isdir(place):
        tree.add_folder(place)
    elif not os.path.exists(place):
        raise UserError(f"--train_data_dir {source}: no such folder or file\ncheck the path")
    elif archive_stem(place) is not None:
        tree.add_archive(place)
    else:
        kinds = " or ".join(f".{kind}" for kind in ARCHIVES)
        raise UserError(
            f"--train_data_dir {source} is neither a folder of images nor a {kinds} file of images\nunpack it, or give a folder"
        )
    return tree

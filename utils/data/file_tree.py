"""The files of a folder or an archive, by names relative to its root, and how many others there are and why they do not count.

Links to folders are followed, unless they lead back. An archive in a folder counts as a folder of its name. Names that begin
with `.`, and folders that begin with `__`, are hidden.

Beside the images of a folder stand metadata.csv, .jsonl or .parquet with a column `file_name`, or the dataset.json of NVlabs'
tools, which has classes. They mean files by their names. A name that no file has is taken for the one file whose path is alike,
whatever the case, the suffix and the form of its letters, or alike after the same folders for all; else the file counts as one
that cannot be decoded.
"""

import codecs
import hashlib
import io
import json
import os
import posixpath
import re
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import compute, csv, parquet
from pyarrow import json as lines

from utils.core.errors import UserError, explained
from utils.core.hub import no_such_path
from utils.data.decode import image_suffixes
from utils.data.image_column import shortened
from utils.data.stored_files import ARCHIVES, forget_archives, is_address, list_archive, read_address

_NAMES = ("metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.parquet")
_CLASSES = "dataset.json"  # {"labels": [["00000/img00000000.png", 6], ...]}
_MASK = re.compile(  # ends such a stem
    r"[-_.](mask(label)?|condlabel|labels?|gt|annotations?|seg(mentation)?|depth|matte|trimap|thumb(nail)?)$", re.IGNORECASE
)
ABOUT_IMAGES = {"metadata", "dataset"}  # stems of such files
MARKS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}  # between the columns
ENCODINGS = {"utf-16": "UTF-16", "utf-16-le": "UTF-16", "utf-16-be": "UTF-16", "cp1252": "Windows-1252"}


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
        """Returns the names of the files with a suffix of images, sorted; not of the masks that most of the others have."""
        masks, names = self.masks(), self.all_images()
        return [name for name in names if name not in masks or 3 * len(masks) < len(names)]

    def masks(self) -> set[str]:
        """Returns the names of the images that are called a mask of another one."""
        stems = {name: posixpath.splitext(name)[0] for name in self.all_images()}
        own = set(stems.values())
        return {name for name, stem in stems.items() if (main := _MASK.sub("", stem)) != stem and main in own}

    def all_images(self) -> list[str]:
        suffixes = image_suffixes()
        return [name for name in sorted(self.paths) if suffix_of(name) in suffixes]

    def add_folder(self, folder: str, prefix: str = "", above: tuple = ()) -> None:
        """Adds what lies below `folder`, with `prefix` before the names. Raises UserError for what cannot be read."""
        with explained(f"cannot read the folder {folder}", "check its permissions", OSError):
            status = os.stat(folder)
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        itself = status.st_dev, status.st_ino
        if itself in above:
            self.left_out["link to a folder above it"] += 1
            return
        names = {entry.name for entry in entries}
        for entry in entries:
            stem = archive_stem(entry.name)
            if entry.is_symlink() and not os.path.exists(entry.path):  # or to itself
                self.left_out["link to nothing"] += 1
                continue
            with explained(f"cannot read {entry.path}", "check its permissions", OSError):
                is_folder = entry.is_dir()
            if is_folder:
                if not entry.name.startswith((".", "__", "@eaDir")) and entry.name != "lost+found":  # a NAS's, and a disk's own
                    self.add_folder(entry.path, f"{prefix}{entry.name}/", (*above, itself))
            elif not entry.is_file():
                self.left_out["special file"] += 1
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
            name = posixpath.normpath(member.replace("\\", "/")).lstrip("/")  # by Windows
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
        raise UserError(f"--train_data_dir {source}: {no_such_path(source, '--dataset_name')}")
    elif archive_stem(place) is not None:
        tree.add_archive(place)
    else:
        kinds = " or ".join(f".{kind}" for kind in ARCHIVES)
        raise UserError(
            f"--train_data_dir {source} is neither a folder of images nor a {kinds} file of images\nunpack it, or give a folder"
        )
    return tree


class FolderTable:
    """The rows that the metadata of `tree` have. An image is in one of their files.

    Attributes:
        table: `pyarrow.Table`, with `file_name` relative to the root; None where there is no metadata.
        paths: of each row, what reads its file, or where it should be.
        files: names of the metadata's own files.
        notes: what a user should know of how they were read.

    Raises:
        UserError: metadata that cannot be used. `source` is what it calls the folder.
    """

    def __init__(self, tree: FileTree, source: str):
        self._tree, self._source = tree, source
        self.table: Any = None
        self.paths: list[str] = []
        self.files: list[str] = []
        self.notes: list[str] = []
        tables = self._tables()
        if not tables:
            return
        what = f"the metadata files in {source} have columns of different types"
        with explained(what, "give equal columns equal types", pa.ArrowException):
            self.table = pa.concat_tables(tables, promote_options="permissive")
        names = self._resolved([table["file_name"].to_pylist() for table in tables])
        place = self.table.column_names.index("file_name")
        self.table = self.table.set_column(place, "file_name", pa.array(names, pa.string()))

    def _tables(self) -> list[Any]:
        tables, listed = [], dict[str, set[str]]()
        found = [name for name in sorted(self._tree.paths) if posixpath.basename(name).lower() in _NAMES]
        named = [name for name in sorted(self._tree.paths) if posixpath.basename(name) == _CLASSES and not found]
        classes = {name: pairs for name in named if (pairs := self._labels(name))}
        for name in found or classes:
            path, folder = self._tree.paths[name], posixpath.dirname(name)
            beside = [file for file in listed if posixpath.dirname(file) == folder]
            with explained(f"cannot read {path}", "repair or remove this file"):
                table = _with_usual_names(self._read(name, path, classes))
            if "file_name" not in table.column_names:
                if beside:  # which lists the images; this one is about something else
                    continue
                columns = ", ".join(table.column_names)
                raise UserError(
                    f"{path} has no column file_name\nname the column of the files file_name; its columns: {columns}"
                )
            inside = _relative(table["file_name"].to_pylist(), folder, path)
            files = [posixpath.normpath(posixpath.join(folder, file)) for file in inside]
            if same := [file for file in beside if listed[file] >= {*files}]:
                self.notes.append(f"{same[0]} is used, and {name}, which lists no other images, is not")
                continue
            if twice := [(file, image) for file, images in listed.items() for image in files if image in images]:
                raise UserError(f"{twice[0][0]} and {name} in {self._source} both list {twice[0][1]}\nleave it in one of them")
            listed[name] = {*files}
            self.paths += [_sibling(path, posixpath.normpath(file)) for file in inside]
            self.files.append(name)
            tables.append(table.set_column(table.column_names.index("file_name"), "file_name", pa.array(files, pa.string())))
        return tables

    def _labels(self, name: str) -> list:
        """[file name, class] of each image; none where the file is of another kind, or has no classes."""
        try:
            labels = json.loads(_bytes(self._tree.paths[name]))["labels"]
            pairs = list(labels.items()) if isinstance(labels, dict) else list(labels or ())
        except (ValueError, KeyError, TypeError):
            return []
        right = all(isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs)
        return pairs if right and all(suffix_of(name) in image_suffixes() for name, _ in pairs) else []

    def _read(self, name: str, path: str, classes: dict[str, list]) -> Any:
        if name in classes:
            self.notes.append(f"the classes are those of {name}")
            return pa.table(dict(zip(("file_name", "label"), map(list, zip(*classes[name])))))
        data, suffix = _bytes(path), suffix_of(name)
        if suffix == ".parquet" or data.startswith(b"PAR1"):
            return parquet.read_table(io.BytesIO(data))
        if data.startswith(b"PK"):
            raise ValueError("it is a spreadsheet: save it as CSV")
        text, encoding = decoded_text(data)
        if suffix == ".jsonl" and text.lstrip().startswith("["):  # an array, as pandas writes it
            return pa.Table.from_pylist(json.loads(text))
        if suffix == ".jsonl":
            data = text.encode()
            return lines.read_json(io.BytesIO(data), read_options=lines.ReadOptions(block_size=len(data) + 1))
        text = re.sub(r"\A[\r\n]*(sep=.\r?\n)?", "", text)  # by which a spreadsheet knows the mark
        mark = mark_of(text.split("\n", 1)[0])
        if encoding or mark != ",":
            how = f"as {ENCODINGS[encoding]} " if encoding else ""
            self.notes.append(f"{name} was read {how}with {MARKS[mark]} between the columns")
        options = csv.ParseOptions(delimiter=mark, newlines_in_values=True)
        names = [word for word in re.split(rf"[{re.escape(mark)}\r\n]", text.split("\n", 1)[0]) if _usual(word) == "file_name"]
        types = csv.ConvertOptions(column_types=dict.fromkeys((word.strip('"') for word in names), pa.string()))  # 0001
        table = csv.read_csv(io.BytesIO(text.encode()), parse_options=options, convert_options=types)
        for place, column in enumerate(table.columns):
            if str(column.type) == "string":  # an empty cell is none
                filled = compute.if_else(compute.equal(column, ""), None, column)
                table = table.set_column(place, table.column_names[place], filled)
        return table

    def _resolved(self, tables: list[list[str]]) -> list[str]:
        """The names of all tables, as the files that are meant have them; `paths` follows."""
        names = [name for part in tables for name in part]
        exact = set(names) & self._tree.paths.keys()
        images = [image for image in self._tree.all_images() if image not in exact]
        resolved: dict[str, str] = {}
        for file, part in zip(self.files, tables):
            if unknown := [name for name in dict.fromkeys(part) if name not in exact]:
                near = [image for image in images if image.startswith(posixpath.join(posixpath.dirname(file), ""))] or images
                above = f"{posixpath.commonpath(map(posixpath.dirname, (*unknown, *near)))}/".lstrip("/")  # before all of them
                meant = _meant([name.removeprefix(above) for name in unknown], [image.removeprefix(above) for image in near])
                resolved |= {above + name: above + image for name, image in meant.items()}
        if resolved:
            name, image = next(iter(resolved.items()))
            shown = f"{name} means {image}" + ", ..." * (len(resolved) > 1)
            self.notes.append(f"{len(resolved):,} in the metadata differ from the names of files: {shown}")
        self.paths = [self._tree.paths.get(resolved.get(name, name), path) for name, path in zip(names, self.paths)]
        return [resolved.get(name, name) for name in names]


def _with_usual_names(table: Any) -> Any:
    """The table, with the column `file_name` under this name. Raises ValueError where two columns have one name."""
    if "file_name" not in table.column_names:
        table = table.rename_columns([_usual(column) for column in table.column_names])
    if len({*table.column_names}) < len(table.column_names):
        raise ValueError("two of its columns have the same name")
    return table


def _relative(names: list[Any], folder: str, path: str) -> list[str]:
    """The cells of file_name as paths below `folder`. Those that begin at the root, here or on another machine, have other
    folders before those of the files. Raises UserError."""
    files = [name and re.sub("^(file:(//[^/]*)?)?/*", "", str(name).replace("\\", "/")) for name in names]
    for row, file in enumerate(files):
        if not file or is_address(file) or posixpath.normpath(posixpath.join(folder, file)).startswith(".."):
            shown = file and shortened(file)
            raise UserError(
                f"{path}, row {row}: file_name is {shown!r}, which is not a file in the same folder\n"
                "use paths relative to that folder"
            )
    return files


def decoded_text(data: bytes) -> tuple[str, str]:
    """The text of a table, and its encoding where that is not UTF-8."""
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""
    if not encoding and b"\0" in data[:2]:  # without a mark of the order of bytes
        encoding = "utf-16-be" if data[:1] == b"\0" else "utf-16-le"
    try:
        return data.decode(encoding or "utf-8-sig"), encoding
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace"), "cp1252"


def mark_of(header: str) -> str:
    """What stands between the columns of a table: of those in its first line, outside quotes, the most frequent one."""
    plain = re.sub(r'"[^"]*"', "", header)
    return max(MARKS, key=plain.count)


def _usual(column: str) -> str:
    """The name of a column without spaces around it, and file_name however it is written."""
    name = column.strip(' "\r')
    return "file_name" if re.sub(r"[\W_]", "", name).lower() == "filename" else name


def _parts(name: str) -> tuple[str, ...]:
    """The folders of a name and its stem, in one form of their letters; an archive as the folder that it counts as."""
    plain = unicodedata.normalize("NFC", unquote(posixpath.splitext(name)[0])).casefold()
    return tuple(part.strip().removesuffix(".zip").removesuffix(".tar") for part in plain.split("/"))


def _meant(names: list[str], images: list[str]) -> dict[str, str]:
    """Name -> the one image whose path is the same but for case, suffix and the form of its letters, or the same after the
    folders that stand before all of them, or before none, or, where each name has such an image, after any. A file that two
    names could mean is meant by none."""
    whole: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    ends: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for image in images:
        parts = _parts(image)
        whole[parts].append(image)
        for start in range(1, len(parts)):
            ends[parts[start:]].append(image)
    alike: dict[str, str] = {}
    moved: dict[str, str] = {}
    folders = set()  # that stand before the file's path, or before the name
    for name in names:
        own = _parts(name)
        others = [*ends.get(own, ()), *(image for start in range(1, len(own)) for image in whole.get(own[start:], ()))]
        if (same := _alike(name, whole.get(own, []))) is not None:
            alike[name] = same
        elif others:
            for path in map(_parts, others):
                more = len(path) - len(own)
                folders.add((more > 0, path[:more] if more > 0 else own[:-more]))
            if (other := _alike(name, others)) is not None:
                moved[name] = other
    found = alike | (moved if len(folders) == 1 or len(alike) + len(moved) == len(names) else {})
    times = Counter(found.values())
    return {name: image for name, image in found.items() if times[image] == 1}


def _alike(name: str, images: list[str]) -> str | None:
    """The only one; of several the only one with the same suffix, or else in the same case, too."""
    for form in (str.casefold, str):
        if len(images) > 1:
            end = form(posixpath.basename(unicodedata.normalize("NFC", name)))
            images = [one for one in images if form(posixpath.basename(unicodedata.normalize("NFC", one))) == end] or images
    return images[0] if len(images) == 1 else None


def _bytes(path: str) -> bytes:
    return read_address(path) if is_address(path) else Path(path).read_bytes()


def _sibling(path: str, name: str) -> str:
    """What reads the file `name` beside the file that `path` reads."""
    if not is_address(path):
        return os.path.join(os.path.dirname(path), name)
    kind, _, rest = path.partition("://")
    member, _, archive = rest.rpartition("::")
    return f"{kind}://{posixpath.join(posixpath.dirname(member), name)}::{archive}"

"""Finds the column of a `datasets.Dataset` that has the images, or the columns of one pixel each, and reads them by row without
decoding.

In a cell may be an encoded image, the place of one, or its values. Around an image may be a list of one and a struct; bytes may
be base64 or a data URI, a path a `file://` address, and values numbers in a text. What could be meant in two ways is refused,
with the line of Python that says which way.
"""

import base64
import binascii
import contextlib
import hashlib
import itertools
import math
import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import datasets
import numpy as np

from utils.core.errors import UserError
from utils.data.columns import LABEL_NAMES, describe_columns, is_number, number_type
from utils.data.decode import ImageFile, begins_an_image, image_suffixes
from utils.data.stored_files import is_address

_IMAGE_NAMES = (
    *("image", "img", "images", "pixels", "picture", "photo", "pixel_values"),
    *("jpg", "png", "webp", "image_path", "image_url", "url"),
)
_ROWS = 1024  # read at a time
_PIXELS = 49  # columns of one pixel each, at least
_LONG = 100  # characters of a path, beyond which a message has it only where it is one
_LONGEST, _LONGEST_NAME = 4096, 255  # characters of a path, and of a file's name
_SHOWN = 100  # characters of a cell in a message
_SMALLEST = 16  # values of an image, and characters of base64 that tell its format
_HEAD = 64  # characters of base64 that are looked at
_NUMBERS = re.compile(rf"\d+(?:[\s,;]+\d+){{{_SMALLEST - 1},}}")
_OTHER_TEXTS = {  # how they begin: what they are, and what makes an image of them
    ("b'", 'b"'): ("bytes as Python writes them", "ast.literal_eval(cell)"),
    ("{",): ("a struct as JSON", "json.loads(cell)"),
    ("[",): ("a list as text", "json.loads(cell)"),
    ("0x", "\\x"): ("hex", "bytes.fromhex(cell[2:])"),
    ("<",): ("HTML or XML", """re.search('src="(.*?)"', cell)[1]"""),
    ("![",): ("Markdown", r"re.search(r'\((.*)\)', cell)[1]"),
}
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")
FirstCell = Callable[[str], object]  # name of a column -> its first cell that is not empty


class NoImage(ValueError):
    """What a cell has instead of an image. `turned`: the expression that makes an image of `cell`, or None."""

    def __init__(self, text: str, turned: str | None = None):
        super().__init__(text)
        self.turned = turned


def find_image_column(
    dataset: datasets.Dataset, requested: str | None = None, first_cell: FirstCell | None = None
) -> tuple[list[str], list[str]]:
    """Returns the name of the image column, or the names of columns of one pixel each, and notes on the choice.

    A column of the type `Image` comes first, then one that holds encoded bytes, then one of arrays, then texts (paths, base64),
    lists and structs with a usual name, then those of bytes, then texts that begin with an image or with the path of one. Any
    of these may be requested by name. Last come numbered columns of numbers, as many as a square has pixels.

    Args:
        first_cell: reads the column elsewhere, where `dataset` has no rows.

    Raises:
        UserError: no such column, or none that can hold images; it lists the columns with their types. Or what is in the
            column can be meant in two ways.
    """
    features = dataset.features
    peek = first_cell or (lambda name: _first_cell(dataset, name))
    if requested is None:
        found = next(filter(None, _candidates(features, peek)), [])
    elif requested not in features:
        raise UserError(f"--image_column {requested}: the dataset has no such column\nits columns: {describe_columns(dataset)}")
    elif kind_of(features[requested]) is None and not isinstance(features[requested], dict):
        raise UserError(f"--image_column {requested}: this column has no images\nthe columns: {describe_columns(dataset)}")
    else:
        found = [requested]
    if found:
        _refuse(found[0], features[found[0]], peek(found[0]))
        several = f"image columns {', '.join(found)}: {found[0]} is used (--image_column chooses)"
        return found[:1], [several] * (len(found) > 1)
    pixels = _pixel_columns(dataset)
    if not pixels:
        hint = f"set --image_column to one of its columns: {describe_columns(dataset)}"
        if sum(name.replace(".", "").isdecimal() for name in features) * 2 > len(features):
            hint = "its first row was taken for the names of columns: put a row of names before it, such as label,pixel0,pixel1"
        raise UserError(f"the dataset has no column that looks like images\n{hint}")
    side = math.isqrt(len(pixels))
    return pixels, [f"the {len(pixels)} columns {pixels[0]} to {pixels[-1]} are the pixels of {side}x{side} images"]


def _candidates(features: dict[str, Any], peek: FirstCell) -> Iterator[list[str]]:
    """The columns that may have the images, group after group, the likeliest one first."""
    kinds = {name: kind_of(feature) for name, feature in features.items()}
    usual = [name for name in features if name.lower() in _IMAGE_NAMES]
    for kind in ("image", "file"):
        yield sorted((name for name in features if kinds[name] == kind), key=lambda name: name not in usual)
    yield [name for name in features if kinds[name] == "array"]
    yield [name for name in usual if kinds[name] or isinstance(features[name], dict)]
    yield [name for name in features if kinds[name] == "wrapped"]
    yield [name for name in features if kinds[name] == "text" and _is_image(peek(name), features[name])]


def _first_cell(dataset: datasets.Dataset, name: str) -> object:
    column = dataset.select_columns([name]).with_format("arrow")
    for start, stop in ((0, 1), (1, _ROWS)):  # the first row alone: others may hold large images
        if (cell := first_of(column[start : min(stop, len(dataset))].column(name))) is not None:
            return cell
    return None


def first_of(column: Any) -> object:
    """Returns the first cell of a column of pyarrow that is not empty, or None."""
    return next((cell for value in column.drop_null() if (cell := value.as_py()) not in ("", [])), None)


def _refuse(name: str, feature: object, cell: object) -> None:
    """Raises UserError where a cell has no image, or what can be meant in two ways."""
    try:
        content_of(cell, feature)
    except NoImage as error:
        raise _refusal(f"the column {name!r} has", error, f"row[{name!r}]") from None


def _refusal(what: str, error: NoImage, cell: str) -> UserError:
    hint = "choose another column with --image_column"
    if error.turned:
        turned = error.turned.replace("cell", cell)
        hint = f'turn it: dataset.map(lambda row: {{"image": {turned}}}).save_to_disk("data"), and use data'
    return UserError(f"{what} {error}, where an image should be\n{hint}")


def _is_image(cell: object, feature: object) -> bool:
    """Whether a text has an image, or the path of one."""
    try:
        content = content_of(cell, feature)
    except NoImage:
        return False
    is_path = isinstance(content, str) and posixpath.splitext(content)[1].lower() in image_suffixes()
    return is_path or isinstance(content, bytes)


def _pixel_columns(dataset: datasets.Dataset) -> list[str]:
    """The columns of one pixel each: those of numbers whose names differ by a number alone, in the order of that.

    Raises UserError where they may be pixels of three colors, whose order nobody knows.
    """
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name, feature in dataset.features.items():
        if is_number(feature) and kind_of(feature) is None and name.lower() not in LABEL_NAMES:
            alike[re.sub(r"\d+", "#", name)].append(name)
    names = max(alike.values(), key=len, default=[])
    if len(names) >= _PIXELS and [*map(len, alike.values())].count(len(names)) == 3:  # r0, g0, b0, r1, ...
        largest = ", ".join(kind for kind, some in alike.items() if len(some) == len(names))
        three = NoImage("a color each", three_planes(math.isqrt(len(names)))[1])
        raise _refusal(f"the columns {largest} have", three, "[row[name] for name in NAMES]")
    numbers = {name: [int(number) for number in re.findall(r"\d+", name)] for name in names}
    spans = [range(min(axis), max(axis) + 1) for axis in zip(*numbers.values())]
    if not spans or math.prod(map(len, spans)) != len(names):  # sensors, or values that were taken for names
        return []
    if len(spans) == 1:  # of two numbers nobody knows which one is the row
        names = sorted(names, key=numbers.__getitem__)
    side, side_of_color = math.isqrt(len(names)), math.isqrt(len(names) // 3)
    if len(names) >= _PIXELS and len(names) == 3 * side_of_color**2:
        start = dataset.column_names.index(names[0])
        is_slice = dataset.column_names[start : start + len(names)] == names
        raise _refusal(
            f"the {len(names)} columns {names[0]} to {names[-1]} have",
            NoImage(*three_planes(side_of_color)),
            f"list(row.values())[{start}:{start + len(names)}]" if is_slice else "[row[name] for name in NAMES]",
        )
    return names if len(names) >= _PIXELS and side * side == len(names) else []


class EncodedImages:
    """The images of one column, or of columns of one pixel each, read by row and never decoded here.

    Relative paths begin at `base`, the folder of the file that holds them.

    Attributes:
        dtype, shape: of the first image, where they are arrays; else None.
    """

    def __init__(self, dataset: datasets.Dataset, columns: list[str], base: str | None = None, first_row: int = 0):
        """`first_row`: the number of the first row, for the names of images."""
        self.columns, self._base, self._first_row = columns, base or "", first_row
        self.table = dataset.select_columns(columns).with_format("arrow")
        self._feature = dataset.features[columns[0]]
        self._name = f"column {columns[0]!r}" if len(columns) == 1 else f"columns {columns[0]!r} to {columns[-1]!r}"
        first = self._first()
        self.dtype = None if first is None or first.array is None else first.array.dtype
        self.shape = None if first is None or first.array is None else first.array.shape

    def _first(self) -> ImageFile | None:
        """The first that is there."""
        for start, stop in ((0, 1), (1, _ROWS)):
            for file in self.between(start, min(stop, len(self))):
                if file.is_there:
                    return file
        return None

    def __len__(self) -> int:
        return len(self.table)

    def files_key(self) -> str:
        """See `files_key`."""
        edges = [0, *range(1, len(self), _ROWS), len(self)]  # the first row alone: others may hold large images
        return files_key(self.between(start, stop) for start, stop in itertools.pairwise(edges))

    def between(self, start: int, stop: int) -> list[ImageFile]:
        """Returns the files of rows [start, stop)."""
        return self._files(range(start, stop), self.table[start:stop])

    def at(self, rows: list[int]) -> list[ImageFile]:
        """Returns the files of any rows, in that order."""
        return self._files(rows, self.table[rows])

    def _files(self, rows: Iterable[int], table: Any) -> list[ImageFile]:
        if len(self.columns) == 1:
            cells = table.column(self.columns[0]).to_pylist()
        else:
            cells = np.stack([table.column(name).to_numpy() for name in self.columns], axis=1)
        return [self._file(cell, f"row {row + self._first_row}, {self._name}") for row, cell in zip(rows, cells)]

    def _file(self, cell: Any, place: str) -> ImageFile:
        try:
            content = content_of(cell, self._feature)
        except NoImage as error:
            return ImageFile(None, None, f"at {place}", problem=f"it is {error}")
        if isinstance(content, np.ndarray):
            return ImageFile(None, None, f"at {place}", content)
        if not isinstance(content, str):
            path = (cell.get("path") or None) if isinstance(cell, dict) and content is not None else None
            return ImageFile(content, path, f"{path} ({place})" if path else f"at {place}")
        path = _below(self._base, content) if self._base and not is_address(content) else content
        shown = path if len(content) <= _LONG or os.path.lexists(path) else shortened(content)
        return ImageFile(None, path, f"{shown} ({place})")


def files_key(parts: Iterable[list[ImageFile]]) -> str:
    """Returns what changes with the size or the time of change of any file on this machine that the rows name; "" where the
    first row names none."""
    digest = hashlib.sha256()
    for number, files in enumerate(parts):
        first = files[0]
        if number == 0 and (first.path is None or first.data is not None or is_address(first.path)):
            return ""
        for file in files:
            with contextlib.suppress(OSError):  # what is not there shows when it is decoded
                status = os.stat(file.path or "")
                digest.update(f"{file.path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _below(base: str, path: str) -> str:
    return posixpath.join(base, path) if is_address(base) else os.path.join(base, path)


def kind_of(feature: object) -> str | None:
    """What the values of a `datasets` feature can hold as pixels: "image" (the type), "file" (bytes), "array", "wrapped" (one
    of these in a list or a struct), or what is an image under some names only: "text" (paths, base64; raw pixels, to be told of
    them) and "numbers" (lists); None: nothing."""
    if isinstance(feature, datasets.Image):
        return "image"
    if isinstance(feature, (datasets.Array2D, datasets.Array3D)):
        return "array"
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        kind = "numbers" if number_type(feature) else kind_of(feature.feature)
        return kind if kind in ("numbers", "text", None) else "wrapped"
    if isinstance(feature, dict):
        kind = kind_of(feature.get(_field(feature)))
        return "file" if set(feature) == {"bytes", "path"} else kind if kind in ("text", None) else "wrapped"
    dtype = getattr(feature, "dtype", "") if isinstance(feature, datasets.Value) else ""
    if re.fullmatch("(large_)?binary(_view)?", dtype):
        return "file"
    return "text" if re.match("(large_)?string|fixed", dtype) else None


def _field(struct: dict) -> str | None:
    """The name of the field that has the image: bytes, path, or the only one with bytes."""
    usual = [name for name in ("bytes", "path") if kind_of(struct.get(name)) in ("file", "text")]
    with_bytes = [name for name in struct if kind_of(struct[name]) in ("image", "file", "wrapped")]
    return usual[0] if usual else with_bytes[0] if len(with_bytes) == 1 else None


def content_of(cell: object, feature: object) -> bytes | str | np.ndarray | None:
    """Returns the bytes of an image file, its path or address, or values [H, W, C] or [H, W]; None where the cell is empty.

    Args:
        cell: of pyarrow's `to_pylist`; or an array of one row's values.
        feature: of its column, as `datasets` has it.

    Raises NoImage.
    """
    if isinstance(cell, np.ndarray):
        return _shaped(cell) if len(cell) else None
    if cell is None or cell in ("", []):
        return None
    if isinstance(cell, str):
        return _of_text(cell)
    if isinstance(cell, dict):
        if cell.get("bytes") is not None or isinstance(feature, datasets.Image):
            return content_of(cell["path"] if cell["bytes"] is None else cell["bytes"], None)
        field = "path" if cell.get("path") else _field(feature) if isinstance(feature, dict) else None
        if field is None:
            raise NoImage(f"a struct of {', '.join(cell)}", f"cell[{next(iter(cell))!r}]")
        return content_of(cell[field], feature[field])  # type: ignore[index]
    if not isinstance(cell, list):
        return _of_bytes(cell)
    if isinstance(feature, (datasets.Array2D, datasets.Array3D)) or (dtype := number_type(feature)):
        try:
            values = np.array(cell, feature.dtype if hasattr(feature, "dtype") else dtype)
            is_file = (
                values.ndim == 1 and _are_bytes(values) and bytes(values[:_SMALLEST].astype(np.uint8)).startswith(_SIGNATURES)
            )
            return values.astype(np.uint8).tobytes() if is_file else _shaped(values)
        except (TypeError, ValueError) as error:
            raise error if isinstance(error, NoImage) else NoImage("lists of different lengths, or without numbers") from None
    if len(cell) > 1:
        raise NoImage(f"a list of {len(cell)}", "cell[0]")
    return content_of(cell[0], feature.feature)  # type: ignore[attr-defined]


def _are_bytes(values: np.ndarray) -> bool:
    return values.dtype.kind in "iu" and len(values) > 0 and values.min() >= 0 and values.max() <= 255


def _shaped(values: np.ndarray, cell: str = "cell") -> np.ndarray:
    """An image of the values of one; `cell`: how Python writes them. Raises NoImage."""
    while values.ndim > 3 and len(values) == 1:
        values = values[0]
    if values.ndim in (2, 3):
        return values
    side, side_of_color = math.isqrt(values.size), math.isqrt(values.size // 3)
    if values.ndim == 1 and values.size >= _SMALLEST and side * side == values.size:
        return values.reshape(side, side)
    sizes = "x".join(map(str, values.shape))
    if values.ndim == 1 and values.size == 3 * side_of_color**2:
        raise NoImage(*three_planes(side_of_color, cell))
    raise NoImage(f"{sizes} numbers", f"np.reshape({cell}, (HEIGHT, WIDTH, CHANNELS))")


def three_planes(side: int, cell: str = "cell") -> tuple[str, str]:
    """What a `NoImage` says of the numbers of a color image, which may be in two orders."""
    turned = f"np.reshape({cell}, (3, {side}, {side})).transpose(1, 2, 0)"
    return f"{3 * side * side} numbers, plane by plane (or pixel by pixel: reshape them to ({side}, {side}, 3))", turned


def _of_bytes(data: Any) -> bytes:
    """The file in a cell of bytes, which may be base64."""
    return (
        _decoded(data.decode("ascii", "replace"))
        if data[:_HEAD].isascii() and _is_encoded(data[: 2 * _HEAD].decode("latin-1"))
        else data
    )


def _of_text(text: str) -> bytes | str | np.ndarray:
    try:
        if text.startswith("data:"):
            head, _, data = text.partition(",")
            return _decoded(data) if head.endswith(";base64") else unquote_to_bytes(data)
        if _is_encoded(data := text.removeprefix("base64,")):
            return _decoded(data)
    except binascii.Error as error:
        raise NoImage(f"damaged base64 ({error})") from None
    if text.startswith("file:/"):
        path = re.sub("^file:(//[^/]*)?", "", text)
        return path if os.path.exists(path) else unquote(path)
    if _NUMBERS.fullmatch(text):
        return _shaped(np.array(re.findall(r"\d+", text), np.int64), r"np.array(re.findall(r'\d+', cell), int)")
    if os.path.lexists(text[:_LONGEST]):
        return text
    for begins, (what, turned) in _OTHER_TEXTS.items():
        if text.lstrip().startswith(begins) and not text.lower().endswith(tuple(image_suffixes())):
            raise NoImage(what, turned)
    is_name = is_address(text) or max(map(len, text.split("/"))) <= _LONGEST_NAME
    if (len(text) > _LONGEST or not is_name or "\n" in text.strip()) and not os.path.lexists(text):
        raise NoImage(f"text that is neither a path nor an image ({shortened(text)})")
    if "\\" in text and not os.path.exists(text) and not is_address(text):
        return text.replace("\\", "/")  # written on Windows
    return text


def _is_encoded(text: str) -> bool:
    """Whether it is base64 of an image file; a path has a dot, or no bytes that begin one."""
    head = "".join(text[: 2 * _HEAD].split())[:_HEAD]
    if len(head) < _SMALLEST or not re.fullmatch(r"[\w+/-]+={0,2}", head, re.ASCII):
        return False
    with_pads = head[: len(head.rstrip("=")) // 4 * 4]
    return begins_an_image(_decoded(with_pads))


def _decoded(text: str) -> bytes:
    """Base64 of either alphabet, with or without pads and breaks of lines."""
    whole = "".join(unquote(text).split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    return base64.b64decode(whole + "=" * (-len(whole) % 4), validate=True)


def shortened(text: str) -> str:
    """At most 100 characters, for a message."""
    text = " ".join(text.split()) if len(text) <= _LONGEST else text
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 + 3 :]}"

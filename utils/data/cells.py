"""What is in a cell of a column, as pixels: an encoded image, the place of one, or its values, whatever is around it.

Around an image may be a list of one and a struct; bytes may be base64 or a data URI, a path a `file://` address, and values
numbers in a text. What could be meant in two ways is refused, with the line of Python that says which way.
"""

import base64
import binascii
import math
import os
import re
from urllib.parse import unquote, unquote_to_bytes

import numpy as np

from utils.data.decode import begins_an_image
from utils.data.stored_files import is_address

_LONGEST, _LONGEST_NAME = 4096, 255  # characters of a path, and of a file's name
_SHOWN = 100  # characters of a cell in a message
_SMALLEST = 16  # values of an image, and characters of base64 that tell its format
_HEAD = 64  # characters of base64 that are looked at
_NUMBERS = re.compile(rf"[\[(\s]*\d+(?:[\s,;]+\d+){{{_SMALLEST - 1},}}[\])\s]*")


class NoImage(ValueError):
    """What a cell has instead of an image. `turned`: the expression that makes an image of `cell`, or None."""

    def __init__(self, text: str, turned: str | None = None):
        super().__init__(text)
        self.turned = turned


def kind_of(feature: object) -> str | None:
    """What the values of a `datasets` feature can hold as pixels: "image" (the type), "file" (bytes), "array", "wrapped" (one
    of these in a list or a struct), or what is an image under some names only: "text" (paths, base64; raw pixels, to be told of
    them) and "numbers" (lists); None: nothing."""
    import datasets

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


def number_type(feature: object) -> str | None:
    """The type of the numbers in lists, lists of lists and so on; None for other features."""
    import datasets

    depth = 0
    while isinstance(feature, (datasets.List, datasets.LargeList)):
        feature, depth = feature.feature, depth + 1
    dtype = feature.dtype if depth and isinstance(feature, datasets.Value) else ""
    return dtype if re.fullmatch(r"u?int\d+|float\d+|bool", dtype) else None


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
    import datasets

    if cell is None or cell in ("", []) if not isinstance(cell, np.ndarray) else not len(cell):
        return None
    if isinstance(cell, np.ndarray):
        return _shaped(cell)
    if isinstance(cell, str):
        return _of_text(cell)
    if isinstance(cell, dict):
        if cell.get("bytes") is not None or isinstance(feature, datasets.Image):
            return cell["bytes"] if cell["bytes"] is not None else _of_text(cell["path"]) if cell["path"] else None
        field = "path" if cell.get("path") else _field(feature) if isinstance(feature, dict) else None
        if field is None:
            raise NoImage(f"a struct of {', '.join(cell)}", f"cell[{next(iter(cell))!r}]")
        return content_of(cell[field], feature[field])  # type: ignore[index]
    if not isinstance(cell, list):
        return cell  # type: ignore[return-value]
    if isinstance(feature, (datasets.Array2D, datasets.Array3D)) or (dtype := number_type(feature)):
        try:
            return _shaped(np.array(cell, feature.dtype if hasattr(feature, "dtype") else dtype))
        except (TypeError, ValueError) as error:
            raise error if isinstance(error, NoImage) else NoImage("lists of different lengths, or without numbers") from None
    if len(cell) > 1:
        raise NoImage(f"a list of {len(cell)}", "cell[0]")
    return content_of(cell[0], feature.feature)  # type: ignore[attr-defined]


def _shaped(values: np.ndarray) -> np.ndarray:
    while values.ndim > 3 and len(values) == 1:
        values = values[0]
    if values.ndim in (2, 3):
        return values
    side, side_of_color = math.isqrt(values.size), math.isqrt(values.size // 3)
    if values.ndim == 1 and values.size >= _SMALLEST and side * side == values.size:
        return values.reshape(side, side)
    sizes = "x".join(map(str, values.shape))
    if values.ndim == 1 and values.size == 3 * side_of_color**2:
        raise NoImage(*three_planes(side_of_color))
    raise NoImage(f"{sizes} numbers", "np.reshape(cell, (HEIGHT, WIDTH, CHANNELS))")


def three_planes(side: int) -> tuple[str, str]:
    """What a `NoImage` says of the numbers of a color image, which may be in two orders."""
    turned = f"np.reshape(cell, (3, {side}, {side})).transpose(1, 2, 0)"
    return f"{3 * side * side} numbers, plane by plane (or pixel by pixel: reshape them to ({side}, {side}, 3))", turned


def _of_text(text: str) -> bytes | str | np.ndarray:
    try:
        if text.startswith("data:"):
            head, _, data = text.partition(",")
            return _decoded(data) if head.endswith(";base64") else unquote_to_bytes(data)
        if _is_encoded(text):
            return _decoded(text)
    except binascii.Error as error:
        raise NoImage(f"damaged base64 ({error})") from None
    if text.startswith("file:/"):
        path = re.sub("^file:(//[^/]*)?", "", text)
        return path if os.path.exists(path) else unquote(path)
    if _NUMBERS.fullmatch(text):
        return _shaped(np.array(re.findall(r"\d+", text), np.int64))
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

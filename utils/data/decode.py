"""One image file -> pixels at the training resolution: decode, turn upright, convert, resize, crop.

Resizing is that of diffusers' `train_unconditional.py` (torchvision's `Resize` on a Pillow image): one side becomes that of
the resolution, the other one keeps the proportions, rounded down, and is no shorter than the resolution's; by Pillow's
antialiased bilinear filter.
"""

import contextlib
import dataclasses
import errno
import functools
import io
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from utils.core.errors import UserError
from utils.core.size import Size
from utils.data.bad_images import UndecodableImage
from utils.data.color_modes import background_color, is_deep, stack_planes, to_planes
from utils.data.stored_files import is_address, read_address

# What is worth telling once about a dataset; {n} is "1 image" or "3 images".
REMARKS = {
    "frames": "{n} with several frames (animated or paged): the first frame is used",
    "deep": "{n} with more than 8 bits per channel: scaled to 8 bits (--preserve_input_precision keeps 16)",
    "narrow": "{n} with 16 bits of which the upper three are empty (12-bit values?), so nearly black: store v * 16",
    "transparent": "{n} with transparency: composited on the background color",
    "rotated": "{n} turned upright by their EXIF orientation",
}
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # a large photograph
_EXIF_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_NO_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)  # nothing is there, whatever the machine does
_SHOWN = 23  # first bytes of what is no image, in a message
_PNG = b"\x89PNG\r\n\x1a\n"


@functools.cache
def _readable_formats() -> tuple[str, ...]:
    Image.init()
    with contextlib.suppress(ImportError):  # HEIC, which Pillow cannot read alone
        from pillow_heif import register_heif_opener  # type: ignore[import-not-found]

        register_heif_opener()
    usual = ("JPEG", "PNG")  # tried first
    return (*usual, *(name for name in Image.ID if name not in (*usual, "EPS")))  # EPS: Ghostscript would run the program


@functools.cache
def image_suffixes() -> frozenset[str]:
    """Returns the suffixes, such as .png, of the files that can be decoded."""
    readable = {*_readable_formats()} - {"BUFR", "GRIB", "HDF5", "MPEG", "WMF"}  # which Pillow names and cannot decode
    return frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in readable)


def begins_an_image(head: bytes) -> bool:
    """Whether the first bytes of a file are those of a format that can be decoded and has such."""
    known = [Image.OPEN[name][1] for name in _readable_formats()]
    return any(accept is not None and accept(head) is True for accept in known)


Range = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """An encoded image: its bytes or, where those are None, a path or an address; `name` is what an error message calls it.
    Or an image that is not encoded: an array [H, W, C] or [H, W]. Or none, and the `problem` why."""

    data: bytes | None
    path: str | None
    name: str
    array: np.ndarray | None = None
    problem: str = "the row has no image"

    @property
    def is_there(self) -> bool:
        return not (self.data is None and self.path is None and self.array is None)

    def source(self) -> Any:
        """Returns what Pillow opens. Raises what `stored_files.read_address` raises."""
        if self.data is None and self.path is not None and not is_address(self.path):
            return self.path
        return io.BytesIO(read_address(str(self.path)) if self.data is None else self.data)


@dataclasses.dataclass(frozen=True)
class ImagePreparation:
    """Options that turn an `ImageFile` into pixels; calling it gives the pixels.

    `channels` is 1 or 3, or any number for arrays; `max_value` 255 (uint8) or 65535 (uint16), `background` any opaque Pillow
    color.
    """

    size: Size
    channels: int
    center_crop: bool
    background: str
    max_value: int
    data_range: Range | None = None  # of arrays: the values of black and white

    def __call__(self, file: ImageFile) -> tuple[np.ndarray, list[str]]:
        """Pixels [channels, height, width] that just cover `size`, and the keys of `REMARKS` that apply.

        Raises:
            UndecodableImage: the file cannot be decoded or converted, and never will.
            UserError: naming the file, when the machine fails to read it: memory, permissions, a disk; or an array has values
                outside the range.
        """
        if file.array is not None:
            return self._prepare_array(file.array, file.name)
        if not file.is_there:
            raise UndecodableImage(file.name, None, file.problem)
        try:
            return self._prepare(file)
        except Image.DecompressionBombError:
            most = 2 * int(Image.MAX_IMAGE_PIXELS or 0)
            raise UndecodableImage(file.name, file.path, f"it has more than {most:,} pixels: make it smaller") from None
        except UnidentifiedImageError:
            raise UndecodableImage(file.name, file.path, f"not an image that Pillow can read{_instead(file)}") from None
        except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, struct.error, ... on damaged files
            text = (isinstance(error, OSError) and error.strerror) or str(error)  # without the path, which the name has
            reason = " ".join(text.split()) or type(error).__name__
            if _of_machine(error):
                raise UserError(
                    f"cannot read the image {file.name}: {reason}\ncheck the disk or the network, and start again"
                ) from error
            raise UndecodableImage(file.name, file.path, reason) from error

    def blank(self) -> np.ndarray:
        """Returns pixels [channels, *size] that keep the place of an image that cannot be decoded."""
        return np.zeros((self.channels, *self.size), np.uint8 if self.max_value == 255 else np.uint16)

    def _prepare(self, file: ImageFile) -> tuple[np.ndarray, list[str]]:
        with _opened(file, loaded=True) as image:
            remarks = ["frames"] if getattr(image, "is_animated", False) else []
            if (turn := _turn(image)) is not None:
                image = image.transpose(turn)
                remarks.append("rotated")
            if is_deep(image) and self.max_value == 255:
                remarks.append("deep")
            if image.mode.startswith("I") and 0 < int(np.asarray(image).max()) < 8192:
                remarks.append("narrow")
            if image.has_transparency_data:
                remarks.append("transparent")
            planes = to_planes(image, self.channels, background_color(self.background), self.max_value)
        return self._cut(stack_planes(self._resized(planes), self.channels, self.max_value)), remarks

    def _prepare_array(self, array: np.ndarray, name: str) -> tuple[np.ndarray, list[str]]:
        low, high = self.data_range or (0.0, 1.0)
        values = np.atleast_3d(array).astype(np.float64)
        if values.shape[2] != self.channels:
            raise UndecodableImage(name, None, f"it is {list(array.shape)}, and others have {self.channels} channels")
        if not np.isfinite(values).all():
            raise UndecodableImage(name, None, "it has values that are NaN or infinite")
        if values.min() < low or values.max() > high:
            raise UserError(
                f"{name} has values from {values.min():g} to {values.max():g}, outside of the range {low:g} to {high:g}\n"
                "set --data_range LOW HIGH, or mend the values"
            )
        levels = ((values - low) * (self.max_value / (high - low))).astype(np.float32)
        planes = self._resized([Image.fromarray(plane) for plane in levels.transpose(2, 0, 1)])
        pixels = np.rint(np.stack([np.asarray(plane) for plane in planes])).clip(0, self.max_value)
        deep = array.dtype.itemsize > 1 and (array.dtype.kind == "f" or high - low > 255) and self.max_value == 255
        return self._cut(pixels.astype(self.blank().dtype)), ["deep"] if deep else []

    def _resized(self, planes: list[Image.Image]) -> list[Image.Image]:
        height, width = resized_size(planes[0].height, planes[0].width, self.size)
        if planes[0].size == (width, height):
            return planes
        return [plane.resize((width, height), Image.Resampling.BILINEAR) for plane in planes]

    def _cut(self, pixels: np.ndarray) -> np.ndarray:
        """At the center where that is asked for."""
        if self.center_crop and pixels.shape[1:] != self.size:
            return cut([pixels], self.size, None)[0]
        return np.ascontiguousarray(pixels)


# Pixels of images, what was remarked, and (number of an image, arguments of `UndecodableImage`) of those that are blank.
Prepared = tuple[list[np.ndarray], list[str], list[tuple[int, tuple]]]


def prepared(prepare: ImagePreparation, files: Iterable[ImageFile]) -> Prepared:
    """Prepares each of `files`. Raises UserError as `prepare` does for a machine that fails."""
    images, remarks, errors = [], [], []
    for number, file in enumerate(files):
        try:
            pixels, remarked = prepare(file)
            remarks += remarked
        except UndecodableImage as error:
            pixels = prepare.blank()
            errors.append((number, error.args))
        images.append(pixels)
    return images, remarks, errors


@contextlib.contextmanager
def _opened(file: ImageFile, loaded: bool = False) -> Iterator[Image.Image]:
    """The image in a file. A PNG of which Pillow refuses something else than the pixels, such as a large text or damaged facts,
    is opened without it."""

    def opened(source: Any) -> Image.Image:
        image = Image.open(source, formats=_readable_formats())
        if loaded:
            image.load()
        return image

    source = file.source()
    try:
        image = opened(source)
    except Exception as error:
        if _of_machine(error):
            raise
        data = source.getvalue() if isinstance(source, io.BytesIO) else Path(source).read_bytes()
        pixels = _only_pixels(data) or _ended(data)
        if pixels is None:
            raise
        image = opened(io.BytesIO(pixels))
    with image:
        yield image


def _only_pixels(data: bytes) -> bytes | None:
    """A PNG without the chunks that change no pixel; None where there are none, or it is none."""
    if not data.startswith(_PNG):
        return None
    kept, place, end = [_PNG], len(_PNG), len(_PNG)
    while place < len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4])  # length, kind, data and checksum
        if data[place + 4 : place + 5].isupper() or data[place + 4 : place + 8] in (b"tRNS", b"eXIf"):
            kept.append(data[place:end])
        place = end
    found = b"".join(kept)
    return None if len(found) == len(data) else found


def _ended(data: bytes) -> bytes | None:
    """A JPEG with the marker of its end; None where pixels are missing, too, which depend on what is put before it."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    made = []
    for further in (b"", b"\xa5" * 64):
        with Image.open(io.BytesIO(data + further + b"\xff\xd9"), formats=("JPEG",)) as image:
            if "progressive" in image.info:  # of which a whole pass over the pixels may be missing
                return None
            made.append(np.asarray(image))
    return data + b"\xff\xd9" if np.array_equal(made[0], made[1]) else None


def _instead(file: ImageFile) -> str:
    """How what is no image begins, or that it has as many bytes as a square image has values; "" for what is elsewhere."""
    data = file.data
    for channels in (1, 3, 4):
        side = math.isqrt(len(data or b"") // channels)
        if side > 1 and len(data or b"") == channels * side * side:
            return f" (raw pixels? turn them: np.frombuffer(row, np.uint8).reshape({side}, {side}, {channels}))"
    if data is None and file.path is not None and not is_address(file.path):
        with contextlib.suppress(OSError), open(file.path, "rb") as opened:
            data = opened.read(2 * _SHOWN)
    if data is None:
        return ""
    return f" (it begins with {data.strip()[:_SHOWN]!r})" if data else " (it is empty)"


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What brings it upright, where its EXIF can be read."""
    try:
        return _TURNS.get(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception as error:  # SyntaxError, struct.error, ...: damaged EXIF says nothing of the pixels
        if _of_machine(error):
            raise
        return None


def _of_machine(error: Exception) -> bool:
    """Whether the same file may be read tomorrow: to do without it today would make another run of it."""
    failed = isinstance(error, (MemoryError, ConnectionError))
    return failed or getattr(error, "errno", None) not in (None, *_NO_PATH)


def header_of(file: ImageFile) -> tuple[str, int, int] | None:
    """Pillow's mode, height and width as stored (not yet turned by EXIF), without decoding; None where the file cannot be
    opened."""
    if file.array is not None:
        return "array", *file.array.shape[:2]
    try:
        with _opened(file) as image:
            return image.mode, image.height, image.width
    except Exception:  # Pillow's plugins raise OSError, SyntaxError, struct.error, ... on damaged files
        return None


def resized_size(height: int, width: int, size: Size) -> tuple[int, int]:
    """Returns height and width of an image that just covers `size`; for a square as torchvision's `Resize(side)` has them."""
    if height * size.width <= width * size.height:
        return size.height, int(size.height * width / height)
    return int(size.width * height / width), size.width


def cut(images: Sequence[np.ndarray], size: Size, crop: np.ndarray | None) -> np.ndarray:
    """[batch, channels, *size] of images [channels, height, width] that just cover `size`.

    `crop` [batch, 2] in [0, 1) chooses uniformly among all positions (top, left); None takes the center, rounded as torchvision
    does.
    """
    room = np.array([image.shape[1:] for image in images], np.int64) - np.array(size)
    # Half to even, like torchvision's Python round. In float32, u * (room + 1) could round up to room + 1.
    offsets = np.rint(room / 2) if crop is None else np.floor(np.asarray(crop, np.float64) * (room + 1))
    places = offsets.astype(np.int64).tolist()
    return np.stack([i[:, top : top + size.height, left : left + size.width] for i, (top, left) in zip(images, places)])


def describe_remarks(counts: dict[str, int]) -> list[str]:
    """Returns one sentence per remark that was made, in the order of `REMARKS`."""
    return [
        text.format(n=f"{counts[key]:,} image{'s' * (counts[key] != 1)}") for key, text in REMARKS.items() if counts.get(key)
    ]

"""A packed cache of latents: every image of a dataset encoded once into one flat file that later runs map into memory.

    <folder>/latents.bin    float32 [images, mirrors, parts, channels, height, width]
    <folder>/meta.json      these sizes, mean and spread by channel, images that cannot be decoded; written last

`mirrors` is 2 with --random_flip: the image, and the mirror image, whose latents are not the mirrored ones. `parts` is 2 where
the autoencoder has a spread beside the mean. Like the packed images, it appears under its name complete or not at all.

Before, it is <folder>.tmp, with a file `<number>.part` for each part of the images. All processes that need the latents encode
them: each takes parts that nobody has locked. A part is done when its file has the checksum of its latents. So what was done
before a kill is kept, if its checksum fits. The images of a batch are the same whoever encodes it.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch

from utils.core import randomness
from utils.core.errors import UserError, explained
from utils.core.size import describe_size
from utils.data.augmentation import to_unit_range
from utils.data.autoencoder import Autoencoder, Scale
from utils.data.bad_images import BadImage
from utils.data.cache import MappedFile, Progress, free_for, mark_used
from utils.data.dataset import ImageSet, cache_folder

LATENTS_VERSION = 1  # part of a cache's fingerprint: raise it when the same options give other files
FILE = "latents.bin"
_PARTS, _MOST_BATCHES = 256, 64  # parts of a dataset, about; batches of a part at most
_POLL_SECONDS = 0.2


class PackedLatents:
    """The latents of one cache folder, by rows of the dataset.

    Attributes:
        measured: mean and spread by channel, of all images.

    Raises OSError, ValueError or KeyError for a folder that is missing, incomplete or damaged.
    """

    def __init__(self, folder: Path):
        meta = json.loads((folder / "meta.json").read_text())
        self._shape = tuple(meta["shape"])
        if (folder / FILE).stat().st_size != 4 * math.prod(self._shape):
            raise ValueError(f"{folder / FILE} is not complete")
        self.folder, self.measured = folder, Scale(meta["mean"], meta["std"])
        self.bad_images = [BadImage(**bad) for bad in meta["bad_images"]]
        self._file = MappedFile(folder / FILE)

    @property
    def mirrors(self) -> bool:
        """Whether it has mirror images too."""
        return self._shape[1] == 2

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self._shape[3:]
        return channels, height, width

    def fetch(self, rows: np.ndarray, seed: int, sample_numbers: torch.Tensor | None = None) -> np.ndarray:
        """Mean and, where there is one, spread: float32 [batch, 1 or 2, C, H, W] of `rows` int64 [batch]; with
        `sample_numbers` int64 [batch] of those that are mirrored, where any are, of the mirror image."""
        mirrored = np.zeros(len(rows), np.int64)
        if self.mirrors and sample_numbers is not None:
            mirrored = (randomness.uniform(seed, "flip", sample_numbers)[:, 0] < 0.5).numpy().astype(np.int64)
        batch = self._file.array(np.float32, self._shape)[rows, mirrored]
        self._file.forget_pages()
        return batch


def draw_latents(stored: torch.Tensor, seed: int, purpose: str, sample_numbers: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W]: the mean, plus noise of the spread where there is one; a function of the seed and the sample's number.
    `stored` is of `PackedLatents.fetch`, on the device of the sample numbers int64 [B]."""
    if stored.shape[1] == 1:
        return stored[:, 0]
    noise = randomness.normal(seed, purpose, sample_numbers, tuple(stored.shape[2:]))
    return stored[:, 0] + stored[:, 1] * noise


def pack_latents(
    images: ImageSet,
    autoencoder: Autoencoder,
    *,
    cache_dir: str | None,
    mirrors: bool,
    device: torch.device,
    progress: Progress | None = None,
) -> PackedLatents:
    """The latents of all `images`. Where no cache has them, they are encoded first, by all processes that call this.

    `progress` is called with (done, total) of all processes meanwhile, first with what was done before. Raises UserError for a
    disk that is full or cannot be written, and for an autoencoder that gives NaN.
    """
    made_of = [LATENTS_VERSION, images.fingerprint, autoencoder.fingerprint(), mirrors]
    folder = cache_folder(cache_dir) / hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]
    encoding = _Encoding(folder, images, autoencoder, mirrors, device, progress)
    with explained(f"cannot write the latents {folder}", "choose another disk with --cache_dir", OSError):
        latents = _opened(folder) or encoding.finished()
    images.bad_images.learn(latents.bad_images)
    mirrored = f"mirror images: {'yes' if mirrors else 'no'}"
    about = {"data": images.source, "images": f"latents of {len(images):,} images", "options": mirrored}
    mark_used(folder, about)
    images.notes.append(f"latents: {describe_size((folder / FILE).stat().st_size)} in {folder}")
    return latents


def _opened(folder: Path) -> PackedLatents | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return PackedLatents(folder)
    return None


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[IO | None]:
    """The file, locked until the block ends or the process dies; None where another process has it and `how` does not wait."""
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            yield None
        else:
            yield file


@dataclasses.dataclass
class _Encoding:
    """One process's share in the encoding of `images` into `folder`; see the top of the file."""

    folder: Path
    images: ImageSet
    autoencoder: Autoencoder
    mirrors: bool
    device: torch.device
    progress: Progress | None

    def __post_init__(self) -> None:
        self._draft = self.folder.with_name(f"{self.folder.name}.tmp")
        self._shape = (1 + self.mirrors, 1 + self.autoencoder.has_spread, *self.autoencoder.latent_shape)  # of an image
        batches = max(1, min(_MOST_BATCHES, len(self.images) // (_PARTS * self.autoencoder.at_once)))
        self._size = batches * self.autoencoder.at_once  # images of a part
        self._count = -(-len(self.images) // self._size)  # of parts

    def finished(self) -> PackedLatents:
        """The latents, once all parts are there. The lock is shared by those who encode: it says that the draft is in use."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = Path(f"{self.folder}.lock")
        with _locked(lock, fcntl.LOCK_SH):
            if latents := _opened(self.folder):
                return latents
            self._encode_parts()
        with _locked(lock, fcntl.LOCK_EX):  # all have left the draft
            if _opened(self.folder) is None:
                self._close()
            return PackedLatents(self.folder)

    def _encode_parts(self) -> None:
        self._draft.mkdir(exist_ok=True)
        size = 4 * len(self.images) * math.prod(self._shape)
        with open(self._draft / FILE, "ab") as file:
            if file.tell() != size:
                free_for(self._draft, size)
                file.truncate(size)
        left = list(range(self._count))
        with open(self._draft / FILE, "r+b") as file, self.autoencoder.on(self.device):
            while left:
                for part in list(left):
                    with _locked(self._draft / f"{part}.part", fcntl.LOCK_EX | fcntl.LOCK_NB) as record:
                        if record is not None:
                            if not self._is_done(part, record, file):
                                self._encode_part(part, record, file)
                            left.remove(part)
                if left:  # others encode them, or die
                    self._tell()
                    time.sleep(_POLL_SECONDS)

    def _rows(self, part: int) -> range:
        return range(part * self._size, min((part + 1) * self._size, len(self.images)))

    def _is_done(self, part: int, record: IO, file: IO) -> bool:
        record.seek(0)
        try:
            checksum = json.loads(record.read())["checksum"]
        except (ValueError, KeyError):
            return False
        rows, each = self._rows(part), 4 * math.prod(self._shape)
        file.seek(rows.start * each)
        return zlib.crc32(file.read(len(rows) * each)) == checksum

    def _encode_part(self, part: int, record: IO, file: IO) -> None:
        record.truncate(0)
        rows, encoded = self._rows(part), []
        self._tell()
        for start in rows[:: self.autoencoder.at_once]:
            batch = np.arange(start, min(start + self.autoencoder.at_once, rows.stop))
            encoded.append(self._encoded(batch))
            self._tell(int(batch[-1]) + 1 - rows.start)
        latents = torch.cat(encoded)
        values = latents.numpy().data
        file.seek(rows.start * 4 * math.prod(self._shape))
        file.write(values)
        file.flush()
        os.fsync(file.fileno())
        wide = latents[:, 0].double()
        spread = wide[:, 1].square() if self.autoencoder.has_spread else torch.zeros_like(wide[:, 0])
        found = {
            "checksum": zlib.crc32(values),
            "sum": wide[:, 0].sum((0, 2, 3)).tolist(),
            "square": (wide[:, 0].square() + spread).sum((0, 2, 3)).tolist(),
            "bad_images": [dataclasses.asdict(bad) for bad in self.images.bad_images.values()],
        }
        record.write(json.dumps(found))
        record.flush()
        os.fsync(record.fileno())

    def _encoded(self, rows: np.ndarray) -> torch.Tensor:
        """float32 [B, mirrors, parts, C, H, W], on the host."""
        pixels = torch.from_numpy(self.images.fetch(rows, np.full((len(rows), 2), 0.5, np.float32)))
        clean = to_unit_range(pixels.to(self.device), self.images.max_value)
        turned = [clean, clean.flip(-1)][: self._shape[0]]
        encoded = torch.stack([self.autoencoder.encode(each) for each in turned], 1)
        if not encoded.isfinite().all():
            raise UserError(
                f"the autoencoder gives values that are not finite, for an image of rows {rows[0]} to {rows[-1]}\n"
                "check --vae and the images"
            )
        return encoded.float().cpu().contiguous()

    def _tell(self, of_this_part: int = 0) -> None:
        done = [int(path.stem) for path in self._draft.glob("*.part") if path.stat().st_size]
        if self.progress is not None:
            self.progress(sum(len(self._rows(part)) for part in done) + of_this_part, len(self.images))

    def _close(self) -> None:
        """Makes the draft, whose parts are all done, the cache."""
        records = [json.loads((self._draft / f"{part}.part").read_text()) for part in range(self._count)]
        values = len(self.images) * math.prod(self.autoencoder.latent_shape[1:])
        mean, square = (
            torch.tensor([record[name] for record in records], dtype=torch.float64).sum(0) / values
            for name in ("sum", "square")
        )
        std = (square - mean.square()).clamp(min=0).sqrt()
        bad_images = {bad["row"]: bad for record in records for bad in record["bad_images"]}
        meta = {
            "shape": [len(self.images), *self._shape],
            "mean": mean.tolist(),
            "std": [value or 1.0 for value in std.tolist()],  # a channel that is the same everywhere stays as it is
            "bad_images": [bad_images[row] for row in sorted(bad_images)],
        }
        (self._draft / "meta.json").write_text(json.dumps(meta, indent=1))
        shutil.rmtree(self.folder, ignore_errors=True)  # where it is damaged
        os.rename(self._draft, self.folder)
        for part in range(self._count):
            (self.folder / f"{part}.part").unlink()

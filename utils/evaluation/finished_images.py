"""A folder of finished images, as evaluation takes it: all of one size, read when their turn comes."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from utils.core.errors import UserError
from utils.core.files import read_json
from utils.core.size import Size
from utils.data.decode import ImageFile, ImagePreparation, UndecodableImage, header_of
from utils.data.file_tree import FileTree
from utils.evaluation.extractor_base import eight_bit

_GRAY_MODES = ("1", "L", "LA", "I", "I;16", "F")


class FinishedImages:
    """The images below `folder`, in the order of their names, hidden ones left out; of a folder of generate.py those that it
    numbered.

    Attributes:
        shape: (channels, height, width), read from the headers: 1 channel where all images are gray, else 3; with alpha where
            generate.py wrote it or `channels` asks for it.

    Raises UserError where there is no such folder, no image in it, one that cannot be opened, or images of several sizes.
    """

    def __init__(self, folder: Path, channels: int | None = None):
        if not folder.is_dir():
            what = "is no folder\nunpack it, or give a folder" if folder.exists() else "no such folder\ncheck the path"
            raise UserError(f"--images {folder}: {what}")
        tree = FileTree(str(folder), opens_archives=False)
        tree.add_folder(str(folder))
        files = [Path(tree.paths[name]) for name in tree.images()]
        self.settings = read_json(folder / "generate.json")  # how generate.py made them; empty for other folders
        if self.settings:
            files = sorted(path for path in folder.iterdir() if re.fullmatch(r"\d{6,}\.(png|npy)", path.name))
        if not files:
            raise UserError(f"--images {folder} has no images\ncheck the path")
        self.folder, self.files, modes = folder, files, set()
        sizes: dict[tuple[int, ...], Path] = {}
        for path in files:
            header = _header(path)
            if header is None:
                raise UserError(f"{folder}: {path.name} cannot be decoded\nrepair or remove this file")
            mode, *size = header
            modes.add(mode)
            sizes.setdefault(tuple(size), path)
            if len(sizes) > 1:
                named = ", ".join(f"{path.name} {height}x{width}" for (height, width), path in sizes.items())
                raise UserError(f"{folder} has images of different sizes: {named}\nuse images of one size")
        ((height, width),) = sizes
        if self.settings and len(modes) == 1:
            (mode,) = modes
            channels = channels or (mode if isinstance(mode, int) else {"LA": 2, "RGBA": 4}.get(mode))
        self.shape = (channels or (1 if modes <= {*_GRAY_MODES} else 3), height, width)

    def __len__(self) -> int:
        return len(self.files)

    def source(self, device: torch.device | str) -> Callable[[torch.Tensor], torch.Tensor]:
        """For `Evaluation.measure`. It raises UserError naming an image that cannot be decoded."""
        channels, *size = self.shape
        prepare = ImagePreparation(Size(*size), channels, center_crop=True, background="white", max_value=255)

        def make_images(numbers: torch.Tensor) -> torch.Tensor:
            images = []
            for path in (self.files[number] for number in numbers.tolist()):
                if path.suffix == ".npy":
                    array = np.load(path).transpose(2, 0, 1)
                    images.append(eight_bit(array, np.iinfo(array.dtype).max))
                    continue
                try:
                    images.append(torch.tensor(prepare(ImageFile(None, str(path), str(path)))[0]))
                except UndecodableImage as error:
                    raise UserError(f"cannot decode the image {path}: {error.args[2]}\nrepair or remove this file") from None
            return torch.stack(images).to(device)

        return make_images


def _header(path: Path) -> tuple[str | int, int, int] | None:
    """Mode, or the channels of an array, then height and width; None where the file cannot be opened."""
    if path.suffix != ".npy":
        return header_of(ImageFile(None, str(path), str(path)))
    try:
        height, width, channels = np.load(path, mmap_mode="r").shape
    except (OSError, ValueError):
        return None
    return channels, height, width

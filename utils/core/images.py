"""Pictures of images: PNG files that are complete or absent, and grids that a person can read."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from utils.core.files import whole_file

SHOWN_SIZE = 64  # pixels: smaller images are enlarged in grids to about this
CAPTION_HEIGHT = 18
BACKGROUND = 208  # light gray: the edges of white and of black images show
PNG_END = b"IEND\xae\x42\x60\x82"


def to_pil(image: torch.Tensor) -> Image.Image:
    """PIL's image of uint8 [1 or 3, H, W] (modes L, RGB) or uint16 [1, H, W] (I;16). Raises ValueError."""
    channels = {torch.uint8: (1, 3), torch.uint16: (1,)}.get(image.dtype, ())
    if image.ndim != 3 or image.shape[0] not in channels:
        raise ValueError(f"expected uint8 [1 or 3, H, W] or uint16 [1, H, W], got {image.dtype} {list(image.shape)}")
    pixels = image.permute(1, 2, 0).cpu().contiguous().numpy()
    return Image.fromarray(pixels[:, :, 0] if image.shape[0] == 1 else pixels)


def save_png(image: Image.Image, path: Path | str) -> None:
    """Writes `path` complete or not at all, so that whatever is found after a kill is whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as draft:
        image.save(draft, format="PNG")


def is_complete_png(path: Path | str, size: tuple[int, int]) -> bool:
    """Returns whether `path` is an image of `size` (width, height) that is whole: every checksum holds."""
    try:
        content = Path(path).read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            image.verify()  # the checksum of every PNG chunk but the last, which load() would not look at
            return image.size == size and content.endswith(PNG_END)
    except (OSError, SyntaxError):  # Pillow reports a broken PNG chunk as a SyntaxError
        return False


def image_suffix(channels: int, bits: int) -> str:
    """Returns the suffix of the files of such images: .png, or .npy where Pillow writes none of that kind."""
    return ".png" if channels == 1 or (channels == 3 and bits == 8) else ".npy"


def save_image(image: torch.Tensor, path: Path) -> None:
    """Writes integers [C, H, W] complete or not at all: a PNG, or at a `path` that ends in .npy an array [H, W, C]."""
    if path.suffix == ".png":
        return save_png(to_pil(image), path)
    with whole_file(path) as draft, open(draft, "wb") as file:
        np.save(file, image.permute(1, 2, 0).contiguous().numpy())


def read_image(path: Path) -> torch.Tensor:
    """Returns integers [C, H, W] of a file of `save_image`."""
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path)).permute(2, 0, 1)
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def is_complete_image(path: Path, shape: tuple[int, int, int]) -> bool:
    """Returns whether `save_image` wrote an image of `shape` (C, H, W) to `path`, and it is whole."""
    if path.suffix == ".png":
        return is_complete_png(path, (shape[2], shape[1]))
    try:
        return np.load(path).shape == (*shape[1:], shape[0])
    except (OSError, ValueError, EOFError):
        return False


def make_grid(images: torch.Tensor, columns: int | None = None, padding: int = 2) -> Image.Image:
    """uint8 [n, C, H, W] as one RGB image, row by row; by default about as many columns as rows. Small images are enlarged by
    a whole factor to about 64 pixels. Of other numbers of channels than 1 and 3 each is shown in gray, beside the one before
    it."""
    if images.shape[1] not in (1, 3):
        images = images.transpose(1, 2).flatten(2)[:, None]  # [n, 1, H, C W]
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    factor = max(1, round(SHOWN_SIZE / min(images.shape[-2:])))
    height, width = (side * factor + padding for side in images.shape[-2:])
    grid = Image.new("RGB", (columns * width + padding, rows * height + padding), (BACKGROUND,) * 3)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        tile = to_pil(image).resize((width - padding, height - padding), Image.Resampling.NEAREST)
        grid.paste(tile.convert("RGB"), (padding + column * width, padding + row * height))
    return grid


def side_by_side(
    left: torch.Tensor, right: torch.Tensor, captions: tuple[str, str] = ("raw", "EMA"), columns: int | None = None
) -> Image.Image:
    """Shows two sets of images uint8 [n, C, H, W] as two grids with a caption each, to be compared place by place."""
    grids = [_captioned(make_grid(images, columns), [caption]) for images, caption in zip((left, right), captions)]
    gap = CAPTION_HEIGHT
    both = Image.new("RGB", (grids[0].width + gap + grids[1].width, max(grid.height for grid in grids)), (BACKGROUND,) * 3)
    both.paste(grids[0], (0, 0))
    both.paste(grids[1], (grids[0].width + gap, 0))
    return both


def denoising_path(path: torch.Tensor, captions: Sequence[str]) -> Image.Image:
    """The way from noise to image, uint8 [n, T, C, H, W]: a row per image, a column with a caption per timestep."""
    grid = make_grid(path.flatten(0, 1), columns=path.shape[1])
    return _captioned(grid, captions)


def _captioned(grid: Image.Image, captions: Sequence[str]) -> Image.Image:
    """`grid` under a line of captions, each centered over its equal share of the width."""
    page = Image.new("RGB", (grid.width, grid.height + CAPTION_HEIGHT), (BACKGROUND,) * 3)
    page.paste(grid, (0, CAPTION_HEIGHT))
    draw = ImageDraw.Draw(page)
    for number, caption in enumerate(captions):
        center = grid.width * (number + 0.5) / len(captions)
        draw.text((center, CAPTION_HEIGHT / 2), caption, fill=(0, 0, 0), font=ImageFont.load_default(), anchor="mm")
    return page

"""Four small data sets, made on the spot, in the forms in which people have them: saved by `datasets`, or folders of images."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CHANNELS = {"digits": 1, "shapes": 3, "textures": 3, "letters": 3}
OF_OTHER_KINDS = {"stickers": 3, "waves": 5}  # channels of data that only some healthy runs have
FOLDERS = ("shapes", "textures", "stickers")  # of images, with one folder for each class; the others are saved by `datasets`
ARRAYS = "arrays.npz"
TEXT = ("digits", "letters")  # of which mirrored images are a fault
TURNED = 6  # the EXIF orientation of a camera held upright


def flags_of(name: str, folder: Path) -> dict:
    """The flags that name the data set `name` in `folder`."""
    if name == "waves":
        return {"dataset_name": folder / ARRAYS, "data_range": [-1, 1]}
    return {"train_data_dir" if name in FOLDERS else "dataset_name": folder}


def make_dataset(name: str, folder: Path, imbalanced: bool = False) -> None:
    """Labeled images; of the imbalanced ones 95 % are of one class."""
    if name == "waves":
        folder.mkdir()
        np.savez(folder / ARRAYS, **waves())
        return
    images, labels = MAKERS[name]()
    if imbalanced:
        most, rest = np.flatnonzero(labels == 1), np.flatnonzero(labels != 1)
        chosen = np.concatenate([most, rest[: max(len(most) // 19, 1)]])
        images, labels = [images[i] for i in chosen], labels[chosen]
    (save_as_folders if name in FOLDERS else save_by_datasets)(images, labels, folder)


def save_as_folders(images: list[Image.Image], labels: np.ndarray, folder: Path) -> None:
    """PNG, or JPEG where the images are not square, as those of a camera; every third of these is stored lying on its side."""
    for number, (image, label) in enumerate(zip(images, labels)):
        place = folder / f"class{label}"
        place.mkdir(parents=True, exist_ok=True)
        if image.width == image.height:
            image.save(place / f"{number:05d}.png")
            continue
        exif = Image.Exif()
        if number % 3 == 0:
            image, exif[0x0112] = image.transpose(Image.Transpose.ROTATE_90), TURNED
        image.save(place / f"{number:05d}.jpg", quality=92, exif=exif)


def save_by_datasets(images: list[Image.Image], labels: np.ndarray, folder: Path) -> None:
    import datasets

    names = [str(label) for label in range(labels.max() + 1)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    datasets.Dataset.from_dict({"image": images, "label": labels.tolist()}, features=features).save_to_disk(folder)


def digits() -> tuple[list[Image.Image], np.ndarray]:
    """The first 600 of scikit-learn's handwritten digits, 8x8, gray."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    pixels = (scans.images[:600] * (255 / 16)).round().astype(np.uint8)
    return [Image.fromarray(scan) for scan in pixels], scans.target[:600]


def shapes() -> tuple[list[Image.Image], np.ndarray]:
    """A disc, a square or a cross of one color on another, 16x16."""
    chance, labels = np.random.default_rng(0), np.arange(480) % 3
    y, x = np.mgrid[0:16, 0:16]
    images = []
    for label in labels:
        back, front = chance.uniform(0, 255, (2, 3))
        cx, cy, radius = *chance.uniform(4, 12, 2), chance.uniform(2.5, 5)
        across, along = abs(x - cx), abs(y - cy)
        inside = (
            np.hypot(across, along) < radius,
            np.maximum(across, along) < radius,
            (np.minimum(across, along) < radius / 3) & (np.maximum(across, along) < radius),
        )[label]
        images.append(Image.fromarray(np.where(inside[..., None], front, back).astype(np.uint8)))
    return images, labels


def textures() -> tuple[list[Image.Image], np.ndarray]:
    """Sums of waves in random colors that fill the frame, 24 to 45 pixels wide and high, not square; coarse to fine."""
    chance, labels = np.random.default_rng(1), np.arange(420) % 3
    images = []
    for label in labels:
        height, width = chance.integers(24, 45, 2)
        width += height == width
        y, x = np.mgrid[0:height, 0:width]
        pixels = np.full((height, width, 3), chance.uniform(80, 170, 3))
        for _ in range(5):
            angle, phase = chance.uniform(0, 2 * np.pi, 2)
            frequency = 2 * np.pi / chance.uniform(*((24, 48), (12, 24), (6, 12))[label])
            wave = np.sin(frequency * (np.cos(angle) * x + np.sin(angle) * y) + phase)
            pixels += wave[..., None] * chance.normal(0, 35, 3)
        images.append(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))
    return images, labels


def letters() -> tuple[list[Image.Image], np.ndarray]:
    """One of ten letters, drawn in a color on a light ground, 20x20."""
    chance, labels = np.random.default_rng(2), np.arange(500) % 10
    images = []
    for label in labels:
        ground, ink = chance.integers(170, 256, 3), chance.integers(0, 120, 3)
        image = Image.new("RGB", (20, 20), tuple(map(int, ground)))
        place, size = tuple(chance.uniform(1, 6, 2)), int(chance.integers(11, 16))
        ImageDraw.Draw(image).text(place, "ABCDEFGHJK"[label], tuple(map(int, ink)), ImageFont.load_default(size))
        images.append(image)
    return images, labels


def stickers() -> tuple[list[Image.Image], np.ndarray]:
    """The shapes, 16x16, on a transparent ground."""
    images, labels = shapes()
    cut = []
    for pixels in map(np.asarray, images):
        inside = (pixels != pixels[0, 0]).any(-1)
        cut.append(Image.fromarray(np.dstack([pixels, np.where(inside, 255, 0).astype(np.uint8)])))
    return cut, labels


def waves() -> dict[str, np.ndarray]:
    """Arrays of floats, 18x18 in five channels: three long or three short waves that move on from channel to channel."""
    chance, labels = np.random.default_rng(3), np.arange(480) % 2
    y, x = np.mgrid[0:18, 0:18, 0:1][:2]
    images = np.zeros((480, 18, 18, 5))
    for _ in range(3):
        angle, phase, height = (chance.uniform(*of, (480, 1, 1, 1)) for of in ((0, np.pi), (0, 2 * np.pi), (0.1, 0.33)))
        length = chance.uniform(*np.array([(5, 7), (14, 18)])[labels].T)[:, None, None, None]
        along = (np.cos(angle) * x + np.sin(angle) * y) * 2 * np.pi / length
        images += height * np.sin(along + phase + 0.3 * np.arange(5))
    return {"images": images.astype(np.float32), "labels": labels}


MAKERS: dict[str, Callable] = {
    **{"digits": digits, "shapes": shapes, "textures": textures, "letters": letters, "stickers": stickers}
}

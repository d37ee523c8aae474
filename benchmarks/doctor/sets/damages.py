"""Faults of data sets: functions that damage a healthy set at one of three strengths; sets.toml has what names each.

Written down before the checks of the data were.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.doctor.sets import pictures as healthy
from benchmarks.doctor.sets.pictures import Pictures, Rng

Damage = Callable[[Pictures, Rng, int], Pictures]  # the set, what is random, the strength 0, 1 or 2


def each(
    pictures: Pictures, change: Callable[[np.ndarray], np.ndarray], share: float = 1.0, rng: Rng | None = None
) -> Pictures:
    """`change` of a random share of the images."""
    chosen = np.ones(len(pictures.images), bool) if rng is None else rng.random(len(pictures.images)) < share
    images = [change(image) if c else image for image, c in zip(pictures.images, chosen)]
    return replace(pictures, images=images)


def written(image: np.ndarray, change: Callable[[np.ndarray], None]) -> np.ndarray:
    copy = image.copy()
    change(copy)
    return copy


# ---- channels


def dead_channel(pictures, rng, strength):
    def kill(image):
        image[..., 2] = 0

    return each(pictures, lambda image: written(image, kill), (0.1, 0.5, 1.1)[strength], rng)


def dead_everywhere(pictures, rng, strength):
    channel, value = ((0, 0), (2, 0), (1, 255))[strength]

    def kill(image):
        image[..., channel] = value

    return each(pictures, lambda image: written(image, kill))


def duplicated_channel(pictures, rng, strength):
    def copy(image):
        image[..., 2] = image[..., 1]

    return each(pictures, lambda image: written(image, copy), (0.1, 0.5, 1.1)[strength], rng)


def gray_as_rgb(pictures, rng, strength):
    def gray(image):
        image[:] = image.mean(-1, keepdims=True)

    return each(pictures, lambda image: written(image, gray), (0.9, 0.99, 1.1)[strength], rng)


# ---- constant regions and common patterns


def bars(pictures, rng, strength):
    """Letterbox, black, in all images."""

    def paint(image):
        thick = max(1, round(len(image) * (0.06, 0.12, 0.25)[strength]))
        image[:thick], image[-thick:] = 0, 0

    return each(pictures, lambda image: written(image, paint))


def some_bars(pictures, rng, strength):
    """Pillars beside a share of the images."""

    def paint(image):
        thick = image.shape[1] // 8
        image[:, :thick], image[:, -thick:] = 0, 0

    return each(pictures, lambda image: written(image, paint), (0.1, 0.3, 0.8)[strength], rng)


def frames(pictures, rng, strength):
    def paint(image):
        thick = max(1, (1, 2, 4)[strength] * len(image) // 32)
        image[:thick], image[-thick:], image[:, :thick], image[:, -thick:] = 255, 255, 255, 255

    return each(pictures, lambda image: written(image, paint))


def cut_short(pictures, rng, strength):
    """The end of some files is missing, and the decoder fills it with gray."""

    def paint(image):
        image[int(len(image) * rng.uniform(0.3, 0.9)) :] = 128

    return each(pictures, lambda image: written(image, paint), (0.02, 0.1, 0.3)[strength], rng)


def blend(image: np.ndarray, mask: Image.Image, color, opacity: float) -> np.ndarray:
    share = np.asarray(mask, float)[..., None] / 255 * opacity
    pixels = image if image.ndim == 3 else image[..., None]
    color = np.array(color if image.ndim == 3 else color[:1], float)
    return np.rint(pixels * (1 - share) + color * share).astype(np.uint8).reshape(image.shape)


def stamp(image: np.ndarray, text: str, place: tuple[float, float], height: float) -> Image.Image:
    """The mask of a text in the shape of the image; places and heights as shares of the side."""
    side = image.shape[0]
    mask = Image.new("L", (image.shape[1], side), 0)
    font = healthy.fonts(max(6, round(height * side)))[0]
    ImageDraw.Draw(mask).text((place[0] * side, place[1] * side), text, 255, font, anchor="mm")
    return mask


def watermark(pictures, rng, strength):
    opacity = (0.15, 0.3, 0.5)[strength]
    return each(pictures, lambda image: blend(image, stamp(image, "STOCK", (0.5, 0.5), 0.25), (255, 255, 255), opacity))


def some_watermarks(pictures, rng, strength):
    share = (0.2, 0.5, 0.8)[strength]
    mark = lambda image: blend(image, stamp(image, "(c) me", (0.5, 0.85), 0.2), (255, 255, 255), 0.6)  # noqa: E731
    return each(pictures, mark, share, rng)


def logo(pictures, rng, strength):
    """Opaque, in a corner."""
    size = (0.1, 0.18, 0.3)[strength]

    def paint(image):
        side = len(image)
        wide = max(3, round(size * side))
        mask = Image.new("L", (image.shape[1], side), 0)
        ImageDraw.Draw(mask).ellipse((side - 1 - wide, 1, side - 2, wide), 255)
        image[:] = blend(image, mask, (220, 30, 30), 1.0)
        core = max(1, wide // 3)
        image[1 + core : 1 + 2 * core, side - 1 - 2 * core : side - 1 - core] = 255

    return each(pictures, lambda image: written(image, paint))


def date_stamps(pictures, rng, strength):
    """Other digits each time, at one place, in a share of the images."""

    def mark(image):
        text = f"{rng.integers(1, 13):02}'{rng.integers(95, 100)}"
        return blend(image, stamp(image, text, (0.68, 0.85), 0.22), (255, 140, 20), 1.0)

    return each(pictures, mark, (0.4, 0.7, 1.1)[strength], rng)


def dust(pictures, rng, strength):
    """A dark spot on the sensor."""

    def mark(image):
        mask = Image.new("L", (image.shape[1], image.shape[0]), 0)
        x, y, r = image.shape[1] * 0.3, image.shape[0] * 0.4, max(1.5, len(image) / 20)
        ImageDraw.Draw(mask).ellipse((x - r, y - r, x + r, y + r), 255)
        return blend(image, mask, (0, 0, 0), (0.35, 0.6, 0.9)[strength])

    return each(pictures, mark)


def dead_pixels(pictures, rng, strength):
    spots = [(5, 7), (20, 13), (11, 25), (28, 3), (17, 18), (3, 29), (25, 22), (9, 10)][: (1, 3, 8)[strength]]

    def paint(image):
        for y, x in spots:
            image[y * len(image) // 32, x * image.shape[1] // 32] = 255

    return each(pictures, lambda image: written(image, paint))


# ---- a second population


def dark_half(pictures, rng, strength):
    factor = (0.5, 0.25, 0.08)[strength]
    return each(pictures, lambda image: (image * factor).astype(np.uint8), 0.5, rng)


def washed_out(pictures, rng, strength):
    factor = (0.5, 0.2, 0.08)[strength]
    return each(pictures, lambda image: (128 + (image - 128.0) * factor).astype(np.uint8), 0.4, rng)


def negatives(pictures, rng, strength):
    return each(pictures, lambda image: 255 - image, (0.05, 0.2, 0.5)[strength], rng)


def others(pictures, strength, rng, strangers: list[np.ndarray], shares=(0.02, 0.1, 0.4)) -> Pictures:
    """Strangers in the places of a share of the images."""
    images = list(pictures.images)
    for i in np.flatnonzero(rng.random(len(images)) < shares[strength]):
        stranger = Image.fromarray(strangers[rng.integers(len(strangers))]).convert("L" if images[i].ndim == 2 else "RGB")
        images[i] = np.asarray(stranger.resize(images[i].shape[1::-1], Image.Resampling.NEAREST))
    return replace(pictures, images=images)


def masks(pictures, rng, strength):
    """Binary masks among the images that they belong to."""
    light = [np.asarray(Image.fromarray(image).convert("L")) for image in pictures.images]
    made = [(255 * (image > np.median(image))).astype(np.uint8) for image in light]
    return others(pictures, strength, rng, made)


def drawings(pictures, rng, strength):
    return others(pictures, strength, rng, healthy.line_art(rng).images)


def static(pictures, rng, strength):
    """Noise, as of files read wrongly."""
    return others(pictures, strength, rng, healthy.noise(rng).images)


def pages_of_text(pictures, rng, strength):
    return others(pictures, strength, rng, healthy.words(rng).images[:100])


def blanks(pictures, rng, strength):
    """Gray images that stand for those that are missing."""
    side = pictures.images[0].shape[0]
    return others(pictures, strength, rng, [np.full((side, side), 204, np.uint8)], (0.015, 0.1, 0.4))


def thumbnails(pictures, rng, strength):
    """A share of the files far below the resolution."""
    small = lambda image: np.asarray(Image.fromarray(image).resize((len(image) // 4,) * 2))  # noqa: E731
    return each(pictures, small, (0.05, 0.2, 0.5)[strength], rng)


def banners(pictures, rng, strength):
    """A share of the files much wider than high."""
    wide = lambda image: np.concatenate([image, image[:, ::-1], image, image[:, ::-1]], 1)  # noqa: E731
    return each(pictures, wide, (0.02, 0.1, 0.4)[strength], rng)


# ---- copies


def exact_copies(pictures, rng, strength):
    distinct = round(len(pictures.images) * (0.85, 0.5, 0.1)[strength])
    return chosen(pictures, [*range(distinct), *rng.integers(0, distinct, len(pictures.images) - distinct)])


def chosen(pictures: Pictures, numbers) -> Pictures:
    labels = None if pictures.labels is None else [pictures.labels[i] for i in numbers]
    return replace(pictures, images=[pictures.images[i] for i in numbers], labels=labels)


def augmented(image: np.ndarray, rng: Rng, flip: bool = True) -> np.ndarray:
    """Mirrored or not, brighter or darker, cut to 88 % or more and enlarged again."""
    side = image.shape[0]
    if flip and rng.random() < 0.5:
        image = image[:, ::-1]
    cut = rng.uniform(0.88, 1) * side
    x, y = rng.uniform(0, side - cut, 2)
    new = Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR, (x, y, x + cut, y + cut))
    return np.clip(np.asarray(new, float) * rng.uniform(0.75, 1.2), 0, 255).astype(np.uint8)


def augmented_on_disk(pictures, rng, strength):
    """The case: 70 pictures made into 560."""
    count = len(pictures.images)
    kept = max(10, round(count / (2, 8, 40)[strength]))
    made = chosen(pictures, rng.integers(0, kept, count))
    return each(made, lambda image: augmented(image, rng))


def mirrored_copies(pictures, rng, strength):
    count = len(pictures.images)
    copies = round(count * (0.15, 0.33, 0.5)[strength])
    made = chosen(pictures, [*range(count - copies), *rng.permutation(count - copies)[:copies]])
    made.images = [image[:, ::-1] if i >= count - copies else image for i, image in enumerate(made.images)]
    order = rng.permutation(count)
    return chosen(made, order)


def brighter_copies(pictures, rng, strength):
    count = len(pictures.images)
    copies = round(count * (0.15, 0.33, 0.5)[strength])
    made = chosen(pictures, [*range(count - copies), *rng.permutation(count - copies)[:copies]])
    made.images = [
        np.clip(image * 0.8 + 10, 0, 255).astype(np.uint8) if i >= count - copies else image
        for i, image in enumerate(made.images)
    ]
    return chosen(made, rng.permutation(count))


def leaked(pictures, rng, strength):
    """Held-out images that are copies of training images."""
    count, held_out = len(pictures.images), pictures.held_out
    numbers = np.arange(count)
    places = count - held_out + rng.permutation(held_out)[: round(held_out * (0.1, 0.4, 1)[strength])]
    numbers[places] = rng.permutation(count - held_out)[: len(places)]
    return chosen(pictures, numbers)


def leaked_changed(pictures, rng, strength):
    """The same after a change of brightness, a flip and a small cut."""
    made = leaked(pictures, rng, strength)
    fresh = {id(image) for image in pictures.images[-pictures.held_out :]}
    start = len(made.images) - made.held_out
    made.images[start:] = [image if id(image) in fresh else augmented(image, rng) for image in made.images[start:]]
    return made


# ---- resizing and compression


def resized(image: np.ndarray, side: int, filter: Image.Resampling) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((side, side), filter))


def enlarged_by(filter: Image.Resampling) -> Damage:
    def damage(pictures, rng, strength):
        """From a smaller size, on disk."""

        def change(image):
            small = resized(image, round(len(image) / (1.5, 2, 4)[strength]), Image.Resampling.BOX)
            return resized(small, len(image), filter)

        return each(pictures, change)

    return damage


enlarged_by_nearest = enlarged_by(Image.Resampling.NEAREST)
enlarged_bilinearly = enlarged_by(Image.Resampling.BILINEAR)
enlarged_bicubically = enlarged_by(Image.Resampling.BICUBIC)


def some_enlarged(pictures, rng, strength):
    change = lambda image: resized(resized(image, len(image) // 4, Image.Resampling.BOX), len(image), Image.Resampling.NEAREST)  # noqa: E731
    return each(pictures, change, (0.05, 0.2, 0.6)[strength], rng)


def shrunk_by_nearest(pictures, rng, strength):
    """Photographs of which every second, fourth or eighth pixel was taken."""
    factor = (2, 4, 8)[strength]
    size = 32
    tiles = [healthy.shipped(name) for name in healthy.PHOTOS]
    images = []
    for whole in tiles:
        step = size * factor
        spots = [(y, x) for y in range(0, whole.shape[0] - step + 1, step) for x in range(0, whole.shape[1] - step + 1, step)]
        images += [whole[y : y + step : factor, x : x + step : factor] for y, x in spots]
    return Pictures([images[i] for i in rng.permutation(len(images))[:600]], held_out=len(images[:200]) // 10)


def compressed(pictures, rng, strength):
    return each(pictures, lambda image: healthy.jpeg(image, (25, 12, 4)[strength]))


def some_compressed(pictures, rng, strength):
    return each(pictures, lambda image: healthy.jpeg(image, 8), (0.1, 0.3, 0.8)[strength], rng)


# ---- labels


def empty_classes(pictures, rng, strength):
    empty = rng.permutation(len(pictures.class_names))[: (1, 1, 3)[strength]]
    kept = [i for i, label in enumerate(pictures.labels) if label not in empty]
    return replace(chosen(pictures, kept), held_out=len(kept) // 10)


def thin_class(pictures, rng, strength):
    """Hardly any images of one class."""
    left = [i for i, label in enumerate(pictures.labels) if label == 1][: (6, 3, 1)[strength]]
    kept = [i for i, label in enumerate(pictures.labels) if label != 1] + left
    return replace(chosen(pictures, rng.permutation(kept)), held_out=len(kept) // 20)


def one_class_rules(pictures, rng, strength):
    share = (0.8, 0.9, 0.98)[strength]
    first = [i for i, label in enumerate(pictures.labels) if label == 0]
    rest = [i for i, label in enumerate(pictures.labels) if label != 0][: max(3, round(len(first) * (1 - share) / share))]
    kept = rng.permutation(first + rest)
    return replace(chosen(pictures, kept), held_out=len(kept) // 10)


def mislabeled(pictures, rng, strength):
    labels, number = np.array(pictures.labels), len(pictures.class_names)
    wrong = rng.random(len(labels)) < (0.05, 0.15, 0.4)[strength]
    labels[wrong] = (labels[wrong] + rng.integers(1, number, wrong.sum())) % number
    return replace(pictures, labels=labels.tolist())


def swapped_labels(pictures, rng, strength):
    """A share of two classes exchanged, as by one careless worker."""
    labels = np.array(pictures.labels)
    wrong = (labels < 2) & (rng.random(len(labels)) < (0.15, 0.3, 0.45)[strength])
    return replace(pictures, labels=np.where(wrong, 1 - labels, labels).tolist())


def flipped(pictures, rng, strength):
    """--random_flip on what has a reading direction; fewer images make it harder to see."""
    kept = rng.permutation(len(pictures.images))[: (150, 400, 1200)[strength]]
    return replace(chosen(pictures, kept), random_flip=True, held_out=len(kept) // 10)

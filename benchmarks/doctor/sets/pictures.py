"""Healthy sets of images of many kinds, in which the check of the data must find nothing; faults are planted in some of them.

Nothing is downloaded: scans, photographs and faces come with scikit-learn and scikit-image (`pip install --no-deps
scikit-image`, of which only the files are read), letters from the fonts of the machine, and the rest is drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

COUNT = 600  # images of a set


@dataclass
class Pictures:
    """Images uint8 [H, W, 3] or [H, W], of which the last `held_out` are for the validation."""

    images: list[np.ndarray]
    labels: list[int] | None = None
    class_names: list[str] | None = None
    resolution: int = 32
    random_flip: bool = False
    held_out: int = 60


Rng = np.random.Generator


# ---- photographs and scans


@cache
def shipped(name: str) -> np.ndarray:
    """An image of scikit-image's wheel, uint8, or one of scikit-learn's two photographs."""
    if name in ("china.jpg", "flower.jpg"):
        from sklearn.datasets import load_sample_image

        return load_sample_image(name)
    spec = find_spec("skimage")
    if spec is None:
        raise SystemExit("scikit-image is needed for its images: pip install --no-deps scikit-image")
    path = Path(str(spec.origin)).parent / "data" / name
    if path.suffix == ".npy":
        return np.rint(np.load(path) * 255).astype(np.uint8)
    image = Image.open(path)
    return np.asarray(image.convert("L" if image.mode in ("L", "1", "I") else "RGB"))


def tiles(name: str, side: int, size: int) -> list[np.ndarray]:
    """An image's tiles of `side` pixels, which do not overlap, at `size`; those of a single value are left out."""
    whole = shipped(name)
    spots = [(y, x) for y in range(0, whole.shape[0] - side + 1, side) for x in range(0, whole.shape[1] - side + 1, side)]
    cut = [Image.fromarray(whole[y : y + side, x : x + side]) for y, x in spots if np.ptp(whole[y : y + side, x : x + side])]
    return [np.asarray(tile.resize((size, size), Image.Resampling.BOX)) for tile in cut]


PHOTOS = ("china.jpg", "flower.jpg", "astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "motorcycle_left.png")


def shuffled(images: list, rng: Rng, count: int = COUNT) -> list:
    return [images[i] for i in rng.permutation(len(images))[:count]]


def photo_tiles(rng: Rng, size: int = 32, side: int = 40, count: int = COUNT) -> list[np.ndarray]:
    return shuffled([tile for name in PHOTOS for tile in tiles(name, side, size)], rng, count)


def photos(rng: Rng) -> Pictures:
    return Pictures(photo_tiles(rng), random_flip=True)


def large_photos(rng: Rng) -> Pictures:
    return Pictures(photo_tiles(rng, 64, 64), resolution=64, random_flip=True, held_out=40)


def gray(images: list[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(Image.fromarray(image).convert("L")) for image in images]


def gray_photos(rng: Rng) -> Pictures:
    return Pictures(gray(photo_tiles(rng)), random_flip=True)


def jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    import io

    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


def jpeg_photos(rng: Rng) -> Pictures:
    return Pictures([jpeg(image, int(rng.integers(75, 96))) for image in photo_tiles(rng, 64, 64)], resolution=64)


def exposures(rng: Rng) -> Pictures:
    """Photographs taken from dusk to noon."""
    gammas = np.exp(rng.normal(0, 0.35, COUNT))
    images = photo_tiles(rng)
    return Pictures([np.rint(255 * (image / 255.0) ** g).astype(np.uint8) for image, g in zip(images, gammas)])


def dusk(rng: Rng) -> Pictures:
    return Pictures([(image * 0.45).astype(np.uint8) for image in photo_tiles(rng)])


def hubble(rng: Rng) -> Pictures:
    return Pictures(shuffled(tiles("hubble_deep_field.jpg", 36, 32), rng), random_flip=True)


def retina(rng: Rng) -> Pictures:
    return Pictures(shuffled(tiles("retina.jpg", 50, 32), rng))


def cells(rng: Rng) -> Pictures:
    return Pictures(shuffled(tiles("ihc.png", 20, 20), rng), resolution=20, random_flip=True)


def moon(rng: Rng) -> Pictures:
    return Pictures(shuffled(tiles("moon.png", 20, 20), rng), resolution=20)


def coins(rng: Rng) -> Pictures:
    return Pictures(shuffled(tiles("coins.png", 16, 16), rng), resolution=16, held_out=30)


def faces(rng: Rng) -> Pictures:
    """100 faces and 100 other images, 25x25."""
    images = shipped("lfw_subset.npy")
    order = rng.permutation(200)
    return Pictures([images[i] for i in order], [int(i >= 100) for i in order], ["face", "other"], 25, True, 20)


def only_faces(rng: Rng) -> Pictures:
    return Pictures(list(shipped("lfw_subset.npy")[:100]), resolution=25, random_flip=True, held_out=10)


def camera(rng: Rng) -> Pictures:
    return Pictures(shuffled(tiles("camera.png", 24, 24), rng), resolution=24)


def textures(rng: Rng) -> Pictures:
    """Brick, grass and gravel, with their kind as the label."""
    names = ["brick", "grass", "gravel"]
    found = [(tile, i) for i, name in enumerate(names) for tile in tiles(f"{name}.png", 36, 32)]
    found = shuffled(found, rng)
    return Pictures([tile for tile, _ in found], [i for _, i in found], names, random_flip=True)


def digits(rng: Rng) -> Pictures:
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(scans))[:1200]
    pixels = np.rint(scans.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return Pictures(list(pixels[order]), labels[order].tolist(), [str(i) for i in range(10)], 8, held_out=100)


def enlarged_digits(rng: Rng) -> Pictures:
    """As many train them: at 16x16, which the loading enlarges."""
    return Pictures(**vars(digits(rng)) | {"resolution": 16})


def pages(rng: Rng) -> Pictures:
    """Parts of scanned pages."""
    found = [tile for name in ("page.png", "text.png") for tile in tiles(name, 16, 16)]
    return Pictures(shuffled(found, rng), resolution=16, held_out=30)


# ---- letters


@cache
def fonts(size: int) -> list[ImageFont.FreeTypeFont]:
    found = sorted(
        path for root in ("/usr/share/fonts", "/Library/Fonts", "C:/Windows/Fonts") for path in Path(root).rglob("*.ttf")
    )
    texts = [path for path in found if not any(word in path.name for word in ("Math", "Symbol", "ding"))]
    if len(texts) < 8:
        raise SystemExit("letters need eight TrueType fonts, as of the packages fonts-dejavu and fonts-liberation")
    return [ImageFont.truetype(str(path), size) for path in texts]


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def letter(text: str, font, side: int, shift=(0, 0), ink=0, paper=255) -> np.ndarray:
    image = Image.new("L" if isinstance(ink, int) else "RGB", (side, side), paper)
    ImageDraw.Draw(image).text((side / 2 + shift[0], side / 2 + shift[1]), text, ink, font, anchor="mm")
    return np.asarray(image)


def letters(rng: Rng, count: int = 800, **look) -> Pictures:
    """Capital letters of all fonts, each once."""
    kinds = [(font, i) for font in fonts(22) for i in range(26)]
    kinds = shuffled(kinds, rng, count)
    images = [letter(LETTERS[i], font, 32, **look) for font, i in kinds]
    return Pictures(images, [i for _, i in kinds], list(LETTERS))


def white_letters(rng: Rng) -> Pictures:
    return letters(rng, ink=255, paper=0)


def scattered_letters(rng: Rng) -> Pictures:
    """Of any size, place and colors."""
    images, labels = [], []
    for _ in range(COUNT):
        i, font = rng.integers(26), fonts(int(rng.integers(14, 24)))
        colors = [tuple(rng.integers(0, 256, 3).tolist()) for _ in range(2)]
        images.append(letter(LETTERS[i], font[rng.integers(len(font))], 32, rng.uniform(-4, 4, 2), *colors))
        labels.append(int(i))
    return Pictures(images, labels, list(LETTERS))


def signs(rng: Rng) -> Pictures:
    """Letters on photographs."""
    images = []
    for tile in photo_tiles(rng):
        image, font = Image.fromarray(tile), fonts(18)
        place, color = tuple(rng.uniform(10, 22, 2)), tuple(rng.integers(0, 256, 3).tolist())
        ImageDraw.Draw(image).text(place, LETTERS[rng.integers(26)], color, font[rng.integers(len(font))], anchor="mm")
        images.append(np.asarray(image))
    return Pictures(images)


def words(rng: Rng) -> Pictures:
    """Scans of lines of text, a little turned, on paper that is not quite white."""
    images = []
    for _ in range(COUNT):
        page = Image.new("L", (96, 96), int(rng.integers(225, 250)))
        draw, font = ImageDraw.Draw(page), fonts(11)[rng.integers(len(fonts(11)))]
        for y in range(int(rng.integers(-8, 8)), 96, 14):
            draw.text((rng.integers(-4, 6), y), "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz  "), 18)), 30, font)
        page = page.rotate(rng.normal(0, 1.5), fillcolor=240, resample=Image.Resampling.BILINEAR).crop((16, 16, 80, 80))
        images.append(np.clip(np.asarray(page) + rng.normal(0, 4, (64, 64)), 0, 255).astype(np.uint8))
    return Pictures(images, resolution=64)


# ---- drawings: painted at 128x128, then reduced


def drawn(paint: Callable, rng: Rng, side: int = 32, mode: str = "RGB", count: int = COUNT, paper=None, **more) -> Pictures:
    images = []
    for _ in range(count):
        color = paper if paper is not None else tuple(rng.integers(0, 256, 3).tolist())
        canvas = Image.new(mode, (128, 128), color)
        paint(canvas, ImageDraw.Draw(canvas), rng)
        images.append(np.asarray(canvas.resize((side, side), Image.Resampling.BOX)))
    return Pictures(images, resolution=side, **more)


def any_color(rng: Rng) -> tuple[int, ...]:
    return tuple(rng.integers(0, 256, 3).tolist())


def one_shape(canvas, draw, rng, kind: int | None = None, color=None) -> None:
    x, y = rng.uniform(36, 92, 2)
    r, turn = rng.uniform(14, 34), rng.uniform(0, 360)
    kind = rng.integers(3) if kind is None else kind
    color = color or any_color(rng)
    if kind == 0:
        stretch = rng.uniform(0.6, 1)
        draw.ellipse((x - r, y - r * stretch, x + r, y + r * stretch), color)
    else:
        draw.regular_polygon((x, y, r), (3, 4)[kind - 1], turn, color)


def shapes(rng: Rng) -> Pictures:
    """A disc, a triangle or a square, which is the label."""
    labels = rng.integers(0, 3, COUNT).tolist()
    kinds = iter(labels)
    made = drawn(lambda canvas, draw, rng: one_shape(canvas, draw, rng, next(kinds)), rng, random_flip=True)
    return Pictures(made.images, labels, ["disc", "triangle", "square"], random_flip=True)


def many_shapes(rng: Rng) -> Pictures:
    return drawn(lambda *of: [one_shape(*of) for _ in range(rng.integers(3, 9))], rng, random_flip=True)


def gray_shapes(rng: Rng) -> Pictures:
    def paint(canvas, draw, rng):
        for _ in range(rng.integers(1, 4)):
            one_shape(canvas, draw, rng, color=int(rng.integers(60, 256)))

    return drawn(paint, rng, mode="L", paper=0)


def strokes(canvas, draw, rng, width=(3, 8), color=(0, 0, 0)) -> None:
    for _ in range(rng.integers(3, 8)):
        points = np.cumsum(rng.normal(0, 14, (12, 2)), 0) + rng.uniform(20, 108, 2)
        draw.line([tuple(p) for p in points], color, int(rng.integers(*width)), joint="curve")


def line_art(rng: Rng) -> Pictures:
    return drawn(strokes, rng, paper=(255, 255, 255))


def gray_line_art(rng: Rng) -> Pictures:
    return drawn(lambda canvas, draw, rng: strokes(canvas, draw, rng, (6, 14), 0), rng, mode="L", paper=255, side=48)


def sprites(rng: Rng) -> Pictures:
    """Pixel art 16x16, mirrored halves on one color."""
    images = []
    for _ in range(COUNT):
        palette = rng.integers(0, 256, (int(rng.integers(3, 7)), 3))
        half = rng.integers(0, len(palette), (12, 6)) * (rng.random((12, 6)) < 0.7)
        image = np.zeros((16, 16), int)
        image[2:14, 2:14] = np.concatenate([half, half[:, ::-1]], 1)
        images.append(palette[image].astype(np.uint8))
    return Pictures(images, resolution=16, random_flip=True)


def large_sprites(rng: Rng) -> Pictures:
    return Pictures([image.repeat(3, 0).repeat(3, 1) for image in sprites(rng).images], resolution=48)


def game_tiles(rng: Rng) -> Pictures:
    """Pixel art that fills the image: blocks of 8x8 of a palette of the set."""
    palette = rng.integers(0, 256, (12, 3))
    blocks = rng.integers(0, 12, (40, 8, 8)) * (rng.random((40, 8, 8)) < 0.5) + np.arange(40)[:, None, None] % 12
    chosen = rng.integers(0, 40, (COUNT, 4, 4))
    images = blocks[chosen].transpose(0, 1, 3, 2, 4).reshape(COUNT, 32, 32) % 12
    return Pictures(list(palette[images].astype(np.uint8)))


def stars(canvas_side: int, rng: Rng) -> np.ndarray:
    image = np.zeros((canvas_side, canvas_side))
    spots = rng.integers(0, canvas_side, (int(rng.integers(5, 25)), 2))
    image[spots[:, 0], spots[:, 1]] = rng.exponential(400, len(spots))
    bright = Image.fromarray(np.clip(image, 0, 255).astype(np.uint8))
    return np.asarray(bright.filter(ImageFilter.GaussianBlur(0.5))).astype(float)


def night_skies(rng: Rng) -> Pictures:
    images = [
        stars(32, rng)[..., None] * rng.uniform(0.7, 1, 3) + rng.uniform(2, 12) + rng.normal(0, 2, (32, 32, 3))
        for _ in range(COUNT)
    ]
    return Pictures([np.clip(image, 0, 255).astype(np.uint8) for image in images], random_flip=True)


def black_skies(rng: Rng) -> Pictures:
    """Without noise: most of each image is 0."""
    return Pictures([np.clip(stars(32, rng), 0, 255).astype(np.uint8) for _ in range(COUNT)])


def horizons(rng: Rng) -> Pictures:
    """A moon above dark hills."""

    def paint(canvas, draw, rng):
        x, y, r = rng.uniform(16, 112), rng.uniform(16, 50), rng.uniform(6, 14)
        draw.ellipse((x - r, y - r, x + r, y + r), (240, 235, 210))
        hills = 90 + np.cumsum(rng.normal(0, 4, 9))
        draw.polygon([(0, 128), *[(16 * i, h) for i, h in enumerate(hills)], (128, 128)], (5, 8, 6))

    made = drawn(paint, rng, paper=(12, 14, 40), random_flip=True)
    made.images = [np.clip(image + rng.normal(0, 2, image.shape), 0, 255).astype(np.uint8) for image in made.images]
    return made


def spectrum(rng: Rng, side: int, power: float, channels: int = 3) -> np.ndarray:
    """Noise whose amplitudes fall as frequency to the `power`."""
    f = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side)[None])
    f[0, 0] = np.inf
    planes = np.fft.ifft2(np.fft.fft2(rng.standard_normal((channels, side, side))) / f**power).real
    return (planes / planes.std()).transpose(1, 2, 0)


def clouds(rng: Rng) -> Pictures:
    return Pictures(
        [np.clip(127 + 50 * spectrum(rng, 32, 1.0), 0, 255).astype(np.uint8) for _ in range(COUNT)], random_flip=True
    )


def soft_clouds(rng: Rng) -> Pictures:
    """Smooth throughout, as pictures out of focus."""
    return Pictures(
        [np.clip(127 + 45 * spectrum(rng, 32, 2.2), 0, 255).astype(np.uint8) for _ in range(COUNT)], random_flip=True
    )


def noise(rng: Rng) -> Pictures:
    return Pictures(list(rng.integers(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8)))


def gradients(rng: Rng) -> Pictures:
    """Two colors that blend, along any direction."""
    y, x = np.mgrid[:32, :32] / 31 - 0.5
    images = []
    for _ in range(COUNT):
        angle, (a, b) = rng.uniform(0, 6.28), rng.uniform(0, 255, (2, 3))
        share = np.clip(0.5 + (np.cos(angle) * x + np.sin(angle) * y) * rng.uniform(0.6, 1.4), 0, 1)[..., None]
        images.append(np.rint(a * share + b * (1 - share)).astype(np.uint8))
    return Pictures(images)


def x_rays(rng: Rng) -> Pictures:
    """A spine, ribs and a shadow, gray, a little moved, soft, with some grain."""
    y, x = np.mgrid[:64, :64] / 63 - 0.5
    images = []
    for _ in range(COUNT):
        dx, dy = rng.normal(0, 0.02, 2)
        u, v = (x - dx) * rng.uniform(0.9, 1.1), y - dy
        image = 60 + 110 * np.exp(-((u / 0.05) ** 2)) + 35 * np.exp(-(((u - 0.1) / 0.12) ** 2 + ((v - 0.15) / 0.15) ** 2))
        image += 22 * np.cos((v * rng.uniform(38, 46) + 9 * u * u * 4) + rng.uniform(0, 1)) * (abs(u) < 0.42)
        image = image * (1 - 0.8 * (abs(u) > 0.45 + 0.02 * rng.normal())) + 8 * spectrum(rng, 64, 1.5, 1)[..., 0]
        images.append(np.clip(image + rng.normal(0, 2, (64, 64)), 0, 255).astype(np.uint8))
    return Pictures(images, resolution=64)


def slices(rng: Rng) -> Pictures:
    """A body's cross-section on black, as of a tomograph."""

    def paint(canvas, draw, rng):
        w, h = rng.uniform(48, 60), rng.uniform(36, 50)
        draw.ellipse((64 - w, 64 - h, 64 + w, 64 + h), int(rng.integers(90, 140)))
        for _ in range(rng.integers(3, 8)):
            a, b = rng.uniform(-0.5, 0.5, 2) * (w, h) + 64
            r, s = rng.uniform(4, 16, 2)
            draw.ellipse((a - r, b - s, a + r, b + s), int(rng.integers(40, 230)))

    return drawn(paint, rng, side=48, mode="L", paper=0)


def portraits(rng: Rng) -> Pictures:
    """Head and shoulders on pure white."""

    def paint(canvas, draw, rng):
        x, y, r = 64 + rng.normal(0, 4), 56 + rng.normal(0, 5), rng.uniform(20, 27)
        skin = tuple(int(c * rng.uniform(0.45, 1)) for c in (255, 215, 185))
        draw.ellipse((x - 2 * r, y + 1.2 * r, x + 2 * r, y + 5 * r), any_color(rng))
        draw.ellipse((x - 1.15 * r, y - 1.5 * r, x + 1.15 * r, y + 1.2 * r), tuple(int(c) for c in rng.integers(10, 140, 3)))
        draw.ellipse((x - r, y - 1.1 * r, x + r, y + 1.4 * r), skin)
        for side in (-1, 1):
            draw.ellipse((x + side * 0.4 * r - 3, y - 3, x + side * 0.4 * r + 3, y + 2), (30, 20, 20))
        draw.arc((x - 0.4 * r, y + 0.4 * r, x + 0.4 * r, y + 0.9 * r), 20, 160, (150, 60, 60), 3)

    return drawn(paint, rng, side=48, paper=(255, 255, 255), random_flip=True)


def products(rng: Rng) -> Pictures:
    """Things cut out of photographs, on white."""
    images = []
    for tile in photo_tiles(rng):
        mask = Image.new("L", (32, 32), 0)
        w, h = rng.uniform(7, 14, 2)
        ImageDraw.Draw(mask).ellipse((16 - w, 16 - h, 16 + w, 16 + h), 255)
        images.append(np.asarray(Image.composite(Image.fromarray(tile), Image.new("RGB", (32, 32), "white"), mask)))
    return Pictures(images)


def flags(rng: Rng) -> Pictures:
    images = []
    for _ in range(COUNT):
        stripes = rng.integers(0, 256, (int(rng.integers(2, 5)), 3))
        image = stripes[(np.arange(32) * len(stripes)) // 32][:, None].repeat(32, 1)
        images.append((image if rng.random() < 0.5 else image.transpose(1, 0, 2)).astype(np.uint8))
    return Pictures(images)


def codes(rng: Rng) -> Pictures:
    """Black and white squares, as of matrix codes."""
    return Pictures([(255 * rng.integers(0, 2, (8, 8))).astype(np.uint8).repeat(4, 0).repeat(4, 1) for _ in range(COUNT)])


def fields(rng: Rng) -> Pictures:
    """Farmland from above: patches of straight sides, with texture."""

    def paint(canvas, draw, rng):
        for _ in range(12):
            points = rng.uniform(-20, 148, 2) + rng.uniform(-60, 60, (4, 2))
            hull = sorted(points.tolist(), key=lambda p: np.arctan2(*(np.array(p) - points.mean(0))))
            draw.polygon([tuple(p) for p in hull], tuple(rng.integers((60, 70, 20), (170, 160, 90)).tolist()))

    made = drawn(paint, rng, paper=(100, 110, 60), random_flip=True)
    grain = [8 * spectrum(rng, 32, 0.7, 1) for _ in made.images]
    made.images = [np.clip(image + g, 0, 255).astype(np.uint8) for image, g in zip(made.images, grain)]
    return made


def spectrograms(rng: Rng) -> Pictures:
    """Time to the right, frequency upwards, in one color scale."""
    images = []
    for _ in range(COUNT):
        y, x = np.mgrid[:32, :32]
        base = rng.uniform(4, 10)
        tone = sum(np.exp(-(((31 - y) - k * (base + rng.normal(0, 0.4) * np.sin(x / 5))) ** 2) / 2) / k for k in (1, 2, 3))
        image = np.clip(tone * rng.uniform(0.5, 1) + 0.12 * rng.random((32, 32)), 0, 1)[..., None]
        images.append(
            (255 * np.concatenate([image**0.5, image**1.2, 0.3 + 0.4 * image * (1 - image)], -1)).clip(0, 255).astype(np.uint8)
        )
    return Pictures(images)


def icons(rng: Rng) -> Pictures:
    """A colored tile with round corners on white, a sign in it, of many sizes."""

    def paint(canvas, draw, rng):
        edge = rng.uniform(6, 22)
        draw.rounded_rectangle((edge, edge, 128 - edge, 128 - edge), rng.uniform(10, 30), any_color(rng))
        one_shape(canvas, draw, rng, color=(255, 255, 255))

    return drawn(paint, rng, paper=(255, 255, 255))


def day_and_night(rng: Rng) -> Pictures:
    """Photographs by day, and a fifth of them by night: darker, with lights and grain."""
    images = []
    for tile in photo_tiles(rng):
        if rng.random() < 0.2:
            tile = np.clip(
                tile * rng.uniform(0.2, 0.5) + stars(32, rng)[..., None] * 0.5 + rng.normal(0, 3, tile.shape), 0, 255
            )
        images.append(tile.astype(np.uint8))
    return Pictures(images)


def two_cameras(rng: Rng) -> Pictures:
    """Photographs of two sizes and two shapes, as from two telephones."""
    wide = [Image.fromarray(tile).resize((64, 48)) for tile in photo_tiles(rng, 64, 64, 200)]
    tall = [Image.fromarray(tile).resize((48, 72)) for tile in photo_tiles(rng, 64, 64, 400)[200:]]
    return Pictures(shuffled([np.asarray(image) for image in wide + tall], rng), resolution=48, held_out=30)


def hard_classes(rng: Rng) -> Pictures:
    """Photographs whose classes, the picture they were cut from, neighbors can hardly tell."""
    found = [(tile, i) for i, name in enumerate(PHOTOS) for tile in tiles(name, 40, 32)]
    found = shuffled(found, rng, 900)
    return Pictures([tile for tile, _ in found], [i for _, i in found], list(PHOTOS))


def rare_classes(rng: Rng) -> Pictures:
    """Shapes of which one kind is ten times as frequent as another."""
    labels = rng.choice(3, COUNT, p=(0.55, 0.4, 0.05)).tolist()
    kinds = iter(labels)
    made = drawn(lambda canvas, draw, rng: one_shape(canvas, draw, rng, next(kinds)), rng)
    return Pictures(made.images, labels, ["disc", "triangle", "square"])


HEALTHY: dict[str, Callable[[Rng], Pictures]] = {
    made.__name__: made
    for made in (
        *(photos, large_photos, gray_photos, jpeg_photos, exposures, dusk, hubble, retina, cells, moon, coins, faces),
        *(only_faces, camera, textures, digits, enlarged_digits, pages, letters, white_letters),
        *(scattered_letters, signs, words, shapes, many_shapes, gray_shapes, line_art, gray_line_art, sprites, large_sprites),
        *(game_tiles, night_skies, black_skies, horizons, clouds, soft_clouds, noise, gradients, x_rays, slices, portraits),
        *(products, flags, codes, fields, spectrograms, icons, day_and_night, two_cameras, hard_classes, rare_classes),
    )
}

"""The audit of images: silent about what the pipeline really does, and a name for each way of misreading a file."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import slow_turns
from PIL import Image, ImageFilter, ImageOps

from utils.data.dataset import load_images
from utils.data.decode import ImageFile
from utils.data.training_data import TrainingSamples
from utils.diagnostics.audit.files import DeclaredImages, find
from utils.diagnostics.audit.images import Draws, check_images
from utils.options.flags import RunOptions

PLAIN = DeclaredImages(32, 3, False, False, 0.0, "white", 255)


def scene(height: int, width: int, channels: int, generator) -> np.ndarray:
    """uint8 [height, width, channels] with the spectrum of photographs, 1 / frequency."""
    frequencies = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    frequencies[0, 0] = 1
    spectra = np.fft.fft2(generator.standard_normal((channels, height, width))) / frequencies
    planes = np.fft.ifft2(spectra).real
    planes = planes + planes.mean(0)
    planes *= 60 / planes.std()
    return np.clip(127.5 + generator.uniform(-30, 30) + planes, 0, 255).astype(np.uint8).transpose(1, 2, 0)


def encoded(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **options)
    return file.getvalue()


def unit(images) -> np.ndarray:
    """uint8 [B, H, W, C] as [B, C, H, W] in [-1, 1]."""
    return np.stack([np.atleast_3d(np.asarray(image)) for image in images]).transpose(0, 3, 1, 2) / 127.5 - 1


def verdict(shown, files, declared=PLAIN, draws=None):
    (check,) = check_images(torch.as_tensor(np.ascontiguousarray(shown), dtype=torch.float32), files, declared, draws)
    assert check.healthy is None or check.healthy == (not check.message)
    return check


GENERATOR = np.random.default_rng(0)
SCENES = [scene(32, 32, 3, GENERATOR) for _ in range(8)]
FILES = [encoded(image) for image in SCENES]
CLEAN = unit(SCENES)
GRAY = CLEAN[:, :1]
IMAGENET = [np.array(part)[:, None, None] for part in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]


def jittered(x, strength, generator) -> np.ndarray:
    """As torchvision's ColorJitter in the order brightness, contrast, saturation, in [0, 1]."""
    images = []
    for v in (x + 1) / 2:
        brightness, contrast, saturation = generator.uniform(1 - strength, 1 + strength, 3)
        v = (brightness * v).clip(0, 1)
        v = (contrast * v + (1 - contrast) * np.tensordot([0.299, 0.587, 0.114], v, 1).mean()).clip(0, 1)
        v = (saturation * v + (1 - saturation) * np.tensordot([0.299, 0.587, 0.114], v, 1)).clip(0, 1)
        images.append(2 * v - 1)
    return np.stack(images)


def with_patch(x):
    x = x.copy()
    x[:, :, 8:20, 4:14] = 0
    return x


def shifted(x):
    padded = np.pad(x, ((0, 0), (0, 0), (4, 4), (4, 4)))
    return padded[:, :, 1:33, 6:38]


def as_jpeg(quality):
    return lambda x: unit([Image.open(io.BytesIO(encoded(image, "JPEG", quality=quality))) for image in SCENES])


def blurred(x):
    return unit([Image.fromarray(image).filter(ImageFilter.GaussianBlur(1.5)) for image in SCENES])


DEVIATIONS = {
    "in [0, 1], not": lambda x: (x + 1) / 2,
    "in [0, 255], not": lambda x: (x + 1) * 127.5,
    "in [-0.5, 0.5]": lambda x: x / 2,
    "scaled twice (to [-1, 1] as if they were still in [0, 255])": lambda x: x / 127.5 - 1,
    "scaled twice (to [-1, 1] as if they were still in [0, 1])": lambda x: x * 2 - 1,
    "divided by 255 twice": lambda x: (x + 1) / 2 / 255,
    "divided by 128": lambda x: (x + 1) * 127.5 / 128 - 1,
    "deviation of ImageNet": lambda x: ((x + 1) / 2 - IMAGENET[0]) / IMAGENET[1],
    "means 0.1, 0.2, 0.3, deviations 0.4, 0.5, 0.6": lambda x: (
        ((x + 1) / 2 - np.array([0.1, 0.2, 0.3])[:, None, None]) / np.array([0.4, 0.5, 0.6])[:, None, None]
    ),
    "inverted colors (negatives)": lambda x: -x,
    "a gamma of 2.2": lambda x: 2 * ((x + 1) / 2) ** 2.2 - 1,
    "a gamma of 0.455": lambda x: 2 * ((x + 1) / 2) ** (1 / 2.2) - 1,
    "darker images: each value x as 1 x - 0.3": lambda x: (x - 0.3).clip(-1, 1),
    "brighter images: each value x as 1 x + 0.2": lambda x: x + 0.2,
    "less contrast: each value x as 0.8 x + 0": lambda x: 0.8 * x,
    "more contrast: each value x as 1.5 x": lambda x: (1.5 * x).clip(-1, 1),
    "through a curve": lambda x: np.where(x < 0.2, x, 0.4 - x),  # solarized
    "black and white": lambda x: 2.0 * (x > 0) - 1,
    "whole numbers": np.trunc,
    "(BGR)": lambda x: x[:, ::-1],
    "order green, blue, red": lambda x: x[:, [1, 2, 0]],
    "gray images instead": lambda x: np.repeat(np.einsum("c,bchw->bhw", [0.299, 0.587, 0.114], x)[:, None], 3, 1),
    "mean of the channels": lambda x: np.repeat(x.mean(1, keepdims=True), 3, 1),
    "the green channel three times": lambda x: x[:, [1, 1, 1]],
    "blue channel is all black": lambda x: np.concatenate([x[:, :2], x[:, 2:] * 0 - 1], 1),
    "mixed colors: red = 0.5, 0.5, 0 ": lambda x: np.stack([x[:, :2].mean(1), x[:, 1], x[:, 2]], 1),
    "mirrored images, though": lambda x: x[..., ::-1],
    "upside down": lambda x: x[:, :, ::-1],
    "180 degrees": lambda x: x[:, :, ::-1, ::-1],
    "90 degrees to the left": lambda x: np.rot90(x, 1, (2, 3)),
    "90 degrees to the right": lambda x: np.rot90(x, -1, (2, 3)),
    "rows and columns exchanged": lambda x: x.swapaxes(2, 3),
    "reshaped where axes should be permuted": lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape),
    "other rows of the batch: shifted by 1 places": lambda x: np.roll(x, 1, 0)[:],
    "other rows of the batch (": lambda x: x[[3, 0, 5, 1, 2, 7, 4, 6]],
    "the same image in all places": lambda x: np.repeat(x[:1], len(x), 0),
    "a single value (-1)": lambda x: x * 0 - 1,
    "values that are not finite, in 1 images": lambda x: np.where(np.arange(len(x))[:, None, None, None] == 2, np.nan, x),
    "shifted by a few pixels": shifted,
    "in a part of them (rows x columns: 12 x 10 pixels)": with_patch,
    "of the pixels are others": lambda x: np.where(np.random.default_rng(0).random((8, 1, 32, 32)) < 0.03, 1.0, x),
    "JPEG of a quality of about 30": as_jpeg(30),
    "blurred by about 1.5": blurred,
    "noise added (standard deviation 0.1)": lambda x: x + 0.1 * np.random.default_rng(9).standard_normal(x.shape),
    "noise added (standard deviation 0.5": lambda x: x + 0.5 * np.random.default_rng(9).standard_normal(x.shape),
    "mean 0 and deviation 1 of its own": lambda x: (x - x.mean((1, 2, 3), keepdims=True)) / x.std((1, 2, 3), keepdims=True),
    "color jitter that is not declared": lambda x: jittered(x, 0.5, np.random.default_rng(0)),
    "other images than those of the files": lambda x: np.random.default_rng(1).uniform(-1, 1, x.shape),
}


@pytest.mark.parametrize("named", DEVIATIONS)
def test_a_deviation_is_named(named):
    message = verdict(DEVIATIONS[named](CLEAN), FILES).message
    assert named in f"{message} ", message


@pytest.mark.parametrize(
    "named", ["in [0, 1]", "inverted", "upside down", "180 degrees", "a gamma", "shifted by a few", "noise"]
)
def test_a_deviation_of_gray_images_is_named(named):
    files = [encoded(image[..., 0]) for image in SCENES]
    declared = replace(PLAIN, channels=1)
    assert verdict(GRAY, files, declared).healthy
    change = next(change for text, change in DEVIATIONS.items() if named in text)
    assert named in verdict(change(GRAY), files, declared).message


@pytest.mark.parametrize("named", ["(BGR)", "upside down", "in [0, 1]", "90 degrees to the left"])
def test_a_deviation_is_named_beside_the_declared_jitter(named):
    """Done after the jitter, as an edit of the training loop would."""
    change = next(change for text, change in DEVIATIONS.items() if named in text)
    shown = jittered(CLEAN, 0.3, np.random.default_rng(0))
    declared = replace(PLAIN, color_jitter=0.3)
    assert verdict(shown, FILES, declared).healthy
    assert named in verdict(change(shown), FILES, declared).message


def test_a_jitter_stronger_than_declared_is_named():
    shown = jittered(CLEAN, 0.8, np.random.default_rng(0))
    assert "stronger than declared" in verdict(shown, FILES, replace(PLAIN, color_jitter=0.1)).message


LARGE = [scene(70, 64 + 6 * number, 3, GENERATOR) for number in range(8)]
LARGE_FILES = [encoded(image) for image in LARGE]


def resized(image, how=Image.Resampling.BILINEAR, side=32):
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    return image.resize(tuple(int(side * part / min(image.size)) for part in image.size), how)


def crop(image, place=0.0):
    left, top = (int(place * (side - 32)) for side in image.size)
    return image.crop((left, top, left + 32, top + 32))


def without_antialias(image):
    pixels = torch.from_numpy(np.asarray(image)).permute(2, 0, 1)[None].double()
    width, height = resized(image).size
    small = torch.nn.functional.interpolate(pixels, (height, width), mode="bilinear", antialias=False)
    return Image.fromarray(small[0].permute(1, 2, 0).round().byte().numpy())


RESIZED = {
    "filter nearest": lambda image: resized(image, Image.Resampling.NEAREST),
    "filter box": lambda image: resized(image, Image.Resampling.BOX),
    "filter bicubic": lambda image: resized(image, Image.Resampling.BICUBIC),
    "filter lanczos": lambda image: resized(image, Image.Resampling.LANCZOS),
    "without antialiasing": without_antialias,
    "1/2 of the resolution": lambda image: resized(image, side=16).resize(resized(image).size, Image.Resampling.BILINEAR),
    "squeezed to the size": lambda image: Image.fromarray(image).resize((32, 32), Image.Resampling.BILINEAR),
    "border that brings them to the size": lambda image: ImageOps.pad(Image.fromarray(image), (32, 32), 2),
    "not resized": Image.fromarray,
}


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("named", RESIZED)
def test_another_resize_is_named(named, flip):
    declared = replace(PLAIN, random_flip=flip)
    pictures = [crop(resized(image), 0.4) for image in LARGE]
    assert verdict(unit(pictures), LARGE_FILES, declared).healthy
    pictures = [crop(RESIZED[named](image), 0.4) for image in LARGE]
    assert named in verdict(unit(pictures), LARGE_FILES, declared).message


def test_images_that_are_not_square():
    """A healthy crop of 24x40, at the center and elsewhere; a shape with its sides exchanged, and a squeezed image."""
    declared = replace(PLAIN, resolution="24x40")
    pictures = []
    for image in LARGE:
        scale = max(24 / image.shape[0], 40 / image.shape[1])
        size = tuple(int(scale * side + 1e-9) for side in image.shape[1::-1])
        pictures.append(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
    for share in (0.5, 0.2):
        corners = [[round(share * (picture.width - 40)), round(share * (picture.height - 24))] for picture in pictures]
        shown = unit([picture.crop((x, y, x + 40, y + 24)) for picture, (x, y) in zip(pictures, corners)])
        assert verdict(shown, LARGE_FILES, declared).healthy
        assert verdict(shown, LARGE_FILES, replace(declared, center_crop=True)).healthy == (share == 0.5)
    assert "images of 3x40x24" in verdict(shown.transpose(0, 1, 3, 2), LARGE_FILES, declared).message
    squeezed = unit([Image.fromarray(image).resize((40, 24), Image.Resampling.BILINEAR) for image in LARGE])
    assert "squeezed to the size" in verdict(squeezed, LARGE_FILES, declared).message


def test_arrays():
    """By their range: of bytes it is known, of other numbers declared; another one is seen."""
    assert verdict(CLEAN, SCENES).healthy
    floats = [image.astype(np.float32) / 25.5 - 4 for image in SCENES]
    declared = replace(PLAIN, data_range=(-4, 6))
    assert verdict(CLEAN, floats, declared).healthy
    assert "more contrast" in verdict(CLEAN, floats, replace(PLAIN, data_range=(-6, 8))).message
    assert "upside down" in verdict(CLEAN[:, :, ::-1], floats, declared).message


def test_a_crop_elsewhere_than_at_the_center_is_named():
    declared = replace(PLAIN, center_crop=True)
    assert (
        "elsewhere than at the center"
        in verdict(unit([crop(resized(image)) for image in LARGE]), LARGE_FILES, declared).message
    )


def test_what_a_file_says_about_itself_is_heeded():
    """EXIF, transparency and 16 bits; each is named where it was not."""
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = [encoded(image, exif=exif) for image in SCENES]
    assert verdict(np.rot90(CLEAN, -1, (2, 3)), turned).healthy
    assert "EXIF" in verdict(CLEAN, turned).message

    clear = [np.dstack([image, np.where(image[..., :1] > 90, 255, 0).astype(np.uint8)]) for image in SCENES]
    on_red = unit([np.where(image[..., 3:] > 0, image[..., :3], np.uint8([255, 0, 0])) for image in clear])
    files = [encoded(image) for image in clear]
    declared = replace(PLAIN, background="red")
    assert verdict(on_red, files, declared).healthy
    assert "hidden under transparent" in verdict(CLEAN, files, declared).message
    assert (
        "transparent images on black"
        in verdict(unit([image[..., :3] * (image[..., 3:] > 0) for image in clear]), files, declared).message
    )

    deep = [image[..., 0].astype(np.uint16) * 200 + 7 for image in SCENES]
    files, declared = [encoded(image) for image in deep], replace(PLAIN, channels=1)
    assert verdict(np.stack(deep)[:, None] / 32767.5 - 1, files, replace(declared, max_value=65535)).healthy
    assert verdict(unit([np.rint(image / 257) for image in deep]), files, declared).healthy
    assert "cut off at the value 255" in verdict(unit([image.clip(0, 255) for image in deep]), files, declared).message


def test_a_part_of_the_images_is_counted():
    shown = CLEAN.copy()
    shown[[1, 5]] = shown[[1, 5], :, ::-1]
    assert verdict(shown, FILES).message == "the network sees images upside down (2 of 8 images looked at)"


def test_another_shape_and_files_that_do_not_decode():
    assert "images of 3x16x16; declared:" in verdict(CLEAN[:, :, :16, :16], FILES).message
    assert verdict(CLEAN[:2], [b"no image", FILES[1]]).healthy
    assert verdict(CLEAN[:2], [b"no image", b""]).healthy is None


def test_bytes_paths_and_image_files_are_alike(tmp_path):
    (tmp_path / "image").write_bytes(FILES[0])
    path = str(tmp_path / "image")
    files = [FILES[0], path, tmp_path / "image", ImageFile(None, path, "x"), ImageFile(FILES[0], path, "x")]
    assert verdict(np.repeat(CLEAN[:1], 5, 0), files).healthy


def plain_images(kind):
    generator = np.random.default_rng(1)
    return {
        "constant": lambda: np.full((8, 8), 77, np.uint8),
        "binary": lambda: (255 * (generator.random((8, 8)) < 0.3)).astype(np.uint8),
        "digits": lambda: (17 * generator.integers(0, 16, (8, 8))).astype(np.uint8),
        "one pixel": lambda: generator.integers(0, 256, (1, 1), dtype=np.uint8),
        "gradient": lambda: np.repeat(np.arange(0, 240, 4, dtype=np.uint8)[None], 20, 0),
        "stripe": lambda: generator.integers(0, 256, (3, 400), dtype=np.uint8),
        "symmetric": lambda: (lambda half: np.hstack([half, half[:, ::-1]]))(
            generator.integers(0, 256, (20, 10), dtype=np.uint8)
        ),
        "noise": lambda: generator.integers(0, 256, (50, 41), dtype=np.uint8),
        "white": lambda: np.full((40, 60), 255, np.uint8),
        "palette": lambda: Image.fromarray(scene(40, 50, 3, generator)).quantize(16),
        "alpha": lambda: Image.fromarray(generator.integers(0, 256, (40, 50, 4), dtype=np.uint8)),
    }[kind]


KINDS = ["constant", "binary", "digits", "one pixel", "gradient", "stripe", "symmetric", "noise", "white", "palette", "alpha"]


@pytest.mark.slow
@pytest.mark.parametrize("jitter", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("channels, max_value, center", [(1, 255, False), (3, 255, True), (3, 65535, False)])
def test_the_real_pipeline_is_healthy_on_odd_images(channels, max_value, center, jitter, tmp_path):
    for kind in KINDS:
        make = plain_images(kind)
        for number in range(3):
            image = make()
            suffix = "jpg" if number == 0 and kind not in ("palette", "alpha") else "png"
            (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(tmp_path / f"{kind}{number}.{suffix}")
    flags = {"resolution": 16, "train_batch_size": 11, "image_channels": channels, "center_crop": center}
    run_pipeline(tmp_path, color_jitter=jitter, random_flip=True, preserve_input_precision=max_value > 255, **flags)


def run_pipeline(folder, updates=7, **flags):
    options = RunOptions(train_data_dir=str(folder), cache_dir=str(folder.parent / "cache"), output_dir="unused", **flags)
    images = load_images(options)
    samples = TrainingSamples(images, Accelerator(cpu=True), options)
    declared = DeclaredImages(
        *(options.resolution, options.image_channels, options.center_crop, options.random_flip, options.color_jitter),
        *(options.background, images.max_value),
    )
    draws = Draws()
    for batch in samples.batches(0, updates):
        batch = samples.on_device(batch)
        files = images.files.at(samples.dataset_rows(batch.sample_numbers).tolist())
        (check,) = check_images(batch.clean_images, files, declared, draws)
        assert check.healthy, (check.message, check.observed)
    assert all(check.healthy for check in draws.checks(declared)), draws
    return draws


@pytest.mark.parametrize(
    "flags", [{}, *slow_turns({"center_crop": True}, {"image_channels": 1}, {"preserve_input_precision": True})]
)
@pytest.mark.parametrize("jitter", [0.0, 0.4])
def test_the_real_pipeline_is_healthy_on_files_of_many_kinds(flags, jitter, tmp_path):
    generator, folder = np.random.default_rng(2), tmp_path / "images"
    folder.mkdir()
    exif = Image.Exif()
    for orientation in range(1, 9):
        exif[0x0112] = orientation
        photograph = Image.fromarray(scene(30 + 5 * orientation, 90, 3, generator))
        gray = Image.fromarray(scene(50, 70, 1, generator)[..., 0])
        photograph.save(folder / f"{orientation}.jpg", exif=exif)
        photograph.save(folder / f"{orientation}.webp")
        photograph.quantize(20).save(folder / f"{orientation}p.png")
        photograph.quantize(20).save(folder / f"{orientation}h.png", transparency=3)
        photograph.convert("CMYK").save(folder / f"{orientation}.tiff")
        photograph.putalpha(gray.resize(photograph.size))
        photograph.save(folder / f"{orientation}a.png", exif=exif)
        gray.save(folder / f"{orientation}g.png")
        gray.point(lambda value: 255 * (value > 120)).convert("1").save(folder / f"{orientation}b.png")
        Image.fromarray(np.asarray(gray).astype(np.uint16) * 250 + orientation).save(folder / f"{orientation}d.png")
        Image.merge("LA", [gray, gray]).save(folder / f"{orientation}la.png")
    draws = run_pipeline(folder, 10, resolution=24, train_batch_size=8, random_flip=True, color_jitter=jitter, **flags)
    assert draws.sided > 60 and 0.2 < draws.mirrored / draws.sided < 0.8
    assert draws.places == {} or "center_crop" in flags
    assert (draws.jittered, draws.plain) == (0, 0) if not jitter else draws.jittered > 60


@pytest.mark.parametrize(
    "flags, place, flip, named",
    [
        ({"random_flip": True}, None, False, "no image is mirrored (0 of 40)"),
        ({"random_flip": True}, None, True, "every image is mirrored (40 of 40)"),
        ({}, 0.5, False, "always cut at the center"),
        ({}, 0.0, False, "always cut at the upper or left end"),
        ({}, 1.0, False, "always cut at the lower or right end"),
        ({"color_jitter": 0.2}, None, False, "no image's colors are jittered"),
    ],
)
def test_an_augmentation_that_never_comes_is_named(flags, place, flip, named):
    generator, draws, declared = np.random.default_rng(3), Draws(), replace(PLAIN, **flags)
    for _ in range(5):
        pictures = [crop(resized(image), generator.random() if place is None else place) for image in LARGE]
        shown = unit(pictures)
        assert verdict(shown[..., ::-1] if flip else shown, LARGE_FILES, declared, draws).healthy
    assert [named in check.message for check in draws.checks(declared) if not check.healthy] == [True]


def test_what_cannot_be_told_is_not_counted():
    """Images that equal their mirror image, and crops that all look alike."""
    draws, declared = Draws(), replace(PLAIN, random_flip=True, color_jitter=0.3)
    plain = np.zeros((32, 90, 3), np.uint8)
    for _ in range(50):
        verdict(unit([plain[:, :32]]), [encoded(plain)], declared, draws)
    assert (draws.sided, draws.plain) == (0, 0) and set(draws.places.values()) == {0.0}
    assert all(check.healthy for check in draws.checks(declared))


def test_half_precision_and_an_older_decoder_are_no_deviation():
    half = torch.as_tensor(CLEAN, dtype=torch.bfloat16)
    assert check_images(half, FILES, PLAIN)[0].healthy
    pictures = unit([crop(resized(image)) for image in LARGE])
    shown = pictures + np.random.default_rng(0).choice([-1, 0, 0, 1], pictures.shape) / 127.5
    assert verdict(shown, LARGE_FILES).healthy


@pytest.mark.parametrize("period", [8, 50])
def test_flips_that_repeat_are_said_with_what_they_repeat_in(period):
    drawn = np.random.default_rng(5).random(1000) < 0.5
    declared, periods = replace(PLAIN, random_flip=True), {"batch": 8, "pass over the data": 50}
    numbers = range(0, 100) if period == 50 else range(0, 400, 3)

    def found(of_number) -> list:
        draws = Draws()
        for number in numbers:
            draws.flips[number] = bool(of_number(number))
            draws.sided += 1
            draws.mirrored += draws.flips[number]
        return [check for check in draws.checks(declared, periods) if check.name == "mirrored"]

    [healthy] = found(lambda number: drawn[number])
    [repeated] = found(lambda number: drawn[number % period + period])
    assert healthy.healthy, healthy
    assert repeated.healthy is False and ("each batch" if period == 8 else "each pass over the data") in repeated.message


@pytest.mark.parametrize("size", [(512, 700), (700, 512)])
@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_the_place_of_a_large_image_is_found_by_some_of_its_lines(size, jitter):
    generator = np.random.default_rng(3)
    declared = replace(PLAIN, resolution=512, random_flip=True, color_jitter=jitter)
    planes = unit([scene(*size, 3, generator)])[0]
    top, left = (room * 2 // 3 for room in (size[0] - 512, size[1] - 512))
    shown = planes[:, top : top + 512, left : left + 512][..., ::-1]
    shown = jittered(shown[None], jitter, generator)[0] if jitter else shown
    match = find(shown, planes, declared)
    assert (match.mirrored, match.top, match.left) == (True, top, left) and match.error < 1e-3


def test_an_image_that_its_lines_do_not_tell_is_looked_for_as_a_whole():
    """Every second row alone differs from place to place."""
    planes = np.zeros((1, 256, 300))
    planes[:, 1::2] = np.random.default_rng(0).uniform(-1, 1, (1, 128, 300))
    match = find(planes[:, :, 20:276], planes, replace(PLAIN, resolution=256, channels=1))
    assert (match.top, match.left, match.error) == (0, 20, 0.0)

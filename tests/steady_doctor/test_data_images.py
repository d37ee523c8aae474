"""Images beside their files: silent about what the pipeline really does, and a code for each way of showing something else."""

import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import slow_turns
from diffusers import AutoencoderKL, AutoencoderTiny
from PIL import Image, ImageFilter

from steady_doctor.data.declared import DeclaredImages, DeclaredLatents, sides_of
from steady_doctor.data.images import Draws, check_images
from steady_doctor.data.latents import Latents
from steady_doctor.data.place import find
from steady_doctor.words import finding
from utils.data.dataset import load_images
from utils.data.training_data import TrainingSamples
from utils.options.flags import RunOptions

PLAIN = DeclaredImages((32, 32), 3)
LUMA = [0.299, 0.587, 0.114]


def scene(height: int, width: int, channels: int, generator) -> np.ndarray:
    """uint8 [height, width, channels] with the spectrum of photographs, 1 / frequency."""
    frequencies = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    frequencies[0, 0] = 1
    planes = np.fft.ifft2(np.fft.fft2(generator.standard_normal((channels, height, width))) / frequencies).real
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


def found(shown, files, declared=PLAIN, **more) -> list:
    """Whose sentences can all be made."""
    images = torch.as_tensor(np.ascontiguousarray(shown), dtype=more.pop("dtype", torch.float32))
    return [finding(one) and one for one in check_images(3, images, files, declared, **more)]


def codes(*args, **more) -> list[str]:
    return [one.code for one in found(*args, **more)]


GENERATOR = np.random.default_rng(0)
SCENES = [scene(32, 32, 3, GENERATOR) for _ in range(8)]
FILES = [encoded(image) for image in SCENES]
CLEAN = unit(SCENES)
LARGE = [scene(70, 64 + 6 * number, 3, GENERATOR) for number in range(8)]
LARGE_FILES = [encoded(image) for image in LARGE]


def jittered(x, strength, generator, about=-1.0) -> np.ndarray:
    """As torchvision's ColorJitter in the order brightness, contrast, saturation; `about`: what brightness leaves as it is."""
    images = []
    for v in x:
        brightness, contrast, saturation = generator.uniform(1 - strength, 1 + strength, 3)
        v = (brightness * (v - about) + about).clip(-1, 1)
        v = (contrast * v + (1 - contrast) * np.tensordot(LUMA, v, 1).mean()).clip(-1, 1)
        images.append((saturation * v + (1 - saturation) * np.tensordot(LUMA, v, 1)).clip(-1, 1))
    return np.stack(images)


def with_patch(x):
    x = x.copy()
    x[:, :, 8:20, 4:14] = 0
    return x


def drawn(change):
    return lambda x: unit([change(Image.fromarray(image)) for image in SCENES])


LINES = {  # what a straight line explains: gain, offset
    "in [0, 1]": (lambda x: (x + 1) / 2, 0.5, 0.5),
    "in [0, 255]": (lambda x: (x + 1) * 127.5, 127.5, 127.5),
    "scaled twice": (lambda x: x / 127.5 - 1, 1 / 127.5, -1),
    "divided by 128": (lambda x: (x + 1) * 127.5 / 128 - 1, 127.5 / 128, -0.5 / 128),
    "negative": (lambda x: -x, -1, 0),
    "darker, clamped": (lambda x: (x - 0.3).clip(-1, 1), 1, -0.3),
    "more contrast, clamped": (lambda x: (1.5 * x).clip(-1, 1), 1.5, 0),
    "another autoencoder's scale": (lambda x: 0.18215 * x, 0.18215, 0),
}
OTHERS = {
    "gamma": lambda x: 2 * ((x + 1) / 2) ** 2.2 - 1,
    "means of their own": lambda x: ((x + 1) / 2 - np.array([0.1, 0.2, 0.3])[:, None, None]) / 0.5,
    "standardized by itself": lambda x: (x - x.mean((1, 2, 3), keepdims=True)) / x.std((1, 2, 3), keepdims=True),
    "sixteen levels": lambda x: np.rint(x * 127.5 + 127.5) // 16 * 16 / 127.5 - 1,
    "BGR": lambda x: x[:, ::-1],
    "gray": lambda x: np.repeat(np.einsum("c,bchw->bhw", LUMA, x)[:, None], 3, 1),
    "mirrored": lambda x: x[..., ::-1],
    "upside down": lambda x: x[:, :, ::-1],
    "rows and columns": lambda x: x.swapaxes(2, 3),
    "reshaped": lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape),
    "other rows": lambda x: np.roll(x, 1, 0),
    "black": lambda x: x * 0 - 1,
    "shifted": lambda x: np.roll(x, 1, 3),
    "patch": with_patch,
    "JPEG": drawn(lambda image: Image.open(io.BytesIO(encoded(image, "JPEG", quality=30)))),
    "blurred": drawn(lambda image: image.filter(ImageFilter.GaussianBlur(1.5))),
    "noise": lambda x: x + 0.1 * np.random.default_rng(9).standard_normal(x.shape),
    "jitter": lambda x: jittered(x, 0.5, np.random.default_rng(0)),
}


@pytest.mark.parametrize("channels", [3, 1])
def test_another_scale_is_found_with_its_gain_and_offset(channels):
    files = FILES if channels == 3 else [encoded(image[..., 0]) for image in SCENES]
    declared, clean = replace(PLAIN, channels=channels), CLEAN[:, :channels]
    assert codes(clean, files, declared) == []
    for name, (change, gain, offset) in LINES.items():
        (one,) = found(change(clean), files, declared)
        assert one.code == "data-rescaled", name
        assert one.figures["gain"] == pytest.approx(gain, abs=1e-4) and one.figures["offset"] == pytest.approx(offset, abs=1e-4)
        assert one.figures["count"] == one.figures["of"] == 8


@pytest.mark.parametrize("name", OTHERS)
def test_other_pixels_are_found(name):
    shown = OTHERS[name](CLEAN)
    (one,) = found(shown, FILES)
    assert one.code == "data-differs" and one.figures["count"] == 8
    assert one.figures["largest"] == pytest.approx(np.abs(shown - CLEAN).max(), abs=1e-6)
    if name in ("BGR", "upside down", "jitter", "gray"):  # done after the declared jitter, too
        colors, declared = jittered(CLEAN, 0.3, np.random.default_rng(1)), replace(PLAIN, color_jitter=0.3)
        assert codes(colors, FILES, declared) == []
        assert codes(OTHERS[name](colors), FILES, declared) == ["data-differs"]


def test_what_is_not_finite_or_of_another_shape_is_found_and_a_part_is_counted():
    shown = CLEAN.copy()
    shown[[1, 5]] = shown[[1, 5], :, ::-1]
    (one,) = found(shown, FILES)
    assert (one.code, one.figures["count"], one.figures["of"]) == ("data-differs", 2, 8)
    shown[3, 0, 0, 0] = np.nan
    assert codes(shown, FILES) == ["data-not-finite"] and codes(CLEAN[:, :, :16], FILES) == ["data-shape"]


def test_files_of_many_kinds_and_damaged_ones(tmp_path):
    (tmp_path / "image").write_bytes(FILES[0])
    path = str(tmp_path / "image")
    files = [
        FILES[0],
        path,
        tmp_path / "image",
        SimpleNamespace(data=None, path=path),
        SimpleNamespace(data=FILES[0], path="x"),
    ]
    assert codes(np.repeat(CLEAN[:1], 5, 0), [*files]) == [] == codes(CLEAN[:2], [b"no image", FILES[1]])
    assert codes(CLEAN[:2], [b"no image", b""]) == []


def resized(image, how=Image.Resampling.BILINEAR, sides=(32, 32)):
    scale = max(sides[0] / image.shape[0], sides[1] / image.shape[1])
    return Image.fromarray(image).resize(tuple(int(scale * side + 1e-9) for side in image.shape[1::-1]), how)


def crop(image, place=0.0, sides=(32, 32)):
    left, top = round(place * (image.width - sides[1])), round(place * (image.height - sides[0]))
    return image.crop((left, top, left + sides[1], top + sides[0]))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("sides", [(32, 32), (24, 40)])
def test_a_crop_of_another_resize_is_found(flip, sides):
    declared = replace(PLAIN, sides=sides, random_flip=flip)
    for place in (0.2, 0.5):
        shown = unit([crop(resized(image, sides=sides), place, sides) for image in LARGE])
        assert codes(shown, LARGE_FILES, declared) == []
        assert codes(shown, LARGE_FILES, replace(declared, center_crop=True)) == ["data-differs"] * (place == 0.2)
        older = shown + np.random.default_rng(0).choice([-1, 0, 0, 1], shown.shape) / 127.5  # another version's rounding
        assert codes(older, LARGE_FILES, declared) == []
        assert codes((shown + 1) * 127.5 / 128 - 1, LARGE_FILES, declared) == ["data-rescaled"]
    nearest = [crop(resized(image, Image.Resampling.NEAREST, sides), 0.4, sides) for image in LARGE]
    squeezed = [Image.fromarray(image).resize(sides[::-1], Image.Resampling.BILINEAR) for image in LARGE]
    assert codes(unit(nearest), LARGE_FILES, declared) == ["data-differs"] == codes(unit(squeezed), LARGE_FILES, declared)
    assert sides_of("24x40") == (24, 40) and sides_of(32) == (32, 32)


def test_arrays_have_the_range_that_is_known_or_declared():
    floats, declared = [image.astype(np.float32) / 25.5 - 4 for image in SCENES], replace(PLAIN, data_range=(-4, 6))
    assert codes(CLEAN, SCENES) == [] == codes(CLEAN, floats, declared)
    assert codes(CLEAN, floats, replace(PLAIN, data_range=(-6, 8))) == ["data-rescaled"]
    assert codes(CLEAN, FILES, dtype=torch.bfloat16) == []


def test_what_a_file_says_about_itself_is_heeded():
    """EXIF, transparency and 16 bits."""
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = [encoded(image, exif=exif) for image in SCENES]
    assert codes(np.rot90(CLEAN, -1, (2, 3)), turned) == [] and codes(CLEAN, turned) == ["data-differs"]
    clear = [np.dstack([image, np.where(image[..., :1] > 90, 255, 0).astype(np.uint8)]) for image in SCENES]
    on_red = unit([np.where(image[..., 3:] > 0, image[..., :3], np.uint8([255, 0, 0])) for image in clear])
    files, declared = [encoded(image) for image in clear], replace(PLAIN, background="red")
    assert codes(on_red, files, declared) == [] and codes(CLEAN, files, declared) == ["data-differs"]
    assert codes(on_red, files) == ["data-differs"]
    deep = [image[..., 0].astype(np.uint16) * 200 + 7 for image in SCENES]
    files, declared = [encoded(image) for image in deep], replace(PLAIN, channels=1)
    assert codes(np.stack(deep)[:, None] / 32767.5 - 1, files, replace(declared, max_value=65535)) == []
    assert codes(unit([np.rint(image / 257) for image in deep]), files, declared) == []
    assert codes(unit([image.clip(0, 255) for image in deep]), files, declared) == ["data-differs"]


# ---- what was drawn


def looks(draw, declared, batches=5, size=8, passes=1):
    """Codes of what `draw` gives for image `row` in pass `number`, over batches of all images in turn."""
    draws, sample = Draws(declared), 0
    files = LARGE_FILES if declared.sides == (32, 32) else FILES
    for number in range(passes):
        for _ in range(batches):
            shown = np.concatenate([draw(LARGE[row], row, number) for row in range(size)])
            samples = [(sample + row, row + 1000 * sample * (passes == 1)) for row in range(size)]
            assert codes(shown, files[:size], declared, draws=draws, samples=samples) == []
            sample += size
    return [finding(one) and one.code for one in draws.found(3, {"batch": size, "pass over the data": batches * size})]


def shows(flip=lambda row, number: False, place=None, strength=0.0):
    generator = np.random.default_rng(3)

    def draw(image, row, number):
        shown = unit([crop(resized(image), generator.random() if place is None else place)])
        shown = jittered(shown, strength, generator) if strength else shown
        return shown[..., ::-1] if flip(row, number) else shown

    return draw


COINS = np.random.default_rng(5)
FLIPS, JITTER = replace(PLAIN, random_flip=True), replace(PLAIN, color_jitter=0.2)
DRAWN = {
    "crops": (shows(), PLAIN, {}, []),
    "flips": (shows(lambda *_: COINS.random() < 0.5), FLIPS, {}, []),
    "jitter": (shows(strength=0.2), JITTER, {"passes": 4, "batches": 1}, []),
    "never mirrored": (shows(), FLIPS, {}, ["data-flips"]),
    "always mirrored": (shows(lambda *_: True), FLIPS, {}, ["data-flips"]),
    "at the center": (shows(place=0.5), PLAIN, {}, ["data-crop"]),
    "at the left": (shows(place=0.0), PLAIN, {}, ["data-crop"]),
    "at the right": (shows(place=1.0), PLAIN, {}, ["data-crop"]),
    "together": (shows(lambda row, number: number % 2), FLIPS, {"passes": 6, "batches": 1}, ["data-flips-together"]),
    "by place": (shows(lambda row, number: row % 2), FLIPS, {"batches": 6}, ["data-flips-again"]),
    "by row": (
        shows(lambda row, number: row % 2, 0.3),
        FLIPS,
        {"passes": 6, "batches": 1},
        ["data-flips-again", "data-drawn-again"],
    ),
    "no jitter": (shows(place=0.3), JITTER, {"passes": 4, "batches": 1}, ["data-drawn-again"]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_chance_does_not_do_is_found(name):
    draw, declared, more, expected = DRAWN[name]
    assert looks(draw, declared, **more) == expected


def test_images_that_tell_nothing_are_not_counted():
    """They equal their mirror image, their crops all look alike, or no jitter shows in them."""
    plain, draws = np.zeros((32, 90, 3), np.uint8), Draws(replace(FLIPS, color_jitter=0.3))
    for number in range(50):
        assert codes(unit([plain[:, :32]]), [encoded(plain)], FLIPS, draws=draws, samples=[(number, 7)]) == []
    assert list(draws.found(3, {"batch": 1})) == [] and draws.sided == draws.again == 0


@pytest.mark.parametrize("size", [(512, 700), (700, 512)])
@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_the_place_of_a_large_image_is_found(size, jitter):
    generator = np.random.default_rng(3)
    planes = unit([scene(*size, 3, generator)])[0]
    top, left = (room * 2 // 3 for room in (size[0] - 512, size[1] - 512))
    shown = planes[None, :, top : top + 512, left : left + 512][..., ::-1]
    shown = jittered(shown, jitter, generator)[0] if jitter else shown[0]
    match = find(shown, planes, replace(PLAIN, sides=(512, 512), random_flip=True, color_jitter=jitter))
    assert (match.mirrored, match.at) == (True, max(top, left)) and match.error < 1e-3


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
        photograph.quantize(20).save(folder / f"{orientation}h.png", transparency=3)
        photograph.convert("CMYK").save(folder / f"{orientation}.tiff")
        photograph.putalpha(gray.resize(photograph.size))
        photograph.save(folder / f"{orientation}a.png", exif=exif)
        gray.point(lambda value: 255 * (value > 120)).convert("1").save(folder / f"{orientation}b.png")
        Image.fromarray(np.asarray(gray).astype(np.uint16) * 250 + orientation).save(folder / f"{orientation}d.png")
        Image.merge("LA", [gray, gray]).save(folder / f"{orientation}la.png")
    Image.fromarray(np.full((8, 8), 77, np.uint8)).save(folder / "constant.png")
    flags = {"resolution": 24, "train_batch_size": 8, "random_flip": True, "color_jitter": jitter} | flags
    options = RunOptions(train_data_dir=str(folder), cache_dir=str(tmp_path / "cache"), output_dir="unused", **flags)
    images = load_images(options)
    samples = TrainingSamples(images, Accelerator(cpu=True), options)
    declared = DeclaredImages(
        (24, 24), options.image_channels, options.center_crop, True, jitter, options.background, images.max_value
    )
    draws = Draws(declared)
    for batch in samples.batches(0, 10):
        batch = samples.on_device(batch)
        rows = samples.dataset_rows(batch.sample_numbers).tolist()
        pairs = list(zip(batch.sample_numbers.tolist(), rows))
        assert list(check_images(3, batch.clean_images, images.files.at(rows), declared, draws, pairs)) == []
    assert list(draws.found(3, {"batch": 8, "pass over the data": len(images)})) == []
    assert draws.sided > 40 and 0.2 < draws.mirrored / draws.sided < 0.8 and draws.again > 5


# ---- latents


@pytest.mark.parametrize("tiny", [False, True])
def test_latents_of_other_images_or_of_another_scale_are_found(tmp_path, tiny):
    torch.manual_seed(0)
    if tiny:
        sizes = {f"{side}_block_out_channels": (8, 8) for side in ("encoder", "decoder")}
        sizes |= {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    else:
        sizes = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        sizes |= {"block_out_channels": (8, 8), "norm_num_groups": 4}
    network = (AutoencoderTiny if tiny else AutoencoderKL)(
        in_channels=1, out_channels=1, latent_channels=2, scaling_factor=0.5, **sizes
    ).eval()
    network.save_pretrained(tmp_path)
    files = list(np.random.default_rng(0).integers(0, 256, (4, 32, 32), dtype=np.uint8))
    images = torch.from_numpy(np.stack(files)).float()[:, None] / 127.5 - 1
    images[1] = images[1].flip(-1)  # as --random_flip does
    with torch.no_grad():
        given = network.encode(images)
    values = (
        given.latents if tiny else given.latent_dist.mean + given.latent_dist.std * torch.randn_like(given.latent_dist.mean)
    )

    def latents(shown, mean=(0.1, -0.2), std=(0.5, 0.25), spread=None):
        judge = Latents(DeclaredLatents(str(tmp_path), mean, std, spread))
        return [finding(one) and one.code for one in judge.check(3, shown, files, replace(FLIPS, channels=1), "training")]

    mean, std = (torch.tensor(values)[:, None, None] for values in ([0.1, -0.2], [0.5, 0.25]))
    right = (values - mean) / std
    assert latents(right) == [] == latents(right.half())
    for other in (right * 3, right[:, :1].expand(-1, 3, -1, -1), right * torch.nan, *[right.flip(0), right.flip(-2)] * tiny):
        assert latents(other) == ["data-latents-differ"]
    assert latents(values / 4, (0, 0), (4.0, 4.0), 0.5) == []  # a scaling factor of 0.5, for a spread of 0.5
    assert latents(values / 2, (0, 0), (2.0, 2.0), 0.5) == ["data-latents-scale"]
    assert list(Latents(DeclaredLatents(str(tmp_path / "gone"), [0], [1])).check(3, right, files, PLAIN, "training")) == []

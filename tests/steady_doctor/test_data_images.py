"""Images beside their files: silent about what the pipeline really does, and a code for each way of showing something else."""

import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny
from PIL import Image, ImageFilter

from steady_doctor.data.declared import DeclaredImages, DeclaredLatents, sides_of
from steady_doctor.data.images import Draws, check_images
from steady_doctor.data.latents import Latents
from steady_doctor.data.place import find
from steady_doctor.words import finding

PLAIN = DeclaredImages((32, 32), 3)
LUMA = [0.299, 0.587, 0.114]


def scene(height: int, width: int, channels: int, generator) -> np.ndarray:
    """uint8 [height, width, channels], smooth and rough."""
    rough = generator.integers(0, 60, (height, width, channels), np.uint8)
    smooth = generator.integers(20, 180, (height // 6, width // 6, channels), np.uint8).squeeze()
    return rough + np.asarray(Image.fromarray(smooth).resize((width, height))).clip(0, 195).reshape(rough.shape)


def encoded(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **options)
    return file.getvalue()


def unit(images) -> np.ndarray:
    """uint8 [B, H, W, C] as [B, C, H, W] in [-1, 1]."""
    return np.stack([np.atleast_3d(np.asarray(image)) for image in images]).transpose(0, 3, 1, 2) / 127.5 - 1


def found(shown, files, declared=PLAIN, dtype=torch.float32, **more) -> list:
    """Whose sentences can all be made."""
    images = torch.as_tensor(np.ascontiguousarray(shown), dtype=dtype)
    return [finding(one) and one for one in check_images(3, images, files, declared, **more)]


def codes(*args, **more) -> list[str]:
    return [one.code for one in found(*args, **more)]


SCENES = [scene(32, 32, 3, np.random.default_rng(number)) for number in range(8)]
LARGE = [scene(70, 64 + 6 * number, 3, np.random.default_rng(number)) for number in range(8)]
FILES, LARGE_FILES, CLEAN = [*map(encoded, SCENES)], [*map(encoded, LARGE)], unit(SCENES)


def jittered(x, strength, generator, about=-1) -> np.ndarray:
    """As torchvision's ColorJitter in the order brightness, contrast, saturation; `about`: what brightness leaves as it is."""
    images = []
    for v in x:
        brightness, contrast, saturation = generator.uniform(1 - strength, 1 + strength, 3)
        v = (brightness * (v - about) + about).clip(-1, 1)
        v = (contrast * v + (1 - contrast) * np.tensordot(LUMA, v, 1).mean()).clip(-1, 1)
        images.append((saturation * v + (1 - saturation) * np.tensordot(LUMA, v, 1)).clip(-1, 1))
    return np.stack(images)


LINES = {  # what a straight line explains: gain, offset
    "in [0, 1]": (lambda x: (x + 1) / 2, 0.5, 0.5),
    "divided by 128": (lambda x: (x + 1) * 127.5 / 128 - 1, 127.5 / 128, -0.5 / 128),
    "negative": (lambda x: -x, -1, 0),
    "darker, clamped": (lambda x: (x - 0.3).clip(-1, 1), 1, -0.3),
    "another autoencoder's scale": (lambda x: 0.18215 * x, 0.18215, 0),
}
OTHERS = {
    "gamma": lambda x: 2 * ((x + 1) / 2) ** 2.2 - 1,
    "standardized by itself": lambda x: (x - x.mean((1, 2, 3), keepdims=True)) / x.std((1, 2, 3), keepdims=True),
    "BGR": lambda x: x[:, ::-1],
    "gray": lambda x: np.repeat(np.einsum("c,bchw->bhw", LUMA, x)[:, None], 3, 1),
    "upside down": lambda x: x[:, :, ::-1],
    "other rows": lambda x: np.roll(x, 1, 0),
    "shifted": lambda x: np.roll(x, 1, 3),
    "JPEG": lambda x: unit([Image.open(io.BytesIO(encoded(image, "JPEG", quality=30))) for image in SCENES]),
    "blurred": lambda x: unit([Image.fromarray(image).filter(ImageFilter.GaussianBlur(1.5)) for image in SCENES]),
    "jitter": lambda x: jittered(x, 0.5, np.random.default_rng(0)),
}


@pytest.mark.parametrize("channels", [3, 1])
def test_another_scale_is_found_with_its_gain_and_offset(channels):
    files, declared = [encoded(image[..., :channels].squeeze()) for image in SCENES], replace(PLAIN, channels=channels)
    assert codes(CLEAN[:, :channels], files, declared) == []
    for name, (change, *line) in LINES.items():
        (one,) = found(change(CLEAN[:, :channels]), files, declared)
        assert one.code == "data-rescaled" and one.figures["count"] == one.figures["of"] == 8, name
        assert [one.figures["gain"], one.figures["offset"]] == pytest.approx(line, abs=1e-4)


def test_other_pixels_are_found():
    for name, change in OTHERS.items():
        (one,) = found(change(CLEAN), FILES)
        assert one.code == "data-differs" and one.figures["count"] == 8, name
        assert one.figures["largest"] == pytest.approx(np.abs(change(CLEAN) - CLEAN).max(), abs=1e-6)


def test_what_is_done_beside_the_declared_jitter_is_found():
    declared, generator = replace(PLAIN, color_jitter=0.3), np.random.default_rng(1)
    colors = jittered(CLEAN, 0.3, generator)
    assert codes(colors, FILES, declared) == []
    others = [OTHERS[name](colors) for name in ("BGR", "upside down", "gray")]
    for shown in (*others, jittered(CLEAN, 0.7, generator), jittered(CLEAN, 0.3, generator, about=0)):
        assert codes(shown, FILES, declared) in (["data-differs"], ["data-rescaled"])


def test_what_is_not_finite_or_of_another_shape_is_found_and_a_part_is_counted():
    shown = CLEAN.copy()
    shown[[1, 5]] = shown[[1, 5], :, ::-1]
    (one,) = found(shown, FILES)
    assert (one.code, one.figures["count"], one.figures["of"]) == ("data-differs", 2, 8)
    shown[3, 0, 0, 0] = np.nan
    assert codes(shown, FILES) == ["data-not-finite"] and codes(CLEAN[:, :, :16], FILES) == ["data-shape"]


def test_damaged_files_are_left_out_and_paths_are_read(tmp_path):
    (tmp_path / "image").write_bytes(FILES[0])
    paths = [tmp_path / "image", SimpleNamespace(data=None, path=str(tmp_path / "image")), SimpleNamespace(data=FILES[0])]
    assert codes(np.repeat(CLEAN[:1], 3, 0), paths) == [] == codes(CLEAN[:2], [b"no image", FILES[1]])


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


def test_the_place_of_a_large_image_is_found_though_a_few_lines_do_not_tell():
    planes = np.zeros((1, 256, 300))
    planes[:, 1::2] = np.random.default_rng(0).uniform(-1, 1, (1, 128, 300))
    match = find(planes[:, :, 20:276], planes, DeclaredImages((256, 256), 1))
    assert (match.at, match.error) == (20, 0)


def test_arrays_have_the_range_that_is_known_or_declared():
    floats, declared = [image.astype(np.float32) / 25.5 - 4 for image in SCENES], replace(PLAIN, data_range=(-4, 6))
    assert codes(CLEAN, SCENES) == [] == codes(CLEAN, floats, declared)
    assert codes(CLEAN, floats, replace(PLAIN, data_range=(-6, 8))) == ["data-rescaled"]
    assert codes(CLEAN, FILES, dtype=torch.bfloat16) == []


def test_what_a_file_says_about_itself_is_heeded():
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


def shows(flip=lambda row, number: False, place=None, strength=0.0):
    generator = np.random.default_rng(3)

    def draw(row, number):
        image = crop(resized(LARGE[row]), generator.random() if place is None else place)
        shown = jittered(unit([image]), strength, generator)
        return shown[..., ::-1] if flip(row, number) else shown

    return draw


FLIPS, JITTER = replace(PLAIN, random_flip=True), replace(PLAIN, color_jitter=0.2)
DRAWN = {  # what is shown, declared, passes over the data, found
    "crops": (shows(), PLAIN, 5, []),
    "flips": (shows(lambda row, number: hash((row, number)) // 7 % 2), FLIPS, 6, []),
    "jitter": (shows(strength=0.2), JITTER, 4, []),
    "never mirrored": (shows(), FLIPS, 5, ["data-flips"]),
    "at the center": (shows(place=0.5), PLAIN, 5, ["data-crop"]),
    "together": (shows(lambda row, number: number % 2), FLIPS, 6, ["data-flips-together"]),
    "by row": (shows(lambda row, number: row % 2, 0.3), FLIPS, 6, ["data-flips-again", "data-drawn-again"]),
    "no jitter": (shows(place=0.3), JITTER, 4, ["data-drawn-again"]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_chance_does_not_do_is_found(name):
    draw, declared, passes, expected = DRAWN[name]
    draws = Draws(declared)
    for number in range(passes):
        shown, samples = np.concatenate([draw(row, number) for row in range(8)]), [(8 * number + row, row) for row in range(8)]
        assert codes(shown, LARGE_FILES, declared, draws=draws, samples=samples) == []
    assert [finding(one) and one.code for one in draws.found(3, {"batch": 8})] == expected


def test_images_that_tell_nothing_are_not_counted():
    plain, draws = np.zeros((32, 90, 3), np.uint8), Draws(replace(FLIPS, color_jitter=0.3))
    for number in range(50):
        assert codes(unit([plain[:, :32]]), [encoded(plain)], FLIPS, draws=draws, samples=[(number, 7)]) == []
    assert list(draws.found(3, {"batch": 1})) == [] and draws.sided == draws.again == 0


def test_latents_of_other_images_or_of_another_scale_are_found(tmp_path):
    torch.manual_seed(0)
    blocks = {f"{side}_block_out_channels": (8, 8) for side in ("encoder", "decoder")}
    blocks |= {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1), "scaling_factor": 0.5}
    network = AutoencoderTiny(in_channels=1, out_channels=1, latent_channels=2, **blocks).eval()
    network.save_pretrained(tmp_path)
    files = list(np.random.default_rng(0).integers(0, 256, (4, 32, 32), dtype=np.uint8))
    images = torch.from_numpy(np.stack(files)).float()[:, None] / 127.5 - 1
    images[1] = images[1].flip(-1)  # as a random flip does
    with torch.no_grad():
        values = network.encode(images).latents

    def latents(shown, mean=(0.1, -0.2), std=(0.5, 0.25), spread=None, path=tmp_path):
        judge = Latents(DeclaredLatents(str(path), mean, std, spread))
        return [finding(one) and one.code for one in judge.check(3, shown, files, replace(FLIPS, channels=1), "training")]

    mean, std = (torch.tensor(values)[:, None, None] for values in ([0.1, -0.2], [0.5, 0.25]))
    right = (values - mean) / std
    assert latents(right) == [] == latents(right.half()) == latents(right * 3, path=tmp_path / "gone")
    for other in (right * 3, right[:, :1].expand(-1, 3, -1, -1), right * torch.nan, right.flip(0), right.flip(-2)):
        assert latents(other) == ["data-latents-differ"]
    assert latents(values / 4, (0, 0), (4.0, 4.0), 0.5) == []  # a scaling factor of 0.5, for a spread of 0.5
    assert latents(values / 2, (0, 0), (2.0, 2.0), 0.5) == ["data-latents-scale"]

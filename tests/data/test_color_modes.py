"""Every Pillow mode against values worked out by hand with numpy."""

import io

import numpy as np
import pytest
from PIL import Image

from utils.data.color_modes import background_color, stack_planes, to_planes

WHITE = (255, 255, 255)
ORANGE = (255, 128, 0)
GENERATOR = np.random.default_rng(0)
GRAY = GENERATOR.integers(0, 256, (5, 4), dtype=np.uint8)
COLOR = GENERATOR.integers(0, 256, (5, 4, 3), dtype=np.uint8)
ALPHA = GENERATOR.integers(0, 256, (5, 4), dtype=np.uint8)
ALPHA[0, :2] = 0, 255


def convert(image, channels=3, background=WHITE, max_value=255):
    pixels = stack_planes(to_planes(image, channels, background, max_value), channels, max_value)
    assert pixels.shape == (channels, image.height, image.width)
    assert pixels.dtype == (np.uint8 if max_value == 255 else np.uint16)
    return pixels


def luma(color):
    """[height, width, 3] -> [height, width], ITU-R 601 in fixed point."""
    red, green, blue = np.moveaxis(color.astype(np.int64), -1, 0)
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


def composite(color, alpha, background):
    alpha = alpha[..., None].astype(np.float64) / 255
    return np.floor(color * alpha + np.array(background) * (1 - alpha) + 0.5)


def check(image, expected, background=WHITE, tolerance=0):
    """`expected` [height, width] or [height, width, 3] in 0..255: as 3 channels, as 1, and in 16 bits."""
    if expected.ndim == 2:
        expected = np.repeat(expected[..., None], 3, axis=-1)
    rgb = convert(image, 3, background)
    assert np.abs(rgb.transpose(1, 2, 0).astype(int) - expected).max() <= tolerance
    single = convert(image, 1, background)
    assert np.abs(single[0].astype(int) - luma(expected)).max() <= tolerance
    assert np.array_equal(convert(image, 3, background, 65535), rgb.astype(np.uint16) * 257)
    assert np.array_equal(convert(image, 1, background, 65535), single.astype(np.uint16) * 257)


def test_bilevel_gray_and_rgb():
    check(Image.fromarray(GRAY > 99), np.where(GRAY > 99, 255, 0))
    check(Image.fromarray(GRAY), GRAY)
    check(Image.fromarray(COLOR), COLOR)


@pytest.mark.parametrize("background", [WHITE, (0, 0, 0), ORANGE])
def test_transparent_modes_show_the_background_and_not_their_hidden_color(background):
    rgba = Image.fromarray(np.concatenate([COLOR, ALPHA[..., None]], axis=-1))
    check(rgba, composite(COLOR, ALPHA, background), background)
    assert tuple(convert(rgba, 3, background)[:, 0, 0]) == background  # fully transparent
    gray_alpha = Image.fromarray(np.stack([GRAY, ALPHA], axis=-1))
    assert gray_alpha.mode == "LA"
    check(gray_alpha, composite(np.repeat(GRAY[..., None], 3, -1), ALPHA, background), background)
    # Premultiplied colors lose up to half a step before they are divided by alpha again.
    shown = ALPHA >= 128
    for image, color in [
        (rgba.convert("RGBa"), COLOR),
        (gray_alpha.convert("La"), np.repeat(GRAY[..., None], 3, -1)),
    ]:
        difference = convert(image, 3, background).transpose(1, 2, 0) - composite(color, ALPHA, background)
        assert np.abs(difference[shown]).max() <= 2


def palette_image():
    image = Image.new("P", (4, 5))
    image.putdata((GRAY % 4).ravel().tolist())
    palette = GENERATOR.integers(0, 256, (4, 3), dtype=np.uint8)
    image.putpalette(palette.tobytes())
    return image, palette


def saved(image, **options):
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return Image.open(file)


def test_palette():
    """Without transparency, with a transparent index, and with alpha for each."""
    image, palette = palette_image()
    check(image, palette[GRAY % 4])
    for transparency, alphas in ((2, [255, 255, 0, 255]), (bytes([0, 77, 200, 255]), [0, 77, 200, 255])):
        stored = saved(image, transparency=transparency)
        assert stored.mode == "P"
        check(stored, composite(palette[GRAY % 4], np.array(alphas)[GRAY % 4], ORANGE), ORANGE)


def test_gray_and_rgb_with_a_transparent_color():
    gray = saved(Image.fromarray(GRAY), transparency=int(GRAY[1, 1]))
    check(gray, np.where((GRAY[1, 1] == GRAY)[..., None], ORANGE, GRAY[..., None]), ORANGE)
    rgb = saved(Image.fromarray(COLOR), transparency=tuple(COLOR[1, 1].tolist()))
    check(rgb, np.where((COLOR[1, 1] == COLOR).all(-1, keepdims=True), ORANGE, COLOR), ORANGE)


def test_cmyk():
    inks = GENERATOR.integers(0, 256, (5, 4, 4), dtype=np.uint8)
    white_left = 255.0 - inks
    check(Image.fromarray(inks, "CMYK"), np.rint(white_left[..., :3] * white_left[..., 3:] / 255), tolerance=1)


def test_ycbcr():
    image = Image.fromarray(COLOR).convert("YCbCr")
    y, cb, cr = np.moveaxis(np.asarray(image, np.float64), -1, 0)
    rgb = [y + 1.402 * (cr - 128), y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128), y + 1.772 * (cb - 128)]
    check(image, np.clip(np.stack(rgb, -1), 0, 255), tolerance=1)


DEEP = np.array([[0, 1, 128, 129], [257, 300, 32767, 32768], [65406, 65407, 65534, 65535]], dtype=np.uint16)


def deep_image(mode):
    if mode == "I":
        return Image.fromarray(DEEP.astype(np.int32))
    order = ">u2" if mode == "I;16B" else "<u2"
    return Image.frombytes(mode, (4, 3), DEEP.astype(order).tobytes())


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N", "I"])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_is_scaled_and_never_saturated(mode, channels):
    image = deep_image(mode)
    assert image.mode == mode
    eight = convert(image, channels)
    assert eight[0].tolist() == [[0, 0, 0, 1], [1, 1, 127, 128], [254, 255, 255, 255]]
    assert (eight == eight[0]).all()
    kept = convert(image, channels, max_value=65535)
    assert (kept == DEEP).all()


@pytest.mark.parametrize("values", [[[-1, 5]], [[0, 65536]], [[0, 2**31 - 1]]])
def test_32_bit_beyond_16_bits_is_refused_with_its_range(values):
    image = Image.fromarray(np.array(values, np.int32))
    with pytest.raises(ValueError, match=rf"from {min(values[0])} to {max(values[0])}.*\[0, 65535\]"):
        convert(image)


def test_16_bit_with_a_transparent_gray():
    image = saved(deep_image("I;16"), transparency=300)
    assert image.mode.startswith("I")
    expected = np.where(DEEP[None] == 300, (np.array(ORANGE) * 257)[:, None, None], DEEP[None])
    assert np.array_equal(convert(image, 3, ORANGE, 65535), expected)
    assert np.array_equal(convert(image, 3, ORANGE), np.rint(expected / 257))
    assert convert(image, 1, ORANGE)[0, 1, 1] == luma(np.array(ORANGE))


def test_float():
    values = np.array([[0.0, 1.0, 0.5], [0.001, 0.25, 0.999]], np.float32)
    image = Image.fromarray(values)
    assert image.mode == "F"
    assert convert(image, 1)[0].tolist() == [[0, 255, 128], [0, 64, 255]]
    assert (convert(image, 3) == convert(image, 1)).all()
    assert np.array_equal(convert(image, 1, max_value=65535)[0], np.rint(values * 65535.0))


@pytest.mark.parametrize(("worst", "shown"), [(1.5, "0.0 to 1.5"), (-0.25, "-0.25 to"), (np.nan, "nan"), (255, "255")])
def test_float_outside_the_unit_range_is_refused_with_its_range(worst, shown):
    image = Image.fromarray(np.array([[0.0, worst]], np.float32))
    with pytest.raises(ValueError, match=rf"{shown}.*\[0, 1\]"):
        convert(image)


def test_background_colors():
    assert background_color("white") == WHITE
    assert background_color("#ff8000") == ORANGE
    for bad in ("nosuchcolor", "#ffffff80"):
        with pytest.raises(ValueError, match=bad):
            background_color(bad)

"""What --resolution may be: one number, or height x width."""

import pytest

from utils.core.errors import UserError
from utils.core.size import Size, describe_size
from utils.options.flags import DataOptions
from utils.options.parser import parse_options


@pytest.mark.parametrize(
    "text, recorded, shape",
    [("64", 64, (3, 64, 64)), ("64x96", "64x96", (3, 64, 96)), ("48x32", "48x32", (3, 48, 32)), ("32x32", 32, (3, 32, 32))],
)
def test_a_size_is_height_before_width(text, recorded, shape):
    options = parse_options(DataOptions, "", ["--resolution", text])
    assert options.resolution == recorded
    assert options.image_shape == shape
    assert Size.of(recorded).resolution == recorded
    assert DataOptions.from_record(vars(options)).image_shape == shape


@pytest.mark.parametrize("text", ["0", "64x", "x64", "64x0", "6.5", "64x32x3", "-8", "big", "64 96"])
def test_other_texts_are_refused_in_one_line(text):
    with pytest.raises(UserError, match=r"--resolution must be a number of pixels up to 16384, or two as .*; got"):
        parse_options(DataOptions, "", [f"--resolution={text}"])


def test_no_size_is_rounded_to_nothing():
    assert [describe_size(size) for size in (768, 115_200, 5e7, 2.5e9)] == ["0.8 kB", "0.1 MB", "50.0 MB", "2.5 GB"]

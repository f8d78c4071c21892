"""One form of every image, and its way through a PNG, bit by bit."""

import numpy as np
import pytest
from PIL import Image
from vision_samples import file_of, picture

from rlhf_core.errors import CorruptShardError, DataError
from rlhf_core.vision import canonical, from_png

pytestmark = pytest.mark.agents

ROTATED = 6  # EXIF orientation: turn it by 90 degrees clockwise to see it upright


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr"])
def test_every_mode_survives_a_png_bit_by_bit(mode):
    image = canonical(picture().convert(mode))

    back = from_png(image.to_png(), image.sha256, "images/x.png")

    assert back == image
    assert image.size == (30, 20)
    assert len(image.pixels) == 30 * 20 * 3


def test_what_is_transparent_lies_on_white():
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (255, 0, 0, 128))

    assert canonical(image).pixels == bytes([255, 255, 255, 255, 127, 127])


def test_transparency_of_a_palette_counts_too():
    image = Image.new("P", (1, 1), 0)
    image.putpalette([9, 9, 9])
    image.info["transparency"] = 0

    assert canonical(image).pixels == bytes([255, 255, 255])


def test_a_turned_photograph_is_upright():
    exif = Image.Exif()
    exif[0x0112] = ROTATED
    photograph = Image.open(__import__("io").BytesIO(file_of(picture(30, 20), "JPEG", exif=exif)))

    image = canonical(photograph)

    assert image.size == (20, 30)
    np.testing.assert_array_equal(np.asarray(image.to_pil()), np.rot90(np.asarray(photograph), -1))


def test_pixels_name_an_image_and_not_its_file():
    plain = picture()

    again = Image.open(__import__("io").BytesIO(file_of(plain, "BMP")))

    assert canonical(again).sha256 == canonical(plain).sha256
    assert canonical(plain.transpose(Image.Transpose.FLIP_LEFT_RIGHT)).sha256 != canonical(plain).sha256


def test_the_size_counts_where_the_bytes_are_the_same():
    flat, tall = Image.new("RGB", (4, 1)), Image.new("RGB", (1, 4))

    assert canonical(flat).pixels == canonical(tall).pixels
    assert canonical(flat).sha256 != canonical(tall).sha256


@pytest.mark.parametrize("mode", ["I", "F", "I;16"])
def test_more_than_eight_bits_a_channel_are_refused(mode):
    with pytest.raises(DataError, match=r"photo\.tif: its mode .* has more than 8 bits a channel"):
        canonical(Image.new(mode, (2, 2)), "photo.tif")


def test_a_stored_image_with_other_pixels_is_damaged():
    image, other = canonical(picture(seed=1)), canonical(picture(seed=2))

    with pytest.raises(CorruptShardError, match=r"images/x\.png is damaged: the sha256 of its pixels"):
        from_png(other.to_png(), image.sha256, "images/x.png")


@pytest.mark.parametrize("damage", [lambda png: png[:-40], lambda png: b"GIF89a" + png[6:], lambda png: b""])
def test_a_stored_image_that_is_no_whole_png_is_damaged(damage):
    image = canonical(picture())

    with pytest.raises(CorruptShardError, match=r"images/x\.png is no whole PNG"):
        from_png(damage(image.to_png()), image.sha256, "images/x.png")

"""An image from everywhere, within limits; what cannot be had is an error that names the place and the source."""

import base64
import time

import pytest
from PIL import Image
from vision_samples import ImageServer, data_url, file_of, picture

from rlhf_core.errors import DataError
from rlhf_core.vision import canonical
from rlhf_core.vision.sources import ImageLimits, read_image

pytestmark = pytest.mark.agents

PICTURE = picture()
EXPECTED = canonical(PICTURE)
LIMITS = ImageLimits(max_bytes=2**20, max_pixels=2**20, timeout=5)


@pytest.fixture(scope="module")
def server():
    server = ImageServer(PICTURE)
    yield server
    server.close()


def read(source, limits=LIMITS):
    return read_image(source, limits, "train.jsonl, row 3")


def test_every_kind_of_source_gives_the_same_image(tmp_path, server):
    path = tmp_path / "a picture.png"
    path.write_bytes(file_of(PICTURE))
    data = file_of(PICTURE)
    sources = [
        str(path),
        f"file://{str(path).replace(' ', '%20')}",
        f"{server.url}/picture",
        f"{server.url}/moved/3",
        data_url(PICTURE),
        base64.b64encode(data).decode(),
        data,
        bytearray(data),
        {"bytes": data, "path": None},
        {"bytes": None, "path": str(path)},
        {"url": data_url(PICTURE)},
        PICTURE,
        Image.open(path),
    ]

    assert [read(source) for source in sources] == [EXPECTED] * len(sources)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"])
def test_every_format_is_read(kind):
    image = read(file_of(PICTURE, kind))

    assert image.size == PICTURE.size


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such.png", r"row 3: the image no/such\.png: there is no such file .* no URL or base64"),
        (b"GIF but no image", r"row 3: the image of 16 bytes is no image of the formats"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image of the formats"),
        (file_of(PICTURE)[:-300], r"row 3: the image of \d+ bytes: its pixels cannot be read"),
        ("data:image/png;base64,%%%", "what follows 'base64,' is not base64"),
        ("data:nothing", "is no data URL"),
        (17, "row 3: the image given as int: it is a int: give a path"),
        ({"bytes": None, "path": None}, "it is a NoneType: give a path"),
        ("", "give a path, a URL"),
        ("a\0b.png", "there is no such file"),
        (
            "http://[::1/a.png",
            "the image of a URL that cannot be read, of 17 characters cannot be downloaded: InvalidURL",
        ),
    ],
)
def test_what_is_no_image_is_named(source, message):
    with pytest.raises(DataError, match=message):
        read(source)


def broken_avif():
    data = file_of(PICTURE, "AVIF")
    start = data.index(b"mdat") + 4
    return data[:start] + bytes([255]) * 32 + data[start + 32 :]


def broken_exif():
    """A number where EXIF has a text: Pillow fails where it writes EXIF again without the orientation."""
    exif = Image.Exif()
    exif[0x0112], exif[0x0213] = 6, 1  # Orientation, YCbCrPositioning
    data = bytearray(file_of(PICTURE, "JPEG", exif=exif))
    entry = data.index(bytes.fromhex("02130003")) if b"MM" in data else data.index(bytes.fromhex("13020300"))
    data[entry + (3 if b"MM" in data else 2)] = 2  # its type: ASCII
    return bytes(data)


@pytest.mark.parametrize("data", [broken_avif(), broken_exif()], ids=["avif", "exif"])
def test_whatever_pillow_raises_names_the_row(data):
    """RuntimeError and struct.error: no errors of Pillow's own."""
    with pytest.raises(DataError, match=r"row 3: the image of \d+ bytes: its pixels cannot be read"):
        read(data)


def test_an_animation_shows_its_first_picture():
    first, second = picture(seed=1).convert("P"), picture(seed=2).convert("P")

    assert read(file_of(first, "GIF", save_all=True, append_images=[second])) == canonical(first)


def test_case_96_the_broken_file_of_two_is_named(tmp_path):
    whole, broken = tmp_path / "whole.png", tmp_path / "broken.png"
    whole.write_bytes(file_of(PICTURE))
    broken.write_bytes(file_of(PICTURE)[:-300])

    assert read(str(whole)) == EXPECTED
    with pytest.raises(DataError, match=r"row 3: the image .*broken\.png: its pixels cannot be read"):
        read(str(broken))


@pytest.mark.parametrize(
    ("side", "message"),
    [(4096, r"has 4096 x 4096 pixels, more than 1048576: .* data.image_max_pixels"), (16384, "is too large: .* bomb")],
)
def test_a_small_file_cannot_fill_the_memory(side, message):
    """16,384 x 16,384 pixels in 33 kB."""
    bomb = file_of(Image.new("1", (side, side)))

    with pytest.raises(DataError, match=message):
        read(bomb)


def test_a_large_file_is_not_read(tmp_path):
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(2**40)

    with pytest.raises(DataError, match=r"large\.png has 1099511627776 bytes or more, over the limit"):
        read(str(path))


def test_a_download_ends_at_its_limit_of_bytes(server):
    with pytest.raises(DataError, match="over the limit of 1048576: .* data.image_max_bytes"):
        read(f"{server.url}/large")


def test_a_download_ends_at_its_limit_of_time(server):
    start = time.monotonic()

    with pytest.raises(DataError, match="after 0.3 seconds: raise data.image_timeout"):
        read(f"{server.url}/slow", ImageLimits(timeout=0.3))
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone", "its server answers 404"),
        ("moved/4", "cannot be downloaded: TooManyRedirects"),
        ("file", "cannot be downloaded: UnsupportedProtocol"),
    ],
)
def test_a_download_that_fails_is_named(server, path, message):
    with pytest.raises(DataError, match=rf"row 3: the image {server.url}/{path}.*{message}"):
        read(f"{server.url}/{path}")


def test_no_password_or_key_of_a_url_is_told():
    with pytest.raises(DataError) as caught:
        read("http://user:secret@127.0.0.1:9/a.png?key=hidden")

    assert "http://127.0.0.1:9/a.png" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)

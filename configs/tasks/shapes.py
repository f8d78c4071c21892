"""How many shapes are there? Generated pictures for a vision-language model: one to three squares and discs on a dark ground.

    {"input": "How many shapes?", "label": "2", "images": [b"\\x89PNG…"]}

A picture is ``size`` pixels wide and high; shapes have a colour and a place of their own, and do not touch. The answer is one
digit, so a model that says one token can be right: chance among the three is a third.

Held out means held out: a picture belongs to the test split if the SHA-256 of its pixels says so (one in four), whatever
seed draws it.
Use: ``data.prompt_dataset=configs/tasks/shapes.py:prompts?count=256&split=train``.
"""

import hashlib
import io
import itertools
import random
from collections.abc import Iterator
from typing import Any

COLOURS = ((230, 60, 60), (60, 200, 80), (80, 120, 240), (240, 210, 60), (220, 110, 230))
GROUND = (16, 16, 24)
MOST = 3  # shapes
TEST_SHARE = 4  # one picture in four is held out
QUESTION = "How many shapes?"


def prompts(count: int = 256, seed: int = 0, split: str = "train", size: int = 56) -> Iterator[dict[str, Any]]:
    """``count`` different pictures of a split, each number of shapes equally often.

    Raises:
        ValueError: The split is unknown, or a picture is too small for its shapes.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}: use 'train' or 'test'")
    if size < 16:
        raise ValueError(f"size={size}: {MOST} shapes need pictures of at least 16 pixels")
    rng = random.Random(f"shapes {seed}")
    seen = set()
    for shapes in itertools.islice(itertools.cycle(range(1, MOST + 1)), count):
        while (picture := _picture(rng, shapes, size)).tobytes() in seen or split_of(picture.tobytes()) != split:
            pass
        seen.add(picture.tobytes())
        file = io.BytesIO()
        picture.save(file, "PNG")
        yield {"input": QUESTION, "label": str(shapes), "images": [file.getvalue()]}


def split_of(pixels: bytes) -> str:
    """The split a picture belongs to."""
    return "test" if hashlib.sha256(pixels).digest()[0] % TEST_SHARE == 0 else "train"


def _picture(rng: random.Random, shapes: int, size: int) -> Any:
    """Shapes stand in cells of a 2 x 2 grid, so they never touch."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (size, size), GROUND)
    draw = ImageDraw.Draw(picture)
    half = size // 2
    cells = rng.sample(list(itertools.product((0, half), repeat=2)), shapes)
    for (left, top), colour in zip(cells, rng.sample(COLOURS, shapes), strict=True):
        side = rng.randint(half // 2, half * 3 // 4)
        x, y = (start + rng.randint(1, half - side - 1) for start in (left, top))
        shape = rng.choice((draw.rectangle, draw.ellipse))
        shape((x, y, x + side, y + side), fill=colour)
    return picture

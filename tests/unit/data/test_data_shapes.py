"""The task "count the shapes"."""

import io
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from rlhf_core.data import read_rows

pytestmark = pytest.mark.agents

SPEC = f"{Path(__file__).parents[3]}/configs/tasks/shapes.py:prompts"
GROUND = (16, 16, 24)


def rows(query):
    return [row.values for row in read_rows(f"{SPEC}?{query}")]


def picture(row):
    return Image.open(io.BytesIO(row["images"][0]))


def blobs(image):
    """How many connected areas are not the ground."""
    width, height = image.size
    left = {(x, y) for x in range(width) for y in range(height) if image.getpixel((x, y)) != GROUND}
    count = 0
    while left:
        count += 1
        edge = [left.pop()]
        while edge:
            x, y = edge.pop()
            near = {(x + i, y + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            edge += near
    return count


@pytest.mark.parametrize("size", [16, 28, 56])
def test_the_label_is_the_number_of_shapes(size):
    for row in rows(f"count=30&size={size}"):
        assert picture(row).size == (size, size)
        assert blobs(picture(row)) == int(row["label"])


def test_each_number_is_asked_for_equally_often():
    assert Counter(row["label"] for row in rows("count=30")) == {"1": 10, "2": 10, "3": 10}


def test_the_seed_decides():
    assert rows("count=9&seed=1") == rows("count=9&seed=1") != rows("count=9&seed=2")


def test_no_picture_of_the_test_split_is_trained_on():
    trained = {row["images"][0] for seed in (0, 1) for row in rows(f"count=60&seed={seed}")}
    tested = {row["images"][0] for seed in (0, 1) for row in rows(f"count=60&seed={seed}&split=test")}

    assert len(trained) == len(tested) == 120
    assert not trained & tested


@pytest.mark.parametrize("query", ["split=tests", "size=8"])
def test_what_cannot_be_drawn_is_refused(query):
    with pytest.raises(Exception, match=query.replace("=", "=.?")):
        rows(query)

"""What the image processor made of the last images is kept, within bounds."""

import pytest
import torch

from rlhf_core.vision.recent import RecentFeatures

pytestmark = pytest.mark.agents


def features(value):
    return {"pixel_values": torch.full((10,), value, dtype=torch.float32)}  # 40 bytes


def test_the_same_tensors_come_back():
    recent, made = RecentFeatures(), features(1.0)

    recent.put("a", made)

    assert recent.get("a") is made
    assert recent.get("b") is None


def test_the_one_not_asked_for_longest_goes_first():
    recent = RecentFeatures(most_bytes=80)
    recent.put("a", features(1.0))
    recent.put("b", features(2.0))
    recent.get("a")

    recent.put("c", features(3.0))

    assert [recent.get(name) is not None for name in "abc"] == [True, False, True]


def test_one_that_is_too_large_is_not_kept():
    recent = RecentFeatures(most_bytes=39)

    recent.put("a", features(1.0))
    recent.put("a", features(1.0))

    assert recent.get("a") is None

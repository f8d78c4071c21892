"""A run that shows images is a valid one; what is refused there is among the cases of ``test_config_rules``."""

import pytest

from rlhf_core.config import parse_config

pytestmark = pytest.mark.agents


def test_a_run_with_images_and_a_frozen_visual_encoder_is_fine():
    base = {
        "actor": {"model_name_or_path": "builtin:tiny-vlm"},
        "data": {"prompt_dataset": "prompts.jsonl", "max_images_per_prompt": 2},
        "reward": {"functions": [{"use": "digits"}]},
    }

    assert parse_config(base, ["actor.freeze_visual_encoder=true"]).actor.freeze_visual_encoder

"""Tokenizers, and the ids that end an answer."""

import json
from types import SimpleNamespace

import pytest

from rlhf_core.data import end_of_sequence_ids, load_tokenizer
from rlhf_core.errors import ConfigError


@pytest.mark.parametrize(("listed", "ids"), [([7, 2], (2, 7)), (7, (2, 7)), (None, (2,))])
def test_case_71_all_end_of_sequence_ids_are_found(tmp_path, listed, ids):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))

    assert end_of_sequence_ids(str(tmp_path), SimpleNamespace(eos_token_id=2)) == ids


def test_model_without_generation_config(tmp_path):
    assert end_of_sequence_ids(str(tmp_path), SimpleNamespace(eos_token_id=2)) == (2,)
    assert end_of_sequence_ids(str(tmp_path), SimpleNamespace(eos_token_id=None)) == ()


def test_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)no tokenizer in .*check actor.model_name_or_path"):
        load_tokenizer(str(tmp_path))

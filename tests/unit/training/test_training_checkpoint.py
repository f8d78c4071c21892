from __future__ import annotations

from transformers import AutoTokenizer

from rlhf_core.training.checkpoint import TokenizerSource


def test_a_template_that_replaced_the_tokenizers_own_goes_with_the_model(tiny_model, tmp_path):
    TokenizerSource(str(tiny_model), "[{{ messages[0].content }}]").write(tmp_path / "own")
    TokenizerSource(str(tiny_model), None).write(tmp_path / "plain")

    def rendered(folder):
        return AutoTokenizer.from_pretrained(folder).apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False
        )

    assert rendered(tmp_path / "own") == "[hi]"
    assert rendered(tmp_path / "plain") == rendered(tiny_model)

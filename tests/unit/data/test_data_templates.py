"""Rows to text and token ids."""

import pytest

from rlhf_core.config.model import DataConfig
from rlhf_core.data import plain_token_ids, render
from rlhf_core.errors import DataError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "go"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def rendered(tokenizer, content, tools=None, **keys):
    return render(content, tools, DataConfig(prompt_dataset=("a.csv",), **keys), tokenizer, "a.csv, row 3")


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_case_69_chat_ids_are_those_of_the_template_with_one_bos(tokenizer, tools):
    """The tiny tokenizer adds a BOS, and its template writes one."""
    prompt = rendered(tokenizer, CHAT, tools, apply_chat_template=True)

    whole = tokenizer.apply_chat_template(
        CHAT, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert prompt.token_ids == whole
    assert prompt.token_ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.messages == CHAT


def test_case_69_plain_text_gets_exactly_one_bos(tokenizer):
    assert plain_token_ids("A1", tokenizer) == [tokenizer.bos_token_id, 65, 49]
    assert plain_token_ids("<|bos|>A1", tokenizer) == [tokenizer.bos_token_id, 65, 49]


def test_plain_text_gets_no_bos_and_no_eos_that_the_tokenizer_would_not_open_with():
    class AddsOnlyEos:
        bos_token_id = 1

        def encode(self, text, *, add_special_tokens=True):
            return [ord(char) for char in text] + [2] * add_special_tokens

    assert plain_token_ids("A1", AddsOnlyEos()) == [65, 49]


def test_chat_template_around_a_string(tokenizer):
    prompt = rendered(tokenizer, "hi", apply_chat_template=True, system_prompt="Be brief.")

    assert prompt.text == (
        "<|bos|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def test_tools_reach_the_template(tokenizer):
    assert '"name": "add"' in rendered(tokenizer, "hi", TOOLS, apply_chat_template=True).text


def test_own_chat_template_replaces_the_tokenizers(tokenizer):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"

    prompt = rendered(tokenizer, "hi", apply_chat_template=True, tokenizer_chat_template=template)

    assert prompt.text == "[hi]"
    assert prompt.token_ids == list(b"[hi]")


def test_case_113_other_braces_of_a_plain_template_stay(tokenizer):
    prompt = rendered(tokenizer, 'a {} {0} "b"', input_template='{"q": {}}')

    assert prompt.text == '{"q": a {} {0} "b"}'
    assert bytes(prompt.token_ids[1:]) == prompt.text.encode()


def test_refusal_of_the_template_names_the_row(tokenizer):
    template = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(DataError, match=r"a\.csv, row 3: the chat template refuses the prompt: roles must alternate"):
        rendered(tokenizer, CHAT, apply_chat_template=True, tokenizer_chat_template=template)


def test_messages_and_tools_need_a_chat_template(tokenizer):
    with pytest.raises(DataError, match=r"row 3: a list of chat messages needs data.apply_chat_template=true"):
        rendered(tokenizer, CHAT)
    with pytest.raises(DataError, match=r"row 3: tools need data.apply_chat_template=true"):
        rendered(tokenizer, "hi", TOOLS)

"""What a trained reward model reads: the sampled ids, or its own tokens of the text. With the tiny model's tokenizer."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlhf_core.config.supervised import SupervisedDataConfig
from rlhf_core.data.tiny_model import BOS, EOS
from rlhf_core.data.transcripts import transcribe
from rlhf_core.records import RewardRequest
from rlhf_core.rewards.model_text import TokenReader, UnreadableError, reads_tokens_of

ANSWER_ONLY = (
    "{% for message in messages %}{% if message.role == 'assistant' %}A: {{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def other(tokenizer):
    """The same tokenizer, to be changed."""
    return copy.deepcopy(tokenizer)


def request(answer="hi", *, prompt="Q: ", token_ids=None, messages=None):
    ids = None if token_ids is None else np.array(token_ids, np.int32)
    return RewardRequest(prompt + answer, prompt, answer, None, "g", 0, "d", ids, messages)


USER = [{"role": "user", "content": "say hi"}]


def test_a_tokenizer_reads_its_own_tokens(tokenizer, other):
    assert reads_tokens_of(other, tokenizer, tokenizer.chat_template)


def test_a_token_for_padding_does_no_harm(tokenizer, other):
    other.add_special_tokens({"pad_token": "<|another pad|>"})

    assert reads_tokens_of(other, tokenizer, tokenizer.chat_template)
    assert not reads_tokens_of(tokenizer, other, tokenizer.chat_template)


def test_another_end_or_another_template_is_another_language(tokenizer, other):
    other.chat_template = ANSWER_ONLY
    assert not reads_tokens_of(other, tokenizer, tokenizer.chat_template)
    assert reads_tokens_of(other, tokenizer, None)  # prompts without a template have none to differ in

    other.eos_token = "<|pad|>"
    assert not reads_tokens_of(other, tokenizer, None)


def test_sampled_ids_are_never_tokenised_again(tokenizer):
    """'th' is one token (260 and above) that encoding never uses: text would give two others."""
    sampled = [BOS, 81, *tokenizer.convert_tokens_to_ids(["th", "in"]), 3]
    reader = TokenReader(tokenizer, max_len=100, takes_ids=True)

    read = reader.read(request("thin", token_ids=sampled, messages=USER))

    assert list(read) == sampled
    assert list(reader.read_text(tokenizer.decode(sampled))) != sampled


def test_another_model_reads_the_messages_in_its_own_template(other):
    other.chat_template = ANSWER_ONLY
    reader = TokenReader(other, max_len=100)

    read = reader.read(request("hi", token_ids=[1, 2, 3], messages=USER))

    assert other.decode(read) == "A: hi<|im_end|>"  # and not the line break behind it


def test_what_is_read_is_what_a_reward_model_is_trained_on(tokenizer):
    """Chat: the example of data.transcripts up to the end of its answer."""
    data = SupervisedDataConfig(dataset="x", apply_chat_template=True)
    trained = transcribe("say hi", "hi there ", None, data, tokenizer, "row 0")

    read = TokenReader(tokenizer, max_len=100).read(request("hi there ", messages=USER))

    assert list(read) == trained.token_ids[: trained.action_ranges[-1].end].tolist()


@pytest.mark.parametrize("answer", ["hi", "hi ", "", "שלום"])
def test_plain_text_too(tokenizer, answer):
    trained = transcribe("Q: ", answer or "x", None, SupervisedDataConfig(dataset="x"), tokenizer, "row 0")

    read = TokenReader(tokenizer, max_len=100).read(request(answer or "x"))

    assert list(read) == trained.token_ids.tolist()


def test_a_template_without_messages_or_messages_without_a_template_are_text(tokenizer, other):
    other.chat_template = None
    expected = [BOS, *b"Q: hi", EOS]

    assert list(TokenReader(tokenizer, 100).read(request())) == expected
    assert list(TokenReader(other, 100).read(request(messages=USER))) == expected


def test_special_tokens_of_a_rendered_text_are_read_as_such_and_not_doubled(tokenizer):
    text = "<|bos|><|im_start|>user\nhi<|im_end|>"

    assert list(TokenReader(tokenizer, 100).read_text(text)) == [BOS, 257, *b"user\nhi", EOS]


def test_a_sample_that_is_too_long_is_refused_not_cut(tokenizer):
    reader = TokenReader(tokenizer, max_len=6, takes_ids=True)

    assert len(reader.read(request("h"))) == 6
    for sample in (request("hi"), request(token_ids=range(7))):
        with pytest.raises(UnreadableError, match=r"has 7 tokens, more than reward\.model_max_len=6: raise it"):
            reader.read(sample)


def test_what_cannot_be_read_says_why(tokenizer, other):
    other.chat_template = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(UnreadableError, match="chat template refuses the messages: roles must alternate"):
        TokenReader(other, 100).read(request(messages=USER))
    with pytest.raises(UnreadableError, match=r"cannot read the text: .*surrogates not allowed"):
        TokenReader(tokenizer, 100).read(request("\ud800"))
    with pytest.raises(UnreadableError, match="no tokens"):
        TokenReader(tokenizer, 100, takes_ids=True).read(request(token_ids=[]))

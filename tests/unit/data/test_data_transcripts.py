"""Which tokens of a conversation are trained: found in the template's own ids, never by tokenising pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.supervised import SupervisedDataConfig
from rlhf_core.data.tiny_model import CHAT_TEMPLATE
from rlhf_core.data.transcripts import transcribe
from rlhf_core.errors import DataError

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# the end of the text behind every whole conversation, as Phi 3's
ENDING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_start|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
# no header of its own before an answer, as Llama 2's
INSTRUCTIONS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|bos|>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
# strips the thinking of every turn but the last, as Qwen 3's
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


TWO_TURNS = [turn("user", "q"), turn("assistant", "one"), turn("user", "r"), turn("assistant", "two")]


def transcript(tokenizer, prompt, answer, tools=None, *, whole=False, **keys):
    data = SupervisedDataConfig(dataset=("a.csv",), **keys)
    return transcribe(prompt, answer, tools, data, tokenizer, "a.csv, row 3", whole=whole)


def chat(tokenizer, prompt, answer, tools=None, **keys):
    return transcript(tokenizer, prompt, answer, tools, apply_chat_template=True, **keys)


def template_ids(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def test_every_assistant_turn_of_a_conversation_is_trained_with_its_end(tokenizer, trained_text):
    found = chat(tokenizer, "", TWO_TURNS)

    assert found.token_ids.tolist() == template_ids(tokenizer, TWO_TURNS)
    assert trained_text(found, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]
    assert found.num_actions == 2 * 4
    assert found.text.endswith("two<|im_end|>\n")


def test_only_the_answer_behind_a_prompt_is_trained(tokenizer, trained_text):
    assert trained_text(chat(tokenizer, TWO_TURNS[:3], "two"), tokenizer) == ["two<|im_end|>"]
    assert trained_text(chat(tokenizer, TWO_TURNS[:1], TWO_TURNS[1:]), tokenizer) == ["one<|im_end|>", "two<|im_end|>"]


def test_case_69_text_prompt_with_system_prompt_has_one_bos(tokenizer, trained_text):
    found = chat(tokenizer, "q", "a", system_prompt="Be brief.")

    messages = [turn("system", "Be brief."), turn("user", "q"), turn("assistant", "a")]
    assert found.token_ids.tolist() == template_ids(tokenizer, messages)
    assert found.token_ids.tolist().count(tokenizer.bos_token_id) == 1
    assert trained_text(found, tokenizer) == ["a<|im_end|>"]


def test_case_72_and_74_end_of_turn_is_trained_and_the_newline_behind_it_is_not(tokenizer, trained_text):
    """A tool turn stands between two assistant turns; ids are those of the whole conversation."""
    call = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    messages = [turn("user", "q"), turn("assistant", "", tool_calls=call), turn("tool", "7"), turn("assistant", "7")]
    tools = [{"type": "function", "function": {"name": "add"}}]

    found = chat(tokenizer, "", messages, tools)

    assert found.token_ids.tolist() == template_ids(tokenizer, messages, tools=tools)
    assert trained_text(found, tokenizer) == ["<|im_end|>", "7<|im_end|>"]
    assert found.token_ids[-1] == 10  # the newline
    assert found.action_ranges[-1].end == len(found.token_ids) - 1


@pytest.mark.parametrize(
    "content", ["  two \n", "two\u2003", "\n\ntwo", "<|im_start|>two", "two<|im_end|>", "\u202eé🧪"]
)
def test_white_space_and_special_tokens_of_an_answer_are_part_of_it(tokenizer, trained_text, content):
    assert trained_text(chat(tokenizer, "q", content), tokenizer) == [content + "<|im_end|>"]


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=12), min_size=1, max_size=4
    )
)
def test_any_conversation_is_trained_in_just_its_answers(tokenizer, trained_text, answers):
    messages = [m for answer in answers for m in (turn("user", f"on {answer}"), turn("assistant", answer))]

    found = chat(tokenizer, "", messages)

    assert found.token_ids.tolist() == template_ids(tokenizer, messages)
    assert trained_text(found, tokenizer) == [f"{answer}<|im_end|>" for answer in answers]


def test_token_that_straddles_the_header_and_the_answer_is_not_trained(byte_tokenizer, trained_text):
    """The newline that ends the header and the first letter are one token."""
    tokenizer = byte_tokenizer(merges=["\nt"])

    found = chat(tokenizer, "q", "two")

    assert found.token_ids.tolist() == template_ids(tokenizer, [turn("user", "q"), turn("assistant", "two")])
    assert trained_text(found, tokenizer) == ["wo<|im_end|>"]


def test_template_without_a_header_for_answers(byte_tokenizer, trained_text):
    tokenizer = byte_tokenizer(merges=[" t"], trim=True, chat_template=INSTRUCTIONS)

    assert trained_text(chat(tokenizer, "", TWO_TURNS), tokenizer) == [" one<|im_end|>", " two<|im_end|>"]


def test_template_that_ends_the_whole_text(byte_tokenizer, trained_text):
    """Turns end with <|im_start|>; <|im_end|> comes once, behind the last newline."""
    tokenizer = byte_tokenizer(chat_template=ENDING)

    found = chat(tokenizer, "", TWO_TURNS)

    assert trained_text(found, tokenizer) == ["one<|im_start|>", "two<|im_start|>"]


def test_turn_that_no_special_token_ends_is_trained_to_its_last_character(tokenizer, trained_text):
    found = chat(tokenizer, "", TWO_TURNS, tokenizer_chat_template=PLAIN)

    assert trained_text(found, tokenizer) == ["one\n", "two\n"]


def test_generation_blocks_of_a_template_say_what_is_trained(tokenizer, trained_text):
    found = chat(tokenizer, "", TWO_TURNS, tokenizer_chat_template=MARKED)

    assert found.token_ids.tolist() == template_ids(tokenizer, TWO_TURNS, chat_template=MARKED)
    assert trained_text(found, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]
    assert trained_text(chat(tokenizer, TWO_TURNS[:3], "two", tokenizer_chat_template=MARKED), tokenizer) == [
        "two<|im_end|>"
    ]


def test_generation_blocks_that_begin_or_end_with_a_space_under_trimmed_offsets(byte_tokenizer, trained_text):
    """transformers' own assistant mask loses the turns behind a first space and adds user turns behind a last one."""
    inside = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    tokenizer = byte_tokenizer(merges=[" h"], trim=True, chat_template=inside)
    messages = [turn("user", "q"), turn("assistant", " hi "), turn("user", "r"), turn("assistant", "two")]

    assert trained_text(chat(tokenizer, "", messages), tokenizer) == [" hi ", "two"]


def test_all_tokens_but_the_first_on_request(tokenizer):
    for found in (
        chat(tokenizer, "", TWO_TURNS, whole=True),
        chat(tokenizer, TWO_TURNS[:1], "one", tokenizer_chat_template=REWRITING, whole=True),
        transcript(tokenizer, "q", "a", whole=True),
    ):
        assert found.action_ranges == ((1, len(found.token_ids)),)


def test_template_that_rewrites_earlier_turns_is_refused_with_the_remedy(tokenizer, trained_text):
    answers = [turn("user", "q"), turn("assistant", "<think>x</think>one"), turn("user", "r"), turn("assistant", "two")]
    keys = {"tokenizer_chat_template": REWRITING}

    with pytest.raises(DataError, match=r"row 3: the chat template renders the first 2 of 4 .*one row per answer"):
        chat(tokenizer, "", answers, **keys)

    assert trained_text(chat(tokenizer, answers[:3], "two", **keys), tokenizer) == ["two<|im_end|>"]
    assert trained_text(chat(tokenizer, answers[:1], answers[1]["content"], **keys), tokenizer) == [
        "<think>x</think>one<|im_end|>"
    ]


def test_template_that_leaves_an_answer_out_is_refused(tokenizer):
    silent = CHAT_TEMPLATE.replace(
        "{% for message in messages %}", "{% for message in messages if message.role == 'user' %}"
    )
    silent = silent.replace("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "")

    with pytest.raises(DataError, match=r"row 3: an assistant turn has no token of its own"):
        chat(tokenizer, "q", "a", tokenizer_chat_template=silent)


def test_refusal_of_the_template_names_the_row(tokenizer):
    with pytest.raises(DataError, match=r"row 3: the chat template refuses the conversation: no tools here"):
        chat(tokenizer, "q", "a", tokenizer_chat_template="{{ raise_exception('no tools here') }}")


def test_slow_tokenizer_gives_the_same_kind_of_ranges(slow_tokenizer, trained_text):
    """ByT5 counts its end of sequence, </s>, among the special tokens."""
    template = CHAT_TEMPLATE.replace("{{ bos_token }}", "").replace("<|im_end|>", "</s>")

    found = chat(slow_tokenizer, "", TWO_TURNS, tokenizer_chat_template=template)

    assert found.token_ids.tolist() == template_ids(slow_tokenizer, TWO_TURNS, chat_template=template)
    assert trained_text(found, slow_tokenizer) == ["one</s>", "two</s>"]


def test_tokenizer_whose_template_ids_are_not_those_of_its_text_is_refused(byte_tokenizer):
    tokenizer = byte_tokenizer()
    own = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *a, **k: [*own(*a, **k), 7] if k["tokenize"] else own(*a, **k)

    with pytest.raises(DataError, match=r"row 3: the tokenizer's apply_chat_template gives other ids"):
        chat(tokenizer, "q", "a")


def test_plain_text_is_tokenised_whole_with_one_bos_and_a_trained_end(tokenizer, trained_text):
    found = transcript(tokenizer, "Q: 6*7\nA: ", "42")

    assert found.token_ids.tolist() == [256, *b"Q: 6*7\nA: 42", 258]
    assert trained_text(found, tokenizer) == ["42<|im_end|>"]
    assert found.text == "Q: 6*7\nA: 42"
    assert found.temperature == 1.0


def test_plain_text_that_has_its_bos_and_its_end_gets_no_second_one(tokenizer, trained_text):
    found = transcript(tokenizer, "<|bos|>q", "a<|im_end|>")

    assert found.token_ids.tolist() == [256, ord("q"), ord("a"), 258]
    assert trained_text(found, tokenizer) == ["a<|im_end|>"]


def test_case_113_braces_of_prompt_and_plain_template_stay(tokenizer, trained_text):
    found = transcript(tokenizer, "a {} {0}", " {}", input_template='{"q": {}}')

    assert found.text == '{"q": a {} {0}} {}'
    assert trained_text(found, tokenizer) == [" {}<|im_end|>"]


def test_plain_token_across_prompt_and_answer_belongs_to_the_prompt(byte_tokenizer, trained_text):
    tokenizer = byte_tokenizer(merges=["xh"])

    assert trained_text(transcript(tokenizer, "x", "hi"), tokenizer) == ["i<|im_end|>"]
    with pytest.raises(DataError, match=r"row 3: the answer 'h' is part of the prompt's last token"):
        transcript(tokenizer, "x", "h")


def test_plain_answer_needs_an_end_of_sequence(byte_tokenizer):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None

    with pytest.raises(DataError, match=r"row 3: the tokenizer has no end-of-sequence token .*eos_token"):
        transcript(tokenizer, "q", "a")


def test_messages_and_tools_need_a_chat_template(tokenizer):
    for prompt, answer in ((TWO_TURNS[:1], "a"), ("q", [turn("assistant", "a")])):
        with pytest.raises(DataError, match=r"row 3: a list of chat messages needs data.apply_chat_template=true"):
            transcript(tokenizer, prompt, answer)
    with pytest.raises(DataError, match=r"row 3: tools need data.apply_chat_template=true"):
        transcript(tokenizer, "q", "a", tools=[{"type": "function"}])

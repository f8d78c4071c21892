"""From rows to examples of SFT and of preferences, and which rows are refused."""

import pytest

from rlhf_core.config.supervised import SupervisedDataConfig
from rlhf_core.data import Row
from rlhf_core.data.conversations import preference_example, sft_example
from rlhf_core.errors import DataError


def turn(role, content):
    return {"role": role, "content": content}


CHAT = [turn("user", "q"), turn("assistant", "one"), turn("user", "r"), turn("assistant", "two")]
WORSE = [*CHAT[:3], turn("assistant", "too"), turn("user", "s"), turn("assistant", "bad")]


def data(**keys):
    return SupervisedDataConfig(dataset=("a.csv",), **keys)


def row(**values):
    return Row(3, "a.csv, row 3", values)


@pytest.fixture
def sft(tokenizer):
    def make(values, *, train_on_prompt=False, **keys):
        return sft_example(row(**values), "sums", data(**keys), tokenizer, train_on_prompt=train_on_prompt)

    return make


@pytest.fixture
def pair(tokenizer):
    def make(values, **keys):
        return preference_example(row(**values), "sums", data(**keys), tokenizer)

    return make


def test_prompt_and_answer(sft, tokenizer, trained_text):
    example = sft({"input": "6*7=", "output": "42"})

    assert (example.row_id, example.datasource) == ("sums:3", "sums")
    assert example.token_ids.dtype == "int32"
    assert trained_text(example, tokenizer) == ["42<|im_end|>"]


def test_messages_and_answer(sft, tokenizer, trained_text):
    example = sft({"input": CHAT[:3], "output": "two"}, apply_chat_template=True)

    assert trained_text(example, tokenizer) == ["two<|im_end|>"]


def test_whole_conversation_with_tools_column_and_id(sft, tokenizer, trained_text):
    values = {"chat": CHAT, "tools": '[{"type": "function"}]', "id": 7, "datasource": "web"}

    example = sft(values, input_key="chat", output_key=None, id_key="id", apply_chat_template=True)

    assert (example.row_id, example.datasource) == ("7", "web")
    assert '{"type": "function"}' in example.text
    assert trained_text(example, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]


def test_plain_text_may_be_trained_whole(sft, tokenizer):
    example = sft({"input": "some text"}, output_key=None, train_on_prompt=True)

    assert example.token_ids.tolist() == [256, *b"some text", 258]
    assert example.action_ranges == ((1, 11),)


def test_pair_of_answers_to_a_prompt(pair, tokenizer, trained_text):
    example = pair({"prompt": "6*7=", "chosen": "42", "rejected": "thirteen", "by": 2}, margin_key="by")

    assert trained_text(example.chosen, tokenizer) == ["42<|im_end|>"]
    assert trained_text(example.rejected, tokenizer) == ["thirteen<|im_end|>"]
    assert (example.row_id, example.margin) == ("sums:3", 2.0)


def test_pair_of_answers_as_messages(pair, tokenizer, trained_text):
    values = {"prompt": "q", "chosen": [turn("assistant", "a")], "rejected": [turn("assistant", "b")]}

    example = pair(values, apply_chat_template=True)

    assert trained_text(example.chosen, tokenizer) == ["a<|im_end|>"]
    assert trained_text(example.rejected, tokenizer) == ["b<|im_end|>"]
    assert example.margin == 0.0


def test_pair_of_conversations_compares_the_turns_behind_what_they_share(pair, tokenizer, trained_text):
    """The shared assistant turn "one" is in neither answer."""
    example = pair({"chosen": CHAT, "rejected": WORSE}, prompt_key=None, apply_chat_template=True)

    assert trained_text(example.chosen, tokenizer) == ["two<|im_end|>"]
    assert trained_text(example.rejected, tokenizer) == ["too<|im_end|>", "bad<|im_end|>"]


@pytest.mark.parametrize(
    ("values", "keys", "problem"),
    [
        ({"input": "q"}, {}, r"no column 'output' \(data.output_key\).*set data.output_key to the answer's column"),
        ({"input": "q", "output": ""}, {}, "column 'output' is empty or only white space"),
        ({"input": " \n", "output": "a"}, {}, "column 'input' is empty or only white space"),
        ({"input": "q", "output": "a\ud800"}, {}, r"column 'output' holds '\\ud800' at character 1"),
        ({"input": "q", "output": 42}, {}, "column 'output' holds a int: an answer is text"),
        ({"input": CHAT, "output": "a"}, {}, "needs data.apply_chat_template=true"),
        (
            {"input": "q", "output": CHAT},
            {},
            "'output' has a turn of 'user' behind the prompt instead of an assistant turn: leave the prompt out",
        ),
        (
            {"input": "q", "output": [turn("assistant", " "), turn("user", "x")]},
            {},
            "assistant turn in message 0 is empty",
        ),
        (
            {"input": "q"},
            {"output_key": None},
            "holds text, but data.output_key=null .*data.output_key, or .*train_on_prompt",
        ),
        (
            {"input": CHAT[1:]},
            {"output_key": None},
            "'input' begins with an assistant turn, so there is nothing to answer",
        ),
        ({"input": CHAT[:1]}, {"output_key": None}, "column 'input' has no assistant turn to train"),
        ({"input": [CHAT[0], turn("assistant", None)]}, {"output_key": None}, "assistant turn in message 1 is empty"),
        ({"input": "q", "output": "a", "images": ["a.png"]}, {}, "column 'images' holds images"),
        ({"input": [turn("user", [{"type": "image"}])], "output": "a"}, {}, "'input' holds a part of type 'image'"),
        ({"input": "q", "output": "a", "tools": "{"}, {}, "column 'tools' is not readable as JSON"),
    ],
)
def test_sft_row_that_cannot_be_used_is_refused(sft, values, keys, problem):
    with pytest.raises(DataError, match=rf"a\.csv, row 3: .*{problem}"):
        sft(values, **keys)


def test_whole_text_is_not_put_into_a_template(sft):
    for keys in ({"apply_chat_template": True}, {"input_template": "Q: {}"}):
        with pytest.raises(DataError, match=r"row 3: column 'input' holds text, .*and no template"):
            sft({"input": "some text"}, output_key=None, train_on_prompt=True, **keys)


def pair_of(chosen, rejected, **more):
    return {"prompt": "q", "chosen": chosen, "rejected": rejected, **more}


WHOLE = {"prompt_key": None}


@pytest.mark.parametrize(
    ("values", "keys", "problem"),
    [
        ({"chosen": "a", "rejected": "b"}, {}, r"no column 'prompt' \(data.prompt_key\)"),
        (pair_of("a", " "), {}, "column 'rejected' is empty or only white space"),
        (pair_of("a", "a"), {}, "columns 'chosen' and 'rejected' are equal, so neither is better"),
        (pair_of(CHAT, WORSE), {}, "'chosen' has a turn of 'user' .*leave the prompt out .*data.prompt_key"),
        (pair_of("a", "b"), WHOLE, "column 'chosen' holds text, but data.prompt_key=null asks for whole conversations"),
        (pair_of(CHAT, CHAT), WHOLE, "columns 'chosen' and 'rejected' are equal"),
        (pair_of(CHAT, WORSE[2:]), WHOLE, "columns 'chosen' and 'rejected' share no message"),
        (pair_of(CHAT[1:], WORSE[1:]), WHOLE, "share an assistant turn, so there is nothing to answer"),
        (
            pair_of(CHAT, CHAT[:2]),
            WHOLE,
            "'chosen' has a turn of 'user' behind the prompt .*let both conversations part at an answer",
        ),
        (pair_of(CHAT[:2], CHAT[:1]), WHOLE, "'rejected' has nothing behind the prompt instead of an assistant turn"),
        (pair_of("a", "b", by="2"), {"margin_key": "by"}, "column 'by' holds the margin '2': write a finite number"),
        (pair_of("a", "b", by=True), {"margin_key": "by"}, "column 'by' holds the margin True"),
        (pair_of("a", "b", by=float("nan")), {"margin_key": "by"}, "column 'by' holds the margin nan"),
        (pair_of("a", "b"), {"margin_key": "by"}, r"no column 'by' \(data.margin_key\)"),
    ],
)
def test_pair_that_cannot_be_used_is_refused(pair, values, keys, problem):
    with pytest.raises(DataError, match=rf"a\.csv, row 3: .*{problem}"):
        pair(values, **keys)

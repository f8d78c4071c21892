"""From datasets to ``Prompt`` records."""

import pytest

from rlhf_core.config import Config
from rlhf_core.data import evaluation_prompts, training_prompts
from rlhf_core.errors import DataError

TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_rows_become_prompts(write_rows, load):
    path = write_rows("jsonl", [{"input": "a", "label": 7}, {"input": "b", "label": [1]}], name="sums")

    prompts = list(load(path, label_key="label"))

    assert [prompt.row_id for prompt in prompts] == ["sums:0", "sums:1"]
    assert [prompt.datasource for prompt in prompts] == ["sums", "sums"]
    assert [prompt.label for prompt in prompts] == [7, [1]]
    assert prompts[0].token_ids == [256, 97]


def test_labels_keep_their_type_through_every_typed_format(write_rows, load):
    for kind in ("json", "jsonl", "parquet", "arrow"):
        prompt = load(write_rows(kind, [{"input": "a", "label": 7}]), label_key="label")[0]

        assert type(prompt.label) is int


def test_messages_are_kept(write_rows, load):
    chat = [{"role": "user", "content": "hi"}]

    prompt = load(write_rows("jsonl", [{"input": chat}]), apply_chat_template=True)[0]

    assert prompt.messages == chat
    assert prompt.text.endswith("hi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("tools", [None, TOOLS, '[{"type": "function"}]'])
def test_case_110_overlong_prompts_are_dropped_and_counted(write_rows, load, tools):
    """Prompts of 2048, 2049 and 2106 tokens, limit 2048: one is kept, with and without tools in the template."""
    rows = [{"input": "x", "tools": tools}]
    frame = len(load(write_rows("jsonl", rows), apply_chat_template=True)[0].token_ids) - 1
    rows = [{"input": "x" * (length - frame), "tools": tools} for length in (2049, 2048, 2106)]

    dataset = load(write_rows("jsonl", rows), apply_chat_template=True, max_prompt_len=2048)

    assert [len(prompt.token_ids) for prompt in dataset] == [2048]
    assert [prompt.row_id for prompt in dataset] == ["rows:1"]
    assert dataset.overlong == 2


def test_overlong_prompt_may_be_an_error(write_rows, load):
    path = write_rows("jsonl", [{"input": "ok"}, {"input": "x" * 10}])

    with pytest.raises(DataError, match=r"row 1 \(line 2\): the prompt has 11 tokens, and 5 .*raise data.max_len"):
        load(path, overlong="error", max_prompt_len=5)


def test_dataset_with_nothing_left_is_refused(write_rows, load):
    path = write_rows("jsonl", [{"input": "x" * 10}])

    with pytest.raises(DataError, match="all 1 prompts are longer than 5 tokens"):
        load(path, max_prompt_len=5)


def test_empty_dataset_is_refused(tmp_path, load):
    (tmp_path / "a.jsonl").write_text("")

    with pytest.raises(DataError, match=r"a\.jsonl has no rows"):
        load(str(tmp_path / "a.jsonl"))


def test_datasource_column_wins_and_row_ids_stay_distinct(write_rows, load):
    first = write_rows("jsonl", [{"input": "a", "datasource": "maths"}, {"input": "b", "datasource": "code"}], name="x")
    second = write_rows("jsonl", [{"input": "c", "datasource": "maths"}], name="y")

    prompts = list(load(first, second))

    assert [prompt.datasource for prompt in prompts] == ["maths", "code", "maths"]
    assert [prompt.row_id for prompt in prompts] == ["x:0", "x:1", "y:0"]


def test_id_column(write_rows, load):
    path = write_rows("jsonl", [{"input": "a", "id": 17}, {"input": "b", "id": "q"}])

    assert [prompt.row_id for prompt in load(path, id_key="id")] == ["17", "q"]


def test_row_id_that_comes_twice_is_refused_with_both_places(write_rows, load):
    path = write_rows("jsonl", [{"input": "a", "id": 1}, {"input": "b", "id": "1"}])

    with pytest.raises(DataError, match=r"row 1 \(line 2\): its row id '1' is that of .*row 0 \(line 1\) too"):
        load(path, id_key="id")


def test_max_samples_takes_the_first_rows_of_each_dataset(write_rows, load):
    paths = [write_rows("jsonl", [{"input": str(i)} for i in range(5)], name=name) for name in ("a", "b")]

    dataset = load(*paths, max_samples=2)

    assert [prompt.row_id for prompt in dataset] == ["a:0", "a:1", "b:0", "b:1"]


@pytest.mark.parametrize(
    ("row", "keys", "problem"),
    [
        ({"question": "a"}, {}, r"no column 'input' \(data.input_key\); it has question"),
        ({"input": "a"}, {"label_key": "label"}, "no column 'label' .*set it to null for none"),
        ({"input": "a"}, {"id_key": "id"}, "no column 'id' .*set it to null to number"),
        ({"input": "a", "id": 1.5}, {"id_key": "id"}, "holds 1.5: a row id is text or a whole number"),
        ({"input": 7}, {}, "holds a int: a prompt is text, or a list of chat messages"),
        ({"input": []}, {"apply_chat_template": True}, "is empty"),
        ({"input": [{"role": "user", "content": " "}]}, {"apply_chat_template": True}, "is empty or only white space"),
        ({"input": ["hi"]}, {"apply_chat_template": True}, "holds the message 'hi'"),
        ({"input": "a", "tools": "{"}, {"apply_chat_template": True}, "column 'tools' is not readable as JSON"),
        ({"input": "a", "tools": {"k": 1}}, {"apply_chat_template": True}, "holds a dict: give a list of tool schemas"),
        ({"input": "a", "datasource": ""}, {}, "column 'datasource' holds ''"),
        ({"input": "a", "images": ["a.png"]}, {}, "column 'images' holds images, but data.max_images_per_prompt=0"),
    ],
)
def test_row_that_cannot_be_used_is_refused(write_rows, load, row, keys, problem):
    path = write_rows("jsonl", [row])

    with pytest.raises(DataError, match=rf"rows\.jsonl, row 0 \(line 1\): .*{problem}"):
        load(path, **keys)


def test_training_and_evaluation_prompts_follow_the_config(write_rows, tokenizer):
    """max_len 20 - max_new_tokens 12 = 8: a BOS and at most 7 bytes."""
    path = write_rows("jsonl", [{"input": "x" * length, "label": length} for length in (7, 8, 3)])
    config = Config.model_validate(
        {
            "actor": {"model_name_or_path": "builtin:tiny"},
            "data": {"prompt_dataset": path, "max_len": 20},
            "rollout": {"max_new_tokens": 12},
            "reward": {"functions": [{"use": "digits"}]},
            "eval": {"dataset": path, "max_samples": 1},
        }
    )

    assert [prompt.label for prompt in training_prompts(config, tokenizer)] == [7, 3]
    assert [prompt.label for prompt in evaluation_prompts(config, tokenizer)] == [7]


def test_order_mixes_the_datasets(write_rows, load):
    paths = [write_rows("jsonl", [{"input": str(i)} for i in range(4)], name=name) for name in ("a", "b")]

    dataset = load(*paths)

    assert sorted(dataset.order(seed=1).epoch(0)) == list(range(8))
    assert dataset.order(seed=1, probs=[0.8, 0.2]).size == 5

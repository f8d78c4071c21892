"""Datasets of supervised runs: read once, measured, fingerprinted, drawn in a seeded order."""

import itertools

import pytest

from rlhf_core.config.supervised import SupervisedConfig
from rlhf_core.data import PreferenceExample, SftExample, held_out_examples, supervised_examples
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.records import PromptCursor


def config_of(*specs, evaluation=None, train=None, **data):
    return SupervisedConfig.model_validate(
        {
            "model": {"model_name_or_path": "builtin:tiny"},
            "data": {"dataset": specs, **data},
            "eval": evaluation or {},
            "train": train or {},
        }
    )


def row(prompt, answer="a"):
    return {"input": prompt, "output": answer}


def pair(prompt, chosen="better", rejected="bad"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.fixture
def load(tokenizer):
    def load_with(*specs, method="sft", **keys):
        return supervised_examples(config_of(*specs, **keys), method, tokenizer)

    return load_with


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_rows_of_every_format_become_examples(write_rows, load, kind):
    dataset = load(write_rows(kind, [row("p"), row("q")], name="sums"))

    assert [type(example) for example in dataset] == [SftExample, SftExample]
    assert [example.row_id for example in dataset] == ["sums:0", "sums:1"]
    assert dataset[1].token_ids.tolist() == [256, *b"qa", 258]


@pytest.mark.parametrize("method", ["reward_model", "dpo"])
def test_reward_models_and_dpo_read_pairs(write_rows, load, method):
    dataset = load(write_rows("jsonl", [pair("p")]), method=method)

    assert [type(example) for example in dataset] == [PreferenceExample]


def test_overlong_rows_are_dropped_whole_and_counted(write_rows, load):
    """Answers of 3, 4 and 5 bytes with BOS, prompt and EOS: 6, 7 and 8 tokens, of which 7 are allowed."""
    path = write_rows("jsonl", [row("p", "x" * length) for length in (3, 5, 4)])

    dataset = load(path, max_len=7)

    assert [len(example.token_ids) for example in dataset] == [6, 7]
    assert dataset.overlong == 1
    assert [(source.name, source.size, source.overlong) for source in dataset.sources] == [("rows", 2, 1)]


def test_pair_is_overlong_if_either_answer_is(write_rows, load):
    rows = [pair("p", chosen="x" * 9), pair("p", rejected="x" * 9), pair("p", "x" * 8, "y" * 8)]

    dataset = load(write_rows("jsonl", rows), method="dpo", max_len=11)

    assert [example.row_id for example in dataset] == ["rows:2"]


def test_overlong_row_may_be_an_error(write_rows, load):
    path = write_rows("jsonl", [row("p"), row("p", "x" * 9)])

    with pytest.raises(DataError, match=r"row 1 \(line 2\): the example has 12 tokens, and 7 \(data.max_len\)"):
        load(path, max_len=7, overlong="error")


def test_bad_row_is_refused_at_the_start(write_rows, load):
    path = write_rows("jsonl", [row("p"), row("p", " ")])

    with pytest.raises(DataError, match=r"row 1 \(line 2\): column 'output' is empty"):
        load(path)


def test_row_id_that_comes_twice_is_refused(write_rows, load):
    path = write_rows("jsonl", [{**row("p"), "id": 1}, {**row("q"), "id": 1}])

    with pytest.raises(DataError, match=r"row 1 \(line 2\): its row id '1' is that of .*row 0"):
        load(path, id_key="id")


def test_max_samples_takes_the_first_rows_of_each_dataset(write_rows, load):
    paths = [write_rows("jsonl", [row(str(i)) for i in range(5)], name=name) for name in ("a", "b")]

    assert [example.row_id for example in load(*paths, max_samples=2)] == ["a:0", "a:1", "b:0", "b:1"]


def test_held_out_examples_are_those_of_eval_with_the_columns_of_data(write_rows, tokenizer):
    train = write_rows("jsonl", [{"q": "p", "a": "x"}], name="train")
    test = write_rows("jsonl", [{"q": "r", "a": "y"}, {"q": "s", "a": "z"}], name="test")
    config = config_of(train, input_key="q", output_key="a", evaluation={"dataset": test, "max_samples": 1})

    assert [e.text for e in supervised_examples(config, "sft", tokenizer)] == ["px"]
    assert [e.text for e in held_out_examples(config, "sft", tokenizer)] == ["ry"]
    assert held_out_examples(config_of(train), "sft", tokenizer) is None


def test_order_draws_each_example_once_an_epoch_and_no_batch_crosses_it(write_rows, load):
    dataset = load(write_rows("jsonl", [row(str(i)) for i in range(7)]))
    order, cursor, drawn = dataset.order(seed=3), PromptCursor(), []

    for _ in range(8):
        indices, cursor = order.draw(cursor, 2)
        drawn.append(indices)

    assert [len(indices) for indices in drawn] == [2, 2, 2, 1] * 2
    for epoch in (drawn[:4], drawn[4:]):
        assert sorted(itertools.chain(*epoch)) == list(range(7))
    assert drawn[:4] != drawn[4:]


def test_order_mixes_the_datasets(write_rows, load):
    paths = [write_rows("jsonl", [row(str(i)) for i in range(4)], name=name) for name in ("a", "b")]

    assert load(*paths).order(seed=1, probs=[0.8, 0.2]).size == 5


def test_fingerprint_is_that_of_the_tokens_the_ranges_and_the_margin(write_rows, load):
    def fingerprint(rows, **keys):
        return load(write_rows("jsonl", rows), **keys).fingerprint()

    rows = [row("p"), row("q", "b")]
    same = fingerprint(rows)

    assert fingerprint(rows) == same
    assert fingerprint(rows[::-1]) != same
    assert fingerprint([row("p"), row("qb", "c")]) != same
    assert fingerprint([row("pa", "x")]) != fingerprint([row("p", "ax")])  # the same tokens, another range
    pairs = [{**pair("p"), "by": 1}]
    assert fingerprint(pairs, method="dpo") != fingerprint(pairs, method="dpo", margin_key="by")


def test_token_budget_must_hold_both_answers_of_a_pair(write_rows, load):
    path = write_rows("jsonl", [pair("p")])
    train = {"dynamic_batch_enable": True, "max_tokens_per_gpu": 100}

    assert len(load(path, method="dpo", max_len=50, train=train)) == 1
    with pytest.raises(ConfigError, match=r"train.max_tokens_per_gpu=100 cannot hold a pair .*raise it to 102"):
        load(path, method="dpo", max_len=51, train=train)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("text", ["a\x00b", "שלום \u202eمرحبا\u202c", "e\u0301 \u00e9", "a\r\nb\rc\u2028", "  a\t\n"])
def test_case_111_odd_text_of_prompt_and_answer_is_unchanged(write_rows, load, kind, text):
    example = load(write_rows(kind, [row(text, text)]))[0]

    assert bytes(example.token_ids[1:-1].tolist()) == (text + text).encode()

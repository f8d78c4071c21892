"""``data.only_rows``: the rows of a list, whatever else the datasets have by now."""

import json

import pytest

from rlhf_core.config.model import DataConfig, StorageConfig
from rlhf_core.data import load_prompts
from rlhf_core.data.row_list import RowList, read_row_list, row_ids
from rlhf_core.errors import DataError

ROWS = [{"input": f"prompt {i}", "id": f"r{i}"} for i in range(5)]


@pytest.fixture
def only(tokenizer):
    """``only(listed, "a.jsonl", id_key="id")``: the prompts of the list."""

    def load(listed, *specs, max_samples=None, max_prompt_len=4_000, **keys):
        data = DataConfig(prompt_dataset=specs, label_key=None, **keys)
        rows = RowList("list.json", frozenset(listed))
        return load_prompts(specs, "train", data, tokenizer, max_prompt_len, max_samples, rows)

    return load


def test_only_the_listed_rows_in_the_order_of_the_data(write_rows, only):
    prompts = only(["r3", "r1"], write_rows("jsonl", ROWS), id_key="id")

    assert [prompt.row_id for prompt in prompts] == ["r1", "r3"]


def test_data_that_grew_give_the_same_prompts(write_rows, only):
    before = only(["rows:0", "rows:4"], write_rows("jsonl", ROWS))
    after = only(["rows:0", "rows:4"], write_rows("jsonl", [*ROWS, {"input": "new", "id": "r9"}]))

    assert after.fingerprint() == before.fingerprint()


def test_a_dataset_none_of_whose_rows_are_listed_gives_none(write_rows, only):
    old, new = write_rows("jsonl", ROWS, name="old"), write_rows("jsonl", ROWS, name="new")

    prompts = only(["new:1"], old, new)

    assert ([source.size for source in prompts.sources], len(prompts)) == ([0, 1], 1)
    assert len(prompts.order(seed=1).epoch(0)) == 1


def test_the_first_rows_are_the_first_of_the_list(write_rows, only):
    prompts = only(["r2", "r3", "r4"], write_rows("jsonl", ROWS), id_key="id", max_samples=2)

    assert [prompt.row_id for prompt in prompts] == ["r2", "r3"]


@pytest.mark.parametrize("listed", [["r1", "gone"], []])
def test_rows_that_are_gone_are_an_error(write_rows, only, listed):
    with pytest.raises(DataError, match=r"lists \d rows, and the datasets have \d of them: restore"):
        only(listed, write_rows("jsonl", ROWS), id_key="id")


def test_an_overlong_row_is_there(write_rows, only):
    prompts = only(
        ["r0", "r1"], write_rows("jsonl", [{**ROWS[0], "input": "x" * 50}, *ROWS[1:]]), id_key="id", max_prompt_len=20
    )

    assert ([prompt.row_id for prompt in prompts], prompts.overlong) == (["r1"], 1)


def test_ids_with_any_text(write_rows, only, tmp_path):
    odd = ["ä\n\"'", "日本", " "]
    path = write_rows("jsonl", [{"input": "p", "id": row_id} for row_id in odd])
    (tmp_path / "list.json").write_text(json.dumps(odd[:2], ensure_ascii=False), encoding="utf-8")

    rows = read_row_list(str(tmp_path / "list.json"), StorageConfig())

    assert [prompt.row_id for prompt in only(rows.row_ids, path, id_key="id")] == odd[:2]


@pytest.mark.parametrize("name", ["list.json", "sub/list.json"])
def test_a_list_at_a_path_and_at_a_url(tmp_path, monkeypatch, name):
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_text('["a"]')
    monkeypatch.chdir(tmp_path)

    for source in (name, str(tmp_path / name), f"file://{tmp_path}/{name}"):
        assert read_row_list(source, StorageConfig()).row_ids == {"a"}


@pytest.mark.parametrize("text", [None, "no json", '{"a": 1}', "[1, 2]"])
def test_what_is_no_list_of_ids_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "list.json").write_text(text)

    with pytest.raises(DataError, match="data.only_rows=.*list.json"):
        read_row_list(str(tmp_path / "list.json"), StorageConfig())


def test_the_ids_of_all_rows(write_rows):
    specs = (write_rows("jsonl", ROWS[:2], name="a"), write_rows("csv", ROWS[:1], name="b"))

    assert list(row_ids(DataConfig(prompt_dataset=specs))) == ["a:0", "a:1", "b:0"]

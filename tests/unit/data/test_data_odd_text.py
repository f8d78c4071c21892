"""CASE 111: each odd text is loaded unchanged or refused by its row number, in every file format."""

import pytest

from rlhf_core.errors import DataError

KEPT = {
    "NUL": "a\x00b",
    "one megabyte": "x" * 1_000_000,
    "right to left": "שלום \u202eمرحبا\u202c",
    "combining marks": "e\u0301 \u00e9 n\u0303",  # composed and decomposed stay different
    "line ends": "a\r\nb\rc\nd\u2028e",
    "quotes and commas": 'say "a, b"',
    "outer white space": "  a\t\n",
    "not a character": "\uffff \U0001f9ea",
}


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_case_111_odd_text_is_loaded_unchanged(write_rows, load, kind, text):
    path = write_rows(kind, [{"input": "first"}, {"input": text}])

    assert [row.content for row in load(path)._rows] == ["first", text]


@pytest.mark.parametrize("text", [text for text in KEPT.values() if len(text) < 100])
def test_case_111_prompt_text_and_ids_are_unchanged(write_rows, load, tokenizer, text):
    prompt = load(write_rows("jsonl", [{"input": text}]))[0]

    assert prompt.text == text
    assert bytes(prompt.token_ids[1:]) == text.encode()


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("text", ["", "   ", " \n\t\u2003"])
def test_case_111_blank_prompt_is_refused(write_rows, load, kind, text):
    path = write_rows(kind, [{"input": "first"}, {"input": text}])

    with pytest.raises(DataError, match=r"row 1\b.*'input' is empty or only white space"):
        load(path)


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_case_111_lone_surrogate_is_refused(write_rows, load, kind):
    path = write_rows(kind, [{"input": "first"}, {"input": "ab\ud800"}])

    with pytest.raises(DataError, match=r"row 1\b.*'\\ud800' at character 2: .*UTF-8"):
        load(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"input\nok\nb\xff\n"),
        ("a.jsonl", b'{"input": "ok"}\n{"input": "b\xff"}\n'),
        ("a.json", b'[{"input": "ok"}, {"input": "\xed\xa0\x80"}]'),
    ],
)
def test_case_111_bytes_that_are_not_utf8_are_refused(tmp_path, load, name, content):
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(DataError, match=rf"{name}, row 1\b.*not UTF-8"):
        load(str(path))


def test_case_111_parquet_that_is_not_utf8_is_refused(tmp_path, load):
    import pyarrow as pa
    import pyarrow.parquet

    raw = pa.array([b"ok", b"\xff\xfe"], type=pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    pyarrow.parquet.write_table(pa.table({"input": text}), tmp_path / "a.parquet")

    with pytest.raises(DataError, match=r"a\.parquet, row 1: not readable"):
        load(str(tmp_path / "a.parquet"))


def test_lone_surrogate_in_a_label_is_refused(write_rows, load):
    path = write_rows("jsonl", [{"input": "a", "label": {"k": ["\udc00"]}}])

    with pytest.raises(DataError, match=r"row 0.*column 'label'"):
        load(path, label_key="label")

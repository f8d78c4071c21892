"""Rows of JSON, JSON Lines and CSV files."""

import pytest

from rlhf_core.data import read_rows
from rlhf_core.errors import DataError


def values(path):
    return [row.values for row in read_rows(str(path))]


def test_json_values_keep_their_type(write_rows):
    rows = [{"input": "a", "label": label} for label in (7, 7.5, "7", True, None, [1, "x"], {"k": [2]})]

    read = values(write_rows("json", rows))

    assert read == rows
    assert [type(row["label"]) for row in read] == [int, float, str, bool, type(None), list, dict]


def test_csv_values_stay_text(write_rows):
    path = write_rows("csv", [{"input": "007", "label": "1e5"}])

    assert values(path) == [{"input": "007", "label": "1e5"}]


def test_json_file_may_hold_json_lines(tmp_path):
    path = tmp_path / "lines.json"
    path.write_text('{"input": "a"}\n\n{"input": "b"}\n')

    assert values(path) == [{"input": "a"}, {"input": "b"}]


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", "input\na\n"), ("a.jsonl", '{"input": "a"}'), ("a.json", '[{"input": "a"}]')]
)
def test_byte_order_mark_is_no_part_of_the_data(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())

    assert values(path) == [{"input": "a"}]


def test_line_separators_inside_text_do_not_end_a_json_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input": "a\u2028b\x85c"}\n', encoding="utf-8")

    assert values(path) == [{"input": "a\u2028b\x85c"}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[1]", "list instead of an object"),
        ('{"input": "b"', "not readable as JSON"),
        ('{"input": NaN}', "NaN is not JSON"),
        ('{"input": "b", "input": "c"}', "repeats one of its keys"),
    ],
)
def test_bad_json_line_is_refused_by_row_and_line(tmp_path, line, problem):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input": "a"}\n\n' + line + "\n")

    with pytest.raises(DataError, match=problem) as caught:
        values(path)

    assert str(caught.value).startswith(f"{path}, row 1 (line 3): ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("input,label\na,1\nb\n", r"row 1 \(line 3\): 1 fields under a header of 2"),
        ("input,label\na,1\nb,2,3\n", r"row 1 \(line 3\): 3 fields under a header of 2"),
        ('input,label\n"a\nb",1\n"c"d,2\n', r"row 1 \(line 4\): not readable as CSV"),
        ('input,label\na,1\n"b,2\n', r"row 1 \(line 3\): not readable as CSV"),
        ("input,label\na,1\n\nb,2\n", r"row 1 \(line 3\): 0 fields"),
        ("input,input\na,1\n", "header names input more than once"),
    ],
)
def test_bad_csv_is_refused_by_row_and_line(tmp_path, text, problem):
    path = tmp_path / "a.csv"
    path.write_text(text)

    with pytest.raises(DataError, match=problem):
        values(path)


def test_blank_lines_at_the_end_of_csv_are_no_rows(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("input\na\n\n\n")

    assert values(path) == [{"input": "a"}]

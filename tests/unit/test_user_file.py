"""An object of a user's file: found once per process, and every way not to find it is one message."""

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.user_file import object_from_file


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_is_imported_once_whatever_it_is_called(folder):
    (folder / "mine.py").write_text("things = []\nothers = []\n")

    object_from_file("some.key", "mine.py:things").append(1)

    assert object_from_file("some.key", f"{folder}/./mine.py:things") == [1]
    assert object_from_file("other.key", "mine.py:others") == []


def test_two_files_of_one_name_are_two(folder):
    for place in ("a", "b"):
        (folder / place).mkdir()
        (folder / place / "mine.py").write_text(f"here = {place!r}\n")

    assert [object_from_file("some.key", f"{place}/mine.py:here") for place in "ab"] == ["a", "b"]


def test_a_file_may_import_what_lies_beside_it_and_define_dataclasses(folder):
    (folder / "beside_the_file.py").write_text("value = 7\n")
    (folder / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport beside_the_file\n"
        "@dataclass\nclass Thing:\n    value: int = beside_the_file.value\n"
    )

    assert object_from_file("some.key", "mine.py:Thing")().value == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"some\.key='mine\.py:thing': no such file: /.*/mine\.py"),
        ("other = 1", r"some\.key='mine\.py:thing': nothing in /.*/mine\.py is called 'thing'"),
        ("1 / 0", r"the file cannot be imported: ZeroDivisionError: division by zero \(mine\.py:1\)"),
        ("def thing(:", r"the file cannot be imported: SyntaxError: .*mine\.py, line 1"),
        ("import sys\nsys.exit('bye')", r"the file cannot be imported: SystemExit: bye \(mine\.py:2\)"),
        ("import no_such_package", r"the file cannot be imported: ModuleNotFoundError: .*no_such_package"),
    ],
)
def test_what_cannot_be_found_says_why(folder, text, message):
    if text is not None:
        (folder / "mine.py").write_text(text)

    for _ in range(2):  # half a module is not found by the next one who asks
        with pytest.raises(ConfigError, match=message):
            object_from_file("some.key", "mine.py:thing")

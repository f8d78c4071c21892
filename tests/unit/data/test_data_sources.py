"""One entry of ``data.prompt_dataset`` to rows: every kind of dataset."""

import datetime

import pytest

from rlhf_core.data import read_rows
from rlhf_core.data.sources import source_names
from rlhf_core.errors import DataError

ROWS = [{"input": "a", "label": 1}, {"input": "b", "label": 2}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def task_file(tmp_path):
    path = tmp_path / "task.py"
    path.write_text(
        "def rows(count, split='train', scale=1.0):\n"
        "    return [{'input': f'{split} {index}', 'label': scale} for index in range(count)]\n"
        "def broken():\n"
        "    yield {'input': 'a'}\n"
        "    raise RuntimeError('no more')\n"
        "def wrong():\n"
        "    yield 'a'\n"
    )
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "arrow"])
def test_files_of_each_kind(write_rows, kind):
    read = list(read_rows(write_rows(kind, ROWS)))

    assert [row.values for row in read] == ROWS
    assert [row.number for row in read] == [0, 1]
    assert f"rows.{kind}, row 1" in read[1].place


def test_saved_dataset(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")

    assert [row.values for row in read_rows(str(tmp_path / "saved"))] == ROWS


def test_split_of_saved_datasets(tmp_path):
    import datasets

    parts = {name: datasets.Dataset.from_list([{"input": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")

    assert [row.values for row in read_rows(str(tmp_path / "saved"), "test")] == [{"input": "test"}]
    with pytest.raises(
        DataError, match=r"no split 'tran'; available splits: \['test', 'train'\]; set data.prompt_split"
    ):
        read_rows(str(tmp_path / "saved"), "tran")  # CASE 113


def test_folder_laid_out_like_a_hub_dataset(tmp_path):
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"input": "a", "label": 1}\n')
    (folder / "test.jsonl").write_text('{"input": "b", "label": 2}\n')

    assert [row.values for row in read_rows(str(folder), "test")] == ROWS[1:]
    with pytest.raises(DataError, match=r'Unknown split "tran".*\[\'train\', \'test\'\].*set data.prompt_split'):
        read_rows(str(folder), "tran")  # CASE 113


def test_hub_id_passes_its_options(monkeypatch):
    import datasets

    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: calls.append((args, options)) or ROWS)

    read = list(read_rows("openai/gsm8k?name=main", "test"))

    assert [row.values for row in read] == ROWS
    assert calls == [(("openai/gsm8k",), {"split": "test", "name": "main"})]


def test_hub_out_of_reach(monkeypatch):
    import datasets

    def unreachable(*args, **options):
        raise ConnectionError("Couldn't reach 'no/such' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)

    with pytest.raises(DataError, match="no/such: neither a file or folder here nor a hub dataset in reach"):
        read_rows("no/such")


def test_function_gets_typed_arguments(task_file):
    read = list(read_rows(f"{task_file}:rows?count=2&split=test&scale=0.5"))

    assert [row.values for row in read] == [{"input": "test 0", "label": 0.5}, {"input": "test 1", "label": 0.5}]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("rows", r"missing a required argument: 'count'; its signature is rows\(count, split='train', scale=1.0\)"),
        ("rows?count=1&sede=2", "unexpected keyword argument 'sede'"),
        ("rows?count", "name=value&name=value"),
        ("nothing", "has no function 'nothing'"),
        ("wrong", "row 0: a str instead of a dict"),
    ],
)
def test_function_that_cannot_be_used(task_file, call, problem):
    with pytest.raises(DataError, match=problem):
        list(read_rows(f"{task_file}:{call}"))


def test_error_of_the_function_comes_through_with_its_place(task_file):
    with pytest.raises(RuntimeError, match="no more") as caught:
        list(read_rows(f"{task_file}:broken"))

    assert caught.value.__notes__ == [f"while reading the rows of {task_file}:broken, after row 0"]


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("absent.jsonl", "absent.jsonl: no such file"),
        ("absent.py:rows", "absent.py: no such file"),
        ("task.py", "not a dataset this version reads.*path.py:function"),
        ("./absent", "not a dataset this version reads"),
        ("a/b?nme=x", "unknown options nme; a hub id takes data_dir, name, revision"),
    ],
)
def test_spec_that_names_nothing(spec, problem):
    with pytest.raises(DataError, match=problem):
        list(read_rows(spec))


def test_damaged_parquet_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nonsense")

    with pytest.raises(DataError, match=r"a\.parquet.*not readable"):
        list(read_rows(str(path)))


def test_parquet_label_that_json_cannot_keep_is_refused(write_rows, load):
    path = write_rows("parquet", [{"input": "a", "label": datetime.datetime(2026, 1, 1)}])

    with pytest.raises(DataError, match=r"row 0: column 'label' .* type datetime, which JSON cannot keep unchanged"):
        load(path, label_key="label")


def test_source_names_are_distinct():
    assert source_names(["a/train.jsonl", "tasks/sums.py:rows?x=1", "org/set-v1.5?name=m"]) == [
        "train",
        "sums",
        "set-v1.5",
    ]
    assert source_names(["a/t.csv", "b/t.csv", "c.csv"]) == ["a/t.csv", "b/t.csv", "c"]
    with pytest.raises(DataError, match=r"a\.csv: listed twice"):
        source_names(["a.csv", "a.csv"])

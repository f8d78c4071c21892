"""The tiny model and its tokenizer, made once; rows written in every file format."""

import csv
import json

import pytest

from rlhf_core.config.model import DataConfig
from rlhf_core.data import load_prompts, load_tokenizer, make_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(tiny_folder):
    return load_tokenizer(str(tiny_folder))


@pytest.fixture
def write_rows(tmp_path):
    """``write_rows("csv", rows)`` -> the path of a file in that format."""

    def write(kind, rows, name="rows"):
        path = tmp_path / f"{name}.{kind}"
        if kind == "csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), quoting=csv.QUOTE_ALL)
                writer.writeheader()
                writer.writerows(rows)
        elif kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif kind == "json":
            path.write_text(json.dumps(rows))
        else:
            write_table(path, rows)
        return str(path)

    return write


def write_table(path, rows):
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)


@pytest.fixture
def load(tokenizer):
    """``load("a.jsonl", max_prompt_len=64, id_key="id")``: a dataset with these ``data`` keys."""

    def load_with(*specs, max_prompt_len=4_000_000, max_samples=None, **keys):
        data = DataConfig(prompt_dataset=specs, **{"label_key": None, **keys})
        return load_prompts(specs, "train", data, tokenizer, max_prompt_len, max_samples)

    return load_with

"""The tiny model and its tokenizer, made once; rows written in every file format."""

import csv
import json

import pytest

from rlhf_core.config.model import DataConfig
from rlhf_core.data import load_prompts, load_tokenizer, make_tiny_model
from rlhf_core.data.tiny_model import CHAT_TEMPLATE, _byte_characters


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


@pytest.fixture(scope="session")
def byte_tokenizer():
    """``byte_tokenizer(merges=["\nh"], trim=True)``: a byte-level tokenizer with these two-byte tokens, as real ones have.

    ``trim`` leaves spaces out of the offsets, as Llama 3's tokenizer does.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(merges=(), trim=False, chat_template=CHAT_TEMPLATE):
        special = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
        stand_ins = _byte_characters()
        pairs = [tuple(stand_ins[byte] for byte in merge.encode()) for merge in merges]
        tokens = [*stand_ins, *special, *("".join(pair) for pair in pairs)]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
        tokenizer.add_special_tokens(special)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<|bos|>",
            eos_token="<|im_end|>",
            extra_special_tokens=["<|im_start|>"],
            chat_template=chat_template,
            clean_up_tokenization_spaces=False,
        )

    return make


@pytest.fixture(scope="session")
def slow_tokenizer():
    """ByT5's: bytes, no offsets; its end of sequence is </s>."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


@pytest.fixture(scope="session")
def trained_text():
    """``trained_text(transcript, tokenizer)``: what each trained range says."""

    def texts(transcript, tokenizer):
        return [tokenizer.decode(transcript.token_ids[start:end]) for start, end in transcript.action_ranges]

    return texts

"""The built-in tiny model."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_core.data import end_of_sequence_ids, make_tiny_model, resolve_model, tiny_model
from rlhf_core.errors import ConfigError


def digest(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_seed_decides_the_weights(tiny_folder, tmp_path):
    assert digest(make_tiny_model(tmp_path / "same", seed=0)) == digest(tiny_folder)
    assert digest(make_tiny_model(tmp_path / "other", seed=1)) != digest(tiny_folder)


def test_making_it_leaves_the_callers_random_state_alone(tmp_path):
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    make_tiny_model(tmp_path / "tiny")

    assert torch.equal(torch.rand(3), expected)


def test_transformers_loads_it_and_its_embeddings_are_tied(tiny_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)

    assert type(model).__name__ == "LlamaForCausalLM"
    assert (model.config.vocab_size, model.config.max_position_embeddings, str(model.dtype)) == (
        320,
        2048,
        "torch.float32",
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_every_byte_is_its_own_token_and_every_token_has_a_text(tokenizer):
    text = "".join(chr(code) for code in range(256))

    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert all(tokenizer.decode([token]) for token in range(320))
    assert len(tokenizer) == 320


def test_its_end_of_turn_ends_a_sequence(tiny_folder, tokenizer):
    assert end_of_sequence_ids(str(tiny_folder), tokenizer) == (tiny_model.EOS,)
    assert tokenizer.decode([tiny_model.EOS]) == "<|im_end|>"


def test_finished_model_is_left_as_it_is(tiny_folder):
    before = (tiny_folder / "model.safetensors").stat().st_mtime_ns

    make_tiny_model(tiny_folder, seed=9)

    assert (tiny_folder / "model.safetensors").stat().st_mtime_ns == before


def test_crash_while_writing_leaves_no_folder(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("crash")

    monkeypatch.setattr(tiny_model, "_tokenizer", fail)

    with pytest.raises(RuntimeError, match="crash"):
        make_tiny_model(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_several_makers_at_once_publish_one_model(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_model, "_model", ScriptedPart)
    monkeypatch.setattr(tiny_model, "_tokenizer", lambda: ScriptedPart(0))

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_tiny_model(tmp_path / "tiny"), range(8)))

    assert made == [tmp_path / "tiny"] * 8
    assert list(tmp_path.iterdir()) == [tmp_path / "tiny"]


class ScriptedPart:
    """Saves a model's config, and nothing else."""

    def __init__(self, seed):
        pass

    def save_pretrained(self, folder):
        (folder / "config.json").write_text("{}")


def test_folder_that_holds_something_else_is_refused(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr(tiny_model, "_model", ScriptedPart)
    monkeypatch.setattr(tiny_model, "_tokenizer", lambda: ScriptedPart(0))

    with pytest.raises(ConfigError, match="holds something that is not a model"):
        make_tiny_model(tmp_path)


def test_builtin_names_resolve_to_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_model, "make_tiny_model", lambda folder, seed: folder / f"made{seed}")
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))

    assert resolve_model("org/model") == "org/model"
    assert resolve_model("builtin:tiny", tmp_path) == str(tmp_path / "tiny-1-seed0" / "made0")
    assert resolve_model("builtin:tiny?seed=3") == str(tmp_path / "home" / "models" / "tiny-1-seed3" / "made3")
    with pytest.raises(ConfigError, match="no built-in model 'builtin:small'"):
        resolve_model("builtin:small")

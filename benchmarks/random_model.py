"""A model in the sizes of SmolLM2-135M: for what depends on sizes alone, so that its weights may be random."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def save_smollm2(folder: Path) -> None:
    """Write it, without a tokenizer; its end of sequence is that of the tiny model's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_core.data.tiny_model import EOS

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)

"""Prompts: where they come from, how they become tokens, and in which order they are drawn.

``sources`` reads rows, ``templates`` renders them, ``prompts`` holds the dataset, ``order`` draws from it. Importing
this package loads no heavy library; ``transformers`` and ``datasets`` are imported by the calls that need them.
"""

from rlhf_core.data.order import PromptOrder, iterations, sample_seed
from rlhf_core.data.prompts import PromptDataset, PromptSource, evaluation_prompts, load_prompts, training_prompts
from rlhf_core.data.sources import read_rows
from rlhf_core.data.templates import RenderedPrompt, plain_token_ids, render
from rlhf_core.data.tiny_model import make_tiny_model, resolve_model
from rlhf_core.data.tokenizer import Tokenizer, end_of_sequence_ids, load_tokenizer
from rlhf_core.data.values import Row

__all__ = [
    "PromptDataset",
    "PromptOrder",
    "PromptSource",
    "RenderedPrompt",
    "Row",
    "Tokenizer",
    "end_of_sequence_ids",
    "evaluation_prompts",
    "iterations",
    "load_prompts",
    "load_tokenizer",
    "make_tiny_model",
    "plain_token_ids",
    "read_rows",
    "render",
    "resolve_model",
    "sample_seed",
    "training_prompts",
]

"""Prompts and given answers: where they come from, how they become tokens, and in which order they are drawn.

    sources ──▶ loading ─┬▶ templates ──▶ prompts                                     runs by rewards
                         └▶ tokenised ──▶ transcripts ──▶ conversations ──▶ supervised    SFT, reward models, DPO

``sources`` reads rows, ``columns`` checks them, ``order`` draws from either dataset. Importing this package loads no
heavy library; ``transformers`` and ``datasets`` are imported by the calls that need them.
"""

from rlhf_core.data.conversations import PreferenceExample, SftExample
from rlhf_core.data.loading import Source
from rlhf_core.data.model_reference import (
    PinnedCheckpoint,
    PinnedModel,
    models_of,
    pin,
    pin_models,
    supervised_models_of,
)
from rlhf_core.data.order import PromptOrder, iterations, sample_seed
from rlhf_core.data.prompts import PromptDataset, Vision, evaluation_prompts, load_prompts, training_prompts
from rlhf_core.data.sources import read_rows
from rlhf_core.data.supervised import SupervisedDataset, held_out_examples, supervised_examples
from rlhf_core.data.templates import RenderedPrompt, plain_token_ids, render
from rlhf_core.data.tiny_model import make_tiny_model, resolve_model
from rlhf_core.data.tokenizer import Tokenizer, end_of_sequence_ids, load_tokenizer
from rlhf_core.data.transcripts import Transcript
from rlhf_core.data.values import Row

__all__ = [
    "PinnedCheckpoint",
    "PinnedModel",
    "PreferenceExample",
    "PromptDataset",
    "PromptOrder",
    "RenderedPrompt",
    "Row",
    "SftExample",
    "Source",
    "SupervisedDataset",
    "Tokenizer",
    "Transcript",
    "Vision",
    "end_of_sequence_ids",
    "evaluation_prompts",
    "held_out_examples",
    "iterations",
    "load_prompts",
    "load_tokenizer",
    "make_tiny_model",
    "models_of",
    "pin",
    "pin_models",
    "plain_token_ids",
    "read_rows",
    "render",
    "resolve_model",
    "sample_seed",
    "supervised_examples",
    "supervised_models_of",
    "training_prompts",
]

"""A backbone with one number a token: the critic of PPO, and reward models.

::

    ValueScorer      input_ids [B, T] ─▶ backbone ─▶ hidden before each action [N, H] ─▶ head ─▶ values [B, T], 0 elsewhere
    SequenceScorer   input_ids [B, T] ─▶ backbone ─▶ hidden of each last token [B, H] ─▶ head ─▶ scores [B]

Both hold a sequence classifier of Hugging Face with one output, so that what is trained here is exported as a plain folder,
and either can start from the other's. Of models that see there is no such class, and one is made: see ``vision.classifier``.
Both take their rows padded, or let the backbone see them packed: see ``packing``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification

from rlhf_core.errors import TrainingError
from rlhf_core.training.loading import is_vision_language_only, load_model_config, load_weights, refuse_missing
from rlhf_core.training.model import (
    at_actions,
    hidden_before_actions,
    large_hidden,
    scripted,
)
from rlhf_core.training.packing import PackingScorer, before_actions, up_to_last_action
from rlhf_core.training.visual import load_policy_model
from rlhf_core.vision.classifier import seeing_classifier

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from rlhf_core.batching import ImageInputs, TokenBatch
    from rlhf_core.training.loading import LoadSettings

SCORER = "sequence classifier with one output"


def load_sequence_model(
    settings: LoadSettings, path: str, seed: int | None, *, reads_images: bool | None = None
) -> PreTrainedModel:
    """A sequence classifier with one output, in host memory, without dropout.

    From the folder of a reward model or critic it is loaded whole. From that of a language model it gets a new head, the same
    on every rank: small and normal with a standard deviation of ``1 / sqrt(H + 1)`` for a reward model, zero for a critic, as
    in Ziegler et al. 2019 (arXiv:1909.08593).

    Args:
        settings: the run's.
        path: folder or id.
        seed: of a new head; None: it is zero.
        reads_images: a vision-language model is taken too, with its vision tower if it is to read images, or has no other form;
            None: it is not.

    Raises:
        TrainingError: the folder or id cannot be loaded as one, has several outputs, or has a head that is more than a
            linear layer on the last token.
    """
    model_config = load_model_config(settings, path, SCORER, num_labels=1)
    _forget_padding_that_ends_rows(model_config)
    sees = reads_images or (reads_images is not None and is_vision_language_only(model_config))
    seeing = seeing_classifier(model_config) if sees else None
    if seeing is None or seeing.__name__ in (model_config.architectures or ()):
        kind, in_4bit = seeing or AutoModelForSequenceClassification, settings.ds.load_in_4bit
        model, missing = load_weights(kind, settings, path, SCORER, model_config, in_4bit=in_4bit)
    else:
        model, missing = _with_new_head(load_policy_model(settings, path, reads_images=True), seeing)
    head = _head_of(model)
    of_head = {
        name for name, parameter in model.named_parameters() if parameter is head.weight or parameter is head.bias
    }
    refuse_missing([name for name in missing if name not in of_head], path, SCORER)
    if of_head & set(missing):
        _reset_head(head, seed)
    return model


def _with_new_head(speaker: PreTrainedModel, kind: type[PreTrainedModel]) -> tuple[PreTrainedModel, list[str]]:
    """A classifier on the backbone of a vision-language model, and the name of what it lacks.

    Hugging Face renames weights of some models as it loads them, and knows them by the class: so it loads its own.
    """
    with torch.device("meta"):
        model = kind._from_config(speaker.config)
    model.model, model.config = speaker.base_model, speaker.config
    model.config.num_labels, model.config.architectures = 1, [kind.__name__]
    _forget_padding_that_ends_rows(model.config)
    inputs: int = model.config.get_text_config().hidden_size
    model.score = nn.Linear(inputs, 1, bias=False, dtype=speaker.dtype)
    return model, ["score.weight"]


class ScoreHead(nn.Module):  # type: ignore[misc]
    """A linear layer with one output, computed in fp32 whatever its type.

    It holds the layer's parameters itself, so that ZeRO-3 gathers them for this forward pass.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """fp32 ``[N]``."""
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(hidden_NH.float(), self.weight.float(), bias).squeeze(1)


class _Scorer(PackingScorer):
    """A backbone and the head on it. The sequence model itself is not a child: see ``TokenScorer``."""

    def __init__(self, sequence_model: PreTrainedModel, packs: bool = False) -> None:
        super().__init__(sequence_model.base_model, packs)
        self.head = ScoreHead(_head_of(sequence_model))

    def hidden(self, input_ids_BT: torch.Tensor, images: ImageInputs | None = None) -> torch.Tensor:
        """Last hidden states ``[B, T, H]`` of padded rows, and of what they show."""
        return self.ask_padded(input_ids_BT, images)[1]

    def packed(self, input_ids_BT: torch.Tensor, kept_BT: torch.Tensor, places_N: torch.Tensor) -> torch.Tensor:
        """What the head says of tokens of the packed row, ``[N]``: see ``ask``."""
        output, asked = self.ask(input_ids_BT, kept_BT, places_N)
        return asked.everywhere(self.head(asked.hidden(output.last_hidden_state)))


class ValueScorer(_Scorer):
    """What is still to be earned, before each action: **index t is the value before token t is spoken**.

    It comes from the hidden state at t - 1, as the log-prob of token t does.

    Raises:
        TrainingError: the head is more than a linear layer with one output.
    """

    def forward(
        self, input_ids_BT: torch.Tensor, action_mask_BT: torch.Tensor, images: ImageInputs | None = None
    ) -> torch.Tensor:
        """fp32 values ``[B, T]``, 0 outside actions.

        Args:
            input_ids_BT: padded to the right.
            action_mask_BT: bool, False at index 0.
            images: as of ``TokenScorer``.
        """
        if self.packs:
            assert images is None, "a configuration rule refuses images in packed rows"
            kept_BT = up_to_last_action(action_mask_BT)
            values_N = self.packed(input_ids_BT, kept_BT, before_actions(action_mask_BT, kept_BT))
        else:
            values_N = self.head(hidden_before_actions(self.hidden(input_ids_BT, images), action_mask_BT))
        return at_actions(values_N, action_mask_BT)

    @staticmethod
    def inputs(batch: TokenBatch) -> tuple[Any, ...]:
        """Tokens and actions."""
        return batch.input_ids_BT, batch.action_mask_BT


class SequenceScorer(_Scorer):
    """One score a row, from the hidden state of its last token, whichever token that is.

    Hugging Face's class looks for the last token that is not padding instead: the same for rows that end otherwise.

    Raises:
        TrainingError: the head is more than a linear layer with one output.
    """

    def forward(self, input_ids_BT: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """fp32 scores ``[B]``.

        Args:
            input_ids_BT: padded to the right.
            lengths_B: tokens of each row, at least 1.
        """
        if self.packs:
            kept_BT = torch.arange(input_ids_BT.shape[1], device=lengths_B.device) < lengths_B.unsqueeze(1)
            return self.packed(input_ids_BT, kept_BT, lengths_B.cumsum(0) - 1)
        hidden_BTH = self.hidden(input_ids_BT)
        rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
        return self.head(hidden_BTH[rows_B, lengths_B - 1])

    @staticmethod
    def inputs(batch: TokenBatch) -> tuple[Any, ...]:
        """Rows that end with an action."""
        return batch.input_ids_BT, up_to_last_action(batch.action_mask_BT).sum(dim=1)


def _head_of(model: PreTrainedModel) -> nn.Linear:
    """The layer on top of the backbone, if a score is nothing but that layer at the last token."""
    name, backbone = type(model).__name__, model.base_model
    layers = [child for child in model.children() if child is not backbone and any(True for _ in child.parameters())]
    if backbone is model or len(layers) != 1 or not isinstance(layers[0], nn.Linear) or layers[0].out_features != 1:
        raise TrainingError(f"{name} is not a backbone and one linear layer with one output: not supported as a scorer")
    [layer] = layers
    if not _scores_last_token(model, layer):
        raise TrainingError(
            f"the score of {name} is not that of its linear layer at the last token: not supported as a scorer"
        )
    return layer


def _scores_last_token(model: PreTrainedModel, layer: nn.Linear) -> bool:
    """Compare the model's own score of made-up hidden states with its layer's."""
    hidden_1TH = large_hidden(layer)
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    ids_1T = torch.full((1, 2), 1 if padding == 0 else 0, device=hidden_1TH.device)  # no padding
    with torch.no_grad(), scripted(model.base_model, hidden_1TH):
        try:
            score = model(input_ids=ids_1T).logits
        except (IndexError, TypeError, AttributeError):  # it asks for more than the last hidden states
            return False
        expected = layer(hidden_1TH[:, -1])
    return score.shape == expected.shape and bool(torch.allclose(score.float(), expected.float(), rtol=1e-2, atol=1e-2))


def _reset_head(head: nn.Linear, seed: int | None) -> None:
    weight_1H = torch.zeros(head.weight.shape)
    if seed is not None:
        weight_1H.normal_(0, (head.in_features + 1) ** -0.5, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        head.weight.copy_(weight_1H)
        if head.bias is not None:
            head.bias.zero_()


def _forget_padding_that_ends_rows(model_config: PretrainedConfig) -> None:
    """Where the padding token is an end token, Hugging Face would score the token before the end of each row.

    Without a padding token its classifier refuses batches instead, and scores single rows at their end.
    """
    text = model_config.get_text_config()
    end, padding = getattr(text, "eos_token_id", None), getattr(text, "pad_token_id", None)
    if padding in (end if isinstance(end, list) else [end]):
        text.pad_token_id = None

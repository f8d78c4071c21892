"""A causal language model as a function from tokens to the log-probs of its actions.

::

    (images ─────────┐)
    input_ids [B, T] ─▶ backbone ─▶ hidden [B, T, H] ─▶ only those that predict an action [N, H]
                          │                                            │ tiles of the vocabulary
                          ▼                               head ─▶ log-probs, entropies [N] ─▶ [B, T], 0 elsewhere
                     router logits ─▶ balancing loss      (mixtures of experts, if it is wanted)

Prompt tokens never meet the output layer, and the full logits ``[B, T, V]`` never exist. With ``ds.packing_samples`` the
backbone gets one row ``[1, N]`` without padding, and the rest is the same: see ``packing``.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from rlhf_core.algorithms.logprobs import chunked_logprobs
from rlhf_core.errors import TrainingError
from rlhf_core.training.packing import PackingScorer, before_actions, up_to_last_action
from rlhf_core.vision.banned import BAN

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from transformers import PreTrainedModel

    from rlhf_core.batching import ImageInputs, TokenBatch

LARGE_HIDDEN = 100.0  # makes logits large enough for soft-capping to show


class LogprobHead(nn.Module):  # type: ignore[misc]
    """The output layer, asked for chosen tokens only.

    It holds the layer's parameters itself: ZeRO-3 then gathers them once per pass. Were the layer called once per
    tile, ranks with different numbers of action tokens would disagree on the number of gathers, and hang.

    Args:
        output_layer: of the model.
        chunk: tokens' worth of logits at a time, at most.
        banned_ids: tokens that the engine never samples: the same is subtracted from their logits here.
    """

    ban_V: torch.Tensor | None  # no weight of the model: neither saved, nor sent, nor in any digest

    def __init__(self, output_layer: nn.Linear, chunk: int, banned_ids: Collection[int] = ()) -> None:
        super().__init__()
        self.weight = output_layer.weight
        self.bias = output_layer.bias
        self.chunk = chunk
        ban_V = None
        if banned_ids:
            ban_V = torch.zeros(output_layer.out_features)
            ban_V[sorted(banned_ids)] = -BAN
        self.register_buffer("ban_V", ban_V, persistent=False)

    def forward(
        self, hidden_NH: torch.Tensor, targets_N: torch.Tensor, temperature_N: torch.Tensor, want_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """fp32 log-probs and entropies ``[N]``."""
        bias_V = self.bias
        if self.ban_V is not None:
            ban_V = self.ban_V.to(self.weight.dtype)
            bias_V = ban_V if bias_V is None else bias_V + ban_V
        return chunked_logprobs(hidden_NH, self.weight, bias_V, targets_N, temperature_N, self.chunk, want_entropy)


class TokenScores(NamedTuple):
    """What a forward pass says about the actions of a micro-batch."""

    logprobs_BT: torch.Tensor  # fp32, 0 outside actions
    entropy_BT: torch.Tensor | None  # fp32, 0 outside actions; None if it was not wanted
    aux_loss: torch.Tensor | None = None  # scalar: a mixture of experts' balancing loss; None if it was not wanted


class TokenScorer(PackingScorer):
    """Log-probs of action tokens under a causal LM.

    The causal LM itself is not a child: its forward, which makes all logits, is never called. Its parameters are
    shared, so it stays the place that knows their Hugging Face names.

    Args:
        causal_lm: a model of Hugging Face.
        chunk: tokens' worth of logits at a time, at most.
        balance_experts: give the balancing loss too, in training mode.
        banned_ids: tokens that are never sampled: see ``LogprobHead``.
        packs: see ``PackingScorer``; such a one takes no images.

    Raises:
        TrainingError: the model does something to its logits besides a linear output layer; or it has no balancing
            loss, and ``balance_experts``.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        chunk: int,
        balance_experts: bool = False,
        banned_ids: Collection[int] = (),
        packs: bool = False,
    ) -> None:
        _check_output_layer(causal_lm)
        super().__init__(causal_lm.base_model, packs)
        self.head = LogprobHead(causal_lm.get_output_embeddings(), chunk, banned_ids)
        self._balancing_loss = _balancing_loss(causal_lm) if balance_experts else None

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        action_mask_BT: torch.Tensor,
        temperature_B: torch.Tensor,
        want_entropy: bool,
        images: ImageInputs | None = None,
    ) -> TokenScores:
        """Of ``softmax(logits / temperature)``.

        Args:
            input_ids_BT: padded to the right.
            action_mask_BT: bool, False at index 0.
            temperature_B: one number a row.
            want_entropy: None instead of entropies saves a pass.
            images: what the rows show; a blank row among it is computed, and left out of the answer.
        """
        balance = self._balancing_loss if self.training else None
        wanted: dict[str, Any] = {} if balance is None else {"output_router_logits": True}
        predicts_BT = action_mask_BT[:, 1:]
        targets_N = input_ids_BT[:, 1:][predicts_BT]
        temperature_N = temperature_B.unsqueeze(1).expand_as(predicts_BT)[predicts_BT]
        if self.packs:
            assert images is None, "a configuration rule refuses images in packed rows"
            kept_BT = up_to_last_action(action_mask_BT)
            output, asked = self.ask(input_ids_BT, kept_BT, before_actions(action_mask_BT, kept_BT), **wanted)
            hidden_MH = asked.hidden(output.last_hidden_state)
            said = self.head(hidden_MH, asked.here(targets_N), asked.here(temperature_N), want_entropy)
            logprobs_N, entropy_N = (None if part_M is None else asked.everywhere(part_M) for part_M in said)
            counted = torch.ones((1, int(kept_BT.sum())), dtype=torch.bool, device=kept_BT.device)
        else:
            hidden_NH, output, counted = self._padded(input_ids_BT, action_mask_BT, wanted, images)
            logprobs_N, entropy_N = self.head(hidden_NH, targets_N, temperature_N, want_entropy)
        return TokenScores(
            logprobs_BT=at_actions(logprobs_N, action_mask_BT),
            entropy_BT=None if entropy_N is None else at_actions(entropy_N, action_mask_BT),
            aux_loss=None if balance is None else balance(self._router_logits(output, counted), counted),
        )

    @staticmethod
    def inputs(batch: TokenBatch) -> tuple[Any, ...]:
        """Without entropies."""
        return batch.input_ids_BT, batch.action_mask_BT, batch.temperature_B, False

    def _padded(
        self,
        input_ids_BT: torch.Tensor,
        action_mask_BT: torch.Tensor,
        wanted: dict[str, Any],
        images: ImageInputs | None,
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Hidden states before actions ``[N, H]``, the backbone's output, and which of its tokens count for the balance."""
        output, hidden_BTH, seen_BT = self.ask_padded(input_ids_BT, images, **wanted)
        return hidden_before_actions(hidden_BTH, action_mask_BT), output, _counted(action_mask_BT, seen_BT)

    def _router_logits(self, output: Any, counted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``[tokens, experts]`` of each layer, of all tokens of a packed row."""
        layers: tuple[torch.Tensor, ...] = output.router_logits
        if self.split.size == 1:
            return layers
        return tuple(self.split.join(layer)[: counted.numel()] for layer in layers)


def hidden_before_actions(hidden_BTH: torch.Tensor, action_mask_BT: torch.Tensor) -> torch.Tensor:
    """``[N, H]``: of the token before each action, which all that is said about the action comes from."""
    return hidden_BTH[:, :-1][action_mask_BT[:, 1:]]


def at_actions(values_N: torch.Tensor, action_mask_BT: torch.Tensor) -> torch.Tensor:
    """``[B, T]``, 0 outside actions."""
    return values_N.new_zeros(action_mask_BT.shape).masked_scatter(action_mask_BT, values_N)


class HiddenOnly(BaseModelOutputWithPast):  # type: ignore[misc]
    """A backbone's output whose other fields (caches, attentions, router logits ...) are all None."""

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def scripted(backbone: nn.Module, hidden_BTH: torch.Tensor) -> Iterator[None]:
    """Within, the backbone answers these hidden states to everything: what a model makes of them shows."""
    backbone.forward = lambda *args, **kwargs: HiddenOnly(last_hidden_state=hidden_BTH)
    try:
        yield
    finally:
        del backbone.forward  # the class's own is seen again


def large_hidden(layer: nn.Linear) -> torch.Tensor:
    """Made-up hidden states ``[1, 2, H]`` for a layer."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((1, 2, layer.in_features), generator=generator).to(layer.weight) * LARGE_HIDDEN


def _check_output_layer(causal_lm: PreTrainedModel) -> None:
    """Compare the model's own logits of made-up hidden states with its output layer's."""
    layer, backbone = causal_lm.get_output_embeddings(), causal_lm.base_model
    if not isinstance(layer, nn.Linear) or backbone is causal_lm:
        raise TrainingError(f"{type(causal_lm).__name__} has no linear output layer on a backbone: not supported")
    hidden_1TH = large_hidden(layer)
    with torch.no_grad(), scripted(backbone, hidden_1TH):
        logits = causal_lm(input_ids=torch.zeros((1, 2), dtype=torch.long, device=hidden_1TH.device)).logits
        expected = layer(hidden_1TH)
    if not torch.allclose(logits.float(), expected.float(), rtol=1e-2, atol=1e-2):
        raise TrainingError(
            f"{type(causal_lm).__name__} changes its logits after the output layer (scaling or soft-capping): "
            "not supported in this version"
        )


def _balancing_loss(causal_lm: PreTrainedModel) -> Callable[..., torch.Tensor]:
    """(router logits of the layers, mask of the tokens that count [B, T]) to the loss: the model's own function."""
    name = "load_balancing_loss_func"  # of every modelling file of Transformers whose models have such a loss
    function = getattr(sys.modules[type(causal_lm).__module__], name, None)
    if function is None:
        raise TrainingError(
            f"{type(causal_lm).__name__} has no balancing loss (it is no mixture of experts, or has another way to "
            "balance them): set aux_loss_coef=0"
        )

    def loss(router_logits: tuple[torch.Tensor, ...], counts_BT: torch.Tensor) -> torch.Tensor:
        return function(router_logits, causal_lm.num_experts, causal_lm.num_experts_per_tok, counts_BT)

    return loss


def _counted(action_mask_BT: torch.Tensor, seen_BT: torch.Tensor) -> torch.Tensor:
    """``up_to_last_action``, and nothing of what was put beside the rows."""
    rows, width = action_mask_BT.shape
    counted_BT = torch.zeros_like(seen_BT, dtype=torch.bool)
    counted_BT[:rows, :width] = up_to_last_action(action_mask_BT)
    return counted_BT

"""A causal language model as a function from tokens to the log-probs of its actions.

::

    input_ids [B, T] ─▶ backbone ─▶ hidden [B, T, H] ─▶ only those that predict an action [N, H]
                                                                       │ chunks
                                                          head ─▶ log-probs, entropies [N] ─▶ [B, T], 0 elsewhere

Prompt tokens never meet the output layer, and the full logits ``[B, T, V]`` never exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from rlhf_core.algorithms.logprobs import chunked_logprobs
from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlhf_core.config import Config

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGE_HIDDEN = 100.0  # makes logits large enough for soft-capping to show


def load_causal_lm(config: Config, path: str) -> PreTrainedModel:
    """A Hugging Face causal LM in host memory, without dropout.

    Dropout is off because log-probs of the same tokens are compared across passes: with it the ratio of the first
    update would not be 1.

    Raises:
        TrainingError: the folder or id cannot be loaded as one.
    """
    remote_code = config.run.trust_remote_code
    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=remote_code)
        _switch_off_dropout(model_config)
        return AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            dtype=TORCH_DTYPES[config.ds.param_dtype],
            attn_implementation=config.ds.attn_implementation,
            trust_remote_code=remote_code,
            use_safetensors=True,
        )
    except (OSError, ValueError, ImportError) as error:
        raise TrainingError(f"cannot load {path!r} as a causal language model: {error}") from error


class LogprobHead(nn.Module):  # type: ignore[misc]
    """The output layer, asked for chosen tokens only.

    It holds the layer's parameters itself: ZeRO-3 then gathers them once per pass. Were the layer called once per
    chunk, ranks with different numbers of action tokens would disagree on the number of gathers, and hang.
    """

    def __init__(self, output_layer: nn.Linear, chunk: int) -> None:
        super().__init__()
        self.weight = output_layer.weight
        self.bias = output_layer.bias
        self.chunk = chunk

    def forward(
        self, hidden_NH: torch.Tensor, targets_N: torch.Tensor, temperature_N: torch.Tensor, want_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """fp32 log-probs and entropies ``[N]``."""

        def logits(chunk_NH: torch.Tensor) -> torch.Tensor:
            return functional.linear(chunk_NH, self.weight, self.bias)

        return chunked_logprobs(hidden_NH, logits, targets_N, temperature_N, self.chunk, want_entropy)


class TokenScores(NamedTuple):
    """What a forward pass says about the actions of a micro-batch."""

    logprobs_BT: torch.Tensor  # fp32, 0 outside actions
    entropy_BT: torch.Tensor | None  # fp32, 0 outside actions; None if it was not wanted
    aux_loss: torch.Tensor | None = None  # scalar: a mixture of experts' balancing loss; None where there is none


class TokenScorer(nn.Module):  # type: ignore[misc]
    """Log-probs of action tokens under a causal LM.

    The causal LM itself is not a child: its forward, which makes all logits, is never called. Its parameters are
    shared, so it stays the place that knows their Hugging Face names.

    Raises:
        TrainingError: the model does something to its logits besides a linear output layer.
    """

    def __init__(self, causal_lm: PreTrainedModel, chunk: int) -> None:
        super().__init__()
        _check_output_layer(causal_lm)
        self.backbone = causal_lm.base_model
        self.head = LogprobHead(causal_lm.get_output_embeddings(), chunk)

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        action_mask_BT: torch.Tensor,
        temperature_B: torch.Tensor,
        want_entropy: bool,
    ) -> TokenScores:
        """Of ``softmax(logits / temperature)``.

        Args:
            input_ids_BT: padded to the right.
            action_mask_BT: bool, False at index 0.
            temperature_B: one number a row.
            want_entropy: None instead of entropies saves a pass.
        """
        hidden_BTH = self.backbone(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        predicts_BT = action_mask_BT[:, 1:]  # the hidden state at t - 1 predicts token t
        temperature_N = temperature_B.unsqueeze(1).expand_as(predicts_BT)[predicts_BT]
        logprobs_N, entropy_N = self.head(
            hidden_BTH[:, :-1][predicts_BT], input_ids_BT[:, 1:][predicts_BT], temperature_N, want_entropy
        )
        entropy_BT = None if entropy_N is None else _scatter(entropy_N, action_mask_BT)
        return TokenScores(_scatter(logprobs_N, action_mask_BT), entropy_BT)


def _scatter(values_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)


def _switch_off_dropout(model_config: Any) -> None:
    for name, value in vars(model_config).items():
        if isinstance(value, float) and (name.endswith(("dropout", "dropout_prob", "_pdrop"))):
            setattr(model_config, name, 0.0)


class _HiddenOnly(BaseModelOutputWithPast):  # type: ignore[misc]
    """A backbone's output whose other fields (caches, attentions, router logits ...) are all None."""

    def __getattr__(self, name: str) -> None:
        return None


def _check_output_layer(causal_lm: PreTrainedModel) -> None:
    """Compare the model's own logits of a made-up hidden state with its output layer's."""
    layer, backbone = causal_lm.get_output_embeddings(), causal_lm.base_model
    if not isinstance(layer, nn.Linear) or backbone is causal_lm:
        raise TrainingError(f"{type(causal_lm).__name__} has no linear output layer on a backbone: not supported")
    generator = torch.Generator().manual_seed(0)
    hidden_1TH = torch.randn((1, 2, layer.in_features), generator=generator).to(layer.weight) * LARGE_HIDDEN
    backbone.forward = lambda *args, **kwargs: _HiddenOnly(last_hidden_state=hidden_1TH)
    try:
        with torch.no_grad():
            logits = causal_lm(input_ids=torch.zeros((1, 2), dtype=torch.long, device=hidden_1TH.device)).logits
            expected = layer(hidden_1TH)
    finally:
        del backbone.forward  # the class's own is seen again
    if not torch.allclose(logits.float(), expected.float(), rtol=1e-2, atol=1e-2):
        raise TrainingError(
            f"{type(causal_lm).__name__} changes its logits after the output layer (scaling or soft-capping): "
            "not supported in this version"
        )

"""A causal language model as a function from tokens to the log-probs of its actions.

::

    input_ids [B, T] ─▶ backbone ─▶ hidden [B, T, H] ─▶ only those that predict an action [N, H]
                          │                                            │ tiles of the vocabulary
                          ▼                               head ─▶ log-probs, entropies [N] ─▶ [B, T], 0 elsewhere
                     router logits ─▶ balancing loss      (mixtures of experts, if it is wanted)

Prompt tokens never meet the output layer, and the full logits ``[B, T, V]`` never exist.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from rlhf_core.algorithms.logprobs import chunked_logprobs
from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PretrainedConfig, PreTrainedModel

    from rlhf_core.config.model import RunConfig
    from rlhf_core.config.trained import DeepSpeedConfig

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CAUSAL_LM = "causal language model"
LARGE_HIDDEN = 100.0  # makes logits large enough for soft-capping to show


class LoadSettings(Protocol):
    """What loading a model needs of a configuration: of ``Config`` or of ``SupervisedConfig``."""

    @property
    def ds(self) -> DeepSpeedConfig:
        """Type and attention."""
        ...

    @property
    def run(self) -> RunConfig:
        """Whether code of the model may run."""
        ...


def load_causal_lm(settings: LoadSettings, path: str) -> PreTrainedModel:
    """A Hugging Face causal LM in host memory, without dropout.

    Raises:
        TrainingError: the folder or id cannot be loaded as one, or lacks some of its weights.
    """
    model_config = load_model_config(settings, path, CAUSAL_LM)
    model, missing = load_weights(AutoModelForCausalLM, settings, path, CAUSAL_LM, model_config)
    refuse_missing(missing, path, CAUSAL_LM)
    return model


def load_model_config(settings: LoadSettings, path: str, kind: str, **changes: Any) -> PretrainedConfig:
    """The model's own configuration, with changes.

    Dropout is off because log-probs and values of the same tokens are compared across passes: with it the ratio of the
    first update would not be 1.

    Raises:
        TrainingError: the folder or id has none.
    """
    with _loading(path, kind):
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=settings.run.trust_remote_code, **changes)
    _switch_off_dropout(model_config)
    return model_config


def load_weights(
    auto_class: Any, settings: LoadSettings, path: str, kind: str, model_config: PretrainedConfig
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of its weights that the folder lacks, which are random.

    Raises:
        TrainingError: the folder or id cannot be loaded as such a model, or has a weight of another shape.
    """
    with _loading(path, kind):
        model, info = auto_class.from_pretrained(
            path,
            config=model_config,
            dtype=TORCH_DTYPES[settings.ds.param_dtype],
            attn_implementation=settings.ds.attn_implementation,
            trust_remote_code=settings.run.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    misfits = [
        f"{name} is {list(found)}, not {list(wanted)}" for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    if misfits:
        raise TrainingError(f"{path!r} is no {kind}: {', '.join(misfits)}")
    return model, sorted(info["missing_keys"])


def refuse_missing(missing: list[str], path: str, kind: str) -> None:
    """Raise ``TrainingError`` rather than train random weights."""
    if missing:
        raise TrainingError(
            f"{path!r} lacks weights of a {kind}: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}; "
            "name the folder of such a model"
        )


class LogprobHead(nn.Module):  # type: ignore[misc]
    """The output layer, asked for chosen tokens only.

    It holds the layer's parameters itself: ZeRO-3 then gathers them once per pass. Were the layer called once per
    tile, ranks with different numbers of action tokens would disagree on the number of gathers, and hang.
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
        return chunked_logprobs(hidden_NH, self.weight, self.bias, targets_N, temperature_N, self.chunk, want_entropy)


class TokenScores(NamedTuple):
    """What a forward pass says about the actions of a micro-batch."""

    logprobs_BT: torch.Tensor  # fp32, 0 outside actions
    entropy_BT: torch.Tensor | None  # fp32, 0 outside actions; None if it was not wanted
    aux_loss: torch.Tensor | None = None  # scalar: a mixture of experts' balancing loss; None if it was not wanted


class TokenScorer(nn.Module):  # type: ignore[misc]
    """Log-probs of action tokens under a causal LM.

    The causal LM itself is not a child: its forward, which makes all logits, is never called. Its parameters are
    shared, so it stays the place that knows their Hugging Face names.

    Args:
        causal_lm: a model of Hugging Face.
        chunk: tokens' worth of logits at a time, at most.
        balance_experts: give the balancing loss too, in training mode.

    Raises:
        TrainingError: the model does something to its logits besides a linear output layer; or it has no balancing
            loss, and ``balance_experts``.
    """

    def __init__(self, causal_lm: PreTrainedModel, chunk: int, balance_experts: bool = False) -> None:
        super().__init__()
        _check_output_layer(causal_lm)
        self.backbone = causal_lm.base_model
        self.head = LogprobHead(causal_lm.get_output_embeddings(), chunk)
        self._balancing_loss = _balancing_loss(causal_lm) if balance_experts else None

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
        balance = self._balancing_loss if self.training else None
        wanted = {} if balance is None else {"output_router_logits": True}
        output = self.backbone(input_ids=input_ids_BT, use_cache=False, **wanted)
        predicts_BT = action_mask_BT[:, 1:]
        temperature_N = temperature_B.unsqueeze(1).expand_as(predicts_BT)[predicts_BT]
        logprobs_N, entropy_N = self.head(
            hidden_before_actions(output.last_hidden_state, action_mask_BT),
            input_ids_BT[:, 1:][predicts_BT],
            temperature_N,
            want_entropy,
        )
        return TokenScores(
            logprobs_BT=at_actions(logprobs_N, action_mask_BT),
            entropy_BT=None if entropy_N is None else at_actions(entropy_N, action_mask_BT),
            aux_loss=None if balance is None else balance(output.router_logits, _up_to_last_action(action_mask_BT)),
        )


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


def _up_to_last_action(action_mask_BT: torch.Tensor) -> torch.Tensor:
    """True at the tokens whose routing counts: nothing that is trained depends on those after the last action.

    That leaves out the padding. The first token of a row always counts, so that no mean is over nothing.
    """
    positions_T = torch.arange(action_mask_BT.shape[1], device=action_mask_BT.device)
    last_B = (positions_T * action_mask_BT).amax(dim=1)
    return positions_T <= last_B.unsqueeze(1)


@contextmanager
def _loading(path: str, kind: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise TrainingError(f"cannot load {path!r} as a {kind}: {error}") from error


def _switch_off_dropout(model_config: Any) -> None:
    for name, value in vars(model_config).items():
        if isinstance(value, float) and (name.endswith(("dropout", "dropout_prob", "_pdrop"))):
            setattr(model_config, name, 0.0)

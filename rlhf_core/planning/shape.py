"""The shape of a model, from its Hugging Face configuration alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import ConfigError
from rlhf_core.vision.classifier import seeing_classifier

_EXPERT = re.compile(r"\.experts\.")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory and time depend on."""

    name: str
    parameters: int  # tied ones once
    active: int  # parameters that a token passes: fewer in a mixture of experts
    embedding: (
        int  # of ``parameters``: the input embedding, which no token multiplies, unless it is the output layer too
    )
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # width of the MLP that a token passes, all its experts together
    vocabulary: int
    largest: int  # elements of the largest single parameter
    linear: tuple[tuple[int, int], ...] = ()  # (in, out) of every linear layer but the output layer: what LoRA wraps
    matrices: int = 0  # elements of the matrices inside the layers: what Muon trains

    @property
    def kv_elements(self) -> int:
        """Of the KV cache, for one token: keys and values of every layer (Kwon et al. 2023, arXiv:2309.06180)."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def lora_parameters(self, rank: int) -> int:
        """Of adapters on every linear layer: two matrices, ``in × r`` and ``r × out`` (Hu et al. 2021, arXiv:2106.09685)."""
        return sum(rank * (wide + tall) for wide, tall in self.linear)


def shape_of(path: str, trust_remote_code: bool = False, num_labels: int | None = None) -> ModelShape:
    """Of a folder or a hub id in the local cache. Loads Transformers, and no weights.

    Args:
        path: as Transformers takes it.
        trust_remote_code: as ``run.trust_remote_code``.
        num_labels: of a sequence classifier (critic, reward model); None: a language model.

    Raises:
        ConfigError: there is no such configuration, or Transformers cannot build its model.
    """
    import torch
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = _made(config, num_labels, trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"the configuration of {path!r} cannot be read ({error}): name a folder, or fetch its config.json into the local "
            "cache first (hf download MODEL config.json)"
        ) from error
    return shape_from(path, config, model)


def shape_from(name: str, config: Any, model: Any) -> ModelShape:
    """The same of a model that is there.

    Args:
        name: for people.
        config: Transformers' configuration.
        model: Transformers' model; its parameters may be on the meta device.
    """
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    experts, chosen = _experts(text)
    seen: dict[int, tuple[str, int, int]] = {id(p): (n, p.numel(), p.dim()) for n, p in model.named_parameters()}
    total = sum(size for _, size, _ in seen.values())
    of_experts = sum(size for n, size, _ in seen.values() if _EXPERT.search(n))
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = output is not None and output.weight is embedding
    linear = tuple(
        (int(module.in_features), int(module.out_features))
        for module in model.modules()
        if type(module).__name__ == "Linear" and module is not output
    )
    width = getattr(text, "moe_intermediate_size", None) if experts else None
    return ModelShape(
        name=name,
        parameters=total,
        active=total - of_experts * (experts - chosen) // experts if experts else total,
        embedding=0 if tied else int(embedding.numel()),
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        intermediate=int(width or getattr(text, "intermediate_size", None) or 4 * text.hidden_size) * max(chosen, 1),
        vocabulary=int(text.vocab_size),
        largest=max(size for _, size, _ in seen.values()),
        linear=linear,
        matrices=sum(size for n, size, dim in seen.values() if dim >= 2 and "embed" not in n and "lm_head" not in n),
    )


def _made(config: Any, num_labels: int | None, trust_remote_code: bool) -> Any:
    """The model, on the device that is the default one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    has_text_class = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if num_labels is None:
        kind = AutoModelForCausalLM if has_text_class else AutoModelForImageTextToText
        return kind.from_config(config, trust_remote_code=trust_remote_code)
    config.num_labels = num_labels
    seeing = None if has_text_class else seeing_classifier(config)
    if seeing is not None:
        return seeing._from_config(config)
    return AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)


def _experts(text: Any) -> tuple[int, int]:
    """(experts of a layer, those that a token passes); (0, 0) without any."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if count := getattr(text, name, None):
            return int(count), int(getattr(text, "num_experts_per_tok", 1) or 1)
    return 0, 0

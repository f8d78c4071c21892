"""One number from what a vision-language model has read and seen: Hugging Face has such classifiers for texts alone.

::

    …ForConditionalGeneration       backbone ─▶ output layer over the vocabulary
    the classifier made here        backbone ─▶ score, one linear layer           same names: one's folder loads as the other
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def seeing_classifier(model_config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class, made as Hugging Face makes those of texts; None for a model that reads text only.

    ``num_labels`` of the configuration is the number of outputs.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

    kind = type(model_config)
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or kind not in MODEL_MAPPING:
        return None
    return _classifier(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind])


@cache
def _classifier(speaker: Any) -> type[PreTrainedModel]:
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GenericForSequenceClassification

    family = next(
        base
        for base in speaker.__mro__[1:]
        if issubclass(base, PreTrainedModel)
        and base is not PreTrainedModel
        and not base.__name__.endswith("Generation")
    )
    name = speaker.__name__.replace("ForConditionalGeneration", "") + "ForSequenceClassification"
    return type(name, (GenericForSequenceClassification, family), {"base_model_prefix": "model"})

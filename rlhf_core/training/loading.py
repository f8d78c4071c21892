"""Hugging Face models in host memory: their own configuration and weights, whole, without dropout."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from rlhf_core.errors import TrainingError
from rlhf_core.telemetry import get_logger
from rlhf_core.training.liger import check_liger, fuse_layers
from rlhf_core.training.packed_attention import attention_of
from rlhf_core.training.quantized import check_quantization, export_unpacked, loading_in_4bit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedModel

    from rlhf_core.config.model import RunConfig
    from rlhf_core.config.trained import DeepSpeedConfig

log = get_logger(__name__)

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CAUSAL_LM = "causal language model"
PICKLES = (
    "; weights are read from .safetensors files alone, for a .bin file is a pickle, which may run code: convert it, where you "
    "can afford to run it, with from_pretrained(...).save_pretrained(FOLDER) of transformers"
)


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
    if is_vision_language_only(model_config):
        raise TrainingError(
            f"{path!r} is a vision-language model, which this kind of training cannot use: SFT, reward models and DPO read "
            "text only; name a text model, or train it by rewards (rlhf train)"
        )
    model, missing = load_weights(
        AutoModelForCausalLM, settings, path, CAUSAL_LM, model_config, in_4bit=settings.ds.load_in_4bit
    )
    refuse_missing(missing, path, CAUSAL_LM)
    return model


def is_vision_language_only(model_config: PretrainedConfig) -> bool:
    """True if Hugging Face has no text-only class for the model."""
    kind = type(model_config)
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


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
    auto_class: Any,
    settings: LoadSettings,
    path: str,
    kind: str,
    model_config: PretrainedConfig,
    in_4bit: bool = False,
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of its weights that the folder lacks, which are random.

    Raises:
        TrainingError: the folder or id cannot be loaded as such a model, or has a weight of another shape; or ``in_4bit``, and
            this process cannot hold it so; or ``ds.use_liger_kernel``, and there are no kernels for it here.
    """
    packing: dict[str, Any] = {}
    if settings.ds.use_liger_kernel:
        check_liger()
    if settings.ds.param_dtype == "bf16" and not torch.cuda.is_available() and not computes_bf16():
        log.warning(
            "ds.param_dtype=bf16: this CPU has no instructions for it (AVX-512 or AMX), and takes many times as long as for "
            "fp32: set ds.param_dtype=fp32, unless memory forbids"
        )
    if in_4bit:
        check_quantization()
        packing = loading_in_4bit()
    with _loading(path, kind):
        model, info = auto_class.from_pretrained(
            path,
            config=model_config,
            dtype=TORCH_DTYPES[settings.ds.param_dtype],
            attn_implementation=attention_of(settings.ds),
            trust_remote_code=settings.run.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
            **packing,
        )
    misfits = [
        f"{name} is {list(found)}, not {list(wanted)}" for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    if misfits:
        raise TrainingError(f"{path!r} is no {kind}: {', '.join(misfits)}")
    if in_4bit:
        export_unpacked(model)
    if settings.ds.use_liger_kernel:
        fuse_layers(model)
    return model, sorted(info["missing_keys"])


def computes_bf16() -> bool:
    """Whether this machine's CPU has instructions for bf16. One with AVX2 alone took 23 times as long as for fp32."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def refuse_missing(missing: list[str], path: str, kind: str) -> None:
    """Raise ``TrainingError`` rather than train random weights."""
    if missing:
        raise TrainingError(
            f"{path!r} lacks weights of a {kind}: {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}; "
            "name the folder of such a model"
        )


@contextmanager
def _loading(path: str, kind: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        remedy = PICKLES if "safetensors" in str(error) else ""
        raise TrainingError(f"cannot load {path!r} as a {kind}: {error}{remedy}") from error


def _switch_off_dropout(model_config: Any) -> None:
    for name, value in vars(model_config).items():
        if isinstance(value, float) and (name.endswith(("dropout", "dropout_prob", "_pdrop"))):
            setattr(model_config, name, 0.0)
        elif isinstance(value, PreTrainedConfig):  # of the language model in a vision-language model
            _switch_off_dropout(value)

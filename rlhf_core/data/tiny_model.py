"""A language model of our own making: nothing to download, starts in seconds, learns an easy task in a few iterations.

A random Llama of 2 layers on bytes, 0.37 million parameters, in the Hugging Face format: transformers, DeepSpeed and
vLLM read it like any other model.

    ids   0–255  the byte of that value       encoding uses only these: one token a byte
    ids 256–259  <|bos|> <|im_start|> <|im_end|> (end of turn and of sequence) <|pad|>
    ids 260–319  pairs of letters             only ever sampled, so that each id of the vocabulary has a text
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config.model_spec import is_run_model
from rlhf_core.data.model_reference import PinnedModel, fetch
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BUILTIN = re.compile(r"builtin:(?P<name>tiny|tiny-vlm)(\?seed=(?P<seed>\d+))?")
FORMAT = 1  # part of the cache folder's name: raise it whenever the model or tokenizer made here changes
VOCAB_SIZE = 320  # a multiple of 64, as engines like it
MAX_LENGTH = 2048
SPECIAL_TOKENS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
BOS, IM_START, EOS, PAD = range(256, 260)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def resolve_model(model: str | PinnedModel, cache_dir: Path | str | None = None) -> str:
    """What transformers and vLLM load: a folder of this machine, or the name unchanged.

    ``builtin:tiny``, ``builtin:tiny?seed=3`` and ``builtin:tiny-vlm`` are made at first use, the model of a pinned
    checkpoint is fetched.

    Args:
        model: A name, such as ``actor.model_name_or_path``; or what ``pin`` made of one.
        cache_dir: Where such models are kept; default: ``$RLHF_HOME/models``, or ``.rlhf/models`` here.

    Raises:
        ConfigError: There is no such built-in model; a ``run:`` name is not pinned, or its checkpoint is gone.
        CorruptShardError: A file of the checkpoint is damaged.
    """
    folder = Path(cache_dir) if cache_dir is not None else Path(os.environ.get("RLHF_HOME", ".rlhf")) / "models"
    if isinstance(model, PinnedModel) and model.checkpoint is not None:
        return str(fetch(model.checkpoint, folder).resolve())
    name = model.spec if isinstance(model, PinnedModel) else model
    if is_run_model(name):
        raise ConfigError(f"{name!r} means another checkpoint from one day to the next: pin() it, and hand that over")
    if not name.startswith("builtin:"):
        return name
    match = BUILTIN.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"there is no built-in model {name!r}: use 'builtin:tiny', 'builtin:tiny?seed=3', or 'builtin:tiny-vlm'"
        )
    seed = int(match["seed"] or 0)
    if match["name"] == "tiny-vlm":
        from rlhf_core.data import tiny_vision_model as vision

        return str(vision.make_tiny_vision_model(folder / f"tiny-vlm-{vision.FORMAT}-seed{seed}", seed).resolve())
    return str(make_tiny_model(folder / f"tiny-{FORMAT}-seed{seed}", seed).resolve())


def make_tiny_model(folder: Path | str, seed: int = 0) -> Path:
    """Write the model and its tokenizer to ``folder``, or leave a finished one as it is.

    The folder appears whole or not at all, also when several processes make it at once. The same seed gives the same
    weights.

    Raises:
        ConfigError: ``folder`` holds something else.
    """

    def write(draft: Path) -> None:
        _model(seed).save_pretrained(draft)
        _tokenizer().save_pretrained(draft)

    return published(folder, write)


def published(folder: Path | str, write: Callable[[Path], None]) -> Path:
    """The folder as ``write`` fills it: whole or not at all; a finished one is left as it is."""
    folder = Path(folder)
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(draft)
        draft.chmod(0o755)  # mkdtemp makes it private
        _publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _publish(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError as error:  # not empty: another process was faster, or the folder is not ours
        if not (folder / "config.json").exists():
            raise ConfigError(f"{folder} holds something that is not a model: name another folder") from error


def _model(seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(torch.float32)


def _tokenizer() -> Any:
    return make_tokenizer(SPECIAL_TOKENS, CHAT_TEMPLATE)


def make_tokenizer(special_tokens: Sequence[str], chat_template: str) -> Any:
    """Bytes, then the special tokens, then pairs of letters up to ``VOCAB_SIZE``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(special_tokens), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    tokenizer.add_special_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def _vocabulary(special_tokens: Sequence[str]) -> dict[str, int]:
    pairs = ("".join(pair) for pair in itertools.product("etaoinshr", repeat=2))
    tokens = [*_byte_characters(), *special_tokens, *pairs][:VOCAB_SIZE]
    return {token: index for index, token in enumerate(tokens)}


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level tokenizers, [256] (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]

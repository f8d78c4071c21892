"""One rank of the frozen reference model: what a policy is held against, by KL or by DPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.training.ds_config import SHARDED_PARAMETERS, frozen_config
from rlhf_core.training.loading import load_causal_lm
from rlhf_core.training.model import TokenScorer
from rlhf_core.training.moe import gather_experts_together
from rlhf_core.training.offload import HostOffload, module_tensors
from rlhf_core.training.packing import refuse_leaks, refuse_splits
from rlhf_core.training.scoring import score_rows
from rlhf_core.training.sequence_parallel import sequence_split
from rlhf_core.training.tensor_parallel import divide_layers
from rlhf_core.training.visual import ImageReader, load_policy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from rlhf_core.batching import ImageRow
    from rlhf_core.config import Config
    from rlhf_core.config.trained import DeepSpeedConfig
    from rlhf_core.training.loading import LoadSettings
    from rlhf_core.training.model import TokenScores
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.visual import ImageLoader
    from rlhf_core.vision import VisionProcessor


class ReferenceModel:
    """A model that only scores: see ``frozen_scorer``.

    ``init_distributed`` comes first.

    Args:
        config: the run's.
        model_path: Hugging Face id or folder.
        rank: who this process is.
        load_image: as of ``PolicyTrainer``.

    Raises:
        TrainingError: the model cannot be loaded.
        ConfigError: the run shows images, and the model reads none.
    """

    def __init__(self, config: Config, model_path: str, rank: RankInfo, load_image: ImageLoader | None = None) -> None:
        self.config, self.rank = config, rank.grouped(config.ds)
        self._images = ImageReader.of(config, model_path, load_image, learns=False)
        model = load_policy_model(config, model_path, reads_images=self._images is not None)
        banned_ids = () if self._images is None else self._images.placeholder_ids
        scorer = TokenScorer(model, config.ds.logprob_chunk, banned_ids=banned_ids, packs=config.ds.packing_samples)
        self._scorer = _frozen(scorer, model, config.ds, self.rank)
        self._offload = HostOffload(lambda: module_tensors(scorer), rank.torch_device)
        if config.ref.offload:
            self.offload()

    @property
    def image_processor(self) -> VisionProcessor | None:
        """What reads the images; None if the run shows none."""
        return None if self._images is None else self._images.processor

    def logprobs(self, rows: Sequence[ImageRow]) -> dict[int, NDArray[np.float32]]:
        """As ``PolicyTrainer.logprobs``."""
        if not self.config.ref.offload:
            self._offload.check_here()
            return score_rows(self._scorer, rows, self.rank, self.config, self._images)
        self._offload.reload()
        try:
            return score_rows(self._scorer, rows, self.rank, self.config, self._images)
        finally:
            self.offload()

    def offload(self) -> None:
        """Leave the device to others: the weights move to host memory."""
        self._offload.offload()

    def reload(self) -> None:
        """Move the weights back; not with ``ref.offload``, where each forward pass does so."""
        if not self.config.ref.offload:
            self._offload.reload()


def frozen_scorer(settings: LoadSettings, model_path: str, rank: RankInfo) -> Callable[..., TokenScores]:
    """A ``TokenScorer`` of text that never learns, in eval mode on this rank's device: under ZeRO-3 sharded, with
    ``ds.tensor_parallel_size`` divided, else whole.

    Raises:
        TrainingError: the model cannot be loaded.
    """
    ds, causal_lm = settings.ds, load_causal_lm(settings, model_path)
    scorer = TokenScorer(causal_lm, ds.logprob_chunk, packs=ds.packing_samples)
    return _frozen(scorer, causal_lm, ds, rank.grouped(ds))


def _frozen(
    scorer: TokenScorer, causal_lm: PreTrainedModel, ds: DeepSpeedConfig, rank: RankInfo
) -> Callable[..., TokenScores]:
    scorer.requires_grad_(False)
    divide_layers(causal_lm, rank)
    frozen = _sharded(scorer, ds, rank) if ds.zero_stage == SHARDED_PARAMETERS else scorer
    frozen.to(rank.torch_device)
    frozen.eval()
    scorer.split = sequence_split(rank)
    refuse_leaks(scorer, frozen, rank.torch_device)
    refuse_splits(scorer, frozen, rank.torch_device)
    return frozen


def _sharded(scorer: TokenScorer, ds: DeepSpeedConfig, rank: RankInfo) -> Any:
    import deepspeed

    gather_experts_together(scorer)
    engine, *_ = deepspeed.initialize(model=scorer, config=frozen_config(ds, rank.world_size))
    return engine

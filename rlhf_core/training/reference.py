"""One rank of the frozen reference model: what a policy is held against, by KL or by DPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.training.ds_config import frozen_config
from rlhf_core.training.loading import load_causal_lm
from rlhf_core.training.model import TokenScorer
from rlhf_core.training.scoring import score_rows
from rlhf_core.training.visual import ImageReader, load_policy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from rlhf_core.batching import ImageRow
    from rlhf_core.config import Config
    from rlhf_core.config.trained import DeepSpeedConfig
    from rlhf_core.training.loading import LoadSettings
    from rlhf_core.training.model import TokenScores
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.visual import ImageLoader
    from rlhf_core.vision import VisionProcessor

SHARDED = 3  # the ZeRO stage that shards parameters; a frozen model has nothing else to shard


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
        self.config, self.rank = config, rank
        self._images = ImageReader.of(config, model_path, load_image, learns=False)
        model = load_policy_model(config, model_path, reads_images=self._images is not None)
        banned_ids = () if self._images is None else self._images.placeholder_ids
        self._scorer = _frozen(TokenScorer(model, config.ds.logprob_chunk, banned_ids=banned_ids), config.ds, rank)

    @property
    def image_processor(self) -> VisionProcessor | None:
        """What reads the images; None if the run shows none."""
        return None if self._images is None else self._images.processor

    def logprobs(self, rows: Sequence[ImageRow]) -> dict[int, NDArray[np.float32]]:
        """As ``PolicyTrainer.logprobs``."""
        return score_rows(self._scorer, rows, self.rank, self.config, self._images)


def frozen_scorer(settings: LoadSettings, model_path: str, rank: RankInfo) -> Callable[..., TokenScores]:
    """A ``TokenScorer`` of text that never learns, in eval mode on this rank's device; under ZeRO-3 sharded, else whole.

    Raises:
        TrainingError: the model cannot be loaded.
    """
    return _frozen(TokenScorer(load_causal_lm(settings, model_path), settings.ds.logprob_chunk), settings.ds, rank)


def _frozen(scorer: TokenScorer, ds: DeepSpeedConfig, rank: RankInfo) -> Callable[..., TokenScores]:
    scorer.requires_grad_(False)
    frozen = _sharded(scorer, ds, rank) if ds.zero_stage == SHARDED else scorer
    frozen.to(rank.torch_device)
    frozen.eval()
    return frozen


def _sharded(scorer: TokenScorer, ds: DeepSpeedConfig, rank: RankInfo) -> Any:
    import deepspeed

    engine, *_ = deepspeed.initialize(model=scorer, config=frozen_config(ds, rank.world_size))
    return engine

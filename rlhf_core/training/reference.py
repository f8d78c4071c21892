"""One rank of the frozen reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.training.ds_config import frozen_config
from rlhf_core.training.model import TokenScorer, load_causal_lm
from rlhf_core.training.scoring import score_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from rlhf_core.batching import TokenRow
    from rlhf_core.config import Config
    from rlhf_core.training.ranks import RankInfo

SHARDED = 3  # the ZeRO stage that shards parameters; a frozen model has nothing else to shard


class ReferenceModel:
    """A model that only scores. Whole on every rank, except under ZeRO-3.

    ``init_distributed`` comes first.

    Raises:
        TrainingError: the model cannot be loaded.
    """

    def __init__(self, config: Config, model_path: str, rank: RankInfo) -> None:
        self.config, self.rank = config, rank
        scorer = TokenScorer(load_causal_lm(config, model_path), config.ds.logprob_chunk)
        scorer.requires_grad_(False)
        self._scorer = _sharded(scorer, config, rank) if config.ds.zero_stage == SHARDED else scorer
        self._scorer.to(rank.torch_device)
        self._scorer.eval()

    def logprobs(self, rows: Sequence[TokenRow]) -> dict[int, NDArray[np.float32]]:
        """As ``PolicyTrainer.logprobs``."""
        return score_rows(self._scorer, rows, self.rank, self.config)


def _sharded(scorer: TokenScorer, config: Config, rank: RankInfo) -> Any:
    import deepspeed

    engine, *_ = deepspeed.initialize(model=scorer, config=frozen_config(config, rank.world_size))
    return engine

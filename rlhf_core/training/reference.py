"""One rank of the frozen reference model: what a policy is held against, by KL or by DPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.training.ds_config import frozen_config
from rlhf_core.training.model import TokenScorer, load_causal_lm
from rlhf_core.training.scoring import score_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from rlhf_core.batching import TokenRow
    from rlhf_core.config import Config
    from rlhf_core.config.trained import DeepSpeedConfig
    from rlhf_core.training.model import LoadSettings, TokenScores
    from rlhf_core.training.ranks import RankInfo

SHARDED = 3  # the ZeRO stage that shards parameters; a frozen model has nothing else to shard


class ReferenceModel:
    """A model that only scores: see ``frozen_scorer``.

    ``init_distributed`` comes first.

    Raises:
        TrainingError: the model cannot be loaded.
    """

    def __init__(self, config: Config, model_path: str, rank: RankInfo) -> None:
        self.config, self.rank = config, rank
        self._scorer = frozen_scorer(config, model_path, rank)

    def logprobs(self, rows: Sequence[TokenRow]) -> dict[int, NDArray[np.float32]]:
        """As ``PolicyTrainer.logprobs``."""
        return score_rows(self._scorer, rows, self.rank, self.config)


def frozen_scorer(settings: LoadSettings, model_path: str, rank: RankInfo) -> Callable[..., TokenScores]:
    """A ``TokenScorer`` that never learns, in eval mode on this rank's device. Whole on every rank, except under ZeRO-3.

    Raises:
        TrainingError: the model cannot be loaded.
    """
    ds = settings.ds
    scorer = TokenScorer(load_causal_lm(settings, model_path), ds.logprob_chunk)
    scorer.requires_grad_(False)
    frozen = _sharded(scorer, ds, rank) if ds.zero_stage == SHARDED else scorer
    frozen.to(rank.torch_device)
    frozen.eval()
    return frozen


def _sharded(scorer: TokenScorer, ds: DeepSpeedConfig, rank: RankInfo) -> Any:
    import deepspeed

    engine, *_ = deepspeed.initialize(model=scorer, config=frozen_config(ds, rank.world_size))
    return engine

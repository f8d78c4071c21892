"""What vLLM must know of us in every one of its processes: the ``shm`` backend, that images may be encoded again, and that
nobody reads a rollout token by token.

Named as an entry point of the group ``vllm.general_plugins``, so an installed package is enough. ``worker_extension``
calls it too, for source checkouts.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from rlhf_core.generation.withheld import withhold

if TYPE_CHECKING:
    from collections.abc import Sequence

BACKEND = "shm"


def register() -> None:
    """Tell vLLM. It loads plugins several times, and a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # raised where the name is taken: we were here before
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rlhf_core.generation.shm_engine", "ShmWeightTransferEngine"
        )
    _send_every_image()
    withhold()


def _send_every_image() -> None:
    """A worker gets the pixels of a new request even where the prefix cache covers the image.

    vLLM leaves them out, for they will not be encoded. But a weight update empties both caches under the requests in flight;
    the worker is then asked to encode what it never got, and the engine dies of "Encoder cache miss".
    """
    from vllm.v1.core.sched import output

    def unstripped(mm_features: Sequence[Any], num_computed_tokens: int, uses_mrope: bool = False) -> Sequence[Any]:
        return mm_features

    output.strip_covered_mm_data = unstripped

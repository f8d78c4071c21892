"""Makes vLLM know our ``shm`` backend, in every process in which it may load weights.

Named as an entry point of the group ``vllm.general_plugins``, so an installed package is enough. ``worker_extension``
calls it too, for source checkouts.
"""

from __future__ import annotations

import contextlib

BACKEND = "shm"


def register() -> None:
    """Register the backend with vLLM's factory. vLLM loads plugins several times, so a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # raised where the name is taken: we were here before
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rlhf_core.generation.shm_engine", "ShmWeightTransferEngine"
        )

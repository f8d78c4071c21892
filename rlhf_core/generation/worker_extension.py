"""What we add to vLLM's workers. vLLM imports this module in each worker before the model is loaded."""

from __future__ import annotations

from typing import Any

from rlhf_core.generation.plugin import register

register()


class WeightWorkerExtension:
    """Mixed into vLLM's worker class; its methods answer ``collective_rpc``."""

    weight_transfer_engine: Any

    def prepare_weight_update(self, update_info: dict[str, Any]) -> None:
        """Open and prove the weights of the next update while generation goes on: an error here changes nothing."""
        engine = self.weight_transfer_engine
        engine.prepare(engine.parse_update_info(update_info))

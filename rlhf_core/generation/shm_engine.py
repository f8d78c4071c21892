"""Weight transfer through a packed file in shared memory, as a backend of vLLM's weight-transfer API.

::

    prepare          open the file, prove it             generation goes on; an error leaves the old weights
    start            nothing: the model is not touched before the file is proved
    receive          model.load_weights over the file    vLLM's layerwise reload re-packs each layer for oneDNN
    finish           last layers, tied output layer

Runs inside vLLM's worker processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlhf_core.errors import WeightSyncError
from rlhf_core.weights import PackedWeights, open_packed


@dataclass
class ShmInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types
    """No rendezvous is needed."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which file, and what it must hold."""

    path: str
    version: int
    checksum: str


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):  # type: ignore[misc]
    """Loads a packed file into the live model of one worker."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    supports_draft_weight_update = False

    _prepared: PackedWeights | None = None
    _reloading = False

    def prepare(self, update_info: ShmUpdateInfo) -> PackedWeights:
        """Map and prove the file; the mapping is kept, so what was proved is what will be loaded.

        Raises:
            WeightSyncError: the file is missing, stale or damaged.
        """
        self._prepared = open_packed(Path(update_info.path), update_info.version, update_info.checksum)
        return self._prepared

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing yet: see the module's drawing."""

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load the whole model.

        Raises:
            WeightSyncError: a tensor of the model is missing in the file. The model is then part old, part new.
        """
        weights = self._prepared
        if weights is None or (weights.version, weights.checksum) != (update_info.version, update_info.checksum):
            weights = self.prepare(update_info)
        self._prepared = None
        expected = {name for name, _ in self.model.named_parameters()}  # a tied output layer is not among them
        initialize_layerwise_reload(self.model)
        self._reloading = True
        try:
            loaded = self.model.load_weights(iter(weights))
            _check_complete(expected, loaded, weights)
        except BaseException:
            self._finalize()  # leaves modules that another attempt can load into
            raise

    def finish_weight_update(self) -> None:
        """Process the layers that could not be processed one by one."""
        if self._reloading:
            self._finalize()

    def shutdown(self) -> None:
        """Let go of the file."""
        self._prepared = None

    def _finalize(self) -> None:
        self._reloading = False
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            self._repack_tied_heads()

    def _repack_tied_heads(self) -> None:
        """A tied output layer shares the embedding's parameter but keeps its own oneDNN-packed copy of the old one."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _check_complete(expected: set[str], loaded: set[str] | None, weights: PackedWeights) -> None:
    missing = sorted(expected - loaded) if loaded is not None else []  # None: the model does not say what it loaded
    if missing:
        raise WeightSyncError(
            f"packed weights {weights.path} lack {len(missing)} parameters of the model, such as {missing[0]}: "
            "send the whole model under its checkpoint names"
        )

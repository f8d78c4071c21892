"""The wire between trainer and engines. Imports neither DeepSpeed nor vLLM: it belongs to neither side."""

from rlhf_core.weights.packed_file import PackedWeights, open_packed, scratch_folder, write_packed
from rlhf_core.weights.protocol import EngineGroup, TensorMeta, WeightReceiver, WeightSource, WeightUpdate, total_bytes

__all__ = [
    "EngineGroup",
    "PackedWeights",
    "TensorMeta",
    "WeightReceiver",
    "WeightSource",
    "WeightUpdate",
    "open_packed",
    "scratch_folder",
    "total_bytes",
    "write_packed",
]

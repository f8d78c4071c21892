"""vLLM behind the ``Generate`` protocol. The only package that imports vLLM, and only when an engine starts."""

from rlhf_core.generation.engine import Outcome, VllmEngine
from rlhf_core.generation.senders import Rendezvous, ShmSender, TransferSender
from rlhf_core.generation.settings import EngineSettings, engine_environment

__all__ = [
    "EngineSettings",
    "Outcome",
    "Rendezvous",
    "ShmSender",
    "TransferSender",
    "VllmEngine",
    "engine_environment",
]

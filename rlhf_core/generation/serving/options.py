"""What the server is started with. Imports no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlhf_core.vision.sources import ImageLimits

if TYPE_CHECKING:
    from rlhf_core.config import Config

NO_PRIVATE_HOST = ImageLimits(private_hosts=())


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Everything but the engine."""

    model: str  # a folder or hub id, for the list of models
    host: str = "127.0.0.1"
    advertised_host: str = ""  # under which agents reach it; "": as ``host``
    history: Literal["exact", "template"] = "exact"
    tool_parser: str | None = "hermes"
    reasoning_parser: str | None = None
    chat_template: str | None = None  # replaces the tokenizer's own
    banned_ids: tuple[int, ...] = ()  # never sampled: placeholders of images
    image_token_id: int | None = None  # one of them: where the features of an image go; None: text only
    image_limits: ImageLimits = NO_PRIVATE_HOST  # what an image of a message may cost, and where it may lie

    @classmethod
    def from_config(cls, config: Config, model_path: str, advertised_host: str) -> ServerOptions:
        """Options of every engine of a run."""
        server = config.agent.server
        return cls(
            model=model_path,
            host=server.host,
            advertised_host=advertised_host,
            history=server.history,
            tool_parser=server.tool_parser,
            reasoning_parser=server.reasoning_parser,
            chat_template=config.data.tokenizer_chat_template,
            image_limits=ImageLimits(
                config.data.image_max_bytes,
                config.data.image_max_pixels,
                config.data.image_timeout,
                private_hosts=server.image_hosts,
            ),
        )

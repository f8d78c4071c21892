"""From what an environment says to the token ids that the policy sees.

=======================  ==========================================================================================
text                     verbatim: special tokens in it are recognised, nothing is put around it
chat messages at reset   rendered by the chat template, with the header of the answer to come
chat messages in a step  the continuation that the chat template writes behind the policy's turn (``bridge.py``)
=======================  ==========================================================================================

Only the chat template writes special tokens and images between messages: where a message's own text spells one, it stays text.
So what a tool prints, or a page that it fetched, cannot end a turn and begin another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.multi_turn.bridge import make_bridge
from rlhf_core.chat_text import LiteralText, as_parts, with_texts
from rlhf_core.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from rlhf_core.agents.environment.answers import Messages, Observation
    from rlhf_core.agents.episode import Episode
    from rlhf_core.records import ImageRef


@dataclass(frozen=True, slots=True)
class Shown:
    """What the policy is shown next."""

    text: str
    token_ids: list[int]
    images: tuple[ImageRef, ...] = ()  # positions start with the first of these ids

    def without(self, tokens: int) -> Shown:
        """The same from the token with this number on; images do not lie before it."""
        if not tokens:
            return self
        moved = tuple(image._replace(start=image.start - tokens, end=image.end - tokens) for image in self.images)
        return replace(self, token_ids=self.token_ids[tokens:], images=moved)


async def first_observation(episode: Episode, observation: Observation) -> Shown:
    """What the policy sees before its first turn.

    Raises:
        AgentError: the prompt has images, and the observation is another without any.
    """
    prompt, said = episode.prompt, observation.said
    if not observation.images and said in (prompt.text, prompt.messages):
        return Shown(prompt.text, list(prompt.token_ids), prompt.images)
    if prompt.images and not observation.images:
        raise AgentError(
            "the observation of reset is not the prompt, which has images: answer the prompt as it was given, or also "
            "environment_images"
        )
    if not isinstance(said, str):
        return await rendered_anew(episode, said, observation.images)
    shown = await _verbatim(episode, said, observation.images)
    lead = _lead(episode)
    if shown.token_ids[: len(lead)] == lead:
        return shown
    return replace(shown.without(-len(lead)), token_ids=[*lead, *shown.token_ids])


async def feedback_behind(episode: Episode, last_id: int, feedback: Observation) -> Shown | None:
    """What follows a turn whose last token is ``last_id``.

    Returns:
        None where the chat template does not allow a continuation of the messages.
    """
    if isinstance(feedback.said, str):
        return await _verbatim(episode, feedback.said, feedback.images)
    bridge = make_bridge(
        episode.tokenizer,
        _literal_messages(episode, feedback.said),
        episode.end_ids,
        template=episode.chat_template,
        tools=list(episode.tools) or None,
    )
    if bridge is None:
        return None
    shown = await _of_messages(episode, bridge.text, feedback.images)
    return shown.without(bridge.already_said(last_id))


async def rendered_anew(episode: Episode, messages: Messages, images: Sequence[bytes]) -> Shown:
    """A whole conversation, with the header of the answer to come.

    The messages of the prompt, where it begins with them, are read as in the prompt.

    Raises:
        AgentError: the chat template refuses it.
    """
    prompt: Messages = episode.prompt.messages or []
    known = len(prompt) if messages[: len(prompt)] == prompt else 0
    text = _rendered(episode, [*messages[:known], *_literal_messages(episode, messages[known:])])
    return await _of_messages(episode, text, images)


def _rendered(episode: Episode, messages: Messages) -> str:
    from jinja2 import TemplateError

    try:
        text: str = episode.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            chat_template=episode.chat_template,
            tools=list(episode.tools) or None,
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise AgentError(
            f"the chat template refuses the environment's messages: {error}; repair them, answer text instead, or set "
            "data.tokenizer_chat_template"
        ) from error
    return text


async def _verbatim(episode: Episode, text: str, images: Sequence[bytes]) -> Shown:
    """A text whose special tokens are recognised; its placeholders too, where it has images."""
    _check_sight(episode, images)
    if episode.images is None:
        return Shown(text, list(episode.tokenizer.encode(text, add_special_tokens=False)))
    token_ids, places = await episode.images.tokenise(text, images)
    return Shown(text, list(token_ids), tuple(places))


async def _of_messages(episode: Episode, marked: str, images: Sequence[bytes]) -> Shown:
    """What the chat template made of ``_literal_messages``: part by part, since what is marked stays text."""
    _check_sight(episode, images)
    placeholder = None if episode.images is None else episode.images.placeholder
    wanted = 0 if placeholder is None else marked.count(placeholder)
    if wanted != len(images):
        raise AgentError(
            f"the chat template writes {wanted} image placeholders for the environment's messages, which came with "
            f'{len(images)} images: give one for each part {{"type": "image"}}, in order'
        )
    literal = _literal(episode)
    token_ids: list[int] = []
    places: list[ImageRef] = []
    shown = 0
    for part in literal.split(marked):
        own = images[shown : shown + (part.count(placeholder) if placeholder else 0)]
        shown += len(own)
        more = await _verbatim(episode, part, own)
        offset = len(token_ids)
        places += [image._replace(start=image.start + offset, end=image.end + offset) for image in more.images]
        token_ids += more.token_ids
    return Shown(literal.readable(marked), token_ids, tuple(places))


def _check_sight(episode: Episode, images: Sequence[bytes]) -> None:
    if images and episode.images is None:
        raise AgentError(
            f"the environment answered {len(images)} images, and the run takes none: set data.max_images_per_prompt"
        )


def _literal_messages(episode: Episode, messages: Messages) -> Messages:
    """Messages whose texts are marked where they spell what only the chat template may write."""
    marked: Messages = with_texts(messages, _literal(episode).mark)
    return marked if episode.images is None else [as_parts(message) for message in marked]


def _literal(episode: Episode) -> LiteralText:
    tokenizer: Any = episode.tokenizer  # its protocol does not say that it can be hashed, as every object can
    return _reserved(tokenizer, None if episode.images is None else episode.images.placeholder)


@lru_cache(maxsize=4)  # a tokenizer has hundreds of special tokens, and a rollout one tokenizer
def _reserved(tokenizer: Hashable, placeholder: str | None) -> LiteralText:
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token.content for token in added.values() if token.special}
    return LiteralText(special | {*getattr(tokenizer, "all_special_tokens", ()), placeholder or ""})


def _lead(episode: Episode) -> list[int]:
    """The BOS that the prompt got, where its text has none: another text in its place gets it too."""
    prompt = episode.prompt
    if prompt.images:
        return []
    bare = list(episode.tokenizer.encode(prompt.text, add_special_tokens=False))
    return list(prompt.token_ids[:1]) if prompt.token_ids[1:] == bare and prompt.token_ids != bare else []

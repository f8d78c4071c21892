"""Rules for agents: at most one plays the episodes of a run, and what is set for agents has one that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from rlhf_core.user_file import FROM_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlhf_core.config.model import Config

ExecutionMode = Literal["single_turn", "agent_file", "tools", "environment", "command", "url"]

SANDBOXED = "python"  # the tool that is ours
ENVIRONMENT = "env:"  # begins the name of a dataset whose rows are tasks of an environment

# mode -> what chooses it
CHOSEN_BY: dict[ExecutionMode, str] = {
    "agent_file": "train.agent_func_path",
    "tools": "agent.tools",
    "environment": f"a {ENVIRONMENT} dataset in data.prompt_dataset",
    "command": "agent.command",
    "url": "agent.url",
}
# key of the section -> the modes that look at it
READ_BY: dict[str, tuple[ExecutionMode, ...]] = {
    "args": ("agent_file",),
    "max_turns": ("agent_file", "tools", "environment"),
    "max_turn_tokens": ("agent_file", "tools", "environment", "command", "url"),
    "step_timeout": ("agent_file", "tools", "environment"),
    "episode_timeout": ("agent_file", "command", "url"),
    "max_processes": ("agent_file", "tools", "environment", "command", "url"),
    "tool_format": ("tools",),
    "tool_timeout": ("tools",),
    "tool_result_chars": ("tools",),
    "tool_max_calls": ("tools",),
    "sandbox": ("tools",),
    "server": ("agent_file", "command", "url"),
}


def modes_of(config: Config) -> list[ExecutionMode]:
    """Every mode that the configuration chooses; none: single-turn."""
    chosen: dict[ExecutionMode, Any] = {
        "agent_file": config.train.agent_func_path,
        "tools": config.agent.tools,
        "environment": any(is_environment(name) for name in config.data.prompt_dataset),
        "command": config.agent.command,
        "url": config.agent.url,
    }
    return [mode for mode, value in chosen.items() if value]


def is_environment(dataset: str) -> bool:
    """True if the dataset's rows are tasks of an environment."""
    return dataset.startswith(ENVIRONMENT)


def one_agent(config: Config) -> Iterator[str]:
    """Two agents cannot play one episode."""
    modes = modes_of(config)
    if len(modes) > 1:
        yield f"{' and '.join(CHOSEN_BY[mode] for mode in modes)} each choose who plays the episodes: keep one of them"


def environments_are_not_mixed(config: Config) -> Iterator[str]:
    """One executor plays all rows, those of the evaluation too."""
    evaluated: Sequence[str] = config.eval.dataset
    for key, datasets in (("data.prompt_dataset", config.data.prompt_dataset), ("eval.dataset", evaluated)):
        found = {is_environment(name) for name in datasets}
        if len(found) > 1:
            yield (
                f"{key}={','.join(datasets)} mixes environments ({ENVIRONMENT}...) with plain prompts, which they cannot play: "
                "keep one kind"
            )
    if any(is_environment(name) for name in evaluated) and config.execution_mode != "environment":
        yield (
            f"eval.dataset={','.join(evaluated)} names environments, and data.prompt_dataset does not: the held-out prompts "
            "are played as the others are"
        )
    plain = [name for name in evaluated if not is_environment(name)]
    if plain and config.execution_mode == "environment":
        yield (
            f"eval.dataset={','.join(evaluated)} is played in environments, as data.prompt_dataset is: give a dataset with "
            f"{ENVIRONMENT}"
        )


def agent_keys_have_an_agent(config: Config) -> Iterator[str]:
    """A setting that nobody reads is a mistake."""
    mode, agent = config.execution_mode, config.agent
    for name, modes in READ_BY.items():
        value, default = getattr(agent, name), type(agent).model_fields[name].get_default(call_default_factory=True)
        if value != default and mode not in modes:
            remedy = ", ".join(CHOSEN_BY[reader] for reader in modes)
            yield f"agent.{name} is set, but nothing reads it with execution mode {mode!r}: remove it, or use {remedy}"


def turns_fit(config: Config) -> Iterator[str]:
    """All turns together have ``rollout.max_new_tokens``."""
    turn, total = config.agent.max_turn_tokens, config.rollout.max_new_tokens
    if turn is not None and turn > total:
        yield f"agent.max_turn_tokens={turn} is above rollout.max_new_tokens={total}, which all turns share: lower it"


def tools_have_a_template(config: Config) -> Iterator[str]:
    """What a tool returns is a chat message."""
    if config.agent.tools and not config.data.apply_chat_template:
        yield "agent.tools needs data.apply_chat_template=true: what a tool returns is told as a chat message"


def tools_answer_in_time(config: Config) -> Iterator[str]:
    """The calls of one turn run one after the other, within one step."""
    agent = config.agent
    longest = agent.tool_timeout * agent.tool_max_calls
    if agent.tools and longest >= agent.step_timeout:
        yield (
            f"agent.tool_max_calls={agent.tool_max_calls} calls of agent.tool_timeout={agent.tool_timeout:g} s may take longer "
            f"than agent.step_timeout={agent.step_timeout:g} s, and then the sample fails: raise it, or lower the others"
        )


def tools_are_named(config: Config) -> Iterator[str]:
    """An entry has one of its forms, and the sandbox has the tool that runs in it."""
    tools = config.agent.tools
    for entry in tools:
        if entry != SANDBOXED and not FROM_FILE.fullmatch(entry):
            yield f"agent.tools={entry!r}: use {SANDBOXED!r}, or 'path.py:function'"
    if tools and SANDBOXED not in tools and config.agent.sandbox != type(config.agent.sandbox)():
        yield f"agent.sandbox is set, but agent.tools does not name {SANDBOXED!r}, which runs in it: remove it, or add the tool"


def agent_urls_can_be_used(config: Config) -> Iterator[str]:
    """Both ways: the run reaches the agents, and they reach its server."""
    for url in config.agent.url:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield f"agent.url={url}: use http://host:port/path or https://host/path"
        elif parts.username is not None or parts.password is not None:
            yield "agent.url has a URL with a user or password in it, and the configuration is stored and shown: remove them"
        elif not is_loopback(parts.hostname) and is_loopback(config.agent.server.host):
            yield (
                f"agent.url={url} is on another machine, which cannot reach agent.server.host={config.agent.server.host}: "
                "set agent.server.host=0.0.0.0, or an address of this machine"
            )


def is_loopback(host: str) -> bool:
    """True if only this machine can mean itself by it."""
    return host in ("localhost", "::1") or host.startswith("127.")


AGENT_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    one_agent,
    environments_are_not_mixed,
    agent_keys_have_an_agent,
    turns_fit,
    tools_have_a_template,
    tools_answer_in_time,
    tools_are_named,
    agent_urls_can_be_used,
)

"""Who plays the episodes of a run: from the configuration to an executor.

=====================  =========================================================================
``agent.tools``        the tool loop
``env:`` datasets      the environments of the rows
``train.agent_func_path``  what the file holds: an environment, an executor, or an OpenAI client's function
``agent.command``      a program with an OpenAI client
``agent.url``          agents elsewhere
none of them           one turn
=====================  =========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.environment.pool import EnvironmentPool
from rlhf_core.agents.finding import KEY, AgentKind
from rlhf_core.agents.multi_turn.executor import MultiTurnAgentExecutor
from rlhf_core.agents.single_turn import SingleTurnAgentExecutor
from rlhf_core.errors import AgentError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from rlhf_core.agents.executor import AgentExecutorBase
    from rlhf_core.config import Config

ENTRIES = "rlhf_core.agents.entries"
STEP, EPISODE = "agent.step_timeout", "agent.episode_timeout"


@dataclass
class Agent:
    """An executor, and what has to be closed with it."""

    executor: AgentExecutorBase
    name: str  # of what plays, for people
    needs_server: bool = False  # True: it speaks to the policy through an OpenAI client
    pools: tuple[EnvironmentPool, ...] = ()
    tools: tuple[Any, ...] = ()  # their schemas: the prompts are rendered with them
    closers: tuple[Callable[[], Awaitable[Any]], ...] = field(default=())

    async def close(self) -> None:
        """End its processes and connections."""
        try:
            for close in self.closers:
                await close()
        finally:
            for pool in self.pools:
                await pool.close()


async def name_of_agent(config: Config) -> str:
    """What plays the episodes, for people. It is loaded, in its own process, and let go again.

    Raises:
        ConfigError: it cannot be loaded.
    """
    agent = await load_agent(config, None)
    await agent.close()
    return agent.name


async def load_agent(config: Config, tokenizer: Mapping[str, Any] | None) -> Agent:
    """The agent of a run, ready to play: a file that cannot be imported is an error here, not in the first episode.

    Args:
        config: of the run.
        tokenizer: arguments of ``entries.load_tokenizer``, for executors that want it; None: it is only looked at.

    Raises:
        ConfigError: the agent cannot be loaded, or is none.
    """
    mode = config.execution_mode
    if mode == "tools":
        return await _with_tools(config)
    if mode == "environment":
        from rlhf_core.agents.environment.rows import environment_argument

        return await _multi_turn(config, "environments", environment_argument(config), "the environments of the rows")
    if mode == "agent_file":
        return await _of_file(config, tokenizer)
    if mode == "command":
        from rlhf_core.agents.openai.command import CommandAgent

        return _openai(config, CommandAgent(config.agent.command), f"agent.command={' '.join(config.agent.command)}")
    if mode == "url":
        from rlhf_core.agents.openai.url import UrlAgent

        return _openai(config, UrlAgent(config.agent.url), f"agent.url={','.join(config.agent.url)}")
    return Agent(SingleTurnAgentExecutor(), "one turn")


async def _of_file(config: Config, tokenizer: Mapping[str, Any] | None) -> Agent:
    place = f"{KEY}={config.train.agent_func_path!r}"
    argument = {
        "file": config.train.agent_func_path,
        "args": dict(config.agent.args),
        "tokenizer": None if tokenizer is None else dict(tokenizer),
    }
    pool = _pool(config, "agent_file", argument, place)
    try:
        await pool.start()
        async with pool.open(0) as process:
            found = await process.call("look", {})
    except BaseException:
        await pool.close()
        raise
    name = f"{place}: {found['name']}"
    if found["kind"] == AgentKind.ENVIRONMENT:
        return Agent(MultiTurnAgentExecutor(pool), name, pools=(pool,))
    if found["kind"] == AgentKind.EXECUTOR:
        from rlhf_core.agents.openrlhf.executor import OpenRlhfExecutor

        return Agent(OpenRlhfExecutor(pool), name, pools=(pool,))
    from rlhf_core.agents.openai.function import FunctionAgent

    await pool.close()  # an episode of a function is one call, which has another limit
    pool = _pool(config, "agent_file", argument, place, EPISODE, config.agent.episode_timeout)
    await pool.start()
    return _openai(config, FunctionAgent(pool), name, (pool,))


async def _with_tools(config: Config) -> Agent:
    argument = {"agent": config.agent.model_dump(mode="json")}
    agent = await _multi_turn(config, "tools", argument, f"agent.tools={','.join(config.agent.tools)}")
    try:
        async with agent.pools[0].open(0) as process:
            found = await process.call("look", {})
    except AgentError as error:
        await agent.close()
        raise ConfigError(str(error)) from error
    except BaseException:
        await agent.close()
        raise
    return replace(agent, tools=tuple(found["schemas"]))


async def _multi_turn(config: Config, entry: str, argument: Any, name: str) -> Agent:
    pool = _pool(config, entry, argument, name)
    await pool.start()
    return Agent(MultiTurnAgentExecutor(pool), name, pools=(pool,))


def _openai(config: Config, runner: Any, name: str, pools: tuple[EnvironmentPool, ...] = ()) -> Agent:
    from rlhf_core.agents.openai.executor import OpenAIAgentExecutor, OpenAIAgentLimits

    agent = config.agent
    limits = OpenAIAgentLimits(agent.episode_timeout, agent.server.max_calls, agent.max_processes)
    executor = OpenAIAgentExecutor(runner, limits, train_constrained=agent.server.train_constrained)
    return Agent(executor, name, needs_server=True, pools=pools, closers=(executor.close,))


def _pool(
    config: Config, entry: str, argument: Any, name: str, key: str = STEP, limit: float | None = None
) -> EnvironmentPool:
    return EnvironmentPool(
        f"{ENTRIES}:{entry}",
        argument,
        max_processes=config.agent.max_processes,
        step_timeout=config.agent.step_timeout if limit is None else limit,
        name=name,
        timeout_key=key,
    )

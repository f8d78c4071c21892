"""An agent as a program: what it is told, what it may answer, and that nothing of it is left, however it ends."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlhf_core.agents.openai import program as program_module
from rlhf_core.agents.openai.answer import AgentAnswer
from rlhf_core.agents.openai.command import CommandAgent, agent_environment, printed_answer
from rlhf_core.agents.openai.task import AgentTask
from rlhf_core.errors import AgentDeadlineError, AgentError, ConfigError
from rlhf_core.records import Session

pytestmark = pytest.mark.agents


def task(number=0, label=7):
    session = Session(f"s{number}", "http://10.0.0.9:8000/v1", f"key-{os.getpid()}-{number}")
    return AgentTask(session, "2 + 5 =", label, [{"role": "user", "content": "2 + 5 ="}], seed=3)


def python(source):
    return CommandAgent([sys.executable, "-S", "-c", textwrap.dedent(source)])


def shell(source):
    return CommandAgent(["sh", "-c", textwrap.dedent(source)])


def holders(key):
    """Living processes that have the key in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                if f"OPENAI_API_KEY={key}".encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
    return found


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_the_task_comes_on_stdin_and_the_session_in_the_environment(tmp_path):
    said = tmp_path / "said"
    agent = shell(f'cat > {said}; echo "$OPENAI_BASE_URL $OPENAI_API_KEY $no_proxy" >> {said}')

    assert await agent.run(task(), 20) == AgentAnswer()

    document, environment = said.read_text().split("\n", 1)[0].rsplit("}", 1)
    assert json.loads(document + "}") == {
        "session_id": "s0",
        "base_url": "http://10.0.0.9:8000/v1",
        "api_key": task().session.api_key,
        "prompt": "2 + 5 =",
        "label": 7,
        "messages": [{"role": "user", "content": "2 + 5 ="}],
        "seed": 3,
    }
    assert environment.split()[:2] == ["http://10.0.0.9:8000/v1", task().session.api_key]
    assert environment.split()[2].split(",")[-1] == "10.0.0.9"


async def test_the_last_line_is_the_reward():
    agent = shell("""echo thinking; echo '{"reward": 0}'; echo '{"reward": 0.5, "extra_logs": {"steps": 2}}'; echo""")

    assert await agent.run(task(), 20) == AgentAnswer(0.5, None, {"steps": 2.0})


@pytest.mark.parametrize(
    "stdout", [b"", b"done\n", b"7\n", b'{"reward": 1}\nbye\n', b'{"result": 1}\n', b"[1]", b"\xff\n"]
)
def test_no_reward_in_the_last_line(stdout):
    assert printed_answer(stdout) == AgentAnswer()


def test_a_reward_that_is_no_number_is_an_error():
    with pytest.raises(AgentError, match="the reward of agent.command is the str 'high'"):
        printed_answer(b'{"reward": "high"}')


async def test_a_failing_program_is_an_error_with_the_end_of_its_stderr():
    agent = shell("seq 100000 >&2; echo 'Traceback: no such tool' >&2; exit 3")

    with pytest.raises(AgentError, match=r"(?s)^agent.command exited with code 3: ….*99999.*no such tool$") as caught:
        await agent.run(task(), 20)

    assert len(str(caught.value)) < 1200


async def test_a_killed_program_is_an_error_that_names_the_signal():
    with pytest.raises(AgentError, match=r"^agent.command was killed by SIGKILL \(out of memory\?\)$"):
        await shell("kill -9 $$").run(task(), 20)


async def test_a_program_that_cannot_be_found_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="there is no program 'no-such-agent'"):
        CommandAgent(["no-such-agent"])


async def test_at_the_limit_it_ends_with_all_it_started():
    """A child in the group, one in a session of its own, and one that changed its parent."""
    agent = shell("echo starting >&2; sleep 100 & setsid sleep 100 & (setsid sleep 100 &) ; wait")
    before, started = descriptors(), time.monotonic()

    with pytest.raises(AgentDeadlineError, match=r"^'sh' did not end within agent.episode_timeout=0\.5 s: starting$"):
        await agent.run(task(1), 0.5)

    assert time.monotonic() - started < 5
    assert await gone(task(1).session.api_key)
    assert descriptors() == before


async def test_what_it_left_running_ends_with_it():
    agent = shell("""setsid sleep 100 & sleep 100 & echo '{"reward": 1}'""")

    assert (await agent.run(task(2), 20)).reward == 1.0
    assert await gone(task(2).session.api_key)


async def test_a_cancelled_episode_leaves_nothing_running():
    before = descriptors()
    running = asyncio.create_task(shell("sleep 100 & wait").run(task(3), 100))
    await asyncio.sleep(0.3)

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert await gone(task(3).session.api_key)
    assert descriptors() == before


async def test_a_flood_of_output_ends_it(monkeypatch):
    monkeypatch.setattr(program_module, "MAX_OUTPUT", 8 << 20)

    with pytest.raises(AgentError, match="'sh' wrote more than 8 MiB of output"):
        await shell("yes").run(task(4), 60)

    assert await gone(task(4).session.api_key)


async def test_much_output_is_read_while_it_runs_and_the_end_of_it_counts():
    agent = python("""
        import sys
        for _ in range(200):
            sys.stderr.write("x" * 10000)
            sys.stdout.write("y" * 10000 + "\\n")
        print('{"reward": 2}')
    """)

    assert (await agent.run(task(5), 20)).reward == 2.0


async def test_the_event_loop_goes_on_while_programs_run():
    ticks = 0

    async def count():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    counting = asyncio.create_task(count())
    await asyncio.gather(*(shell("sleep 1").run(task(10 + i), 20) for i in range(8)))
    counting.cancel()

    assert ticks > 20


async def test_agents_end_when_the_process_that_started_them_is_killed(tmp_path):
    """The kernel does it: nobody is left to."""
    key = f"key-{os.getpid()}-orphan"
    source = f"""
        import asyncio
        from rlhf_core.agents.openai.task import AgentTask
        from rlhf_core.agents.openai.command import CommandAgent
        from rlhf_core.records import Session
        task = AgentTask(Session("s", "http://10.0.0.9/v1", {key!r}), "", None, [], None)
        asyncio.run(CommandAgent(["sh", "-c", "touch {tmp_path}/up; sleep 100 & wait"]).run(task, 100))
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)])
    async with asyncio.timeout(30):
        while not (tmp_path / "up").exists():
            await asyncio.sleep(0.05)
    assert holders(key)

    parent.kill()
    parent.wait()

    assert await gone(key)


def test_no_proxy_stands_between_an_agent_and_its_server():
    environment = agent_environment({"NO_PROXY": "corp.example", "HTTP_PROXY": "http://proxy"}, task().session)

    assert environment["no_proxy"] == environment["NO_PROXY"] == "corp.example,10.0.0.9"


async def gone(key):
    """Within seconds: the kernel may take a moment over what it was told to kill."""
    for _ in range(100):
        if not holders(key):
            return True
        await asyncio.sleep(0.05)
    return False

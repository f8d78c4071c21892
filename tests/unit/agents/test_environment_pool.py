"""Environments in processes of their own: what they may do, and what may not leak."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
from environment_rig import children_of, descriptors, gone, is_gone, pool_of, until, write_game

from rlhf_core.agents.environment.pool import EnvironmentPool
from rlhf_core.errors import AgentDeadlineError, AgentError, ConfigError, DeadlineError

pytestmark = pytest.mark.agents

# What a game does is said by the payload of its step.
GAME = """
    import asyncio, os, pathlib, random, re, signal, subprocess, sys, time

    import numpy as np

    played = 0

    class Game:
        def __init__(self):
            self.closing = None

        def step(self, payload):
            return getattr(self, payload["do"])(payload)

        def close(self, payload):
            if self.closing: self.step(self.closing)

        def echo(self, payload): return payload
        def count(self, payload):
            global played
            played += 1
            return played
        def draw(self, payload): return [random.random(), np.random.rand(3), list({"b", "a", "c"})]
        def pid(self, payload): return os.getpid()
        def sleep(self, payload): time.sleep(payload.get("seconds", 1000))
        def backtrack(self, payload): re.match("(a+)+$", "a" * 50 + "b")
        def deaf(self, payload):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            while True: pass
        def fail(self, payload): raise KeyError("no such thing")
        def leave(self, payload): sys.exit(4)
        def exit(self, payload): os._exit(5)
        def abort(self, payload): os.abort()
        def kill(self, payload): os.kill(os.getpid(), signal.SIGKILL)
        def close_all(self, payload): os.closerange(3, 1000); time.sleep(1000)
        def scribble(self, payload):
            for fd in os.listdir("/proc/self/fd"):
                if os.readlink(f"/proc/self/fd/{fd}").startswith("socket"):
                    try: os.write(int(fd), b"hello, this is a print")
                    except OSError: pass
            time.sleep(1000)
        def odd(self, payload): return {1, 2}
        def flood(self, payload):
            for _ in range(300): os.write(1, b"to stdout " * 10_000)
            return "done"
        def say(self, payload): print(payload["text"]); sys.stderr.write("to stderr")
        def run_loop(self, payload): return asyncio.run(self.later(payload))
        async def later(self, payload):
            await asyncio.sleep(0.01)
            return "later"
        def background(self, payload):
            async def tick():
                while True:
                    self.ticks += 1
                    await asyncio.sleep(0.01)
            async def begin():
                self.ticks, self.task = 0, asyncio.create_task(tick())
            return begin()
        def ticked(self, payload): return self.ticks
        def start(self, payload):
            return [
                subprocess.Popen(["sleep", "1000"]).pid,
                subprocess.Popen(["sleep", "1000"], start_new_session=True).pid,
                int(subprocess.run(["sh", "-c", "setsid sleep 1000 >&- 2>&- & echo $!"], capture_output=True).stdout),
            ]
        def on_close(self, payload): self.closing = payload["then"]
"""


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    return write_game(tmp_path_factory.mktemp("games"), GAME)


@pytest.fixture(scope="module")
async def pool(game):
    """One pool for all misbehaviours: each must find it whole."""
    async with pool_of(game, step_timeout=5) as pool:
        yield pool


async def step(environment, do, **payload):
    return await environment.call("step", {"do": do} | payload)


async def play(pool, do, seed=0, **payload):
    async with pool.open(seed) as environment:
        return await step(environment, do, **payload)


@pytest.mark.parametrize(
    ("do", "named"),
    [
        ("fail", "step() raised KeyError: 'no such thing' (game.py:30)"),
        ("leave", "step() raised SystemExit: 4 (game.py:31)"),
        ("exit", "in step() its process exited with code 5"),
        ("abort", "in step() its process was killed by SIGABRT"),
        ("kill", "in step() its process was killed by SIGKILL (out of memory?)"),
        ("close_all", "in step() its process closed the channel of the messages"),
        ("scribble", "in step() its process wrote into the channel of the messages"),
        ("odd", "the answer cannot be sent to the controller: a value of type set"),
        ("absent", "has no attribute 'absent'"),
    ],
)
async def test_a_misbehaving_environment_fails_its_own_episode(pool, do, named):
    with pytest.raises(AgentError) as caught:
        await play(pool, do)

    assert named in str(caught.value)
    assert not isinstance(caught.value, DeadlineError)
    assert await play(pool, "echo", text="x") == {"do": "echo", "text": "x"}
    assert await until(lambda: pool.processes == 0)


@pytest.mark.parametrize("do", ["sleep", "backtrack", "deaf"])
async def test_a_hung_environment_is_killed_at_the_limit(game, do, caplog):
    """Also one that holds the interpreter's lock, or blocks all signals."""
    async with pool_of(game, step_timeout=0.5) as pool:
        with pytest.raises(AgentDeadlineError, match=r"step\(\) took more than agent.step_timeout=0.5 s"):
            async with pool.open(0) as environment:
                with caplog.at_level(logging.INFO, logger="rlhf"):
                    await step(environment, do)
                    await until(lambda: "game.py" in caplog.text)

        assert await until(lambda: pool.processes == 0 and is_gone(environment.pid))
        assert await play(pool, "echo") == {"do": "echo"}


async def test_the_log_says_where_an_environment_hung(game, caplog):
    async with pool_of(game, step_timeout=0.5) as pool:
        with caplog.at_level(logging.INFO, logger="rlhf"):
            with pytest.raises(DeadlineError):
                await play(pool, "sleep")
            assert await until(lambda: "in sleep" in caplog.text)

    assert '/game.py", line 25 in sleep' in caplog.text


def test_the_error_of_a_limit_travels():
    error = pickle.loads(pickle.dumps(AgentDeadlineError("took more than agent.step_timeout=1 s")))

    assert isinstance(error, AgentError)
    assert isinstance(error, TimeoutError)
    assert str(error) == "took more than agent.step_timeout=1 s"


async def test_an_error_leaves_the_environment_usable(pool):
    """A caller may go on: the process was not the error's to end."""
    async with pool.open(0) as environment:
        with pytest.raises(AgentError):
            await step(environment, "fail")

        assert await step(environment, "echo") == {"do": "echo"}


async def test_nothing_of_an_episode_is_seen_by_the_next(pool):
    """The count is a global of the user's module."""
    async with pool.open(0) as environment:
        assert [await step(environment, "count") for _ in range(3)] == [1, 2, 3]
    assert [await play(pool, "count") for _ in range(3)] == [1, 1, 1]


async def test_the_seed_decides_what_an_episode_draws(game):
    """In this pool and in the next, as after a restart of the run; the order of a set too."""
    drawn = []
    for _ in range(2):
        async with pool_of(game) as pool:
            drawn.append([await play(pool, "draw", seed) for seed in (7, 8, 7)])

    assert drawn[0] == drawn[1]
    assert drawn[0][0] == drawn[0][2] != drawn[0][1]


async def test_plain_and_async_methods(pool):
    """A plain method may run a loop of its own; what an ``async`` one left running goes on between the calls."""
    async with pool.open(0) as environment:
        assert await step(environment, "run_loop") == "later"
        assert await environment.call("later", {}) == "later"
        await step(environment, "background")
        await asyncio.sleep(0.3)
        assert await step(environment, "ticked") > 3


async def test_unicode_bytes_and_ten_megabytes(pool):
    payload = {"text": "שלום \ud800 \0", "image": b"\x89PNG" * 1000, "long": "x" * 10_000_000}

    assert await play(pool, "echo", **payload) == {"do": "echo", **payload}


async def test_what_cannot_be_sent_is_said(pool):
    with pytest.raises(AgentError, match=r"what step\(\) is given cannot be sent: a value of type object"):
        await play(pool, "echo", value=object())


async def test_a_flood_of_output_is_drained_and_cut(pool, caplog):
    """30 MB; and text that no encoding knows."""
    with caplog.at_level(logging.INFO, logger="rlhf"):
        assert await play(pool, "flood") == "done"
        await play(pool, "say", text="\ud800")
        assert await until(lambda: "to stderr" in caplog.text)

    texts = [record.getMessage() for record in caplog.records if "printed" in record.getMessage()]
    assert any("more bytes" in text for text in texts)  # the first may be an earlier episode's
    assert sum(map(len, texts)) < 100_000


async def test_a_plain_step_blocks_only_its_own_process(pool):
    """Four episodes of half a second, at once, while this event loop turns."""
    started, turns = time.monotonic(), 0
    episodes = [asyncio.create_task(play(pool, "sleep", seconds=0.5)) for _ in range(4)]
    while not all(episode.done() for episode in episodes):
        turns += 1
        await asyncio.sleep(0.01)

    assert turns > 10
    assert time.monotonic() - started < 4 * 0.5
    await asyncio.gather(*episodes)


async def test_further_episodes_wait_and_their_limit_does_not_run(game):
    """Six steps of 0.5 s, two at once, a limit of 1.2 s: the last one waits for 1 s."""
    most = 0

    async def one(pool):
        nonlocal most
        async with pool.open(0) as environment:
            most = max(most, pool.processes)
            return await step(environment, "sleep", seconds=0.5)

    async with pool_of(game, max_processes=2, step_timeout=1.2) as pool:
        assert await asyncio.gather(*(one(pool) for _ in range(6))) == [None] * 6

    assert most == 2


async def test_what_an_environment_started_ends_with_it(pool):
    """A process in its group, one in a session of its own, and a daemon; after a good end, a crash and a hang."""
    for end in ("echo", "exit", "kill"):
        async with pool.open(0) as environment:
            started = await step(environment, "start")
            assert not any(map(is_gone, started))
            with contextlib.suppress(AgentError):
                await step(environment, end)

        assert await gone(*started)


@pytest.mark.parametrize("then", ["fail", "exit", "sleep"])
async def test_a_failure_in_close_is_a_warning(game, then, caplog):
    async with pool_of(game, step_timeout=1) as pool:
        with caplog.at_level(logging.WARNING, logger="rlhf"):
            async with pool.open(0) as environment:
                await step(environment, "on_close", then={"do": then})

        assert "an episode is over, but game.py: " in caplog.text
        assert "close()" in caplog.text
        assert await until(lambda: pool.processes == 0)


@pytest.mark.parametrize("raised", [None, ValueError])
async def test_close_is_called_however_the_episode_ends(game, tmp_path, raised):
    """It leaves a file, so that the test can see it."""
    code = f"class Game:\n    def close(self, payload): open({str(tmp_path / 'closed')!r}, 'w').close()\n"

    async with pool_of(write_game(tmp_path, code)) as pool:
        with pytest.raises(raised) if raised else contextlib.nullcontext():
            async with pool.open(0):
                if raised:
                    raise raised

    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize("moment", [0.0, 0.001, 0.003, 0.01, 0.05, 0.3])
async def test_a_cancelled_episode_kills_its_process(game, moment):
    """At any moment: while it waits for a process, is made, or is called."""
    async with pool_of(game, max_processes=2) as pool:
        await pool.start()
        before = descriptors()
        episodes = [asyncio.create_task(play(pool, "sleep")) for _ in range(4)]
        await asyncio.sleep(moment)

        for episode in episodes:
            episode.cancel()
        results = await asyncio.gather(*episodes, return_exceptions=True)

        assert [type(result) for result in results] == [asyncio.CancelledError] * 4
        assert await until(lambda: pool.processes == 0 and children_of(pool._template.pid) == [])
        assert await until(lambda: descriptors() == before)
        assert await asyncio.gather(play(pool, "echo"), play(pool, "echo")) == [{"do": "echo"}] * 2


async def test_close_ends_everything(game):
    before = descriptors()
    async with pool_of(game) as pool:
        running = [asyncio.create_task(play(pool, "sleep")) for _ in range(6)]
        await until(lambda: pool.processes == 4)
        await asyncio.sleep(0.2)
        template = pool._template.pid
        below = children_of(template)

        await pool.close()

        results = await asyncio.gather(*running, return_exceptions=True)
        assert [type(result) for result in results] == [AgentError] * 6
        with pytest.raises(AgentError, match="closed"):
            await play(pool, "echo")
    assert len(below) == 4
    assert await gone(template, *below)
    assert descriptors() == before


async def test_two_pools_at_once(game, tmp_path):
    other = write_game(tmp_path, "class Game:\n    def step(self, payload): return 'the other'\n")

    async with pool_of(game) as first, pool_of(other) as second:
        both = [play(pool, "echo") for pool in (first, second) for _ in range(8)]

        assert await asyncio.gather(*both) == [{"do": "echo"}] * 8 + ["the other"] * 8


async def test_a_template_that_is_killed_is_replaced(game, caplog):
    """Its episodes fail with the reason; the next ones do not notice."""
    async with pool_of(game) as pool:
        running = asyncio.create_task(play(pool, "sleep"))
        await until(lambda: pool.processes == 1)
        await asyncio.sleep(0.2)
        below = children_of(pool._template.pid)

        os.kill(pool._template.pid, signal.SIGKILL)

        with pytest.raises(AgentError, match="ended with its template"):
            await running
        assert await play(pool, "echo") == {"do": "echo"}
        assert len(below) == 1
        assert await gone(*below)


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("import re\nclass Game\n", "SyntaxError: expected ':' (broken.py, line 2)"),
        ("import re\n\nimport no_such_thing\n", "No module named 'no_such_thing' (broken.py:3)"),
        ("raise SystemExit(3)", "SystemExit: 3 (broken.py:1)"),
    ],
)
async def test_a_file_that_cannot_be_imported(tmp_path, code, named):
    file = write_game(tmp_path, code, "broken.py")
    before = descriptors()

    async with pool_of(file) as pool:
        with pytest.raises(ConfigError) as caught:
            await pool.start()

    assert str(caught.value).startswith(f"train.agent_func_path={file!r}: the file cannot be imported: ")
    assert named in str(caught.value)
    assert descriptors() == before


@pytest.mark.parametrize(
    ("code", "named"),
    [("import os; os._exit(3)", "exited with code 3"), ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL")],
)
async def test_a_file_that_ends_the_process(tmp_path, code, named):
    async with pool_of(write_game(tmp_path, code)) as pool:
        with pytest.raises(AgentError, match=f"game.py cannot be imported, after 3 attempts: its process {named}"):
            await pool.start()


async def test_a_file_that_starts_threads_is_imported_in_each_process(tmp_path, caplog):
    """The thread holds a lock at every fork; a copy of it would stay locked for ever."""
    code = """
        import threading, time
        lock = threading.Lock()
        def hold():
            while True:
                with lock: time.sleep(0.01)
        threading.Thread(target=hold, daemon=True, name="holder").start()
        class Game:
            def step(self, payload):
                with lock: return threading.active_count()
    """

    async with pool_of(write_game(tmp_path, code)) as pool:
        with caplog.at_level(logging.WARNING, logger="rlhf"):
            assert [await play(pool, "") for _ in range(3)] == [2, 2, 2]

    (warning,) = caplog.records
    assert "starts threads while it is imported (holder)" in warning.getMessage()


async def test_an_import_that_is_cancelled_ends_at_once(tmp_path):
    async with pool_of(write_game(tmp_path, "import time; time.sleep(1000)")) as pool:
        before = descriptors()
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(0.5)
        started = time.monotonic()

        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

        assert starting.cancelled()
        assert time.monotonic() - started < 5
        assert descriptors() == before


async def test_processes_share_what_the_file_loads(tmp_path):
    """Of 100 MB that the file loads, a process has no copy of its own."""
    code = """
        import re
        DATA = bytearray(b"x") * 100_000_000
        class Game:
            def step(self, payload):
                rollup = open("/proc/self/smaps_rollup").read()
                return [len(DATA), sum(int(kb) for kb in re.findall(r"Private_\\w+: +(\\d+)", rollup)) / 1024]
    """

    async with pool_of(write_game(tmp_path, code)) as pool:
        loaded, private_mib = await play(pool, "")

    assert loaded == 100_000_000
    assert private_mib < 20


def test_more_processes_than_descriptors_are_refused():
    with pytest.raises(ConfigError, match=r"agent\.max_processes=1000000000 needs .* raise the limit"):
        EnvironmentPool("a:b", {}, max_processes=10**9, step_timeout=1)


async def test_a_killed_controller_leaves_nothing_behind(game):
    """SIGKILL for the controller, while its environments sleep, hold the interpreter's lock and have daemons.

    There is also something that it has not read yet, which makes its end an error (ECONNRESET) for the template.
    """
    script = f"""
import asyncio, sys
sys.path[:] = {sys.path!r}
from environment_rig import pool_of, children_of
from test_environment_pool import step
async def episode(pool, do):
    async with pool.open(0) as environment:
        started = await step(environment, "start")
        print(environment.pid, *started, flush=True)
        await step(environment, do)
async def main():
    async with pool_of({game!r}) as pool:
        await pool.start()
        print(pool._template.pid, flush=True)
        await asyncio.gather(*(episode(pool, do) for do in ("sleep", "backtrack", "deaf", "close_all")))
asyncio.run(main())
"""
    controller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    lines = [controller.stdout.readline() for _ in range(5)]
    pids = [int(pid) for line in lines for pid in line.split()]
    await asyncio.sleep(0.3)
    assert len(pids) == 1 + 4 * 4
    assert not any(map(is_gone, pids))

    controller.send_signal(signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    assert await gone(pids[1])  # the template has reaped it, and told
    controller.kill()
    controller.communicate()

    assert await gone(*pids)

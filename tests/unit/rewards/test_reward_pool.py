"""The pool against functions that misbehave. Every test ends with as many workers as it began with."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from reward_rig import pooled, samples, source_of, write_file

from rlhf_core.errors import RewardError
from rlhf_core.records import RewardStatus
from rlhf_core.rewards import function_source

OK, ERROR, TIMED_OUT = RewardStatus.OK, RewardStatus.ERROR, RewardStatus.TIMED_OUT

# The answer of a sample says what the function shall do with it.
MISBEHAVE = """
    import os, signal, sys, time, re

    def one(answer):
        if answer == "hang": time.sleep(1000)
        if answer == "backtrack": re.match("(a+)+$", "a" * 50 + "b")  # holds the interpreter's lock
        if answer == "raise": raise KeyError("no such thing")
        if answer == "sys.exit": sys.exit(4)
        if answer == "os._exit": os._exit(5)
        if answer == "abort": os.abort()
        if answer == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if answer == "alarm": signal.alarm(1); time.sleep(1000)
        if answer == "late alarm": signal.alarm(1)
        if answer == "handled alarm":
            def stop(*_): raise TimeoutError("own limit")
            signal.signal(signal.SIGALRM, stop); signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(1000)
        if answer == "print": print("to stdout " * 100_000); sys.stderr.write("to stderr"); os.write(1, b"raw")
        if answer == "surrogate": print("\\ud800")
        if answer == "close": os.closerange(3, 65536); time.sleep(1000)
        return {"None": None, "NaN": float("nan"), "int": 1, "text": "1"}.get(answer, 0.5)

    def reward_func(queries, prompts, labels, answers):
        if "wrong length" in answers: return [0.5] * (len(answers) + 1)
        if "bare None" in answers: return None
        return [one(answer) for answer in answers]
"""


@pytest.fixture(scope="module")
def misbehave(tmp_path_factory):
    return write_file(tmp_path_factory.mktemp("rewards"), MISBEHAVE)


@pytest.fixture(scope="module")
async def abused(misbehave):
    """One pool of two workers for all misbehaviours: each must find it whole."""
    async with pooled(misbehave, num_workers=2, timeout=0.4) as pool_and_source:
        yield pool_and_source


@pytest.mark.parametrize(
    ("answer", "status", "reward", "named"),
    [
        ("hang", TIMED_OUT, None, "no answer within reward.timeout=0.4 s"),
        ("backtrack", TIMED_OUT, None, "no answer within"),
        ("raise", ERROR, None, "raised KeyError: 'no such thing' (mine.py:7)"),
        ("None", ERROR, None, "answered None"),
        ("NaN", ERROR, None, "answered nan"),
        ("text", ERROR, None, "the str '1'"),
        ("int", OK, 1.0, None),
        ("sys.exit", ERROR, None, "raised SystemExit: 4"),
        ("os._exit", ERROR, None, "exited with code 5"),
        ("abort", ERROR, None, "was killed by SIGABRT"),
        ("kill", ERROR, None, "was killed by SIGKILL (out of memory?)"),
        ("handled alarm", ERROR, None, "raised TimeoutError: own limit"),
        ("late alarm", OK, 0.5, None),
        ("print", OK, 0.5, None),
        ("surrogate", OK, 0.5, None),
        ("close", ERROR, None, "its process closed the channel"),
    ],
)
async def test_one_misbehaving_sample_of_a_batch(abused, answer, status, reward, named):
    """Issue 3 item 7, CASES 99, 100, 103: its own typed result, the neighbours scored, the workers back."""
    pool, source = abused

    first, bad, last = await source.score(samples(["x", answer, "y"]))

    assert (bad.status, bad.reward) == (status, reward)
    assert named is None or named in bad.error
    assert [(result.status, result.reward) for result in (first, last)] == [(OK, 0.5), (OK, 0.5)]
    assert pool.worker_count == 2


async def test_an_alarm_of_the_function_kills_its_own_sample_only(misbehave):
    """Issue 3 item 7: SIGALRM ends the process before the limit does."""
    async with pooled(misbehave, num_workers=2, batch_size=1) as (pool, source):
        bad, good = await source.score(samples(["alarm", "x"]))

        assert (bad.status, bad.reward) == (ERROR, None)
        assert "was killed by SIGALRM" in bad.error
        assert (good.status, pool.worker_count) == (OK, 2)


@pytest.mark.parametrize(
    ("answer", "named"), [("wrong length", "3 rewards for 2 samples"), ("bare None", "None as rewards")]
)
async def test_an_answer_of_the_wrong_shape_fails_its_call(misbehave, answer, named):
    async with pooled(misbehave, batch_size=2) as (pool, source):
        results = await source.score(samples(["x", answer, "y", "z"]))

        assert [result.status for result in results] == [ERROR, ERROR, OK, OK]
        assert all(named in result.error for result in results[:2])
        assert pool.worker_count == 1


async def test_hung_calls_cost_no_worker(misbehave):
    """CASE 41: 4 workers; 4 items sleep for ever; 100 normal ones follow."""
    async with pooled(misbehave, num_workers=4, timeout=0.5, batch_size=8) as (pool, source):
        results = await source.score(samples(["hang"] * 4 + ["x"] * 100))

        assert [result.status for result in results] == [TIMED_OUT] * 4 + [OK] * 100
        assert pool.worker_count == 4


async def test_stages_that_score_at_once_lose_nothing_to_each_others_hung_calls(misbehave):
    """CASE 41 where iterations overlap: the rewards of one and an evaluation of another share the four workers."""
    async with pooled(misbehave, num_workers=4, timeout=0.5, batch_size=8) as (pool, source):
        hung, good = await asyncio.gather(source.score(samples(["hang"] * 4)), source.score(samples(["x"] * 100)))

        assert [result.status for result in (*hung, *good)] == [TIMED_OUT] * 4 + [OK] * 100
        assert pool.worker_count == 4


async def test_the_limit_does_not_run_in_the_queue(tmp_path):
    """Six calls of 0.2 s, one worker, a limit of 0.8 s: the last one waits for 1 s and is still scored."""
    use = write_file(tmp_path, "import time\ndef reward_func(q, p, l): time.sleep(0.2); return [1] * len(q)")

    async with pooled(use, timeout=0.8, batch_size=1) as (_, source):
        results = await asyncio.gather(*(source.score(samples(["x"])) for _ in range(6)))

        assert [result.status for (result,) in results] == [OK] * 6


async def test_when_everything_hangs_the_stage_still_ends(misbehave, monkeypatch, caplog):
    monkeypatch.setattr(function_source, "MAX_HANGS", 3)

    async with pooled(misbehave, timeout=0.2) as (pool, source):
        with caplog.at_level(logging.WARNING, logger="rlhf"):
            results = await source.score(samples(["hang"] * 50))

        assert [result.status for result in results] == [TIMED_OUT] * 50
        assert "not tried alone" in results[-1].error
        assert len(caplog.records) == 2 + 3  # two batches and three samples ran into the limit, not 50
        assert pool.worker_count == 1


@pytest.mark.parametrize(("max_retries", "status"), [(0, TIMED_OUT), (1, TIMED_OUT), (2, OK)])
async def test_retries_are_counted(tmp_path, max_retries, status):
    """A call that hangs twice and then works."""
    code = f"""
    import pathlib, time
    def reward_func(q, p, l):
        tries = pathlib.Path({str(tmp_path)!r}, "tries")
        seen = len(tries.read_text()) if tries.exists() else 0
        tries.write_text("x" * (seen + 1))
        if seen < 2: time.sleep(1000)
        return [1]
    """

    async with pooled(write_file(tmp_path, code), timeout=0.2, max_retries=max_retries) as (_, source):
        (result,) = await source.score(samples(["x"]))

    assert result.status is status
    assert (tmp_path / "tries").read_text() == "x" * (max_retries + 1)


async def test_a_group_is_one_call_and_never_split(tmp_path):
    """Groups of three in shuffled order, one of which raises: each call holds one whole group."""
    code = """
    from rlhf_core.rewards import group_wise
    @group_wise
    def reward_func(queries, prompts, labels, answers):
        if "bad" in answers: raise ValueError(f"{len(answers)} samples")
        return [len(answers) + answers.index(answer) / 10 for answer in answers]
    """
    requests = samples(["a", "b", "c", "bad", "d", "e"], group_size=3)
    shuffled = [requests[index] for index in (0, 3, 1, 4, 5, 2)]

    async with pooled(write_file(tmp_path, code), batch_size=2) as (_, source):
        results = await source.score(shuffled)

    assert [result.reward for result in results] == [3.0, None, 3.1, None, None, 3.2]
    assert all("raised ValueError: 3 samples" in results[index].error for index in (1, 3, 4))


async def test_a_label_that_is_no_json_fails_its_own_sample(misbehave):
    async with pooled(misbehave) as (_, source):
        good, bad = await source.score(samples(["x", "y"], [{"any": ["json", 1, None]}, object()]))

    assert (good.status, bad.status) == (OK, ERROR)
    assert "not JSON serializable" in bad.error


async def test_text_arrives_unaltered(tmp_path):
    """CASE 111's odd texts."""
    odd = ["", " ", "\0", "\ud800", "שלום", "e\u0301", "x" * 1_000_000]
    code = f"""
    odd = {odd[:-1]!r} + ["x" * 1_000_000]
    def reward_func(q, p, l, answers): return [a == b and c == "Q: " + a for a, b, c in zip(answers, odd, q)]
    """

    async with pooled(write_file(tmp_path, code)) as (_, source):
        results = await source.score(samples(odd))

    assert [result.reward for result in results] == [1.0] * len(odd)


async def test_what_a_function_prints_reaches_the_log_cut(misbehave, caplog):
    with caplog.at_level(logging.INFO, logger="rlhf"):
        async with pooled(misbehave) as (_, source):
            await source.score(samples(["print"]))

    (text,) = [record.getMessage() for record in caplog.records if "printed" in record.getMessage()]
    assert "to stdout to stdout" in text
    assert "more bytes" in text
    assert len(text) < 3000


async def test_grandchildren_die_with_a_killed_worker(tmp_path):
    code = f"""
    import pathlib, subprocess, time
    def reward_func(q, p, l):
        child = subprocess.Popen(["sleep", "1000"])
        pathlib.Path({str(tmp_path)!r}, "child").write_text(str(child.pid))
        time.sleep(1000)
    """

    async with pooled(write_file(tmp_path, code), timeout=0.5) as (pool, source):
        (result,) = await source.score(samples(["x"]))

        assert (result.status, pool.worker_count) == (TIMED_OUT, 1)
    assert await gone(int((tmp_path / "child").read_text()))


async def test_an_idle_worker_that_is_killed_is_replaced_and_no_sample_pays(misbehave):
    async with pooled(misbehave) as (pool, source):
        await source.score(samples(["x"]))
        (worker,) = pool._workers.values()
        os.kill(worker.pid, signal.SIGKILL)
        assert await gone(worker.pid)

        (result,) = await source.score(samples(["x"]))

        assert (result.status, pool.worker_count) == (OK, 1)


async def test_close_ends_running_calls_and_all_processes(misbehave):
    async with pooled(misbehave, num_workers=2) as (pool, source):
        running = asyncio.create_task(source.score(samples(["hang"])))
        await pool.group_wise()
        pids = [worker.pid for worker in pool._workers.values()]

        await pool.close()

        with pytest.raises(RewardError, match="closed"):
            await running
        with pytest.raises(RewardError, match="closed"):
            await source.score(samples(["x"]))
        assert pool.worker_count == 0
        assert all([await gone(pid) for pid in pids])


async def test_lost_workers_leave_no_descriptors(misbehave):
    before = len(list(Path("/proc/self/fd").iterdir()))

    async with pooled(misbehave) as (_, source):
        await source.score(samples(["os._exit", "x", "os._exit"]))

    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_workers_die_with_their_controller_even_in_a_runaway_regex(misbehave):
    """SIGKILL for the controller while its worker never lets go of the interpreter's lock."""
    script = f"""
import asyncio, sys
sys.path[:] = {sys.path!r}
from reward_rig import pooled, samples
async def main():
    async with pooled({misbehave!r}) as (pool, source):
        await source.score(samples(["x"]))
        print(*[worker.pid for worker in pool._workers.values()], flush=True)
        await source.score(samples(["backtrack"]))
asyncio.run(main())
"""
    controller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = int(controller.stdout.readline())
    await asyncio.sleep(0.3)
    assert not await gone(worker, seconds=0)

    controller.kill()
    controller.communicate()

    assert await gone(worker)


def test_one_source_serves_several_event_loops(misbehave):
    async def serve_once(source):
        return await source.score(samples(["x"]))

    async def opened():
        async with pooled(misbehave) as (_, source):
            with ThreadPoolExecutor(2) as threads:
                calls = [threads.submit(asyncio.run, serve_once(source)) for _ in range(4)]
                return [call.result()[0].status for call in calls]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(asyncio.run, opened()).result() == [OK] * 4


async def test_a_function_that_cannot_be_loaded_is_an_error_of_the_source():
    async with source_of(functions=[{"use": "absent.py"}]) as source:
        with pytest.raises(RewardError, match=r"reward\.functions\[0\]\.use='absent\.py': no such file"):
            await source.score(samples(["x"]))


async def test_workers_import_nothing_heavy(tmp_path):
    code = """
    import sys
    HEAVY = ("torch", "vllm", "ray", "deepspeed", "transformers", "pyarrow", "prefect", "mlflow", "pydantic", "httpx")
    def reward_func(q, p, l): return [sum(name in sys.modules for name in HEAVY)]
    """

    async with pooled(write_file(tmp_path, code)) as (_, source):
        (result,) = await source.score(samples(["x"]))

    assert result.reward == 0.0


async def test_no_samples_no_processes(misbehave):
    async with pooled(misbehave) as (pool, source):
        assert await source.score([]) == []
        assert pool.worker_count == 0


async def gone(pid: int, seconds: float = 5.0) -> bool:
    """True once the process has ended (a zombie has)."""
    deadline = time.monotonic() + seconds
    while True:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return True
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.05)

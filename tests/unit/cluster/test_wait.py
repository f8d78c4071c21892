"""Waiting for remote calls."""

import asyncio

import pytest
from ray.exceptions import ActorUnavailableError, AuthenticationError, RayActorError, RpcError, WorkerCrashedError

from rlhf_core.cluster.wait import all_of, on_this_cluster, one
from rlhf_core.errors import ClusterLostError, DeadlineError, TrainingError, WorkerError


async def says(value, seconds=0.0):
    await asyncio.sleep(seconds)
    if isinstance(value, BaseException):
        raise value
    return value


async def test_results_in_the_order_of_the_calls():
    assert await all_of([says("a", 0.02), says("b")], 1, "letters") == ["a", "b"]
    assert await one(says("a"), 1, "a letter") == "a"
    assert await all_of([], 1, "nothing") == []


async def test_a_limit_names_what_was_waited_for():
    with pytest.raises(DeadlineError, match=r"^rollout of iteration 3: no answer within 0\.05 s$"):
        await all_of([says("a"), says("b", 60)], 0.05, "rollout of iteration 3")


@pytest.mark.parametrize("error", [RayActorError(), ActorUnavailableError("gone", None), WorkerCrashedError()])
async def test_a_dead_process(error):
    with pytest.raises(WorkerError, match=r"^update of iteration 3: \S+") as caught:
        await all_of([says("a"), says(error)], 1, "update of iteration 3")

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [TrainingError("ranks differ"), DeadlineError("5 s inside"), TimeoutError("a socket")]
)
async def test_what_a_call_raises_keeps_its_words(error):
    with pytest.raises(type(error), match=f"^{error}$"):
        await all_of([says(error)], 1, "update")


@pytest.mark.parametrize(
    "error",
    [
        AuthenticationError("RPC error: WrongClusterID: Perhaps the client is accessing GCS after it has restarted."),
        RpcError("failed to connect to all addresses"),
    ],
)
def test_a_cluster_that_is_gone_is_named_with_the_remedy(error) -> None:
    with (
        pytest.raises(
            ClusterLostError, match=r"cluster of this run is gone \(.*\): bring it back \(`rlhf up`\)"
        ) as met,
        on_this_cluster(),
    ):
        raise error

    assert "token" not in str(met.value), "Ray's advice for another problem"

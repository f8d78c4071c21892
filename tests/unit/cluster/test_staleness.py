"""How old tokens may be, how old they are, and which are left out of the loss.

A row of the samples has two prompt tokens; iteration 5 trains version 5.
"""

import numpy as np
import pytest
from assembling import assembled
from cluster_samples import row
from minimal_config import config

from rlhf_core.cluster.experience import make_experience
from rlhf_core.cluster.staleness import check_age, newest_only, staleness_metrics
from rlhf_core.errors import RunFailedError
from rlhf_core.records import ActionRange, VersionSpan

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")

ASYNC = "train.async_enable=true"
MASKED = (ASYNC, "train.partial_rollout_enable=true", "train.partial_rollout_mask_old=true")


def spoken(*versions, sample=0, reward=1.0, **changes):
    """An answer with one token of each version."""
    spans = tuple(VersionSpan(2 + i, 3 + i, version) for i, version in enumerate(versions))
    return row(sample=sample, answer=len(versions), reward=reward, version_spans=spans, **changes)


# --- what is refused


@pytest.mark.parametrize(
    ("versions", "max_age"),
    [((5, 5), 0), ((4, 5), 1), ((3, 4, 5), 2), ((0, 5), None)],
)
def test_tokens_within_the_bound_may_be_trained(versions, max_age):
    check_age([spoken(*versions)], 5, max_age)


@pytest.mark.parametrize(
    ("versions", "max_age", "bound"),
    [
        ((5, 4), 0, "4, but only versions 5 to 5"),  # CASE 30: no lag is on-policy, token by token
        ((3, 4), 1, "3, but only versions 4 to 5"),  # CASE 32
        ((5, 6), 1, "6, but only versions 4 to 5"),
        ((6,), None, "6, but only versions 0 to 5"),
    ],
)
def test_a_token_outside_the_bound_ends_the_run(versions, max_age, bound):
    with pytest.raises(RunFailedError, match=f"policy version {bound}"):
        check_age([spoken(5), spoken(*versions, sample=1)], 5, max_age)


def test_the_error_names_the_tokens_and_how_many_rows_it_is_about():
    rows = [spoken(5), spoken(5, 3, sample=1, segment_index=2), spoken(3, sample=2)]

    with pytest.raises(RunFailedError, match=r"tokens 3 to 4 of group g0, sample 1, segment 2.* with 2 of 3 rows"):
        check_age(rows, 5, 1)


# --- what is reported


def test_staleness_in_numbers():
    """CASE 31: tokens 0 to 3 by version 3, 3 to 8 by version 5: by the span, not by the iteration that drew it."""
    mixed = row(answer=8, version_spans=(VersionSpan(2, 5, 3), VersionSpan(5, 10, 5)))
    fresh = row(sample=1, answer=2, version_spans=(VersionSpan(2, 4, 5),))

    assert staleness_metrics([mixed, fresh], 5) == pytest.approx(
        {
            "rollout/staleness_max": 2.0,
            "rollout/staleness_mean": 0.6,
            "rollout/stale_share": 0.3,
            "rollout/mixed_share": 0.5,
        }
    )


def test_versions_are_mixed_over_the_segments_of_a_sample():
    rows = [spoken(4, segment_index=0), spoken(5, segment_index=1), spoken(4, sample=1)]

    assert staleness_metrics(rows, 5)["rollout/mixed_share"] == 0.5


def test_without_tokens_nothing_is_stale():
    assert staleness_metrics([row(answer=0)], 5) == {}


# --- what is left out


def made(*rows, values=None, ref=None):
    old = {r.key: np.where(r.rollout_logprobs != 0, np.float32(-0.25), np.float32(0)) for r in rows}
    estimator = "algo.advantage.estimator=dr_grpo"
    experience, _ = make_experience(rows, old, ref and old, values and old, 0.0, config(estimator))
    return newest_only(experience, rows)


def test_only_what_the_last_version_spoke_is_trained():
    """Rewards 1 and 0: advantages of .5 and -.5, computed before anything is left out."""
    [mixed, fresh], metrics = made(spoken(4, 4, 5), spoken(5, sample=1, reward=0.0))

    assert mixed.action_ranges == (ActionRange(4, 5),)
    assert mixed.advantages.tolist() == [0, 0, 0, 0, 0.5]
    assert (fresh.action_ranges, fresh.advantages.tolist()) == ((ActionRange(2, 3),), [0, 0, -0.5])
    assert metrics == {"rollout/masked_share": 0.5}


def test_every_array_is_empty_where_nothing_is_trained():
    [one, _], _ = made(spoken(4, 5), spoken(5, sample=1, reward=0.0), values=True, ref=True)

    for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns"):
        assert (getattr(one, name) != 0).tolist() in ([False, False, False, True], [False] * 4), name
    assert one.old_logprobs.tolist() == [0, 0, 0, -0.25]
    assert one.token_ids.tolist() == [0, 1, 2, 3]  # the context is whole


def test_a_sync_within_a_turn_and_one_between_two():
    """Turns of 3 and 2 tokens with an observation between; versions 4 4 5 and 5 5."""
    turns = row(
        answer=6,
        reward=1.0,
        action_ranges=(ActionRange(2, 5), ActionRange(6, 8)),
        version_spans=(VersionSpan(2, 4, 4), VersionSpan(4, 5, 5), VersionSpan(6, 8, 5)),
    )

    [found], _ = made(turns)

    assert found.action_ranges == (ActionRange(4, 5), ActionRange(6, 8))


def test_the_newest_version_is_that_of_the_whole_episode():
    """A segment that it did not speak in is no row of the update; the sample is."""
    experience, metrics = made(spoken(4, 4, segment_index=0), spoken(4, 5, segment_index=1))

    assert [(e.segment_index, e.action_ranges) for e in experience] == [(1, (ActionRange(3, 4),))]
    assert metrics == {"rollout/masked_share": 0.75}


def test_a_sample_of_one_old_version_is_trained_whole():
    [found], metrics = made(spoken(4, 4))

    assert (found.num_actions, metrics) == (2, {"rollout/masked_share": 0.0})


# --- in the stage


@pytest.mark.parametrize(
    "overrides",
    [(), (ASYNC, "train.async_queue_size=0"), ("rollout.vllm_generate_batch_size=256", "rollout.max_age=0")],
)
async def test_case_30_without_lag_nothing_older_is_trained(monkeypatch, overrides):
    with pytest.raises(RunFailedError, match="only versions 5 to 5 may be trained"):
        await assembled(monkeypatch, [spoken(5), spoken(5, 4, sample=1)], *overrides)


async def test_lag_is_trained_up_to_its_bound_and_told(monkeypatch):
    _, metrics = await assembled(monkeypatch, [spoken(4, 4), spoken(4, 5, sample=1)], ASYNC)

    assert (metrics["rollout/staleness_max"], metrics["rollout/stale_share"]) == (1.0, 0.75)


async def test_a_group_that_waited_may_be_of_any_age_where_no_bound_is_set(monkeypatch):
    _, metrics = await assembled(monkeypatch, [spoken(0)], "rollout.vllm_generate_batch_size=256")

    assert metrics["rollout/staleness_max"] == 5.0


async def test_the_versions_in_a_replay_are_none_of_its_own(monkeypatch):
    _, metrics = await assembled(monkeypatch, [spoken(9)], ASYNC, "replay.source=other")

    assert metrics["replay/source_version_max"] == 9.0


async def test_log_probs_are_masked_where_the_policy_was_asked(monkeypatch):
    [found], _ = await assembled(monkeypatch, [spoken(4, 5)], *MASKED, "train.max_epochs=2")

    assert found.old_logprobs.tolist() == [0, 0, 0, -0.5]


async def test_old_tokens_are_masked_where_the_run_says_so(monkeypatch):
    experience, metrics = await assembled(monkeypatch, [spoken(4, 5)], *MASKED)

    assert [e.action_ranges for e in experience] == [(ActionRange(3, 4),)]
    assert metrics["rollout/masked_share"] == 0.5

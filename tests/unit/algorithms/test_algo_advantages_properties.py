"""Every estimator, with and without a KL penalty, whitened wholly or only centred, against a plain numpy loop.

Random groups, segments, masks, lengths, step rewards, values, values after the end, KL, gamma and lambda.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.algorithms.advantages import AdvantageInput, compute_advantages
from rlhf_core.algorithms.estimators import ESTIMATORS

pytestmark = pytest.mark.golden

EXAMPLES = settings(max_examples=12, deadline=None, derandomize=True)
every_estimator = pytest.mark.parametrize("name", list(ESTIMATORS))


@st.composite
def batches(draw):
    """A batch as a table of rows, and numbers to run it with."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    group_sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    coarse = draw(st.booleans())  # rewards that are often equal
    width = draw(st.integers(1, 12))
    rows = []
    for group, size in enumerate(group_sizes):
        for sample in range(size):
            reward = float(rng.integers(0, 2)) if coarse else float(rng.normal())
            for _ in range(rng.integers(1, 3)):
                mask = rng.random(width) < rng.choice([0.0, 0.5, 1.0], p=[0.1, 0.6, 0.3])
                steps = [(int(t), float(rng.normal())) for t in np.flatnonzero(mask) if rng.random() < 0.3]
                rows.append(SimpleNamespace(group=group, sample=sample, reward=reward, mask=mask, steps=steps,
                                            kl=rng.normal(size=width), values=rng.normal(size=width),
                                            after=float(rng.choice([0.0, rng.normal()]))))  # fmt: skip
    return SimpleNamespace(rows=rows, gamma=draw(st.floats(0, 1)), lambd=draw(st.floats(0, 1)))


def case_of(batch, name, kl_coef=0.1, no_std_norm=False):
    """The batch with the settings of one run; ``kl_coef`` None: no KL at all."""
    gamma = batch.gamma if ESTIMATORS[name].free_gamma else 1.0
    return SimpleNamespace(
        name=name, rows=batch.rows, gamma=gamma, lambd=batch.lambd, kl_coef=kl_coef, no_std_norm=no_std_norm
    )


def computed(case, rows):
    def stack(name):
        return torch.tensor(np.array([getattr(r, name) for r in rows]), dtype=torch.float64)

    batch = AdvantageInput(
        rewards_B=stack("reward"),
        group_keys=[r.group for r in rows],
        sample_keys=[r.sample for r in rows],
        mask_BT=stack("mask").bool(),
        step_rewards=[r.steps for r in rows],
        kl_BT=None if case.kl_coef is None else stack("kl"),
        values_BT=stack("values"),
        bootstrap_B=stack("after"),
    )
    return compute_advantages(
        batch,
        ESTIMATORS[case.name],
        gamma=case.gamma,
        lambd=case.lambd,
        kl_coef=case.kl_coef or 0.0,
        no_std_norm=case.no_std_norm,
    )


def shape(name, reward, group):
    """Shaped reward of one episode, from the list of its group's rewards."""
    n, mean = len(group), sum(group) / len(group)
    if name in ("gae", "reinforce"):
        return reward
    if max(group) == min(group):
        return 0.0
    if name == "rloo":
        return reward - (sum(group) - reward) / (n - 1)
    if name == "group_norm":
        return (reward - mean) / (np.sqrt(sum((r - mean) ** 2 for r in group) / (n - 1)) + 1e-9)
    return reward - mean


def end_to_end(segments):
    """The segments of an episode as one row: what a token prefix that never broke would have given."""
    width = len(segments[0].mask)
    return SimpleNamespace(
        mask=np.concatenate([s.mask for s in segments]),
        steps=[(t + i * width, reward) for i, s in enumerate(segments) for t, reward in s.steps],
        kl=np.concatenate([s.kl for s in segments]),
        values=np.concatenate([s.values for s in segments]),
        after=next((s.after for s in segments[::-1] if s.mask.any()), 0.0),
    )


def row_by_hand(case, row, shaped):
    """(advantages, returns) of one row before whitening."""
    width, actions = len(row.mask), np.flatnonzero(row.mask)
    advantages, returns = np.zeros(width), np.zeros(width)
    steps = dict(row.steps) if case.name in ("gae", "reinforce") else {}
    rest, following, next_value = shaped - sum(steps.values()), 0.0, row.after
    for t in actions[::-1]:
        reward = steps.get(t, 0.0) + (rest if t == actions[-1] else 0.0) - (case.kl_coef or 0.0) * row.kl[t]
        if case.name == "gae":
            delta = reward + case.gamma * next_value - row.values[t]
            following = delta + case.gamma * case.lambd * following
            next_value = row.values[t]
            advantages[t], returns[t] = following, following + row.values[t]
        else:
            following = reward + case.gamma * following
            advantages[t] = returns[t] = following
    return advantages, returns


def by_hand(case):
    rewards = {(r.group, r.sample): r.reward for r in case.rows}
    pairs = []
    for (group, sample), reward in rewards.items():  # in the order of the rows
        segments = [r for r in case.rows if (r.group, r.sample) == (group, sample)]
        others = [reward for (g, _), reward in rewards.items() if g == group]
        both = row_by_hand(case, end_to_end(segments), shape(case.name, reward, others))
        pairs += zip(*(np.split(column, len(segments)) for column in both), strict=True)
    advantages, returns = (np.array(column) for column in zip(*pairs, strict=True))
    mask = np.array([r.mask for r in case.rows])
    if case.name in ("gae", "reinforce", "reinforce_baseline") and mask.any():
        tokens = advantages[mask]
        scale = 1.0 if case.no_std_norm else np.sqrt(max(tokens.var(), 1e-8))
        advantages[mask] = (tokens - tokens.mean()) / scale
    return advantages, returns


@every_estimator
@pytest.mark.parametrize("kl_coef", [None, 0.1], ids=["no KL", "KL penalty"])
@pytest.mark.parametrize("no_std_norm", [False, True], ids=["whitened", "centred"])
@EXAMPLES
@given(batch=batches())
def test_equals_a_plain_loop(name, kl_coef, no_std_norm, batch):
    case = case_of(batch, name, kl_coef, no_std_norm)
    advantages, returns = by_hand(case)

    result = computed(case, case.rows)

    np.testing.assert_allclose(result.advantages_BT, advantages, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(result.returns_BT, returns, atol=1e-6, rtol=1e-6)


@every_estimator
@EXAMPLES
@given(batch=batches(), random=st.randoms(use_true_random=False))
def test_order_of_episodes_does_not_show(name, batch, random):
    case = case_of(batch, name)
    episodes = {}
    for i, row in enumerate(batch.rows):
        episodes.setdefault((row.group, row.sample), []).append(i)
    order = [i for rows in random.sample(list(episodes.values()), len(episodes)) for i in rows]

    straight, shuffled = computed(case, case.rows), computed(case, [case.rows[i] for i in order])

    for field in dataclasses.fields(straight):
        expected = getattr(straight, field.name)[order]
        torch.testing.assert_close(getattr(shuffled, field.name), expected, atol=1e-6, rtol=1e-6, msg=field.name)


@every_estimator
@EXAMPLES
@given(batch=batches(), left=st.integers(0, 5), right=st.integers(0, 5))
def test_padding_does_not_show(name, batch, left, right):
    def padded(row):
        def pad(values, fill):
            return np.concatenate([np.full(left, fill), values, np.full(right, fill)])

        return SimpleNamespace(
            group=row.group, sample=row.sample, reward=row.reward, steps=[(t + left, r) for t, r in row.steps],
            mask=pad(row.mask, False), kl=pad(row.kl, np.nan), values=pad(row.values, np.nan), after=row.after,
        )  # fmt: skip

    case = case_of(batch, name)
    plain, wide = computed(case, case.rows), computed(case, [padded(row) for row in case.rows])

    inside = slice(left, left + plain.advantages_BT.shape[1])
    for field in ("advantages_BT", "returns_BT"):
        padded_BT, plain_BT = getattr(wide, field), getattr(plain, field)
        torch.testing.assert_close(padded_BT[:, inside], plain_BT, atol=1e-6, rtol=1e-6)
        padded_BT[:, inside] = 0
        assert not padded_BT.any()


@every_estimator
@EXAMPLES
@given(batch=batches())
def test_case_52_splitting_an_episode_changes_no_group(name, batch):
    """Each row again as one more segment: shaped rewards, group means and stds stay."""
    case = case_of(batch, name)
    plain, split = computed(case, case.rows), computed(case, [row for row in case.rows for _ in range(2)])

    for field in ("shaped_B", "group_mean_B", "group_std_B"):
        torch.testing.assert_close(getattr(split, field)[::2], getattr(plain, field), atol=1e-9, rtol=0)

from itertools import combinations

import pytest

from rlhf_core.algorithms.passk import ScoredGroup, by_datasource, mean_pass_at_k, mean_score, pass_at_k
from rlhf_core.errors import ConfigError


@pytest.mark.golden
def test_case_118_scores_outside_zero_to_one():
    groups = [ScoredGroup("math", [-1, 2])]

    assert mean_pass_at_k(groups, 1, threshold=1) == 0.5
    assert mean_pass_at_k(groups, 2, threshold=1) == 1.0
    assert mean_score(groups) == 0.5


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_equals_counting_all_subsets(correct, k):
    samples = [True] * correct + [False] * (5 - correct)

    subsets = list(combinations(samples, k))

    assert pass_at_k(5, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_mean_is_over_prompts():
    """One prompt of 2 samples, one of 4: each counts once."""
    groups = [ScoredGroup("a", [1, 1]), ScoredGroup("b", [0, 0, 0, 1])]

    assert mean_pass_at_k(groups, 1, threshold=1) == 0.625


def test_prompts_with_too_few_samples_do_not_count():
    groups = [ScoredGroup("a", [1]), ScoredGroup("a", [0, 0])]

    assert mean_pass_at_k(groups, 2, threshold=1) == 0.0
    assert mean_pass_at_k(groups, 3, threshold=1) is None


def test_each_datasource_apart():
    groups = [ScoredGroup("b", [1, 0]), ScoredGroup("a", [1, 1]), ScoredGroup("b", [0, 0]), ScoredGroup("c", [])]

    assert by_datasource(groups, lambda g: mean_pass_at_k(g, 1, threshold=1)) == {"a": 1.0, "b": 0.25}


@pytest.mark.parametrize(("n", "correct", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0)])
def test_impossible_counts_are_an_error(n, correct, k):
    with pytest.raises(ConfigError, match=f"pass@{k} of {correct} correct in {n} samples"):
        pass_at_k(n, correct, k)

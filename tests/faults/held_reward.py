"""The reward function of the fault tests: digits, and a point at which a test can hold it."""

from rlhf_core.rewards.builtins import digits


def reward_func(queries, prompts, labels, answers):
    """See ``builtins.digits``."""
    from rlhf_holds import hold

    hold("scoring")
    return digits(queries, prompts, labels, answers=answers)

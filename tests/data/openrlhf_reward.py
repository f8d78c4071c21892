"""A reward file in the style of OpenRLHF: prints, positional lists in, a dict of arrays out."""

import numpy as np


def reward_func(queries, prompts, labels, **kwargs):
    print(queries)
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    correct = np.array([answer == label for answer, label in zip(answers, labels, strict=True)], dtype=np.float32)
    lengths = np.array([len(answer) for answer in answers])
    return {
        "rewards": correct - 0.01 * lengths,
        "scores": correct,
        "extra_logs": {"length": lengths, "accuracy": correct.mean(), "verdict": ["fine"] * len(answers)},
    }

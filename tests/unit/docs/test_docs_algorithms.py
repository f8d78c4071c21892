"""What docs/algorithms.md says is there, is there, and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from test_docs_examples import KEY, blocks, config_of, first_cells, project  # noqa: F401  project is a fixture

from rlhf_core.algorithms.check import check_algorithms
from rlhf_core.algorithms.corrections import CORRECTIONS
from rlhf_core.algorithms.estimators import ESTIMATORS, Estimator
from rlhf_core.algorithms.kl import KL_ESTIMATES
from rlhf_core.algorithms.losses import POLICY_LOSSES
from rlhf_core.config.rules import value_at

PAGE = "algorithms.md"
TEXT = (Path(__file__).parents[3] / "docs" / PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("## Estimators", list(ESTIMATORS)),
        ("## Policy losses", list(POLICY_LOSSES)),
        ("## KL", list(KL_ESTIMATES)),
        ("## When engine and trainer disagree", list(CORRECTIONS)),
        ("### Aggregation", ["token", "sample", "constant_length"]),
        ("## Optimizers and schedules", ["constant", "linear", "cosine", "cosine_with_min_lr"]),
        ("An `Estimator` says", [field.name for field in dataclasses.fields(Estimator)]),
    ],
)
def test_a_table_names_all_there_is(heading, names):
    assert first_cells(PAGE, heading) == names


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=list(ESTIMATORS))
def test_the_table_of_estimators_says_what_they_are(estimator):
    [line] = [line for line in TEXT.splitlines() if line.startswith(f"| `{estimator.name}` | ")]

    *_, per_token, whitened, gamma = [cell.strip() for cell in line.strip("|").split("|")]

    assert ("critic" in per_token, whitened, gamma) == (
        estimator.needs_critic,
        "yes" if estimator.whiten else "no",
        "free" if estimator.free_gamma else "1",
    )


@pytest.mark.parametrize("key", sorted(set(KEY.findall(TEXT))))
def test_a_key_of_the_page_exists(key):
    value_at(config_of("{}"), key)


@pytest.mark.parametrize(
    "fragment", [block.text for block in blocks("yaml") if block.page == PAGE and ".py:" in block.text]
)
def test_the_algorithms_of_a_fragment_load(fragment, project):  # noqa: F811
    check_algorithms(config_of(fragment))

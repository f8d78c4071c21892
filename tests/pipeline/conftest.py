"""Real ranks that several modules share: each pool is started once for all of them."""

import pytest
import training_cases as cases


@pytest.fixture(scope="package")
def one_rank():
    pool = cases.RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def two_ranks():
    pool = cases.RankPool(2)
    yield pool
    pool.close()

"""Every algorithm × execution mode × pipeline: through the flow on real parts, its log checked afterwards (matrix_laws.py).

``make test`` runs a sample of the 72 cells; ``make test-matrix`` all of them, and prints the table.
"""

import time

import pytest
from matrix_cells import CELLS, SAMPLE
from matrix_laws import check
from matrix_processes import WarmGroups
from matrix_table import Result

import tasks.run
from flows.train import train
from rlhf_core.storage import RunStore

pytestmark = [pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]


def named(cells):
    return [pytest.param(cell, id=cell.name, marks=() if cell in SAMPLE else pytest.mark.matrix) for cell in cells]


@pytest.fixture(scope="module")
def warm(prefect_api, ray_cluster):
    """Runs take their processes from a pool."""
    own = tasks.run.ActorGroups
    tasks.run.ActorGroups = WarmGroups
    yield
    tasks.run.ActorGroups = own
    WarmGroups.clear()


@pytest.mark.parametrize("cell", named(CELLS))
async def test_each_keeps_the_laws(cell, warm, results, tmp_path) -> None:
    begun = time.monotonic()
    try:
        await train(cell.config, [*cell.overrides, f"storage.root={tmp_path}"], cell.name)
    except BaseException:
        WarmGroups.clear()
        raise
    seconds = time.monotonic() - begun

    measured = check(RunStore(cell.name, str(tmp_path)))

    results[cell.name] = Result(seconds=seconds, measured=measured)


def test_iterations_overlapped_and_answers_went_on_over_weight_syncs(results) -> None:
    """Over all cells: one alone may be through with an update of milliseconds before Prefect has made the next flow run."""
    ran = {
        pipeline: [r for name, r in results.items() if name.endswith(f"-{pipeline}")]
        for pipeline in ("async", "partial")
    }
    if not all(ran.values()):
        pytest.skip("no cell of one of the asynchronous pipelines was asked for")
    found = {pipeline: [r.measured for r in cells if r.measured] for pipeline, cells in ran.items()}

    assert all(found.values()), "none ended well"
    assert sum(measured.overlaps for measured in (*found["async"], *found["partial"])) > 0
    assert max(measured.max_lag for measured in (*found["async"], *found["partial"])) > 0
    assert sum(measured.mixed_rows for measured in found["async"]) == 0
    assert sum(measured.mixed_rows for measured in found["partial"]) > 0

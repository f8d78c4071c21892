"""The report that goes to the tracker: made from the log, and never a reason to fail."""

import pytest
from saved_run import save_run
from task_samples import Notebook, open_run

from rlhf_core.errors import RlhfError
from tasks import run as open_runs
from tasks import run_report
from tasks.run_report import attach_report


@pytest.fixture
def links(monkeypatch):
    made = []

    async def link(url, **about):
        made.append((url, about["key"]))

    monkeypatch.setattr(run_report, "acreate_link_artifact", link)
    return made


@pytest.fixture
def opened(tmp_path, monkeypatch):
    def open_with(tracker):
        save_run(tmp_path, [[("g0", [("1", 1.0)])]])
        run = open_run(tmp_path, tracker=tracker)
        monkeypatch.setitem(open_runs._OPEN, "run", run)
        return run

    return open_with


async def test_the_page_is_given_to_the_tracker_and_linked(opened, links):
    run = opened(Notebook())

    await attach_report("run")

    assert "<h1>run</h1>" in run.tracker.reports[0]
    assert links == [("http://tracker/run/report.html", "run-report")]


async def test_what_the_run_ends_with_is_on_it(opened, links):
    run = opened(Notebook())

    await attach_report("run", "WorkerError: rank 1 is gone")

    assert "rank 1 is gone" in run.tracker.reports[0]


async def test_a_tracker_that_is_away_fails_no_run(opened, links, caplog):
    class Away(Notebook):
        def log_report(self, page):
            raise RlhfError("the tracker is away")

    opened(Away())

    await attach_report("run")

    assert links == []
    assert "the tracker is away; make it with: rlhf report" in caplog.text


async def test_a_tracker_that_hangs_is_not_waited_for(opened, links, monkeypatch, caplog):
    import threading

    over = threading.Event()

    class Hangs(Notebook):
        def log_report(self, page):
            over.wait(20)

    monkeypatch.setattr(run_report, "REPORT_SECONDS", 0.05)
    opened(Hangs())

    await attach_report("run")
    over.set()

    assert "no report with the tracker" in caplog.text

"""Lineage on the report's page: the graph with a run's parents, and the runs that used it."""

import re

from lineage_samples import write_runs

from rlhf_core.report import report_html
from rlhf_core.report.descendants import uses_of


def test_parents_are_in_the_graph_and_users_in_a_table(tmp_path):
    ppo = write_runs(tmp_path)
    sft = ppo.neighbour("sft", None)

    ppo_page, sft_page = report_html(ppo), report_html(sft)

    assert re.search(r"<text [^>]*>sft v00000002</text>", ppo_page)
    assert ">policy</text>" in ppo_page
    assert [(use.by, use.kind, use.what) for use in uses_of(sft)] == [
        ("ppo", "trained by rewards", "version 2 as policy")
    ]
    assert "Runs that used this one" in sft_page
    assert "This kind of run samples nothing." in sft_page


def test_what_a_run_was_made_from_and_is_gone_is_told(tmp_path):
    ppo = write_runs(tmp_path)
    ppo.neighbour("sft", None).objects.delete("run.json")

    assert "there is no such run any more" in report_html(ppo)


def test_runs_beside_it_that_are_damaged_do_not_matter(tmp_path):
    ppo = write_runs(tmp_path)
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / "run.json").write_text("{")

    assert [use.by for use in uses_of(ppo.neighbour("sft", None))] == ["ppo"]

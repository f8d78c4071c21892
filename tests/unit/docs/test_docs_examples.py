"""What the pages under docs/ say is tried: configurations parse, code runs, tables agree with the schema, commands exist.

How a block of a page is read::

    ```yaml                      a fragment of a configuration, a chain or a retraining: it parses, its reward functions load
    ```jsonl  after <!-- rows: METHOD section.key=value … -->   rows of SFT, a reward model or DPO: they become examples
    ```python  after <!-- file: name.py -->   a user's file: the fragments of the page may name it
    ```python  after <!-- run -->             is run, with the files of the page and a finished run beside it
    ```pycon                     a doctest
    ```where                     one condition on trajectories a line
    ```sql                       one question to the trajectories a line
    ```bash                      each line that begins with rlhf names a command and options that exist
"""

from __future__ import annotations

import asyncio
import doctest
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest
import typer
import yaml

from rlhf_cli.configurations import loaded
from rlhf_core.config import (
    SupervisedConfig,
    kind_of,
    parse_chain_config,
    parse_config,
    parse_retrain_config,
    parse_supervised_config,
    plan_chain,
    plan_turn,
)
from rlhf_core.config.document import render
from rlhf_core.config.model import Config
from rlhf_core.config.rules import value_at
from rlhf_core.data import load_tokenizer, supervised_examples
from rlhf_core.records import (
    ActionRange,
    RewardRequest,
    RewardResult,
    RewardStatus,
    SamplingParams,
    Stage,
    StageManifest,
    StopReason,
    Trajectory,
    VersionSpan,
)
from rlhf_core.rewards import check_functions, make_reward_source
from rlhf_core.rewards.builtins import BUILTINS
from rlhf_core.storage import RewardRow, RunStore, query_trajectories, trajectories
from rlhf_core.storage.query import readable
from rlhf_core.storage.shards import schema

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
KEY = re.compile(r"`([a-z]+(?:\.[a-z0-9_]+)+)`")


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    mark: str
    text: str

    @property
    def file_name(self) -> str:
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else ""


def blocks(language: str) -> list[Block]:
    """Of all pages."""
    return [
        Block(page, match["language"], match["mark"] or "", match["text"])
        for page in PAGES
        for match in BLOCK.finditer((DOCS / page).read_text(encoding="utf-8"))
        if match["language"] == language
    ]


def named(found: list[Block]) -> list:
    """Parameters of a test, one a block."""
    return [pytest.param(block, id=f"{block.page}-{index}") for index, block in enumerate(found)]


def config_of(fragment: str) -> Config:
    """A whole configuration around a fragment."""
    data = yaml.safe_load(fragment)
    base = {"actor": {"model_name_or_path": "builtin:tiny"}, "data": {"prompt_dataset": "prompts.jsonl"}}
    if not {"functions", "remote_url"} & data.get("reward", {}).keys():
        base["reward"] = {"functions": [{"use": "digits"}]}
    return parse_config({name: {**base.get(name, {}), **data.get(name, {})} for name in base.keys() | data.keys()})


def supervised_config_of(fragment: str, *overrides: str) -> SupervisedConfig:
    """The same for a supervised run."""
    data = yaml.safe_load(fragment)
    base = {"model": {"model_name_or_path": "builtin:tiny"}, "data": {"dataset": "rows.jsonl"}}
    return parse_supervised_config(
        {name: {**base.get(name, {}), **data.get(name, {})} for name in base.keys() | data.keys()}, overrides
    )


def table_rows(page: str, columns: int) -> list[list[str]]:
    """Rows of the tables of a page that have so many columns, their head left out."""
    lines = [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")] for line in lines]
    return [row for row in rows if len(row) == columns]


def first_cells(page: str, after: str) -> list[str]:
    """The names in backticks of the first column of the first table after a heading."""
    text = (DOCS / page).read_text(encoding="utf-8").partition(after)[2]
    lines = re.search(r"(^\|[^\n]*\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    return [name for line in lines for name in re.findall(r"`([^`]+)`", line.split("|")[1])]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with the files that the pages define; the current one."""
    for block in blocks("python"):
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def finished_run(project) -> RunStore:
    """The run ``my-run`` in the default storage.root: one prompt, two samples, one evaluated answer.

    sample   answer   reward
    0        "12"     1
    1        "no"     0
    """
    store = RunStore("my-run", ".rlhf/runs")
    rows = [sampled(0, "12"), sampled(1, "no")]
    rollout = store.publish_trajectories(0, rows)
    store.commit(StageManifest("my-run", 0, Stage.ROLLOUT, (rollout,), 2, rollout.tokens, 0))
    results = [RewardResult(RewardStatus.OK, float(row.answer == "12")) for row in rows]
    reward = store.publish_rewards(0, [RewardRow("0000-00000000", i, result) for i, result in enumerate(results)])
    store.commit(StageManifest("my-run", 0, Stage.REWARD, (reward,), 2, 0, 0))
    part = store.publish_eval_trajectories(0, rows[:1])
    store.write_evaluation(0, {"version": 0, "parts": [{name: getattr(part, name) for name in part.__slots__}]})
    return store


def sampled(index: int, answer: str) -> Trajectory:
    return Trajectory(
        run_id="my-run",
        iteration=0,
        prompt_id="prompts:0",
        group_id="0000-00000000",
        sample_index=index,
        datasource="prompts",
        prompt="9 + 3 = ",
        label="12",
        token_ids=np.array([1, 2, 3, 4], np.int32),
        action_ranges=(ActionRange(2, 4),),
        rollout_logprobs=np.array([0, 0, -0.5, -1], np.float32),
        version_spans=(VersionSpan(2, 4, 0),),
        stop_reason=StopReason.EOS,
        sampling=SamplingParams(max_tokens=8),
        answer=answer,
    )


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", named(blocks("yaml")))
def test_a_yaml_fragment_is_a_valid_configuration(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    data = yaml.safe_load(block.text)
    check = {
        "rewards": lambda: config_of(block.text),
        "supervised": lambda: supervised_config_of(block.text),
        "chain": lambda: plan_chain(parse_chain_config(data), "demo"),
        "retrain": lambda: plan_turn(parse_retrain_config(data)),
    }

    assert check[kind_of(data)]()


@pytest.mark.parametrize("block", named(blocks("jsonl")))
def test_rows_of_a_page_become_examples(block, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(block.text)
    method, *overrides = block.mark.removeprefix("rows: ").split()
    config = supervised_config_of("{}", "data.apply_chat_template=true", *overrides)

    examples = supervised_examples(config, method, load_tokenizer(str(tiny_model)))

    assert len(examples) == len(block.text.splitlines())


@pytest.mark.parametrize("block", named([block for block in blocks("yaml") if block.page == "rewards.md"]))
def test_the_reward_functions_of_a_fragment_load(block, project):
    check_functions(config_of(block.text).reward)


@pytest.mark.parametrize("block", named(blocks("python")))
def test_python_compiles(block):
    compile(block.text, block.page, "exec")
    assert block.mark, f"{block.page}: mark the block with <!-- run --> or <!-- file: name.py -->"


@pytest.mark.parametrize("block", named([block for block in blocks("python") if block.mark == "run"]))
def test_python_runs(block, finished_run):
    exec(compile(block.text, block.page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", named(blocks("pycon")))
def test_a_session_answers_what_the_page_says(block):
    session = doctest.DocTestParser().get_doctest(block.text, {}, block.page, block.page, 0)
    report: list[str] = []
    doctest.DocTestRunner().run(session, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("line", [line for block in blocks("where") for line in block.text.splitlines()])
def test_a_condition_of_a_page_is_one(line, finished_run):
    trajectories(finished_run, where=line)


@pytest.mark.parametrize("line", [line for block in blocks("sql") for line in block.text.splitlines()])
def test_a_question_of_a_page_is_answered(line, finished_run):
    assert len(query_trajectories(finished_run, line)) == 1


def test_every_builtin_and_no_other_is_on_the_rewards_page():
    assert first_cells("rewards.md", "## Built-in functions") == list(BUILTINS)


def test_the_scored_example_gives_what_its_text_says(project):
    """answer "12": right; "11": wrong, yet a number; "no": neither"""
    reward = config_of("reward: {functions: [{use: scored.py}], num_workers: 1}").reward

    results = asyncio.run(score(reward, ["12", "11", "no"]))

    assert [(result.reward, result.score) for result in results] == [(1.0, 1.0), (0.1, 0.0), (0.0, 0.0)]
    assert [result.metrics["num_numbers"] for result in results] == [1, 1, 0]


def test_the_openrlhf_example_runs_unchanged(project):
    reward = config_of("reward: {remote_url: openrlhf_reward.py, num_workers: 1}").reward

    results = asyncio.run(score(reward, ["12", "no"]))

    assert [result.reward for result in results] == [1.0, 0.0]
    assert results[0].metrics["accuracy"] == 1.0


async def score(reward, answers):
    source = make_reward_source(reward)
    try:
        return await source.score(
            [RewardRequest(f"Q: {a}", "Q: ", a, 12, "group", index, "docs") for index, a in enumerate(answers)]
        )
    finally:
        await source.close()


# --- commands --------------------------------------------------------------------------------------------------------


def command_lines() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.text.replace("\\\n", " ").splitlines()]
    return [line.split(" #")[0] for line in lines if line.startswith("rlhf ")]


@pytest.mark.parametrize("line", command_lines())
def test_a_command_of_the_pages_exists_with_its_options(line, monkeypatch):
    from rlhf_cli.main import app

    monkeypatch.chdir(ROOT)
    arguments = shlex.split(line)[1:]

    context = parsed(typer.main.get_command(app), arguments)

    if context.params.get("config"):
        assert list(loaded(context.params["config"], context.params["overrides"] or []))


def parsed(command: click.Command, arguments: list[str]) -> click.Context:
    """The context of the innermost command; click raises for what does not exist."""
    context = command.make_context(command.name or "rlhf", arguments)
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    return context


# --- tables ----------------------------------------------------------------------------------------------------------


def flag_rows() -> list[tuple[list[str], str]]:
    """(our keys, status) of each row of the flag tables."""
    rows = table_rows("from-openrlhf.md", 4)
    return [(KEY.findall(row[1]), row[2]) for row in rows if row[2]]


def test_the_flag_tables_are_found():
    assert len(flag_rows()) > 120
    assert {status for _, status in flag_rows()} == {"same", "differs", "replaced", "no key"}


@pytest.mark.parametrize("key", [key for keys, _ in flag_rows() for key in keys])
def test_a_key_of_the_flag_table_exists(key):
    value_at(config_of("{}"), key)


def test_a_key_has_one_status():
    keys = [key for keys, _ in flag_rows() for key in keys]
    assert sorted(keys) == sorted(set(keys))


def test_the_keys_of_the_supervised_table_exist():
    text = (DOCS / "from-openrlhf.md").read_text(encoding="utf-8").partition("### SFT, reward models and DPO")[2]
    keys = KEY.findall(" ".join(line.split("|")[2] for line in text.partition("###")[0].splitlines() if "|" in line))

    assert len(keys) > 30
    for key in keys:
        value_at(supervised_config_of("{}"), key)


def test_the_where_columns_are_those_of_the_query():
    assert first_cells("trajectories.md", "### Columns") == list(readable.COLUMNS)


@pytest.mark.parametrize(
    ("heading", "table"),
    [("**Trajectory**", schema.TRAJECTORY), ("**Reward**", schema.REWARD), ("**Experience**", schema.EXPERIENCE)],
)
def test_a_schema_table_names_every_column(heading, table):
    assert sorted(first_cells("trajectories.md", heading)) == sorted(table.names)


def test_the_stop_reasons_are_all_explained():
    assert sorted(first_cells("trajectories.md", "shown only if you name them |")) == sorted(StopReason)


def test_the_reward_statuses_are_all_explained():
    assert sorted(first_cells("rewards.md", "## When a function fails")) == sorted(RewardStatus)


def test_the_configuration_page_is_what_the_schema_says():
    """Where this fails: make docs."""
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == render()


@pytest.mark.parametrize("page", PAGES)
def test_a_link_to_a_page_leads_somewhere(page):
    for target, anchor in re.findall(r"\]\(([\w./-]+\.md)?(?:#([\w-]+))?\)", (DOCS / page).read_text(encoding="utf-8")):
        path = DOCS / (target or page)
        assert path.is_file(), target
        headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{target}#{anchor}"


def test_the_condition_of_a_page_may_not_name_a_column_that_does_not_exist(finished_run):
    with pytest.raises(Exception, match='"colour" not found'):
        trajectories(finished_run, where="colour = 'red'")

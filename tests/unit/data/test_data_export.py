"""Trajectories as datasets: what is in them, what is not, and that this project and ``datasets`` read them."""

import json
from pathlib import Path

import datasets
import pytest
from saved_run import PROMPT, save_run

from rlhf_core.cluster.exporting import ExportRequest, export
from rlhf_core.config import parse_supervised_config
from rlhf_core.data import supervised_examples
from rlhf_core.errors import ConfigError, CorruptShardError, DataError, StorageError
from rlhf_core.records import ActionRange, ImageRef, RewardResult, RewardStatus, Stage, StopReason
from rlhf_core.storage import ObjectStore, RewardRow
from rlhf_core.storage.exports.output import exports_among
from rlhf_core.storage.rescored import RescoredPart, Rescoring

RUN = [
    [("g0", [("12", 1.0), ("a", 0.0), ("größe", 0.5)]), ("g1", [("  ", 9.0), (None, None), ("b", None)])],
    [("g0", [("34", 1.0), ("x", -1.0)])],
]
MESSAGES = [{"role": "user", "content": "Q"}]


@pytest.fixture(autouse=True)
def models(tiny_folder, tmp_path, monkeypatch):
    """The built-in model of the session."""
    home = tmp_path / "home" / "models"
    home.mkdir(parents=True)
    (home / "tiny-1-seed0").symlink_to(tiny_folder)
    monkeypatch.setenv("RLHF_HOME", str(home.parent))


@pytest.fixture
def run(tmp_path):
    return save_run(tmp_path / "runs", RUN).url


def write(run, format, output, **changes):
    return export(ExportRequest(run, format, str(output), **changes))


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def supervised(path, method, tokenizer, **data):
    tree = {"model": {"model_name_or_path": "builtin:tiny"}, "data": {"dataset": str(path), **data}}
    return list(supervised_examples(parse_supervised_config(tree), method, tokenizer))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_best_answers_are_examples_of_sft(run, tmp_path, tokenizer, suffix):
    path = tmp_path / f"best{suffix}"

    written = write(run, "sft", path, best=2)

    examples = supervised(path, "sft", tokenizer)
    assert [example.text for example in examples] == [f"{PROMPT}12", f"{PROMPT}34"]
    assert examples[0].token_ids.tolist() == [256, *b"Q: 12", 258]  # as it was sampled
    assert (written["rows"], written["samples"], written["same_tokens"]) == (2, 8, 2)
    assert written["left_out"] == {
        "with a blank answer": 1,
        "of failed rollouts": 1,
        "without a reward": 1,
        "not chosen": 3,
    }


@pytest.mark.parametrize("method", ["dpo", "reward_model"])
def test_pairs_are_examples_of_dpo_and_reward_models(run, tmp_path, tokenizer, method):
    path = tmp_path / "pairs.jsonl"

    write(run, "dpo", path, pairs="all", margin=0.5)

    examples = supervised(path, method, tokenizer, margin_key="margin" if method == "reward_model" else None)
    texts = [
        (example.chosen.text.removeprefix(PROMPT), example.rejected.text.removeprefix(PROMPT)) for example in examples
    ]
    assert texts == [("12", "größe"), ("12", "a"), ("größe", "a"), ("34", "x")]
    if method == "reward_model":
        assert [example.margin for example in examples] == [0.5, 1.0, 0.5, 2.0]


def test_prompts_of_a_chat_run_are_messages(tmp_path, tokenizer):
    chat = {"data": {"prompt_dataset": "p.jsonl", "apply_chat_template": True}}
    run = save_run(tmp_path / "runs", RUN, config=chat, change=lambda *_: {"messages": MESSAGES}).url

    for path in (tmp_path / "best.jsonl", tmp_path / "best.parquet"):
        assert write(run, "sft", path)["messages"]
        [example] = supervised(path, "sft", tokenizer, apply_chat_template=True)
        assert example.text == "<|bos|><|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n34<|im_end|>\n"
    write(run, "sft", tmp_path / "plain.jsonl", plain_prompts=True)
    assert lines(tmp_path / "plain.jsonl")[0]["input"] == PROMPT


def test_messages_that_parquet_has_no_column_for(tmp_path):
    chat = {"data": {"prompt_dataset": "p.jsonl", "apply_chat_template": True}}
    odd = [{"role": "user", "content": "Q", "name": "me"}]
    run = save_run(tmp_path / "runs", RUN, config=chat, change=lambda *_: {"messages": odd}).url

    with pytest.raises(ConfigError, match=r"more than a role and a text: write \.jsonl"):
        write(run, "sft", tmp_path / "best.parquet")
    assert not (tmp_path / "best.parquet").exists()
    write(run, "sft", tmp_path / "best.jsonl")


def test_a_chat_run_without_recorded_messages(tmp_path):
    chat = {"data": {"prompt_dataset": "p.jsonl", "apply_chat_template": True}}
    run = save_run(tmp_path / "runs", RUN, config=chat).url

    with pytest.raises(DataError, match="group g0: no chat messages are recorded of its prompt: .*--plain-prompts"):
        write(run, "sft", tmp_path / "best.jsonl")


def test_every_sample_with_every_column(run, tmp_path):
    written = write(run, "hf", tmp_path / "all")

    table = datasets.load_dataset(str(tmp_path / "all"), cache_dir=str(tmp_path / "cache"))["train"]
    assert (len(table), written["rows"]) == (8, 8)
    row = table[0]
    assert (row["token_ids"], row["reward"]) == ([256, *b"Q: 12", 258], 1.0)
    assert row["rollout_logprobs"] == [0.0] * 4 + [-0.5] * 3
    assert row["action_ranges"] == [{"start": 4, "end": 7}]
    assert [row["reward_status"] for row in table][3:6] == ["ok", "skipped", "error"]
    assert table[5]["reward_error"] == "it raised"


def test_where_and_iterations_choose(run, tmp_path):
    where = "reward >= 0 and answer not like 'gr%'"

    write(run, "dpo", tmp_path / "pairs.jsonl", where=where, iterations="0..0")
    write(run, "hf", tmp_path / "all", where=where, iterations="1")

    [row] = lines(tmp_path / "pairs.jsonl")
    assert (row["chosen"], row["rejected"], row["margin"]) == ("12", "a", 1.0)
    assert write(run, "hf", tmp_path / "one", where=where, iterations="1")["rows"] == 1


def test_rescored_rewards_choose(run, tmp_path):
    store = save_run(tmp_path / "again", RUN)
    rescoring = Rescoring(store, "other")
    rescoring.begin({"functions": []})
    found = store.stage(1, Stage.ROLLOUT)
    rows = [RewardRow("g0", i, RewardResult(RewardStatus.OK, reward, reward)) for i, reward in enumerate([3.0, 4.0])]
    part = found[0].parts[0]
    rescoring.commit(1, found[1], [RescoredPart(part.sha256, rescoring.publish(1, part, rows))], {})

    written = write(store.url, "sft", tmp_path / "best.jsonl", rescored="other")

    [row] = lines(tmp_path / "best.jsonl")
    assert (row["output"], row["reward"], row["iteration"]) == ("x", 4.0, 1)
    assert [manifest["path"] for manifest in written["manifests"]][-1] == "rescored/other/00000001.json"
    with pytest.raises(ConfigError, match="has no complete iteration 0 with trajectories; it has 1..1"):
        write(store.url, "sft", tmp_path / "none.jsonl", rescored="other", iterations="0")


def test_what_is_no_prompt_with_one_answer_is_left_out(tmp_path):
    odd = {
        0: {"action_ranges": (ActionRange(4, 5), ActionRange(6, 7))},
        1: {"images": (ImageRef("ab", "x.png", 0, 1),)},
        3: {"prompt": "The agent asked otherwise: "},
    }
    samples = [("12", 3.0), ("34", 2.0), ("56", 1.0), ("78", 4.0)]
    run = save_run(tmp_path / "runs", [[("g0", samples)]], change=lambda i, g, s: odd.get(s, {})).url

    written = write(run, "sft", tmp_path / "all.jsonl", best=4)

    assert [row["output"] for row in lines(tmp_path / "all.jsonl")] == ["56"]
    assert written["left_out"] == {"of several turns": 1, "with images": 1, "whose prompt the agent wrote itself": 1}


def test_an_episode_of_several_segments_does_not_win_the_place_of_an_answer_that_can_be_written(tmp_path):
    samples = [("12", 3.0), ("34", 2.0)]
    segment = {0: {"segment_index": 1}}
    run = save_run(tmp_path / "runs", [[("g0", samples)]], change=lambda i, g, s: segment.get(s, {})).url

    written = write(run, "sft", tmp_path / "best.jsonl")

    assert [line["output"] for line in lines(tmp_path / "best.jsonl")] == ["34"]
    assert written["left_out"] == {"of several turns": 1}


def test_an_answer_whose_pair_lost_the_other_one_is_counted(tmp_path):
    odd = {0: {"images": (ImageRef("ab", "x.png", 0, 1),)}}
    groups = [("g0", [("12", 3.0), ("34", 2.0)]), ("g1", [("56", 1.0), ("78", 0.0)])]
    run = save_run(tmp_path / "runs", [groups], change=lambda i, g, s: odd.get(s, {}) if g == "g0" else {}).url

    written = write(run, "dpo", tmp_path / "pairs.jsonl")

    assert [row["chosen"] for row in lines(tmp_path / "pairs.jsonl")] == ["56"]
    assert written["left_out"] == {"with images": 1, "whose pair lost the other answer": 1}


def test_cut_off_answers_are_counted(tmp_path):
    run = save_run(tmp_path / "runs", [RUN[1]], change=lambda *_: {"stop_reason": StopReason.LENGTH}).url

    assert write(run, "dpo", tmp_path / "pairs.jsonl")["truncated"] == 2


def test_special_tokens_end_an_answer_and_stay_within_it(tmp_path):
    ids = [256, *PROMPT.encode(), 65, 257, 66, 258, 258]
    change = {"token_ids": ids, "action_ranges": (ActionRange(4, 9),), "rollout_logprobs": [0.0] * 9}
    run = save_run(tmp_path / "runs", [[("g0", [("AB", 1.0)])]], change=lambda *_: change).url

    written = write(run, "sft", tmp_path / "best.jsonl")

    assert lines(tmp_path / "best.jsonl")[0]["output"] == "A<|im_start|>B"
    assert written["same_tokens"] == 1


def test_text_that_becomes_other_tokens_is_counted(tmp_path):
    """builtin:tiny's token 262 is a pair of letters, which its tokenizer never makes."""
    change = {"token_ids": [256, *PROMPT.encode(), 262, 258, 258]}
    run = save_run(tmp_path / "runs", [[("g0", [("12", 1.0)])]], change=lambda *_: change).url

    written = write(run, "sft", tmp_path / "best.jsonl")

    assert (written["answers"], written["same_tokens"]) == (1, 0)


# --- where it goes


def test_an_output_is_replaced_only_when_asked_and_only_if_ours(run, tmp_path):
    path = tmp_path / "best.jsonl"
    write(run, "sft", path)

    with pytest.raises(ConfigError, match=r"best\.jsonl is there already: .*--overwrite"):
        write(run, "dpo", path)
    write(run, "dpo", path, overwrite=True)
    assert "chosen" in lines(path)[0]
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="was not written by rlhf export"):
        write(run, "hf", tmp_path / "mine", overwrite=True)


def test_a_folder_is_replaced_whole(run, tmp_path):
    folder = tmp_path / "all"
    write(run, "hf", folder)
    (folder / "data" / "stale").touch()

    write(run, "hf", folder, overwrite=True, iterations="0")

    assert [path.name for path in folder.rglob("*.*")] == ["train-00000-of-00001.parquet"]
    assert {path.name for path in tmp_path.iterdir()} == {"all", "all.provenance.json", "runs", "home"}


@pytest.mark.parametrize(
    ("format", "output", "changes", "message"),
    [
        ("sft", "x.txt", {}, r"end its name with \.jsonl or \.parquet"),
        ("hf", "x.jsonl", {}, "makes a folder"),
        ("dpo", "x.jsonl", {"best": 2}, "--best is of --format sft"),
        ("sft", "x.jsonl", {"margin": 0.5}, "--margin is of --format dpo"),
        ("sft", "x.jsonl", {"best": 0}, "--best 0"),
        ("dpo", "x.jsonl", {"margin": -1.0}, "--margin -1.0"),
        ("sft", "x.jsonl", {"iterations": "5..3"}, "write 3..5"),
        ("sft", "x.jsonl", {"iterations": "7"}, "it has 0..1"),
        ("sft", "x.jsonl", {"where": "rewar > 1"}, "reward"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_written(run, tmp_path, format, output, changes, message):
    with pytest.raises(ConfigError, match=message):
        write(run, format, tmp_path / output, **changes)

    assert {path.name for path in tmp_path.iterdir()} == {"runs", "home"}


@pytest.mark.parametrize(
    ("format", "output", "changes", "message"),
    [
        (
            "sft",
            "x.jsonl",
            {"min_reward": 5.0},
            "nothing to export as sft from 2 iterations: 8 samples .*below --min-reward",
        ),
        ("dpo", "x.jsonl", {"margin": 9.0}, "nothing to export as dpo"),
        ("hf", "x", {"where": "reward > 99"}, "nothing to export as hf from 2 iterations where reward > 99: 0 samples"),
    ],
)
def test_an_empty_result_is_an_error_that_says_why(run, tmp_path, format, output, changes, message):
    with pytest.raises(DataError, match=message):
        write(run, format, tmp_path / output, **changes)

    assert {path.name for path in tmp_path.iterdir()} == {"runs", "home"}


def test_runs_without_trajectories(tmp_path):
    run = save_run(tmp_path / "runs", [], kind="sft").url

    with pytest.raises(ConfigError, match="a run of kind 'sft', which has no trajectories"):
        write(run, "sft", tmp_path / "x.jsonl")
    with pytest.raises(ConfigError, match=r"no run at .*/gone"):
        write(f"{tmp_path}/runs/gone", "sft", tmp_path / "x.jsonl")


def test_an_object_store_gets_the_same_files(run, tmp_path):
    root = f"memory://{tmp_path.name}"

    write(run, "sft", f"{root}/best.jsonl")
    write(run, "hf", f"{root}/all")

    objects = ObjectStore(root)
    assert objects.list() == [
        "all.provenance.json",
        "all/data/train-00000-of-00001.parquet",
        "best.jsonl",
        "best.jsonl.provenance.json",
    ]
    assert json.loads(objects.read("best.jsonl").splitlines()[0])["output"] == "34"
    with pytest.raises(ConfigError, match="is there already"):
        write(run, "hf", f"{root}/all")
    assert write(run, "hf", f"{root}/all", overwrite=True, iterations="1")["rows"] == 2


def test_a_damaged_shard_is_named_and_nothing_written(run, tmp_path):
    shard = next((tmp_path / "runs" / "run" / "iterations" / "00000001" / "rollout").iterdir())
    shard.write_bytes(shard.read_bytes()[:-9] + b"damagedxx")

    with pytest.raises(CorruptShardError, match=shard.name):
        write(run, "sft", tmp_path / "x.jsonl")
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_publishes_nothing(run, tmp_path, monkeypatch):
    folder = tmp_path / "full"
    monkeypatch.setattr(
        "rlhf_core.cluster.exporting.write_examples", lambda *_: Path("/dev/full").write_text("x" * 99999)
    )

    with pytest.raises(StorageError, match="cannot be written: .*No space left.*nothing of it was published"):
        write(run, "sft", folder / "x.jsonl")
    assert list(folder.iterdir()) == []


# --- what it was made from


def test_what_a_run_on_it_records(run, tmp_path):
    path = tmp_path / "best.jsonl"
    write(run, "sft", path, iterations="1")

    recorded = exports_among([str(path), "openai/gsm8k", "file.py:rows?count=3"])
    path.write_text(path.read_text() + "\n")
    later = exports_among([str(path)])

    assert list(recorded) == [str(path)]
    assert (recorded[str(path)]["source_url"], recorded[str(path)]["iterations"]) == (run, [1, 1])
    assert (recorded[str(path)]["altered"], later[str(path)]["altered"]) == (False, True)

"""The whole way from a model back to its base model.

ppo v2 ◀ iterations 0, 1 ◀ sft v2 ◀ iterations 0, 1 (not 2) ◀ builtin:tiny
"""

import json
import re
from xml.etree import ElementTree

import pytest
from lineage_samples import NEW, OLD, write_runs

from rlhf_core.errors import ConfigError
from rlhf_core.lineage.account import account, broken_links
from rlhf_core.lineage.account_text import account_lines
from rlhf_core.lineage.graph import dot, graph_of
from rlhf_core.lineage.graph_picture import draw_graph
from rlhf_core.lineage.run_record import run_record
from rlhf_core.lineage.target import Target, find_target
from rlhf_core.storage import CheckpointStore


@pytest.fixture
def ppo(tmp_path):
    return write_runs(tmp_path)


@pytest.fixture
def sft(ppo):
    return ppo.neighbour("sft", None)


def test_every_iteration_with_its_manifests_shards_and_weights(ppo):
    record = account(Target(ppo, None)).record

    assert [iteration.iteration for iteration in record.iterations] == [0, 1]
    rollout, reward, experience, update = record.iterations[1].stages
    assert [part.sha256 for part in rollout.parts] == [
        ppo.objects.hashed(rollout.manifest.replace(".json", "/part.arrow"))[1]
    ]
    assert reward.inputs == {"rollout": rollout.sha256}
    assert experience.inputs == {"rollout": rollout.sha256, "reward": reward.sha256}
    assert update.sha256 == ppo.objects.hashed(update.manifest)[1]
    assert record.iterations[1].weights == {"digest": "ppo-weights-2"}
    assert record.iterations[1].prompts["cursor_out"] == {"epoch": 0, "offset": 2}


def test_what_the_run_ran_on(ppo):
    record = account(Target(ppo, None)).record

    assert (record.version, record.seed, record.code["dirty"], record.packages) == (2, 42, True, {"torch": "2.13.0"})
    assert record.config["changed"] == {
        "actor.model_name_or_path": "run:sft@2",
        "data.prompt_dataset": ["prompts.jsonl"],
        "reward.functions": [{"args": {}, "name": None, "use": "rewards.py:score", "weight": 1.0}],
    }
    assert record.checkpoint.weights == {"digest": "ppo-weights-2"}
    assert [file.path for file in record.checkpoint.files] == ["hf/model.safetensors"]


def test_code_that_was_mended_shows_from_where_it_was_used(ppo):
    record = account(Target(ppo, None)).record

    assert record.user_code == OLD
    assert record.code_changes == ({"iteration": 1, "stage": "rollout", "user_code": NEW},)


def test_of_a_run_behind_it_only_what_made_the_version_that_was_used(ppo, sft):
    records = account(Target(ppo, None)).records

    assert list(records) == [ppo.url, sft.url]
    assert records[sft.url].version == 2
    assert [iteration.iteration for iteration in records[sft.url].iterations] == [0, 1]
    assert records[sft.url].checkpoint.url == CheckpointStore(sft).url(2)
    assert records[sft.url].config["changed"]["train.seed"] == 7


def test_of_a_version_only_what_made_it(ppo):
    found = account(Target(ppo, 1))

    assert (found.record.version, len(found.record.iterations)) == (1, 1)
    assert found.record.checkpoint.url == CheckpointStore(ppo).url(1)
    assert found.record.code_changes == ()


def test_all_of_it_is_json(ppo, sft):
    told = json.loads(json.dumps(account(Target(ppo, None)).to_json()))

    assert told["models"][0]["run"]["run_id"] == "sft"
    assert told["runs"][sft.url]["iterations"][0]["stages"][0]["name"] == "update"
    assert told["runs"][ppo.url]["config"]["values"]["actor"]["model_name_or_path"] == "run:sft@2"


def test_a_damaged_document_is_told_of_and_the_rest_is_shown(ppo):
    path = "iterations/00000000/reward.json"
    ppo.objects.put(path, ppo.objects.read(path).replace(b'"rows":0', b'"rows":9'))

    record = account(Target(ppo, None)).record

    assert len(record.problems) == 1
    assert path in record.problems[0]
    assert [stage.name for stage in record.iterations[0].stages] == ["rollout", "experience", "update"]


def test_a_damaged_checkpoint_too(ppo):
    """One file is gone: what was recorded is shown; its document is altered: that is told of."""
    ppo.objects.delete("checkpoints/v00000002/hf/model.safetensors")
    recorded = account(Target(ppo, None)).record
    path = "checkpoints/v00000002/checkpoint.json"
    ppo.objects.put(path, ppo.objects.read(path).replace(b'"version":2', b'"version":3'))

    record = account(Target(ppo, None)).record

    assert (len(recorded.checkpoint.files), recorded.problems) == (1, ())
    assert record.checkpoint is None
    assert path in record.problems[0]


def test_as_text(ppo):
    lines = list(account_lines(account(Target(ppo, None))))

    assert lines[1] == "└─ policy: version 2 of sft: SFT on answers.jsonl (fingerprint sft-rows-are)"
    assert "  code        git abcdefabcdef, with changes that were not committed" in lines
    assert "  user code   rewards.py sha256 000000000000" in lines
    assert "    from rollout of iteration 1 on: helper.py is new; rewards.py was altered" in lines
    assert "  iteration 1, prompts 0:1 to 0:2" in lines
    assert any(re.fullmatch(r" +rollout +sha256 \w{12}, 1 shard, 4 rows, 32 tokens", line) for line in lines)
    assert "      version 2   weights ppo-weights-" in lines
    assert any(line.startswith(f"sft, version 2: {ppo.root}/sft") for line in lines)


def test_a_long_run_is_summarised(ppo, sft, monkeypatch):
    monkeypatch.setattr("rlhf_core.lineage.account_text.SHOWN", 0)

    lines = list(account_lines(account(Target(sft, None))))

    assert "  … 3 more iterations, all of them with --json" in lines
    assert not any(line.startswith("  iteration") for line in lines)


def test_a_checkpoint_that_was_rotated_away_has_its_way_all_the_same(ppo):
    CheckpointStore(ppo).delete(1)

    lines = list(account_lines(account(Target(ppo, 1))))

    assert "  checkpoint  none of version 1 is kept" in lines
    assert "  iteration 0, prompts 0:0 to 0:1" in lines


def test_links_that_hold_and_links_that_broke(ppo, sft, tmp_path):
    origin = account(Target(ppo, None)).origin
    assert broken_links(ppo, origin) == []

    CheckpointStore(sft).delete(2)
    (gone,) = broken_links(ppo, origin)
    other = tmp_path / "other" / "hf"
    other.mkdir(parents=True)
    (other / "model.safetensors").write_bytes(b"another")
    files = CheckpointStore(sft).add_files(2, other.parent)
    CheckpointStore(sft).commit(2, {}, files)
    (altered,) = broken_links(ppo, origin)

    assert gone.startswith("policy of ppo: run:sft@2 (")
    assert gone.endswith("checkpoint.json is missing")
    assert altered.endswith("it holds another model than when it was used")


# --- as a picture


def test_boxes_and_arrows(ppo, sft):
    graph = graph_of(account(Target(ppo, None)))

    labels = {(graph.boxes[a].lines[0], graph.boxes[b].lines[0]): label for (a, b), label in graph.arrows.items()}
    assert labels == {
        ("builtin:tiny", "run sft"): "policy",
        ("answers.jsonl", "run sft"): "data",
        ("run sft", "sft v00000002"): "",
        ("sft v00000002", "run ppo"): "policy",
        ("prompts.jsonl", "run ppo"): "data",
        ("rewards.py", "run ppo"): "code",
        ("helper.py", "run ppo"): "code",
        ("run ppo", "ppo v00000002"): "",
    }
    of_code = [box.lines for box in graph.boxes.values() if box.lines[0] == "rewards.py"]
    assert of_code == [("rewards.py", "sha256 000000000000"), ("rewards.py", "sha256 111111111111")]


def test_graphviz_text_is_quoted(ppo):
    graph = graph_of(account(Target(ppo, None)))
    key = next(iter(graph.boxes))
    graph.boxes[key] = type(graph.boxes[key])("run", ('a "name" \\ with $ and é',))

    text = dot(graph)

    assert text.startswith("digraph lineage {")
    assert 'label="a \\"name\\" \\\\ with $ and é\\l"' in text
    assert text.count("->") == len(graph.arrows)


def test_pictures(ppo, tmp_path):
    found = account(Target(ppo, None))
    for name in ("way.svg", "way.png", "way.dot"):
        draw_graph(found, tmp_path / name)

    size = [
        float(ElementTree.parse(tmp_path / "way.svg").getroot().get(side).removesuffix("pt"))
        for side in ("width", "height")
    ]
    assert size[0] > size[1] > 100
    assert (tmp_path / "way.png").read_bytes().startswith(b"\x89PNG")
    assert "run ppo" in (tmp_path / "way.dot").read_text()


@pytest.mark.parametrize(
    ("name", "problem"), [("way.jpg", r"end in \.dot, \.png, \.svg"), ("none/way.svg", "there is no folder .*none")]
)
def test_pictures_that_cannot_be_drawn(ppo, tmp_path, name, problem):
    with pytest.raises(ConfigError, match=problem):
        draw_graph(account(Target(ppo, None)), tmp_path / name)


# --- what is asked for


def test_names_of_runs_and_versions(ppo):
    ppo.set_pointer("best", {"version": 1, "value": 1.0, "key": "k"})
    root = ppo.root
    asked = {
        "ppo": None,
        "run:ppo@2": 2,
        "ppo@1": 1,
        "ppo@0": 0,
        "ppo@latest": 2,
        "ppo@best": 1,
        "ppo-v00000002": 2,
        f"{root}/ppo": None,
        f"run:{root}/ppo@1": 1,
        f"{root}/ppo/checkpoints/v00000001": 1,
        f"{root}/ppo/checkpoints/v00000001/hf": 1,
        f"{root.removeprefix('file://')}/ppo/": None,
    }

    found = {name: find_target(name, root) for name in asked}

    assert {name: target.version for name, target in found.items()} == asked
    assert {target.store.url for target in found.values()} == {ppo.url}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none", "no run at .*/none"),
        ("none-v00000001", "no run at .*/none: "),
        ("ppo@3", "has no version 3: its log goes up to version 2"),
        ("ppo@best", "has no best checkpoint"),
        ("sft@first", "no run at|cannot name a folder"),
    ],
)
def test_names_of_nothing(ppo, name, problem):
    with pytest.raises(ConfigError, match=problem):
        find_target(name, ppo.root)


def test_a_run_that_has_done_nothing_yet(ppo, tmp_path):
    store = ppo.neighbour("new", None)
    body = {**ppo.read_run(), "run_id": "new", "models": {}}
    store.write_run(body)

    record = run_record(store, body)

    assert (record.version, record.iterations, record.checkpoint) == (0, (), None)
    assert list(account_lines(account(Target(store, None))))
